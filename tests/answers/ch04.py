"""Chapter 4: right answers, written without the notebook's solutions, and mistakes that readers make."""

import math

import torch

from minilooped.course import checks


def slopes(branch, n):
    """a and b of c N^-a L^-b, from 1 to n."""
    fall = [math.log(branch(1, 1) / branch(*point), n) for point in ((1, n), (n, 1))]
    return torch.tensor(fall)


RIGHT = {
    checks.branch_exponents: lambda branch: slopes(branch, 3),
    checks.gram_sum: lambda N, L, same, other: L * (N + same * N * (N - 1)) + other * (N * L * (N * L - N)),
    checks.literal_lam: lambda lam, l_ref: lam * math.sqrt(l_ref),
    checks.fixup_gain: lambda L, N: 0.3 / math.sqrt(N * math.sqrt(L)),  # the constant is free
}


# What the answer computes instead, and what the reader is told.
WRONG = {
    checks.branch_exponents: {
        "the other way round": (lambda branch: slopes(branch, 2).flip(0), "of 1 N.* 0% of the values agree"),
        "with their sign": (lambda branch: -slopes(branch, 2), "of 1 N.* 0% of the values agree"),
        "not divided by c": (
            lambda branch: -torch.tensor([branch(1, 2), branch(2, 1)]).log2(),
            r"of 0.5 N\^-0.5 L\^-1: 0% of the values agree",
        ),
        "both counts at once": (
            lambda branch: torch.tensor([math.log2(branch(1, 1) / branch(2, 2))] * 2),
            "0% of the values agree",
        ),
        "a pair": (lambda branch: tuple(slopes(branch, 2).tolist()), "expected a tensor, got tuple"),
    },
    checks.gram_sum: {
        "the stripes alone": (lambda N, L, same, other: L * N**2 * same, "at N=1, L=3.*: 2.7 is not right"),
        "the diagonal": (lambda N, L, same, other: N * L, "at N=4, L=1, .*: 4 is not right, it is off by"),
        "each pair once": (
            lambda N, L, same, other: N * L + same * L * N * (N - 1) / 2 + other * L * (L - 1) * N**2 / 2,
            "at N=4, L=1",
        ),
        "no other blocks": (
            lambda N, L, same, other: N * L + same * L * N * (N - 1),
            "at N=5, L=4, same=0.8, other=0.1: .* off by -30",
        ),
        "blocks for loops": (
            lambda N, L, same, other: N * L + same * N * L * (L - 1) + other * N * (N - 1) * L**2,
            "at N=1, L=3",
        ),
        "the length": (lambda N, L, same, other: (N * L + same * L * N * (N - 1)) ** 0.5, "at N=1, L=3, .*: 1.7"),
    },
    checks.literal_lam: {
        "as it is": (lambda lam, l_ref: lam, "of lam=1, l_ref=12: 1.0 is not right"),
        "divided": (lambda lam, l_ref: lam / l_ref**0.5, "of lam=1, l_ref=12"),
        "without the root": (lambda lam, l_ref: lam * l_ref, "of lam=1, l_ref=12: 12.0 is not right"),
        "without lambda": (lambda lam, l_ref: l_ref**0.5, "of lam=0.5, l_ref=4: 2.0 is not right"),
    },
    checks.fixup_gain: {
        "Fixup's own": (lambda L, N: L**-0.25, "at L=1, N=4: 1.0 is not right, it is off by"),
        "the unrolled depth": (lambda L, N: (L * N) ** -0.25, "at L=1, N=4: 0.707.* is not right"),
        "of two matrices": (lambda L, N: 1 / (N * L**0.5), "at L=4, N=1: 0.5 is not right"),
        "loops alone": (lambda L, N: N**-0.5, "at L=4, N=1: 1.0 is not right"),
        "both as loops": (lambda L, N: (N * L) ** -0.5, "at L=4, N=1: 0.5 is not right"),
        "zero": (lambda L, N: 0.0, "at L=1, N=1: 0.0 is not right, a gain is positive"),
        "negative": (lambda L, N: -1 / (N * L**0.5), "at L=1, N=1: .* a gain is positive"),
        "not a number": (lambda L, N: math.nan, "at L=1, N=1: nan is not right"),
        "a tensor": (lambda L, N: torch.tensor(1.0), "at L=1, N=1: expected a number, got Tensor"),
    },
}
