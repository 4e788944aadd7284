"""Widgets, and the probe and plots they are made of: the numbers shown are the numbers computed."""

import base64
import dataclasses
import inspect
import io
import itertools
import json
import math
import re
import runpy
import time
from pathlib import Path
from types import SimpleNamespace

import IPython.display
import ipywidgets
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from jupyter_client.manager import run_kernel
from matplotlib.figure import Figure

from minilooped.course import plots, widgets
from minilooped.data import CharTokenizer
from minilooped.model import RULES, LoopedConfig, LoopedGPT, Row
from minilooped.presets import PRESETS
from minilooped.science import probes, toy
from minilooped.science.ablation import ARMS, PARTS, Run, assembled
from minilooped.science.stats import student
from minilooped.science.sweep import Trial, grid, sweep
from minilooped.tools.plan import MEMORY_PARTS, Memory, at_loops, hours
from minilooped.train import sample

N_LOOPS = (1, 2, 3, 5)  # not each the next, so that a position and its loop count are told apart
TRAINED = 2
SECONDS_PER_MOVE = 2 / 3  # of CPU time: twice what a move may take before a reader feels it


@pytest.fixture(scope="module")
def tokenizer():
    return CharTokenizer("\n abcdefgh")


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = LoopedConfig(
        vocab_size=tokenizer.vocab_size, block_size=8, n_layer=1, n_loop=TRAINED, n_head=2, n_embd=16, init_std=0.25
    )
    return LoopedGPT(config).eval()


@pytest.fixture(scope="module")
def batches(tokenizer):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(tokenizer.vocab_size, (2, 4, 8), generator=generator)) for _ in range(3)]


@pytest.fixture(scope="module")
def dial(model, tokenizer, batches):
    return probes.loop_dial(model, tokenizer, batches, N_LOOPS, prompt="a", max_new_tokens=12, seed=5)


@pytest.fixture
def shown(monkeypatch):
    """The images shown so far, in place of showing them."""
    images = []
    monkeypatch.setattr("IPython.display.display", images.append)
    yield images
    assert plt.get_fignums() == [], "a figure stays open in pyplot"


def assert_quick(control, *values) -> None:
    """Each move is within the limit at its best of three: one may pay for a garbage collection of the whole suite."""
    best = dict.fromkeys(values, math.inf)
    for _ in range(3):
        for value in values:
            assert control.value != value, "nothing would move"
            started = time.process_time()
            control.value = value
            best[value] = min(best[value], time.process_time() - started)
        if max(best.values()) < SECONDS_PER_MOVE:
            return
    pytest.fail(f"{best} s are more than {SECONDS_PER_MOVE}")


def printed(capsys) -> str:
    """What was printed since the last call, without the codes by which IPython clears an output outside a kernel."""
    return re.sub(r"\x1b\[2K\r?", "", capsys.readouterr().out).removesuffix("\n")


def png(image) -> np.ndarray:
    return plt.imread(io.BytesIO(image.data), format="png")


# ----------------------------------------------------------------------------------------------------------------------
# The probe


def test_loop_dial_has_the_loss_and_a_sample_of_each_loop_count(dial, model, tokenizer, batches):
    assert [d.n_loop for d in dial] == list(N_LOOPS)
    for d in dial:
        with torch.no_grad():
            logits = torch.cat([model(x, n_loop=d.n_loop)[0] for x, _ in batches])  # (3 B, T, V)
        targets = torch.cat([y for _, y in batches])
        assert d.loss == pytest.approx(torch.nn.functional.cross_entropy(logits.mT, targets).item(), rel=1e-5)
        assert d.text == sample(model, tokenizer, "a", max_new_tokens=12, n_loop=d.n_loop, seed=5)
    assert len({d.text for d in dial}) == len(dial)


def test_loop_dial_is_the_same_twice_and_leaves_the_model_as_it_was(dial, model, tokenizer, batches):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert probes.loop_dial(model, tokenizer, batches, N_LOOPS, prompt="a", max_new_tokens=12, seed=5) == dial
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.n_loop == TRAINED and not model.training


# ----------------------------------------------------------------------------------------------------------------------
# The dial


def figure_and_slider(dial):
    box = widgets.loop_dial(dial, TRAINED)
    slider, output = box.children
    return slider, output


def test_dial_starts_at_the_trained_count_and_draws_anew_at_every_position(dial, shown, capsys):
    slider, _ = figure_and_slider(dial)
    assert slider.value == TRAINED and tuple(slider.options) == N_LOOPS
    texts = {d.n_loop: d.text.strip() for d in dial}
    assert printed(capsys) == texts[TRAINED]

    losses = {d.n_loop: f"{d.loss:.3f}" for d in dial}
    for n_loop in (1, 2, 3, 5, 1):
        slider.value = n_loop
        assert printed(capsys) == texts[n_loop]
        assert f"{n_loop} loop" in shown[-1].alt and losses[n_loop] in shown[-1].alt
    assert len(shown) == 6
    pictures = [png(image) for image in shown[1:]]
    assert np.array_equal(pictures[0], pictures[4])
    assert all(not np.array_equal(a, b) for a, b in itertools.pairwise(pictures))


