"""What do the first steps of training change? [1] On the Residual Scaling of Looped Transformers, arXiv 2606.18524."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor

from ...model import LoopedConfig, LoopedGPT
from ...train import TrainConfig, loop_rms, training_steps
from ..toy import rms
from .running import fresh, watched
from .stream import Visits, visits


def training(config: LoopedConfig, *, lr: float, seed: int, batch: int) -> Iterator[tuple[LoopedGPT, Tensor]]:
    """A fresh model and the tokens (B, T) it trains on, before the first step and after each one, without end.

    As in [1]'s diagnostic of the start of training: AdamW at the base settings, and the same random tokens, which fill
    the window, in every step. It is one model all along: look at it before you ask for the next.
    """
    model, tokens = fresh(config, seed, (batch, config.block_size + 1))
    idx, targets = tokens[:, :-1], tokens[:, 1:]
    yield model, idx
    optimizer = model.configure_optimizer(lr, weight_decay=0.1)
    constant = dict(schedule="wsd", warmup_steps=0, decay_steps=0, grad_clip=0.0, step_per_segment=False)
    endless: dict[str, Any] = constant | dict(lr=lr, max_steps=10**9)
    for step in training_steps(model, optimizer, repeat((idx, targets)), TrainConfig(**endless)):
        yield step.model, idx


def first_steps(
    config: LoopedConfig, steps: int = 10, *, lr: float = 1.25e-3, seed: int = 0, batch: int = 1
) -> list[Visits]:
    """The visits of a fresh model after 0, 1, ..., `steps` steps of `training`, for the tokens it trains on.

    lr: AdamW's; the default is [1]'s base value. batch: sequences. Raises ValueError for a negative number of steps.
    """
    if steps < 0:
        raise ValueError(f"steps={steps} must be at least 0, which is the untrained model alone")
    models = islice(training(config, lr=lr, seed=seed, batch=batch), steps + 1)
    return [visits(model, idx) for model, idx in models]


def output_change(
    config: LoopedConfig, *, lr: float = 1.25e-3, seeds: Sequence[int] = (0, 1, 2), batch: int = 1
) -> Tensor:
    """RMS of what the first step of `training` changes in the stream after the last loop, (S,), a value per seed.

    AdamW's first step moves every weight by about lr, whatever the gradient. [1]'s Theorem 2 bounds the change by a
    multiple of lr * eps * N, where eps is the branch multiplier.
    """
    changes = []
    for seed in seeds:
        ends = []  # the stream (B, T, C) before and after the step
        for model, idx in islice(training(config, lr=lr, seed=seed, batch=batch), 2):
            with watched(model), torch.no_grad():
                ends.append(model(idx, return_states=True)[2][-1])
        changes.append(rms((ends[1] - ends[0]).flatten()))
    return torch.stack(changes)


# Rows and columns of [1]'s figure 2: from no scaling to more than enough for the row.
PANELS = {"untied": ("none", "sqrt_depth", "completep"), "tied": ("none", "sqrt", "inverse")}


def six_panels(
    config: LoopedConfig, depths: Sequence[int], *, steps: int = 10, lr: float = 1.25e-3, seeds: Sequence[int] = (0, 1)
) -> dict[str, dict[str, Tensor]]:
    """RMS of the stream behind the last visit in the first steps of training, (S, depths, steps + 1) per panel. [1]

    Panels by row and rule, as in `PANELS`. "untied": a depth is the number of blocks, each visited once. "tied": a
    depth is the number of loops through the `n_layer` blocks of `config`. Each panel is `training` on one sequence.
    """

    def growth(config: LoopedConfig, seed: int) -> list[float]:
        models = islice(training(config, lr=lr, seed=seed, batch=1), steps + 1)
        return [loop_rms(model, idx)[-1] for model, idx in models]

    def panel(row: str, rule: str) -> Tensor:
        if row == "untied":
            configs = [replace(config, rule=rule, n_layer=depth, n_loop=1) for depth in depths]
        else:
            configs = [replace(config, rule=rule, n_loop=depth) for depth in depths]
        return torch.tensor([[growth(config, seed) for config in configs] for seed in seeds], dtype=torch.float64)

    return {row: {rule: panel(row, rule) for rule in rules} for row, rules in PANELS.items()}
