"""Claims of related papers, and of how many loops there should be, each below the function that measures it."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from ...model import LoopedConfig
from .. import probes
from ..records import RESULTS
from .claim import (
    DEPTHS,
    NOTHING,
    SMALL,
    SMALL_MODEL,
    Band,
    Measured,
    by_seed,
    claim,
    exactly,
    over_seeds,
    paired,
    shaped,
    slope,
)


def rule_identities() -> dict[str, Measured]:
    """Largest difference at one loop between rules that should then be one."""

    def apart(rule: str, other: str) -> Measured:
        worst = 0.0
        for n_layer in (1, 3, 12, 48):
            a, b = (shaped(name, n_layer, 1).row for name in (rule, other))
            for number in ("skip", "branch", "init_gain", "lr_factor", "eps_factor"):
                worst = max(worst, abs(getattr(a, number) - getattr(b, number)))
        return exactly(worst)

    pairs = (("factored", "depth_mup"), ("sqrt", "none"), ("inverse", "none"))
    return {f"difference, {rule} and {other}": apart(rule, other) for rule, other in pairs}


claim(
    "R-identities",
    "At one loop the factored rule is Depth-μP, and the rules of the loop count change nothing.",
    kind="identity",
    source="Depth-μP, arXiv 2310.02244",
    published="identities",
    tier="seconds",
    scale="rows of RULES, 1 to 48 layers",
    band={f"difference, {pair}": NOTHING for pair in ("factored and depth_mup", "sqrt and none", "inverse and none")},
    measure=rule_identities,
)

# Chapter 11. Recorded by how_many_loops.py, p_hop.py and p_hop_long.py in benchmarks/.
LOOPS, HOPS, LONGER_HOPS = (RESULTS / f"{name}.json" for name in ("how_many_loops", "p_hop", "p_hop_long"))


def read_out(arm: str, loop: int) -> pd.Series:
    """Loss after a loop, counted from 1, of an arm of the dial, by seed."""
    return by_seed(LOOPS, part="dial", arm=arm)["losses"].str[loop - 1]


def untrained_loops() -> dict[str, Measured]:
    """What twelve loops do to models that were trained with four."""
    arms = {f"{rule}, {way}" for rule in ("none", "factored") for way in ("fixed 4", "drawn 1 to 4")}
    return {f"{arm}: loop 12 less loop 4, nats": paired(read_out(arm, 12), read_out(arm, 4)) for arm in sorted(arms)}


DIALLED = "recorded (chapter 11): 2 blocks trained with 4 loops, d = 64, 120 steps on the embedded text"


claim(
    "R-untrained-loops",
    "Loops beyond those of training make the loss worse, drawn in training or not.",
    kind="training",
    source="asked by us",
    published="public logs: more loops at test time rarely help",
    tier="minutes",
    scale=DIALLED,
    band={
        f"{rule}, {way}: loop 12 less loop 4, nats": Band(0, null=(-0.01, 0))
        for rule in ("factored", "none")
        for way in ("drawn 1 to 4", "fixed 4")
    },
    measure=untrained_loops,
    recorded=[LOOPS],
    note="Seed 1 of two arms had been seen when the band was set. The third seed of `none` was added when two were "
    "known.",
)


def drawn_loops() -> dict[str, Measured]:
    """What drawing the loop count gains at one loop, and costs at the largest, with `factored`."""
    fixed, drawn = "factored, fixed 4", "factored, drawn 1 to 4"
    return {
        "fixed less drawn at loop 1, nats": paired(read_out(fixed, 1), read_out(drawn, 1)),
        "drawn less fixed at loop 4, nats": paired(read_out(drawn, 4), read_out(fixed, 4)),
    }


claim(
    "R-drawn-loops",
    "Loop counts drawn in training make few loops good, at little cost at the full count.",
    kind="training",
    source="asked by us; drawn loops: recurrent depth, arXiv 2502.05171",
    published="no such number",
    tier="minutes",
    scale=DIALLED,
    band={
        "fixed less drawn at loop 1, nats": Band(0.05, null=(-0.02, 0.02)),
        "drawn less fixed at loop 4, nats": Band(-0.05, 0.05),
    },
    measure=drawn_loops,
    recorded=[LOOPS],
    note="Seed 1 had been seen when the bands were set. Drawn steps do five eighths of the work.",
)


def equal_work() -> dict[str, Measured]:
    """What loops gain over one loop with as many more steps, at the largest budget."""

    def loss(size: str) -> pd.Series:
        return by_seed(LOOPS, part="compute", arm=size, budget=1920)["losses"].str[-1]

    return {f"2 x 1 less {size}, nats": paired(loss("2 x 1"), loss(size)) for size in ("2 x 2", "2 x 4")}


claim(
    "R-equal-work",
    "At equal work two blocks in loops end below the same two blocks with more steps.",
    kind="training",
    source="P3-h, asked of a small dense model",
    published="perplexity 18.36 to 16.54 at 700M, second-hand",
    tier="minutes",
    scale="recorded (chapter 11): d = 64, 1920 steps times visits on the embedded text, each size near its best "
    "learning rate",
    band={f"2 x 1 less {size}, nats": Band(0, null=(-0.01, 0)) for size in ("2 x 2", "2 x 4")},
    measure=equal_work,
    recorded=[LOOPS],
)


def four_hops(arm: str, loops: int, path: Path = HOPS) -> pd.Series:
    """Share of right answers to four hops, read out after so many loops, by seed."""
    return by_seed(path, arm=arm)["by_loop"].str[loops - 1].str[2]


def loops_for_layers() -> dict[str, Measured]:
    """Share of right answers to four hops: blocks in loops against those blocks once, and as many blocks as visits."""

    return {
        "2 x 3 less 2 x 1": paired(four_hops("2 x 3", 3), four_hops("2 x 1", 1)),
        "2 x 3 less 2 x 1 with three times the steps": paired(four_hops("2 x 3", 3), four_hops("2 x 1, long", 1)),
        "6 x 1 less 2 x 3": paired(four_hops("6 x 1", 1), four_hops("2 x 3", 3)),
    }


claim(
    "R-p-hop",
    "On p-hop a few blocks in loops do what only as many blocks as visits do otherwise.",
    kind="training",
    source="Reasoning with Latent Thoughts, arXiv 2502.17416, second-hand",
    published="k blocks in L loops nearly match kL blocks",
    tier="minutes",
    scale="recorded (chapter 11): d = 64, p = 4 of 1, 2, 4, 4 letters, windows of 32, 600 steps",
    band={
        "2 x 3 less 2 x 1": Band(0.05, null=(-0.02, 0.02)),
        "2 x 3 less 2 x 1 with three times the steps": Band(0.05, null=(-0.02, 0.02)),
        "6 x 1 less 2 x 3": Band(-1, 0.05),
    },
    measure=loops_for_layers,
    recorded=[HOPS],
    note="One learning rate for all. Seed 1 of the first pair had been seen before the bands, and seeds 1 and 2 of "
    "all before seed 3 was added.",
)


def longer_loops_for_layers() -> dict[str, Measured]:
    """The same where the looped blocks have three times the steps, beside the same blocks once with as many."""
    looped = four_hops("2 x 3, long", 3, LONGER_HOPS)
    return {
        "2 x 3 less 2 x 1, both 1800 steps": paired(looped, four_hops("2 x 1, long", 1)),
        "6 x 1, 600 steps, less 2 x 3, 1800 steps": paired(four_hops("6 x 1", 1), looped),
    }


claim(
    "R-p-hop-long",
    "The same, given three times the steps.",
    kind="training",
    source="Reasoning with Latent Thoughts, arXiv 2502.17416, second-hand",
    published="k blocks in L loops nearly match kL blocks",
    tier="minutes",
    scale="recorded (chapter 11): as R-p-hop, 1800 steps",
    band={
        "2 x 3 less 2 x 1, both 1800 steps": Band(0.05, null=(-0.02, 0.02)),
        "6 x 1, 600 steps, less 2 x 3, 1800 steps": Band(-1, 0.05),
    },
    measure=longer_loops_for_layers,
    recorded=[LONGER_HOPS],
    note="Added after R-p-hop, whose looped runs were still rising at 600 steps. Seed 3 was added when two were known.",
)


# Recorded by `python benchmarks/hops.py` under a protocol written before it.
CYCLE = RESULTS / "hops.json"


def steps_ahead() -> dict[str, Measured]:
    """Share of right answers of a loop trained on 1 to 4 steps, a step per loop, and of blocks of their own."""
    right = {arm: by_seed(CYCLE, arm=arm)["right"] for arm in ("loop, inverse", "own blocks")}
    if len(right["loop, inverse"]) < 8:
        raise FileNotFoundError(f"{CYCLE} has fewer than 8 seeds: the study goes on")

    def share(arm: str, steps: int) -> pd.Series:
        return right[arm].str[steps - 1].astype(float)

    found = {
        f"loop: right at {steps} steps": over_seeds(torch.tensor(share("loop, inverse", steps).to_numpy()))
        for steps in (4, 6, 8)
    }
    return found | {"loop less own blocks at 4 steps": paired(share("loop, inverse", 4), share("own blocks", 4))}


claim(
    "R-hops",
    "A loop that takes a step of a task per loop takes more steps with more loops than it was trained with.",
    kind="training",
    source="asked by us; loops beyond training on algorithmic tasks: arXiv 2409.15647, second-hand",
    published="no such number",
    tier="minutes",
    scale="recorded (chapter 11): one block of width 64, rule 1/N, trained on 1 to 4 steps through a cycle of 13 "
    "things, 3,000 AdamW steps, each arm at its own learning rate, 8 seeds; chance is 0.08",
    band={
        "loop: right at 4 steps": Band(0.95),
        "loop: right at 6 steps": Band(0.9, null=(0, 0.1)),
        "loop: right at 8 steps": Band(0.5, null=(0, 0.1)),
        "loop less own blocks at 4 steps": Band(0.05, null=(-0.02, 0.02)),
    },
    measure=steps_ahead,
    recorded=[CYCLE],
    note="The bands were set when five of the eight seeds were known. Given three times the steps, blocks of their "
    "own answer 4 steps too.",
)


def untrained_rms(configs: Sequence[LoopedConfig]) -> Tensor:
    """RMS after the last visit of untrained models, before a norm that closes the loop: (S, K), 8 seeds, K configs."""
    found = [[probes.visits(*probes.fresh(c, seed, (2, c.block_size))) for c in configs] for seed in range(8)]
    return torch.tensor([[visits.stream[-1, -1] for visits in row] for row in found])


def layernorm_scaling() -> dict[str, Measured]:
    """Slopes of an untrained model's stream."""
    rule = "layernorm_scaling"
    return {
        "untied: slope in L": slope(DEPTHS, untrained_rms([shaped(rule, n, 1, SMALL) for n in DEPTHS])),
        "tied: slope in N": slope(DEPTHS, untrained_rms([shaped(rule, 1, n, SMALL) for n in DEPTHS])),
    }


claim(
    "R-layernorm-scaling",
    "LayerNorm Scaling tames untied depth, not loops: tied, the stream still grows like √N.",
    kind="first steps",
    source="LayerNorm Scaling, arXiv 2502.05795, turned round by us",
    published="made for untied layers",
    tier="seconds",
    scale="dense, 8 to 64 visits, " + SMALL_MODEL,
    band={"untied: slope in L": Band(-0.15, 0.15), "tied: slope in N": Band(0.4, 0.65, null=(-0.15, 0.15))},
    measure=layernorm_scaling,
)