def test_dial_draws_what_its_static_twin_draws(dial, shown, monkeypatch):
    drawn = []

    def recorded(*arguments, **options):
        drawn.append(plot(*arguments, **options))
        return drawn[-1]

    plot = plots.loss_by_loops
    monkeypatch.setattr(plots, "loss_by_loops", recorded)
    slider, _ = figure_and_slider(dial)
    slider.value = 3
    twin = plot([d.n_loop for d in dial], [d.loss for d in dial], TRAINED)
    assert len(drawn) == 2
    for ax in drawn:
        assert np.array_equal(ax.lines[0].get_xydata(), twin.lines[0].get_xydata())


def test_move_takes_little_time(dial, shown):
    slider, _ = figure_and_slider(dial)
    assert_quick(slider, 1, 5, 3)


def test_explorer_waits_until_the_handle_is_let_go_and_keeps_its_height(shown):
    drawn = []
    controls = dict(
        n=ipywidgets.IntSlider(value=3),
        x=ipywidgets.FloatLogSlider(),
        rule=ipywidgets.Dropdown(options=("none", "sqrt")),
    )
    box = widgets.explorer(lambda **values: drawn.append(values), height="123px", **controls)
    *shown_controls, output = box.children
    assert shown_controls == list(controls.values()) and output.layout.height == "123px"
    assert controls["n"].continuous_update is controls["x"].continuous_update is False
    controls["rule"].value = "sqrt"
    assert drawn == [{"n": 3, "x": 1.0, "rule": "none"}, {"n": 3, "x": 1.0, "rule": "sqrt"}]


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


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 2: norm growth, and the Gram matrix

EXPLORERS = {widgets.norm_growth: widgets.draw_norm_growth, widgets.gram_heatmap: widgets.draw_gram_heatmap}


@pytest.fixture(params=EXPLORERS, ids=lambda explorer: explorer.__name__)
def explorer(request):
    return request.param


def controls_of(box) -> dict[str, ipywidgets.Widget]:
    """Controls by the first word of their description."""
    *controls, _ = box.children
    return {control.description.split()[0]: control for control in controls}


def test_explorer_opens_on_what_its_static_twin_draws_by_default(explorer, shown):
    explorer()
    EXPLORERS[explorer]()
    assert np.array_equal(png(shown[0]), png(shown[1])) and shown[0].alt == shown[1].alt


def test_every_control_changes_the_figure_to_that_of_the_static_twin(explorer, shown):
    controls = controls_of(explorer())
    assert controls.keys() == {"visits", "branch", "α", "width"}
    values = dict(N=64, alpha=0.5, branch="tanh", d=32)
    for control, value in (("visits", 8), ("branch", "tanh"), ("α", 0.5), ("width", 32), ("visits", 64)):
        controls[control].value = value
    assert len(shown) == 6
    assert all(not np.array_equal(png(a), png(b)) for a, b in itertools.pairwise(shown))
    EXPLORERS[explorer](**values)
    assert np.array_equal(png(shown[-1]), png(shown[-2])) and shown[-1].alt == shown[-2].alt


def test_a_move_of_an_explorer_takes_little_time(explorer, shown):
    assert_quick(controls_of(explorer())["visits"], 8, 128, 64)


def drawn_by(monkeypatch, name: str) -> list:
    """The arguments of each call of a plot."""
    calls, plot = [], getattr(plots, name)

    def recorded(*arguments, **options):
        calls.append((arguments, options))
        return plot(*arguments, **options)

    monkeypatch.setattr(plots, name, recorded)
    return calls


def test_norm_growth_shows_the_norms_of_the_toy(shown, monkeypatch):
    calls = drawn_by(monkeypatch, "growth_curves")
    widgets.draw_norm_growth(N=8, alpha=0.5, branch="relu", d=16)
    ((depths, curves), options) = calls[0]
    assert depths == [1, 2, 4, 8] and list(curves) == ["tied", "untied"]
    for name, values in curves.items():
        runs = toy.growth(depths, 0.5, tied=name == "tied", branch="relu", d=16, seeds=4)
        assert np.array_equal(values, toy.final_norms(runs))
        assert f"{name} R = {values[:, -1].mean():.3g}" in options["title"]
    assert options["title"].startswith("relu, ε = 1/√N, N = 8") and options["title"] in shown[0].alt


def test_gram_heatmap_shows_the_cosines_of_the_toy_and_what_the_products_sum_to(shown, monkeypatch):
    calls = drawn_by(monkeypatch, "gram_map")
    widgets.draw_gram_heatmap(N=8, alpha=1.25, branch="linear", d=16)
    ((matrices,), options) = calls[0]
    assert options["title"].startswith("linear, ε = N^-1.25, N = 8")
    for name, (title, cosines) in zip(("tied", "untied"), matrices.items(), strict=True):
        (run,) = toy.growth([8], 1.25, tied=name == "tied", branch="linear", d=16, seeds=1)
        assert np.array_equal(cosines, toy.cosines(run)[0])
        diagonal = run.r.square().mean(-1).sum()
        assert title == f"{name}: {run.sum_of_squares.item():.4g} against {diagonal:.4g}" and title in shown[0].alt


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 4: the rules over blocks and loops


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


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 3: the stream, visit by visit


