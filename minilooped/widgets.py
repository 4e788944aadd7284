"""Widgets: thin shells around probes and plots. Each one has a static twin that calls the same functions."""

from collections.abc import Callable, Sequence

import ipywidgets

from . import plots
from .probes import Dial


def explorer(draw: Callable[..., None], *, height: str = "420px", **controls: ipywidgets.Widget) -> ipywidgets.VBox:
    """Controls above one output of fixed height, in which `draw(**values)` draws anew after each change.

    An error in `draw` is shown in the output. Figures go through `plots.show`, which closes them.
    """
    for control in controls.values():
        if hasattr(control, "continuous_update"):
            control.continuous_update = False  # redraw when the handle is let go, not on the way
        control.style.description_width = "initial"
        control.layout.width = "420px"

    output = ipywidgets.interactive_output(draw, controls)
    output.layout.height = height  # a fixed height keeps the page from jumping
    return ipywidgets.VBox([*controls.values(), output])


def loop_dial(dial: Sequence[Dial], trained: int) -> ipywidgets.VBox:
    """Turn the loop count of a trained model: the loss curve and a sample at each position.

    dial: what `probes.loop_dial` returned; trained: the loop count of training.
    """
    positions = {d.n_loop: d for d in dial}

    def draw(n_loop: int):
        ax = plots.loss_by_loops(list(positions), [d.loss for d in dial], trained, at=n_loop)
        plots.show(ax, f"Validation loss over the loop count; at {n_loop} loops {positions[n_loop].loss:.3f}.")
        print(positions[n_loop].text)

    slider = ipywidgets.SelectionSlider(options=list(positions), value=trained, description="loops")
    return explorer(draw, n_loop=slider)
