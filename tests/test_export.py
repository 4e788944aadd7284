"""Folders of transformers: what is exported gives the run's logits there, what is imported gives GPT-2's here."""

import json
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import LOOM_PARTS, build, tiny, tokens
from safetensors.torch import load_file, save_file
from test_model_gpt2 import randomised
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig

from minilooped.cli import main
from minilooped.data import BPETokenizer, CharTokenizer, Tokenizer, embedded
from minilooped.engine.checkpoint import load_model, write_config
from minilooped.model import RULES, LoopedConfig, LoopedGPT, Row
from minilooped.tools.export import GPT2, _refuse_own_rule, export_hf, hf_tokenizer, import_gpt2, is_gpt2

LOOPED = {
    "dense": tiny(),
    "loom": tiny(rule="loom", n_loop=4, tie_embeddings=False, gate="sigmoid", **LOOM_PARTS),
    "learned positions": tiny(**GPT2 | dict(n_loop=2)),
    "rezero": tiny(rule="rezero"),
    "layernorm_scaling": tiny(rule="layernorm_scaling", qk_norm=True),
}


@pytest.fixture(autouse=True, scope="module")
def offline(tmp_path_factory):
    """No connection to anywhere, and a folder of its own for the code that transformers copies before it runs it."""

    def refuse(*_):
        raise AssertionError("a connection was asked for")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(socket.socket, "connect", refuse)
        yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]  # another folder's turn comes, which the package of this name would not look into


def run_of(folder: Path, config: LoopedConfig, tokenizer: Tokenizer | None = None) -> tuple[Path, LoopedGPT]:
    """A run with random weights, buffers included, and its model."""
    model = build(config, dtype=torch.float32, shaken=True).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("router.bias"):
            buffer.normal_()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    tokenizer = tokenizer or CharTokenizer("abcdefghij\n")
    write_config(folder, {"model": asdict(config), "train": {}, "tokenizer": tokenizer.spec()})
    return folder, model


def load(folder: Path, **options) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def logits(model: torch.nn.Module, idx: Tensor, **options) -> Tensor:
    out = model(idx, **options)
    return out[0] if isinstance(out, tuple) else out.logits


# -- export: looped models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPED)
def test_a_looped_model_gives_the_runs_logits_at_every_number_of_loops(tmp_path, name):
    run, ours = run_of(tmp_path / "run", LOOPED[name])
    folder, idx = export_hf(run), tokens(LOOPED[name])
    theirs = load(folder, trust_remote_code=True)
    assert type(theirs.model).__module__.startswith("transformers_modules."), "the exported code, not ours"
    assert torch.equal(logits(theirs, idx), logits(ours, idx))
    assert torch.equal(logits(theirs, idx[:, :5], n_loop=1), logits(ours, idx[:, :5], n_loop=1))
    assert theirs.num_parameters() == ours.num_params()

    deeper = load(folder, trust_remote_code=True, n_loop=6)
    assert torch.equal(logits(deeper, idx), logits(ours, idx, n_loop=6))
    deeper.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again", trust_remote_code=True), idx), logits(ours, idx, n_loop=6))


@pytest.mark.parametrize("name", ["dense", "loom"])
def test_generate_writes_what_ours_writes_also_past_the_window(tmp_path, name):
    run, ours = run_of(tmp_path / "run", LOOPED[name])
    theirs, idx = load(export_hf(run), trust_remote_code=True), tokens(LOOPED[name], length=4)
    assert theirs.generation_config.use_cache is False
    for options in ({}, {"n_loop": 1}):
        expected = ours.generate(idx, 16, temperature=0, **options)
        assert torch.equal(theirs.generate(idx, max_new_tokens=16, do_sample=False, **options), expected)
    written = theirs.generate(idx, max_new_tokens=16, do_sample=False, use_cache=True)
    assert torch.equal(written, ours.generate(idx, 16, temperature=0)), "a cache that is asked for does no harm"


def test_labels_are_those_of_the_same_positions_as_everywhere_in_transformers(tmp_path):
    run, ours = run_of(tmp_path / "run", LOOPED["dense"])
    theirs, idx = load(export_hf(run), trust_remote_code=True), tokens(LOOPED["dense"])
    labels = idx.clone()
    labels[:, :3] = -100
    expected = ours(idx[:, :-1], labels[:, 1:])[1].item()
    assert theirs(idx, labels=labels).loss.item() == pytest.approx(expected, rel=1e-6)
    assert theirs(idx).loss is None


