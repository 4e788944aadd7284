"""What every explorer is made of: controls, and one figure that follows them."""

from collections.abc import Callable

import ipywidgets


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
