"""What every probe starts from: a fresh model with random tokens, and hooks that are taken off again."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from ...model import Block, LoopedConfig, LoopedGPT, MoE, Router, evaluating


def fresh(config: LoopedConfig, seed: int, shape: tuple[int, int]) -> tuple[LoopedGPT, Tensor]:
    """An untrained model, and random tokens (B, T). They depend on `seed` alone; torch's own generator stays put."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's, where both are drawn
        return LoopedGPT(config), torch.randint(config.vocab_size, shape)


def beside(model: LoopedGPT, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors on the device of the model, so that a reader need not know where it was trained."""
    return tuple(tensor.to(model.wte.weight.device) for tensor in tensors)


def blocks_of(model: LoopedGPT) -> list[Block]:
    """The L blocks."""
    return [cast(Block, block) for block in model.blocks]


def routers_of(model: LoopedGPT) -> list[Router]:
    """The routers of the blocks, L of them. A dense model has none."""
    return [block.mlp.router for block in blocks_of(model) if isinstance(block.mlp, MoE)]


def no_hook(module: nn.Module, inputs: tuple, outputs: object) -> None:
    """Looks at nothing."""


@contextmanager
def watched(model: LoopedGPT, modules: Iterable[nn.Module] = (), hook: Callable[..., None] = no_hook) -> Iterator[None]:
    """Eval mode, and a forward hook on each of the modules, for as long as the context lasts.

    A module that serves all loops calls its hook N times: append to a list, for a dict by name keeps the last visit.
    """
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        with evaluating(model):
            yield
    finally:
        for handle in handles:
            handle.remove()
