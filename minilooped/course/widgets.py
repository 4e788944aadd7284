"""Widgets: thin shells around probes and plots. Each one has a static twin that calls the same functions."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

import ipywidgets
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..data import Tokenizer
from ..engine.machine import PEAK_TFLOPS
from ..model import RULES, LoopedConfig, LoopedGPT
from ..presets import LOOM_PARTS, PRESETS
from ..science import probes, toy
from ..science.ablation import ARMS, PARTS, Run, assembled, reported
from ..science.probes import Cost, Dial, Visits
from ..science.sweep import Losses, best, curve, shift
from ..tools.plan import EXAMPLES, MEMORY_PARTS, Counts, at_loops, hours
from . import plots

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


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 7: experts in a loop

SHOWN = 24  # characters of a sentence, as many as a figure has room for


def draw_router_map(
    models: Mapping[str, LoopedGPT], tokenizer: Tokenizer, model: str, text: str, layer: int = 1
) -> None:
    """Which experts each token of a text meets at each loop, in one layer (counted from 1) of one of the models.

    The title says how many of its experts a token keeps from one loop to the next, and how many it meets in all, with
    chance levels. A text that is too long for the figure is cut.
    """
    config = models[model].config
    idx = torch.as_tensor(tokenizer.encode(text[: min(SHOWN, config.block_size)]))[None]  # (1, T)
    choices, _ = probes.routing(models[model], idx)  # (N, L, 1, T, k)
    E, k = config.n_expert, config.top_k
    overlap = probes.expert_overlap(choices, E)[..., layer - 1]  # (N, N)
    chosen = choices[:, layer - 1, 0]  # (N, T, k)
    met = [len(of_token.unique()) for of_token in chosen.unbind(1)]  # T numbers
    title = (
        f"{model}, layer {layer}: {overlap.diagonal(1).mean():.0%} kept from loop to loop (chance {k / E:.0%}); "
        f"{sum(met) / len(met):.1f} different ones met ({k} to {E}, chance "
        f"{probes.distinct_by_chance(E, k, config.n_loop):.1f})"
    )
    ax = plots.router_map([tokenizer.decode([token]) for token in idx[0].tolist()], chosen.numpy(), E, title=title)
    plots.show(ax, f"Experts of each character of {text!r} in each loop. {title}.")


def router_map(
    models: Mapping[str, LoopedGPT], tokenizer: Tokenizer, text: str = "To be, or not to be"
) -> ipywidgets.VBox:
    """Type a sentence, and see which experts each token meets at each loop: `draw_router_map`.

    models: by name, as many layers in each.
    """
    n_layer = next(iter(models.values())).config.n_layer

    def draw(model: str, text: str, layer: int):
        draw_router_map(models, tokenizer, model, text, layer)

    return explorer(
        draw,
        height="440px",
        model=ipywidgets.Dropdown(options=list(models), description="model"),
        text=ipywidgets.Text(value=text, description="text"),
        layer=ipywidgets.IntSlider(min=1, max=n_layer, description="layer"),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 8: the parts of LOOM, on and off

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


# -- chapter 9: segmented backprop

CUTTER = replace(  # one block
    LOOM_PARTS,
    vocab_size=64,
    block_size=32,
    n_layer=1,
    n_head=2,
    n_embd=32,
    init_std=32**-0.5,
    n_expert=4,
    n_expert_shared=0,
    top_k=2,
    segment=None,
)


@plots.in_style
def draw_segment_cutter(n_loop: int = 9, segment: int = 3) -> None:
    """Where the cuts are, which loops the gradient of each loss reaches, and what autograd holds with and without cuts.

    Measured on an untrained model: gradients on the routers of each loop, and bytes.
    """
    config = replace(CUTTER, n_loop=n_loop, segment=segment)
    model, tokens = probes.fresh(config, 0, (2, config.block_size + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    reach, held = probes.gradient_reach(model, *batch), probes.batch_bytes(model, *batch)
    model.config = replace(config, segment=None)
    ordinary = probes.batch_bytes(model, *batch)
    losses = f"{len(reach)} loss" + "es" * (len(reach) > 1)
    share = f"{held / ordinary:.0%} of ordinary backprop's"
    title = f"{n_loop} loops, {segment} in a segment: {losses}; {held / 1e6:.2f} MB held, {share}"
    cuts, memory = Figure(figsize=(10, 3.2)).subplots(1, 2, width_ratios=(4, 1))
    plots.segment_cuts(reach, ax=cuts)
    memory.bar(["ordinary", "segments"], [ordinary / 1e6, held / 1e6], color=[plots.MARKED, plots.LINE])
    memory.set(ylabel="MB held", ylim=(0, 5))  # one scale for every position
    cuts.figure.suptitle(title, fontsize=12)
    plots.show(cuts, f"Which loops the gradient of each loss reaches, and a bar for the memory. {title}.")


def segment_cutter() -> ipywidgets.VBox:
    """What a cut does to gradient and memory, by loops and segment length: `draw_segment_cutter`."""
    return explorer(
        draw_segment_cutter,
        n_loop=ipywidgets.IntSlider(min=1, max=12, value=9, description="loops N"),
        segment=ipywidgets.IntSlider(min=1, max=12, value=3, description="segment K"),
    )


# -- chapter 6 ---------------------------------------------------------------------------------------------------------

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


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 11: the dial, and what a model would say after every loop

READ = 20  # letters of a text, as many as a move has time for


@plots.in_style
def draw_loops(
    curves: Mapping[str, Tensor],
    models: Mapping[str, LoopedGPT],
    tokenizer: Tokenizer,
    curve: str,
    model: str,
    n_loop: int,
    text: str,
) -> None:
    """Left a recorded dial, turned to `n_loop`; right what one of the models says after each of so many loops.

    curves: (seeds, loops), the loss read out after each, by name. models: by name. The title has the loss, and how much
    it lies above the lowest. A text that is too long for the figure is cut; its last letter is only asked for.
    """
    means = {name: torch.as_tensor(values).mean(0) for name, values in curves.items()}
    losses, network = means[curve].tolist(), models[model]
    ids = torch.as_tensor(tokenizer.encode(text[: min(READ, network.config.block_size) + 1]))
    lens = probes.logit_lens(network, ids[:-1], ids[1:], n_loop)
    letters = [tokenizer.decode([token]) for token in ids.tolist()]
    said = [[tokenizer.decode([token]) for token in row] for row in lens.token.tolist()]
    best, here = losses.index(min(losses)), losses[n_loop - 1]
    title = (
        f"{curve}, read out after loop {n_loop}: {here:.3f} nats, {here - losses[best]:.3f} above loop {best + 1}\n"
        f"{model}, the text above: {(lens.rank[-1] == 1).float().mean():.0%} right"
    )
    dial, table = Figure(figsize=(11, 4.6)).subplots(1, 2, width_ratios=(2, 5))
    dial.plot(range(1, len(losses) + 1), losses, color=plots.LINE, marker="o", markersize=4)
    dial.plot([n_loop], [here], marker="s", markersize=11, color=plots.MARKED)
    dial.set(xlabel="loops at test time", ylabel="validation loss, nats", xticks=range(1, len(losses) + 1))
    every = torch.cat(list(means.values()))
    dial.set_ylim(every.min().item() - 0.03, every.max().item() + 0.03)  # one scale for every position
    plots.lens_table(said, lens.right.numpy(), letters[:-1], letters[1:], trained=network.config.n_loop, ax=table)
    dial.figure.suptitle(title, fontsize=11)
    plots.show(dial, f"Loss over the loops, and the likeliest letter after each loop. {title}.".replace("\n", "; "))


def loop_lens(
    curves: Mapping[str, Tensor],
    models: Mapping[str, LoopedGPT],
    tokenizer: Tokenizer,
    text: str = "To be, or not to be, that",
) -> ipywidgets.VBox:
    """Turn the loop count of recorded dials and of models at hand: `draw_loops`."""

    def draw(curve: str, model: str, n_loop: int, text: str):
        draw_loops(curves, models, tokenizer, curve, model, n_loop, text)

    n_loop = next(iter(models.values())).config.n_loop
    last = min(torch.as_tensor(values).shape[-1] for values in curves.values())
    return explorer(
        draw,
        height="500px",
        curve=ipywidgets.Dropdown(options=list(curves), description="recorded dial"),
        model=ipywidgets.Dropdown(options=list(models), description="your model"),
        n_loop=ipywidgets.IntSlider(min=1, max=last, value=n_loop, description="loops"),
        text=ipywidgets.Text(value=text, description="text"),
    )


# -- chapter 10: will it fit, and when will it be done? ----------------------------------------------------------------

# What the planner offers besides the number of loops. benchmarks/memory.py counts the memory of every combination.
PLANNED = dict(
    preset=("gpt2-small", "gpt2-small-4x3"),
    batch_size=(1, 2, 4, 8, 16),
    recompute_loops=(False, True),
    loss_chunk=(4096, None),
)
CARDS = (16, 24, 48, 80)  # gigabytes


def draw_planner(
    counts: Counts,
    preset: str = "gpt2-small",
    n_loop: int = 3,
    batch_size: int = 16,
    recompute_loops: bool = False,
    loss_chunk: int | None = 4096,
    gpu: str = "A100",
    mfu: float = 0.4,
) -> None:
    """Memory by part of a preset's training with other settings, and its hours; above it the preset at one loop.

    counts: what `plan.load_counts` returned. The tokens of the whole training stay those of the preset.
    """
    model, training = PRESETS[preset]
    plain = counts[preset, training.batch_size, model.recompute_loops, model.loss_chunk][0]
    chosen = at_loops(counts[preset, batch_size, recompute_loops, loss_chunk], n_loop)
    rows = {f"1 loop, batch {training.batch_size}": plain, "your choice": chosen}
    bars = {name: {part: getattr(memory, part) for part in MEMORY_PARTS} for name, memory in rows.items()}
    time = hours(replace(model, n_loop=n_loop), training, PEAK_TFLOPS[gpu], mfu)
    longer = f" to {4 / 3 * time:,.0f}" if recompute_loops else ""  # the blocks run forward twice
    loops, micro_batch = f"{n_loop} loop{'s' * (n_loop > 1)}", f"micro-batches of {batch_size} x {model.block_size:,}"
    title = (
        f"{preset}, {loops}, {micro_batch}: {chosen.peak / 1e9:.1f} GB at most\n"
        f"{time:,.0f}{longer} hours on one {gpu} at {mfu:.0%} of its {PEAK_TFLOPS[gpu]} TFLOP/s"
    )
    ax = plots.memory_bars(bars, cards=CARDS, end=84, title=title)
    plots.show(ax, f"Memory by part, beside the preset at one loop. {title}.".replace("\n", "; "))


def planner(counts: Counts) -> ipywidgets.VBox:
    """Which setting moves which part of the memory, and what it costs in hours: `draw_planner`.

    counts: what `plan.load_counts` returned, for every combination in PLANNED.
    """

    def draw(loss_chunk: bool, **setting):
        chunk, whole = PLANNED["loss_chunk"]
        draw_planner(counts, loss_chunk=chunk if loss_chunk else whole, **setting)

    return explorer(
        draw,
        height="330px",
        preset=ipywidgets.Dropdown(options=PLANNED["preset"], description="preset"),
        n_loop=ipywidgets.IntSlider(min=1, max=6, value=3, description="loops N"),
        batch_size=ipywidgets.SelectionSlider(options=PLANNED["batch_size"], value=16, description="micro-batch"),
        recompute_loops=ipywidgets.Checkbox(value=False, description="recompute_loops"),
        loss_chunk=ipywidgets.Checkbox(value=True, description="loss_chunk"),
        gpu=ipywidgets.Dropdown(options=EXAMPLES, value="A100", description="GPU"),
    )
