"""The parts of LOOM, on and off."""

from collections.abc import Collection, Sequence
from functools import cache

import ipywidgets
from torch import Tensor

from ...science import probes
from ...science.ablation import ARMS, PARTS, Run, assembled, reported
from .. import plots
from .controls import explorer

LOOPS = (1, 3, 6, 12)


@cache
def _variance(parts: tuple[str, ...]) -> Tensor:
    return probes.variance_over_loops(assembled(parts), LOOPS)  # (S, K)


def draw_loom_parts(runs: Sequence[Run], parts: Collection[str]) -> None:
    """Variance over the loops of untrained models with these parts, and what training made of them if it was recorded.

    runs: what `ablation.load` returned. The variance is taken before a norm that closes the loop.
    """
    parts = tuple(part for part in PARTS if part in parts)
    name, chosen = "all parts" if len(parts) == len(PARTS) else " + ".join(parts) or "no part", "your choice"
    curves = {"plain + expert norm": _variance(("expert norm",)), "full": _variance(tuple(PARTS))}
    curves[chosen] = _variance(parts)
    arm = next((arm for arm, own in ARMS.items() if set(own) == set(parts)), None)
    losses = [run.val_loss for run in reported(runs, arm).values()] if arm else []
    trained = "no training run of it is recorded"
    if losses:
        low, mean, high = min(losses), sum(losses) / len(losses), max(losses)
        trained = f"trained in 6: {mean:.3f} nats ({low:.3f} to {high:.3f}, {len(losses)} seeds)"
    title = f"{name}\nvariance {curves[chosen].mean(0)[-1]:.3g} at {LOOPS[-1]} loops; {trained}"
    ax = plots.variants(LOOPS, curves, front=chosen, title=title)
    ax.set_ylim(0.8, 3000)  # one scale for every position
    plots.show(ax, f"Variance of untrained models over 1 to {LOOPS[-1]} loops. {title}.")


def loom_switchboard(runs: Sequence[Run]) -> ipywidgets.VBox:
    """Which parts of LOOM are on: `draw_loom_parts`. It opens on the naive loop, which has the expert norm alone."""

    def draw(**on: bool):
        draw_loom_parts(runs, [part for part in PARTS if on[part]])

    switches = {part: ipywidgets.Checkbox(value=part == "expert norm", description=part) for part in PARTS}
    return explorer(draw, height="400px", **switches)
