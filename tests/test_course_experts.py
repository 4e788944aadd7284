"""The router map shows what the routers choose, the plots draw their arrays."""

import dataclasses
import itertools

import matplotlib
import numpy as np
import pytest
import torch
from figures import LETTERS, assert_quick, drawn_by, png

from minilooped.course import plots, widgets
from minilooped.model import LoopedConfig
from minilooped.science import probes


@pytest.fixture(scope="module")
def tokenizer():
    return LETTERS


@pytest.fixture(scope="module")
def expert_models(tokenizer):
    shape = dict(vocab_size=tokenizer.vocab_size, block_size=32, n_layer=2, n_loop=6, n_head=2, n_embd=16, n_inner=8)
    kinds = {"shared": {}, "independent": dict(router="per_loop", router_init="independent")}
    config = LoopedConfig(**shape, init_std=0.25, n_expert=8, lam=2.0, rule="loom")
    return {name: probes.fresh(dataclasses.replace(config, **kind), 0, (1, 1))[0] for name, kind in kinds.items()}


def test_router_map_draws_its_static_twin_for_every_text_model_and_layer(expert_models, tokenizer, shown, monkeypatch):
    drawn = drawn_by(monkeypatch, "router_map")
    model, text, layer, _ = widgets.router_map(expert_models, tokenizer, "abc").children
    assert tuple(model.options) == ("shared", "independent") and text.continuous_update is False
    for name, words, at in (("shared", "a bad cab", 2), ("independent", "a", 2), ("independent", "fed\nhead", 1)):
        model.value, text.value, layer.value = name, words, at
        live = shown[-1]
        widgets.draw_router_map(expert_models, tokenizer, name, words, at)
        assert np.array_equal(png(live), png(shown[-1])) and live.alt == shown[-1].alt
        idx = torch.as_tensor(tokenizer.encode(words))[None]
        choices, _ = probes.routing(expert_models[name], idx)
        (tokens, chosen, n_expert), _ = drawn[-1]
        assert "".join(tokens) == words and n_expert == 8 and np.array_equal(chosen, choices[:, at - 1, 0])
        sets = [[set(c) for c in loop] for loop in choices[:, at - 1, 0].tolist()]
        kept = [len(a & b) / 2 for one, next_ in itertools.pairwise(sets) for a, b in zip(one, next_, strict=True)]
        met = [len(set.union(*of_token)) for of_token in zip(*sets, strict=True)]
        assert f"{name}, layer {at}: {sum(kept) / len(kept):.0%} kept from loop to loop (chance 25%)" in live.alt
        assert f"{sum(met) / len(met):.1f} different ones met (2 to 8, chance 6.6)" in live.alt


def test_router_map_cuts_a_long_text_and_moves_fast(expert_models, tokenizer, shown, monkeypatch):
    drawn = drawn_by(monkeypatch, "router_map")
    _, text, _, _ = widgets.router_map(expert_models, tokenizer, "a").children
    assert_quick(text, "b", "abcdefgh " * 10)
    assert len(drawn[-1][0][0]) == widgets.SHOWN


def test_router_map_says_what_is_wrong_with_a_text(expert_models, tokenizer):
    for text, message in (("", "at least one"), ("Zebra", "Z")):
        with pytest.raises(ValueError, match=message):
            widgets.draw_router_map(expert_models, tokenizer, "shared", text)


def test_router_map_numbers_every_stripe_and_counts_below():
    choices = np.array([[[3, 0], [1, 2]], [[0, 3], [1, 0]]])  # (N, T, k)
    ax = plots.router_map(["a", " "], choices, 4, title="t")
    texts = [(round(t.get_position()[0]), t.get_position()[1], t.get_text()) for t in ax.texts]
    assert texts[:4] == [(0, 0.75, "0"), (1, 0.75, "1"), (0, 1.25, "3"), (1, 1.25, "2")]
    assert texts[4:8] == [(0, 1.75, "0"), (1, 1.75, "0"), (0, 2.25, "3"), (1, 2.25, "1")]
    assert texts[8:] == [(0, 3, "2"), (1, 3, "3")] and [t.get_text() for t in ax.get_xticklabels()] == ["a", "␣"]
    image = ax.images[0].get_array()
    assert np.array_equal(image[0, 0], image[2, 0]) and not np.array_equal(image[0, 0], image[1, 0])


