"""Does the LOOM recipe train at any number of loops? python benchmarks/loom_loops.py

The protocol was written down, and committed, before the runs. Nothing in it was changed to suit a result.

Loops H = 1, 3, 6, 9, 12. Two arms at the settings of the preset `shakespeare-moe` (2 blocks, width 128, 8 experts,
12 windows of 64 characters, Muon at 3e-3), for 60 steps instead of 800: 30 of warm-up, then down in a line to 0.

    loom    the preset as it is: every part of LOOM, 2 loops in a segment, an update after every segment
    plain   the naive loop: rule `none`, one router for all loops, no re-injection, no looping residual, no norm at the
            end of a loop or on the experts' output, ordinary backprop; the embedding at RMS 1, as LOOM's is

The learning rate is the preset's in both arms; it was tuned for neither at this length. Seeds 1 and 2. Recorded are the
training loss of every step, from which one reads the largest rise above the lowest loss so far (the measure of a
spike), the validation loss over every eighth window in float32, and the most bytes that autograd holds in one batch.
float32, one thread. About seven minutes; a run that was stopped goes on where it was.
"""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from minilooped.presets import PRESETS
from minilooped.probes import batch_bytes
from minilooped.provenance import record
from minilooped.sweep import LanguageModel, Trial
from minilooped.train import evaluate

RESULTS = Path(__file__).parents[1] / "data" / "results"
PRESET = PRESETS["shakespeare-moe"]
TRAIN = replace(PRESET.train, max_steps=60, warmup_steps=30, decay_steps=30, dtype="float32", threads=1)
PLAIN = replace(
    PRESET.model, rule="none", embed_norm=True, router="shared", reinject=False, loop_residual=None,
    loop_end_norm=False, moe_out_norm=False, segment=None,
)  # fmt: skip
TASKS = {"loom": LanguageModel(PRESET.model, TRAIN, 8), "plain": LanguageModel(PLAIN, TRAIN, 8)}


def measure(arm: str, n_loop: int, seed: int) -> dict[str, Any]:
    """Train one model; stop where loss or gradient is no longer finite."""
    task, steps, val_loss = TASKS[arm], [], math.inf
    try:
        steps.extend(task.training(Trial(task.model.rule, task.model.n_layer, n_loop, task.train.lr, seed)))
        val_loss = evaluate(steps[-1][0], task.windows)
    except FloatingPointError:
        pass  # the steps before it are kept
    losses = [round(loss, 4) for _, loss in steps]
    return dict(val_loss=val_loss, bytes=batch_bytes(steps[-1][0], *task.windows[0]), train_losses=losses)


def main() -> None:
    torch.set_num_threads(1)
    arms, n_loops, seeds = list(TASKS), (1, 3, 6, 9, 12), (1, 2)
    runs = [dict(arm=arm, n_loop=n, seed=seed) for seed in seeds for n in n_loops for arm in arms]
    settings = {arm: asdict(task) for arm, task in TASKS.items()}
    record(RESULTS / "loom_loops.json", settings, runs, measure)


if __name__ == "__main__":
    main()
