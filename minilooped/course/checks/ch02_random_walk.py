"""Exercises of chapter 2."""

from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from ...science import toy
from .comparing import compare, exercise, passed


@exercise
def start_and_sum(answer: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """Exercise: R_0^2, B and C of a start and its increments."""
    name = "start_and_sum"
    for N, d, eps in ((3, 2, 0.5), (5, 7, 1.0), (16, 32, 0.25)):
        generator = torch.Generator().manual_seed(N)
        h0 = torch.randn(d, generator=generator, dtype=torch.float64)
        r = torch.randn(N, d, generator=generator, dtype=torch.float64)
        stream = h0 + eps * torch.cat([torch.zeros(1, d), r]).cumsum(0)  # (N + 1, d)
        expected = torch.stack(toy.decompose(toy.Run(stream[None], r[None], r[None], eps)))[:, 0]  # (3,)
        if not compare(f"{name} at N={N}, d={d}, eps={eps}", answer(h0, r, eps), expected, 1e-10):
            return
    passed(name)


@exercise
def squared_length(answer: Callable[[int, float], float]) -> None:
    """Exercise: the squared length of a sum of N unit vectors that share one pairwise cosine."""
    name = "squared_length"
    for N, cosine in ((1, 0.5), (64, 0.0), (64, 1.0), (10, 0.3)):
        products = torch.full((N, N), cosine, dtype=torch.float64).fill_diagonal_(1.0)
        if not compare(f"{name} at N={N}, cosine={cosine}", answer(N, cosine), products.sum().item()):
            return
    passed(name)


@exercise
def mean_square(answer: Callable[[int, float, float, float, float, bool], float]) -> None:
    """Exercise: E[R_N^2] of untied layers, with a norm in front of the branch and without."""
    name = "mean_square"
    for N, eps, s, q, R_0 in ((64, 0.25, 1.0, 0.5, 1.0), (10, 0.5, 2.0, 0.75, 3.0)):
        share = eps**2 * s**2 * q
        normed, raw = R_0**2 + N * share, R_0**2 * (1 + share) ** N
        for case, expected, other in ((True, normed, raw), (False, raw, normed)):
            mistakes = {
                "this is R_N. Return its square": expected**0.5,
                f"this is the answer for normed={not case}": other,
                "eps multiplies each increment, so that its square multiplies the squared length": (
                    R_0**2 + N * share / eps if case else R_0**2 * (1 + share / eps) ** N
                ),
                "s is the deviation of the entries: their variance has s squared": (
                    R_0**2 + N * share / s if case else R_0**2 * (1 + share / s) ** N
                ),
                "the share q that the branch keeps is missing (line 4)": (
                    R_0**2 + N * share / q if case else R_0**2 * (1 + share / q) ** N
                ),
                "this counts all N squared products. Untied, only the diagonal is left (line 2)": R_0**2 + N**2 * share,
                "R_0 must be squared": expected - R_0**2 + R_0,
                "the start is missing: R_0 squared": expected - R_0**2,
            }
            got = answer(N, eps, s, q, R_0, case)
            if not compare(f"{name} with normed={case}", got, expected, mistakes=mistakes):
                return
    passed(name)


def _final_norms(tied: bool) -> Callable[[int, float], float]:
    """R after N visits with eps = N^-alpha: of one matrix, or of a new one in each visit."""

    def final_norm(N: int, alpha: float) -> float:
        return toy.final_norms(toy.growth([N], alpha, tied=tied, d=64, seeds=16)).mean().item()

    return final_norm


@exercise
def bounded_alpha(answer: Callable[[Callable[[int, float], float]], float]) -> None:
    """Exercise: the smallest exponent on a grid of eighths at which 64 visits stay within a tenth of 8 visits."""
    name = "bounded_alpha"
    for case, tied in (("one matrix", True), ("a matrix for each visit", False)):
        final_norm = _final_norms(tied)
        grid = (k / 8 for k in range(13))
        expected = next(alpha for alpha in grid if final_norm(64, alpha) <= 1.1 * final_norm(8, alpha))
        got = answer(final_norm)
        if isinstance(got, Real) and got != expected and 0 <= got <= 1.5:
            raise AssertionError(
                f"{name} for {case}: at alpha={got}, R is {final_norm(8, got):.2f} after 8 visits and "
                f"{final_norm(64, got):.2f} after 64; {'a smaller' if got > expected else 'a larger'} alpha is right"
            )
        if not compare(f"{name} for {case}", got, expected):
            return
    passed(name)


@exercise
def break_the_theorem(answer: Callable[[int], tuple[Tensor, str]]) -> None:
    """Exercise: a tied W whose increments do not add up like N, and the assumption of Theorem 1 that it violates."""
    name = "break_the_theorem"
    d, depths = 64, (16, 32, 64, 128)
    given = answer(d)
    if given is None:
        compare(f"{name} at d={d}", None, None)
        return
    if not (isinstance(given, tuple) and len(given) == 2 and given[1] in ("A1", "A2", "A3")):
        raise AssertionError(f"{name}: expected a matrix and one of 'A1', 'A2', 'A3'")
    W, assumption = given
    if not isinstance(W, Tensor) or W.shape != (d, d):
        got = f"shape {tuple(W.shape)}" if isinstance(W, Tensor) else type(W).__name__
        raise AssertionError(f"{name}: expected a tensor of shape {(d, d)}, got {got}")
    energy = W.double().square().sum().item() / d
    if not 0.5 <= energy <= 2:
        raise AssertionError(f"{name}: ||W||^2 / d is {energy:.3g}; a Gaussian W has 1, so stay within 0.5 and 2")
    _, h0 = toy.draw(d=d)
    weights = W.double().expand(len(h0), 1, d, d)
    runs = [toy.recursion(weights, h0, N, 1.0) for N in depths]
    sums = toy.sums_of_squares(runs).clamp_min(1e-12)  # a stream that never moves has a sum of 0, and no logarithm
    slope = toy.fit_exponent(depths, sums).slope
    if slope > 1.5:
        raise AssertionError(f"{name}: the squared sum still grows like N^{slope:.2f}; get it below N^1.5")
    last = runs[-1]
    measured = {  # a value for each seed, (S,)
        "A1": last.u.mean((1, 2)),
        "A2": last.u.square().mean((1, 2)),
        "A3": last.r.sum(1).norm(dim=-1) / last.u.sum(1).norm(dim=-1),
    }
    # A Gaussian W has a gain of about 1 - 1/sqrt(2) or more on any x >= 0; one that falls like N^-1/2 is below by now.
    violated = {"A1": measured["A1"] < 0.1, "A2": measured["A2"] > 5, "A3": measured["A3"] < 1 - 0.5**0.5}
    holds = int((~violated[assumption]).sum())  # in so many seeds: which assumption fails may depend on the start
    if holds > len(h0) / 2:
        what = {"A1": "mean activation", "A2": "mean square activation", "A3": "gain of W on the summed inputs"}
        values = measured[assumption]
        raise AssertionError(
            f"{name}: {assumption} holds from {holds} of {len(h0)} starts: over {depths[-1]} visits the "
            f"{what[assumption]} is {values.min():.3g} to {values.max():.3g}"
        )
    passed(name)
