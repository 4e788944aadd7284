"""Claims of [3], LOOM, on its parts, the growth that they stop, and what the routers choose.

What training shows of them is in loom_training.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...model import EMA, LoopedConfig, LoopedGPT, Memory, Router, evaluating
from .. import ablation, probes
from ..records import RESULTS
from .claim import (
    EXACT,
    NOTHING,
    ONE,
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


def gamma() -> dict[str, Measured]:
    """LOOM's scale, at its smaller setting, and beside [1]'s."""
    pairs = [(L, N) for L in (1, 10, 15) for N in (1, 9, 12)]
    ratios = [shaped("loom", L, N).row.branch / replace(shaped("factored", L, N), lam=0.5).row.branch for L, N in pairs]
    return {
        "γ at M = 10, H = 9": exactly(shaped("loom", 10, 9).row.branch),
        "relative difference from λ/(N√L)": exactly(max(abs(ratio - 1) for ratio in ratios)),
    }


claim(
    "P3-gamma",
    "The residual scale is γ = λ/(H√M), λ = 1/2: the law of P1-theorem3 without a reference depth.",
    kind="identity",
    source="residual scaling",
    published="0.01757 for M = 10 blocks in H = 9 loops",
    tier="seconds",
    scale="rows of RULES",
    band={"γ at M = 10, H = 9": Band(0.017565, 0.017575), "relative difference from λ/(N√L)": EXACT},
    measure=gamma,
)

# The naive loop: experts whose output is normed, nothing scaled. 10 blocks, as LOOM's smaller setting.
NAIVE = replace(
    SMALL, rule="none", n_layer=10, n_expert=8, top_k=2, mlp="gelu", n_inner=64, gate="sigmoid", moe_out_norm=True
)


def reinjection() -> dict[str, Measured]:
    """g_t of a stack of 10 blocks, t = 1..12."""
    model, _ = probes.fresh(replace(NAIVE, reinject=True), 0, (1, 1))
    g = [model.reinjection_gain(loop) for loop in range(12)]
    return {f"g at t = {t}": exactly(g[t - 1]) for t in (1, 2, 9, 12)}


claim(
    "P3-injection",
    "Re-injection fades: g_t = λ/(t√M) from the second loop on, nothing before the first.",
    kind="identity",
    source="re-injection",
    published="M = 10: 0.0791, 0.0176, 0.0132 at t = 2, 9, 12",
    tier="seconds",
    scale="the model's own schedule",
    band={
        "g at t = 1": NOTHING,
        "g at t = 2": Band(0.07905, 0.07915),
        "g at t = 9": Band(0.01755, 0.01765),
        "g at t = 12": Band(0.01315, 0.01325),
    },
    measure=reinjection,
)


def looping_residual() -> dict[str, Measured]:
    """The memory against its closed form, and what it makes of a constant."""
    generator, beta, m = torch.Generator().manual_seed(0), 0.5, 9
    writes = torch.randn(m, 4, 8, generator=generator, dtype=torch.float64)
    ema = EMA.empty(writes[0])
    for o in writes:
        ema = ema.write(o, beta)
    weights = beta ** torch.arange(m - 1.0, -1.0, -1.0, dtype=torch.float64) * (1 - beta) / (1 - beta**m)  # (m,)
    error = (ema.read() - torch.einsum("m,mbc->bc", weights, writes)).abs().max().item()
    doubled, o = 0.0, writes[0]
    for decay in (0.0, 0.5, 0.9):
        memory = Memory(EMA.empty(o), EMA.empty(o))
        for _ in range(m):
            update, memory = memory.carry(o, decay)
            doubled = max(doubled, (update - 2 * o).abs().max().item())
    return {"error of the closed form": exactly(error), "constant o: update less 2o": exactly(doubled)}


claim(
    "P3-residual",
    "The looping residual is an average whose weights sum to 1, so that a constant attention output "
    "counts exactly twice, for every β.",
    kind="identity",
    source="looping residual",
    published="weights β^(m − j) (1 − β)/(1 − β^m)",
    tier="seconds",
    scale="9 writes, float64",
    band={"error of the closed form": EXACT, "constant o: update less 2o": EXACT},
    measure=looping_residual,
    note="So β = 0 does not switch it off, it doubles the update.",
)

# A few numbers small enough to see, with every part of LOOM.
LOOM = ablation.assembled(ablation.PARTS, replace(NAIVE, n_layer=2, n_loop=9, tie_embeddings=False))


def input_kept() -> dict[str, Measured]:
    """Cosine of the stream behind the ninth loop with the embedding, token by token, without re-injection."""
    found = []
    for seed in range(8):
        model, idx = probes.fresh(replace(LOOM, reinject=False, loop_end_norm=False), seed, (2, LOOM.block_size))
        with evaluating(model), torch.no_grad():
            start, end = model.embed(idx), model(idx, return_states=True)[2][-1]
        found.append(torch.cosine_similarity(start, end, dim=-1).mean())
    return {"cosine with the embedding after 9 loops": over_seeds(torch.stack(found))}


claim(
    "P3-forgets",
    "Without re-injection the input fades from the stream over nine loops.",
    kind="first steps",
    source="motive of re-injection, second-hand",
    published="no number known",
    tier="seconds",
    scale="every part of LOOM but re-injection and the closing norm, 2 blocks in 9 loops, " + SMALL_MODEL,
    band={"cosine with the embedding after 9 loops": Band(-1, 0.5, null=(0.9, 1))},
    measure=input_kept,
    note="Before training all increments together are shorter than the embedding. What a trained model keeps is "
    "another question.",
)


def routers_at_init() -> dict[str, Measured]:
    """What the routers of all loops make of the same tokens."""
    model, idx = probes.fresh(LOOM, 0, (2, LOOM.block_size))
    router = probes.routers_of(model)[0]
    with torch.no_grad():
        tokens = model.embed(idx).flatten(0, 1)  # (B * T, C)
        visits = [router(tokens, loop) for loop in range(LOOM.n_loop)]
    return {
        "routers a layer": exactly(len(router.weight)),
        "same choices": exactly(min((visit.choice == visits[0].choice).double().mean() for visit in visits)),
        "difference of the weights": exactly(max((visit.weight - visits[0].weight).abs().max() for visit in visits)),
    }


claim(
    "P3-routers",
    "The routers of all loops start as copies: at first every loop decides alike.",
    kind="identity",
    source="per-loop routers",
    published="copies of the first",
    tier="seconds",
    scale="2 blocks in 9 loops, 8 experts, the same 64 tokens",
    band={"routers a layer": Band(9, 9), "same choices": ONE, "difference of the weights": NOTHING},
    measure=routers_at_init,
)


def loom_batch(**changes: Any) -> tuple[LoopedGPT, Tensor, Tensor]:
    """LOOM with other loops or segments, untrained, and a batch: inputs and targets (B, T)."""
    model, tokens = probes.fresh(replace(LOOM, **changes), 0, (2, LOOM.block_size + 1))
    return model, tokens[:, :-1], tokens[:, 1:]


def gradients(loss: Tensor, model: LoopedGPT) -> tuple[Tensor, ...]:
    """Of the loss, with respect to each of the model's weights."""
    return torch.autograd.grad(loss, list(model.parameters()))


