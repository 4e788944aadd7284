"""Does the LOOM recipe train at any number of loops? python benchmarks/loom_loops.py

The protocol was written down, and committed, before the runs. Nothing in it was changed to suit a result. A first
recording had 60 steps instead of the preset's 800; this one replaces it.

Loops H = 1, 3, 6, 9, 12. Two arms at the settings of the preset `shakespeare-moe` (2 blocks, width 128, 8 experts,
12 windows of 64 characters, Muon at 3e-3, 800 steps: 30 of warm-up, then down in a line to 0):

    loom    the preset as it is: every part of LOOM, 2 loops in a segment, an update after every segment
    plain   the naive loop: rule `none`, one router for all loops, no re-injection, no looping residual, no norm at the
            end of a loop or on the experts' output, ordinary backprop; the embedding at RMS 1, as LOOM's is

At H = 12, LOOM makes six updates a batch where one loop makes one. Two more arms tell loops and updates apart:

    sixths     LOOM at H = 1 on batches of 2 windows: the text of `loom`, and six times its steps
    ordinary   LOOM at H = 12 with ordinary backprop: the loops, and one update a batch

The learning rate is the preset's in all arms, tuned for none. Seeds 1 and 2: seed 1 of `loom` and `plain`, then seed 2,
then the other two arms. Recorded are the training loss of every step, the validation loss over every eighth batch of
windows, and the most bytes that autograd holds in one batch. A spike is a step whose loss is more than 0.5 nats above
the mean of the 20 steps before it, far beyond the noise of a batch of 12 windows.

float32, in which every CPU can repeat it; the preset's "auto" would be bfloat16 on the machine of the recording, one
core of an AMD EPYC, and no faster there. About 90 minutes; a run that was stopped goes on where it was.
"""

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from minilooped.presets import PRESETS
from minilooped.science.probes import batch_bytes
from minilooped.science.records import RESULTS, record
from minilooped.science.sweep import LanguageModel, Trial
from minilooped.train import evaluate

PRESET = PRESETS["shakespeare-moe"]
TRAIN = replace(PRESET.train, dtype="float32", device="auto")  # the device as recorded
SIXTHS = replace(TRAIN, batch_size=2, max_steps=4800, warmup_steps=180, decay_steps=4620)
PLAIN = replace(
    PRESET.model,
    rule="none",
    embed_norm=True,
    router="shared",
    reinject=False,
    loop_residual=None,
    loop_end_norm=False,
    moe_out_norm=False,
    segment=None,
)
TASKS = {
    "loom": LanguageModel(PRESET.model, TRAIN, 8),
    "plain": LanguageModel(PLAIN, TRAIN, 8),
    "sixths": LanguageModel(PRESET.model, SIXTHS, 8),
    "ordinary": LanguageModel(replace(PRESET.model, segment=None), TRAIN, 8),
}
RUNS = [dict(arm=arm, n_loop=n, seed=seed) for seed in (1, 2) for n in (1, 3, 6, 9, 12) for arm in ("loom", "plain")]
RUNS += [dict(arm=arm, n_loop=n, seed=seed) for seed in (1, 2) for arm, n in (("sixths", 1), ("ordinary", 12))]
SETTINGS = {arm: asdict(task) for arm, task in TASKS.items()}


def measure(arm: str, n_loop: int, seed: int) -> dict[str, Any]:
    """Train one model; stop where loss or gradient is no longer finite."""
    task, steps, val_loss = TASKS[arm], [], math.inf
    try:
        steps.extend(task.training(Trial(task.model.rule, task.model.n_layer, n_loop, task.train.lr, seed)))
        val_loss = evaluate(steps[-1][0], TASKS["loom"].windows)  # the same windows for every arm
    except FloatingPointError:
        pass  # the steps before it are kept
    losses = [round(loss, 3) for _, loss in steps]
    return dict(val_loss=val_loss, bytes=batch_bytes(steps[-1][0], *task.windows[0]), train_losses=losses)


def main() -> None:
    torch.set_num_threads(1)
    record(RESULTS / "loom_loops.json", SETTINGS, RUNS, measure)


if __name__ == "__main__":
    main()
