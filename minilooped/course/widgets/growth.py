"""How the stream grows."""

from collections.abc import Mapping, Sequence

import ipywidgets
from matplotlib.figure import Figure

from ...science import toy
from ...science.probes import Visits
from .. import plots
from .controls import explorer

VISITS = (1, 2, 4, 8, 16, 32, 64, 128)


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
