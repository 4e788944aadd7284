"""Learning-rate sweeps."""

import ipywidgets

from ...science.sweep import Losses, best, curve, shift
from .. import plots
from .controls import explorer


def draw_lr_sweep(losses: Losses, rule: str, n_layer: int, n_loop: int) -> None:
    """Loss over the learning rate for every model of a rule, one in front, and the best learning rate of each.

    The title says how far the best learning rate of the one in front lies from that of the smallest model, and what it
    costs to keep the smallest one's. Raises ValueError where the models do not share their learning rates.
    """
    models = sorted({(trial.n_layer, trial.n_loop) for trial in losses if trial.rule == rule})
    curves = {f"{L} x {N}": curve(losses, rule, L, N) for L, N in models}
    bests = {name: best(*one) for name, one in curves.items()}
    name, smallest = f"{n_layer} x {n_loop}", next(iter(curves))
    lrs, values = curves[name]
    if any(other != lrs for other, _ in curves.values()):
        raise ValueError(f"the models of {rule} were swept over different learning rates: give the losses of one grid")
    kept = values.mean(0)[curves[smallest][1].mean(0).argmin()]  # at the smallest one's best point of the grid
    moved = shift(losses, rule, models[0], (n_layer, n_loop))
    title = (
        f"{rule}, {name}: best learning rate {bests[name].lr:.2g}, moved by {moved} octaves\n"
        f"lowest loss {bests[name].loss:.4g}; at the grid's best for {smallest}: {kept:.4g}"
    )
    ax = plots.lr_curves(
        lrs,
        {name: values.numpy() for name, (_, values) in curves.items()},
        at=name,
        title=title,
        best={name: found.lr for name, found in bests.items()},
    )
    plots.show(ax, f"Loss over the learning rate. {title}.".replace("\n", "; "))


def lr_sweep_browser(losses: Losses) -> ipywidgets.VBox:
    """Whether the best learning rate moves, rule by rule and model by model: `draw_lr_sweep`.

    losses: what `sweep.sweep` or `sweep.load` returned. Raises ValueError where the rules do not share their models.
    """
    models: dict[str, list[tuple[int, int]]] = {}
    for trial in losses:
        models.setdefault(trial.rule, []).append((trial.n_layer, trial.n_loop))
    rules, (shared, *others) = list(models), [sorted(set(of_rule)) for of_rule in models.values()]
    if any(other != shared for other in others):
        raise ValueError("the rules were swept over different models: give the losses of those over the same ones")

    def draw(rule: str, model: tuple[int, int]):
        draw_lr_sweep(losses, rule, *model)

    named = [(f"{L} x {N}", (L, N)) for L, N in shared]
    return explorer(
        draw,
        rule=ipywidgets.Dropdown(options=rules, description="rule"),
        model=ipywidgets.SelectionSlider(options=named, value=shared[-1], description="blocks x loops"),
    )
