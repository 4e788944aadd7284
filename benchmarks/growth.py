"""The README's picture: python benchmarks/growth.py

Untrained models, 4 blocks of width 128 in a loop: the RMS of the residual stream against the number of loops, for four
scaling rules. Writes data/results/norm_growth.png and the numbers beside it.
"""

import json
from dataclasses import asdict

import torch

from minilooped.course import plots
from minilooped.model import LoopedConfig
from minilooped.science import probes
from minilooped.science.provenance import RESULTS, provenance

RULES, N_LOOPS, SEEDS = ("none", "sqrt", "inverse", "factored"), (1, 2, 4, 8, 16, 32, 64), (0, 1, 2)

torch.set_num_threads(1)
config = LoopedConfig(
    vocab_size=64, block_size=64, n_layer=4, n_head=4, n_embd=128, init_std=128**-0.5, embed_norm=True
)
growth = probes.norm_growth(config, RULES, N_LOOPS, seeds=SEEDS)
ax = plots.norm_growth(N_LOOPS, growth)
ax.set_title("4 blocks in a loop, untrained: tied updates add up like N")
RESULTS.mkdir(parents=True, exist_ok=True)
plots.save(ax, RESULTS / "norm_growth.png")
about = provenance("python benchmarks/growth.py") | dict(seeds=SEEDS, config=asdict(config))
results = dict(provenance=about, n_loops=N_LOOPS, rms=growth)
(RESULTS / "norm_growth.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
for rule, values in growth.items():
    print(f"{rule:10}", *(f"{value:8.2f}" for value in values))
