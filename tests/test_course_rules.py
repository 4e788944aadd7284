"""Rules and multipliers: the explorers show the numbers of probe and toy, the plots draw their arrays."""

import itertools
import re

import numpy as np
import pytest
import torch
from figures import assert_quick, controls_of, drawn_by, png

from minilooped.course import plots, widgets
from minilooped.model import RULES, LoopedConfig, Row
from minilooped.science import probes, toy


def test_rule_explorer_opens_on_its_static_twin_and_follows_its_controls(shown):
    controls = controls_of(widgets.rule_explorer())
    widgets.draw_rule_plane()
    assert np.array_equal(png(shown[0]), png(shown[1])) and shown[0].alt == shown[1].alt
    controls["reference"].value = 4
    controls["rule"].value = "inverse"
    controls["rule"].value = "depth_mup"
    assert all(not np.array_equal(png(a), png(b)) for a, b in itertools.pairwise(shown[1:]))
    widgets.draw_rule_plane("depth_mup", l_ref=4)
    assert np.array_equal(png(shown[-1]), png(shown[-2])) and shown[-1].alt == shown[-2].alt


def test_rule_explorer_lists_the_readers_own_rule(shown, monkeypatch):
    monkeypatch.setitem(RULES, "mine", lambda c: Row(branch=c.n_loop**-0.75))
    rule = controls_of(widgets.rule_explorer())["rule"]
    assert list(rule.options) == list(RULES)
    rule.value = "mine"
    assert "mine: R differs" in shown[-1].alt


@pytest.mark.parametrize("rule", ["factored", "none"])
def test_rule_plane_shows_the_numbers_of_the_probe(rule, shown, monkeypatch):
    calls = drawn_by(monkeypatch, "planes")
    widgets.draw_rule_plane(rule, l_ref=2)
    ((values, n_layers, n_loops), options) = calls[0]
    shape = dict(vocab_size=64, block_size=16, n_head=2, n_embd=64, init_std=64**-0.5, embed_norm=True)
    plane = probes.growth_plane(LoopedConfig(**shape, rule=rule, l_ref=2), n_layers, n_loops)
    for shown_values, expected in zip(values.values(), (plane.rms, plane.moved), strict=True):
        assert torch.equal(shown_values, expected)
    assert f"×{plane.over_loops:.2f} over N, ×{plane.over_layers:.2f} over L" in options["title"]
    assert options["title"] in shown[0].alt


def test_a_move_of_the_rule_explorer_takes_little_time(shown):
    assert_quick(controls_of(widgets.rule_explorer())["rule"], "deeploop", "none", "layernorm_scaling")


def test_exponent_plane_names_each_point_once_and_shows_points_far_out():
    points = {"none": (0.0, 0.0), "factored": (1.0, 0.5), "loom": (1.0, 0.5), "own": (2.0, 0.25)}
    ax = plots.exponent_plane(points)
    drawn = [line for line in ax.lines if line.get_marker() in ("o", "D", "P", "d")]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in drawn] == list(points.values())
    assert drawn[1].get_markersize() > drawn[2].get_markersize()  # so that both are seen
    assert [t.get_text() for t in ax.texts] == ["none", "factored\nloom", "own", "nothing grows"]
    assert ax.get_xlim()[1] > 2 and ax.get_xlabel() and ax.get_ylabel()


def test_multiplier_explorer_opens_on_its_static_twin_and_follows_its_controls(shown):
    box = widgets.multiplier_explorer()
    widgets.draw_multipliers()
    p, K, R, sign_like, _ = box.children
    p.value, K.value, R.value, sign_like.value = 0.25, 12, 64, True
    widgets.draw_multipliers(p=0.25, K=12, R=64, sign_like=True)
    assert np.array_equal(png(shown[0]), png(shown[1])) and np.array_equal(png(shown[-2]), png(shown[-1]))
    moves = [png(image) for image in (shown[0], *shown[2:-1])]
    assert len(moves) == 5 and all(not np.array_equal(a, b) for a, b in itertools.pairwise(moves))


def test_multipliers_shows_the_numbers_of_the_rules_and_of_the_toy(shown, monkeypatch):
    drawn, save = [], plots.save
    monkeypatch.setattr(plots.style, "save", lambda ax, path: drawn.append(ax) or save(ax, path))
    for rule, p in (("deepnorm", 0.25), ("deeploop", 0.5)):
        widgets.draw_multipliers(p, K=12, R=8)
        row = RULES[rule](LoopedConfig(n_layer=12, n_loop=8))
        formulas, measured = drawn[-1].figure.axes
        alpha, beta, ratio, aligned, unrelated = (line.get_ydata()[3] for line in formulas.lines[:5])  # R = 8
        assert (alpha, beta, ratio) == pytest.approx((row.skip, row.init_gain, row.init_gain / row.skip))
        assert (aligned, unrelated) == pytest.approx((2 * 96 * 8 * ratio**2, 2 * 96 * ratio**2))
        assert f"p = {p:g}, K = 12, R = 8: α = {alpha:.4g}, β = {beta:.3g}" in shown[-1].alt
        assert f"(β/α)² = {aligned:.3g}" in shown[-1].alt
        for line, tied in zip(measured.lines, (True, False), strict=False):
            change = toy.post_norm_change(16, p, tied=tied, d=32, seeds=4)
            assert line.get_ydata()[2] == pytest.approx(change.log().mean().exp().item())
    slopes = [float(x) for x in re.search(r"slopes tied (\S+), untied (\S+) in R", shown[-1].alt).groups()]
    assert slopes == pytest.approx([0, -1], abs=0.1)


def test_a_move_of_the_multiplier_explorer_takes_little_time(shown):
    p, *_ = widgets.multiplier_explorer().children
    assert_quick(p, 0.25, 0.5)
