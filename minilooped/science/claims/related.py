"""Claims of related papers, and of how many loops there should be, each below the function that measures it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model import LoopedConfig
from .. import probes
from ..provenance import RESULTS
from .claim import (
    DEPTHS,
    NOTHING,
    SMALL,
    SMALL_MODEL,
    Band,
    Measured,
    claim,
    exactly,
    over_seeds,
    recorded_runs,
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
    "Depth-μP, arXiv 2310.02244",
    "identities",
    "seconds",
    "rows of RULES, 1 to 48 layers",
    {f"difference, {pair}": NOTHING for pair in ("factored and depth_mup", "sqrt and none", "inverse and none")},
    rule_identities,
)

# Chapter 11. Recorded by how_many_loops.py, p_hop.py and p_hop_long.py in benchmarks/.
LOOPS, HOPS, LONGER_HOPS = (RESULTS / f"{name}.json" for name in ("how_many_loops", "p_hop", "p_hop_long"))


def recorded(path: Path, chosen: Mapping[str, Any], value: Callable[[Mapping[str, Any]], float]) -> dict[int, float]:
    """A value of the recorded runs that have these settings, by seed; seed 0 was for tuning only."""
    return {run["seed"]: value(run) for run in recorded_runs(path) if run["seed"] > 0 and chosen.items() <= run.items()}


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Measured:
    """The first less the second, over the seeds that both have."""
    return over_seeds(torch.tensor([first[seed] - second[seed] for seed in first if seed in second]))


def read_out(arm: str, loop: int) -> dict[int, float]:
    """Loss after a loop, counted from 1, of an arm of the dial, by seed."""
    return recorded(LOOPS, dict(part="dial", arm=arm), lambda run: run["losses"][loop - 1])


def untrained_loops() -> dict[str, Measured]:
    """What twelve loops do to models that were trained with four."""
    arms = {f"{rule}, {way}" for rule in ("none", "factored") for way in ("fixed 4", "drawn 1 to 4")}
    return {f"{arm}: loop 12 less loop 4, nats": paired(read_out(arm, 12), read_out(arm, 4)) for arm in sorted(arms)}


DIALLED = "recorded (chapter 11): 2 blocks trained with 4 loops, d = 64, 120 steps on the embedded text"


claim(
    "R-untrained-loops",
    "Loops beyond those of training make the loss worse, drawn in training or not.",
    "asked by us",
    "public logs: more loops at test time rarely help",
    "minutes",
    DIALLED,
    {
        f"{rule}, {way}: loop 12 less loop 4, nats": Band(0, null=(-0.01, 0))
        for rule in ("factored", "none")
        for way in ("drawn 1 to 4", "fixed 4")
    },
    untrained_loops,
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
    "asked by us; drawn loops: recurrent depth, arXiv 2502.05171",
    "no such number",
    "minutes",
    DIALLED,
    {
        "fixed less drawn at loop 1, nats": Band(0.05, null=(-0.02, 0.02)),
        "drawn less fixed at loop 4, nats": Band(-0.05, 0.05),
    },
    drawn_loops,
    note="Seed 1 had been seen when the bands were set. Drawn steps do five eighths of the work.",
)


def equal_work() -> dict[str, Measured]:
    """What loops gain over one loop with as many more steps, at the largest budget."""

    def loss(size: str) -> dict[int, float]:
        return recorded(LOOPS, dict(part="compute", arm=size, budget=1920), lambda run: run["losses"][-1])

    return {f"2 x 1 less {size}, nats": paired(loss("2 x 1"), loss(size)) for size in ("2 x 2", "2 x 4")}


claim(
    "R-equal-work",
    "At equal work two blocks in loops end below the same two blocks with more steps.",
    "P3-h, asked of a small dense model",
    "perplexity 18.36 to 16.54 at 700M, second-hand",
    "minutes",
    "recorded (chapter 11): d = 64, 1920 steps times visits on the embedded text, each size near its best learning "
    "rate",
    {f"2 x 1 less {size}, nats": Band(0, null=(-0.01, 0)) for size in ("2 x 2", "2 x 4")},
    equal_work,
)


def four_hops(arm: str, loops: int, path: Path = HOPS) -> dict[int, float]:
    """Share of right answers to four hops, read out after so many loops, by seed."""
    return recorded(path, dict(arm=arm), lambda run: run["by_loop"][loops - 1][2])


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
    "Reasoning with Latent Thoughts, arXiv 2502.17416, second-hand",
    "k blocks in L loops nearly match kL blocks",
    "minutes",
    "recorded (chapter 11): d = 64, p = 4 of 1, 2, 4, 4 letters, windows of 32, 600 steps",
    {
        "2 x 3 less 2 x 1": Band(0.05, null=(-0.02, 0.02)),
        "2 x 3 less 2 x 1 with three times the steps": Band(0.05, null=(-0.02, 0.02)),
        "6 x 1 less 2 x 3": Band(-1, 0.05),
    },
    loops_for_layers,
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
    "Reasoning with Latent Thoughts, arXiv 2502.17416, second-hand",
    "k blocks in L loops nearly match kL blocks",
    "minutes",
    "recorded (chapter 11): as R-p-hop, 1800 steps",
    {
        "2 x 3 less 2 x 1, both 1800 steps": Band(0.05, null=(-0.02, 0.02)),
        "6 x 1, 600 steps, less 2 x 3, 1800 steps": Band(-1, 0.05),
    },
    longer_loops_for_layers,
    note="Added after R-p-hop, whose looped runs were still rising at 600 steps. Seed 3 was added when two were known.",
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
    "LayerNorm Scaling, arXiv 2502.05795, turned round by us",
    "made for untied layers",
    "seconds",
    "dense, 8 to 64 visits, " + SMALL_MODEL,
    {"untied: slope in L": Band(-0.15, 0.15), "tied: slope in N": Band(0.4, 0.65, null=(-0.15, 0.15))},
    layernorm_scaling,
)