@pytest.fixture(scope="module")
def visit_runs():
    shape = dict(vocab_size=9, block_size=8, n_head=2, n_embd=16, init_std=0.25, embed_norm=True, rule="none")
    shapes = {"tied": dict(n_layer=1, n_loop=6), "untied": dict(n_layer=6), "both": dict(n_layer=2, n_loop=3)}
    return {name: probes.first_steps(LoopedConfig(**shape, **change), 2) for name, change in shapes.items()}


def test_visit_explorer_draws_its_static_twin_at_every_position(visit_runs, shown):
    run, step, _ = widgets.visit_explorer(visit_runs).children
    assert tuple(run.options) == ("tied", "untied", "both") and (step.min, step.max) == (0, 2)
    for name, at in (("tied", 2), ("untied", 2), ("both", 1)):
        run.value, step.value = name, at
        live = shown[-1]
        widgets.draw_visits(visit_runs, name, at)
        assert np.array_equal(png(live), png(shown[-1])) and live.alt == shown[-1].alt
        visits = visit_runs[name][at]
        for number in (f"{name}, step {at}:", f"{visits.stream[-1, -1]:.3g}", f"{visits.mean_cosine:.2f}"):
            assert number in live.alt
    assert_quick(step, 0, 1)


def test_draw_visits_shows_what_was_recorded(visit_runs, shown, monkeypatch):
    norms, maps = drawn_by(monkeypatch, "stream_by_visit"), drawn_by(monkeypatch, "gram_map")
    widgets.draw_visits(visit_runs, "both", 1)
    visits = visit_runs["both"][1]
    (stream, branch, start), _ = norms[0]
    assert torch.equal(stream, visits.stream.flatten()) and torch.equal(branch, visits.branch.flatten())
    assert start == visits.start
    ((matrices,), _) = maps[0]
    assert [torch.equal(matrix, visits.cosines) for matrix in matrices.values()] == [True]


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 5: learning-rate sweeps

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


@pytest.fixture(scope="module")
def kernel():
    with run_kernel() as client:
        yield client


def captured(kernel, code: str) -> list[tuple[str, dict]]:
    """Run code; type and content of each message that a front end would put into an Output widget.

    An Output that captures says so by setting its msg_id. (nbclient keeps Outputs too, but while it does, on a busy
    machine, it can miss the reply of a cell until the timeout.)
    """
    messages, inside, caught = [], False, []
    reply = kernel.execute_interactive(code, timeout=180, output_hook=messages.append)
    assert reply["content"]["status"] == "ok", reply["content"]
    for message in messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_msg":
            inside = bool(content["data"].get("state", {}).get("msg_id", inside))
        elif inside:
            caught.append((kind, content))
    return caught


def test_in_a_kernel_the_output_holds_the_last_figure_and_its_text(kernel):
    captured(
        kernel,
        """
from minilooped import widgets
from minilooped.probes import Dial

dial = [Dial(n, 2.0 + n / 8, f"{n} times") for n in (1, 2, 4)]
slider, output = widgets.loop_dial(dial, 2).children
""",
    )
    (_, clear), (_, figure), (_, text) = captured(kernel, "slider.value = 4")
    assert clear == {"wait": True}
    assert "at 4 loops 2.500" in figure["metadata"]["image/png"]["alt"]
    assert base64.b64decode(figure["data"]["image/png"]).startswith(b"\x89PNG")
    assert text["text"] == "4 times\n"


def test_in_a_kernel_an_error_while_drawing_is_shown_where_the_figure_would_be(kernel):
    captured(
        kernel,
        """
import ipywidgets
from minilooped import widgets

def draw(n):
    print("drawing", n)
    1 / n

control = ipywidgets.IntSlider(value=1)
box = widgets.explorer(draw, n=control)
""",
    )
    (_, _), (_, text), (kind, error) = captured(kernel, "control.value = 0")
    assert text["text"] == "drawing 0\n"
    assert (kind, error["ename"]) == ("error", "ZeroDivisionError")


# ----------------------------------------------------------------------------------------------------------------------
# Plots: arrays in, Axes out


def test_loss_by_loops_draws_its_arrays():
    n_loops, losses = range(1, 6), [2.5, 2.25, 2.0, 2.125, 2.75]
    ax = plots.loss_by_loops(n_loops, losses, 3, at=5)
    curve, trained, marked = ax.lines
    assert curve.get_xydata().tolist() == [list(point) for point in zip(n_loops, losses, strict=True)]
    assert set(trained.get_xdata()) == {3}
    assert marked.get_xydata().tolist() == [[5, 2.75]]
    assert "5 loops" in ax.get_title() and "2.750" in ax.get_title()
    assert ax.get_xticks().tolist() == list(n_loops)
    assert ax.get_xlabel() and ax.get_ylabel() and [t.get_text() for t in ax.texts] == ["trained with 3"]


