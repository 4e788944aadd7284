"""Ordinary backprop, segments with one update, segments with an update each: python benchmarks/segments.py

The protocol was written down, and committed, before the runs. Nothing in it was changed to suit a result.

Model. Every part of LOOM: 1 block in 9 loops, width 64, 4 heads, 8 experts of which a token visits 2, windows of 64
characters of the embedded plays, init_std = width^(-1/2). 3 loops in a segment.
Training. Batches of 9 windows. AdamW (0.9, 0.95), weight decay 0.1, clipping at 1, 20 steps of warm-up, flat, the last
fifth of the steps down in a line to a tenth. float32, one thread.

    ordinary            the loss after loop 9, ordinary backprop
    accumulate          the losses after loops 3, 6 and 9, no gradient across a cut, one update a batch by their mean
    step                the same three losses, an update after each: three updates a batch [LOOM's way]
    ordinary, thirds    ordinary backprop on batches of 3 windows: the text of `ordinary`, the updates of `step`
    early losses        the mean of the same three losses, ordinary backprop: the objective without the cuts
    last segment        the loss after loop 9, no gradient into loops 1 to 6: a cut without the early losses

Budget. 100 batches of 9 windows (seeds 1, 2, 3); ordinary, accumulate and step also 300 batches (seeds 1, 2). So `step`
at 100 batches makes as many updates as `ordinary` at 300 batches, and as `ordinary, thirds` at 100.
Learning rate. Of the first four arms at 100 batches: the best of 5, 10 and 20 thousandths for seed 0, a run that counts
for nothing else. At 300 batches each arm keeps it, untuned for that length; early losses and last segment use that of
ordinary.
Changed after a look at the tuning runs, before the others: the best of `ordinary` was the largest, so where that
happens the grid goes on by factors of two; and `accumulate`, which was to use that of ordinary, is tuned for itself.

Recorded is the validation loss (every eighth window, float32) read out after each of 18 loops, twice those of training.
About five minutes; a run that was stopped goes on where it was.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from minilooped.model import EMA, LoopedGPT
from minilooped.presets import LOOM_PARTS
from minilooped.science.probes import loss_after_each_loop
from minilooped.science.records import RESULTS, record, runs
from minilooped.science.sweep import LanguageModel, Trial
from minilooped.train import TrainConfig

MODEL = replace(
    LOOM_PARTS,
    block_size=64,
    n_layer=1,
    n_loop=9,
    n_head=4,
    n_embd=64,
    init_std=64**-0.5,
    n_expert=8,
    n_expert_shared=0,
    top_k=2,
)
TUNED, LRS = ("ordinary", "step", "ordinary, thirds", "accumulate"), (5e-3, 1e-2, 2e-2)
PATH = RESULTS / "segments.json"


class OneLoss(LoopedGPT):
    """The losses after `ends`, with the stream detached after `cuts` (loops counted from 1), as one mean."""

    ends, cuts = (9,), ()

    def _segment_losses(self, idx: Tensor, targets: Tensor, segments: list[range]) -> Iterator[Tensor]:
        h = x0 = self.embed(idx)
        memory, routings, losses, first = None, [], [], 0
        for loop in range(max(self.ends)):
            h, memory, routed = self.run_loop(h, loop, x0, memory)
            routings.append(routed)
            if loop + 1 in self.ends:
                losses.append(self._with_aux_loss(self.cross_entropy(h, targets), routings[first:]))
                first = loop + 1
            if loop + 1 in self.cuts:
                h, memory = h.detach(), EMA(memory.total.detach(), memory.weight)
        self._collect_loads(routings)
        yield torch.stack(losses).mean()


class EarlyLosses(OneLoss):
    ends = (3, 6, 9)


class LastSegment(OneLoss):
    cuts = (6,)


# By arm: the class of the model, what differs in its config, and in its training.
ARMS = {
    "ordinary": (LoopedGPT, dict(segment=None), {}),
    "accumulate": (LoopedGPT, {}, dict(step_per_segment=False)),
    "step": (LoopedGPT, {}, {}),
    "ordinary, thirds": (LoopedGPT, dict(segment=None), dict(batch_size=3)),
    "early losses": (EarlyLosses, dict(segment=None), {}),
    "last segment": (LastSegment, dict(segment=None), {}),
}


def task(arm: str, batches: int) -> LanguageModel:
    _, model, training = ARMS[arm]
    steps = batches * 9 // training.get("batch_size", 9)
    train = TrainConfig(
        max_steps=steps,
        batch_size=9,
        schedule="wsd",
        warmup_steps=20,
        decay_steps=steps // 5,
        weight_decay=0.1,
        dtype="float32",
        threads=1,
    )
    return LanguageModel(replace(MODEL, **model), replace(train, **training), 8)


@cache
def windows() -> list[tuple[Tensor, Tensor]]:
    return task("ordinary", 100).windows  # the same for every arm


def measure(arm: str, batches: int, lr: float, seed: int) -> dict[str, list[float]]:
    *_, (model, _) = task(arm, batches).training(Trial("loom", 1, 9, lr, seed), kind=ARMS[arm][0])
    return dict(losses=[round(loss, 5) for loss in loss_after_each_loop(model, windows(), n_loop=18)])


def tune(settings: dict[str, Any], wanted: list[dict[str, Any]]) -> dict[str, float]:
    """The best learning rate of each arm, by the loss after the last trained loop."""
    record(PATH, settings, wanted, measure)

    def losses(arm: str) -> pd.Series:
        return runs(PATH, arm=arm, seed=0).set_index("lr")["losses"].str[8]

    return {arm: float(losses(arm).idxmin()) for arm in TUNED}


def main() -> None:
    torch.set_num_threads(1)
    settings = {arm: asdict(task(arm, 100)) for arm in ARMS}
    tuning = [dict(arm=arm, batches=100, lr=lr, seed=0) for lr in LRS for arm in TUNED]
    best = tune(settings, tuning)
    while beyond := [
        run | dict(lr=2 * run["lr"]) for run in tuning if best[run["arm"]] == run["lr"] == tuning[-1]["lr"]
    ]:
        tuning += beyond
        best = tune(settings, tuning)

    def run(arm: str, batches: int, seed: int) -> dict[str, str | int | float]:
        return dict(arm=arm, batches=batches, lr=best.get(arm, best["ordinary"]), seed=seed)

    wanted = [run(arm, 100, seed) for seed in (1, 2) for arm in ARMS]
    wanted += [run("ordinary", 300, seed) for seed in (1, 2)]
    wanted += [run(arm, 100, 3) for arm in ARMS]
    wanted += [run(arm, 300, seed) for seed in (1, 2) for arm in ("step", "accumulate")]
    record(PATH, settings, wanted, measure)


if __name__ == "__main__":
    main()
