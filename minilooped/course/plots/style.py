"""One look for every figure: opaque, readable, told apart without colour too."""

from base64 import b64encode
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

Style = dict[str, Any]  # options by name, for matplotlib

STYLE: Style = {
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

in_style = matplotlib.rc_context(cast(Any, STYLE))  # decorates every function that draws


@in_style
def figure(**options: Any) -> Axes:
    """New axes in the common style; options go to `Figure`.

    A figure of its own, not one of pyplot's: it opens no window, and it is gone when nobody holds it.
    """
    return Figure(**options).subplots()


def mean_and_range(ax: Axes, x: ArrayLike, values: ArrayLike, *, alpha: float, **style) -> None:
    """Values (seeds, points) over x: a line for the mean over seeds, a band from the least to the most."""
    values = np.asarray(values)
    ax.plot(x, values.mean(0), **style)
    ax.fill_between(x, values.min(0), values.max(0), color=style["color"], alpha=alpha, linewidth=0)


def save(ax: Axes, path: Path | BytesIO) -> None:
    """Write the figure as a PNG, or as an SVG where the path ends so."""
    if isinstance(path, Path) and path.suffix == ".svg":
        with matplotlib.rc_context({"svg.hashsalt": "minilooped"}):  # so that a second time gives the same file
            cast(Figure, ax.figure).savefig(path, format="svg", metadata={"Date": None})
    else:
        cast(Figure, ax.figure).savefig(path, format="png", dpi=STYLE["figure.dpi"])


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


def look(name: str) -> Style:
    """Line options of a rule, of one that the table above does not know, or of "tied" and "untied"."""
    if name in TYING_LOOK:
        return dict(zip(("color", "marker", "linestyle"), TYING_LOOK[name], strict=True))
    return dict(zip(("color", "marker"), RULE_LOOK.get(name, OWN_LOOK), strict=True))
