"""Exercises of chapter 5."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...science import toy
from .comparing import compare, exercise, passed


@exercise
def carried_lr(answer: Callable[[float, int, float], float]) -> None:
    """Exercise: the learning rate at N loops that keeps eta * eps * N of one loop."""
    name = "carried_lr"
    for lr, n_loop, alpha in ((0.01, 16, 0.25), (0.02, 8, 0.0), (0.01, 64, 1.0), (0.005, 1, 0.5)):
        eps = n_loop**-alpha
        asked = f"{name} of {lr:g} at N={n_loop}, alpha={alpha:g}"
        mistakes = {
            "this makes the learning rate larger where the change must become smaller: divide": lr * eps * n_loop,
            "this is the answer for alpha = 0: the branch has eps = N^-alpha, and helps": lr / n_loop,
            "this is the answer for alpha = 1: at any other the change of the output grows with N": lr,
            "this counts the branch alone: the visits are N, and each of them adds a change": lr / eps,
        }
        if not compare(asked, answer(lr, n_loop, alpha), lr / (eps * n_loop), mistakes=mistakes):
            return
    passed(name)


@exercise
def coherence(answer: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """Exercise: how much of a step acts on what the matrix has seen."""
    name = "coherence"
    for N, d, eta in ((1, 4, 0.1), (5, 8, 1e-3), (16, 3, 2.0)):
        dW, u = eta * torch.randn(d, d, dtype=torch.float64), torch.rand(N, d, dtype=torch.float64)
        acts = sum((dW @ one for one in u), torch.zeros(d, dtype=torch.float64))
        expected = torch.linalg.vector_norm(acts) / (eta * torch.linalg.vector_norm(u.sum(0)))
        if not compare(f"{name} at N={N}, d={d}, eta={eta:g}", answer(dW, u, eta), expected):
            return
    passed(name)


@exercise
def kept_rate_costs(answer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Exercise: what it costs each seed of a model to keep the learning rate that is best for another one."""
    name = "kept_rate_costs"
    for seeds, K in ((3, 5), (4, 6)):
        position = torch.arange(K, dtype=torch.float64)
        own = 0.6 * torch.randn(2, seeds, 1, dtype=torch.float64)  # where each seed has its best
        small, large = 2 + 0.1 * (position - torch.tensor([K - 2.0, 1.0])[:, None, None] - own) ** 2  # (S, K) each
        kept, best = int(small.mean(0).argmin()), int(large.mean(0).argmin())
        rows = torch.arange(seeds)
        mistakes = {
            "this is the mean. Return a value for each seed, (S,): an interval needs them": (
                large[:, kept] - large[:, best]
            ).mean(),
            "the sign is turned round: a cost is what the kept rate ends above the best": large[:, best]
            - large[:, kept],
            "this compares the two models. Both losses belong to the large one": large[:, kept] - small[:, kept],
            "this lets each seed of the large model choose its own best, so that no cost can be negative: chance is "
            "counted as cost. Choose one rate for all seeds, by their mean": large[:, kept] - large.min(1).values,
            "this lets each seed of the small model choose its own rate. Whoever tunes keeps one, that of the mean": (
                large[rows, small.argmin(1)] - large[:, best]
            ),
        }
        if not compare(
            f"{name} for {seeds} seeds", answer(small, large), large[:, kept] - large[:, best], mistakes=mistakes
        ):
            return
    passed(name)


@exercise
def octaves(answer: Callable[[list[float], Tensor, Tensor], float]) -> None:
    """Exercise: how far the best learning rate moves between two models of a sweep."""
    name = "octaves"
    lrs = [2.0**k for k in range(-9, -2)]
    position = torch.tensor(lrs).log2().double()
    for seeds, before, after in ((1, -6.0, -6.0), (2, -5.2, -6.9), (4, -6.7, -4.4)):
        # Each seed has a curvature and an optimum of its own: the optimum of the mean is not the mean of the optima.
        curvature, own = 1 + 4 * torch.rand(2, seeds, 1).double(), 0.4 * torch.randn(2, seeds, 1).double()
        own -= (curvature * own).sum(1, keepdim=True) / curvature.sum(1, keepdim=True)
        best = torch.tensor([before, after]).double()[:, None, None] + own  # (2, S, 1)
        small, large = 1 + curvature * (position - best) ** 2  # (S, K) each
        at = [int(losses.mean(0).argmin()) for losses in (small, large)]
        mistakes = {
            "the sign is turned round: up is plus": before - after,
            "this is where the grid is lowest. Between its points there is a parabola": float(at[1] - at[0]),
        }
        if not compare(f"{name} for {seeds} seeds", answer(lrs, small, large), after - before, mistakes=mistakes):
            return
    passed(name)


@exercise
def direct_and_passed_on(answer: Callable[[Tensor, Tensor, Tensor, int, float], Tensor]) -> None:
    """Exercise: what a step does to the output in each visit, and what the visits before it pass on."""
    name = "direct_and_passed_on"
    phi = toy.BRANCHES["pre_norm"]
    for N, d, eps in ((1, 4, 1.0), (3, 6, 0.5), (8, 16, 0.125)):
        torch.default_generator.manual_seed(N)  # not any draw will do: where h0 < 0 in every entry, nothing moves
        W, dW = torch.randn(2, d, d, dtype=torch.float64) * torch.tensor([1.0, 0.1])[:, None, None] / d**0.5
        h0 = torch.randn(d, dtype=torch.float64)
        before, after = (toy.recursion(w[None, None], h0[None], N, eps).h[0] for w in (W, W + dW))  # (N + 1, d) each
        direct = eps * (phi(after[:-1]) @ dW.T).sum(0)
        expected = torch.stack([direct, after[-1] - before[-1] - direct])
        if not compare(f"{name} at N={N}, d={d}, eps={eps:g}", answer(W, dW, h0, N, eps), expected):
            return
    passed(name)
