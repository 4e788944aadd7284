"""The look that all figures share, and how they are shown."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from figures import png
from matplotlib.figure import Figure

from minilooped.course import plots


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
