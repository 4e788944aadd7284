"""LOOM taken apart: its parts as switches, small models with any of them on, and the recorded ablation.

    assembled(PARTS)                            # the whole recipe; assembled(()) is the plain loop
    runs = load("data/results/loom.json")       # what `python benchmarks/loom.py` recorded
    paired(runs, "without scaling", "full")     # nats above the full recipe, a value per seed
    interval(_)                                 # their mean, and how far it can be trusted

[3] LOOM, Looping Beyond Twice, arXiv 2610.01153. Its seventh part, segmented backprop, is no switch here: it changes
the gradient, not the model.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..model import LoopedConfig
from .records import runs
from .stats import interval as interval  # the last of the four steps above

# What each part changes in a config.
PARTS: dict[str, dict[str, Any]] = {
    "scaling": dict(rule="loom"),  # gamma = 1/2 / (H sqrt M) on every branch
    "expert norm": dict(moe_out_norm=True),  # a learned RMSNorm on what the experts say
    "loop norm": dict(loop_end_norm=True),  # a parameter-free one that closes each loop
    "re-injection": dict(reinject=True),
    "looping residual": dict(loop_residual=0.5),
    "own routers": dict(router="per_loop"),
}
# An average without a memory: what the looping residual does to the size of the attention's output, and nothing else.
CONTROLS: dict[str, dict[str, Any]] = {"doubled attention": dict(loop_residual=0.0)}
# Does a result hang on how loud the branches are at first?
SETTINGS: dict[str, dict[str, Any]] = {"quiet start": dict(init_std=0.05)}
# The loop without any of them, over characters of the embedded text. As in LOOM the stream starts at RMS 1, the head is
# not tied and gates are sigmoids; small enough to train in seconds.
PLAIN = LoopedConfig(
    vocab_size=65,
    block_size=64,
    n_layer=2,
    n_loop=6,
    n_head=4,
    n_embd=64,
    init_std=64**-0.5,
    rule="none",
    embed_norm=True,
    tie_embeddings=False,
    n_expert=8,
    top_k=2,
    mlp="gelu",
    n_inner=64,
    gate="sigmoid",
)


def assembled(parts: Collection[str], base: LoopedConfig = PLAIN) -> LoopedConfig:
    """`base` with these of PARTS, CONTROLS and SETTINGS switched on. Raises ValueError for one that is in none."""
    switches = PARTS | CONTROLS | SETTINGS
    if unknown := [part for part in parts if part not in switches]:
        raise ValueError(f"no part {', '.join(unknown)}; there are {', '.join(switches)}")
    return replace(base, **{name: value for part in parts for name, value in switches[part].items()})


# What was trained: the recipe, the recipe less one part, what can be said to lie at the other end, and three of
# these once more from a quiet start.
ARMS: dict[str, tuple[str, ...]] = {
    "full": tuple(PARTS),
    **{f"without {part}": tuple(other for other in PARTS if other != part) for part in PARTS},
    "plain": (),
    "plain + scaling": ("scaling",),
    "plain + re-injection": ("re-injection",),
    "plain + scaling + re-injection": ("scaling", "re-injection"),
    "plain + both norms": ("expert norm", "loop norm"),
    "doubled attention": tuple(part for part in PARTS if part != "looping residual") + tuple(CONTROLS),
    "plain + expert norm": ("expert norm",),
    "plain + loop norm": ("loop norm",),
}
ARMS |= {f"{arm}, quiet start": (*ARMS[arm], "quiet start") for arm in ("full", "plain", "plain + both norms")}


@dataclass(frozen=True)
class Run:
    """One recorded training run."""

    arm: str  # of ARMS
    lr: float  # peak learning rate
    seed: int  # 0 chose the learning rate, the others are reported
    val_loss: float  # nats per token; inf: diverged
    losses: list[float]  # training loss, nats per token, at each step
    variances: list[float]  # mean square of the stream after the last block, before a closing norm, on the way
    every: int  # steps between two variances, and before the first

    @property
    def smooth(self) -> Tensor:
        """The training loss as the mean of every ten steps in a row."""
        return torch.tensor(self.losses, dtype=torch.float64).unfold(0, 10, 1).mean(1)

    @property
    def worst_rise(self) -> float:
        """How far `smooth` ever stood above its lowest value before, in nats: the size of the largest spike."""
        return (self.smooth - self.smooth.cummin(0).values).max().item()

    @property
    def end_rise(self) -> float:
        """How far `smooth` stands above its lowest value at the end, in nats: what was never recovered."""
        return (self.smooth[-1] - self.smooth.min()).item()


def load(path: str | Path) -> list[Run]:
    """The runs in a file that `benchmarks/loom.py` wrote. Raises as `records.runs` does."""
    names = [field.name for field in fields(Run)]
    return [Run(*run) for run in runs(path, *names)[names].itertuples(index=False)]


def reported(runs: Sequence[Run], arm: str) -> dict[int, Run]:
    """The runs of an arm by seed, at its best learning rate in those of seed 0, if it has any, and without these."""
    sought = [run for run in runs if run.arm == arm and run.seed == 0]
    lr = min(sought, key=lambda run: run.val_loss).lr if sought else None
    return {run.seed: run for run in runs if run.arm == arm and run.seed > 0 and lr in (None, run.lr)}


def paired(runs: Sequence[Run], arm: str, reference: str) -> Tensor:
    """Validation loss of an arm less that of another, seed by seed, (S,), in nats.

    The two see the same batches in the same order. Raises ValueError where they have no seeds in common.
    """
    one, other = reported(runs, arm), reported(runs, reference)
    if not one.keys() & other.keys():
        raise ValueError(f"no seed of {arm} and of {reference} was recorded")
    pairs = sorted(one.keys() & other.keys())
    return torch.tensor([one[seed].val_loss - other[seed].val_loss for seed in pairs], dtype=torch.float64)
