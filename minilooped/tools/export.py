"""To and from the folders of Hugging Face's transformers, which has to be installed: pip install 'minilooped[hf]'.

    export_hf("shakespeare")            # runs/shakespeare/hf: config, safetensors, tokenizer, code
    import_gpt2("models/gpt2")          # runs/gpt2, for `minilooped sample gpt2`
    from_gpt2(theirs), to_gpt2(ours)    # the models themselves

A looped model takes code of its own with it: model.py, and modeling_minilooped.py around it. A model that makes GPT-2's
choices, loops once and reads GPT-2's tokens is GPT-2, and is written as such.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors.torch import save_file
from torch import Tensor

from ..data import BPETokenizer, CharTokenizer, Tokenizer, embedded
from ..engine.checkpoint import find_run, load_model, new_run, write_config
from ..files import flush_to_disk, in_a_line, make_folder, replacing, scratch, writing
from ..model import RULES, LoopedConfig, LoopedGPT
from ..train import TrainConfig

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError("this needs transformers: pip install 'minilooped[hf]'") from error


# ----------------------------------------------------------------------------------------------------------------------
# GPT-2's choices and names

GPT2: dict[str, Any] = dict(n_loop=1, mlp="gelu", norm="layer", pos="learned", bias=True, tie_embeddings=True)

# Ours and theirs, within a block.
GPT2_BLOCK = {
    "attn_pre_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp_pre_norm": "ln_2",
    "mlp.w_in": "mlp.c_fc",
    "mlp.w_out": "mlp.c_proj",
}


def is_gpt2(config: LoopedConfig) -> bool:
    """Whether a model of this config computes what GPT-2 does. At one loop some rules scale nothing: they count too."""
    row = config.row
    extras = (
        config.qk_norm,
        config.normalizes_embedding,
        config.n_expert,
        config.loop_end_norm,
        config.loop_residual is not None,
        row.learn_branch,
    )
    return (
        all(getattr(config, name) == value for name, value in GPT2.items())
        and (row.skip, row.branch, row.in_gain, row.norm) == (1.0, 1.0, 1.0, "pre")
        and not any(extras)
    )


def gpt2_names(n_layer: int) -> dict[str, str]:
    """Our name of every parameter of GPT-2 -> its name in GPT2LMHeadModel."""
    parts = {"final_norm": "transformer.ln_f"}
    for i in range(n_layer):
        parts |= {f"blocks.{i}.{ours}": f"transformer.h.{i}.{theirs}" for ours, theirs in GPT2_BLOCK.items()}
    names = {"wte.weight": "transformer.wte.weight", "wpe.weight": "transformer.wpe.weight"}
    return names | {f"{ours}.{kind}": f"{parts[ours]}.{kind}" for ours in parts for kind in ("weight", "bias")}


def _turn(name: str, weight: Tensor) -> Tensor:
    """GPT-2 stores the matrices of its blocks (in, out), nn.Linear (out, in); this turns either into the other."""
    return weight.T.contiguous() if name.startswith("blocks.") and weight.dim() == 2 else weight


def from_gpt2(theirs: "GPT2LMHeadModel") -> LoopedGPT:
    """GPT-2 as a LoopedGPT of one loop: the same logits, no dropout. ValueError for options that ours does not have."""
    c = theirs.config
    needed = dict(
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        layer_norm_epsilon=(1e-5,),
        tie_word_embeddings=(True,),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
    )
    for name, known in needed.items():
        if getattr(c, name) not in known:
            raise ValueError(f"{name} is {getattr(c, name)!r}, but only GPT-2's {known[0]!r} can be taken over")
    sizes: dict[str, Any] = dict(
        vocab_size=c.vocab_size, block_size=c.n_positions, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd
    )
    config = LoopedConfig(rule="none", n_inner=c.n_inner, init_std=c.initializer_range, **sizes, **GPT2)
    weights = theirs.state_dict()
    ours = LoopedGPT(config).to(theirs.dtype)
    ours.load_state_dict({name: _turn(name, weights[of]) for name, of in gpt2_names(c.n_layer).items()})
    return ours.train(theirs.training)


def to_gpt2(ours: LoopedGPT) -> "GPT2LMHeadModel":
    """A model for which `is_gpt2` holds, as transformers' GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = ours.config
    if not is_gpt2(c):
        raise ValueError("this model is not GPT-2: see is_gpt2")
    config = GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_embd=c.n_embd,
        n_inner=c.n_inner,
        initializer_range=c.init_std,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    weights = ours.state_dict()
    state = {of: _turn(name, weights[name]) for name, of in gpt2_names(c.n_layer).items()}
    theirs: Any = GPT2LMHeadModel(config)
    theirs.to(ours.wte.weight.dtype)
    theirs.load_state_dict(state | {"lm_head.weight": state["transformer.wte.weight"]})
    return theirs.train(ours.training)


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers


