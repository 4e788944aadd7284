"""How the stream grows: with depth, with loops, from visit to visit."""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from .style import LINE, MARKED, QUIET, figure, in_style, look


def norm_growth(n_loops: Sequence[int], rms: Mapping[str, Sequence[float]], *, ax: Axes | None = None) -> Axes:
    """RMS of the stream against the loop count, both axes logarithmic, a line per rule, guides of slope 1, 1/2, 0."""
    curves = {rule: np.asarray(values)[None] for rule, values in rms.items()}  # (1, loop counts) each
    guides = {"N": 1, "√N": 0.5, "1": 0}
    return growth_curves(n_loops, curves, guides=guides, xlabel="loops N", ylabel="RMS of the stream", ax=ax)


@in_style
def walks(paths: Mapping[str, ArrayLike], *, ax: Axes | None = None) -> Axes:
    """Walks in the plane from the origin, (steps + 1, 2) each, named tied (keeps its heading) or untied (does not)."""
    ax = figure(figsize=(7, 2.8)) if ax is None else ax
    for name, path in paths.items():
        x, y = np.asarray(path).T
        style = look(name)
        label = f"{name}: {np.hypot(x[-1], y[-1]):.1f} from home"
        ax.plot(x, y, **style | {"linestyle": "-", "markersize": 3}, linewidth=1)
        ax.plot(x[-1], y[-1], **style | {"linestyle": "none", "markersize": 10}, label=label)
    ax.plot(0, 0, color="black", marker="+", markersize=14, linestyle="none", label="home")
    ax.set(xlabel="steps east", ylabel="steps north")
    ax.set_aspect("equal", adjustable="datalim")
    ax.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return ax


