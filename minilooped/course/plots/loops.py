"""What comes out after each loop, and with how many."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from .style import LINE, MARKED, QUIET, Style, figure, in_style, mean_and_range


@in_style
def loss_by_loops(
    n_loops: Sequence[int], losses: Sequence[float], trained: int, *, at: int | None = None, ax: Axes | None = None
) -> Axes:
    """Validation loss (nats per token) against the loop count at test time.

    trained: the loop count of training, marked by a dashed line; at: the dial's position, marked by a square.
    """
    ax = figure() if ax is None else ax
    ax.plot(n_loops, losses, marker="o", color=LINE)
    ax.axvline(trained, color=QUIET, linestyle="--", linewidth=1.5, zorder=1)  # behind the points
    last = trained == max(n_loops)  # then there is no room on the right
    ax.annotate(
        f"trained with {trained}",
        (trained, 0.96),
        xycoords=("data", "axes fraction"),
        xytext=(-6 if last else 6, 0),
        textcoords="offset points",
        ha="right" if last else "left",
        va="top",
        color=QUIET,
    )
    if at is not None:
        loss = losses[list(n_loops).index(at)]
        ax.plot([at], [loss], marker="s", markersize=12, color=MARKED, linestyle="none")
        ax.set_title(f"{at} loop{'s' * (at > 1)}: {loss:.3f} nats")
    ax.set(xlabel="loops at test time", ylabel="validation loss, nats", xticks=list(n_loops))
    return ax


@in_style
def loss_after_each_loop(
    curves: Mapping[str, ArrayLike], trained: int, *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Validation loss read out after 1, 2, ... loops: a line for the mean over seeds, a band from least to most.

    curves: (seeds, loops) by name. trained: the loop count of training, as a dashed line.
    """
    ax = figure() if ax is None else ax
    looks = zip((MARKED, LINE, "#1e8449", "#8e44ad", "black"), "os^Dv", ("-", "--", ":", "-.", "-"), strict=True)
    for (name, values), (colour, marker, line) in zip(curves.items(), looks, strict=False):
        loops = np.arange(1, np.shape(values)[1] + 1)
        style = dict(color=colour, marker=marker, linestyle=line, markersize=5)
        mean_and_range(ax, loops, values, alpha=0.15, label=name, **style)
    ax.axvline(trained, color=QUIET, linestyle="--", linewidth=1.5)
    ax.annotate("trained", (trained, 1), (4, -12), xycoords=("data", "axes fraction"), textcoords="offset points")
    ax.set(xlabel="read out after loop", ylabel="validation loss, nats", xticks=loops, title=title)
    ax.legend(loc="upper right")
    return ax


@in_style
def lens_table(
    said: Sequence[Sequence[str]],
    right: ArrayLike,
    read: Sequence[str],
    wanted: Sequence[str],
    *,
    trained: int | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """The likeliest next token after every loop, a row for each loop, a column for each token.

    said: N rows of T tokens; right: (N, T), the probability of the right token, from white to dark. A token in bold is
    the right one. read: the T tokens that were read, below; wanted: those that come next, in a first row. trained: the
    loop count of training, below which a dashed line is drawn.
    """
    right = np.asarray(right)
    N, T = right.shape
    ax = figure(figsize=(9, 1.3 + 0.27 * N)) if ax is None else ax

    def visible(token: str) -> str:
        return {" ": "␣", "\n": "⏎"}.get(token, token)

    ax.imshow(right, cmap="Blues", vmin=0, vmax=1, aspect="auto", extent=(-0.5, T - 0.5, N + 0.5, 0.5))
    rows = enumerate(zip((wanted, *said), np.vstack((np.zeros(T), right)), strict=True))  # row 0: what comes next
    for loop, (row, shares) in rows:
        for t, (token, share) in enumerate(zip(row, shares, strict=True)):
            style: Style = dict(color="white" if share > 0.6 else "black", ha="center", va="center", in_layout=False)
            ax.text(t, loop, visible(token), fontweight="bold" if token == wanted[t] else "normal", **style)
    if trained is not None and trained < N:
        ax.axhline(trained + 0.5, color=MARKED, linestyle="--", linewidth=1.5)
    ax.set_yticks(range(N + 1), ["comes next", *(f"loop {loop}" for loop in range(1, N + 1))])
    ax.set_xticks(range(T), [visible(token) for token in read])
    ax.tick_params(length=0)
    ax.set(xlabel="read", ylim=(N + 0.5, -0.5))
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=11)
    return ax


@in_style
def exits(
    losses: Sequence[float],
    ways: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Loss against loops used: the dial, where all tokens use the same number, and ways of letting each one leave.

    losses: read out after 1, 2, ... loops. ways: (mean loops, loss) at several thresholds, by name.
    """
    ax = figure() if ax is None else ax
    loops = range(1, len(losses) + 1)
    ax.plot(loops, losses, color=QUIET, marker="o", linestyle="--", label="as many for all")
    for (name, points), colour, marker in zip(ways.items(), (LINE, MARKED), "^s", strict=False):
        ax.plot(*zip(*sorted(points), strict=True), color=colour, marker=marker, label=name)
    ax.set(xlabel="loops used, mean over tokens", ylabel="loss, nats", xticks=loops, title=title)
    ax.legend()
    return ax


@in_style
def equal_work(
    sizes: Sequence[str], losses: Mapping[str, ArrayLike], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Loss of several models at equal work: a line for each budget, a column for each size.

    losses: (seeds, sizes) by budget, from the smallest to the largest; bands from the least seed to the most.
    """
    ax = figure() if ax is None else ax
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.75, len(losses)))
    for (budget, values), colour, marker in zip(losses.items(), shades, cycle("os^DvP"), strict=False):
        mean_and_range(ax, range(len(sizes)), values, alpha=0.2, color=colour, marker=marker, label=budget)
    ax.set_xticks(range(len(sizes)), sizes)
    ax.set(xlabel="blocks x loops", ylabel="validation loss, nats", title=title)
    ax.legend()
    return ax


@in_style
def accuracy_by_hops(
    hops: Sequence[int],
    accuracies: Mapping[str, ArrayLike],
    baseline: Mapping[str, Sequence[float]],
    *,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Share of right answers by the number of hops: a line for each model, bands over seeds, baselines in grey.

    accuracies: (seeds, hops) by name; baseline: a value for each hop count, by name.
    """
    ax = figure() if ax is None else ax
    places = range(len(hops))
    looks = zip((MARKED, LINE, "#1e8449", "#d68910", "#6c3483"), "os^Dv", ("-", "-", "--", ":", "-."), strict=True)
    for (name, values), (colour, marker, line) in zip(accuracies.items(), looks, strict=False):
        mean_and_range(ax, places, values, alpha=0.15, color=colour, marker=marker, linestyle=line, label=name)
    for (name, values), line in zip(baseline.items(), (":", "-."), strict=False):
        ax.plot(places, values, color=QUIET, linestyle=line, linewidth=1.5, label=name)
    ax.set_xticks(places, [str(p) for p in hops])
    ax.set(xlabel="hops p", ylabel="share of right answers", ylim=(-0.03, 1.05), title=title)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax
