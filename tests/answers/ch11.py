"""Chapter 11: right answers, written without the notebook's solutions, and mistakes that readers make."""

from functools import partial

import numpy as np
import torch

from minilooped.course import checks

from .ch00 import losses_of_states


def changed_least(log_p, threshold, *, first=2, swapped=False):
    before, now = (log_p[1:], log_p[:-1]) if swapped else (log_p[:-1], log_p[1:])
    small = (now.exp() * (now - before)).sum(-1) < threshold  # (N - 1, T)
    loops = torch.arange(first, first + len(small))[:, None]
    return torch.where(small, loops, len(log_p)).amin(0) if len(small) else torch.ones(log_p.shape[1], dtype=torch.long)


def bottom(x, losses):
    a, b, _ = np.polyfit(x.numpy(), losses.numpy(), 2)
    return -b / (2 * a)


def fitted_bottom(n_loops, losses):
    return 2 ** bottom(n_loops.log2(), losses)


def before_the_first_rise(log_p, threshold):
    """Leaves as soon as a change is small, and comes back when it is not."""
    small = (log_p[1:].exp() * (log_p[1:] - log_p[:-1])).sum(-1) < threshold
    return len(log_p) - small.sum(0)


RIGHT = {
    checks.drawn_loss: lambda *a: losses_of_states(*a).mean(),
    checks.exit_loops: changed_least,
    checks.best_loops: fitted_bottom,
}


# What the answer computes instead, and what the reader is told.
WRONG = {
    checks.drawn_loss: {
        "the last loop": (lambda *a: losses_of_states(*a)[-1], "at n_loop=2"),
        "the sum": (lambda *a: losses_of_states(*a).sum(), "at n_loop=2"),
        "the mean count": (lambda m, x, y, n: m(x, y, n_loop=(n + 1) // 2)[1], "at n_loop=2"),
        "a pass for each": (
            lambda m, x, y, n: torch.stack([m(x, y, n_loop=i)[1] for i in range(1, n + 1)]).mean(),
            "3 passes through the stack, and 2 are enough",
        ),
        "a float": (lambda *a: losses_of_states(*a).mean().item(), "expected a tensor, got float"),
    },
    checks.exit_loops: {
        "counted from 0": (partial(changed_least, first=1), "of 4 loops, threshold 0.1"),
        "the divergence the other way": (partial(changed_least, swapped=True), "of [46] loops, threshold 0.[12]"),
        "comes back": (before_the_first_rise, "of 4 loops, threshold 0.1"),
        "never": (lambda p, _: torch.full((p.shape[1],), len(p)), "of 4 loops, threshold 0.1"),
    },
    checks.best_loops: {
        "the grid's best": (lambda n, losses: n[losses.argmin()].item(), "of N = 1, 2, 4"),
        "over N itself": (bottom, "of N = 1, 2, 4"),
        "in octaves": (lambda n, losses: bottom(n.log2(), losses), "of N = 1, 2, 4"),
        "through three points": (lambda n, losses: fitted_bottom(n[:3], losses[:3]), "of N = 1, 2, 4, 8"),
    },
}
