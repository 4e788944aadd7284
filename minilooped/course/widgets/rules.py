"""Scaling rules and their multipliers."""

import ipywidgets
import torch
from matplotlib.figure import Figure

from ...model import RULES, LoopedConfig
from ...science import probes, toy
from .. import plots
from .controls import explorer

PLANE = (1, 4, 16)  # counts of blocks and of loops: few, so that a move is quick, and far apart, so that growth shows


def draw_rule_plane(rule: str = "factored", l_ref: int = 1) -> None:
    """How far a rule lets an untrained model's stream grow, and how far it moves at all, over blocks and loops."""
    config = LoopedConfig(
        vocab_size=64, block_size=16, n_head=2, n_embd=64, init_std=64**-0.5, embed_norm=True, rule=rule, l_ref=l_ref
    )
    plane = probes.growth_plane(config, PLANE, PLANE)
    title = f"{rule}: R differs by at most ×{plane.over_loops:.2f} over N, ×{plane.over_layers:.2f} over L"
    values = {"RMS of the stream, R": plane.rms, "its distance from the start": plane.moved}
    axes = plots.planes(values, PLANE, PLANE, title=title)
    moved = f"the stream moves by {plane.moved.min():.2g} to {plane.moved.max():.2g}"
    plots.show(axes[0], f"Untrained models over {PLANE} blocks and loops at l_ref {l_ref}. {title}; {moved}.")


def rule_explorer() -> ipywidgets.VBox:
    """Which rule is flat where: any row of RULES, the reader's own too, over blocks and loops: `draw_rule_plane`."""
    return explorer(
        draw_rule_plane,
        height="400px",
        rule=ipywidgets.Dropdown(options=list(RULES), value="factored", description="rule"),
        l_ref=ipywidgets.SelectionSlider(options=(1, 2, 4, 8), value=1, description="reference depth l_ref"),
    )


ROUNDS = (1, 2, 4, 8, 16, 32, 64)


@plots.in_style
def draw_multipliers(p: float = 0.5, K: int = 2, R: int = 8, sign_like: bool = False) -> None:
    """alpha = (2N)^p, beta = (8N)^-p and what follows from them, N = KR; beside it, what one step does in the toy.

    Left: over the rounds, by formula. Right: `toy.post_norm_change` of one block, tied and untied, and the slope of
    each. sign_like: whether the step is one, or a gradient's.
    """
    alpha, beta = ([(c * K * n) ** exponent for n in ROUNDS] for c, exponent in ((2, p), (8, -p)))
    ratio = [b / a for a, b in zip(alpha, beta, strict=True)]
    bounds = {
        "aligned: $MR\\,(β/α)^2$": [2 * K * n * n * r**2 for n, r in zip(ROUNDS, ratio, strict=True)],
        "unrelated: $M\\,(β/α)^2$": [2 * K * n * r**2 for n, r in zip(ROUNDS, ratio, strict=True)],
    }
    depths = (4, 8, 16, 32)
    changes = {
        name: torch.stack(
            [toy.post_norm_change(n, p, tied=name == "tied", sign_like=sign_like, d=32, seeds=4) for n in depths], 1
        )
        for name in plots.TYING_LOOK
    }
    slopes = ", ".join(f"{name} {toy.fit_exponent(depths, c).slope + 0.0:.2f}" for name, c in changes.items())
    step = "sign-like" if sign_like else "gradient"
    i = ROUNDS.index(R)
    title = (
        f"p = {p:g}, K = {K}, R = {R}: α = {alpha[i]:.4g}, β = {beta[i]:.3g}, β/α = {ratio[i]:.3g}, "
        f"MR (β/α)² = {2 * K * R * R * ratio[i] ** 2:.3g}"
    )
    formulas, measured = Figure(figsize=(10, 4)).subplots(1, 2)
    plots.multipliers(ROUNDS, {"α": alpha, "β": beta, "β/α": ratio} | bounds, at=R, ax=formulas)
    formulas.set_ylim(1e-6, 1e4)  # one scale for every position
    plots.growth_curves(
        depths,
        changes,
        xlabel="rounds R, one block",
        ylabel="change of $x_R$ per η",
        ax=measured,
        title=f"one {step} step, slopes: {slopes}",
    )
    measured.title.set_fontsize(11)
    formulas.figure.suptitle(title)
    plots.show(formulas, f"{title}. One {step} step in the toy changes its output with slopes {slopes} in R.")


def multiplier_explorer() -> ipywidgets.VBox:
    """Where an exponent leads, with and without shared weights, under two kinds of step: `draw_multipliers`."""
    return explorer(
        draw_multipliers,
        height="450px",
        p=ipywidgets.FloatSlider(min=0.125, max=0.75, step=0.125, value=0.5, readout_format=".3f", description="p"),
        K=ipywidgets.SelectionSlider(options=(1, 2, 4, 12, 24), value=2, description="blocks K"),
        R=ipywidgets.SelectionSlider(options=ROUNDS, value=8, description="rounds R"),
        sign_like=ipywidgets.Checkbox(value=False, description="sign-like step, as Adam's"),
    )
