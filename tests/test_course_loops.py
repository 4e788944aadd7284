"""The loop dial and the lens: probe, plots and explorers."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from figures import LETTERS, assert_quick, controls_of, png, printed

from minilooped.course import plots, widgets
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.science import probes
from minilooped.train import sample

N_LOOPS = (1, 2, 3, 5)  # not each the next, so that a position and its loop count are told apart


TRAINED = 2


@pytest.fixture(scope="module")
def tokenizer():
    return LETTERS


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


def test_loss_after_each_loop_draws_mean_and_band():
    ax = plots.loss_after_each_loop({"full": [[3.0, 2, 1], [5.0, 2, 1]], "step": [[2.0, 2, 2]]}, trained=2)
    full, step, trained = ax.lines
    assert full.get_xydata().tolist() == [[1, 4], [2, 2], [3, 1]] and step.get_ydata().tolist() == [2, 2, 2]
    assert trained.get_xdata()[0] == 2
    low, high = ax.collections[0].get_datalim(ax.transData).intervaly
    assert (low, high) == (1, 5)


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