def segments_are_backprop() -> dict[str, Measured]:
    """Loss and gradients of one segment that holds all loops, against ordinary backprop."""
    ordinary, idx, targets = loom_batch()
    _, expected = ordinary(idx, targets)
    of_ordinary = gradients(expected, ordinary)
    worst = 0.0
    for length in (LOOM.n_loop, LOOM.n_loop + 3):
        model, idx, targets = loom_batch(segment=length)
        (loss,) = model.segment_losses(idx, targets)
        worst = max(worst, (loss - expected).abs().item())
        for a, b in zip(gradients(loss, model), of_ordinary, strict=True):
            worst = max(worst, (a - b).abs().max().item())
    return {"largest difference": exactly(worst)}


claim(
    "P3-segments",
    "Segmented backprop with one segment is ordinary backprop, bit for bit.",
    kind="identity",
    source="segmented backprop",
    published="an identity",
    tier="seconds",
    scale="every part of LOOM, 2 blocks in 9 loops, d = 64, float32",
    band={"largest difference": NOTHING},
    measure=segments_are_backprop,
)


def cuts() -> dict[str, Measured]:
    """What a cut lets through: the gradient of the second loss on the routers of the first three loops."""
    model, idx, targets = loom_batch(segment=3)
    weights = [router.weight for router in probes.routers_of(model)]
    found = []  # for each loss, (L, N, E, C)
    for loss in model.segment_losses(idx, targets):
        found.append(torch.stack([gradient.abs() for gradient in torch.autograd.grad(loss, weights)]))
    return {
        "losses of 9 loops, 3 in a segment": exactly(len(found)),
        "gradient across the cut": exactly(found[1][:, :3].max()),
        "gradient within the segment": exactly(found[1][:, 3:6].amax((0, 2, 3)).min()),
    }


