"""Exercises of chapter 3."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...model import LoopedConfig, LoopedGPT
from ...science import probes, toy
from .comparing import _small_model, compare, exercise, passed


@exercise
def visit_norms(answer: Callable[[LoopedGPT, Tensor], Tensor]) -> None:
    """Exercise: the RMS of the stream after every visit."""
    name = "visit_norms"
    for n_layer, n_loop in ((1, 3), (3, 1), (2, 4)):
        model = _small_model(n_loop, seed=n_layer, n_layer=n_layer, rule="none")
        idx = torch.randint(11, (2, 5))
        label = f"{name} of {n_layer} blocks x {n_loop} loops"
        with torch.no_grad():
            got = answer(model, idx)
        if left := sum(len(module._forward_hooks) for module in model.modules()):
            raise AssertionError(f"{label}: hooks are left on the model, {left} of them; remove() each handle")
        if not compare(label, got, probes.visits(model, idx).stream):
            return
    passed(name)


@exercise
def mean_loop_cosine(answer: Callable[[list[Tensor]], float]) -> None:
    """Exercise: the mean cosine between the increments of different loops."""
    name = "mean_loop_cosine"
    for n_loop, drift in ((2, 0.0), (4, 1.0), (7, 0.5)):
        torch.default_generator.manual_seed(n_loop)
        heading = torch.randn(2, 5, 8)
        steps = [drift * heading + torch.randn(2, 5, 8) for _ in range(n_loop)]
        states = list(torch.stack([torch.randn(2, 5, 8), *steps]).cumsum(0))  # N + 1 streams (B, T, C)
        cosines = probes.cosine_matrix(steps)  # (N, N)
        expected = (cosines.sum() - cosines.trace()).item() / (n_loop * (n_loop - 1))
        if not compare(f"{name} of {n_loop} loops", answer(states), expected, 1e-4):
            return
    passed(name)


@exercise
def striped_length(answer: Callable[[int, int, float], float]) -> None:
    """Exercise: the squared length of a sum in which only visits of the same block agree."""
    name = "striped_length"
    for L, N, cosine in ((1, 64, 0.7), (64, 1, 0.7), (4, 16, 1.0), (3, 5, 0.2)):
        block = torch.arange(L * N) % L  # which block each visit is of
        products = cosine * (block[:, None] == block).double()  # (L * N, L * N)
        expected = products.fill_diagonal_(1.0).sum().item()
        if not compare(f"{name} of {L} blocks x {N} loops, cosine {cosine}", answer(L, N, cosine), expected):
            return
    passed(name)


@exercise
def hide_the_growth(answer: Callable[[], dict[str, Any]]) -> None:
    """Exercise: changes of the configuration under which an unscaled loop looks flat."""
    name = "hide_the_growth"
    n_loops, fixed = (8, 16, 32), ("rule", "n_layer", "n_loop")
    changes = answer()
    if changes is None:
        compare(f"{name} of rule 'none'", None, None)
        return
    if not isinstance(changes, dict):
        raise AssertionError(f"{name}: expected a dict of fields of LoopedConfig, got {type(changes).__name__}")
    if held := [field for field in fixed if field in changes]:
        raise AssertionError(f"{name}: leave {', '.join(held)} as it is; anything else may change")
    shape = dict(vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=32, init_std=32**-0.5, embed_norm=True)
    try:
        config = LoopedConfig(**(shape | changes))
        growth = probes.norm_growth(config, ("none",), n_loops)["none"]
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{name}: {error}") from error
    slope = toy.fit_exponent(n_loops, torch.tensor([growth, growth])).slope
    if not slope < 0.3:
        at = ", ".join(f"{value:.3g}" for value in growth)
        raise AssertionError(f"{name}: R at {n_loops} loops is {at}, a slope of {slope:.2f}; get it below 0.3")
    passed(name)