def test_loss_by_loops_without_a_dial_marks_nothing():
    ax = plots.loss_by_loops([1, 2], [2.5, 2.25], 2)
    assert len(ax.lines) == 2 and ax.get_title() == ""


def test_loss_by_loops_refuses_a_position_that_is_not_there():
    with pytest.raises(ValueError):
        plots.loss_by_loops([1, 2], [2.5, 2.25], 2, at=3)


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


def test_gradient_by_visit_draws_its_arrays():
    ax = plots.gradient_by_visit([3.0, 2.0, 1.0], 4.5)
    assert [bar.get_height() for bar in ax.patches] == [3.0, 2.0, 1.0]
    assert [line.get_ydata()[0] for line in ax.lines] == [6.0, 4.5, pytest.approx(14**0.5)]
    assert ax.get_ylim()[0] == 0
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [any(number in text for text in legend) for number in ("6.00", "4.50", "3.74")] == [True] * 3


def test_growth_curves_draws_the_geometric_mean_a_band_and_the_guides():
    values = np.array([[1.0, 4.0, 8.0], [4.0, 4.0, 32.0]])  # (seeds, depths)
    ax = plots.growth_curves([1, 4, 16], {"tied": values, "sqrt": 2 * values}, guides={"√N": 0.5}, title="t")
    tied, sqrt, guide = ax.lines
    np.testing.assert_allclose(tied.get_xydata(), [[1, 2], [4, 4], [16, 16]])
    np.testing.assert_allclose(sqrt.get_ydata(), [4, 8, 32])
    np.testing.assert_allclose(guide.get_xydata(), [[1, 1], [4, 2], [16, 4]])
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == 1 and band[:, 1].max() == 32
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["tied", "sqrt"] and ax.get_title() == "t"
    assert tied.get_color() == plots.TYING_LOOK["tied"][0] and sqrt.get_color() == plots.RULE_LOOK["sqrt"][0]
    ticks, labels = ax.get_yticks(), [label.get_text() for label in ax.get_yticklabels()]
    assert [float(label) for label in labels] == ticks.tolist() and 3 <= len(ticks) <= 8
    assert (np.log2(ticks) % 1 == 0).all()


def test_growth_curves_leaves_guides_out_where_no_power_law_fits():
    ax = plots.growth_curves([1, 2, 4], {"tied": np.array([[1.0, 1e5, 1e20]])}, guides={"N": 1})
    assert len(ax.lines) == 1 and not ax.texts


def test_gram_map_draws_its_matrices_on_one_scale_from_minus_one_to_one():
    matrices = {"a": np.eye(3), "b": np.full((3, 3), 0.25)}
    left, right = plots.gram_map(matrices, title="both")
    for ax, (name, matrix) in zip((left, right), matrices.items(), strict=True):
        (image,) = ax.images
        assert np.array_equal(image.get_array(), matrix) and image.get_clim() == (-1, 1) and ax.get_title() == name
    assert left.figure is right.figure and left.figure.get_suptitle() == "both"


@pytest.mark.parametrize("visits", [8, 16, 64])
def test_gram_map_cuts_off_no_label(visits):
    axes = plots.gram_map({"a": np.eye(visits), "b": np.eye(visits)}, title="both")
    plots.save(axes[0], io.BytesIO())  # draws
    assert min(ax.get_tightbbox().y0 for ax in axes) > 0


def test_planes_draws_its_numbers_with_blocks_upwards_and_loops_to_the_right():
    values = {"a": np.array([[1.0, 2.0, 64.0], [0.25, 0.0, 0.004]]), "b": np.ones((2, 3))}  # (L, N)
    left, right = plots.planes(values, (1, 8), (1, 2, 4), title="both")
    (image,) = left.images
    assert image.get_array().tolist() == [[0, 1, 5], [-2, -5, -5]] and image.origin == "lower"
    written = {t.get_position(): t.get_text() for t in left.texts}  # by (N, L), as indices
    assert written == {(0, 0): "1.00", (1, 0): "2.00", (2, 0): "64", (0, 1): "0.25", (1, 1): "0", (2, 1): "0.004"}
    assert [t.get_text() for t in left.get_xticklabels()] == ["1", "2", "4"]
    assert [t.get_text() for t in left.get_yticklabels()] == ["1", "8"]
    assert (left.get_title(), right.get_title(), left.figure.get_suptitle()) == ("a", "b", "both")
    assert len(plots.planes({name: np.ones((1, 1)) for name in "abc"}, [1], [1])[0].figure.axes) == 3


