"""Losses over learning rates."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from .style import figure, in_style


@in_style
def lr_curves(
    lrs: Sequence[float],
    curves: Mapping[str, ArrayLike],
    *,
    at: str | None = None,
    best: Mapping[str, float] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Loss over the learning rate, on a logarithmic axis: a line for the mean over seeds, a band from least to most.

    curves: (seeds, learning rates) by name, from dark to light; runs that diverged are left out. at: the name to bring
    to the front. best: learning rates by name, marked at the foot of the axes.
    """
    ax = figure() if ax is None else ax
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(curves)))
    for (name, values), colour, marker in zip(curves.items(), shades, cycle("os^DvPX*"), strict=False):
        values = np.where(np.isfinite(values), values, np.nan)
        front = at is None or name == at
        style = dict(color=colour, marker=marker, alpha=1 if front else 0.35, zorder=3 if front else 2)
        ax.plot(lrs, values.mean(0), label=name, **style)
        if front:
            ax.fill_between(lrs, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
        if best is not None:
            foot = ax.get_xaxis_transform()  # learning rate across, share of the height up
            ax.plot(best[name], 0, transform=foot, clip_on=False, markersize=10, **style, linestyle="none")
    bottom, top = ax.dataLim.intervaly
    if bottom > 0 and top > 20 * bottom:
        ax.set_yscale("log")
    ax.set_xscale("log", base=2)
    ax.minorticks_off()
    ax.set_xticks(lrs, [f"{1000 * lr:g}" for lr in lrs])
    ax.set(xlabel="learning rate, thousandths", ylabel="loss")
    ax.set_title(title, fontsize=11)
    ax.legend()
    return ax