def test_padding_may_follow_a_text_but_not_precede_it(tmp_path):
    run, ours = run_of(tmp_path / "run", LOOPED["dense"])
    theirs, idx = load(export_hf(run), trust_remote_code=True), tokens(LOOPED["dense"])
    mask = torch.ones_like(idx)
    mask[1, 8:] = 0
    torch.testing.assert_close(logits(theirs, idx, attention_mask=mask)[1, :8], logits(ours, idx[1:, :8])[0])
    with pytest.raises(ValueError, match="cannot skip padding in front of a token"):
        theirs(idx, attention_mask=mask.flip(1))
    with pytest.raises(ValueError, match="cannot skip padding in front of a token"):
        theirs.generate(idx[:, :9], attention_mask=mask[:, :9], max_new_tokens=2)


# -- export: GPT-2 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rule": "inverse"},
        {"rule": "sqrt"},
        {"rule": "factored", "l_ref": 2.0},
        {"reinject": True},
        {"n_inner": 24},
    ],
)
def test_a_model_that_is_gpt2_needs_no_code(tmp_path, changes):
    tokenizer = BPETokenizer("gpt2")
    config = tiny(**GPT2 | dict(rule="none", vocab_size=tokenizer.vocab_size) | changes)
    run, ours = run_of(tmp_path / "run", config, tokenizer)
    folder, idx = export_hf(run), tokens(config)
    theirs = load(folder)
    assert is_gpt2(config) and type(theirs) is GPT2LMHeadModel and not list(folder.glob("*.py"))
    torch.testing.assert_close(logits(theirs, idx), logits(ours, idx), rtol=1e-5, atol=1e-5)
    written = ours.generate(idx[:, :4], 8, temperature=0)
    assert torch.equal(theirs.generate(idx[:, :4], max_new_tokens=8, do_sample=False), written)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_loop": 2},
        {"mlp": "relu2"},
        {"norm": "rms"},
        {"pos": "rope"},
        {"bias": False},
        {"tie_embeddings": False},
        {"qk_norm": True},
        {"embed_norm": True},
        {"loop_residual": 0.0},
        {"loop_end_norm": True},
        {"n_expert": 4},
        {"rule": "rezero"},
        {"rule": "deepnorm"},
        {"rule": "deeploop"},
        {"rule": "layernorm_scaling"},
        {"rule": "factored"},
        {"rule": "loom", "embed_norm": False},
    ],
)
def test_a_model_that_differs_from_gpt2_in_anything_is_not_gpt2(changes):
    assert not is_gpt2(tiny(**GPT2 | dict(rule="none") | changes))


def test_a_gpt2_of_characters_takes_its_code_with_it(tmp_path):
    """It has to read the token that its tokenizer has for tools, and GPT2LMHeadModel could not."""
    config = tiny(**GPT2 | dict(rule="none"))
    run, ours = run_of(tmp_path / "run", config)
    theirs, idx = load(export_hf(run), trust_remote_code=True), tokens(config)
    assert is_gpt2(config) and torch.equal(logits(theirs, idx), logits(ours, idx))


# -- export: the tokenizer ---------------------------------------------------------------------------------------------

TEXTS = ["Hello world", " it's  5 o'clock\n\n\tI'll  say: naïve — 日本語 🙂!?", "x" * 50 + "   ", "12 a1\r\n \u00a0é"]


def test_the_tokenizer_of_characters_gives_our_ids(tmp_path):
    text = "".join(TEXTS)
    ours = CharTokenizer(text)
    run, _ = run_of(tmp_path / "run", tiny(vocab_size=ours.vocab_size), ours)
    theirs = AutoTokenizer.from_pretrained(export_hf(run), trust_remote_code=True)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text).tolist() and theirs.decode(ours.encode(text)) == text
        assert theirs.decode(ours.encode(text), skip_special_tokens=True) == text
    assert theirs.vocab_size == ours.vocab_size and theirs.model_max_length == 12
    with pytest.raises(Exception, match="UNK"):
        theirs("Z")


def test_the_tokenizer_of_gpt2_gives_our_ids_and_ends_a_text(tmp_path):
    ours = BPETokenizer("gpt2")
    run, model = run_of(tmp_path / "run", tiny(vocab_size=ours.vocab_size), ours)
    folder = export_hf(run)
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    for text in (*TEXTS, embedded("shakespeare.txt").read_text(encoding="utf-8")[:20_000]):
        assert theirs(text)["input_ids"] == ours.encode(text).tolist() and theirs.decode(ours.encode(text)) == text
    assert len(theirs) == ours.vocab_size and theirs.eos_token_id == 50256
    assert load(folder, trust_remote_code=True).generation_config.eos_token_id == 50256