def test_dispatch_sorts_the_jobs_by_expert_and_keeps_the_tokens_order_in_each_group():
    ax = plots.dispatch(np.array([[2, 0], [0, 1], [0, 2]]), 4, names=list("xyz"))
    rows = {y: [(t.get_position()[0], t.get_text()) for t in ax.texts if t.get_position()[1] == y] for y in (0, 1, 2)}
    assert [text for _, text in sorted(rows[0])] == list("xyzyxz")
    assert [text for _, text in sorted(rows[1])] == list("200102")
    assert [text for _, text in sorted(rows[2])] == list("xyz")
    assert [t.get_text() for t in ax.texts if t.get_position()[1] < 0] == ["expert 0", "1", "expert 2"]


def test_pair_maps_write_their_numbers_on_one_scale():
    first, second = plots.pair_maps({"a": [[1, 0.25], [0.5, 1]], "b": np.eye(2)}, label="overlap", title="t")
    assert [t.get_text() for t in first.texts] == ["1.00", "0.25", "0.50", "1.00"]
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0, 1)
    assert [t.get_text() for t in first.get_xticklabels()] == ["1", "2"]
    for ax in (first, second):  # WCAG asks for 4.5 between small text and its ground
        for value, text in zip(ax.images[0].get_array().flat, ax.texts, strict=True):
            assert contrast(ax.images[0].cmap(value), text.get_color()) > 4.5


def contrast(*colours) -> float:
    """(L1 + 0.05) / (L2 + 0.05) of two colours' luminances."""
    rgb = [np.array(matplotlib.colors.to_rgb(colour)) for colour in colours]
    linear = [np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for c in rgb]
    dark, light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("value", np.linspace(0, 1, 21))
def test_text_is_black_or_white_whichever_is_read_better(value):
    ground = matplotlib.colormaps["viridis"](value)
    better = max(("black", "white"), key=lambda text: contrast(ground, text))
    assert plots.readable_on(ground) == better


def test_choices_by_inputs_marks_every_pair_and_the_chance():
    seen, overlap = {"a": [0.9, 0.5], "b": [[0.1], [0.2]]}, {"a": [0.8, 0.4], "b": [[0.3], [0.2]]}
    ax = plots.choices_by_inputs(seen, overlap, 0.25)
    a, b, level = ax.lines
    assert a.get_xydata().tolist() == [[0.9, 0.8], [0.5, 0.4]] and b.get_xydata().tolist() == [[0.1, 0.3], [0.2, 0.2]]
    assert a.get_marker() != b.get_marker() and set(level.get_ydata()) == {0.25}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]


def test_loops_over_training_draw_a_line_for_every_loop_seed_and_layer():
    values = np.random.default_rng(0).random((2, 3, 4))  # (R, steps, N)
    axes = plots.loops_over_training([0, 5, 9], {"a": values, "b": 1 - values}, {"a": 0.1, "b": 0.2}, ylabel="sd")
    lines = axes[0, 1].lines
    assert len(lines) == 4 * 2 + 1 and lines[-1].get_ydata()[0] == 0.2
    assert lines[1].get_ydata().tolist() == (1 - values[1, :, 0]).tolist()
    assert lines[0].get_color().tolist() == lines[1].get_color().tolist() != lines[2].get_color().tolist()
    assert axes[0, 0].get_ylabel() == "sd" and axes[0, 0].get_ylim()[0] == 0


def test_pairs_over_training_draw_a_line_for_every_pair_seed_and_layer():
    values = np.random.default_rng(0).random((2, 3, 4, 4))  # (R, steps, N, N)
    axes = plots.pairs_over_training([0, 5, 9], {"a": values, "b": 1 - values}, {"a": 0.25, "b": 0.5})
    lines = axes[0, 0].lines
    assert len(lines) == 6 * 2 + 2  # and the ceiling and chance
    assert lines[0].get_ydata().tolist() == values[0, :, 0, 1].tolist()
    assert lines[11].get_ydata().tolist() == values[1, :, 2, 3].tolist()
    assert lines[0].get_color().tolist() == lines[11].get_color().tolist() != lines[4].get_color().tolist()
    assert [line.get_ydata()[0] for line in lines[-2:]] == [0.25, 1]
    assert axes[0, 1].lines[-2].get_ydata()[0] == 0.5
