"""The README's pictures: python benchmarks/growth.py

Untrained models, 4 blocks of width 128 in a loop: the RMS of the residual stream against the number of loops, for four
scaling rules. Writes data/results/norm_growth.png and the numbers beside it, and the drawing of a loop, the_loop.svg.
"""

from dataclasses import asdict
from typing import Any

import torch

from minilooped.course import plots
from minilooped.model import LoopedConfig
from minilooped.science import probes
from minilooped.science.records import RESULTS, keep

RULES, N_LOOPS, SEEDS = ("none", "sqrt", "inverse", "factored"), (1, 2, 4, 8, 16, 32, 64), (0, 1, 2)
CONFIG = LoopedConfig(
    vocab_size=64, block_size=64, n_layer=4, n_head=4, n_embd=128, init_std=128**-0.5, embed_norm=True
)


def measure() -> dict[str, Any]:
    growth = probes.norm_growth(CONFIG, RULES, N_LOOPS, seeds=SEEDS)
    ax = plots.norm_growth(N_LOOPS, growth)
    ax.set_title("4 blocks in a loop, untrained: tied updates add up like N")
    plots.save(ax, RESULTS / "norm_growth.png")
    plots.save(plots.the_loop(), RESULTS / "the_loop.svg")
    for rule, values in growth.items():
        print(f"{rule:10}", *(f"{value:8.2f}" for value in values))
    return dict(n_loops=N_LOOPS, rms=growth)


if __name__ == "__main__":
    torch.set_num_threads(1)
    command = "python benchmarks/growth.py"
    keep(RESULTS / "norm_growth.json", measure, made_by=command, seeds=SEEDS, config=asdict(CONFIG))
