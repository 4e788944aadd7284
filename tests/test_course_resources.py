"""Costs, memory and time: the explorers show the numbers that were counted, the plots draw their arrays."""

import itertools

import numpy as np
import pytest
from figures import assert_quick, drawn_by, png

from minilooped.course import plots, widgets
from minilooped.model import LoopedConfig
from minilooped.presets import PRESETS
from minilooped.science import probes
from minilooped.tools.plan import MEMORY_PARTS, Memory, at_loops, hours


@pytest.fixture(scope="module")
def costs():
    shape = dict(vocab_size=9, block_size=8, n_head=2, n_embd=16)
    return [probes.cost(LoopedConfig(**shape, n_layer=L, n_loop=N)) for N in (1, 2, 5) for L in (1, 2)]


def test_cost_explorer_has_its_numbers_in_the_title_at_every_position(costs, shown):
    layers, loops, _ = widgets.cost_explorer(costs).children
    assert tuple(layers.options) == (1, 2) and tuple(loops.options) == (1, 2, 5)
    for c in costs:
        layers.value, loops.value = c.n_layer, c.n_loop
        for number in (f"{c.n_layer} x {c.n_loop}:", f"{c.parameters:,} parameters", f"{c.saved / 1e6:.2f} MB"):
            assert number in shown[-1].alt
    assert_quick(layers, 1, 2)


def test_cost_explorer_draws_multiples_of_one_block_and_one_loop(costs, shown, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "show", lambda ax, alt: drawn.append(ax))
    widgets.show_costs(costs, n_layer=2, n_loop=5)
    one, row = costs[0], [c for c in costs if c.n_layer == 2]
    curves = [line for line in drawn[0].lines if len(line.get_xdata()) == 3]
    for line, name in zip(curves, ("parameters", "operations", "saved"), strict=True):
        assert line.get_ydata().tolist() == [getattr(c, name) / getattr(one, name) for c in row]
    assert drawn[0].get_ylim()[1] >= costs[-1].operations / one.operations


def test_costs_draws_its_arrays():
    ax = plots.costs([1, 2, 4], {"flat": [1, 1, 1], "steep": [1, 2, 5]}, at=4, title="two")
    flat, ring, steep, steep_ring = ax.lines
    assert flat.get_xydata().tolist() == [[1, 1], [2, 1], [4, 1]]
    assert steep.get_xydata().tolist() == [[1, 1], [2, 2], [4, 5]]
    assert ring.get_xydata().tolist() == [[4, 1]] and steep_ring.get_xydata().tolist() == [[4, 5]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["flat", "steep"]
    assert ax.get_title() == "two" and ax.get_xticks().tolist() == [1, 2, 4]
    assert flat.get_linestyle() != steep.get_linestyle() and flat.get_marker() != steep.get_marker()
    assert len(plots.costs([1, 2], {"flat": [1, 1]}).lines) == 1


@pytest.fixture(scope="module")
def counts():
    """Numbers that are told apart, for every combination that the planner offers."""
    settings = itertools.product(*widgets.PLANNED.values())

    def found(setting: int, n_loop: int) -> Memory:
        return Memory(*(10**9 * (setting + size) for size in (1, 2, 3, 4 * n_loop, 20 + 4 * n_loop)))

    return {one: tuple(found(i, n_loop) for n_loop in (1, 2, 3)) for i, one in enumerate(settings)}


def test_planner_opens_on_its_static_twin_and_follows_every_control(counts, shown):
    *controls, _ = widgets.planner(counts).children
    preset, loops, batch, recompute, chunk, gpu = controls
    widgets.draw_planner(counts)
    assert np.array_equal(png(shown[0]), png(shown[1])) and shown[0].alt == shown[1].alt
    changes = ((preset, "gpt2-small-4x3"), (loops, 2), (batch, 4), (recompute, True), (chunk, False), (gpu, "L4"))
    for control, value in changes:
        control.value = value
    assert len(shown) == 2 + len(changes) == len({picture.alt for picture in shown}) + 1
    widgets.draw_planner(counts, "gpt2-small-4x3", 2, 4, True, None, "L4")
    assert np.array_equal(png(shown[-1]), png(shown[-2])) and shown[-1].alt == shown[-2].alt


def test_planner_draws_the_counts_and_says_what_they_come_to(counts, shown, monkeypatch):
    calls = drawn_by(monkeypatch, "memory_bars")
    widgets.draw_planner(counts, "gpt2-small", 3, 4, True, 4096)
    (bars,), _ = calls[0]
    found = at_loops(counts["gpt2-small", 4, True, 4096], 3)
    assert bars["your choice"] == {part: getattr(found, part) for part in MEMORY_PARTS}
    plain = counts["gpt2-small", 16, False, 4096][0]
    assert bars["1 loop, batch 16"] == {part: getattr(plain, part) for part in MEMORY_PARTS}
    time = hours(*PRESETS["gpt2-small-loop"], 312, 0.4)
    assert f"{found.peak / 1e9:.1f} GB at most; {time:.0f} to {4 / 3 * time:.0f} hours on one A100" in shown[0].alt


def test_a_move_of_the_planner_takes_little_time(counts, shown):
    loops = widgets.planner(counts).children[1]
    assert_quick(loops, 6, 1)


def test_memory_bars_lays_the_parts_end_to_end_and_names_their_sum():
    settings = {"a": dict(weights=1e9, passing=2e9), "b": dict(weights=3e9, passing=0.5e9)}
    ax = plots.memory_bars(settings, cards=(2, 16), end=20, title="t")
    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches]
    assert bars == [(0, 1), (0, 3), (1, 2), (3, 0.5)]
    texts = [t.get_text() for t in ax.texts]
    assert texts == ["3.0 GB", "3.5 GB", "2", "16"] and ax.get_xlim() == (0, 20)
    assert [line.get_xdata()[0] for line in ax.lines] == [2, 16]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first setting is on top"
    assert [t.get_text() for t in ax.figure.legends[0].get_texts()] == ["weights", "passing"]


def test_memory_bars_without_an_end_has_room_for_every_bar():
    ax = plots.memory_bars({"a": dict(weights=5e9)})
    assert ax.get_xlim()[1] > 5 and not ax.lines


def test_run_log_draws_its_columns_and_where_the_run_stopped():
    rows = [dict(step=step, loss=4 - step, grad_norm=2.0 * step, lr=1e-3 * step) for step in (1, 2, 3)]
    axes = plots.run_log(rows, stopped=2, clip=1.5)
    drawn = [ax.lines[0].get_xydata().tolist() for ax in axes]
    assert drawn == [[[r["step"], r[name]] for r in rows] for name in ("loss", "grad_norm", "lr")]
    assert [ax.lines[1].get_xdata()[0] for ax in axes] == [2, 2, 2]
    assert axes[1].lines[2].get_ydata()[0] == 1.5
    assert [len(ax.lines) for ax in plots.run_log(rows)] == [1, 1, 1]


def test_expected_losses_draws_mean_and_band():
    ax = plots.expected_losses({"a": {10: [2.0, 4.0], 100: [1.0, 1.5]}, "b": {10: [3.0], 20: [2.5]}}, title="t")
    assert ax.lines[0].get_xydata().tolist() == [[10, 3], [100, 1.25]]
    assert ax.lines[1].get_xydata().tolist() == [[10, 3], [20, 2.5]]
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == 1 and band[:, 1].max() == 4 and ax.get_xscale() == "log"
