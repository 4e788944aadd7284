"""Exercises of chapter 8."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...model import EMA, Memory
from ...science.stats import interval, student
from .comparing import compare, exercise, passed


@exercise
def surviving_share(answer: Callable[[int, int, float], float]) -> None:
    """Exercise: how much of the first loop's stream is left after the re-injections of H loops."""
    name = "surviving_share"
    for H, M, lam in ((1, 2, 0.5), (2, 1, 0.5), (9, 10, 0.5), (12, 2, 0.25)):
        share = 1.0
        for t in range(2, H + 1):
            share *= 1 - lam / (t * M**0.5)
        if not compare(f"{name} at H={H}, M={M}, lam={lam:g}", answer(H, M, lam), share):
            return
    passed(name)


@exercise
def looping_residual(answer: Callable[[Tensor, float], Tensor]) -> None:
    """Exercise: what the looping residual puts on the stream at every visit."""
    name = "looping_residual"
    for H, M, beta in ((1, 1, 0.5), (1, 3, 0.5), (3, 1, 0.9), (4, 2, 0.0), (3, 4, 0.7)):
        o, expected = torch.randn(H, M, 5, dtype=torch.float64), []
        global_ = EMA.empty(o[0, 0])
        for loop in o:
            memory = Memory(EMA.empty(o[0, 0]), global_)
            for one in loop:
                update, memory = memory.carry(one, beta)
                expected.append(update)
            global_ = memory.global_
        label = f"{name} at H={H}, M={M}, beta={beta:g}"
        if not compare(label, answer(o, beta), torch.stack(expected).view_as(o)):
            return
    passed(name)


@exercise
def paired_interval(answer: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """Exercise: the mean difference of two arms that share their seeds, and t standard errors of it."""
    name = "paired_interval"
    for seeds in range(2, 11):
        t = student(seeds)
        luck = torch.randn(seeds, dtype=torch.float64)  # of a seed, which both arms share
        one, other = luck + 0.01 * torch.randn(2, seeds, dtype=torch.float64)
        expected = torch.tensor(interval(one - other), dtype=torch.float64)
        if not compare(f"{name} for {seeds} seeds", answer(one, other, t), expected):
            return
    passed(name)
