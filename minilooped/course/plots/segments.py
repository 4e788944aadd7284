"""Segmented backprop: what it reaches, what it holds, how its gradient differs."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from .style import LINE, MARKED, QUIET, figure, in_style, mean_and_range


@in_style
def gradient_by_visit(norms: Sequence[float], total: float, *, ax: Axes | None = None) -> Axes:
    """Norm of each visit's gradient of one shared matrix, visits counted from 1, and the norm of their sum.

    Beside it the norms that the sum would have if the visits' gradients were all alike in direction, or all orthogonal.
    """
    ax = figure() if ax is None else ax
    ax.bar(range(1, len(norms) + 1), norms, color=LINE, label="one visit's gradient")
    alike, orthogonal = sum(norms), sum(norm**2 for norm in norms) ** 0.5
    for value, colour, line, name in (
        (alike, QUIET, "-.", "the sum, were they all alike"),
        (total, MARKED, "--", "the sum: the shared matrix's gradient"),
        (orthogonal, QUIET, ":", "the sum, were they at right angles"),
    ):
        ax.axhline(value, color=colour, linestyle=line, label=f"{name}: {value:.2f}")
    ax.set(xlabel="visit", ylabel="norm of the gradient", xticks=range(1, len(norms) + 1), ylim=(0, 1.7 * alike))
    ax.legend(loc="upper right")
    return ax


@in_style
def segment_cuts(reach: ArrayLike, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Which loops each loss reaches, (losses, loops): dark where its gradient is largest, blank where it is 0.

    Dashed lines are the cuts, which no gradient crosses; a dot marks the loop behind which the loss is read out.
    """
    ax = figure(figsize=(7, 2.6)) if ax is None else ax
    reach = np.asarray(reach)
    shares = np.where(reach > 0, 0.25 + 0.75 * reach / reach.max(axis=1, keepdims=True), 0)
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1.2, aspect="auto", interpolation="nearest")
    ends = [int(np.flatnonzero(row)[-1]) for row in reach]
    ax.plot(ends, range(len(ends)), color=MARKED, marker="o", markersize=9, linestyle="none", markerfacecolor="white")
    for end in ends[:-1]:
        ax.axvline(end + 0.5, color=MARKED, linestyle="--", linewidth=1.5)
    ax.set(xlabel="loop", ylabel="loss of segment", title=title)
    ax.set_xticks(range(reach.shape[1]), [str(n + 1) for n in range(reach.shape[1])])
    ax.set_yticks(range(len(ends)), [str(n + 1) for n in range(len(ends))])
    ax.grid(False)
    return ax


@in_style
def held_bytes(
    n_loops: Sequence[int], curves: Mapping[str, ArrayLike], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Megabytes held for the backward pass over the loop count, a line per way of training.

    curves: by name a value for each loop count, or several, (repeats, loop counts): mean, and least to most.
    """
    ax = figure() if ax is None else ax
    looks = zip((MARKED, LINE, "#1e8449", "black"), "os^D", ("-", "--", ":", "-."), strict=True)
    for (name, values), (colour, marker, line) in zip(curves.items(), looks, strict=False):
        megabytes = np.atleast_2d(values) / 1e6  # (repeats, loop counts)
        mean_and_range(ax, n_loops, megabytes, alpha=0.2, color=colour, marker=marker, linestyle=line, label=name)
    ax.set(xlabel="loops N", ylabel="MB held", xticks=list(n_loops), title=title)
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left")
    return ax


@in_style
def agreement(
    x: Sequence[int],
    cosines: Mapping[str, ArrayLike],
    *,
    xlabel: str = "training step",
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Cosine with the gradient of ordinary backprop, a line per way of cutting it: the seeds' mean, least and most.

    cosines: (seeds, points) by name, at the training steps or loop counts x.
    """
    ax = figure() if ax is None else ax
    looks = zip(("#d68910", "#1e8449", LINE), "D^s", ("-.", ":", "--"), strict=True)  # segments as in `held_bytes`
    for (name, values), (colour, marker, line) in zip(cosines.items(), looks, strict=False):
        mean_and_range(ax, x, values, alpha=0.2, color=colour, marker=marker, linestyle=line, label=name)
    ax.set(xlabel=xlabel, ylabel="cosine with ordinary backprop", xticks=list(x), ylim=(0, 1.05), title=title)
    ax.legend(loc="lower left")
    return ax


@in_style
def held_and_peak(n_loops: Sequence[int], held: Mapping[str, ArrayLike], peak: Mapping[str, ArrayLike]) -> Axes:
    """Bytes by way of training over the loops: what autograd holds, and beside it what the process grows by.

    held, peak: (repeats, loop counts) by name.
    """
    left, right = Figure(figsize=(10, 4)).subplots(1, 2, sharey=True)
    held_bytes(n_loops, held, title="held by autograd", ax=left)
    held_bytes(n_loops, peak, title="added to the process, at most", ax=right)
    right.set_ylabel("MB added")
    right.get_legend().remove()
    left.set_ylim(0, 1.05 * max(np.asarray(values).max() for values in (*held.values(), *peak.values())) / 1e6)
    return left
