"""Arrays in, matplotlib Axes out. One look for every figure: opaque, readable, told apart without colour too."""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..science.stats import interval

STYLE = {
    "figure.facecolor": "white",  # transparent figures vanish on a dark page
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.figsize": (7, 3.6),
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 7,
}
# One colour and one marker per rule through the whole series.
RULE_LOOK = {
    "none": ("#c0392b", "o"),
    "sqrt": ("#d68910", "s"),
    "inverse": ("#1f5fa8", "^"),
    "factored": ("#1e8449", "D"),
    "sqrt_depth": ("#8d6e63", "v"),
    "loom": ("#6c3483", "P"),
    "depth_mup": ("#0e8277", "<"),
    "completep": ("#5d6d7e", ">"),
    "layernorm_scaling": ("#ad1457", "X"),
    "rezero": ("#7f8c1a", "*"),
    "deepnorm": ("#e07a5f", "p"),
    "deeploop": ("#3949ab", "h"),
}
OWN_LOOK = ("#000000", "d")  # of a rule that the reader added
# The same for one matrix used in every visit and a new one for each.
TYING_LOOK = {"tied": ("#6c3483", "o", "-"), "untied": ("#0e8277", "s", "--")}
LINE, MARKED, QUIET = "#1f5fa8", "#c0392b", "#6b6b6b"
# And for a set of LOOM's parts, by the names of `ablation.ARMS`.
ARM_LOOK = {
    "plain": (MARKED, "o"),
    "plain + expert norm": ("#d68910", "s"),
    "plain + loop norm": (LINE, "^"),
    "plain + both norms": ("#1e8449", "D"),
    "plain + scaling": ("#6c3483", "P"),
    "without scaling": ("#ad1457", "X"),
    "full": ("#0e8277", "v"),
}


in_style = matplotlib.rc_context(STYLE)  # decorates every function that draws


@in_style
def figure(**options) -> Axes:
    """New axes in the common style; options go to `Figure`.

    A figure of its own, not one of pyplot's: it opens no window, and it is gone when nobody holds it.
    """
    return Figure(**options).subplots()


def mean_and_range(ax: Axes, x: Sequence[float], values: np.ndarray, *, alpha: float, **style) -> None:
    """Values (seeds, points) over x: a line for the mean over seeds, a band from the least to the most."""
    values = np.asarray(values)
    ax.plot(x, values.mean(0), **style)
    ax.fill_between(x, values.min(0), values.max(0), color=style["color"], alpha=alpha, linewidth=0)


def save(ax: Axes, path: Path | BytesIO) -> None:
    """Write the figure as a PNG."""
    ax.figure.savefig(path, format="png", dpi=STYLE["figure.dpi"])


@dataclass(frozen=True)
class Picture:
    """A PNG with its alternative text, as a notebook shows it."""

    data: bytes
    alt: str

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict[str, str], dict]:
        png = b64encode(self.data).decode("ascii")
        # JupyterLab takes the first of these, and with it the alt text; others show the picture, or the text alone.
        html = f'<img alt="{escape(self.alt)}" src="data:image/png;base64,{png}">'
        return {"text/html": html, "image/png": png, "text/plain": self.alt}, {"image/png": {"alt": self.alt}}


def show(ax: Axes, alt: str) -> None:
    """Show the figure in a notebook, with `alt` for those who cannot see it."""
    from IPython.display import display

    save(ax, png := BytesIO())
    display(Picture(png.getvalue(), alt))


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


def norm_growth(n_loops: Sequence[int], rms: Mapping[str, Sequence[float]], *, ax: Axes | None = None) -> Axes:
    """RMS of the stream against the loop count, both axes logarithmic, a line per rule, guides of slope 1, 1/2, 0."""
    curves = {rule: np.asarray(values)[None] for rule, values in rms.items()}  # (1, loop counts) each
    guides = {"N": 1, "√N": 0.5, "1": 0}
    return growth_curves(n_loops, curves, guides=guides, xlabel="loops N", ylabel="RMS of the stream", ax=ax)


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
            ring = dict(marker="o", markersize=15, markerfacecolor="none", markeredgewidth=1.5)
            ax.plot([at], [values[list(n_loops).index(at)]], color=QUIET, linestyle="none", **ring)
    ax.set(xlabel="loops N", ylabel="times 1 block, 1 loop", xticks=list(n_loops), title=title)
    ax.legend(loc="upper left")
    return ax


