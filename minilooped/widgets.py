"""Widgets: thin shells around probes and plots. Each one has a static twin that calls the same functions."""

from collections.abc import Callable, Mapping, Sequence

import ipywidgets
from matplotlib.figure import Figure

from . import plots, toy
from .probes import Cost, Dial, Visits

VISITS = (1, 2, 4, 8, 16, 32, 64, 128)


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


def eps_of(alpha: float) -> str:
    """N^-alpha as one would write it."""
    return {0.0: "ε = 1", 0.5: "ε = 1/√N", 1.0: "ε = 1/N"}.get(alpha, f"ε = N^-{alpha:g}")


def draw_norm_growth(N: int = 64, alpha: float = 0.0, branch: str = "pre_norm", d: int = 128) -> None:
    """R over the number of visits up to N, tied and untied, with eps = N^-alpha. Four seeds."""
    depths = [n for n in VISITS if n <= N]
    curves = {
        name: toy.final_norms(toy.growth(depths, alpha, tied=name == "tied", branch=branch, d=d, seeds=4))
        for name in plots.TYING_LOOK
    }
    at_the_end = ", ".join(f"{name} R = {values[:, -1].mean():.3g}" for name, values in curves.items())
    title = f"{branch}, {eps_of(alpha)}, N = {N}: {at_the_end}"
    ax = plots.growth_curves(depths, curves, guides={"N": 1, "√N": 0.5, "1": 0}, title=title)
    plots.show(ax, f"RMS of the stream over 1 to {N} visits on log-log axes. {title}.")


def norm_growth() -> ipywidgets.VBox:
    """How far tied and untied streams get, by depth, exponent of eps, branch and width: `draw_norm_growth`."""
    return explorer(
        draw_norm_growth,
        N=ipywidgets.SelectionSlider(options=VISITS[2:], value=64, description="visits N"),
        alpha=ipywidgets.FloatSlider(min=0, max=1.5, step=0.25, value=0, description="α in ε = N^-α"),
        branch=ipywidgets.Dropdown(options=list(toy.BRANCHES), value="pre_norm", description="branch"),
        d=ipywidgets.SelectionSlider(options=(16, 32, 64, 128, 256), value=128, description="width d"),
    )


def draw_gram_heatmap(N: int = 32, branch: str = "relu", alpha: float = 1.0, d: int = 128) -> None:
    """Cosines between the N increments of one run, tied and untied; above them what their products sum to."""
    matrices = {}
    for name in plots.TYING_LOOK:
        (run,) = toy.growth([N], alpha, tied=name == "tied", branch=branch, d=d, seeds=1)
        products = toy.gram(run)[0]  # (N, N)
        matrices[f"{name}: {products.sum():.4g} against {products.trace():.4g}"] = toy.cosines(run)[0]
    title = f"{branch}, {eps_of(alpha)}, N = {N}: the whole Gram matrix against its diagonal"
    axes = plots.gram_map(matrices, title=title)
    plots.show(axes[0], f"Cosines between increments. {title}: {'; '.join(matrices)}.")


def gram_heatmap() -> ipywidgets.VBox:
    """Which increments point the same way, by depth, branch, exponent of eps and width: `draw_gram_heatmap`."""
    return explorer(
        draw_gram_heatmap,
        N=ipywidgets.SelectionSlider(options=(3, 8, 16, 32, 64, 128), value=32, description="visits N"),
        branch=ipywidgets.Dropdown(options=list(toy.BRANCHES), value="relu", description="branch"),
        alpha=ipywidgets.FloatSlider(min=0, max=1.5, step=0.25, value=1, description="α in ε = N^-α"),
        d=ipywidgets.SelectionSlider(options=(16, 32, 64, 128, 256), value=128, description="width d"),
    )


@plots.in_style
def draw_visits(runs: Mapping[str, Sequence[Visits]], run: str, step: int) -> None:
    """One training step of one run: norms visit by visit, and the cosines between the visits' increments."""
    visits = runs[run][step]
    norms, cosines = Figure(figsize=(10, 3.9)).subplots(1, 2)
    title = (
        f"{run}, step {step}: R from {visits.start:.2f} to {visits.stream[-1, -1]:.3g}, "
        f"mean cosine {visits.mean_cosine:.2f}"
    )
    plots.stream_by_visit(visits.stream.flatten(), visits.branch.flatten(), visits.start, ax=norms)
    norms.set_ylim(0.01, 2000)  # one scale for every position
    plots.gram_map({"increments": visits.cosines}, title=title, axes=[cosines])
    plots.show(norms, f"Norms by visit, and cosines between increments. {title}.")


def visit_explorer(runs: Mapping[str, Sequence[Visits]]) -> ipywidgets.VBox:
    """The first training steps of several runs, visit by visit: `draw_visits`.

    runs: what `probes.first_steps` returned, by name; as many steps in each.
    """
    steps = len(next(iter(runs.values()))) - 1

    def draw(run: str, step: int):
        draw_visits(runs, run, step)

    return explorer(
        draw,
        height="450px",
        run=ipywidgets.Dropdown(options=list(runs), description="run"),
        step=ipywidgets.IntSlider(min=0, max=steps, description="training step"),
    )
