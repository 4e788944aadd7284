"""The residual recursion against its own definition, written out; the slopes and bounds of the paper against runs."""

import math

import pytest
import torch

from minilooped.science import toy

DEPTHS = (8, 16, 32, 64)
ALPHAS = {"none": 0.0, "sqrt": 0.5, "inverse": 1.0}


def slope(values: torch.Tensor, depths=DEPTHS) -> float:
    return toy.fit_exponent(depths, values).slope


# ----------------------------------------------------------------------------------------------------------------------
# The recursion


def by_hand(weights, h0, n_loop, eps, phi):
    """One seed, one vector at a time: weights (L, d, d), h0 (d,)."""
    stream = [h0]
    for _ in range(n_loop):
        for W in weights:
            stream.append(stream[-1] + eps * W.mv(phi(stream[-1])))
    return torch.stack(stream)


@pytest.mark.parametrize(
    ("branch", "phi"),
    [
        ("relu", lambda h: h * (h > 0)),
        ("tanh", lambda h: 2 / (1 + torch.exp(-2 * h)) - 1),
        ("linear", lambda h: h),
        ("pre_norm", lambda h: h * (h > 0) * len(h) ** 0.5 / h.norm()),
    ],
)
def test_recursion_is_its_definition_and_repeats_the_whole_stack(branch, phi):
    weights, h0 = toy.draw(3, d=7, seeds=2, seed=5)
    run = toy.recursion(weights, h0, n_loop=4, eps=0.3, branch=branch)
    assert run.h.shape == (2, 13, 7) and run.u.shape == run.r.shape == (2, 12, 7) and run.eps == 0.3
    assert run.norms.shape == (2, 13) and run.sum_of_squares.shape == (2,)
    for s in range(2):
        torch.testing.assert_close(run.h[s], by_hand(weights[s], h0[s], 4, 0.3, phi), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(run.u[s], torch.stack([phi(h) for h in run.h[s, :-1]]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(run.h.diff(dim=1), 0.3 * run.r)
    torch.testing.assert_close(run.norms[:, -1] ** 2 * 7, run.h[:, -1].square().sum(-1))


def test_draws_are_gaussian_reproducible_and_start_at_one():
    weights, h0 = toy.draw(2, d=100, seeds=3, seed=1)
    assert weights.shape == (3, 2, 100, 100) and h0.shape == (3, 100)
    assert weights.dtype == h0.dtype == torch.float64
    assert weights.var().item() == pytest.approx(1 / 100, rel=0.03)
    torch.testing.assert_close(toy.rms(h0), torch.ones(3, dtype=torch.float64))
    assert torch.equal(weights, toy.draw(2, d=100, seeds=3, seed=1)[0])
    assert not torch.equal(weights, toy.draw(2, d=100, seeds=3, seed=2)[0])
    assert not torch.equal(weights[0, 0], weights[1, 0]) and not torch.equal(weights[0, 0], weights[0, 1])


@pytest.mark.parametrize("branch", ["relu", "pre_norm"])
def test_untied_without_matrices_has_the_distribution_of_untied_with_them(branch):
    weights, h0 = toy.draw(16, d=32, seeds=256)
    real, short = toy.recursion(weights, h0, 1, 0.5, branch), toy.untied(16, 0.5, branch, d=32, seeds=256, seed=9)
    assert short.h.shape == real.h.shape
    for statistic in (
        lambda run: run.norms[:, -1],
        lambda run: run.sum_of_squares,
        lambda run: toy.cosines(run)[:, 0, 9] ** 2,
    ):
        a, b = statistic(real), statistic(short)
        assert abs(a.mean() - b.mean()) < 4 * ((a.var() + b.var()) / 256).sqrt()
        assert 0.75 < a.std() / b.std() < 1.33


def test_growth_is_one_run_per_depth_with_eps_of_that_depth():
    tied = toy.growth((2, 5), 0.5, tied=True, branch="relu", d=8, seeds=3, seed=4)
    weights, h0 = toy.draw(d=8, seeds=3, seed=4)
    for run, n in zip(tied, (2, 5), strict=True):
        assert torch.equal(run.h, toy.recursion(weights, h0, n, n**-0.5, "relu").h)
    untied = toy.growth((2, 5), 0.5, tied=False, branch="relu", d=8, seeds=3, seed=4)
    assert [run.r.shape[1] for run in untied] == [2, 5] and untied[1].eps == 5**-0.5
    assert toy.final_norms(tied).shape == toy.sums_of_squares(untied).shape == (3, 2)
    assert torch.equal(toy.final_norms(tied)[:, 1], tied[1].norms[:, -1])
    assert torch.equal(toy.sums_of_squares(untied)[:, 0], untied[0].sum_of_squares)


def test_a_silent_state_stays_silent():
    run = toy.recursion(torch.ones(1, 1, 4, 4).double(), torch.zeros(1, 4).double(), 3, 1.0)
    assert (run.h == 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, h: toy.recursion(w[0], h, 2, 1.0), r"weights must be \(S, L, d, d\) = \(2, L, 4, 4\)"),
        (lambda w, h: toy.recursion(w[:1], h, 2, 1.0), r"not \(1, 1, 4, 4\)"),
        (lambda w, h: toy.recursion(w, h[:, :3], 2, 1.0), r"\(2, L, 3, 3\)"),
        (lambda w, h: toy.recursion(w, h, 0, 1.0), "n_loop=0 must be at least 1"),
        (lambda w, h: toy.recursion(w, h, 2, 1.0, "gelu"), "branch='gelu' is not one of relu, tanh, linear, pre_norm"),
        (lambda w, h: toy.untied(0, 1.0), "n_layer=0 must be at least 1"),
        (lambda w, h: toy.untied(2, 1.0, "gelu"), "branch='gelu'"),
        (lambda w, h: toy.fit_exponent((1, 2), torch.ones(2, 3)), "seeds, depths"),
        (lambda w, h: toy.fit_exponent((1, 2), torch.ones(1, 2)), "two or more of each"),
        (lambda w, h: toy.fit_exponent((1,), torch.ones(3, 1)), "two or more of each"),
        (lambda w, h: toy.fit_exponent((1, 2), torch.tensor([[1.0, 0.0], [1.0, 1.0]])), "positive"),
        (lambda w, h: toy.fit_exponent((1, 2), torch.tensor([[1.0, math.inf], [1.0, 1.0]])), "finite"),
        (lambda w, h: toy.theorem1(toy.recursion(w, h, 2, 1.0, "tanh")), "needs u >= 0: use branch relu or pre_norm"),
        (lambda w, h: toy.theorem1(toy.recursion(w, h, 2, 1.0), gamma=0.3), "gamma=0.3 must lie between 0 and 0.293"),
        (lambda w, h: toy.theorem1(toy.recursion(w, h, 2, 1.0), gamma=0), "gamma=0 must lie"),
    ],
)
def test_bad_input_gets_one_clear_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call(*toy.draw(d=4, seeds=2))


# ----------------------------------------------------------------------------------------------------------------------
# Taking a run apart


@pytest.mark.parametrize("branch", toy.BRANCHES)
@pytest.mark.parametrize(("n_layer", "n_loop"), [(1, 32), (32, 1), (4, 8)])
@pytest.mark.parametrize("eps", [1.0, 1 / 32])
def test_decomposition_is_exact_in_float64(branch, n_layer, n_loop, eps):
    run = toy.recursion(*toy.draw(n_layer, d=48, seeds=3), n_loop, eps, branch)
    R0_squared, B, C = toy.decompose(run)
    torch.testing.assert_close(R0_squared + B + C, run.norms[:, -1] ** 2, rtol=1e-12, atol=0)
    torch.testing.assert_close(C, eps**2 * toy.gram(run).sum((1, 2)), rtol=1e-12, atol=0)


def test_decomposition_by_hand():
    r = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [2.0, 2.0]]], dtype=torch.float64)
    h = 1 + 0.5 * torch.cat([torch.zeros(1, 1, 2), r], 1).cumsum(1)
    run = toy.Run(h.double(), r, r, 0.5)
    assert [x.item() for x in toy.decompose(run)] == [1, 4, 4] and run.norms[0, -1] == 3
    assert toy.gram(run)[0].tolist() == [[2, 0, 2], [0, 2, 2], [2, 2, 4]] and run.sum_of_squares.item() == 16
    root = 0.5**0.5
    expected = torch.tensor([[1, 0, root], [0, 1, root], [root, root, 1]], dtype=torch.float64)
    torch.testing.assert_close(toy.cosines(run)[0], expected)


