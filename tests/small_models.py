"""Models that the tests of the probes look at."""

import torch
from helpers import LOOM_PARTS, build, tiny, tokens

from minilooped.model import LoopedConfig, LoopedGPT


def moe(**changes) -> LoopedGPT:
    torch.manual_seed(0)
    shape = dict(vocab_size=11, block_size=8, n_layer=2, n_loop=3, n_head=2, n_embd=16, init_std=0.25)
    experts = dict(n_expert=5, top_k=2, n_inner=8, router="per_loop", router_init="independent")
    return LoopedGPT(LoopedConfig(**(shape | experts | changes)))


def looped(segment: int | None = None, n_loop: int = 5, **changes) -> tuple[LoopedGPT, torch.Tensor, torch.Tensor]:
    """Every part of LOOM, with weights that no 0 or 1 hides, and a batch whose targets all count."""
    config = tiny(**(LOOM_PARTS | dict(n_loop=n_loop, segment=segment) | changes))
    return build(config, shaken=True), tokens(config, seed=1), tokens(config, seed=2)
