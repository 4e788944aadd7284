"""Growth: the explorers show the numbers of toy and probes, the plots draw their arrays."""

import io
import itertools

import numpy as np
import pytest
import torch
from figures import assert_quick, controls_of, drawn_by, png

from minilooped.course import plots, widgets
from minilooped.model import LoopedConfig
from minilooped.science import probes, toy

EXPLORERS = {widgets.norm_growth: widgets.draw_norm_growth, widgets.gram_heatmap: widgets.draw_gram_heatmap}


@pytest.fixture(params=EXPLORERS, ids=lambda explorer: explorer.__name__)
def explorer(request):
    return request.param


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
