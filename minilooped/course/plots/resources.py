"""What training takes, and how it goes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import LINE, MARKED, QUIET, Style, figure, in_style, mean_and_range


@in_style
def costs(
    n_loops: Sequence[int],
    ratios: Mapping[str, Sequence[float]],
    *,
    at: int | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Several costs over the loop count, each as a multiple of its value at one block and one loop.

    at: the loop count to mark with a ring on each curve.
    """
    ax = figure() if ax is None else ax
    looks = zip((LINE, MARKED, "#1e8449"), ("o", "s", "^"), ("-", "--", ":"), strict=True)
    for (name, values), (colour, marker, line) in zip(ratios.items(), looks, strict=False):
        ax.plot(n_loops, values, color=colour, marker=marker, linestyle=line, label=name)
        if at is not None:
            ring: Style = dict(marker="o", markersize=15, markerfacecolor="none", markeredgewidth=1.5)
            ax.plot([at], [values[list(n_loops).index(at)]], color=QUIET, linestyle="none", **ring)
    ax.set(xlabel="loops N", ylabel="times 1 block, 1 loop", xticks=list(n_loops), title=title)
    ax.legend(loc="upper left")
    return ax


@in_style
def memory_bars(
    settings: Mapping[str, Mapping[str, float]],
    *,
    cards: Sequence[float] = (),
    end: float | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Bytes by part, laid end to end, a bar for each setting from top to bottom, its sum in gigabytes behind it.

    settings: bytes by part by name, the same parts in each. cards: gigabytes at which a dashed line stands, as the
    memory of a GPU. end: gigabytes at which the axis ends; None: behind the longest bar.
    """
    ax = figure(figsize=(9, 1.9 + 0.42 * len(settings))) if ax is None else ax
    looks = zip((LINE, "#d68910", "#1e8449", MARKED, "#9aa0a6"), ("", "//", "..", "", "xx"), strict=True)
    sums = np.zeros(len(settings))
    for part, (colour, hatch) in zip(next(iter(settings.values())), looks, strict=False):
        sizes = np.array([parts[part] / 1e9 for parts in settings.values()])
        ax.barh(range(len(sizes)), sizes, left=sums, color=colour, hatch=hatch, edgecolor="white", label=part)
        sums = sums + sizes
    end = 1.15 * max(sums) if end is None else end
    for y, size in enumerate(sums):
        outside = size > 0.92 * end  # no room behind the bar
        ax.annotate(
            f"{size:.1f} GB",
            (min(size, end), y),
            xytext=(-6 if outside else 6, 0),
            textcoords="offset points",
            ha="right" if outside else "left",
            va="center",
            fontweight="bold",
            bbox=dict(facecolor="white", edgecolor="none", pad=1.5, alpha=0.85),
        )
    for card in cards:
        ax.axvline(card, color="black", linestyle="--", linewidth=1.2, zorder=0.5)
        ax.annotate(f"{card:g}", (card, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    ax.set_yticks(range(len(sums)), list(settings))
    ax.set(xlim=(0, end), ylim=(len(sums) - 0.4, -0.6), xlabel="GB (dashed: where the memory of a card ends)")
    if not cards:
        ax.set_xlabel("GB")
    ax.grid(False)
    ax.set_title(title, fontsize=11, pad=20 if cards else 6)
    ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=10)
    return ax


@in_style
def run_log(
    history: Sequence[Mapping[str, float | None]],
    *,
    stopped: int | None = None,
    clip: float | None = None,
    axes: Sequence[Axes] | None = None,
) -> list[Axes]:
    """Loss, gradient norm and learning rate of a run over its steps, in three panels.

    history: rows of log.csv. stopped: a step at which the run was broken off; clip: the largest norm let through.
    """
    if axes is None:
        axes = list(Figure(figsize=(10, 3.2)).subplots(1, 3))
    steps = np.array([row["step"] for row in history], dtype=float)
    panels = (("loss", "loss, nats"), ("grad_norm", "gradient norm"), ("lr", "learning rate"))
    for ax, (name, label) in zip(axes, panels, strict=True):
        ax.plot(steps, np.array([row[name] for row in history], dtype=float), color=LINE, linewidth=1.5)
        ax.set(xlabel="step", ylabel=label)
        if stopped is not None:
            ax.axvline(stopped, color=MARKED, linestyle="--", linewidth=1.5)
    if stopped is not None:
        axes[0].annotate("stopped", (stopped, 0.96), (5, 0), ("data", "axes fraction"), "offset points", va="top")
    if clip:
        axes[1].axhline(clip, color=QUIET, linestyle=":", linewidth=1.5)
        axes[1].annotate("clipped above", (1, clip), (-2, 4), ("axes fraction", "data"), "offset points", ha="right")
    axes[1].set_ylim(bottom=0)
    axes[2].ticklabel_format(axis="y", style="sci", scilimits=(-3, -3))
    return list(axes)


@in_style
def expected_losses(
    curves: Mapping[str, Mapping[int, Sequence[float]]], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Validation loss over steps, both by name: a line for the mean over seeds, a band from the least to the most."""
    ax = figure() if ax is None else ax
    looks = zip((LINE, MARKED, "#1e8449"), "os^", ("-", "--", ":"), strict=True)
    for (name, by_step), (colour, marker, line) in zip(curves.items(), looks, strict=False):
        style = dict(color=colour, marker=marker, linestyle=line, markersize=5)
        mean_and_range(ax, list(by_step), np.array(list(by_step.values())).T, alpha=0.25, label=name, **style)
    ax.set_xscale("log", base=10)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set(xlabel="step", ylabel="validation loss, nats per character", title=title)
    ax.legend()
    return ax