def gpt2_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """GPT-2's tokens, each in the spelling of one visible character per byte, with their ids; and its merges."""
    from tokenizers import pre_tokenizers

    _version, *lines = embedded("vocab.bpe").read_text(encoding="utf-8").splitlines()
    merges = [(first, second) for first, second in (line.split(" ") for line in lines)]
    # Sorted, the characters that stand for the 256 bytes are in GPT-2's order.
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}, merges


END = "<|endoftext|>"  # GPT-2's token that ends a text


def hf_tokenizer(tokenizer: Tokenizer, block_size: int) -> "PreTrainedTokenizerBase | None":
    """The tokenizer for transformers, with the same ids for every text; None for tiktoken encodings but GPT-2's.

    Tools around transformers ask for tokens that begin, end and pad a text. All three are `END` here. Characters have
    no such token, so it gets an id of its own, V. One difference: `END` within a text is this token here, and ordinary
    text in ours.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core
    from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

    if tokenizer.name == "gpt2":
        vocabulary, merges = gpt2_vocabulary()
        return GPT2Tokenizer(vocab=vocabulary, merges=cast(Any, merges), model_max_length=block_size, pad_token=END)
    if isinstance(tokenizer, CharTokenizer):
        # Without a token for the unknown, a character that is not in the vocabulary is an error, as in ours.
        core = Core(models.WordLevel({char: i for i, char in enumerate(tokenizer.chars)}))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        core.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=core,
            model_max_length=block_size,
            clean_up_tokenization_spaces=False,
            bos_token=END,
            eos_token=END,
            pad_token=END,
        )
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Export


def export_hf(run: str | Path, out: str | Path | None = None) -> Path:
    """Write a run's model as a folder that transformers loads, whole or not at all. Returns the folder.

    run: a run's path, or its name in ``runs/``; out None: ``hf`` in the run's folder. A model that is GPT-2 (see
    `is_gpt2`) becomes a GPT2LMHeadModel unless its tokens are characters. Any other model becomes a
    MiniloopedForCausalLM, which takes trust_remote_code=True to load. ValueError if the folder exists, if transformers
    is missing or if the model's rule would not go with it, FileNotFoundError if there is no such run.
    """
    _need_transformers()
    run = find_run(run)
    out = run / "hf" if out is None else Path(out)
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists: give another folder with --out, or remove it")
    model, tokenizer = load_model(run)
    plain = is_gpt2(model.config) and not isinstance(tokenizer, CharTokenizer)
    theirs = to_gpt2(model) if plain else _wrap(model, tokenizer)
    tokens = hf_tokenizer(tokenizer, model.config.block_size)
    if tokens is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(theirs.generation_config, name, getattr(tokens, name))
    make_folder(out.parent)
    with writing(out), scratch(out.parent) as folder:
        for part in (theirs, tokens):
            if part is not None:
                part.save_pretrained(folder / out.name)
        for file in (folder / out.name).iterdir():
            flush_to_disk(file)
        os.replace(folder / out.name, out)
    return out


def _wrap(model: LoopedGPT, tokenizer: Tokenizer) -> "PreTrainedModel":
    from ..modeling_minilooped import MiniloopedConfig, MiniloopedForCausalLM

    _refuse_own_rule(model.config)
    # With these marks, save_pretrained writes the code beside the weights and says in config.json where to find it.
    MiniloopedConfig.register_for_auto_class()
    MiniloopedForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    opening = int(tokenizer.encode(tokenizer.opening)[0]) if isinstance(tokenizer, CharTokenizer) else None
    wrapped = MiniloopedForCausalLM(MiniloopedConfig(looped=asdict(model.config), read_end_as=opening))
    wrapped.model.load_state_dict(model.state_dict())
    return wrapped


def _refuse_own_rule(config: LoopedConfig) -> None:
    """ValueError for a row of RULES that was not written in model.py, the file that goes with the weights."""
    if getattr(RULES[config.rule], "__module__", None) != LoopedConfig.__module__:
        raise ValueError(
            f"rule={config.rule!r} was added to RULES, or changed there, outside model.py. The exported folder has a "
            "copy of that file and could not be loaded: write the row into model.py first"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Import


def import_gpt2(path: str | Path, name: str = "gpt2", runs: str | Path = "runs") -> Path:
    """Make a run of the GPT-2 in a local Hugging Face folder, for `load_model` and `minilooped sample`.

    The run has no checkpoint, so it cannot be resumed. Returns its folder, ``runs/name`` or the next free number.
    ValueError or FileNotFoundError for a folder that does not hold a whole GPT-2 with GPT-2's own vocabulary.
    """
    _need_transformers()
    path = Path(path)
    model = _read_gpt2(path)
    _refuse_other_vocabularies(path, model.config.vocab_size)
    tokenizer = BPETokenizer("gpt2")
    run = new_run(runs, name)
    with replacing(run / "model.safetensors") as temporary:
        save_file(model.state_dict(), temporary)
    # Last, since a folder with a config.json is a run.
    training = TrainConfig(name=run.name, runs=str(runs), tokenizer="gpt2")  # no training took place: the defaults
    write_config(run, {"model": asdict(model.config), "train": asdict(training), "tokenizer": tokenizer.spec()})
    return run


def _read_gpt2(path: Path) -> LoopedGPT:
    from transformers import GPT2LMHeadModel

    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {path}: give the folder of a GPT-2 that transformers saved")
    try:
        kind = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}/config.json is not the config of a model ({error}): get the folder again") from error
    if kind != "gpt2":
        raise ValueError(f"{path} holds a model of type {kind!r}, not 'gpt2', the only type that can be taken over")
    if not any(path.glob("*.safetensors")):
        raise FileNotFoundError(
            f"no .safetensors in {path}: save the model again with save_pretrained (older .bin files can run code, so "
            "they are not read)"
        )
    try:
        read: Any = GPT2LMHeadModel.from_pretrained(
            path, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # a damaged file can make its reader fail in any way
        raise _unreadable("model", path, error) from error
    theirs, found = read
    if found["missing_keys"]:
        raise ValueError(f"the model in {path} lacks {min(found['missing_keys'])}: get the folder again")
    try:
        return from_gpt2(theirs)
    except ValueError as error:
        raise ValueError(f"{path} holds a GPT-2 with options of its own: {error}") from error


def _refuse_other_vocabularies(path: Path, vocab_size: int) -> None:
    """By the model's number of tokens, and by the tokenizer's files where there are any."""
    from transformers import AutoTokenizer

    vocabulary, _ = gpt2_vocabulary()
    same = vocab_size == len(vocabulary)
    if same and any((path / file).is_file() for file in ("tokenizer.json", "vocab.json")):
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise _unreadable("tokenizer", path, error) from error
        same = tokenizer.get_vocab() == vocabulary
    if not same:
        raise ValueError(f"{path} has another vocabulary than GPT-2's, and only that one can be taken over")


def _unreadable(part: str, path: Path, error: Exception) -> ValueError:
    return ValueError(f"the {part} in {path} cannot be read ({in_a_line(error)}): get the folder again")
