"""Exercises of chapter 4."""

from collections.abc import Callable

import torch
from torch import Tensor

from .comparing import compare, exercise, passed


def _branch(c: float, a: float, b: float) -> Callable[[int, int], float]:
    """The multiplier c N^-a L^-b."""

    def branch(n_layer: int, n_loop: int) -> float:
        return c * n_loop**-a * n_layer**-b

    return branch


@exercise
def branch_exponents(answer: Callable[[Callable[[int, int], float]], Tensor]) -> None:
    """Exercise: a and b of a branch multiplier c N^-a L^-b."""
    name = "branch_exponents"
    for c, a, b in ((1.0, 1.0, 0.5), (0.5, 0.5, 1.0), (3.0, 0.75, 0.0)):
        if not compare(f"{name} of {c:g} N^-{a:g} L^-{b:g}", answer(_branch(c, a, b)), torch.tensor([a, b])):
            return
    passed(name)


@exercise
def gram_sum(answer: Callable[[int, int, float, float], float]) -> None:
    """Exercise: the squared sum of unit increments, from the cosine of a block with itself and with the others."""
    name = "gram_sum"
    for N, L, same, other in ((1, 3, 0.9, 0.0), (4, 1, 0.9, 0.0), (3, 2, 1.0, 0.0), (5, 4, 0.8, 0.1)):
        block = torch.arange(N * L) % L  # which block each visit is made by
        alike = block[:, None] == block  # (N L, N L)
        cosine = torch.where(alike, same, other).double().fill_diagonal_(1.0)
        label = f"{name} at N={N}, L={L}, same={same}, other={other}"
        if not compare(label, answer(N, L, same, other), cosine.sum().item()):
            return
    passed(name)


@exercise
def literal_lam(answer: Callable[[float, float], float]) -> None:
    """Exercise: the lambda that gives at l_ref = 1 the branch of a lambda at another l_ref."""
    name = "literal_lam"
    for lam, l_ref in ((1.0, 12.0), (0.5, 4.0), (2.0, 1.0)):
        given = answer(lam, l_ref)
        if not compare(f"{name} of lam={lam:g}, l_ref={l_ref:g}", given, lam * l_ref**0.5):
            return
    passed(name)


@exercise
def fixup_gain(answer: Callable[[int, int], float]) -> None:
    """Exercise: the gain on the first two of a branch's three matrices that keeps the first step's size in a loop."""
    name = "fixup_gain"
    one = answer(1, 1)
    if not compare(f"{name} at L=1, N=1", one, 1.0, tolerance=float("inf")):  # any number will do
        return
    if one <= 0:
        raise AssertionError(f"{name} at L=1, N=1: {one} is not right, a gain is positive")
    for n_layer, n_loop in ((4, 1), (1, 4), (3, 5)):
        # Written N times and read N times, in each of L blocks: the step moves the output by gain^4 N^2 L.
        expected = one / (n_loop**0.5 * n_layer**0.25)
        if not compare(f"{name} at L={n_layer}, N={n_loop}", answer(n_layer, n_loop), expected):
            return
    passed(name)
