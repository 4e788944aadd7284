"""Widgets: thin shells around probes and plots. Each one has a static twin that calls the same functions."""

from collections.abc import Callable, Sequence

import ipywidgets

from . import plots
from .probes import Cost, Dial


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
        print(positions[n_loop].text.strip())

    slider = ipywidgets.SelectionSlider(options=list(positions), value=trained, description="loops")
    return explorer(draw, height="540px", n_loop=slider)


def show_costs(costs: Sequence[Cost], n_layer: int, n_loop: int) -> None:
    """One position of `cost_explorer`, which says what `costs` must hold."""
    (one,) = (c for c in costs if (c.n_layer, c.n_loop) == (1, 1))
    row = sorted((c for c in costs if c.n_layer == n_layer), key=lambda c: c.n_loop)
    (chosen,) = (c for c in row if c.n_loop == n_loop)
    ratios = {
        "parameters": [c.parameters / one.parameters for c in row],
        "operations": [c.operations / one.operations for c in row],
        "saved bytes": [c.saved / one.saved for c in row],
    }
    title = (
        f"{n_layer} x {n_loop}: {chosen.parameters:,} parameters, {chosen.operations / 1e6:.2f} million operations "
        f"a token, {chosen.saved / 1e6:.2f} MB"
    )
    ax = plots.costs([c.n_loop for c in row], ratios, at=n_loop, title=title)
    ax.set_ylim(0, 1.05 * max(c.operations for c in costs) / one.operations)  # one scale for every position
    plots.show(ax, f"Costs over the loop count. {title}.")


def cost_explorer(costs: Sequence[Cost]) -> ipywidgets.VBox:
    """Parameters, operations and saved bytes over the loop count, for a chosen number of blocks.

    costs: what `probes.cost` returned for every pair of the block counts and loop counts to choose from, (1, 1) among
    them.
    """
    n_layers, n_loops = sorted({c.n_layer for c in costs}), sorted({c.n_loop for c in costs})

    def draw(n_layer: int, n_loop: int):
        show_costs(costs, n_layer, n_loop)

    return explorer(
        draw,
        n_layer=ipywidgets.SelectionSlider(options=n_layers, description="blocks L"),
        n_loop=ipywidgets.SelectionSlider(options=n_loops, description="loops N"),
    )