def test_exponent_plane_names_each_point_once_and_shows_points_far_out():
    points = {"none": (0.0, 0.0), "factored": (1.0, 0.5), "loom": (1.0, 0.5), "own": (2.0, 0.25)}
    ax = plots.exponent_plane(points)
    drawn = [line for line in ax.lines if line.get_marker() in ("o", "D", "P", "d")]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in drawn] == list(points.values())
    assert drawn[1].get_markersize() > drawn[2].get_markersize()  # so that both are seen
    assert [t.get_text() for t in ax.texts] == ["none", "factored\nloom", "own", "nothing grows"]
    assert ax.get_xlim()[1] > 2 and ax.get_xlabel() and ax.get_ylabel()


def test_stream_by_visit_draws_its_arrays():
    ax = plots.stream_by_visit([1.5, 2.0, 4.0], [1.0, 0.5, 0.25], 1.25, title="t")
    start, stream, branch = ax.lines
    assert set(start.get_ydata()) == {1.25} and ax.get_title() == "t"
    assert stream.get_xydata().tolist() == [[1, 1.5], [2, 2.0], [3, 4.0]]
    assert branch.get_xydata().tolist() == [[1, 1.0], [2, 0.5], [3, 0.25]]
    assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_xticks().tolist() == [1, 2]
    assert stream.get_marker() != branch.get_marker() and stream.get_linestyle() != branch.get_linestyle()


def test_six_panels_draws_a_line_per_step_on_one_scale():
    values = np.array([[[1.0, 2.0], [4.0, 8.0]], [[4.0, 8.0], [4.0, 2.0]]])  # (seeds, depths, steps + 1)
    rows = {"untied": {"none": values, "sqrt_depth": 2 * values}, "tied": {"none": 3 * values, "sqrt": 40 * values}}
    axes = plots.six_panels([1, 16], rows, title="t")
    assert [[ax.get_title() for ax in row] for row in axes] == [
        ["untied, none", "untied, sqrt_depth"],
        ["tied, none", "tied, sqrt"],
    ]
    for ax, factor in zip(axes.flat, (1, 2, 3, 40), strict=True):
        before, after, *guides = ax.lines
        np.testing.assert_allclose(before.get_xydata(), [[1, 2 * factor], [16, 4 * factor]])
        np.testing.assert_allclose(after.get_xydata(), [[1, 4 * factor], [16, 4 * factor]])
        np.testing.assert_allclose([guide.get_ydata()[1] for guide in guides], [16, 4, 1])
        assert before.get_color() != after.get_color() and before.get_linestyle() != after.get_linestyle()
        assert ax.get_xlim() == axes[0, 0].get_xlim() and ax.get_ylim() == axes[0, 0].get_ylim()
        assert ax.get_xscale() == ax.get_yscale() == "log"
    assert "L" in axes[0, 1].get_xlabel() and "N" in axes[1, 1].get_xlabel()


def test_walks_draws_each_path_and_how_far_its_end_is_from_home():
    path = np.array([[0, 0], [0, 1], [3, 4]])
    ax = plots.walks({"tied": path, "untied": -path[:2]})
    assert ax.lines[0].get_xydata().tolist() == path.tolist() and ax.lines[1].get_xydata().tolist() == [[3, 4]]
    texts = [t.get_text() for t in ax.get_legend().get_texts()]
    assert texts[:2] == ["tied: 5.0 from home", "untied: 1.0 from home"] and ax.get_aspect() == 1


@pytest.mark.parametrize(
    "plot",
    [
        lambda ax: plots.costs([1, 2], {"flat": [1, 1]}, ax=ax),
        lambda ax: plots.gradient_by_visit([2.0, 1.0], 2.5, ax=ax),
        lambda ax: plots.growth_curves([1, 2], {"none": [[1.0, 2.0]]}, ax=ax),
        lambda ax: plots.walks({"tied": [[0, 0], [1, 1]]}, ax=ax),
        lambda ax: plots.exponent_plane({"none": (0, 0)}, ax=ax),
        lambda ax: plots.lr_curves([0.1, 0.2], {"none": np.ones((1, 2))}, ax=ax),
        lambda ax: plots.stream_by_visit([1.0, 2.0], [1.0, 1.0], 1.0, ax=ax),
        lambda ax: plots.loss_by_loops([1, 2], [2.5, 2.25], 2, ax=ax),
    ],
)
def test_plots_draw_into_the_axes_given(plot):
    left, right = Figure().subplots(1, 2)
    assert plot(right) is right and right.lines and not left.lines


def test_figure_leaves_the_reader_s_own_style_alone():
    with plt.rc_context({"font.size": 3}):
        plots.figure(figsize=(2, 1))
        assert plt.rcParams["font.size"] == 3


def test_show_gives_an_opaque_picture_with_alt_text(shown):
    ax = plots.figure(figsize=(2, 1))
    ax.plot([1, 2], [3, 4])
    plots.show(ax, "a line that rises")
    (image,) = shown
    assert image.alt == "a line that rises"
    pixels = png(image)
    assert pixels.shape == (100, 200, 4) and (pixels[..., 3] == 1).all()
    assert (pixels[0, 0] == 1).all(), "white, on a dark page too"


