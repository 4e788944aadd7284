"""Scaling rules beside each other."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from .style import LINE, MARKED, QUIET, figure, in_style, look, mean_and_range


@in_style
def exponent_plane(points: Mapping[str, tuple[float, float]], *, ax: Axes | None = None) -> Axes:
    """Rules as points: a branch of N^-a L^-b stands at (a, b). Shaded: a >= 1 and b >= 1/2, where nothing grows."""
    ax = figure(figsize=(7, 4)) if ax is None else ax
    right, top = (max(1.5, *(point[i] + 0.3 for point in points.values())) for i in (0, 1))
    ax.fill_between([1, right], 0.5, top, color="#1e8449", alpha=0.12, linewidth=0)
    ax.axvline(1, color=QUIET, linestyle=":", linewidth=1)
    ax.axhline(0.5, color=QUIET, linestyle=":", linewidth=1)
    there: dict[tuple[float, float], list[str]] = {}
    for name, point in points.items():
        names = there.setdefault(point, [])
        size = 15 / (1 + len(names))  # a smaller marker inside a larger one
        ax.plot(*point, **look(name), linestyle="none", markersize=size, markeredgecolor="white", zorder=3)
        names.append(name)
    for point, names in there.items():
        ax.annotate("\n".join(names), point, (0, 12), textcoords="offset points", ha="center", zorder=4)
    ax.annotate("nothing grows", (right - 0.03, top - 0.05), ha="right", va="top", color=QUIET)
    ax.set(xlabel="a, the exponent of 1/N", ylabel="b, the exponent of 1/L", xlim=(-0.25, right), ylim=(-0.15, top))
    return ax


@in_style
def multipliers(
    rounds: Sequence[int], curves: Mapping[str, Sequence[float]], *, at: int, title: str = "", ax: Axes | None = None
) -> Axes:
    """Up to six numbers that a rule makes of the round count R, on log-log axes, a line each; `at` marks one R."""
    ax = figure() if ax is None else ax
    looks = zip((LINE, "#6c3483", QUIET, "#1e8449", MARKED, "black"), "os^DvP", strict=True)
    for (name, values), (colour, marker) in zip(curves.items(), looks, strict=False):
        ax.plot(rounds, values, color=colour, marker=marker, markersize=5, label=name)
    ax.axvline(at, color=QUIET, linestyle="--", linewidth=1.5, zorder=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ax.set_xticks(rounds, [str(n) for n in rounds])
    ax.minorticks_off()
    ax.set(xlabel="rounds R", title=title)
    ax.legend(fontsize=9, loc="lower left")
    return ax


@in_style
def values_by_rule(
    xs: Sequence[float],
    curves: Mapping[str, ArrayLike],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Values (seeds, xs) by rule on plain axes: a line for the mean, a band from the least seed to the most."""
    ax = figure() if ax is None else ax
    for rule, values in curves.items():
        mean_and_range(ax, xs, values, alpha=0.15, **look(rule), label=rule)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title, xticks=list(xs))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))  # outside: it would cover a band
    return ax