claim(
    "P3-cut",
    "With 3 loops in a segment 9 loops make 3 losses, and no gradient crosses a cut.",
    kind="identity",
    source="segmented backprop",
    published="ceil(H/K) updates a batch",
    tier="seconds",
    scale="every part of LOOM, 2 blocks in 9 loops, d = 64",
    band={
        "losses of 9 loops, 3 in a segment": Band(3, 3),
        "gradient across the cut": NOTHING,
        "gradient within the segment": Band(1e-12),
    },
    measure=cuts,
)


def variances(n_loops: Sequence[int], **changes: Any) -> Tensor:
    """Mean square of the stream after the last block of untrained models, (S, K). changes: to NAIVE."""
    return probes.variance_over_loops(replace(NAIVE, **changes), n_loops, seeds=range(8))


def blow_up() -> dict[str, Measured]:
    """Growth of the activation variance with the loops."""
    unscaled = variances((3, 6, 9, 12))
    ends = {
        "unscaled": variances((1, 12)),
        "unscaled, loop-end norm": variances((1, 12), loop_end_norm=True),
        "scaled by γ": variances((1, 12), rule="loom"),
    }
    return {"unscaled: slope in H": slope((3, 6, 9, 12), unscaled)} | {
        f"{name}: H = 12 over H = 1": over_seeds(values[:, 1] / values[:, 0]) for name, values in ends.items()
    }


claim(
    "P3-a",
    "Unscaled, the activation variance of a looped mixture of experts explodes with the loops; γ "
    "stops it, and so does a norm that closes each loop.",
    kind="first steps",
    source="figure 3, second-hand",
    published="above 1000 to above 2500 at H = 6, 9, 12",
    tier="seconds",
    scale="10 blocks, 8 experts with normed output; before the closing norm; " + SMALL_MODEL,
    band={
        "unscaled: slope in H": Band(1.7, 2.3, null=(-0.2, 0.2)),
        "unscaled: H = 12 over H = 1": Band(50, null=(0, 2)),
        "unscaled, loop-end norm: H = 12 over H = 1": Band(0, 3),
        "scaled by γ: H = 12 over H = 1": Band(0.9, 1.1),
    },
    measure=blow_up,
    note="Where the published probe sat, and whether its plain loop had a closing norm, is not known.",
)


def blow_up_past_1000() -> dict[str, Measured]:
    """The variance itself."""
    n_loops = (6, 9, 12)
    return {f"variance at H = {n}": over_seeds(values) for n, values in zip(n_loops, variances(n_loops).T, strict=True)}


