"""Where a loop beats blocks of its own: a step per loop. python benchmarks/hops.py

The protocol was written down, and committed, before the runs. Pilots of one seed, with 11 and 17 things, had shown that
the task is learned in a minute, by which arms, and about where the best learning rates lie.

Task. `minilooped.data.cycle_hops`: a cycle through 13 things is written down, and the last token asks what lies p steps
ahead. Training asks for 1 to 4 steps, p drawn evenly for each batch of 64; every batch is drawn anew. A guess among the
other things is right once in 12 times.
Models. Width 64, 4 heads, SwiGLU, learned positions, a head of its own, init_std = width^(-1/2).

    loop, inverse       one block, visited p times; rules `inverse`, `sqrt` and `none` at n_loop = 4
    loop, sqrt
    loop, none
    own blocks          p of four blocks, each visited once, with the branches of `inverse`: the same depth and work,
                        and four times the blocks
    own blocks, long    the same with three times the steps
    stack               four blocks, all visited whatever p is. What p is, a token says
    one block           one block, visited once. What p is, a token says

Training. 3,000 steps. AdamW (0.9, 0.95), weight decay 0.1, clipping at 1, 50 steps of warm-up, flat, the second half
down in a line to 0. float32, one thread.
Rate. Of each arm its own: seed 0, factors of √2 from 0.002, downhill in the loss at 1 to 4 steps until both neighbours
are worse.
Seeds. 1 to 8 are counted.
Recorded. The loss at 1 to 4 steps, and the share of right answers at 1 to 12 steps (4 for arms that cannot be asked for
more), each on the same 1,024 rows for all runs.
Questions. How many steps does each arm answer, in how many seeds? How far beyond the four that were trained does a loop
go, with more loops than it was ever trained with?
About an hour and a half of one core; a study that was stopped goes on where it was.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from minilooped.data.tasks import Task, baselines, cycle_hops
from minilooped.model import EMA, KVCache, LoopedConfig, LoopedGPT, Routing
from minilooped.science.probes import accuracy_by_loop
from minilooped.science.records import RESULTS, record, runs
from minilooped.science.sweep import bare_training, tuned
from minilooped.train import TrainConfig, evaluate, loops_of_step

PATH = RESULTS / "hops.json"
THINGS, TRAINED = 13, 4  # things in the cycle, and the most steps that training asks for
LRS = [float(f"{2e-3 * 2 ** (k / 2):.3g}") for k in range(-6, 7)]  # 0.00025 to 0.016 by factors of √2


class OwnBlocks(LoopedGPT):
    """A block of its own for every loop: loop n visits block n alone."""

    def run_loop(
        self, h: Tensor, loop: int, x0: Tensor, ema: EMA | None = None, start: int = 0, cache: KVCache | None = None
    ) -> tuple[Tensor, EMA | None, list[Routing]]:
        return self.blocks[loop](h, loop, 1.0, None, None, None)[0], None, []


LOOP = LoopedConfig(
    vocab_size=THINGS,
    block_size=THINGS + 1,
    n_layer=1,
    n_loop=TRAINED,
    n_head=4,
    n_embd=64,
    rule="inverse",
    pos="learned",
    init_std=64**-0.5,
    tie_embeddings=False,
)
TOLD = replace(LOOP, vocab_size=THINGS + TRAINED, block_size=THINGS + 2, n_loop=1)
TRAIN = TrainConfig(
    max_steps=3000,
    batch_size=64,
    schedule="wsd",
    warmup_steps=50,
    decay_steps=1500,
    min_lr_ratio=0.0,
    weight_decay=0.1,
    threads=1,
    n_loop_sampling="uniform",
)
LONG = replace(TRAIN, max_steps=9000, decay_steps=4500)
ARMS = {
    "loop, inverse": (LoopedGPT, LOOP, TRAIN),
    "loop, sqrt": (LoopedGPT, replace(LOOP, rule="sqrt"), TRAIN),
    "loop, none": (LoopedGPT, replace(LOOP, rule="none"), TRAIN),
    "own blocks": (OwnBlocks, replace(LOOP, n_layer=TRAINED), TRAIN),
    "own blocks, long": (OwnBlocks, replace(LOOP, n_layer=TRAINED), LONG),
    "stack": (LoopedGPT, replace(TOLD, n_layer=4), TRAIN),
    "one block": (LoopedGPT, TOLD, TRAIN),
}


def told(config: LoopedConfig) -> int | None:
    return TRAINED if config.vocab_size > THINGS else None


def batches(config: LoopedConfig, train: TrainConfig) -> Iterator[Task]:
    """Of as many steps as the training has loops at the time; for an arm that is told, drawn."""
    generator, draw = torch.Generator().manual_seed(1000 + train.seed), random.Random(train.seed)
    step = 0
    while True:
        p = draw.randint(1, TRAINED) if told(config) else loops_of_step(step, TRAINED, train)
        yield cycle_hops(train.batch_size, p, things=THINGS, told=told(config), generator=generator)
        step += 1


def held_out(config: LoopedConfig, p: int) -> Task:
    generator = torch.Generator().manual_seed(p)
    return cycle_hops(1024, p, things=THINGS, told=told(config), generator=generator)


def trained(arm: str, lr: float, seed: int) -> dict[str, Any]:
    kind, config, train = ARMS[arm]
    train = replace(train, lr=lr, seed=seed)
    *_, (model, _) = bare_training(config, train, batches(config, train), kind)
    most = THINGS - 1 if kind is LoopedGPT and not told(config) else TRAINED
    loops = {p: None if told(config) else p for p in range(1, most + 1)}
    losses = [evaluate(model, [held_out(config, p)], n_loop=loops[p]) for p in range(1, TRAINED + 1)]
    return dict(
        loss=round(sum(losses) / TRAINED, 5),
        right=[round(accuracy_by_loop(model, held_out(config, p), loops[p])[-1], 4) for p in loops],
        parameters=sum(weights.numel() for weights in model.parameters()),
    )


def loss_of(arm: str, lr: float, seed: int) -> float:
    """At 1 to 4 steps, of a run that is made now, if it is not recorded yet."""
    settings: dict[str, Any] = {
        name: dict(model=asdict(model), train=asdict(train)) for name, (_, model, train) in ARMS.items()
    }
    settings["baselines"] = baselines(held_out(LOOP, 1))
    run = dict(arm=arm, lr=lr, seed=seed)
    record(PATH, settings, [run], trained, made_by="python benchmarks/hops.py")
    return runs(PATH, "loss", **run)["loss"].item()


def main() -> None:
    torch.set_num_threads(1)
    rates = {arm: tuned(lambda lr, arm=arm: loss_of(arm, lr, seed=0), LRS, 2e-3) for arm in ARMS}
    for seed in range(1, 9):
        for arm, rate in rates.items():
            loss_of(arm, rate, seed)


if __name__ == "__main__":
    main()
