"""Exercises of chapter 6."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...model import LoopedConfig
from ...science import toy
from .comparing import compare, exercise, passed


def _sublayer(W: Tensor) -> Callable[[Tensor], Tensor]:
    """A sublayer (B, C) -> (B, C), whose matrix is (C, C)."""

    def f(x: Tensor) -> Tensor:
        return 2 * torch.tanh(x @ W)

    return f


@exercise
def deeploop_visit(answer: Callable[[Tensor, Callable[[Tensor], Tensor], float], Tensor]) -> None:
    """Exercise: one sublayer visit with its multiplier and its two norms in place."""
    name = "deeploop_visit"
    for d, alpha in ((4, 2.0), (16, 8.0), (8, 1.0)):
        x = 3 * torch.randn(5, d, dtype=torch.float64)
        f = _sublayer(torch.randn(d, d, dtype=torch.float64))
        expected = toy.normalize(alpha * x + f(toy.normalize(x)))
        if not compare(f"{name} at d={d}, alpha={alpha:g}", answer(x, f, alpha), expected):
            return
    passed(name)


@exercise
def multipliers(answer: Callable[[int, int, float], Tensor]) -> None:
    """Exercise: alpha and beta of an exponent for K blocks in R rounds."""
    name = "multipliers"
    for rule, p in (("deepnorm", 0.25), ("deeploop", 0.5)):
        for K, R in ((1, 1), (2, 8), (12, 7)):
            row = LoopedConfig(rule=rule, n_layer=K, n_loop=R).row
            expected = torch.tensor([row.skip, row.init_gain])
            if not compare(f"{name} at K={K}, R={R}, p={p:g}", answer(K, R, p), expected):
                return
    passed(name)


@exercise
def by_visit(answer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Exercise: the gradient of a shared matrix, one visit at a time, from what the visits heard and were told."""
    name = "by_visit"
    for R, T, inner, outer in ((1, 2, 3, 4), (4, 5, 2, 3), (3, 4, 4, 4)):
        W = torch.randn(outer, inner, dtype=torch.float64)
        copies = W.repeat(R, 1, 1).requires_grad_()  # (R, O, I)
        x, g = torch.randn(R, T, inner, dtype=torch.float64), torch.randn(R, T, outer, dtype=torch.float64)
        (expected,) = torch.autograd.grad((x @ copies.mT * g).sum(), copies)
        if not compare(f"{name} of {R} visits, {T} tokens, {inner} to {outer}", answer(x, g), expected):
            return
    passed(name)


@exercise
def smallest_exponent(answer: Callable[[float, bool], float]) -> None:
    """Exercise: the smallest p for which one step's change stays bounded in R."""
    name = "smallest_exponent"
    for sign_like in (False, True):
        for gamma in (0.0, 1.0, 0.5):
            expected = 0.5 if sign_like else (1 + gamma) / 4
            step = "sign-like" if sign_like else "gradient"
            if not compare(f"{name} of a {step} step, gamma={gamma:g}", answer(gamma, sign_like), expected):
                return
    passed(name)
