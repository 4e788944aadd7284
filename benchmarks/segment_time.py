"""How long a batch takes with and without cuts: python benchmarks/segment_time.py

The protocol was written down before the runs. Model and ways are those of segment_memory.py, at 9 loops and with
chapter 9's batch of 9 windows. One training step of each way in turn, eleven rounds on the CPU's clock, the first not
counted. Recorded is the median over the rounds of the time over that of ordinary backprop in the same round; three
times, each with new models. Eval mode, float32, one core of an AMD EPYC that other programs keep busy.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from segment_memory import CONFIG, WAYS

from minilooped.science import probes
from minilooped.science.records import RESULTS, record
from minilooped.train import NextLoss, train_step

WINDOWS = 9
# By way: that of segment_memory.py, and whether every segment has an update of its own.
STEPS = {
    "ordinary backprop": ("ordinary backprop", False),
    "segments, one update": ("segments", False),
    "segments, an update each": ("segments", True),
    "checkpoints": ("checkpoints", False),
}


def training(way: str, every: bool, seed: int) -> Callable[[], object]:
    segment, checkpoints = WAYS[way]
    config = replace(CONFIG, segment=segment, recompute_loops=checkpoints)
    model, tokens = probes.fresh(config, seed, (WINDOWS, config.block_size + 1))
    optimizer = model.configure_optimizer(1e-3, weight_decay=0.1)
    next_loss = NextLoss(model.eval())
    batches = [(tokens[:, :-1], tokens[:, 1:])]
    return lambda: train_step(next_loss, optimizer, batches, step_per_segment=every, grad_clip=1.0)


def measure(seed: int) -> dict[str, dict[str, float]]:
    times = probes.cpu_times({name: training(*step, seed) for name, step in STEPS.items()})
    ratios = {name: (seconds / times["ordinary backprop"]).median().item() for name, seconds in times.items()}
    return dict(ratios={name: round(ratio, 3) for name, ratio in ratios.items()})


def main() -> None:
    torch.set_num_threads(1)
    settings = dict(model=asdict(CONFIG), windows=WINDOWS, steps=STEPS)
    record(RESULTS / "segment_time.json", settings, [dict(seed=seed) for seed in (1, 2, 3)], measure)


if __name__ == "__main__":
    main()
