"""A whole run of the trainer: what it leaves, what it says, how fast it is."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from tiny_runs import DENSE, LOOM, TEXT, prepared, settings
from tiny_training import BOTH, tiny_batch, tiny_model

from minilooped.data import BPETokenizer, CharTokenizer, load_corpus
from minilooped.engine.checkpoint import load_model, read_config, shell_command
from minilooped.engine.log import plot_losses, read_log
from minilooped.engine.machine import attention_kernel
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.presets import PRESETS
from minilooped.train import TrainConfig, evaluate, loop_rms, sample, train


@BOTH
def test_a_run_leaves_its_files_and_says_how_to_go_on(tmp_path, capsys, model_config):
    config = settings(tmp_path, max_steps=6, eval_every=2, sample_every=3, save_every=2)
    result = train(model_config, config)
    printed = capsys.readouterr().out
    assert re.fullmatch(r"validation loss \d\.\d{3}", printed.splitlines()[-1])
    for line in (
        "device   cpu: ",
        "dtype    ",
        "threads  1",
        "step 2: validation loss about ",
        "in nats per character",
    ):
        assert line in printed
    assert f"{shell_command()} train --resume {result.run} --max-steps 12" in printed
    assert f"{shell_command()} sample {result.run} --prompt" in printed

    left = "best.safetensors config.json log.csv loss.png model.safetensors result.json step-4 step-6"
    assert sorted(path.name for path in result.run.iterdir() if path.name != ".lock") == left.split()
    assert json.loads((result.run / "result.json").read_text(encoding="utf-8"))["val_loss"] == result.val_loss
    assert result.run == tmp_path / "runs" / "tiny" and result.step == 6
    assert read_log(result.run / "log.csv") == result.history
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in result.history if row["val_loss"] is not None] == [2, 4]
    assert result.history[-1]["updates"] == 6 * (2 if model_config is LOOM else 1)
    assert result.history[-1]["tokens"] == 6 * 4 * 8
    stored = read_config(result.run)
    assert LoopedConfig(**stored["model"]) == replace(model_config, vocab_size=result.tokenizer.vocab_size)
    assert TrainConfig(**stored["train"]) == config

    model, tokenizer = load_model(result.run)
    assert tokenizer.hash == result.tokenizer.hash
    assert not model.training and not result.model.training
    x = torch.arange(8)[None]
    assert torch.equal(model(x)[0], result.model(x)[0])
    published = load_file(result.run / "model.safetensors")
    assert published.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, published[name]) for name, tensor in model.state_dict().items())


def test_the_default_run_learns(tmp_path):
    start, end = (train(DENSE, settings(tmp_path, max_steps=steps, lr=2e-2)).val_loss for steps in (1, 60))
    assert end < start - 0.5


def test_the_validation_loss_is_the_mean_over_every_token_of_the_split(tmp_path):
    result = train(DENSE, settings(tmp_path, max_steps=2))
    val = torch.from_numpy(load_corpus(tmp_path / "tokens").val.astype("int64"))
    total = count = 0
    with torch.no_grad():
        for start in range(0, len(val) - 1, 8):
            x, y = val[start : start + 8], val[start + 1 : start + 9]
            logits = result.model(x[None, : len(y)])[0][0]
            total -= logits.log_softmax(-1)[torch.arange(len(y)), y].sum().item()
            count += len(y)
    assert count == len(val) - 1
    assert result.val_loss == pytest.approx(total / count, abs=1e-5)


def test_evaluation_leaves_mode_and_random_numbers_alone(tmp_path, dropout):
    model = tiny_model(DENSE)
    before = torch.get_rng_state()
    losses = [evaluate(model, [tiny_batch(4, ignored=5)]) for _ in range(2)]
    assert losses[0] == losses[1], "no dropout"
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert evaluate(model, [tiny_batch(4)], n_loop=1) != evaluate(model, [tiny_batch(4)], n_loop=2)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_restores_the_mode_after_an_error_too(training):
    model = tiny_model(DENSE).train(training)
    x, y = tiny_batch(4)
    evaluate(model, [(x, y)]), loop_rms(model, x)
    assert model.training == model.blocks[0].training == training
    too_long = x.repeat(1, 2)
    for measure in (lambda: evaluate(model, [(x, y), (too_long, too_long)]), lambda: loop_rms(model, too_long)):
        with pytest.raises(ValueError, match="block_size"):
            measure()
        assert model.training == model.blocks[0].training == training


def test_a_sample_depends_on_its_seed_alone(tmp_path):
    result = train(DENSE, settings(tmp_path, max_steps=1))
    state = torch.get_rng_state()
    first, again = (sample(result.model, result.tokenizer, "1 times", max_new_tokens=20) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert first == again != sample(result.model, result.tokenizer, "1 times", max_new_tokens=20, seed=2)
    assert first.startswith("1 times") and len(first) == len("1 times") + 20
    with pytest.raises(ValueError, match="the prompt is empty"):
        sample(result.model, result.tokenizer, "")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_in_miniature(tmp_path, name):
    """All its choices but the sizes."""
    model, config = PRESETS[name]
    model = replace(model, n_layer=2, n_head=2, n_embd=16, block_size=8, n_inner=8)
    small = settings(tmp_path, max_steps=2, save_every=0)
    if config.tokenizer == "gpt2":
        prepared(tmp_path / "gpt2", TEXT, "gpt2")
        small = replace(small, data=str(tmp_path / "gpt2" / "tokens"))
    kept = dict(optimizer=config.optimizer, schedule=config.schedule, tokenizer=config.tokenizer)
    result = train(model, replace(small, **kept))
    assert math.isfinite(result.val_loss)
    assert result.model.config.vocab_size == (50257 if config.tokenizer == "gpt2" else result.tokenizer.vocab_size)


@pytest.mark.parametrize(
    "dtype, T, kernel",
    [
        (torch.float32, 8, "flash_attention_for_cpu kernel in float32"),
        (torch.bfloat16, 8, "plain matrix products"),
        (torch.bfloat16, 600, "flash_attention_for_cpu kernel in bfloat16"),
    ],
)
def test_the_attention_that_ran_is_named(dtype, T, kernel):
    model = tiny_model(replace(DENSE, block_size=T), torch.float32)
    autocast = partial(torch.autocast, "cpu", dtype=dtype, enabled=dtype != torch.float32)
    assert attention_kernel(model, torch.zeros(1, T, dtype=torch.int64), autocast) == kernel


def test_tokens_per_second_and_the_share_of_the_peak_are_said(tmp_path, capsys):
    result = train(DENSE, settings(tmp_path, peak_tflops=0.001))
    said = capsys.readouterr().out
    speed, share = re.search(r"speed    ([\d,]+) tokens/s, MFU ([\d.]+)% of 1 x 0.001 TFLOP/s", said).groups()
    expected = int(speed.replace(",", "")) * result.model.flops_per_token() / 1e9
    assert float(share) == pytest.approx(100 * expected, abs=0.06)
    assert "kernel   attention: " in said and "MFLOP per token" in said
    train(DENSE, settings(tmp_path, name="unknown"))
    assert "MFU" not in capsys.readouterr().out  # no peak is known for a CPU


def test_the_picture_of_a_run_shows_its_losses(tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig

    def keep(figure, *rest, **options):
        drawn.append(figure)
        save(figure, *rest, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    (tmp_path / "tiny").mkdir()
    rows = [dict(step=step, loss=loss, val_loss=val) for step, loss, val in ((10, 4.0, None), (20, 3.0, 2.75))]
    plot_losses(rows, 2.625, tmp_path / "tiny" / "loss.png")
    (ax,) = drawn[0].axes
    batches, estimates, final = ax.lines
    assert batches.get_xydata().tolist() == [[10, 4.0], [20, 3.0]] and estimates.get_xydata().tolist() == [[20, 2.75]]
    assert set(final.get_ydata()) == {2.625} and ax.get_title() == "tiny"
    assert (
        "2.625" in ax.get_legend().get_texts()[2].get_text() and (tmp_path / "tiny" / "loss.png").stat().st_size > 1000
    )


def test_a_sample_ends_with_its_document_unless_it_is_to_go_on():
    tokenizer = BPETokenizer("gpt2")
    model = LoopedGPT(LoopedConfig(vocab_size=tokenizer.vocab_size, block_size=16, n_layer=1, n_head=1, n_embd=8))
    with torch.no_grad():  # whatever was read, the end of a document is the likeliest
        model.final_norm.weight.zero_()
        model.final_norm.weight[0] = 1e3
        model.wte.weight[:, 0] = 1.0
        model.wte.weight[tokenizer.end, 0] = 2.0
    sampled = partial(sample, model, tokenizer, "Hello", max_new_tokens=8, temperature=0)
    assert sampled() == "Hello"
    assert sampled(stop_at_end=False) == "Hello" + 8 * "<|endoftext|>"


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_out_of_range_is_named(seed):
    with pytest.raises(ValueError, match="seed=.* must lie in"):
        sample(LoopedGPT(replace(DENSE, vocab_size=2)), CharTokenizer("ab"), "a", seed=seed)
