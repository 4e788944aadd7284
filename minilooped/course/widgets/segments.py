"""Where segmented backprop cuts."""

from dataclasses import replace

import ipywidgets
from matplotlib.figure import Figure

from ...presets import LOOM_PARTS
from ...science import probes
from .. import plots
from .controls import explorer

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
