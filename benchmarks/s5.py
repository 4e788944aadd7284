"""Do two cores learn the word problem of S5 in half an hour? python benchmarks/s5.py

The protocol was written down, and committed, before the runs. A first one of 3,000 steps, three minutes for the three
arms, had taught none of them more than the first product. The second had ten times the steps; all else was the same.
In it the loop learned nothing and the others much. The third has half the learning rate: chosen after a look at 4,500
steps of the loop alone, at 5e-4 and 1e-3, at both of which it began to learn.

Task. `minilooped.data.permutations`: 6 permutations of 5 things, the product so far asked for at each. A batch of 64,
drawn anew in every step. To answer at place t takes t - 1 products out of a table of 14,400.
Models. Rule `factored` with l_ref = 2, width 128, 4 heads, SwiGLU, a head of its own, init_std = width^(-1/2). Two
blocks once, the same in three loops, six blocks once.
Training. 30,000 steps. AdamW (0.9, 0.95) at learning rate 2e-3 or 1e-3, weight decay 0.1, clipping at 1, 50 steps of
warm-up, flat, the last third down in a line to a tenth. bfloat16 products, one thread. Seed 1 alone: this asks whether
the task is learned at all.
Recorded. Every 2,500 steps, on 512 sequences that are the same for all runs, in float32: the share of right answers at
places 1 to 6. A run that was stopped goes on where it was.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from minilooped.data.tasks import Task, baselines, permutations
from minilooped.model import LoopedConfig, LoopedGPT, evaluating
from minilooped.science.records import RESULTS, record
from minilooped.science.sweep import bare_training
from minilooped.train import TrainConfig

LENGTH, EVERY = 6, 2500
MODEL = LoopedConfig(
    vocab_size=120,
    block_size=LENGTH,
    n_layer=2,
    n_head=4,
    n_embd=128,
    init_std=128**-0.5,
    l_ref=2,
    tie_embeddings=False,
)
TRAIN = TrainConfig(
    max_steps=30_000,
    batch_size=64,
    schedule="wsd",
    lr=2e-3,
    warmup_steps=50,
    decay_steps=10_000,
    weight_decay=0.1,
    dtype="bfloat16",
    threads=1,
)
SLOWER = replace(TRAIN, lr=1e-3)
SHAPES = {"2 x 1": MODEL, "2 x 3": replace(MODEL, n_loop=3), "6 x 1": replace(MODEL, n_layer=6)}
ARMS = {name: (model, TRAIN) for name, model in SHAPES.items()}
ARMS |= {f"{name}, half the rate": (SHAPES[name], SLOWER) for name in ("2 x 3", "2 x 1", "6 x 1")}
HELD_OUT = permutations(512, LENGTH, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def right_by_place(model: LoopedGPT, task: Task) -> list[float]:
    """Share of right answers at each place."""
    with evaluating(model):
        answers = model(task.x)[0].argmax(-1)  # (B, T)
    return [round(share, 4) for share in (answers == task.y).float().mean(0).tolist()]


def batches(seed: int) -> Iterator[Task]:
    generator = torch.Generator().manual_seed(1000 + seed)  # not that of the held-out sequences
    while True:
        yield permutations(TRAIN.batch_size, LENGTH, generator=generator)


def measure(arm: str, seed: int) -> dict[str, Any]:
    """Train one model and see along the way what it has learned."""
    model, train = ARMS[arm]
    models = enumerate(bare_training(model, replace(train, seed=seed), batches(seed)), start=1)
    return dict(along=[right_by_place(model, HELD_OUT) for step, (model, _) in models if step % EVERY == 0])


def main() -> None:
    torch.set_num_threads(1)
    settings = {arm: dict(model=asdict(model), train=asdict(train)) for arm, (model, train) in ARMS.items()}
    settings["baselines"] = baselines(HELD_OUT)
    record(RESULTS / "s5.json", settings, [dict(arm=arm, seed=1) for arm in ARMS], measure)


if __name__ == "__main__":
    main()