def look(name: str) -> dict[str, str]:
    """Line options of a rule, of one that the table above does not know, or of "tied" and "untied"."""
    if name in TYING_LOOK:
        return dict(zip(("color", "marker", "linestyle"), TYING_LOOK[name], strict=True))
    return dict(zip(("color", "marker"), RULE_LOOK.get(name, OWN_LOOK), strict=True))


@in_style
def walks(paths: Mapping[str, np.ndarray], *, ax: Axes | None = None) -> Axes:
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
    curves: Mapping[str, np.ndarray],
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
def gram_map(matrices: Mapping[str, np.ndarray], *, title: str = "", axes: Sequence[Axes] | None = None) -> list[Axes]:
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
    return axes


@in_style
def lr_curves(
    lrs: Sequence[float],
    curves: Mapping[str, np.ndarray],
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


@in_style
def planes(
    values: Mapping[str, np.ndarray],
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
        axes = Figure(figsize=(7, 3.3 * rows)).subplots(rows, 2, squeeze=False).ravel()
        for spare in axes[len(values) :]:
            spare.remove()
        axes = list(axes[: len(values)])
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
    return axes


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
def six_panels(
    depths: Sequence[int],
    rows: Mapping[str, Mapping[str, np.ndarray]],
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
    stream: Sequence[float], branch: Sequence[float], start: float, *, title: str = "", ax: Axes | None = None
) -> Axes:
    """RMS of the stream after 1, 2, ... visits, and of the last visit's increment, on log-log axes.

    start: the stream's RMS before the first visit, as a dashed line.
    """
    ax = figure() if ax is None else ax
    visits = range(1, len(stream) + 1)
    ax.axhline(start, color=QUIET, linestyle="--", linewidth=1.5, label="stream at the start, $R_0$")
    ax.plot(visits, stream, color=LINE, marker="o", markersize=4, label="stream")
    ax.plot(visits, branch, color=MARKED, marker="s", markersize=4, linestyle=":", label="increment")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    ticks = [1 << k for k in range(len(stream).bit_length())]
    ax.set(xlabel="visits so far", ylabel="RMS", title=title)
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.legend(loc="upper left")
    return ax


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 7: experts in a loop


def expert_colours(n_expert: int) -> np.ndarray:
    """A colour per expert, (E, 4)."""
    return matplotlib.colormaps["tab10" if n_expert <= 10 else "nipy_spectral"](np.linspace(0, 1, n_expert))


@in_style
def dispatch(choice: np.ndarray, n_expert: int, *, names: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    """Sort and group: tokens on top, their choices below, and the same (token, choice) pairs in groups by expert.

    choice: (S, k), the experts of each token; names: of the tokens, 0 to S - 1 without.
    """
    choice = np.asarray(choice)
    S, k = choice.shape
    names = [str(token) for token in range(S)] if names is None else names
    ax = figure(figsize=(7, 3.4)) if ax is None else ax
    pairs, order = choice.ravel(), np.argsort(choice.ravel(), kind="stable")
    colours = expert_colours(n_expert)
    box = dict(ha="center", va="center", zorder=3)

    def boxed(x: float, y: float, text: str, colour: np.ndarray | str) -> None:
        ax.text(x, y, text, bbox=dict(boxstyle="round", facecolor="white", edgecolor=colour, linewidth=2), **box)

    for token, name in enumerate(names):
        centre = token * k + (k - 1) / 2
        boxed(centre, 2, name, "black")
        for pair in range(token * k, (token + 1) * k):
            ax.plot([centre, pair], [2, 1], color=QUIET, linewidth=1)
    for place, pair in enumerate(order):
        colour, token = colours[pairs[pair]], pair // k
        boxed(pair, 1, str(pairs[pair]), colour)
        ax.plot([pair, place], [1, 0], color=colour, linewidth=1.5)
        boxed(place, 0, names[token], colour)
    load = np.bincount(pairs, minlength=n_expert)
    for expert, (count, end) in enumerate(zip(load, load.cumsum(), strict=True)):
        if count:
            ax.plot([end - count - 0.3, end - 0.7], [-0.45, -0.45], color=colours[expert], linewidth=4)
            ax.text(end - (count + 1) / 2, -0.8, f"expert {expert}" if count > 1 else f"{expert}", **box)
    ax.set(xlim=(-0.7, S * k - 0.3), ylim=(-1.05, 2.4))
    ax.set_yticks([2, 1, 0], ["tokens", "their choices", "sorted by expert"])
    ax.set_xticks([])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    return ax


def readable_on(colour: Sequence[float]) -> str:
    """Black or white, whichever has the higher contrast on an (R, G, B[, A]) colour, as the WCAG defines contrast."""
    channels = np.asarray(colour[:3])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"


@in_style
def pair_maps(
    values: Mapping[str, np.ndarray], *, label: str, title: str = "", axes: Sequence[Axes] | None = None
) -> list[Axes]:
    """A number between 0 and 1 for every two loops, (N, N) by name, side by side on one scale."""
    if axes is None:
        axes = list(Figure(figsize=(3.1 * len(values) + 0.9, 3.4)).subplots(1, len(values), squeeze=False)[0])
    for ax, (name, matrix) in zip(axes, values.items(), strict=True):
        matrix = np.asarray(matrix)
        image = ax.imshow(matrix, cmap="viridis", vmin=0, vmax=1)
        for (i, j), value in np.ndenumerate(matrix):
            colour = readable_on(image.cmap(image.norm(value)))
            ax.text(j, i, f"{value:.2f}", color=colour, ha="center", va="center", fontsize=8)
        ticks = range(len(matrix)), [str(loop + 1) for loop in range(len(matrix))]
        ax.set_xticks(*ticks)
        ax.set_yticks(*ticks)
        ax.set(xlabel="loop", ylabel="loop")
        ax.set_title(name, fontsize=11)
        ax.grid(False)
    axes[0].figure.colorbar(image, ax=axes, label=label)
    if title:
        axes[0].figure.suptitle(title, fontsize=11)
    return axes


@in_style
def choices_by_inputs(
    seen: Mapping[str, np.ndarray], overlap: Mapping[str, np.ndarray], chance: float, *, ax: Axes | None = None
) -> Axes:
    """How alike two loops choose, over how alike what they see is: a mark per pair of loops, a look per name.

    seen: cosines between the router's inputs; overlap: shares of a token's experts; as many of each by the same name.
    """
    ax = figure() if ax is None else ax
    colours = ("#6c3483", "#1f5fa8", "#1e8449", "#a86400", "#c0392b")
    for name, colour, marker in zip(seen, cycle(colours), cycle("os^Dv")):
        ax.plot(np.ravel(seen[name]), np.ravel(overlap[name]), marker, color=colour, label=name)
    ax.axhline(chance, color=QUIET, linestyle=":")
    ax.text(0.98, chance - 0.01, "chance", transform=ax.get_yaxis_transform(), ha="right", va="top", color=QUIET)
    ax.set(xlabel="cosine between what the router sees", ylabel="overlap: share of experts kept", ylim=(0, 1.03))
    ax.legend(ncols=2)
    return ax


def _lines_over_training(
    steps: Sequence[int],
    panels: Mapping[str, np.ndarray],
    kind: Sequence[int],
    *,
    kinds: str,
    chance: Mapping[str, float],
    ylabel: str,
    title: str,
    axes: np.ndarray | None,
) -> np.ndarray:
    """Lines (R, steps, K) by name, up to three panels in a row; line K has the colour of its kind, 1 and up."""
    if axes is None:
        rows, columns = math.ceil(len(panels) / 3), min(3, len(panels))
        axes = Figure(figsize=(7.4, 1.9 * rows)).subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    shades = matplotlib.colormaps["plasma"](np.linspace(0, 0.6, max(kind)))  # the pale end is left out
    for ax, (name, values) in zip(axes.flat, panels.items(), strict=False):
        for k, of_kind in enumerate(kind):
            ax.plot(steps, np.asarray(values)[:, :, k].T, color=shades[of_kind - 1], linewidth=0.8)
        ax.axhline(chance[name], color="black", linestyle=":", linewidth=2.5)
        ax.set_title(name, fontsize=11)
    for row in axes:
        row[0].set_ylabel(ylabel)
    for ax in axes[-1]:
        ax.set_xlabel("training step")
    bounds = matplotlib.colors.BoundaryNorm(np.arange(max(kind) + 1) + 0.5, max(kind))
    scale = matplotlib.cm.ScalarMappable(bounds, matplotlib.colors.ListedColormap(shades))
    axes.flat[0].figure.colorbar(scale, ax=axes, label=kinds, ticks=range(1, max(kind) + 1))
    if title:
        axes.flat[0].figure.suptitle(title, fontsize=11)
    return axes


@in_style
def pairs_over_training(
    steps: Sequence[int],
    panels: Mapping[str, np.ndarray],
    chance: Mapping[str, float],
    *,
    ylabel: str = "overlap of choices",
    title: str = "",
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """A line over the training steps for every two loops, up to three panels in a row; the more apart, the brighter.

    panels: (R, steps, N, N) by name, R of seeds and layers. chance: its level, by the same names; the ceiling is 1.
    """
    first, second = np.triu_indices(np.shape(next(iter(panels.values())))[-1], 1)
    lines = {name: np.asarray(values)[:, :, first, second] for name, values in panels.items()}
    axes = _lines_over_training(
        steps, lines, second - first, kinds="loops apart", chance=chance, ylabel=ylabel, title=title, axes=axes
    )
    for ax, _ in zip(axes.flat, panels, strict=False):
        ax.axhline(1, color="black", linestyle="--", linewidth=1.5)
        ax.set_ylim(-0.03, 1.05)
    at = dict(ha="right", va="top", transform=axes.flat[len(panels) - 1].get_yaxis_transform(), x=0.98)
    for y, text in ((0.97, "ceiling"), (chance[list(panels)[-1]] + 0.2, "dotted: chance")):
        axes.flat[len(panels) - 1].text(y=y, s=text, **at)
    return axes


@in_style
def loops_over_training(
    steps: Sequence[int],
    panels: Mapping[str, np.ndarray],
    chance: Mapping[str, float],
    *,
    ylabel: str,
    title: str = "",
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """A line over the training steps for every loop, up to three panels in a row; later loops are brighter.

    panels: (R, steps, N) by name, R of seeds and layers. chance: a dotted level, by the same names.
    """
    kind = range(1, np.shape(next(iter(panels.values())))[-1] + 1)
    axes = _lines_over_training(steps, panels, kind, kinds="loop", chance=chance, ylabel=ylabel, title=title, axes=axes)
    axes.flat[0].set_ylim(bottom=0)
    return axes


@in_style
def router_map(
    tokens: Sequence[str], choices: np.ndarray, n_expert: int, *, title: str = "", ax: Axes | None = None
) -> Axes:
    """The experts that each token meets in each loop. choices: (N, T, k); tokens: T names, from left to right.

    A cell has a stripe for each of the k experts, from the lowest number down. Below: how many a token meets in all.
    """
    choices = np.sort(np.asarray(choices), axis=-1)
    N, T, k = choices.shape
    ax = figure(figsize=(9, 3.6)) if ax is None else ax
    stripes = choices.transpose(0, 2, 1).reshape(N * k, T)  # a loop's k stripes, then the next loop's
    image = expert_colours(n_expert)[stripes]
    image[..., 3] = 0.55  # pale, so that black numbers can be read
    ax.imshow(image, aspect="auto", extent=(-0.5, T - 0.5, N + 0.5, 0.5), interpolation="nearest")
    for row, stripe in enumerate(stripes):
        for token, expert in enumerate(stripe):
            ax.text(token, 0.5 + (row + 0.5) / k, str(expert), ha="center", va="center", fontsize=8, in_layout=False)
    for token in range(T):
        ax.text(token, N + 1, str(len(np.unique(choices[:, token]))), ha="center", va="center", fontweight="bold")
    for loop in range(1, N):
        ax.axhline(loop + 0.5, color="white", linewidth=3)
    ax.set_ylim(N + 1.5, 0.5)
    ax.set_yticks(range(1, N + 2), [*(f"loop {loop}" for loop in range(1, N + 1)), "different"])
    ax.set_xticks(range(T), ["␣" if token == " " else "⏎" if token == "\n" else token for token in tokens])
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=11)
    return ax


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 8: variants of one model beside each other


@in_style
def variants(
    x: Sequence[float],
    curves: Mapping[str, np.ndarray],
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
    rows: Mapping[str, np.ndarray],
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
        mean, half = interval(torch.as_tensor(values))
        own = dict(color=LINE, marker="D", capsize=4, label="mean, 95 % (Student's t)" if y == 0 else None)
        ax.errorbar(mean, y, xerr=half, linestyle="none", zorder=3, **own)
        seeds = dict(color=MARKED, marker="o", markersize=5, linestyle="none", label="a seed" if y == 0 else None)
        ax.plot(values, np.full(len(values), y + 0.25), **seeds)
        if published and name in published:
            first = name == next(iter(published))
            star = dict(color="black", marker="*", markersize=13, linestyle="none")
            ax.plot(published[name], y, **star, label="published, nats per token" if first else None)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(xlabel=xlabel, ylim=(len(rows) - 0.4, -0.6))
    ax.set_title(title, fontsize=11)
    ax.legend(loc="best")
    return ax


# -- chapter 9: segmented backprop


@in_style
def segment_cuts(reach: np.ndarray, *, title: str = "", ax: Axes | None = None) -> Axes:
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
    n_loops: Sequence[int], curves: Mapping[str, np.ndarray], *, title: str = "", ax: Axes | None = None
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
def loss_after_each_loop(
    curves: Mapping[str, np.ndarray], trained: int, *, title: str = "", ax: Axes | None = None
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
def agreement(
    x: Sequence[int],
    cosines: Mapping[str, np.ndarray],
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
def held_and_peak(n_loops: Sequence[int], held: Mapping[str, np.ndarray], peak: Mapping[str, np.ndarray]) -> Axes:
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


# -- chapter 6 ---------------------------------------------------------------------------------------------------------


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
def norms_by_round(
    streams: Mapping[int, Mapping[str, np.ndarray]], gradients: Mapping[int, Mapping[str, np.ndarray]]
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


@in_style
def values_by_rule(
    xs: Sequence[float],
    curves: Mapping[str, np.ndarray],
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


# -- chapter 11: how many loops ----------------------------------------------------------------------------------------


@in_style
def lens_table(
    said: Sequence[Sequence[str]],
    right: np.ndarray,
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
            style = dict(color="white" if share > 0.6 else "black", ha="center", va="center", in_layout=False)
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
    sizes: Sequence[str], losses: Mapping[str, np.ndarray], *, title: str = "", ax: Axes | None = None
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
    accuracies: Mapping[str, np.ndarray],
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


# -- chapter 10: will it fit, and when will it be done?


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
    steps = [row["step"] for row in history]
    panels = (("loss", "loss, nats"), ("grad_norm", "gradient norm"), ("lr", "learning rate"))
    for ax, (name, label) in zip(axes, panels, strict=True):
        ax.plot(steps, [row[name] for row in history], color=LINE, linewidth=1.5)
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
