"""Chapter 5: right answers, written without the notebook's solutions, and mistakes that readers make."""

import math

import torch

from minilooped.course import checks
from minilooped.science import toy


def octaves_by_polynomial(lrs, small, large, mean=lambda losses: losses.mean(0)):
    """A parabola fitted to all points, which is the one through any three of them."""
    x = torch.tensor(lrs, dtype=torch.float64).log2()
    terms = torch.stack((x**2, x, torch.ones_like(x)), 1)  # (K, 3)
    a, b, _ = torch.linalg.lstsq(terms, torch.stack((mean(small), mean(large)), 1)).solution  # (2,) each
    return (-b / (2 * a)).diff().item()


def lowest_on_the_grid(lrs, small, large):
    return math.log2(lrs[int(large.mean(0).argmin())] / lrs[int(small.mean(0).argmin())])


def side_by_side(W, dW, h0, N, eps, seen=lambda moved, h: moved):
    phi, h, moved, direct = toy.BRANCHES["pre_norm"], h0, h0, torch.zeros_like(h0)
    for _ in range(N):
        direct = direct + eps * dW @ phi(seen(moved, h))
        h, moved = h + eps * W @ phi(h), moved + eps * (W + dW) @ phi(moved)
    return torch.stack([direct, moved - h - direct])


def cost_of_keeping(small, large):
    return large[:, small.mean(0).argmin()] - large[:, large.mean(0).argmin()]


RIGHT = {
    checks.carried_lr: lambda lr, n_loop, alpha: lr * n_loop**alpha / n_loop,
    checks.coherence: lambda dW, u, eta: (u @ dW.T).sum(0).norm() / u.sum(0).norm() / eta,
    checks.kept_rate_costs: lambda small, large: large[:, small.sum(0).argmin()] - large[:, large.sum(0).argmin()],
    checks.octaves: octaves_by_polynomial,
    checks.direct_and_passed_on: side_by_side,
}


# What the answer computes instead, and what the reader is told.
WRONG = {
    checks.carried_lr: {
        "the other way": (lambda lr, N, alpha: lr * N ** (1 - alpha), "of 0.01 at N=16, alpha=0.25: .* divide"),
        "for any rule": (lambda lr, N, alpha: lr / N, "of 0.01 at N=16, alpha=0.25: .* for alpha = 0"),
        "kept": (lambda lr, N, alpha: lr * 1.0, "of 0.01 at N=16, alpha=0.25: .* for alpha = 1"),
        "the branch alone": (lambda lr, N, alpha: lr * N**alpha, "of 0.01 at N=16, alpha=0.25: .* the branch alone"),
        "squared": (lambda lr, N, alpha: lr / N**2, "of 0.01 at N=16, alpha=0.25: .* off by"),
    },
    checks.coherence: {
        "visit by visit": (
            lambda dW, u, eta: (u @ dW.T).norm(dim=1).sum() / (eta * u.sum(0).norm()),
            "at N=5, d=8, eta=0.001: 0% of the values agree",
        ),
        "transposed": (lambda dW, u, eta: (u.sum(0) @ dW).norm() / (eta * u.sum(0).norm()), "at N=1, d=4"),
        "without eta": (lambda dW, u, eta: (dW @ u.sum(0)).norm() / u.sum(0).norm(), "at N=1, d=4, eta=0.1"),
        "a float": (lambda dW, u, eta: 1.0, "expected a tensor, got float"),
        "one entry": (lambda dW, u, eta: (dW @ u.sum(0)).norm().view(1), r"got torch.Size\(\[1\]\)"),
    },
    checks.kept_rate_costs: {
        "the mean": (lambda small, large: cost_of_keeping(small, large).mean(), "for 3 seeds: this is the mean"),
        "a gain": (lambda small, large: -cost_of_keeping(small, large), "the sign is turned round"),
        "the other model": (
            lambda small, large: large[:, small.mean(0).argmin()] - small[:, small.mean(0).argmin()],
            "compares the two models",
        ),
        "each its best": (lambda small, large: large[:, small.mean(0).argmin()] - large.amin(1), "chance is counted"),
        "each its rate": (
            lambda small, large: (
                large.gather(1, small.argmin(1, keepdim=True))[:, 0] - large[:, large.mean(0).argmin()]
            ),
            "keeps one, that of the mean",
        ),
        "a list": (lambda small, large: cost_of_keeping(small, large).tolist(), "expected a tensor, got list"),
    },
    checks.octaves: {
        "the grid's": (lowest_on_the_grid, "for 2 seeds: .* where the grid is lowest"),
        "backwards": (lambda lrs, small, large: octaves_by_polynomial(lrs, large, small), "for 2 seeds: .* up is plus"),
        "the first seed's": (
            lambda *a: octaves_by_polynomial(*a, mean=lambda losses: losses[0]),
            "for 2 seeds: .* off by",
        ),
        "the mean of the seeds'": (
            lambda lrs, *a: (
                sum(octaves_by_polynomial(lrs, s[None], b[None]) for s, b in zip(*a, strict=True)) / len(a[0])
            ),
            "for 2 seeds: .* off by",
        ),
        "a factor": (lambda *a: 2 ** octaves_by_polynomial(*a), "for 1 seeds: .* off by"),
    },
    checks.direct_and_passed_on: {
        "at the old stream": (
            lambda *a: side_by_side(*a, seen=lambda moved, h: h),
            "at N=[38], .*: .* of the values agree",  # few and small, the draw may leave nothing to differ
        ),
        "the other way round": (lambda *a: side_by_side(*a).flip(0), "at N=1, d=4, eps=1: 0% of the values agree"),
        "their sum": (lambda *a: side_by_side(*a).sum(0), "expected shape"),
    },
}