# ----------------------------------------------------------------------------------------------------------------------
# The benchmark of slider moves

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def sliders():
    return runpy.run_path(str(ROOT / "benchmarks/sliders.py"))


def test_every_widget_is_in_the_benchmark_and_recorded_within_its_bar(sliders):
    functions = inspect.getmembers(widgets, inspect.isfunction)
    of_widgets = {name for name, f in functions if inspect.signature(f).return_annotation is ipywidgets.VBox}
    assert sliders["WIDGETS"].keys() == of_widgets - {"explorer"}
    recorded = json.loads((ROOT / "data/results/sliders.json").read_text(encoding="utf-8"))["rows"]
    assert [row["widget"] for row in recorded] == list(sliders["WIDGETS"]), "run python benchmarks/sliders.py"
    assert all(row["cpu_worst"] <= sliders["BAR"] for row in recorded)


def test_the_benchmark_moves_every_control_over_all_its_values_and_times_the_drawing(sliders, monkeypatch):
    now, drawn, forgotten = 0.0, [], []
    clock = SimpleNamespace(process_time=lambda: now, perf_counter=lambda: 2 * now)
    monkeypatch.setitem(sliders["seconds_per_move"].__globals__, "time", clock)
    monkeypatch.setitem(sliders["seconds_per_move"].__globals__, "forget", lambda: forgotten.append(len(drawn)))

    def draw(n: int, x: float, rule: str):
        nonlocal now
        now += (5 if rule == "sqrt" else 1) + 100 * ((n, x, rule) not in drawn)  # a first drawing is slow
        drawn.append((n, x, rule))
        IPython.display.display(plots.Picture(b"", "nothing"))

    controls = dict(
        n=ipywidgets.IntSlider(min=2, max=6, step=2, value=4),
        x=ipywidgets.FloatSlider(min=0, max=1, step=0.5, value=0),
        rule=ipywidgets.Dropdown(options=("none", "sqrt", "inverse"), value="inverse"),
    )
    seconds = sliders["seconds_per_move"](lambda: widgets.explorer(draw, **controls))
    one_moved = {(n, 0, "inverse") for n in (2, 4, 6)} | {(4, x, "inverse") for x in (0, 0.5, 1)}
    one_moved |= {(4, 0, rule) for rule in ("none", "sqrt", "inverse")}
    from_the_ends = {(n, 1, "inverse") for n in (2, 4, 6)} | {(6, x, "inverse") for x in (0, 0.5, 1)}
    from_the_ends |= {(6, 1, rule) for rule in ("none", "sqrt", "inverse")}
    assert seconds.keys() == one_moved | from_the_ends
    assert all(took == ((5, 10) if rule == "sqrt" else (1, 2)) for (_, _, rule), took in seconds.items())
    assert len(forgotten) == len(set(forgotten)) > len(seconds), "before each move that is timed"


def test_the_benchmark_refuses_a_widget_that_shows_nothing(sliders, monkeypatch):
    monkeypatch.setitem(sliders["seconds_per_move"].__globals__, "forget", lambda: None)
    control = ipywidgets.IntSlider(max=2, description="n")
    with pytest.raises(RuntimeError, match="n: 0 pictures after a move, expected one"):
        sliders["seconds_per_move"](lambda: widgets.explorer(lambda n: None, n=control))


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 7: experts in a loop


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


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 8: the switchboard


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


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 9: the segment cutter


def test_segment_cutter_opens_on_its_static_twin_and_follows_its_controls(shown):
    controls = controls_of(widgets.segment_cutter())
    widgets.draw_segment_cutter()
    controls["loops"].value = 7
    controls["segment"].value = 4
    widgets.draw_segment_cutter(n_loop=7, segment=4)
    assert len(shown) == 5
    for a, b in ((0, 1), (3, 4)):
        assert np.array_equal(png(shown[a]), png(shown[b])) and shown[a].alt == shown[b].alt
    assert not np.array_equal(png(shown[2]), png(shown[3]))


@pytest.mark.parametrize(("n_loop", "segment", "losses"), [(9, 3, "3 losses"), (5, 4, "2 losses"), (3, 12, "1 loss")])
def test_segment_cutter_shows_what_the_probes_measure(n_loop, segment, losses, shown, monkeypatch):
    calls = drawn_by(monkeypatch, "segment_cuts")
    widgets.draw_segment_cutter(n_loop, segment)
    (reach,), options = calls[0]
    config = dataclasses.replace(widgets.CUTTER, n_loop=n_loop, segment=segment)
    assert ((reach > 0).int().sum(1).tolist(), len(reach)) == ([len(loops) for loops in config.segments()], len(reach))
    model, tokens = probes.fresh(config, 0, (2, 33))
    held = probes.batch_bytes(model, tokens[:, :-1], tokens[:, 1:])
    whole_model, _ = probes.fresh(dataclasses.replace(config, segment=None), 0, (2, 33))
    whole = probes.batch_bytes(whole_model, tokens[:, :-1], tokens[:, 1:])
    assert f"{losses}; {held / 1e6:.2f} MB held, {held / whole:.0%} of ordinary backprop's" in shown[0].alt
    memory = options["ax"].figure.axes[1]
    assert [bar.get_height() for bar in memory.patches] == pytest.approx([whole / 1e6, held / 1e6])
    assert max(whole, held) / 1e6 < memory.get_ylim()[1]
    assert options["ax"].figure.get_suptitle() in shown[0].alt