def test_another_encoding_is_left_out_and_that_is_said(tmp_path, capsys, monkeypatch):
    assert hf_tokenizer(SimpleNamespace(name="cl100k_base"), 12) is None
    run, _ = run_of(tmp_path / "run", LOOPED["dense"])
    monkeypatch.setattr("minilooped.tools.export.hf_tokenizer", lambda *_: None)
    assert main(["export", str(run)]) == 0
    assert "It has no tokenizer" in capsys.readouterr().out and not list(run.glob("hf/tokenizer*"))


# -- export: the command -----------------------------------------------------------------------------------------------


def test_export_prints_how_to_load_the_folder(tmp_path, capsys):
    run, ours = run_of(tmp_path / "run", LOOPED["dense"])
    assert main(["export", str(run), "--to", "hf", "--out", str(tmp_path / "new/folder")]) == 0
    _, *commands = capsys.readouterr().out.splitlines()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["folder"]
    loaded = {"transformers": sys.modules["transformers"]}
    exec("\n".join(map(str.strip, commands)), loaded)
    assert torch.equal(logits(loaded["model"].eval(), tokens(ours.config)), logits(ours, tokens(ours.config)))
    assert loaded["tokenizer"]("ba")["input_ids"] == [2, 1]


def test_what_is_there_is_not_overwritten(tmp_path, capsys):
    run, _ = run_of(tmp_path / "run", LOOPED["dense"])
    (run / "hf").mkdir()
    (run / "hf/kept").touch()
    assert main(["export", str(run)]) == 1
    assert "hf exists: give another folder with --out, or remove it" in capsys.readouterr().err
    assert [path.name for path in (run / "hf").iterdir()] == ["kept"]


def test_a_users_folder_beside_the_export_stays(tmp_path):
    """Whatever it is called: here as an earlier version called its own."""
    run, _ = run_of(tmp_path / "run", LOOPED["dense"])
    (tmp_path / "hf.tmp").mkdir()
    (tmp_path / "hf.tmp/thesis").write_text("three years", encoding="utf-8")
    export_hf(run, tmp_path / "hf")
    assert (tmp_path / "hf.tmp/thesis").read_text(encoding="utf-8") == "three years"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "hf.tmp", "run"]


