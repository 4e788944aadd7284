"""The segment cutter shows what the probes measure, the plots draw their arrays."""

import dataclasses

import numpy as np
import pytest
import torch
from figures import assert_quick, controls_of, drawn_by, png

from minilooped.course import plots, widgets
from minilooped.science import probes


def test_gradient_by_visit_draws_its_arrays():
    ax = plots.gradient_by_visit([3.0, 2.0, 1.0], 4.5)
    assert [bar.get_height() for bar in ax.patches] == [3.0, 2.0, 1.0]
    assert [line.get_ydata()[0] for line in ax.lines] == [6.0, 4.5, pytest.approx(14**0.5)]
    assert ax.get_ylim()[0] == 0
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [any(number in text for text in legend) for number in ("6.00", "4.50", "3.74")] == [True] * 3


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
