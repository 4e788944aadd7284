"""The residual recursion of [1] with nothing around it: h <- h + eps * W phi(h), tied or untied, many seeds at once.

The smallest model in which a loop's updates add up. A stack of L matrices is applied N times, the whole stack in each
loop. L = 1 is the tied case; N = 1 with L layers is the untied one. Everything is float64, so that identities hold to
rounding.

Shapes use S seeds, L layers, N loops, T = L * N visits, d width. R_n is the RMS of the stream, ||h_n|| / sqrt(d).
[1] On the Residual Scaling of Looped Transformers, arXiv 2606.18524.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .stats import interval


def rms(x: Tensor) -> Tensor:
    """Root mean square over the last dimension, (..., d) -> (...)."""
    return x.square().mean(-1).sqrt()


def normalize(h: Tensor) -> Tensor:
    """RMSNorm without a gain, (..., d) -> (..., d)."""
    return h * (h.square().mean(-1, keepdim=True) + 1e-12).rsqrt()


# What W is applied to: u = phi(h). The first is [1]'s toy, the last is how transformers do it.
BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "linear": lambda h: h,
    "pre_norm": lambda h: torch.relu(normalize(h)),
}


@dataclass(frozen=True)
class Run:
    """One pass through the recursion: h_{n+1} = h_n + eps * r_n, r_n = W u_n, u_n = phi(h_n)."""

    h: Tensor  # (S, T + 1, d) the stream, from h_0 to h_T
    u: Tensor  # (S, T, d) what W saw
    r: Tensor  # (S, T, d) the increments, before eps
    eps: float

    @property
    def norms(self) -> Tensor:
        """R_0 .. R_T, (S, T + 1)."""
        return rms(self.h)

    @property
    def sum_of_squares(self) -> Tensor:
        """(1/d) ||r_0 + ... + r_{T-1}||^2, (S,): the quantity of [1]'s Theorem 1."""
        return self.r.sum(1).square().mean(-1)