def test_a_move_of_the_segment_cutter_takes_little_time(shown):
    controls = controls_of(widgets.segment_cutter())
    assert_quick(controls["loops"], 6, 12)
    assert_quick(controls["segment"], 1, 12)


def test_segment_cuts_draws_a_dot_at_each_read_out_and_a_line_at_each_cut():
    ax = plots.segment_cuts([[1, 2, 0, 0, 0], [0, 0, 3, 1, 0], [0, 0, 0, 0, 1e-9]], title="cuts")
    dots, *cuts = ax.lines
    assert dots.get_xydata().tolist() == [[1, 0], [3, 1], [4, 2]]
    assert [line.get_xdata()[0] for line in cuts] == [1.5, 3.5]
    shades = np.asarray(ax.images[0].get_array())
    np.testing.assert_allclose(shades[0], [0.625, 1, 0, 0, 0])
    assert shades[2].tolist() == [0, 0, 0, 0, 1] and ax.get_title() == "cuts"
    assert [label.get_text() for label in ax.get_xticklabels()] == list("12345")


def test_held_bytes_draws_megabytes_from_zero():
    ax = plots.held_bytes([1, 3], {"whole": [1e6, 3e6], "cut": [1e6, 1e6]})
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[1, 1], [3, 3]], [[1, 1], [3, 1]]]
    assert ax.get_ylim()[0] == 0 and len({line.get_linestyle() for line in ax.lines}) == 2


def test_loss_after_each_loop_draws_mean_and_band():
    ax = plots.loss_after_each_loop({"full": [[3.0, 2, 1], [5.0, 2, 1]], "step": [[2.0, 2, 2]]}, trained=2)
    full, step, trained = ax.lines
    assert full.get_xydata().tolist() == [[1, 4], [2, 2], [3, 1]] and step.get_ydata().tolist() == [2, 2, 2]
    assert trained.get_xdata()[0] == 2
    low, high = ax.collections[0].get_datalim(ax.transData).intervaly
    assert (low, high) == (1, 5)


def test_agreement_draws_a_line_for_each_way():
    ax = plots.agreement([1, 5], {"cut": [[0.9, 0.8]], "segments": [[0.9, 0.5], [0.7, 0.3]]}, title="K = 3")
    assert [line.get_ydata().tolist() for line in ax.lines] == [[0.9, 0.8], pytest.approx([0.8, 0.4])]
    low, high = ax.collections[1].get_datalim(ax.transData).intervaly
    assert (low, high) == (0.3, 0.9)
    assert ax.get_ylim()[0] == 0 and ax.get_title() == "K = 3" and ax.get_xlabel() == "training step"


def test_held_and_peak_draws_one_scale_and_the_spread():
    left = plots.held_and_peak([3, 6], {"cut": [[1e6, 1e6]]}, {"cut": torch.tensor([[2e6, 4e6], [3e6, 8e6]])})
    right = left.figure.axes[1]
    assert left.lines[0].get_ydata().tolist() == [1, 1] and right.lines[0].get_ydata().tolist() == [2.5, 6]
    low, high = right.collections[0].get_datalim(right.transData).intervaly
    assert (low, high) == (2, 8) and left.get_ylim() == right.get_ylim() == (0, pytest.approx(8.4))


# -- chapter 6 ---------------------------------------------------------------------------------------------------------


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


def test_norms_by_round_and_values_by_rule_draw_their_arrays():
    streams = {2: {"none": [[1.0, 2.0], [4.0, 8.0]]}, 4: {"none": [[1.0, 1.0, 1.0, 3.0]]}}
    gradients = {R: {rule: 1 / np.array(v) for rule, v in curves.items()} for R, curves in streams.items()}
    axes = plots.norms_by_round(streams, gradients)
    assert axes.shape == (2, 2) and [ax.get_title() for ax in axes[0]] == ["R = 2", "R = 4"]
    assert axes[0, 0].lines[0].get_xydata() == pytest.approx(np.array([[1, 2], [2, 4]]))  # geometric means
    assert axes[1, 1].lines[0].get_xydata() == pytest.approx(np.array([[1, 1], [2, 1], [3, 1], [4, 1 / 3]]))
    band = axes[1, 0].collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == 1 / 8 and band[:, 1].max() == 1
    ax = plots.values_by_rule([1, 8], {"none": [[1.0, 2.0], [3.0, 6.0]]}, xlabel="R", ylabel="loss")
    assert ax.lines[0].get_xydata().tolist() == [[1, 2], [8, 4]] and ax.get_xlabel() == "R"
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == 1 and band[:, 1].max() == 6


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 11: the dial and the lens