@in_style
def growth_curves(
    depths: Sequence[int],
    curves: Mapping[str, ArrayLike],
    *,
    guides: Mapping[str, float] | None = None,
    title: str = "",
    xlabel: str = "visits N",
    ylabel: str = "RMS of the stream, $R_N$",
    ax: Axes | None = None,
) -> Axes:
    """Growth with depth on log-log axes: a line for the geometric mean over seeds, a band from the least to the most.

    curves: (seeds, depths) by name, where a name has a look of its own (a rule, "tied", "untied"). guides: exponents by
    label, drawn as dotted lines through 1 at depth 1, on which a slope is read off.
    """
    ax = figure() if ax is None else ax
    for name, values in curves.items():
        values = np.asarray(values)
        ax.plot(depths, np.exp(np.log(values).mean(0)), **look(name), label=name)
        ax.fill_between(depths, values.min(0), values.max(0), color=look(name)["color"], alpha=0.15, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    bottom, top = ax.get_ylim()
    plain = top / bottom < 1e5  # a power law; what is steeper leaves every guide on the floor
    for label, slope in (guides or {}).items() if plain else ():
        ax.plot(depths, np.power(depths, slope, dtype=float), color=QUIET, linestyle=":", linewidth=1)
        ax.annotate(
            label,
            (depths[-1], depths[-1] ** slope),
            (8, -4),
            textcoords="offset points",
            color=QUIET,
            annotation_clip=False,
        )
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title, xticks=depths, xticklabels=[str(n) for n in depths])
    ax.minorticks_off()
    if plain:  # plain numbers, as many as fit; powers of ten speak better of more
        octaves = np.arange(*np.ceil(np.log2(ax.get_ylim())))
        ticks = 2.0 ** octaves[:: 1 + (len(octaves) - 1) // 8]  # eight at most
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.legend(frameon=False)
    return ax


@in_style
def gram_map(matrices: Mapping[str, ArrayLike], *, title: str = "", axes: Sequence[Axes] | None = None) -> list[Axes]:
    """Cosines between increments, (visits, visits) by name, side by side on one scale from -1 to 1."""
    if axes is None:
        size = 3.4 * len(matrices) + 0.9, 3.8 if title else 3.6  # square maps are cut off below if it is less
        axes = list(Figure(figsize=size).subplots(1, len(matrices), squeeze=False)[0])
    for ax, (name, matrix) in zip(axes, matrices.items(), strict=True):
        image = ax.imshow(np.asarray(matrix), cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        ax.set(title=name, xlabel="visit j", ylabel="visit i")
        ax.grid(False)
    axes[0].figure.colorbar(image, ax=axes, label="cosine of $r_i$ and $r_j$")
    if title:
        axes[0].figure.suptitle(title)
    return list(axes)


@in_style
def planes(
    values: Mapping[str, ArrayLike],
    n_layers: Sequence[int],
    n_loops: Sequence[int],
    *,
    title: str = "",
    axes: Sequence[Axes] | None = None,
) -> list[Axes]:
    """Heat maps over loops N (to the right) and blocks L (up), (L, N) by name, two in a row, a number in each cell.

    One logarithmic scale for all figures: white is 1, red is larger, blue smaller; beyond 1/32 and 32 it saturates.
    """
    if axes is None:
        rows = math.ceil(len(values) / 2)
        every = list(Figure(figsize=(7, 3.3 * rows)).subplots(rows, 2, squeeze=False).flat)
        axes, spare = every[: len(values)], every[len(values) :]
        for ax in spare:
            ax.remove()
    for ax, (name, plane) in zip(axes, values.items(), strict=True):
        plane = np.asarray(plane)
        octaves = np.log2(np.clip(plane, 1 / 32, 32))
        ax.imshow(octaves, cmap="RdBu_r", vmin=-5, vmax=5, origin="lower", aspect="auto")
        for (i, j), value in np.ndenumerate(plane):
            colour = "white" if abs(octaves[i, j]) > 3 else "black"  # readable on the ground of its cell
            digits = ".1g" if value < 0.0995 else ".2f" if value < 9.995 else ".0f"
            ax.text(j, i, f"{value:{digits}}", color=colour, ha="center", va="center")
        ax.set(title=name, xlabel="loops N", ylabel="blocks L")
        ax.set_xticks(range(len(n_loops)), [str(n) for n in n_loops])
        ax.set_yticks(range(len(n_layers)), [str(n) for n in n_layers])
        ax.grid(False)
    if title:
        axes[0].figure.suptitle(title, fontsize=11)
    return list(axes)


@in_style
def six_panels(
    depths: Sequence[int],
    rows: Mapping[str, Mapping[str, ArrayLike]],
    *,
    title: str = "",
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """Growth with depth in the first training steps: a row of panels each for "untied" and "tied", on one scale.

    rows: (seeds, depths, steps + 1) by rule. A line per training step, dark to bright, geometric mean over seeds; the
    dotted guides have slopes 1, 1/2 and 0. Returns the axes, (rows, panels in a row).
    """
    if axes is None:
        shape = len(rows), max(map(len, rows.values()))
        axes = Figure(figsize=(9, 5.6)).subplots(*shape, sharex=True, sharey=True, squeeze=False)
    colours = matplotlib.colormaps["viridis"].resampled(256)
    for row, (tying, panels) in zip(axes, rows.items(), strict=True):
        for ax, (rule, values) in zip(row, panels.items(), strict=True):
            lines = np.exp(np.log(np.asarray(values)).mean(0)).T  # (steps + 1, depths)
            last = len(lines) - 1
            for step, line in enumerate(lines):
                style = {0: dict(marker="o", linestyle="--"), last: dict(marker="s")}.get(step, dict(linewidth=1))
                ax.plot(depths, line, color=colours(0.9 * step / max(1, last)), markersize=5, **style)
            for slope in (1, 0.5, 0):
                ax.plot(depths, np.power(depths, slope, dtype=float), color=QUIET, linestyle=":", linewidth=1)
            ax.set_title(f"{tying}, {rule}", fontsize=11)
        row[0].set_ylabel("RMS of the stream")
    for ax in axes.flat:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(depths, [str(depth) for depth in depths])
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for ax, label in zip(axes[:, axes.shape[1] // 2], ("blocks L, at one loop", "loops N"), strict=False):
        ax.set_xlabel(label)
    steps = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, last / 0.9), colours)
    bar = axes[0, 0].figure.colorbar(steps, ax=axes, label="training step", boundaries=np.arange(last + 2) - 0.5)
    bar.set_ticks(range(0, last + 1, max(1, last // 5)))
    if title:
        axes[0, 0].figure.suptitle(title)
    return axes


@in_style
def stream_by_visit(
    stream: ArrayLike, branch: ArrayLike, start: float, *, title: str = "", ax: Axes | None = None
) -> Axes:
    """RMS of the stream after 1, 2, ... visits, and of the last visit's increment, on log-log axes.

    start: the stream's RMS before the first visit, as a dashed line.
    """
    ax = figure() if ax is None else ax
    visits = range(1, len(np.asarray(stream)) + 1)
    ax.axhline(start, color=QUIET, linestyle="--", linewidth=1.5, label="stream at the start, $R_0$")
    ax.plot(visits, stream, color=LINE, marker="o", markersize=4, label="stream")
    ax.plot(visits, branch, color=MARKED, marker="s", markersize=4, linestyle=":", label="increment")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ticks = [1 << k for k in range(len(visits).bit_length())]
    ax.set(xlabel="visits so far", ylabel="RMS", title=title)
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.legend(loc="upper left")
    return ax


@in_style
def norms_by_round(
    streams: Mapping[int, Mapping[str, ArrayLike]], gradients: Mapping[int, Mapping[str, ArrayLike]]
) -> np.ndarray:
    """A column of two panels per round count R: RMS of the stream after each round, gradient of the stream before it.

    Both hold (seeds, R) by R and rule: a line for the geometric mean over seeds, a band from the least to the most.
    Each rule's line is thinner than the one before, so that two that coincide are both seen. Returns the axes,
    (2, columns); the panels of a row share their scale.
    """
    axes = Figure(figsize=(9, 5)).subplots(2, len(streams), sharey="row", squeeze=False)
    for row, by_R in zip(axes, (streams, gradients), strict=True):
        for ax, (R, curves) in zip(row, by_R.items(), strict=True):
            for i, (rule, values) in enumerate(curves.items()):
                rounds, values = range(1, R + 1), np.asarray(values)
                width = dict(linewidth=1.5 * (len(curves) - i), markersize=4)
                ax.plot(rounds, np.exp(np.log(values).mean(0)), **look(rule) | width, label=rule)
                ax.fill_between(rounds, values.min(0), values.max(0), color=look(rule)["color"], alpha=0.3, linewidth=0)
            ax.set_yscale("log", base=10)
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.yaxis.set_minor_formatter(lambda value, _: "")
            ax.set_xticks([1, R // 2, R] if R > 3 else range(1, R + 1))
    for ax, R in zip(axes[0], streams, strict=True):
        ax.set_title(f"R = {R}")
    for ax in axes[1]:
        ax.set_xlabel("round")
    axes[0, 0].set_ylabel("RMS of the\nstream after it")
    axes[1, 0].set_ylabel("norm of the\ngradient before it")
    axes[0, 0].legend(fontsize=9)
    return axes
