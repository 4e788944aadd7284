"""LOOM's switchboard shows the variance that it names, the plots draw their arrays."""

import numpy as np
import pytest
import torch
from figures import assert_quick, drawn_by, png

from minilooped.course import plots, widgets
from minilooped.science import probes
from minilooped.science.ablation import ARMS, PARTS, Run, assembled
from minilooped.science.stats import student

RUNS = [Run("full", 0.01, seed, 2.25 + seed / 100, [3.0], [], 10) for seed in (0, 1, 2)]


RUNS += [Run("plain", 0.01, seed, 2.5 + seed / 100, [3.0], [], 10) for seed in (1, 2)]


def test_switchboard_opens_on_the_naive_loop_and_follows_every_switch(shown):
    *switches, output = widgets.loom_switchboard(RUNS).children
    assert [switch.description for switch in switches] == list(PARTS) and output.layout.height == "400px"
    on = {switch.description for switch in switches if switch.value}
    assert on == {"expert norm"}
    widgets.draw_loom_parts(RUNS, on)
    assert np.array_equal(png(shown[0]), png(shown[1])) and shown[0].alt == shown[1].alt
    for switch in switches:
        shown.clear()
        switch.value = not switch.value
        on ^= {switch.description}
        widgets.draw_loom_parts(RUNS, on)
        assert len(shown) == 2 and np.array_equal(png(shown[0]), png(shown[1])) and shown[0].alt == shown[1].alt


@pytest.mark.parametrize(
    ("parts", "trained"),
    [
        (tuple(PARTS), "trained in 6: 2.265 nats (2.260 to 2.270, 2 seeds)"),
        (tuple(reversed(PARTS)), "trained in 6: 2.265 nats (2.260 to 2.270, 2 seeds)"),
        ((), "trained in 6: 2.515 nats (2.510 to 2.520, 2 seeds)"),
        (("scaling",), "no training run of it is recorded"),  # an arm of the ablation, not of these runs
        (("own routers",), "no training run of it is recorded"),
    ],
)
def test_switchboard_shows_the_variance_it_names_and_what_was_recorded(parts, trained, shown, monkeypatch):
    calls = drawn_by(monkeypatch, "variants")
    widgets.draw_loom_parts(RUNS, parts)
    ((loops, curves), options) = calls[0]
    own = probes.variance_over_loops(assembled(parts), loops)
    assert torch.equal(curves[options["front"]], own)
    first, second = options["title"].splitlines()
    assert first == ("all parts" if parts else "no part") or first.split(" + ") == list(parts)
    assert second == f"variance {own.mean(0)[-1]:.3g} at 12 loops; {trained}"
    assert options["title"] in shown[0].alt


def test_a_move_of_the_switchboard_takes_little_time(shown):
    switches = widgets.loom_switchboard(RUNS).children[:-1]
    widgets.loom._variance.cache_clear()
    widgets.draw_loom_parts(RUNS, ())  # the two curves for comparison are there from the start
    for switch in switches[:3]:
        assert_quick(switch, not switch.value, switch.value)


def test_variants_draws_mean_and_band_and_brings_one_to_the_front():
    values = np.array([[1.0, 4.0], [3.0, 8.0]])  # (seeds, points)
    ax = plots.variants([1, 6], {"plain": values, "mine": 2 * values, "full": values}, front="mine", title="t")
    a, b, c = ax.lines
    assert a.get_xydata().tolist() == [[1, 2], [6, 6]] and b.get_ydata().tolist() == [4, 12]
    band = ax.collections[1].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (2, 16)
    assert (a.get_linestyle(), b.get_linestyle(), c.get_linestyle()) == ("--", "-", "--")
    assert b.get_zorder() > a.get_zorder()
    assert len({(line.get_color(), line.get_marker()) for line in ax.lines}) == 3
    assert ax.get_yscale() == "log" and ax.get_title() == "t" and ax.get_xticks().tolist() == [1, 6]
    assert all(line.get_linestyle() == "-" for line in plots.variants([1, 6], {"plain": values, "full": values}).lines)


def test_looks_of_arms_differ_and_name_arms():
    assert set(plots.ARM_LOOK) <= set(ARMS)
    assert len(set(plots.ARM_LOOK.values())) == len(plots.ARM_LOOK)


def test_differences_draws_every_seed_the_mean_and_its_interval():
    rows = {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([-1.0, -1.0])}
    ax = plots.differences(rows, published={"b": 0.5}, title="t")
    bars = [bar for container in ax.containers for bar in container.lines[2][0].get_segments()]
    error = student(3) / 3**0.5
    np.testing.assert_allclose(bars, [[[2 - error, 0], [2 + error, 0]], [[-1, 1], [-1, 1]]])
    seeds = [line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "o"]
    assert seeds == [[[1, 0.25], [2, 0.25], [3, 0.25]], [[-1, 1.25], [-1, 1.25]]]
    assert [line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "*"] == [[[0.5, 1]]]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"] and ax.get_title() == "t"
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first row is on top"
    assert [t.get_text() for t in ax.get_legend().get_texts()].count("a seed") == 1