def test_increments_of_one_matrix_line_up_and_those_of_many_do_not():
    off_diagonal = ~torch.eye(64, dtype=torch.bool)
    (tied,) = toy.growth([64], 1.0, tied=True, branch="relu")
    assert toy.cosines(tied)[:, off_diagonal].min() > 0.7
    (untied,) = toy.growth([64], 0.5, tied=False, branch="relu")
    cosines = toy.cosines(untied)[:, off_diagonal]
    assert abs(cosines.mean()) < 0.005 and cosines.std().item() == pytest.approx(256**-0.5, rel=0.05)


@pytest.mark.parametrize("exponent", [-0.5, 0.0, 1.0, 2.0])
def test_fit_recovers_an_exponent_and_its_interval_covers_it_95_times_in_100(exponent):
    depths = torch.tensor([4.0, 8.0, 16.0, 32.0])
    assert slope(3 * torch.stack([depths, 2 * depths]) ** exponent, depths) == pytest.approx(exponent, abs=1e-12)
    for n_seed in (3, 8):  # two standard errors would cover 82 % and 91 %
        noise = 0.1 * torch.randn(2000, n_seed, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        fits = [toy.fit_exponent(depths, depths**exponent * one.exp()) for one in noise]
        assert all(fit.low < fit.slope < fit.high for fit in fits)
        covered = sum(fit.low <= exponent <= fit.high for fit in fits) / len(fits)
        assert covered == pytest.approx(0.95, abs=0.02)  # four of its standard deviations


def test_interval_narrows_with_the_root_of_the_seeds():
    noise = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)).exp()
    few, many = (toy.fit_exponent((1, 2, 4, 8), noise[:n]) for n in (25, 400))
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(4, rel=0.3)


