"""The exercises' checkers. Each takes the reader's answer, compares it with a reference, and says what differs.

An answer that is still missing prints "not answered yet" and lets the notebook run on; a wrong one raises.
"""

import itertools
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..engine.machine import pick_device, pick_dtype
from ..model import EMA, LoopedConfig, LoopedGPT, Memory
from ..science import probes, toy
from ..science.stats import interval, student


def installation() -> None:
    """Print the versions that matter, and what the trainer will compute with, and why."""
    device, device_reason = pick_device()
    dtype, dtype_reason = pick_dtype(device)
    print(f"python      {platform.python_version()}")
    for package in ("minilooped", "torch", "jupyterlab", "ipywidgets", "matplotlib"):
        print(f"{package:11} {version(package)}")
    print(f"device      {device.type}: {device_reason}")
    print(f"dtype       {str(dtype).removeprefix('torch.')}: {dtype_reason}")
    print(f"threads     {torch.get_num_threads()}")


def compare(name: str, answer: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    """Compare an answer, a number or a tensor, with what is expected.

    Returns False for a missing answer (None). Raises AssertionError on the first of type, shape, dtype and values that
    differs, and says by how much.
    """
    if answer is None:
        print(f"{name}: not answered yet")
        return False
    if not isinstance(expected, Tensor):
        if not isinstance(answer, Real) or isinstance(answer, bool):
            raise AssertionError(f"{name}: expected a number, got {type(answer).__name__}")
        if not abs(answer - expected) <= tolerance * max(1.0, abs(expected)):  # so that NaN is wrong too
            raise AssertionError(f"{name}: {answer:,} is not right, it is off by {answer - expected:+,.6g}")
        return True
    if not isinstance(answer, Tensor):
        raise AssertionError(f"{name}: expected a tensor, got {type(answer).__name__}")
    for what in ("shape", "dtype"):
        got, wanted = getattr(answer, what), getattr(expected, what)
        if got != wanted:
            raise AssertionError(f"{name}: expected {what} {wanted}, got {got}")
    close = torch.isclose(answer, expected, rtol=tolerance, atol=tolerance)
    if not close.all():
        furthest = (answer.double() - expected.double()).abs().max().item()  # of booleans too
        raise AssertionError(
            f"{name}: {close.float().mean():.0%} of the values agree; the furthest is off by {furthest:.3g}"
        )
    return True


def passed(name: str) -> None:
    print(f"{name}: correct")


# Checkers draw models and tokens; as a decorator this leaves the reader's own random generator where it was.
exercise = torch.random.fork_rng(devices=[])


# -- chapter 0 ---------------------------------------------------------------------------------------------------------


def _small_model(n_loop: int, seed: int, **changes: Any) -> LoopedGPT:
    torch.manual_seed(seed)
    shape = dict(vocab_size=11, block_size=8, n_layer=2, n_loop=n_loop, n_head=2, n_embd=16, init_std=0.25)
    return LoopedGPT(LoopedConfig(**(shape | changes))).eval()


@exercise
def untied_parameters(answer: Callable[[LoopedGPT], int]) -> None:
    """Exercise: parameters of the same depth without tying."""
    name = "untied_parameters"
    for n_loop in (1, 3, 5):
        model = _small_model(n_loop, seed=n_loop)
        blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
        if not compare(f"{name} at n_loop={n_loop}", answer(model), model.num_params() + (n_loop - 1) * blocks, 0):
            return
    passed(name)


@exercise
def loss_after_every_loop(answer: Callable[[LoopedGPT, Tensor, Tensor, int], Tensor]) -> None:
    """Exercise: the cross-entropy read out after each loop of one pass."""
    name = "loss_after_every_loop"
    for n_loop in (1, 2, 7):
        model = _small_model(n_loop=2, seed=n_loop, reinject=True)  # so that x0 and the loop's number count
        idx, targets = torch.randint(11, (2, 3, 1 + n_loop))
        if not _in_one_pass(name, answer, model, idx, targets, n_loop, lambda losses: losses):
            return
    passed(name)


def _in_one_pass(
    name: str,
    answer: Callable[[LoopedGPT, Tensor, Tensor, int], Tensor],
    model: LoopedGPT,
    idx: Tensor,
    targets: Tensor,
    n_loop: int,
    of_losses: Callable[[Tensor], Tensor],
) -> bool:
    """Compare an answer with a function of the losses after 1..N loops, and count its passes through the stack."""
    with torch.no_grad():
        expected = of_losses(torch.stack([model(idx, targets, n_loop=n)[1] for n in range(1, n_loop + 1)]))
        passes, run_loop = [], model.run_loop
        model.run_loop = lambda *args: passes.append(1) or run_loop(*args)
        if not compare(f"{name} at n_loop={n_loop}", answer(model, idx, targets, n_loop), expected):
            return False
    if len(passes) != n_loop:
        raise AssertionError(f"{name}: {len(passes)} passes through the stack, and {n_loop} are enough")
    return True


@exercise
def extra_compute(answer: Callable[[LoopedGPT, int], float]) -> None:
    """Exercise: how many times the operations of the trained loop count another count takes."""
    name = "extra_compute"
    for trained, n_loop in ((1, 2), (4, 8), (3, 1)):
        model = _small_model(trained, seed=0)
        other = _small_model(n_loop, seed=0)
        expected = other.flops_per_token(training=False) / model.flops_per_token(training=False)
        if not compare(f"{name} from {trained} to {n_loop} loops", answer(model, n_loop), expected):
            return
    passed(name)


# -- chapter 1 ---------------------------------------------------------------------------------------------------------


@exercise
def layer_loop(answer: Callable[[LoopedGPT, Tensor, int], Tensor]) -> None:
    """Exercise: the logits when every block is repeated before the next one has its turn."""
    name = "layer_loop"
    for n_layer, n_loop in ((1, 3), (2, 1), (3, 2)):
        model = _small_model(n_loop, seed=n_layer, n_layer=n_layer, pos="learned", rule="none")
        idx = torch.randint(11, (2, 5))
        with torch.no_grad():
            h = model.embed(idx)
            for block in model.blocks:
                for _ in range(n_loop):
                    h = block(h)[0]
            label = f"{name} of {n_layer} blocks x {n_loop}"
            if not compare(label, answer(model, idx, n_loop), model.logits(h)):
                return
    passed(name)


@exercise
def tied_gradient(answer: Callable[[Tensor, int], Tensor]) -> None:
    """Exercise: the gradient of the shared matrices from those of the untied copies."""
    name = "tied_gradient"
    for n_layer, n_loop in ((1, 4), (3, 2), (2, 3)):
        torch.manual_seed(n_layer)
        grads = torch.randn(n_layer * n_loop, 4, 5, dtype=torch.float64)
        expected = torch.stack([grads[layer::n_layer].sum(dim=0) for layer in range(n_layer)])
        if not compare(f"{name} of {n_layer} blocks x {n_loop} loops", answer(grads, n_layer), expected, 1e-10):
            return
    passed(name)


@exercise
def albert_parameters(answer: Callable[[LoopedConfig, int], int]) -> None:
    """Exercise: unique parameters of a looped model whose embedding is factorised as ALBERT's."""
    name = "albert_parameters"
    for n_layer, n_loop, width, factor in ((1, 12, 16, 4), (3, 2, 32, 8), (2, 1, 16, 16)):
        changes = dict(n_layer=n_layer, n_embd=width, vocab_size=50, mlp="gelu", pos="learned")
        model = _small_model(n_loop, seed=0, **changes)
        expected = model.num_params() - 50 * width + 50 * factor + factor * width
        label = f"{name} of {n_layer} x {n_loop}, C={width}, E={factor}"
        if not compare(label, answer(model.config, factor), expected, 0):
            return
    passed(name)


@exercise
def universal_transformer(answer: Callable[[LoopedGPT, Tensor, Tensor], Tensor]) -> None:
    """Exercise: the logits when every loop is told which one it is."""
    name = "universal_transformer"
    for n_loop in (1, 2, 4):
        model = _small_model(n_loop, seed=n_loop)
        idx = torch.randint(11, (2, 5))
        signal = torch.randn(n_loop, 5, 16)
        with torch.no_grad():
            h = x0 = model.embed(idx)
            for loop in range(n_loop):
                h, _, _ = model.run_loop(h + signal[loop], loop, x0)
            if not compare(f"{name} at n_loop={n_loop}", answer(model, idx, signal), model.logits(h)):
                return
    passed(name)


# -- chapter 2 ---------------------------------------------------------------------------------------------------------


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
def bounded_alpha(answer: Callable[[Callable[[int, float], float]], float]) -> None:
    """Exercise: the smallest exponent on a grid of eighths at which 64 visits stay within a tenth of 8 visits."""
    name = "bounded_alpha"
    for case, tied in (("one matrix", True), ("a matrix for each visit", False)):

        def final_norm(N: int, alpha: float, tied: bool = tied) -> float:
            return toy.final_norms(toy.growth([N], alpha, tied=tied, d=64, seeds=16)).mean().item()

        grid = (k / 8 for k in range(13))
        expected = next(alpha for alpha in grid if final_norm(64, alpha) <= 1.1 * final_norm(8, alpha))
        got = answer(final_norm)
        if got is not None and got != expected and isinstance(got, float) and 0 <= got <= 1.5:
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
    measured = {
        "A1": last.u.mean().item(),
        "A2": last.u.square().mean().item(),
        "A3": (last.r.sum(1).norm(dim=-1) / last.u.sum(1).norm(dim=-1)).mean().item(),
    }
    # A Gaussian W has a gain of about 1 - 1/sqrt(2) or more on any x >= 0; one that falls like N^-1/2 is below by now.
    violated = {"A1": measured["A1"] < 0.1, "A2": measured["A2"] > 5, "A3": measured["A3"] < 1 - 0.5**0.5}
    if not violated[assumption]:
        what = {"A1": "mean activation", "A2": "mean square activation", "A3": "gain of W on the summed inputs"}
        raise AssertionError(
            f"{name}: {assumption} holds: over {depths[-1]} visits the {what[assumption]} is {measured[assumption]:.3g}"
        )
    passed(name)


# -- chapter 3 ---------------------------------------------------------------------------------------------------------


@exercise
def visit_norms(answer: Callable[[LoopedGPT, Tensor], Tensor]) -> None:
    """Exercise: the RMS of the stream after every visit."""
    name = "visit_norms"
    for n_layer, n_loop in ((1, 3), (3, 1), (2, 4)):
        model = _small_model(n_loop, seed=n_layer, n_layer=n_layer, rule="none")
        idx = torch.randint(11, (2, 5))
        label = f"{name} of {n_layer} blocks x {n_loop} loops"
        with torch.no_grad():
            got = answer(model, idx)
        if left := sum(len(module._forward_hooks) for module in model.modules()):
            raise AssertionError(f"{label}: hooks are left on the model, {left} of them; remove() each handle")
        if not compare(label, got, probes.visits(model, idx).stream):
            return
    passed(name)


@exercise
def mean_loop_cosine(answer: Callable[[list[Tensor]], float]) -> None:
    """Exercise: the mean cosine between the increments of different loops."""
    name = "mean_loop_cosine"
    for n_loop, drift in ((2, 0.0), (4, 1.0), (7, 0.5)):
        torch.manual_seed(n_loop)
        heading = torch.randn(2, 5, 8)
        steps = [drift * heading + torch.randn(2, 5, 8) for _ in range(n_loop)]
        states = list(torch.stack([torch.randn(2, 5, 8), *steps]).cumsum(0))  # N + 1 streams (B, T, C)
        cosines = probes.cosine_matrix(steps)  # (N, N)
        expected = (cosines.sum() - cosines.trace()).item() / (n_loop * (n_loop - 1))
        if not compare(f"{name} of {n_loop} loops", answer(states), expected, 1e-4):
            return
    passed(name)


@exercise
def striped_length(answer: Callable[[int, int, float], float]) -> None:
    """Exercise: the squared length of a sum in which only visits of the same block agree."""
    name = "striped_length"
    for L, N, cosine in ((1, 64, 0.7), (64, 1, 0.7), (4, 16, 1.0), (3, 5, 0.2)):
        block = torch.arange(L * N) % L  # which block each visit is of
        products = cosine * (block[:, None] == block).double()  # (L * N, L * N)
        expected = products.fill_diagonal_(1.0).sum().item()
        if not compare(f"{name} of {L} blocks x {N} loops, cosine {cosine}", answer(L, N, cosine), expected):
            return
    passed(name)


@exercise
def hide_the_growth(answer: Callable[[], dict[str, Any]]) -> None:
    """Exercise: changes of the configuration under which an unscaled loop looks flat."""
    name = "hide_the_growth"
    n_loops, fixed = (8, 16, 32), ("rule", "n_layer", "n_loop")
    changes = answer()
    if changes is None:
        compare(f"{name} of rule 'none'", None, None)
        return
    if not isinstance(changes, dict):
        raise AssertionError(f"{name}: expected a dict of fields of LoopedConfig, got {type(changes).__name__}")
    if held := [field for field in fixed if field in changes]:
        raise AssertionError(f"{name}: leave {', '.join(held)} as it is; anything else may change")
    shape = dict(vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=32, init_std=32**-0.5, embed_norm=True)
    try:
        config = LoopedConfig(**(shape | changes))
        growth = probes.norm_growth(config, ("none",), n_loops)["none"]
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{name}: {error}") from error
    slope = toy.fit_exponent(n_loops, torch.tensor([growth, growth])).slope
    if not slope < 0.3:
        at = ", ".join(f"{value:.3g}" for value in growth)
        raise AssertionError(f"{name}: R at {n_loops} loops is {at}, a slope of {slope:.2f}; get it below 0.3")
    passed(name)


# -- chapter 4 ---------------------------------------------------------------------------------------------------------


@exercise
def branch_exponents(answer: Callable[[Callable[[int, int], float]], Tensor]) -> None:
    """Exercise: a and b of a branch multiplier c N^-a L^-b."""
    name = "branch_exponents"
    for c, a, b in ((1.0, 1.0, 0.5), (0.5, 0.5, 1.0), (3.0, 0.75, 0.0)):

        def branch(n_layer: int, n_loop: int, c: float = c, a: float = a, b: float = b) -> float:
            return c * n_loop**-a * n_layer**-b

        if not compare(f"{name} of {c:g} N^-{a:g} L^-{b:g}", answer(branch), torch.tensor([a, b])):
            return
    passed(name)


@exercise
def gram_sum(answer: Callable[[int, int, float, float], float]) -> None:
    """Exercise: the squared sum of unit increments, from the cosine of a block with itself and with the others."""
    name = "gram_sum"
    for N, L, same, other in ((1, 3, 0.9, 0.0), (4, 1, 0.9, 0.0), (3, 2, 1.0, 0.0), (5, 4, 0.8, 0.1)):
        block = torch.arange(N * L) % L  # which block each visit is made by
        alike = block[:, None] == block  # (N L, N L)
        cosine = torch.where(alike, same, other).double().fill_diagonal_(1.0)
        label = f"{name} at N={N}, L={L}, same={same}, other={other}"
        if not compare(label, answer(N, L, same, other), cosine.sum().item()):
            return
    passed(name)


@exercise
def literal_lam(answer: Callable[[float, float], float]) -> None:
    """Exercise: the lambda that gives at l_ref = 1 the branch of a lambda at another l_ref."""
    name = "literal_lam"
    for lam, l_ref in ((1.0, 12.0), (0.5, 4.0), (2.0, 1.0)):
        given = answer(lam, l_ref)
        if not compare(f"{name} of lam={lam:g}, l_ref={l_ref:g}", given, lam * l_ref**0.5):
            return
    passed(name)


@exercise
def fixup_gain(answer: Callable[[int, int], float]) -> None:
    """Exercise: the gain on the first two of a branch's three matrices that keeps the first step's size in a loop."""
    name = "fixup_gain"
    one = answer(1, 1)
    if not compare(f"{name} at L=1, N=1", one, 1.0, tolerance=float("inf")):  # any number will do
        return
    if one <= 0:
        raise AssertionError(f"{name} at L=1, N=1: {one} is not right, a gain is positive")
    for n_layer, n_loop in ((4, 1), (1, 4), (3, 5)):
        # Written N times and read N times, in each of L blocks: the step moves the output by gain^4 N^2 L.
        expected = one / (n_loop**0.5 * n_layer**0.25)
        if not compare(f"{name} at L={n_layer}, N={n_loop}", answer(n_layer, n_loop), expected):
            return
    passed(name)


# -- chapter 5 ---------------------------------------------------------------------------------------------------------


@exercise
def carried_lr(answer: Callable[[float, int, float], float]) -> None:
    """Exercise: the learning rate at N loops that keeps eta * eps * N of one loop."""
    name = "carried_lr"
    for lr, n_loop, alpha in ((0.01, 8, 0.0), (0.02, 16, 0.5), (0.01, 64, 1.0), (0.005, 1, 0.25)):
        eps = n_loop**-alpha
        if not compare(
            f"{name} of {lr:g} at N={n_loop}, alpha={alpha:g}", answer(lr, n_loop, alpha), lr / (eps * n_loop)
        ):
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
        if not compare(f"{name} for {seeds} seeds", answer(lrs, small, large), after - before):
            return
    passed(name)


@exercise
def direct_and_passed_on(answer: Callable[[Tensor, Tensor, Tensor, int, float], Tensor]) -> None:
    """Exercise: what a step does to the output in each visit, and what the visits before it pass on."""
    name = "direct_and_passed_on"
    phi = toy.BRANCHES["pre_norm"]
    for N, d, eps in ((1, 4, 1.0), (3, 6, 0.5), (8, 16, 0.125)):
        torch.manual_seed(N)  # not any draw will do: where h0 < 0 in every entry, nothing moves
        W, dW = torch.randn(2, d, d, dtype=torch.float64) * torch.tensor([1.0, 0.1])[:, None, None] / d**0.5
        h0 = torch.randn(d, dtype=torch.float64)
        before, after = (toy.recursion(w[None, None], h0[None], N, eps).h[0] for w in (W, W + dW))  # (N + 1, d) each
        direct = eps * (phi(after[:-1]) @ dW.T).sum(0)
        expected = torch.stack([direct, after[-1] - before[-1] - direct])
        if not compare(f"{name} at N={N}, d={d}, eps={eps:g}", answer(W, dW, h0, N, eps), expected):
            return
    passed(name)


# -- chapter 7 ---------------------------------------------------------------------------------------------------------


@exercise
def routing_weights(answer: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    """Exercise: a row per token with the weights of its chosen experts, and 0 for all others."""
    name = "routing_weights"
    for S, E, k in ((1, 2, 1), (5, 4, 2), (64, 9, 5)):
        score, bias = torch.rand(S, E), torch.randn(E)
        chosen = torch.zeros(S, E, dtype=torch.bool).scatter(1, (score + bias).topk(k).indices, True)
        kept = score.masked_fill(~chosen, 0)
        if not compare(f"{name} for S={S}, E={E}, k={k}", answer(score, bias, k), kept / kept.sum(1, keepdim=True)):
            return
    passed(name)


def _two_choices(S: int, E: int, k: int) -> Tensor:
    """Experts of S tokens in two loops, (2, S, k), in no order. The second loop leans towards those of the first."""
    first, second = torch.randn(2, S, E)
    choices = torch.stack((first, second + 1.5 * first)).topk(k).indices
    return choices.gather(-1, torch.rand(choices.shape).argsort(-1))


@exercise
def jaccard(answer: Callable[[Tensor, Tensor], float]) -> None:
    """Exercise: experts that two loops have in common over those that either chose, mean over tokens."""
    name = "jaccard"
    for S, E, k in ((1, 8, 2), (7, 5, 3), (50, 32, 6)):
        first, second = _two_choices(S, E, k)
        sets = [(set(a), set(b)) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
        expected = sum(len(a & b) / len(a | b) for a, b in sets) / S
        if not compare(f"{name} for S={S}, E={E}, k={k}", answer(first, second), expected):
            return
    passed(name)


@exercise
def overlap_by_chance(answer: Callable[[Tensor, Tensor], float]) -> None:
    """Exercise: the mean overlap of two loops over all ways to pair the tokens of one with those of the other."""
    name = "overlap_by_chance"
    for S, E, k in ((3, 4, 1), (5, 6, 2), (40, 8, 3)):
        first, second = _two_choices(S, E, k)
        common = (first[:, None, :, None] == second[None, :, None, :]).sum((2, 3)).double()  # (S, S), token by token
        expected = common.mean().item() / k
        if not compare(f"{name} for S={S}, E={E}, k={k}", answer(first, second), expected):
            return
    passed(name)


@exercise
def sort_and_group(answer: Callable[[Tensor, Tensor, Tensor, list[Callable[[Tensor], Tensor]]], Tensor]) -> None:
    """Exercise: the weighted sum of each token's experts, with no expert called twice."""
    name = "sort_and_group"
    for S, E, k in ((1, 2, 2), (6, 4, 2), (20, 3, 1)):
        x, weight, matrices = torch.randn(S, 5), torch.rand(S, k), torch.randn(E, 5, 5)
        choice = torch.rand(S, E).topk(k).indices
        calls = [0] * E

        def expert(rows: Tensor, e: int, matrices: Tensor = matrices, calls: list[int] = calls) -> Tensor:
            calls[e] += 1
            return torch.tanh(rows @ matrices[e])

        given = answer(x, choice, weight, [partial(expert, e=e) for e in range(E)])
        every = torch.tanh(torch.einsum("sc,ecd->sed", x, matrices))  # (S, E, C), all experts for all tokens
        own = every.gather(1, choice[..., None].expand(-1, -1, 5))  # (S, k, C)
        if not compare(f"{name} for S={S}, E={E}, k={k}", given, (weight[..., None] * own).sum(1)):
            return
        if max(calls) > 1:
            raise AssertionError(f"{name}: an expert was called {max(calls)} times, and once is enough")
    passed(name)


# -- chapter 8 ---------------------------------------------------------------------------------------------------------


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


# -- chapter 9 ---------------------------------------------------------------------------------------------------------


@exercise
def loops_reached(answer: Callable[[int, int], Tensor]) -> None:
    """Exercise: which loops each loss of segmented backprop reaches."""
    name = "loops_reached"
    for n_loop, segment in ((3, 3), (6, 2), (7, 3), (4, 9), (5, 1)):
        segments = LoopedConfig(n_loop=n_loop, segment=segment).segments()
        expected = torch.tensor([[loop in loops for loop in range(n_loop)] for loops in segments])
        if not compare(f"{name} of {n_loop} loops, {segment} in a segment", answer(n_loop, segment), expected):
            return
    passed(name)


@exercise
def longest_segment(answer: Callable[[Callable[[int], int], int, int], int]) -> None:
    """Exercise: the longest segment that fits into a memory, from two measurements of an affine law."""
    name = "longest_segment"
    for base, per_loop, n_loop, loops in (
        (5, 10, 12, 3),
        (1000, 7, 9, 1),
        (0, 300, 6, 6),
        (123, 45, 4, 4),
        (9, 8, 5, 0),
    ):
        asked = []

        def held(n: int, base: int = base, per_loop: int = per_loop, asked: list[int] = asked) -> int:
            asked.append(n)
            return base + per_loop * n

        memory = base + per_loop * loops + (per_loop - 1 if loops < n_loop else 50 * per_loop)
        where = f"{name} for {n_loop} loops, {base} + {per_loop} n bytes, a memory of {memory}"
        if not compare(where, answer(held, n_loop, memory), loops, 0):
            return
        if len(asked) > 2:
            raise AssertionError(f"{where}: {len(asked)} measurements, and two are enough")
    passed(name)


@exercise
def last_k_visits(answer: Callable[[Callable[[Tensor], Tensor], Tensor, int, int], Tensor]) -> None:
    """Exercise: run all loops, and let the gradient see the last K only."""
    name = "last_k_visits"
    for n_loop, K in ((4, 4), (5, 2), (6, 1), (3, 7)):
        W = torch.randn(4, 4, dtype=torch.float64) / 2
        h0 = torch.randn(4, dtype=torch.float64)
        copies = [W.clone().requires_grad_() for _ in range(n_loop)]
        shared, start, h = W.clone().requires_grad_(), h0.clone().requires_grad_(), h0
        for copy in copies:
            h = torch.tanh(copy @ h)
        each = torch.autograd.grad(h.sum(), copies)
        found = answer(lambda h, shared=shared: torch.tanh(shared @ h), start, n_loop, K)
        where = f"{name} of {n_loop} loops, K={K}"
        if not compare(where, found.detach() if isinstance(found, Tensor) else found, h.detach()):
            return
        if not found.requires_grad:
            raise AssertionError(f"{where}: the stream has the right values, and no gradient at all")
        seen, at_start = torch.autograd.grad(found.sum(), (shared, start), allow_unused=True, materialize_grads=True)
        compare(f"{where}, gradient of the shared weight", seen, sum(each[-K:]))
        if n_loop > K and at_start.any():
            raise AssertionError(f"{where}: a gradient reaches the start, behind the cut")
    passed(name)


# -- chapter 6 ---------------------------------------------------------------------------------------------------------


@exercise
def deeploop_visit(answer: Callable[[Tensor, Callable[[Tensor], Tensor], float], Tensor]) -> None:
    """Exercise: one sublayer visit with its multiplier and its two norms in place."""
    name = "deeploop_visit"
    for d, alpha in ((4, 2.0), (16, 8.0), (8, 1.0)):
        x, W = 3 * torch.randn(5, d, dtype=torch.float64), torch.randn(d, d, dtype=torch.float64)

        def f(y: Tensor, W: Tensor = W) -> Tensor:
            return 2 * torch.tanh(y @ W)

        expected = toy.normalize(alpha * x + f(toy.normalize(x)))
        if not compare(f"{name} at d={d}, alpha={alpha:g}", answer(x, f, alpha), expected):
            return
    passed(name)


@exercise
def multipliers(answer: Callable[[int, int, float], Tensor]) -> None:
    """Exercise: alpha and beta of an exponent for K blocks in R rounds."""
    name = "multipliers"
    for rule, p in (("deepnorm", 0.25), ("deeploop", 0.5)):
        for K, R in ((1, 1), (2, 8), (12, 7)):
            row = LoopedConfig(rule=rule, n_layer=K, n_loop=R).row
            expected = torch.tensor([row.skip, row.init_gain])
            if not compare(f"{name} at K={K}, R={R}, p={p:g}", answer(K, R, p), expected):
                return
    passed(name)


@exercise
def by_visit(answer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Exercise: the gradient of a shared matrix, one visit at a time, from what the visits heard and were told."""
    name = "by_visit"
    for R, T, inner, outer in ((1, 2, 3, 4), (4, 5, 2, 3), (3, 4, 4, 4)):
        W = torch.randn(outer, inner, dtype=torch.float64)
        copies = W.repeat(R, 1, 1).requires_grad_()  # (R, O, I)
        x, g = torch.randn(R, T, inner, dtype=torch.float64), torch.randn(R, T, outer, dtype=torch.float64)
        (expected,) = torch.autograd.grad((x @ copies.mT * g).sum(), copies)
        if not compare(f"{name} of {R} visits, {T} tokens, {inner} to {outer}", answer(x, g), expected):
            return
    passed(name)


@exercise
def smallest_exponent(answer: Callable[[float, bool], float]) -> None:
    """Exercise: the smallest p for which one step's change stays bounded in R."""
    name = "smallest_exponent"
    for sign_like in (False, True):
        for gamma in (0.0, 1.0, 0.5):
            expected = 0.5 if sign_like else (1 + gamma) / 4
            step = "sign-like" if sign_like else "gradient"
            if not compare(f"{name} of a {step} step, gamma={gamma:g}", answer(gamma, sign_like), expected):
                return
    passed(name)


# -- chapter 11 --------------------------------------------------------------------------------------------------------


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


# -- chapter 10 --------------------------------------------------------------------------------------------------------


@exercise
def training_flops(answer: Callable[[LoopedConfig], int]) -> None:
    """Exercise: operations to train a dense model on one token, from its config alone."""
    name = "training_flops"
    small = LoopedConfig(vocab_size=50, block_size=16, n_layer=1, n_head=2, n_embd=24)
    for changes in (
        {},
        dict(n_loop=3),
        dict(n_layer=4, n_loop=2),
        dict(vocab_size=1000, block_size=7),
        dict(n_embd=64),
    ):
        config = replace(small, **changes)
        label = ", ".join(f"{key}={value}" for key, value in changes.items()) or "one block, one loop"
        if not compare(f"{name} at {label}", answer(config), LoopedGPT(config).flops_per_token(), 0):
            return
    passed(name)


@exercise
def standing_bytes(answer: Callable[[int, int], int]) -> None:
    """Exercise: bytes of weights, gradients and optimizer state, when some of the weights are trained by Muon."""
    name = "standing_bytes"
    for n_loop, optimizer in ((1, "adamw"), (3, "adamw"), (2, "muon")):
        model = _small_model(n_loop, seed=0, n_layer=n_loop + 1)
        chosen = model.configure_optimizer(1e-3, 0.1, optimizer=optimizer)
        model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))[1].backward()
        chosen.step()
        by_muon = sum(
            p.numel() for group in chosen.param_groups if group["name"].endswith("muon") for p in group["params"]
        )
        there = [t for p in model.parameters() for t in (p, p.grad)]
        for part in getattr(chosen, "optimizers", [chosen]):
            there += [t for state in part.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
        expected = sum(t.numel() * t.element_size() for t in there)
        where = f"{name} of {model.num_params()} parameters, {by_muon} of them by Muon"
        if not compare(where, answer(model.num_params(), by_muon), expected, 0):
            return
    passed(name)


@exercise
def micro_batch(answer: Callable[[int, int], Tensor]) -> None:
    """Exercise: the largest micro-batch that fits, and how many of them make the batch that the recipe asks for."""
    name = "micro_batch"
    for sequences, most in ((480, 480), (480, 16), (480, 7), (480, 100), (36, 35), (13, 12)):
        batch_size = max(size for size in range(1, most + 1) if sequences % size == 0)
        expected = torch.tensor([batch_size, sequences // batch_size])
        if not compare(f"{name} of {sequences} sequences where {most} fit", answer(sequences, most), expected, 0):
            return
    passed(name)


@exercise
def tokens_by_morning(answer: Callable[[float, float, float, float], float]) -> None:
    """Exercise: how many tokens a model can be trained on in the hours there are."""
    name = "tokens_by_morning"
    for flops, tflops, mfu, hours in ((1e9, 312, 0.4, 10.0), (2.5e9, 121, 0.3, 8.0), (7e6, 0.1, 0.25, 0.5)):
        expected = 3600 * hours * mfu * tflops * 1e12 / flops
        where = f"{name} for {flops:g} operations a token, {tflops:g} TFLOP/s, {mfu:.0%} of them, {hours:g} hours"
        if not compare(where, answer(flops, tflops, mfu, hours), expected):
            return
    passed(name)