claim(
    "P3-a-1000",
    "The unscaled variance is above 1000 from 6 loops on.",
    kind="first steps",
    source="figure 3, second-hand",
    published="above 1000 at H = 6, above 2500 at H = 12",
    tier="seconds",
    scale="10 blocks, 8 experts with normed output, no loop-end norm, " + SMALL_MODEL,
    band={
        "variance at H = 6": Band(1000, null=(0, 1000)),
        "variance at H = 9": Band(1000, null=(0, 1000)),
        "variance at H = 12": Band(2500, null=(0, 2500)),
    },
    measure=blow_up_past_1000,
    note="A small model before training, a large one in it: the law can be the same, the value cannot.",
)

# The ablation of chapter 8, recorded by `python benchmarks/loom.py` under a protocol written before it.
ABLATION = RESULTS / "loom.json"
ABLATED = "recorded runs (chapter 8): 2 blocks in 6 loops, d = 64, 120 steps on the embedded text, 3 seeds; "


def unrecovered() -> dict[str, Measured]:
    """The worst end of any run without the scale, too large learning rates and all."""
    runs = [run for run in ablation.load(ABLATION) if "scaling" not in ablation.ARMS[run.arm]]
    return {"loss at the end above its lowest, largest, nats": exactly(max(run.end_rise for run in runs))}


claim(
    "P3-a-spikes",
    "From 6 loops on an unscaled model does not recover from its loss spikes.",
    kind="training",
    source="figure 3, second-hand",
    published="perplexity above 1000",
    tier="minutes",
    scale=ABLATED + "every run without γ, whatever its learning rate",
    band={"loss at the end above its lowest, largest, nats": Band(1, null=(0, 1))},
    measure=unrecovered,
    recorded=[ABLATION],
    note="Gradients are clipped at 1, as published too. The null was 0 to 0.2 before the runs; it was widened "
    "after them, since a quarter of a nat at the worst learning rate of any is no such spike.",
)

# Runs of minutes, recorded by `python benchmarks/expert_choice.py` under a protocol written before them.
CHOICES = RESULTS / "expert_choice.json"
CHOSEN = (
    "recorded runs (chapter 7): d = 64, 2 blocks in 6 loops, 8 experts, 2 for a token, 100 steps on the embedded text, "
    "3 seeds"
)


def after_training(arm: str) -> list[probes.Agreement]:
    """How far the loops agree after the last step, for each seed of an arm."""
    return [probes.Agreement.restored(by_step["100"]) for by_step in by_seed(CHOICES, arm=arm, n_expert=8)["agreement"]]


def same_experts() -> dict[str, Measured]:
    """After training, means over pairs of loops and layers, of a shared router and of copies that went their ways."""
    pairs = ~torch.eye(6, dtype=torch.bool)
    found: dict[str, Measured] = {}
    spread = {}
    for arm in ("shared", "copied"):
        after = after_training(arm)
        cosines, overlaps = (
            torch.stack([getattr(a, name)[pairs].mean() for a in after]).double() for name in ("load_cosine", "overlap")
        )
        found |= {f"{arm}: cosine of loads": over_seeds(cosines), f"{arm}: overlap of choices": over_seeds(overlaps)}
        spread[arm] = torch.stack([a.spread.mean() for a in after])
    return found | {"spread of the load, copied over shared": over_seeds(spread["copied"] / spread["shared"])}


claim(
    "P3-b",
    "With a shared router all loops use the same experts; a router for each loop changes that, and spreads the load.",
    kind="training",
    source="figure 4, left, second-hand",
    published="cosine of loads above 0.98 at H = 9",
    tier="minutes",
    scale=CHOSEN,
    band={
        "shared: cosine of loads": Band(0.95, 1),
        "shared: overlap of choices": Band(0.8, 1, null=(0.2, 0.35)),
        "copied: cosine of loads": Band(0, 0.7, null=(0.95, 1)),
        "copied: overlap of choices": Band(0, 0.5, null=(0.8, 1)),
        "spread of the load, copied over shared": Band(1.5, null=(0, 1.2)),
    },
    measure=same_experts,
    recorded=[CHOICES],
    note="The chance level of the overlap is 0.25. See P3-b-chance for that of the cosine.",
)