def test_exponent_prints_without_a_negative_zero():
    assert str(toy.Exponent(-0.001, -0.004, 0.016)) == "0.00 (0.00 to 0.02)"


# ----------------------------------------------------------------------------------------------------------------------
# What the paper says


def test_sum_law_at_bounded_eps():
    assert slope(toy.sums_of_squares(toy.growth(DEPTHS, 1.0, tied=True, branch="relu"))) == pytest.approx(2, abs=0.1)
    untied = toy.growth(DEPTHS, 0.5, tied=False, branch="relu")
    assert slope(toy.sums_of_squares(untied)) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(("rule", "expected"), [("none", 1), ("sqrt", 0.5), ("inverse", 0)])
def test_tied_slopes_with_a_normalised_branch(rule, expected):
    runs = toy.growth(DEPTHS, ALPHAS[rule], tied=True)
    assert slope(toy.final_norms(runs)) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.5), ("sqrt", 0), ("inverse", 0)])
def test_untied_slopes_with_a_normalised_branch(rule, expected):
    runs = toy.growth(DEPTHS, ALPHAS[rule], tied=False)
    assert slope(toy.final_norms(runs)) == pytest.approx(expected, abs=0.1)


def test_raw_recursion_at_eps_one_is_exponential():
    untied = toy.untied(32, 1.0, "relu", seeds=256).norms[:, -1].square().mean().sqrt()
    assert untied.item() == pytest.approx(1.5**16, rel=0.15)
    tied = toy.recursion(*toy.draw(), 64, 1.0, "relu").norms
    assert (tied[:, -1] / tied[:, -2]).mean().item() == pytest.approx(1 + 0.5**0.5, abs=0.05)


