"""Drawings: what stands in them, and that they are made the same twice."""

from pathlib import Path

import pytest
from matplotlib.patches import FancyBboxPatch

from minilooped.course import plots

RESULTS = Path(__file__).parents[1] / "data" / "results"


def words(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("n", [2, 12, 16])
def test_the_loop_has_as_many_boxes_as_blocks_and_the_work_of_both_sides_is_the_same(n):
    ax = plots.the_loop(n)
    assert sum(isinstance(patch, FancyBboxPatch) for patch in ax.patches) == n + 1
    assert {f"weights: {n}", "weights: 1", f"work: {n} visits", f"{n} times", "one block"} <= set(words(ax))
    weights, work, few, same = (bars[0].get_width() for bars in ax.containers)
    assert weights == work == same and few == pytest.approx(weights / n)


@pytest.mark.parametrize("n", [1, 17])
def test_the_loop_is_drawn_for_as_many_boxes_as_one_can_see(n):
    with pytest.raises(ValueError, match=f"n={n} must be from 2 to 16"):
        plots.the_loop(n)


def test_the_readmes_drawing_is_the_one_that_is_made(tmp_path):
    plots.save(plots.the_loop(), tmp_path / "the_loop.svg")
    made, stored = ((folder / "the_loop.svg").read_text(encoding="utf-8") for folder in (tmp_path, RESULTS))
    assert made.count("<path") == stored.count("<path")
    plots.save(plots.the_loop(), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == made
