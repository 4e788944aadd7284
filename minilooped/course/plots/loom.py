"""Variants of one model beside each other."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from ...science.stats import interval
from .style import ARM_LOOK, LINE, MARKED, OWN_LOOK, QUIET, Style, figure, in_style, mean_and_range


@in_style
def variants(
    x: Sequence[float],
    curves: Mapping[str, ArrayLike],
    *,
    front: str | None = None,
    title: str = "",
    xlabel: str = "loops H",
    ylabel: str = "variance of the stream",
    ax: Axes | None = None,
) -> Axes:
    """Curves on a logarithmic axis: a line for the mean over seeds, a band from the least to the most.

    curves: (seeds, points) by name, a key of ARM_LOOK or `front`: the one to bring to the front, in black; the others
    are then thin and dashed.
    """
    ax = figure() if ax is None else ax
    for name, values in curves.items():
        colour, marker = OWN_LOOK if name == front else ARM_LOOK[name]
        back = dict() if front in (None, name) else dict(linestyle="--", linewidth=1.3, markersize=5)
        style = dict(color=colour, marker=marker, zorder=3 if name == front else 2) | back
        mean_and_range(ax, x, values, alpha=0.25, label=name, **style)
    ax.set_yscale("log")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, fontsize=11)
    if len(x) <= 8:
        ax.set_xticks(x)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.legend()
    return ax


@in_style
def differences(
    rows: Mapping[str, ArrayLike],
    *,
    published: Mapping[str, float] | None = None,
    title: str = "",
    xlabel: str = "nats per character above the full recipe",
    ax: Axes | None = None,
) -> Axes:
    """Paired differences (seeds,) by name, a row each: every seed, and the mean with its interval by Student's t.

    published: values to set beside them, by name, as stars, in nats per token.
    """
    ax = figure(figsize=(8, 0.9 + 0.42 * len(rows))) if ax is None else ax
    ax.axvline(0, color=QUIET, linestyle="--", linewidth=1.5, zorder=1)
    for y, (name, values) in enumerate(rows.items()):
        values = np.asarray(values)
        mean, half = interval(torch.as_tensor(values))
        own: Style = dict(color=LINE, marker="D", capsize=4, label="mean, 95 % (Student's t)" if y == 0 else None)
        ax.errorbar(mean, y, xerr=half, linestyle="none", zorder=3, **own)
        seeds: Style = dict(
            color=MARKED, marker="o", markersize=5, linestyle="none", label="a seed" if y == 0 else None
        )
        ax.plot(values, np.full(len(values), y + 0.25), **seeds)
        if published and name in published:
            first = name == next(iter(published))
            star: Style = dict(color="black", marker="*", markersize=13, linestyle="none")
            ax.plot(published[name], y, **star, label="published, nats per token" if first else None)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(xlabel=xlabel, ylim=(len(rows) - 0.4, -0.6))
    ax.set_title(title, fontsize=11)
    ax.legend(loc="best")
    return ax
