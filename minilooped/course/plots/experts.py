"""Which experts tokens meet, and what loops have in common."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from .style import QUIET, Style, figure, in_style


def expert_colours(n_expert: int) -> np.ndarray:
    """A colour per expert, (E, 4)."""
    return matplotlib.colormaps["tab10" if n_expert <= 10 else "nipy_spectral"](np.linspace(0, 1, n_expert))


@in_style
def dispatch(choice: ArrayLike, n_expert: int, *, names: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    """Sort and group: tokens on top, their choices below, and the same (token, choice) pairs in groups by expert.

    choice: (S, k), the experts of each token; names: of the tokens, 0 to S - 1 without.
    """
    choice = np.asarray(choice)
    S, k = choice.shape
    names = [str(token) for token in range(S)] if names is None else names
    ax = figure(figsize=(7, 3.4)) if ax is None else ax
    pairs, order = choice.ravel(), np.argsort(choice.ravel(), kind="stable")
    colours = expert_colours(n_expert)
    box: Style = dict(ha="center", va="center", zorder=3)

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


def readable_on(colour: ArrayLike) -> str:
    """Black or white, whichever has the higher contrast on an (R, G, B[, A]) colour, as the WCAG defines contrast."""
    channels = np.asarray(colour)[:3]
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"


@in_style
def pair_maps(
    values: Mapping[str, ArrayLike], *, label: str, title: str = "", axes: Sequence[Axes] | None = None
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
    return list(axes)


@in_style
def choices_by_inputs(
    seen: Mapping[str, ArrayLike], overlap: Mapping[str, ArrayLike], chance: float, *, ax: Axes | None = None
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
    panels: Mapping[str, ArrayLike],
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
    panels: Mapping[str, ArrayLike],
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
    apart = (second - first).tolist()
    axes = _lines_over_training(
        steps, lines, apart, kinds="loops apart", chance=chance, ylabel=ylabel, title=title, axes=axes
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
    panels: Mapping[str, ArrayLike],
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
    tokens: Sequence[str], choices: ArrayLike, n_expert: int, *, title: str = "", ax: Axes | None = None
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
