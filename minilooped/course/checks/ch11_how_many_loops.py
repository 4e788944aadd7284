"""Exercises of chapter 11."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from ...model import LoopedGPT
from .ch00_start_here import _in_one_pass
from .comparing import _small_model, compare, exercise, passed


@exercise
def drawn_loss(answer: Callable[[LoopedGPT, Tensor, Tensor, int], Tensor]) -> None:
    """Exercise: what training with loop counts drawn from 1..N minimises on average, in one pass."""
    name = "drawn_loss"
    for n_loop in (1, 2, 5):
        model = _small_model(n_loop, seed=n_loop, reinject=True)  # so that x0 and the loop's number count
        idx, targets = torch.randint(11, (2, 3, 7))
        if not _in_one_pass(name, answer, model, idx, targets, n_loop, Tensor.mean):
            return
    passed(name)


@exercise
def exit_loops(answer: Callable[[Tensor, float], Tensor]) -> None:
    """Exercise: after which loop each token may leave, by the change of its distribution."""
    name = "exit_loops"
    for n_loop, T, V, threshold in ((4, 6, 3, 0.1), (3, 5, 8, 0.0), (6, 40, 4, 0.2), (1, 3, 5, 1.0)):
        log_p = (2 * torch.rand(n_loop, T, V, dtype=torch.float64)).log_softmax(-1)
        expected = []
        for token in log_p.unbind(1):  # (N, V)
            changes = [(b.exp() * (b - a)).sum() for a, b in itertools.pairwise(token)]
            small = [loop for loop, change in enumerate(changes, start=2) if change < threshold]
            expected.append(min([*small, n_loop]))
        label = f"{name} of {n_loop} loops, threshold {threshold:g}"
        if not compare(label, answer(log_p, threshold), torch.tensor(expected)):
            return
    passed(name)


@exercise
def best_loops(answer: Callable[[Tensor, Tensor], float]) -> None:
    """Exercise: the loop count at the bottom of the parabola through losses over log2 N."""
    name = "best_loops"
    for n_loops in ((1, 2, 4), (1, 2, 4, 8), (1, 3, 4, 6, 12)):
        x = torch.tensor(n_loops, dtype=torch.float64).log2()
        bottom, curvature = 3 * torch.rand(2, dtype=torch.float64) + 0.1
        losses = 2 + curvature * (x - bottom) ** 2
        if len(n_loops) > 3:  # a least-squares fit, not a curve through three points
            losses = losses + 0.01 * torch.randn(len(n_loops), dtype=torch.float64)
        design = torch.stack([x**2, x, torch.ones_like(x)], 1)
        a, b, _ = torch.linalg.lstsq(design, losses[:, None]).solution[:, 0].tolist()
        found = answer(torch.tensor(n_loops), losses)
        if not compare(f"{name} of N = {', '.join(map(str, n_loops))}", found, 2 ** (-b / (2 * a)), 1e-4):
            return
    passed(name)
