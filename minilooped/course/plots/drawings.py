"""Drawings of the thing itself, where there is no measurement to plot."""

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from .style import LINE, MARKED, QUIET, figure, in_style

BOX = "#dbe6f3"  # the colour of weights, in every drawing


def _box(ax: Axes, x: float, y: float, width: float, height: float, text: str = "", colour: str = BOX) -> None:
    """A rounded box around (x, y), its centre."""
    corner = (x - width / 2, y - height / 2)
    ax.add_patch(
        FancyBboxPatch(corner, width, height, "round,pad=0,rounding_size=0.12", facecolor=colour, edgecolor=LINE)
    )
    ax.text(x, y, text, ha="center", va="center", fontsize=10)


def _arrow(ax: Axes, *points: tuple[float, float], colour: str = LINE) -> None:
    """From the first point to the last: straight, or along the Bezier curve of four points."""
    codes = [Path.MOVETO, *([Path.LINETO] if len(points) == 2 else [Path.CURVE4] * 3)]
    path = Path(points, codes)
    ax.add_patch(FancyArrowPatch(path=path, arrowstyle="-|>", mutation_scale=13, color=colour, linewidth=1.8))


def _bar(ax: Axes, x: float, y: float, share: float, text: str, colour: str) -> None:
    """A bar that is full at share 1, and what it counts."""
    ax.barh(y, 3.4 * share, 0.42, left=x - 1.7, color=colour)
    ax.text(x - 1.7, y + 0.48, text, ha="left", va="center", fontsize=9.5)


@in_style
def the_loop(n: int = 12) -> Axes:
    """Blocks of their own, each visited once, beside one block that is visited as often: what each has and does.

    n: the number of visits on either side, from 2 to 16.
    """
    if not 2 <= n <= 16:
        raise ValueError(f"n={n} must be from 2 to 16: more boxes would be too thin to see")
    ax = figure(figsize=(7, 5.2))
    ax.set_axis_off()
    ax.set(xlim=(0, 10), ylim=(-2.6, 8.2))
    top, bottom = 6.6, 0.6
    step = (top - bottom) / (n - 1)

    left, right = 2.5, 7.3
    for visit in range(n):
        _box(ax, left, bottom + visit * step, 2.6, 0.72 * min(step, 1.0), f"block {visit + 1}" if step > 0.45 else "")
    _arrow(ax, (left, -0.4), (left, bottom - 0.36 * step))
    _arrow(ax, (left, top + 0.36 * step), (left, top + 1.0))

    middle = (top + bottom) / 2
    _box(ax, right, middle, 2.6, 1.3, "one block")
    _arrow(ax, (right, -0.4), (right, middle - 0.68))
    _arrow(ax, (right, middle + 0.68), (right, top + 1.0))
    side = right + 2.5  # the curve gets three quarters of the way there
    _arrow(ax, (right, middle + 1.4), (side, middle + 1.4), (side, middle - 1.4), (right, middle - 1.4), colour=MARKED)
    ax.text(right + 2.0, middle, f"{n} times", ha="left", va="center", color=MARKED, fontsize=12, fontweight="bold")

    for x, title, shared in ((left, f"{n} blocks, once each", 1.0), (right, f"1 block, {n} times", 1 / n)):
        ax.text(x, 8.0, title, ha="center", va="center", fontsize=12, fontweight="bold")
        ax.text(x + 0.2, -0.3, "h", ha="left", va="center", style="italic", color=QUIET)
        _bar(ax, x, -1.25, shared, f"weights: {round(n * shared)}", LINE)
        _bar(ax, x, -2.35, 1.0, f"work: {n} visits", MARKED)
    return ax
