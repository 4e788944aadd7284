"""Recipes by name: a model and how to train it. Any field can be changed from the command line.

The learning rate of a recipe belongs to its tokens per step (batch_size * grad_accum * block_size). To fit a smaller
memory, lower `batch_size` and raise `grad_accum` by the same factor: that changes nothing else. Where the tokens per
step do go down, lower `lr` too.
"""

from dataclasses import replace
from typing import NamedTuple

from .model import LoopedConfig
from .train import TrainConfig


class Preset(NamedTuple):
    model: LoopedConfig  # the tokenizer sets its vocab_size
    train: TrainConfig


# -- a laptop: characters of Shakespeare, minutes on two CPU cores -----------------------------------------------------

# init_std = width^(-1/2): with GPT-2's 0.02 the branches of a model this narrow hardly speak.
LAPTOP = dict(block_size=64, n_layer=2, n_head=4, n_embd=128, qk_norm=True, init_std=128**-0.5)

# Depth 6 from two blocks. l_ref = n_layer, so that at one loop the branch would be 1.
SHAKESPEARE = Preset(
    LoopedConfig(**LAPTOP, n_loop=3, rule="factored", l_ref=2),
    TrainConfig(
        name="shakespeare",
        max_steps=2200,
        batch_size=12,
        optimizer="muon",
        lr=6e-3,
        schedule="wsd",  # no stable part: down in a line from the end of the warm-up
        warmup_steps=30,
        decay_steps=2170,
        min_lr_ratio=0.0,
        weight_decay=0.3,
        device="cpu",  # a minute or two there. A GPU is no faster with matrices this small, and its numbers are others
        threads=1,  # for the same reason
    ),
)

# LOOM with every part of it switched on: its residual scaling, re-injection, looping residual, loop-end norm, per-loop
# routers with a selection bias, a norm on the experts' output, segmented backprop with an update per segment.
LOOM_PARTS = LoopedConfig(
    rule="loom",
    tie_embeddings=False,  # the stream starts at RMS 1: a tied head would start by naming the current token
    reinject=True,
    loop_residual=0.5,
    loop_end_norm=True,
    n_expert=30,
    n_expert_shared=2,
    top_k=6,
    router="per_loop",
    gate="sigmoid",
    moe_out_norm=True,
    segment=3,
)

SHAKESPEARE_MOE = Preset(
    replace(LOOM_PARTS, **LAPTOP, n_loop=4, n_expert=8, n_expert_shared=1, top_k=2, segment=2),
    replace(SHAKESPEARE.train, name="shakespeare-moe", lr=3e-3, max_steps=800, decay_steps=770),
)

# -- one GPU: GPT-2 tokens, from `minilooped prepare fineweb-edu`, or FILE --tokenizer gpt2 ----------------------------

# GPT-2 small. A step of 491,520 tokens, as GPT-2 reproductions use. l_ref = n_layer: at N = 1 the branch is then 1.
GPT2_SMALL = Preset(
    LoopedConfig(
        n_layer=12, n_loop=1, n_head=12, n_embd=768, block_size=1024, rule="factored", l_ref=12, loss_chunk=4096
    ),
    TrainConfig(
        name="gpt2-small",
        tokenizer="gpt2",
        max_steps=20_000,
        batch_size=16,
        grad_accum=30,
        lr=6e-4,
        warmup_steps=700,
        eval_batches=20,
        sample_every=1000,
        save_every=500,
    ),
)


def _gpt2(name: str, **changes) -> Preset:
    return Preset(replace(GPT2_SMALL.model, **changes), replace(GPT2_SMALL.train, name=name))


# LOOM's smaller setting (10 blocks of width 512, 9 loops, about 10 billion tokens) with GPT-2's tokenizer and less than
# half its 1,048,576 tokens per step; the learning rate is lowered by the square root of that. 315 million parameters.
LOOM_SMALL = Preset(
    replace(LOOM_PARTS, n_layer=10, n_loop=9, n_head=8, n_embd=512, n_inner=512, block_size=1024, loss_chunk=4096),
    replace(
        GPT2_SMALL.train,
        name="loom-small",
        max_steps=20_000,
        lr=1.4e-4,
        schedule="wsd",
        warmup_steps=2000,
        decay_steps=2000,
    ),
)

PRESETS: dict[str, Preset] = {
    "shakespeare": SHAKESPEARE,
    "shakespeare-moe": SHAKESPEARE_MOE,
    "gpt2-small": GPT2_SMALL,
    "gpt2-small-loop": _gpt2("gpt2-small-loop", n_loop=3),
    "gpt2-small-deeploop": _gpt2("gpt2-small-deeploop", n_loop=3, rule="deeploop", tie_embeddings=False),
    "gpt2-small-4x3": _gpt2("gpt2-small-4x3", n_layer=4, n_loop=3),
    "loom-small": LOOM_SMALL,
}
