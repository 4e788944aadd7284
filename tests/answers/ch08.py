"""Chapter 8: right answers, written without the notebook's solutions, and mistakes that readers make."""

import math
from functools import partial

import torch

from minilooped.course import checks


def averages(o: torch.Tensor, beta: float, *, clear: bool = True, from_reads: bool = True) -> torch.Tensor:
    """The looping residual's updates (H, M, d), from the weights of the closed form.

    clear: empty the local memory at each loop's start; from_reads: feed the global one by what the local one reads.
    """

    def mean(written: torch.Tensor) -> torch.Tensor:
        weights = beta ** torch.arange(len(written) - 1.0, -1.0, -1.0, dtype=written.dtype)
        return weights @ written / weights.sum()

    H, M, d = o.shape
    flat, reads, updates = o.reshape(H * M, d), [], []
    for visit in range(H * M):
        first = visit - visit % M if clear else 0
        reads.append(mean(flat[first : visit + 1]))
        updates.append(reads[-1] + mean(torch.stack(reads) if from_reads else flat[: visit + 1]))
    return torch.stack(updates).view(H, M, d)


def survives(H: int, M: int, lam: float) -> float:
    """By the Gamma function: the product over t of (t - c) / t."""
    c = lam / M**0.5
    return math.exp(math.lgamma(H + 1 - c) - math.lgamma(2 - c) - math.lgamma(H + 1))


RIGHT = {
    checks.surviving_share: survives,
    checks.looping_residual: averages,
    checks.paired_interval: lambda one, other, t: torch.stack(
        [(one - other).mean(), t * ((one - other).var() / len(one)).sqrt()]
    ),
}


# What the answer computes instead, and what the reader is told.
WRONG = {
    checks.surviving_share: {
        "from the first loop": (lambda H, M, lam: survives(H, M, lam) * (1 - lam / M**0.5), "at H=1, M=2.* off by"),
        "the rest": (lambda H, M, lam: 1 - survives(H, M, lam), "at H=1, M=2, lam=0.5: 0.0 is not right"),
        "one block": (lambda H, M, lam: survives(H, 1, lam), "at H=9, M=10, lam=0.5: .* off by"),
    },
    checks.looping_residual: {
        "one local memory for all": (partial(averages, clear=False), "at H=3, M=1, beta=0.9: .* of the values agree"),
        "both fed by the output": (partial(averages, from_reads=False), "at H=1, M=3, beta=0.5: .* agree"),
        "the local mean alone": (lambda o, beta: averages(o[:1], beta).expand(len(o), -1, -1) / 2, "at H=1, M=1"),
        "one row": (lambda o, beta: averages(o, beta).flatten(0, 1), "expected shape"),
    },
    checks.paired_interval: {
        "unpaired": (
            lambda one, other, t: torch.stack(
                [(one - other).mean(), t * ((one.var() + other.var()) / len(one)).sqrt()]
            ),
            "for 2 seeds: 50% of the values agree",
        ),
        "the spread": (
            lambda one, other, t: torch.stack([(one - other).mean(), t * (one - other).std()]),
            "for 2 seeds: 50% of the values agree",
        ),
        "two standard errors": (
            lambda one, other, t: RIGHT[checks.paired_interval](one, other, 2),
            "for 2 seeds: 50% of the values agree",
        ),
        "the other way": (
            lambda one, other, t: RIGHT[checks.paired_interval](other, one, t),
            "for 2 seeds: 50% of the values agree",
        ),
        "a float": (lambda one, other, t: (one - other).mean().item(), "expected a tensor, got float"),
    },
}