def draw(n_layer: int = 1, *, d: int = 256, seeds: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights (S, L, d, d) with entries N(0, 1/d), and starts h_0 (S, d) with R_0 = 1 exactly. [1] section 3.1"""
    generator = torch.Generator().manual_seed(seed)
    h0 = normalize(torch.randn(seeds, d, generator=generator, dtype=torch.float64))
    weights = torch.randn(seeds, n_layer, d, d, generator=generator, dtype=torch.float64)
    return weights.mul_(d**-0.5), h0


def recursion(weights: Tensor, h0: Tensor, n_loop: int, eps: float, branch: str = "pre_norm") -> Run:
    """Apply the stack of L matrices `n_loop` times. weights (S, L, d, d), h0 (S, d).

    Raises ValueError for shapes that do not fit, for less than one loop and for an unknown branch.
    """
    S, d = h0.shape
    if weights.ndim != 4 or weights.shape[0] != S or weights.shape[2:] != (d, d):
        raise ValueError(f"weights must be (S, L, d, d) = ({S}, L, {d}, {d}) to fit h0, not {tuple(weights.shape)}")
    if n_loop < 1:
        raise ValueError(f"n_loop={n_loop} must be at least 1")
    layers = weights.unbind(1)  # L times (S, d, d)
    return _unroll(h0, [lambda u, W=W: (W @ u[..., None])[..., 0] for W in layers] * n_loop, eps, branch)


def untied(n_layer: int, eps: float, branch: str = "pre_norm", *, d: int = 256, seeds: int = 8, seed: int = 0) -> Run:
    """`recursion` through L independent Gaussian matrices, once. No matrix is drawn.

    A matrix that is used once need not be: for W_ij ~ N(0, 1/d) independent of u, W u is a Gaussian vector whose
    entries have variance ||u||^2 / d. So that is what is drawn, in 1/d of the time. [1] appendix A.1
    """
    if n_layer < 1:
        raise ValueError(f"n_layer={n_layer} must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    h0 = normalize(torch.randn(seeds, d, generator=generator, dtype=torch.float64))

    def fresh(u: Tensor) -> Tensor:
        return rms(u)[:, None] * torch.randn(seeds, d, generator=generator, dtype=torch.float64)

    return _unroll(h0, [fresh] * n_layer, eps, branch)


def _unroll(h: Tensor, visits: Sequence[Callable[[Tensor], Tensor]], eps: float, branch: str) -> Run:
    if branch not in BRANCHES:
        raise ValueError(f"branch={branch!r} is not one of {', '.join(BRANCHES)}")
    stream, inputs, increments = [h], [], []
    for apply_weights in visits:
        u = BRANCHES[branch](h)  # (S, d)
        r = apply_weights(u)  # (S, d)
        h = h + eps * r
        stream.append(h)
        inputs.append(u)
        increments.append(r)
    return Run(torch.stack(stream, 1), torch.stack(inputs, 1), torch.stack(increments, 1), eps)


def growth(
    depths: Sequence[int],
    alpha: float,
    *,
    tied: bool,
    branch: str = "pre_norm",
    d: int = 256,
    seeds: int = 8,
    seed: int = 0,
) -> list[Run]:
    """A run for each depth N with eps = N^-alpha: N visits of one matrix, or one visit of each of N matrices."""
    steps = [(n, float(n) ** -alpha) for n in depths]  # NumPy takes no negative power of one of its integers
    if tied:
        weights, h0 = draw(d=d, seeds=seeds, seed=seed)
        return [recursion(weights, h0, n, eps, branch) for n, eps in steps]
    return [untied(n, eps, branch, d=d, seeds=seeds, seed=seed) for n, eps in steps]


def final_norms(runs: Sequence[Run]) -> Tensor:
    """R_N of each run, (S, runs)."""
    return torch.stack([run.norms[:, -1] for run in runs], 1)


def sums_of_squares(runs: Sequence[Run]) -> Tensor:
    """(1/d) ||sum of the increments||^2 of each run, (S, runs)."""
    return torch.stack([run.sum_of_squares for run in runs], 1)


# ----------------------------------------------------------------------------------------------------------------------
# Taking a run apart


def decompose(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """R_0^2, B and C, (S,) each, with R_T^2 = R_0^2 + B + C exactly. [1] section 3.2

    B = (2 eps / d) sum_n <h_0, r_n>: what the increments share with the start.
    C = (eps^2 / d) ||sum_n r_n||^2: what they share with each other, the sum of the Gram matrix.
    """
    h0, total = run.h[:, 0], run.r.sum(1)  # (S, d) each
    return h0.square().mean(-1), 2 * run.eps * (h0 * total).mean(-1), run.eps**2 * total.square().mean(-1)


def gram(run: Run) -> Tensor:
    """All inner products of the increments, <r_i, r_j> / d, (S, T, T). They sum to `run.sum_of_squares`."""
    return run.r @ run.r.mT / run.r.shape[-1]


def cosines(run: Run) -> Tensor:
    """The Gram matrix of the increments' directions, (S, T, T), with ones on the diagonal."""
    unit = torch.nn.functional.normalize(run.r, dim=-1)
    return unit @ unit.mT


@dataclass(frozen=True)
class Exponent:
    """Of a power law: the slope on log-log axes, and its 95 % interval over seeds by Student's t."""

    slope: float
    low: float
    high: float

    def __str__(self) -> str:
        slope, low, high = (f"{round(x, 2) + 0.0:.2f}" for x in (self.slope, self.low, self.high))  # no "-0.00"
        return f"{slope} ({low} to {high})"


def fit_exponent(depths: Sequence[float], values: Tensor) -> Exponent:
    """The exponent p of values ~ depth^p. values (S, K), positive, for K depths.

    Least squares of log value on log depth, for each seed alone. The slope is the mean over seeds, `low` and
    `high` the ends of its 95 % interval by Student's t (`stats.interval`): 4.3 standard errors to either side for 3
    seeds, 2.4 for 8. Raises ValueError for fewer than two depths or two seeds, for shapes that do not fit and for
    values that have no logarithm.
    """
    x = torch.as_tensor(depths, dtype=torch.float64).log()  # (K,)
    if values.ndim != 2 or values.shape[0] < 2 or values.shape[1] != len(x) or len(x) < 2:
        raise ValueError(f"values must be (seeds, depths) with two or more of each, not {tuple(values.shape)}")
    if not (values > 0).all() or not values.isfinite().all():
        raise ValueError("a power law is fitted to positive, finite values only")
    x = x - x.mean()
    slopes = values.double().log() @ x / x.square().sum()  # (S,)
    mean, half = interval(slopes)
    return Exponent(mean, mean - half, mean + half)


# ----------------------------------------------------------------------------------------------------------------------
# What the paper says about it


@dataclass(frozen=True)
class Theorem1:
    """The two assumptions of [1]'s Theorem 1 as measured on a run, the third as proved, and what follows from them."""

    mass: Tensor  # (S,) m_-: (1/N) sum_n (1/d) 1^T u_n, the mean activation (A1)
    square: Tensor  # (S,) q_+: (1/N) sum_n ||u_n||^2 / d (A2)
    gain: tuple[float, float]  # c_W and C_W: c_W ||x|| <= ||W x|| <= C_W ||x|| for every x >= 0 (A3)
    probability: float  # with which a Gaussian W has that gain, at least
    sum_low: Tensor  # (S,) c N and C N, between which lies ||sum_n r_n|| / sqrt(d), ...
    sum_high: Tensor
    norm_low: Tensor  # (S,) ... and (eps c N - R_0)_+ and R_0 + C eps N, between which lies R_N
    norm_high: Tensor


def theorem1(run: Run, *, gamma: float = 0.2) -> Theorem1:
    """The bounds of [1]'s Theorem 1 for a tied run with a Gaussian W, where c = c_W m_- and C = C_W sqrt(q_+).

    A Gaussian matrix has c_W = 1 - 1/sqrt(2) - gamma and C_W = 3 with a probability of at least
    1 - exp(-gamma^2 d / 2) - 2 exp(-d / 2), by Gordon's inequality. [1] section 3.2, constants from its appendix A.2.
    Raises ValueError where u is negative (the proof needs u >= 0) and for a gamma that leaves no gain.
    """
    if (run.u < 0).any():
        raise ValueError("Theorem 1 needs u >= 0: use branch relu or pre_norm")
    gain = (1 - 0.5**0.5 - gamma, 3.0)
    if not 0 < gamma or gain[0] <= 0:
        raise ValueError(f"gamma={gamma} must lie between 0 and {1 - 0.5**0.5:.3f}")
    _, N, d = run.u.shape
    mass, square = run.u.mean((1, 2)), run.u.square().mean((1, 2))
    low, high = gain[0] * mass * N, gain[1] * square.sqrt() * N
    start = run.norms[:, 0]
    return Theorem1(
        mass,
        square,
        gain,
        1 - math.exp(-(gamma**2) * d / 2) - 2 * math.exp(-d / 2),
        low,
        high,
        (run.eps * low - start).clamp_min(0),
        start + run.eps * high,
    )


def output_change(
    weights: Tensor, h0: Tensor, n_loop: int, eps: float, eta: float, branch: str = "pre_norm", *, seed: int = 1
) -> Tensor:
    """RMS of the change of h_T under one sign-like step dW = (eta / sqrt(d)) S, S_ij = +-1 at random, (S,).

    The size of Adam's step, whatever the gradient: ||dW|| is of order eta. [1] section 3.3, Theorem 2, bounds it by a
    multiple of eta * eps * N. Shapes as in `recursion`.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, weights.shape, generator=generator, dtype=torch.int8).to(weights.dtype) * 2 - 1
    moved = weights + eta * weights.shape[-1] ** -0.5 * signs
    before, after = (recursion(w, h0, n_loop, eps, branch).h[:, -1] for w in (weights, moved))
    return rms(after - before)


# ----------------------------------------------------------------------------------------------------------------------
# The post-norm branch of DeepNorm and DeepLoop


def post_norm_change(
    n_loop: int,
    p: float,
    *,
    tied: bool,
    sign_like: bool = False,
    eta: float = 1e-6,
    d: int = 64,
    seeds: int = 8,
    seed: int = 0,
) -> Tensor:
    """RMS of the change of x_R, in units of eta, under one step on the weights of R = `n_loop` post-norm visits, (S,).

    A visit is x <- Norm(alpha x + W_2 relu(W_1 x)) with alpha = (2R)^p, and both matrices start at beta = (8R)^-p times
    N(0, 1/d): one block of DeepNorm for p = 1/4, of DeepLoop (arXiv 2607.13491) for p = 1/2. Tied, all visits share
    one pair of matrices; untied, each has its own. The step descends a random linear function of x_R:
    eta times its gradient or, sign-like as Adam's, eta / sqrt(d) in every entry. eta is so small that the change is
    linear in it. Raises ValueError for less than one loop.
    """
    if n_loop < 1:
        raise ValueError(f"n_loop={n_loop} must be at least 1")
    alpha, beta = (2 * n_loop) ** p, (8 * n_loop) ** -p
    weights, x0 = draw(2 if tied else 2 * n_loop, d=d, seeds=seeds, seed=seed)
    weights = (beta * weights).requires_grad_()  # (S, 2, d, d) or (S, 2R, d, d)
    target = torch.randn(seeds, d, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)

    def output(weights: Tensor) -> Tensor:
        x = x0[..., None]  # (S, d, 1)
        layers = weights.unbind(1) * (n_loop if tied else 1)  # 2R times (S, d, d)
        for W_1, W_2 in zip(layers[::2], layers[1::2], strict=True):
            x = normalize((alpha * x + W_2 @ torch.relu(W_1 @ x))[..., 0])[..., None]
        return x[..., 0]

    before = output(weights)
    (gradient,) = torch.autograd.grad((before * target).sum(), weights)
    step = gradient.sign() * d**-0.5 if sign_like else gradient
    with torch.no_grad():
        return rms(output(weights - eta * step) - before) / eta
