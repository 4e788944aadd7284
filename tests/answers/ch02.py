"""Chapter 2: right answers, written without the notebook's solutions, and mistakes that readers make."""

import math

import torch

from minilooped.course import checks


def start_and_products(h0, r, eps):
    """By the Gram matrix of the start and the increments, of which these three are parts."""
    vectors = torch.cat([h0[None], eps * r])
    products = vectors @ vectors.T / len(h0)
    return torch.stack([products[0, 0], 2 * products[0, 1:].sum(), products[1:, 1:].sum()])


def first_flat(final_norm, tolerance=1.1, grid=range(13)):
    return next(k / 8 for k in grid if final_norm(64, k / 8) / final_norm(8, k / 8) <= tolerance)


def pairs(W):
    """A block-diagonal (d, d) of a 2 x 2 block."""
    return lambda d: torch.block_diag(*[torch.tensor(W)] * (d // 2))


def all_into_the_first(d):
    """Adds all other coordinates into the first one, which it does not see."""
    W = torch.zeros(d, d)
    W[0, 1:] = 1.0
    return W


def gaussian(d):
    return torch.randn(d, d, generator=torch.Generator().manual_seed(3)) / d**0.5


def visit_by_visit(N, eps, s, q, R_0, normed):
    square = R_0**2
    for _ in range(N):
        square += (eps * s) ** 2 * q * (1.0 if normed else square)
    return square


RIGHT = {
    checks.start_and_sum: start_and_products,
    checks.squared_length: lambda N, cosine: float(N * (1 - cosine) + N**2 * cosine),
    checks.mean_square: visit_by_visit,
    checks.bounded_alpha: first_flat,
    checks.break_the_theorem: lambda d: (-(gaussian(d) @ gaussian(d).T) / 2**0.5, "A1"),
}


# What the answer computes instead, and what the reader is told.
WRONG = {
    checks.start_and_sum: {
        "not over d": (lambda h0, r, eps: start_and_products(h0, r, eps) * len(h0), "at N=3, .*: 0% of the values"),
        "eps not squared": (
            lambda h0, r, eps: start_and_products(h0, r, eps) * torch.tensor([1, 1, 1 / eps], dtype=torch.float64),
            "at N=3, d=2, eps=0.5: 67% of the values agree",
        ),
        "half of B": (
            lambda h0, r, eps: start_and_products(h0, r, eps) * torch.tensor([1, 0.5, 1], dtype=torch.float64),
            "67% of the values agree",
        ),
        "the diagonal for C": (
            lambda h0, r, eps: torch.cat(
                [start_and_products(h0, r, eps)[:2], eps**2 * r.square().sum()[None] / len(h0)]
            ),
            "67% of the values agree",
        ),
        "their sum": (lambda *a: start_and_products(*a).sum(), r"shape torch.Size\(\[3\]\), got torch.Size\(\[\]\)"),
        "float32": (lambda *a: start_and_products(*a).float(), "dtype torch.float64, got torch.float32"),
    },
    checks.squared_length: {
        "the length": (lambda N, cosine: (N + cosine * N * (N - 1)) ** 0.5, "at N=64, cosine=0.0: 8.0 is not right"),
        "each pair once": (lambda N, cosine: N + cosine * N * (N - 1) / 2, "at N=64, cosine=1.0"),
        "diagonal twice": (lambda N, cosine: N + cosine * N**2, "at N=1, cosine=0.5: 1.5 is not right"),
        "always straight": (lambda N, cosine: N**2, "at N=64, cosine=0.0: .* off by"),
    },
    checks.mean_square: {
        "the root": (lambda *a: visit_by_visit(*a) ** 0.5, "with normed=True: this is R_N"),
        "always normed": (lambda *a: visit_by_visit(*a[:5], True), "with normed=False: .* for normed=True"),
        "eps not squared": (lambda N, e, *a: visit_by_visit(N, e**0.5, *a), "eps multiplies each increment"),
        "s not squared": (lambda N, e, s, *a: visit_by_visit(N, e, s**0.5, *a), "their variance has s squared"),
        "no share": (lambda N, e, s, q, *a: visit_by_visit(N, e, s, 1.0, *a), r"is missing \(line 4\)"),
        "tied": (
            lambda N, e, s, q, R, normed: R**2 + e**2 * s**2 * q * N**2 if normed else visit_by_visit(N, e, s, q, R, 0),
            r"only the diagonal is left \(line 2\)",
        ),
        "start not squared": (
            lambda N, e, s, q, R, normed: visit_by_visit(N, e, s, q, R, normed) - R**2 + R,
            "R_0 must be squared",
        ),
        "no start": (
            lambda N, e, s, q, R, normed: visit_by_visit(N, e, s, q, R, normed) - R**2,
            "the start is missing",
        ),
        "plus one": (lambda *a: visit_by_visit(*a) + 1, "off by"),
    },
    checks.bounded_alpha: {
        "of the loop": (lambda final_norm: 1.0, "for a matrix for each visit: .* a smaller alpha is right"),
        "of the stack": (lambda final_norm: 0.5, "for one matrix: .* R is .* after 8 .* a larger alpha is right"),
        "the largest": (lambda final_norm: 1.5, "for one matrix: .* a smaller alpha"),
        "too strict": (lambda final_norm: first_flat(final_norm, tolerance=0.99), "a smaller alpha"),
        "too coarse": (lambda final_norm: first_flat(final_norm, grid=(0, 3, 6, 9)), "a smaller alpha"),
        "an index": (lambda final_norm: int(8 * first_flat(final_norm)), "8 is not right"),
        "none found": (lambda final_norm: "none", "expected a number, got str"),
    },
    checks.break_the_theorem: {
        "zero": (lambda d: (torch.zeros(d, d), "A3"), "is 0; .* stay within 0.5 and 2"),
        "nearly zero": (lambda d: (-0.01 * torch.eye(d), "A1"), "is 0.0001; .* stay within"),
        "huge": (lambda d: (-2 * torch.eye(d), "A1"), "is 4; "),
        "not a number": (lambda d: (torch.full((d, d), math.nan), "A1"), "is nan; "),
        "Gaussian": (lambda d: (gaussian(d), "A3"), r"still grows like N\^(1.9|2)"),
        "identity": (lambda d: (torch.eye(d), "A2"), r"still grows like N\^"),
        "the wrong one": (
            lambda d: (-torch.eye(d), "A3"),
            "A3 holds from 8 of 8 .* the gain of W on the summed inputs is 1",
        ),
        "never this one": (lambda d: (-torch.eye(d), "A2"), "A2 holds from 8 of 8 .* mean square activation is 0.0"),
        "mass that stays": (
            lambda d: (pairs([[-1.0, 1.0], [1.0, -1.0]])(d) / 2**0.5, "A1"),
            "A1 holds from 8 of 8 .* mean activation is 0.2",
        ),
        "no assumption": (lambda d: -torch.eye(d), "expected a matrix and one of"),
        "a fourth assumption": (lambda d: (-torch.eye(d), "A4"), "expected a matrix and one of"),
        "a row": (lambda d: (torch.zeros(d), "A1"), r"of shape \(64, 64\), got shape \(64,\)"),
        "a list": (lambda d: ((-torch.eye(d)).tolist(), "A1"), r"of shape \(64, 64\), got list"),
    },
}
