"""What a model costs, and whether a training fits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import ipywidgets

from ...engine.machine import PEAK_TFLOPS
from ...presets import PRESETS
from ...science.probes import Cost
from ...tools.plan import EXAMPLES, MEMORY_PARTS, Counts, at_loops, hours
from .. import plots
from .controls import explorer


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


# What the planner offers besides the number of loops. benchmarks/memory.py counts the memory of every combination.
PLANNED: dict[str, tuple] = dict(
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
        chunk, whole = cast(tuple[int, None], PLANNED["loss_chunk"])
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