def test_an_export_that_fails_leaves_nothing_and_the_next_one_works(tmp_path, monkeypatch):
    run, _ = run_of(tmp_path / "run", LOOPED["dense"])

    def full(tokenizer, folder, **_):
        (Path(folder) / "tokenizer.json").touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
        with pytest.raises(OSError, match=r"out could not be written \(No space left on device\)"):
            export_hf(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert export_hf(run, tmp_path / "out") == tmp_path / "out"


def test_a_rule_of_the_readers_own_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    """The folder would have a copy of model.py, and no row of that name in it."""
    monkeypatch.setitem(RULES, "mine", lambda c: Row(branch=0.5))
    run, _ = run_of(tmp_path / "run", tiny(rule="mine"))
    assert main(["export", str(run), "--out", str(tmp_path / "new/hf")]) == 1
    assert "rule='mine' was added to RULES" in (err := capsys.readouterr().err) and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_of_the_model_file_are_not_taken_for_the_readers_own(rule):
    _refuse_own_rule(tiny(rule=rule))


@pytest.mark.parametrize("command", ["export run", "import gpt2 run"])
def test_without_transformers_the_way_out_is_named(tmp_path, capsys, monkeypatch, command):
    run_of(tmp_path / "run", LOOPED["dense"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(command.split()) == 1
    assert capsys.readouterr().err.endswith("this needs transformers: pip install 'minilooped[hf]'\n")


# -- import ------------------------------------------------------------------------------------------------------------


def gpt2(**changes) -> GPT2LMHeadModel:
    sizes = dict(vocab_size=50257, n_positions=12, n_layer=2, n_head=2, n_embd=8)
    return randomised(GPT2LMHeadModel(GPT2Config(**sizes | changes))).float()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A GPT-2 as transformers saves it, and a working directory without runs."""
    monkeypatch.chdir(tmp_path)
    gpt2().save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_an_imported_gpt2_gives_gpt2s_logits_samples_and_goes_back_as_it_was(folder, capsys):
    theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
    assert main(["import", "gpt2", str(folder), "--name", "small"]) == 0
    assert "sample runs/small" in capsys.readouterr().out
    ours, tokenizer = load_model("small")
    idx = tokens(ours.config)
    torch.testing.assert_close(logits(ours, idx), logits(theirs, idx), rtol=1e-5, atol=1e-5)
    assert main("sample small --prompt Hello --max-new-tokens 3 --temperature 0".split()) == 0
    expected = theirs.generate(torch.tensor([[15496]]), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert capsys.readouterr().out == tokenizer.decode(expected[0]) + "\n"

    back = load_file(export_hf("small") / "model.safetensors")
    before = load_file(folder / "model.safetensors")
    assert back.keys() == before.keys() and all(torch.equal(back[name], before[name]) for name in before)
    assert import_gpt2(Path("runs/small/hf"), "small") == Path("runs/small-2"), "with the tokenizer that we export"


def test_an_imported_run_cannot_be_resumed(folder, capsys):
    import_gpt2(folder)
    assert main("train --resume gpt2 --max-steps 3".split()) == 1
    assert "runs/gpt2 has no checkpoint that can be read" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["as OpenAI's is stored", "in several files", "in half precision"])
def test_other_forms_of_the_weights_are_read(folder, form):
    theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
    weights = folder / "model.safetensors"
    if form == "as OpenAI's is stored":  # without a prefix, and with the causal masks
        stored = {name.removeprefix("transformer."): w for name, w in load_file(weights).items()}
        save_file(stored | {f"h.{i}.attn.bias": torch.ones(1, 1, 12, 12).tril() for i in range(2)}, weights)
    elif form == "in several files":
        weights.unlink()
        theirs.save_pretrained(folder, max_shard_size="100KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    else:
        theirs.half().save_pretrained(folder)
        theirs.float()
    ours, _ = load_model(import_gpt2(folder))
    assert ours.wte.weight.dtype == torch.float32
    idx = tokens(ours.config)
    torch.testing.assert_close(logits(ours, idx), logits(theirs, idx), rtol=1e-5, atol=1e-5)


def spoil(folder: Path, how: str):
    weights = folder / "model.safetensors"
    if how == "llama":
        LlamaConfig().save_pretrained(folder)
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "config":
        (folder / "config.json").write_text("[]", encoding="utf-8")
    elif how == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "cut short":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif how == "incomplete":
        save_file({n: w for n, w in load_file(weights).items() if "h.1.mlp.c_fc.bias" not in n}, weights)
    elif how == "other sizes":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"n_embd": 16}), encoding="utf-8")
    elif how == "tokenizer":
        (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    elif how == "vocabulary":
        core = hf_tokenizer(BPETokenizer("gpt2"), 12)
        vocabulary = core.get_vocab()
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        saved = json.loads(core.backend_tokenizer.to_str())
        saved["model"]["vocab"] = vocabulary
        core.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    else:
        name, value = how.split("=")
        gpt2(**{name: json.loads(value)}).save_pretrained(folder)


@pytest.mark.parametrize(
    "how, complaint",
    [
        ("no config", "no config.json in theirs: give the folder of a GPT-2 that transformers saved"),
        ("config", "theirs/config.json is not the config of a model"),
        ("llama", "theirs holds a model of type 'llama', not 'gpt2'"),
        ("pickled", "no .safetensors in theirs: save the model again with save_pretrained"),
        ("cut short", "the model in theirs cannot be read (SafetensorError"),
        ("incomplete", "the model in theirs lacks transformer.h.1.mlp.c_fc.bias: get the folder again"),
        ("other sizes", "the model in theirs cannot be read (RuntimeError"),
        ("vocabulary", "theirs has another vocabulary than GPT-2's"),
        ("tokenizer", "the tokenizer in theirs cannot be read"),
        ("vocab_size=50304", "theirs has another vocabulary than GPT-2's"),
        ('activation_function="relu"', "theirs holds a GPT-2 with options of its own: activation_function is 'relu'"),
        ("layer_norm_epsilon=1e-6", "layer_norm_epsilon is 1e-06, but only GPT-2's 1e-05 can be taken over"),
        ("scale_attn_by_inverse_layer_idx=true", "scale_attn_by_inverse_layer_idx is True"),
        ("scale_attn_weights=false", "scale_attn_weights is False"),
        ("add_cross_attention=true", "add_cross_attention is True"),
        ("tie_word_embeddings=false", "tie_word_embeddings is False"),
    ],
)
def test_what_is_not_gpt2_is_refused_in_one_line(folder, capsys, how, complaint):
    spoil(folder, how)
    assert main(["import", "gpt2", "theirs"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("minilooped import: ")]
    assert complaint in line and not Path("runs").exists()
