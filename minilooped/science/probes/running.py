"""What every probe starts from: a fresh model with random tokens, and hooks that are taken off again."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...model import LoopedConfig, LoopedGPT, MoE, Router, evaluating


def fresh(config: LoopedConfig, seed: int, shape: tuple[int, int]) -> tuple[LoopedGPT, Tensor]:
    """An untrained model, and random tokens (B, T). They depend on `seed` alone; torch's own generator stays put."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's, where both are drawn
        return LoopedGPT(config), torch.randint(config.vocab_size, shape)


def beside(model: LoopedGPT, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors on the device of the model, so that a reader need not know where it was trained."""
    return tuple(tensor.to(model.wte.weight.device) for tensor in tensors)


def routers(model: LoopedGPT) -> list[Router]:
    """The routers of a model with experts, one per layer. ``ValueError`` for a dense model."""
    experts = [block.mlp for block in model.blocks if isinstance(block.mlp, MoE)]
    if not experts:
        raise ValueError("this looks at routers, and a dense model has none: set n_expert > 0")
    return [moe.router for moe in experts]


@contextmanager
def watched(
    model: LoopedGPT, modules: Iterable[nn.Module] = (), hook: Callable[..., None] = lambda *_: None
) -> Iterator[None]:
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
