"""Exercises of chapter 9."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...model import LoopedConfig
from .comparing import compare, exercise, passed


@exercise
def loops_reached(answer: Callable[[int, int], Tensor]) -> None:
    """Exercise: which loops each loss of segmented backprop reaches."""
    name = "loops_reached"
    for n_loop, segment in ((3, 3), (6, 2), (7, 3), (4, 9), (5, 1)):
        segments = LoopedConfig(n_loop=n_loop, segment=segment).segments()
        expected = torch.tensor([[loop in loops for loop in range(n_loop)] for loops in segments])
        if not compare(f"{name} of {n_loop} loops, {segment} in a segment", answer(n_loop, segment), expected):
            return
    passed(name)


def _law(base: int, per_loop: int, asked: list[int]) -> Callable[[int], int]:
    """Bytes held over the loops. The function appends what it is asked for to `asked`."""

    def held(n: int) -> int:
        asked.append(n)
        return base + per_loop * n

    return held


@exercise
def longest_segment(answer: Callable[[Callable[[int], int], int, int], int]) -> None:
    """Exercise: the longest segment that fits into a memory, from two measurements of an affine law."""
    name = "longest_segment"
    for base, per_loop, n_loop, loops in (
        (5, 10, 12, 3),
        (1000, 7, 9, 1),
        (0, 300, 6, 6),
        (123, 45, 4, 4),
        (9, 8, 5, 0),
    ):
        asked: list[int] = []
        memory = base + per_loop * loops + (per_loop - 1 if loops < n_loop else 50 * per_loop)
        where = f"{name} for {n_loop} loops, {base} + {per_loop} n bytes, a memory of {memory}"
        if not compare(where, answer(_law(base, per_loop, asked), n_loop, memory), loops, 0):
            return
        if len(asked) > 2:
            raise AssertionError(f"{where}: {len(asked)} measurements, and two are enough")
    passed(name)


def _step(W: Tensor) -> Callable[[Tensor], Tensor]:
    """One visit, (d,) -> (d,), whose matrix is (d, d)."""

    def step(h: Tensor) -> Tensor:
        return torch.tanh(W @ h)

    return step


@exercise
def last_k_visits(answer: Callable[[Callable[[Tensor], Tensor], Tensor, int, int], Tensor]) -> None:
    """Exercise: run all loops, and let the gradient see the last K only."""
    name = "last_k_visits"
    for n_loop, K in ((4, 4), (5, 2), (6, 1), (3, 7)):
        W = torch.randn(4, 4, dtype=torch.float64) / 2
        h0 = torch.randn(4, dtype=torch.float64)
        copies = [W.clone().requires_grad_() for _ in range(n_loop)]
        shared, start, h = W.clone().requires_grad_(), h0.clone().requires_grad_(), h0
        for copy in copies:
            h = torch.tanh(copy @ h)
        each = torch.autograd.grad(h.sum(), copies)
        found = answer(_step(shared), start, n_loop, K)
        where = f"{name} of {n_loop} loops, K={K}"
        if not compare(where, found.detach() if isinstance(found, Tensor) else found, h.detach()):
            return
        if not found.requires_grad:
            raise AssertionError(f"{where}: the stream has the right values, and no gradient at all")
        seen, at_start = torch.autograd.grad(found.sum(), (shared, start), allow_unused=True, materialize_grads=True)
        compare(f"{where}, gradient of the shared weight", seen, sum(each[-K:]))
        if n_loop > K and at_start.any():
            raise AssertionError(f"{where}: a gradient reaches the start, behind the cut")
    passed(name)
