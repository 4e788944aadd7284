"""Learning-rate sweeps: the browser says where the lowest loss lies, the plot draws its arrays."""

import math

import numpy as np
import pytest
from figures import controls_of, png

from minilooped.course import plots, widgets
from minilooped.science.sweep import Trial, grid, sweep

LRS = [2.0**k for k in range(-8, -2)]


@pytest.fixture(scope="module")
def losses() -> dict[Trial, float]:
    """The best learning rate of `none` moves down an octave whenever the loops double, that of `inverse` stays."""

    def task(t: Trial) -> float:
        optimum = -5.0 - math.log2(t.n_loop) * (t.rule == "none") + 0.25 * t.seed
        return 2 + 0.1 * t.seed + (math.log2(t.lr) - optimum) ** 2

    return sweep(grid(["none", "inverse"], [2], [1, 2, 4], LRS, [0, 1]), task)


def test_lr_sweep_browser_opens_on_its_static_twin_and_follows_its_controls(losses, shown):
    controls = controls_of(widgets.lr_sweep_browser(losses))
    controls["blocks"].value = (2, 2)
    controls["rule"].value = "inverse"
    for picture, settings in zip(shown[:3], (("none", 2, 4), ("none", 2, 2), ("inverse", 2, 2)), strict=True):
        widgets.draw_lr_sweep(losses, *settings)
        assert np.array_equal(png(shown[-1]), png(picture)) and shown[-1].alt == picture.alt
    assert len({picture.data for picture in shown[:3]}) == 3


def test_lr_sweep_says_how_far_the_best_learning_rate_moves_and_what_it_costs_to_keep_it(losses, shown):
    widgets.draw_lr_sweep(losses, "none", 2, 4)
    assert "none, 2 x 4: best learning rate 0.0085, moved by -2.0 (-2.0 to -2.0) octaves" in shown[0].alt
    at_best, kept = (sum(losses[Trial("none", 2, 4, lr, seed)] for seed in (0, 1)) / 2 for lr in (2.0**-7, 2.0**-5))
    assert f"lowest loss {at_best:.4g}; at the grid's best for 2 x 1: {kept:.4g}" in shown[0].alt
    assert "\n" not in shown[0].alt
    widgets.draw_lr_sweep(losses, "inverse", 2, 4)
    assert "moved by +0.0 (+0.0 to +0.0) octaves" in shown[1].alt


def test_lr_sweep_browser_wants_rules_that_share_their_models(losses):
    fewer = {trial: loss for trial, loss in losses.items() if (trial.rule, trial.n_loop) != ("none", 4)}
    with pytest.raises(ValueError, match="over different models"):
        widgets.lr_sweep_browser(fewer)


def test_lr_sweep_wants_models_that_share_their_learning_rates(losses):
    fewer = {trial: loss for trial, loss in losses.items() if (trial.n_loop, trial.lr) != (4, LRS[0])}
    with pytest.raises(ValueError, match="models of none were swept over different learning rates"):
        widgets.draw_lr_sweep(fewer, "none", 2, 2)


def test_lr_curves_draws_mean_and_band_and_leaves_out_what_diverged():
    curves = {
        "2 x 1": np.array([[4.0, 2.0, 3.0], [5.0, 3.0, 4.0]]),
        "2 x 8": np.array([[3.0, 2.0, np.inf], [3.0, 2.5, 9.0]]),
    }
    ax = plots.lr_curves([0.001, 0.002, 0.004], curves, at="2 x 8", best={"2 x 1": 0.002, "2 x 8": 0.0015}, title="t")
    first, mark, second, other_mark = ax.lines
    assert list(first.get_ydata()) == [4.5, 2.5, 3.5] and first.get_label() == "2 x 1"
    np.testing.assert_array_equal(second.get_ydata(), [3.0, 2.25, np.nan])
    assert first.get_alpha() < second.get_alpha() == 1 and len(ax.collections) == 1  # one band, of the one in front
    assert [float(line.get_xdata()[0]) for line in (mark, other_mark)] == [0.002, 0.0015]
    assert first.get_marker() != second.get_marker() and ax.get_xscale() == "log" and ax.get_title() == "t"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "4"]
    assert ax.get_yscale() == "linear"
    assert plots.lr_curves([0.001, 0.002], {"a": np.array([[1.0, 0.01]])}).get_yscale() == "log"
    many = {str(i): np.ones((1, 2)) for i in range(12)}
    assert [line.get_label() for line in plots.lr_curves([0.001, 0.002], many).lines] == list(many)