def loss_of_own_routers() -> dict[str, Measured]:
    """Validation loss of a shared router less that of copies, seed by seed."""
    shared, copied = (by_seed(CHOICES, arm=arm, n_expert=8)["val_loss"] for arm in ("shared", "copied"))
    return {"shared less copied, nats": paired(shared, copied)}


claim(
    "P3-b-loss",
    "A router for each loop ends at a lower loss than one for all.",
    kind="training",
    source="asked by us",
    published="no number known",
    tier="minutes",
    scale=CHOSEN,
    band={"shared less copied, nats": Band(0)},
    measure=loss_of_own_routers,
    recorded=[CHOICES],
    note="With 32 experts and independent routers the loss is lower in all six seeds, by 0.015 to 0.037 nats.",
)


def specialised() -> dict[str, Measured]:
    """What it costs a loop to use another loop's router, over what it costs it to use a random one."""
    swapped = by_seed(CHOICES, arm="copied", n_expert=8)["swapped"]
    costs = torch.tensor(swapped.tolist(), dtype=torch.float64)  # (S, N, N + 1)
    costs = costs - costs[:, 0, 0, None, None]  # the model's own loss stands on the diagonal
    another, random = costs[:, :, :-1][:, ~torch.eye(6, dtype=torch.bool)].mean(1), costs[:, :, -1].mean(1)
    return {"cost of another loop's router, over that of a random one": over_seeds(another / random)}


claim(
    "P3-b-swap",
    "With another loop's router, once copies have come apart, a loop loses at least half of what it "
    "loses with a random router.",
    kind="training",
    source="asked by us",
    published="no number known",
    tier="minutes",
    scale=CHOSEN,
    band={"cost of another loop's router, over that of a random one": Band(0.5, null=(-0.1, 0.1))},
    measure=specialised,
    recorded=[CHOICES],
    note="This shows that a loop relies on its own router, by a few thousandths of a nat, not that the router has "
    "learned what its loop is for. When swapped, independent routers (32 experts, six seeds, chapter 7) cost 0.75 "
    "of a random one, and 0.83 if never trained. Copies have no such control: untrained, they stay alike. All "
    "three seeds lie in the band; by two standard errors the claim held, by Student's t the interval leaves it.",
)


def chance_of_agreement() -> dict[str, Measured]:
    """Similarity of what 9 independent random routers do with the same 8,192 tokens: 30 experts, 6 for a token."""
    generator = torch.Generator().manual_seed(0)
    router = Router(LoopedConfig(n_embd=256, n_head=4, n_loop=9, n_expert=30, top_k=6, router="per_loop"))
    torch.nn.init.normal_(router.weight, generator=generator)
    tokens = torch.randn(8192, 256, generator=generator)
    with torch.no_grad():
        visits = [router(tokens, loop) for loop in range(9)]
    choices = torch.stack([visit.choice for visit in visits])[:, None, None]  # (N, 1, 1, B * T, k)
    loads = torch.stack([visit.load for visit in visits])[:, None]  # (N, 1, E)
    pairs = ~torch.eye(9, dtype=torch.bool)
    cosines = probes.load_cosine(loads)[pairs]
    return {
        "cosine of loads: smallest": exactly(cosines.min()),
        "cosine of loads: mean": exactly(cosines.mean()),
        "overlap of choices: mean": exactly(probes.expert_overlap(choices, 30)[pairs].mean()),
    }


claim(
    "P3-b-chance",
    "A cosine of loads near 1 is no sign of it: independent random routers have that too, and their "
    "choices overlap by chance only.",
    kind="law of sums",
    source="figure 4, left, turned round by us",
    published="no chance level given",
    tier="seconds",
    scale="9 independent random routers, 30 experts, 6 for a token, 8,192 random tokens of width 256",
    band={
        "cosine of loads: smallest": Band(0.98, 1),
        "cosine of loads: mean": Band(0.98, 1),
        "overlap of choices: mean": Band(0.18, 0.22),
    },
    measure=chance_of_agreement,
)
