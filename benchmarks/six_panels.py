"""Chapter 3's figure at its full grid: python benchmarks/six_panels.py

The RMS of the residual stream over the first ten training steps, against depth: blocks that differ (untied) and loops
through four blocks (tied), three scaling rules each. The counterpart of figure 2 of arXiv 2606.18524 at width 128.
Writes data/results/six_panels.json and the picture beside it. About ten minutes of one CPU core.
"""

from dataclasses import asdict
from typing import Any

import torch

from minilooped.course import plots
from minilooped.model import LoopedConfig
from minilooped.science import probes, toy
from minilooped.science.records import RESULTS, keep

DEPTHS, STEPS, LR, SEEDS = (1, 2, 4, 8, 16, 32, 64), 10, 1.25e-3, tuple(range(10))
CONFIG = LoopedConfig(
    vocab_size=64, block_size=64, n_layer=4, n_head=4, n_embd=128, init_std=128**-0.5, embed_norm=True
)
TITLE = "Untied: blocks L. Tied: loops N through 4 blocks. Width 128, 10 seeds"


def measure() -> dict[str, Any]:
    panels = probes.six_panels(CONFIG, DEPTHS, steps=STEPS, lr=LR, seeds=SEEDS)
    axes = plots.six_panels(DEPTHS, panels, title=TITLE)
    plots.save(axes[0, 0], RESULTS / "six_panels.png")
    rms: dict[str, dict[str, list]] = {}
    for row, rules in panels.items():
        rms[row] = {}
        for rule, values in rules.items():  # values: (S, depths, steps + 1)
            before, after = (toy.fit_exponent(DEPTHS[3:], values[:, 3:, step]) for step in (0, STEPS))
            print(f"{row:7} {rule:11} slope {before} untrained, {after} after {STEPS} steps")
            rms[row][rule] = [[[float(f"{r:.5g}") for r in steps] for steps in seed] for seed in values.tolist()]
    return dict(depths=DEPTHS, rms=rms)


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep(RESULTS / "six_panels.json", measure, seeds=SEEDS, steps=STEPS, lr=LR, config=asdict(CONFIG))