@pytest.fixture
def lens_widget(model, tokenizer):
    curves = {"fixed": torch.tensor([[3.0, 2.0, 2.5], [3.0, 1.0, 2.5]]), "drawn": torch.tensor([[2.0, 2.0, 2.25]])}
    models = {"mine": model, "looser": LoopedGPT(dataclasses.replace(model.config, n_loop=3)).eval()}
    return curves, models, tokenizer, "abcdefgh a"


def test_loop_lens_opens_on_its_static_twin_and_follows_its_controls(lens_widget, shown):
    *given, text = lens_widget
    controls = controls_of(widgets.loop_lens(*lens_widget))
    widgets.draw_loops(*given, "fixed", "mine", TRAINED, text)
    controls["recorded"].value, controls["your"].value = "drawn", "looser"
    controls["loops"].value, controls["text"].value = 3, "hag"
    widgets.draw_loops(*given, "drawn", "looser", 3, "hag")
    assert np.array_equal(png(shown[0]), png(shown[1])) and np.array_equal(png(shown[-2]), png(shown[-1]))
    moves = [png(image) for image in (shown[0], *shown[2:-1])]
    assert len(moves) == 5 and all(not np.array_equal(a, b) for a, b in itertools.pairwise(moves))


def test_loop_lens_shows_the_recorded_loss_and_what_the_model_says(lens_widget, shown, monkeypatch):
    *given, text = lens_widget
    drawn = []
    monkeypatch.setattr(plots, "lens_table", lambda *args, **options: drawn.append((args, options)))
    widgets.draw_loops(*given, "fixed", "mine", 3, text)
    (said, right, read, wanted), options = drawn[0]
    _, models, tokenizer, _ = lens_widget
    ids = torch.as_tensor(tokenizer.encode("abcdefgh "))  # a window and the one letter that comes next
    assert "".join(read) == "abcdefgh" and "".join(wanted) == "bcdefgh " and options["trained"] == TRAINED
    lens = probes.logit_lens(models["mine"], ids[:-1], ids[1:], 3)
    assert ["".join(row) for row in said] == [tokenizer.decode(row) for row in lens.token]
    assert np.array_equal(right, lens.right.numpy())
    share = (lens.token[-1] == ids[1:]).float().mean()
    assert (
        "read out after loop 3: 2.500 nats, 1.000 above loop 2" in shown[0].alt and f"{share:.0%} right" in shown[0].alt
    )


def test_a_move_of_the_loop_lens_takes_little_time(lens_widget, shown):
    assert_quick(controls_of(widgets.loop_lens(*lens_widget))["loops"], 1, 3)


def test_lens_table_writes_what_is_said_and_marks_what_is_right():
    said, right = [["a", "b"], ["a", "c"], ["c", " "]], [[0.1, 0.2], [0.7, 0.3], [0.0, 1.0]]
    ax = plots.lens_table(said, right, ["x", "\n"], ["a", " "], trained=2, title="t")
    written = {tuple(t.get_position()): (t.get_text(), t.get_fontweight()) for t in ax.texts}
    assert written == {
        (0, 0): ("a", "bold"),
        (1, 0): ("␣", "bold"),
        (0, 1): ("a", "bold"),
        (1, 1): ("b", "normal"),
        (0, 2): ("a", "bold"),
        (1, 2): ("c", "normal"),
        (0, 3): ("c", "normal"),
        (1, 3): ("␣", "bold"),
    }
    assert np.array_equal(ax.images[0].get_array(), right) and ax.images[0].get_clim() == (0, 1)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["x", "⏎"] and ax.get_title() == "t"
    assert [t.get_text() for t in ax.get_yticklabels()] == ["comes next", "loop 1", "loop 2", "loop 3"]
    assert [line.get_ydata()[0] for line in ax.lines] == [2.5] and ax.get_ylim() == (3.5, -0.5)
    assert not plots.lens_table(said, right, ["x", "y"], ["a", "b"], trained=3).lines


def test_exits_equal_work_and_accuracy_by_hops_draw_their_arrays():
    ax = plots.exits([3.0, 2.0], {"kl": [(1.5, 2.1), (1.2, 2.5)]}, title="t")
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[1, 3], [2, 2]], [[1.2, 2.5], [1.5, 2.1]]]
    ax = plots.equal_work(["2 x 1", "2 x 4"], {"C = 1": [[3.0, 2.0], [5.0, 2.5]], "C = 2": [[1.0, 1.5]]})
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[0, 4], [1, 2.25]], [[0, 1], [1, 1.5]]]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["2 x 1", "2 x 4"]
    ax = plots.accuracy_by_hops([1, 4], {"2 x 1": [[1.0, 0.5], [1.0, 0.7]]}, {"repeat": [0.0, 0.25]}, title="t")
    model, repeat = ax.lines
    assert model.get_ydata().tolist() == [1, 0.6] and repeat.get_ydata().tolist() == [0, 0.25]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "4"] and ax.get_title() == "t"


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 10: the planner


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