def test_raw_recursion_at_one_over_root_n():
    untied = toy.untied(64, 1 / 8, "relu", seeds=256).norms[:, -1].square().mean().sqrt()
    assert untied.item() == pytest.approx(math.exp(0.25), rel=0.02)
    tied = toy.final_norms(toy.growth((64, 256), 0.5, tied=True, branch="relu")).log().mean(0)
    assert (tied.diff() / 8).item() == pytest.approx(0.5**0.5, abs=0.06)  # like exp(c sqrt N)


def test_factored_eps_is_flat_over_loops_and_layers():  # Theorem 3
    norms = {}
    for L in (1, 4, 16):
        weights, h0 = toy.draw(L, d=128)
        for N in (1, 4, 16):
            for rule, eps in (("factored", 1 / (N * L**0.5)), ("inverse", 1 / N), ("sqrt_depth", (N * L) ** -0.5)):
                norms[rule, N, L] = toy.recursion(weights, h0, N, eps).norms[:, -1].mean().item()
    flat = [value for (rule, *_), value in norms.items() if rule == "factored"]
    assert max(flat) / min(flat) < 1.1
    assert norms["inverse", 4, 16] > 2 * norms["inverse", 4, 1]
    assert norms["sqrt_depth", 16, 4] > 2 * norms["sqrt_depth", 1, 4]


@pytest.mark.parametrize("branch", ["relu", "pre_norm"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_theorem_bounds_hold(branch, alpha):
    weights, h0 = toy.draw()
    for N in (4, 32):
        run = toy.recursion(weights, h0, N, N**-alpha, branch)
        bounds = toy.theorem1(run)
        length = run.r.sum(1).norm(dim=-1) / 256**0.5
        assert (bounds.sum_low <= length).all() and (length <= bounds.sum_high).all()
        assert (bounds.norm_low <= run.norms[:, -1]).all() and (run.norms[:, -1] <= bounds.norm_high).all()
        assert (bounds.norm_low >= 0).all()


def test_theorem_by_hand():
    u = torch.tensor([[[1.0, 0.0], [1.0, 2.0]]], dtype=torch.float64)
    h = torch.ones(1, 3, 2, dtype=torch.float64)
    bounds = toy.theorem1(toy.Run(h, u, u, 10.0), gamma=0.1)
    assert bounds.mass.item() == 1 and bounds.square.item() == 1.5
    c, C = 0.9 - 0.5**0.5, 3 * 1.5**0.5
    assert bounds.gain == (pytest.approx(c + 0.0), 3)
    assert bounds.sum_low.item() == pytest.approx(2 * c) and bounds.sum_high.item() == pytest.approx(2 * C)
    assert bounds.norm_low.item() == pytest.approx(20 * c - 1) and bounds.norm_high.item() == pytest.approx(1 + 20 * C)
    assert bounds.probability == pytest.approx(1 - math.exp(-0.01) - 2 * math.exp(-1))


def test_gain_on_non_negative_vectors_is_that_of_the_theorem():
    (W,) = toy.draw(d=256, seeds=1)[0][:, 0]
    x = torch.rand(256, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 4
    for _ in range(200):  # towards the non-negative vectors that W shrinks most
        x = (x - 0.2 * W.T @ (W @ x)).clamp_min(0)
        x /= x.norm(dim=0)
    gain = (W @ x).norm(dim=0)
    low, high = toy.theorem1(toy.recursion(W[None, None], torch.ones(1, 256).double(), 2, 1.0)).gain
    assert low <= gain.min() < 0.5 and torch.linalg.matrix_norm(W, 2) <= high


@pytest.mark.parametrize(
    ("rule", "expected", "tolerance"), [("none", 1, 0.2), ("sqrt", 0.5, 0.15), ("inverse", 0, 0.1)]
)
def test_output_moves_by_eta_eps_n(rule, expected, tolerance):  # Theorem 2. The bound's exponential shows a little
    weights, h0 = toy.draw(seeds=4)
    change = {
        eta: torch.stack([toy.output_change(weights, h0, N, N ** -ALPHAS[rule], eta) for N in DEPTHS], 1)
        for eta in (1e-3, 2e-3)
    }
    assert change[1e-3].shape == (4, len(DEPTHS))
    assert slope(change[1e-3]) == pytest.approx(expected, abs=tolerance)
    torch.testing.assert_close(change[2e-3] / change[1e-3], torch.full((4, 4), 2.0).double(), rtol=0.02, atol=0)


def test_step_is_sign_like_and_of_size_eta():
    d = 64
    weights, h0 = toy.draw(2, d=d, seeds=3)
    silent = torch.zeros_like(weights)
    moved = toy.output_change(silent, h0, 1, 1.0, 0.01, "linear", seed=7)
    assert torch.equal(moved, toy.output_change(silent, h0, 1, 1.0, 0.01, "linear", seed=7))
    assert not torch.equal(moved, toy.output_change(silent, h0, 1, 1.0, 0.01, "linear", seed=8))
    # dW h has entries of variance eta^2 rms(h)^2; the second layer adds one more of them
    assert moved.mean().item() == pytest.approx(0.01 * 2**0.5, rel=0.15)
    assert toy.output_change(weights, h0, 3, 0.5, 0.0).abs().max() == 0


# ----------------------------------------------------------------------------------------------------------------------
# The post-norm branch of DeepNorm and DeepLoop


@pytest.mark.parametrize(
    ("tied", "sign_like", "expected"),
    [
        (True, False, (1, 0.5, 0)),
        (False, False, (0, -0.5, -1)),
        (True, True, (0.5, 0.25, 0)),  # a step of fixed size: tied or not makes no difference
        (False, True, (0.5, 0.25, 0)),
    ],
)
def test_output_change_of_post_norm_visits_has_the_exponent_of_the_visit_pairs(tied, sign_like, expected):
    for p, exponent in zip((1 / 4, 3 / 8, 1 / 2), expected, strict=True):
        change = [toy.post_norm_change(N, p, tied=tied, sign_like=sign_like, seeds=4) for N in DEPTHS]
        assert slope(torch.stack(change, 1)) == pytest.approx(exponent, abs=0.05), p


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sign_like", [True, False])
def test_post_norm_change_by_hand(tied, sign_like):
    """One seed, one visit at a time, the derivative in place of a small step."""
    N, p, d = 3, 0.3, 6
    alpha, beta = (2 * N) ** p, (8 * N) ** -p
    drawn, x0 = toy.draw(2 if tied else 2 * N, d=d, seeds=1, seed=5)
    target = torch.randn(1, d, generator=torch.Generator().manual_seed(6), dtype=torch.float64)[0]

    def output(*weights):
        x = x0[0]
        for n in range(N):
            W_1, W_2 = weights if tied else weights[2 * n : 2 * n + 2]
            x = alpha * x + W_2.mv(W_1.mv(x).clamp_min(0))
            x = x * d**0.5 / x.norm()
        return x

    weights = tuple(beta * W for W in drawn[0])
    _, gradients = torch.autograd.functional.vjp(output, weights, target)
    steps = tuple(-g.sign() / d**0.5 if sign_like else -g for g in gradients)
    _, change = torch.autograd.functional.jvp(output, weights, steps)
    measured = toy.post_norm_change(N, p, tied=tied, sign_like=sign_like, d=d, seeds=1, seed=5)
    assert measured.item() == pytest.approx(change.norm().item() / d**0.5, rel=1e-4)


def test_post_norm_change_at_one_loop_is_the_same_tied_and_untied():
    for sign_like in (True, False):
        tied, untied = (toy.post_norm_change(1, 0.5, tied=tied, sign_like=sign_like) for tied in (True, False))
        assert torch.equal(tied, untied)
    with pytest.raises(ValueError, match="n_loop=0"):
        toy.post_norm_change(0, 0.5, tied=True)
