"""Instruments: what a model does, loop by loop. Each returns plain numbers or arrays, for plots, widgets and tests.

[1] On the Residual Scaling of Looped Transformers, arXiv 2606.18524.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from ..data import Tokenizer
from ..data.tasks import Task
from ..model import LoopedConfig, LoopedGPT, Routing, at_least_float32, evaluating
from ..train import NextLoss, evaluate, loop_rms, sample, train_step
from .toy import rms


@dataclass(frozen=True)
class Dial:
    """One position of the loop dial."""

    n_loop: int
    loss: float  # nats per token
    text: str  # the prompt and its continuation


def loop_dial(
    model: LoopedGPT,
    tokenizer: Tokenizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    n_loops: Sequence[int],
    *,
    prompt: str = "\n",
    max_new_tokens: int = 120,
    seed: int = 1337,
) -> list[Dial]:
    """Loss and a sample at each loop count, of one model whose weights do not change.

    batches: (x, y) pairs, each (B, T), that the loss is over. Every sample is drawn with the same seed.
    """
    return [
        Dial(
            n_loop,
            evaluate(model, batches, n_loop=n_loop),
            sample(model, tokenizer, prompt, max_new_tokens=max_new_tokens, n_loop=n_loop, seed=seed),
        )
        for n_loop in n_loops
    ]


def fresh(config: LoopedConfig, seed: int, shape: tuple[int, int]) -> tuple[LoopedGPT, Tensor]:
    """An untrained model, and random tokens (B, T). They depend on `seed` alone; torch's own generator stays put."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's, where both are drawn
        return LoopedGPT(config), torch.randint(config.vocab_size, shape)


def norm_growth(
    config: LoopedConfig, rules: Sequence[str], n_loops: Sequence[int], *, seeds: Sequence[int] = (0, 1, 2)
) -> dict[str, list[float]]:
    """RMS of the stream after the last loop of an untrained model, per rule, one value per loop count.

    The mean over seeds, for random tokens that fill the window. Give `config` an init_std of n_embd ** -0.5 and
    embed_norm=True: the stream then starts at RMS 1, and the branches are large enough for a slope to show.
    """
    growth: dict[str, list[float]] = {}
    for rule in rules:
        growth[rule] = []
        for n_loop in n_loops:
            total = 0.0
            for seed in seeds:
                total += loop_rms(*fresh(replace(config, rule=rule, n_loop=n_loop), seed, (2, config.block_size)))[-1]
            growth[rule].append(total / len(seeds))
    return growth


def saved_bytes(run: Callable[[], object], parameters: Iterable[Tensor] = ()) -> int:
    """Most bytes that autograd holds for backward passes at any one time while `run` runs.

    Each storage counts once, however many operations saved it; those of `parameters` (give buffers too) not at all,
    since they are there anyway. If `run` itself calls backward, what that frees no longer counts.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    holders: Counter[int] = Counter()  # by address of the storage: how many saved tensors hold it
    held = peak = 0

    class Saved:
        """Lives exactly as long as autograd keeps the tensor."""

        def __init__(self, tensor: Tensor):
            nonlocal held, peak
            self.tensor = tensor.detach()  # an operation may save its own result, which holds the operation: a circle
            self.address = tensor.untyped_storage().data_ptr()
            if self.address not in own:
                holders[self.address] += 1
                if holders[self.address] == 1:
                    held += tensor.untyped_storage().nbytes()
                    peak = max(peak, held)

        def __del__(self):
            nonlocal held
            if self.address not in own:
                holders[self.address] -= 1
                if holders[self.address] == 0:
                    held -= self.tensor.untyped_storage().nbytes()

    with saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        run()
    return peak


@dataclass(frozen=True)
class Cost:
    """What a model of L unique blocks and N loops costs to train."""

    n_layer: int
    n_loop: int
    parameters: int  # unique ones
    operations: int  # floating-point operations per token, forward and backward
    saved: int  # bytes that autograd holds for the backward pass of one full window


def cost(config: LoopedConfig) -> Cost:
    """Build a model, run one window of `block_size` random tokens through it, and count."""
    model = LoopedGPT(config)
    idx, targets = torch.randint(config.vocab_size, (2, 1, config.block_size))  # (1, T) each
    saved = saved_bytes(lambda: model(idx, targets), [*model.parameters(), *model.buffers()])
    return Cost(config.n_layer, config.n_loop, model.num_params(), model.flops_per_token(), saved)


@contextmanager
def watched(
    model: LoopedGPT, modules: Iterable[nn.Module] = (), hook: Callable[..., None] | None = None
) -> Iterator[None]:
    """Eval mode, and a forward hook on each of the modules, for as long as the context lasts.

    A module that serves all loops calls its hook N times: append to a list, for a dict by name keeps the last visit.
    """
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        with evaluating(model):
            yield
    finally:
        for handle in handles:
            handle.remove()


def routing(model: LoopedGPT, idx: Tensor, n_loop: int | None = None) -> tuple[Tensor, Tensor]:
    """Which experts each token meets at every visit, in eval mode, for tokens idx (B, T).

    Returns choices (N, L, B, T, k) int64 and loads (N, L, E) int64, tokens per expert. The record is kept per visit: a
    router that serves all loops is asked N times. Raises ValueError for a dense model.
    """
    choices, loads, _ = routing_and_inputs(model, idx, n_loop)
    return choices, loads


@torch.no_grad()
def routing_and_inputs(model: LoopedGPT, idx: Tensor, n_loop: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What `routing` returns, and what the routers saw, (N, L, B * T, C), in float32 or better."""
    config = model.config
    if not config.n_expert:
        raise ValueError("routing needs a model with experts: set n_expert > 0")
    visits: list[Routing] = []
    seen: list[Tensor] = []  # N * L, each (B * T, C)

    def record(router: nn.Module, inputs: tuple[Any, ...], routing: Routing) -> None:
        visits.append(routing)
        seen.append(at_least_float32(inputs[0]))

    with watched(model, (block.mlp.router for block in model.blocks), record):
        model(idx, n_loop=n_loop)
    choices = torch.stack([visit.choice for visit in visits])  # (N * L, B * T, k)
    loads = torch.stack([visit.load for visit in visits])  # (N * L, E)
    return (
        choices.view(-1, config.n_layer, *idx.shape, config.top_k),
        loads.view(-1, config.n_layer, config.n_expert),
        torch.stack(seen).unflatten(0, (-1, config.n_layer)),
    )


@dataclass(frozen=True)
class Plane:
    """Where an untrained stream ends, over blocks L (rows) and loops N (columns). Each tensor is (L, N), as counted."""

    rms: Tensor  # RMS of the stream after the last loop
    moved: Tensor  # RMS of its distance from where it started

    @property
    def over_loops(self) -> float:
        """The largest factor by which the RMS at one L differs between two loop counts; 1 is flat."""
        return (self.rms.amax(1) / self.rms.amin(1)).max().item()

    @property
    def over_layers(self) -> float:
        """The largest factor by which the RMS at one N differs between two block counts; 1 is flat."""
        return (self.rms.amax(0) / self.rms.amin(0)).max().item()


@torch.no_grad()
def growth_plane(
    config: LoopedConfig, n_layers: Sequence[int], n_loops: Sequence[int], *, seeds: Sequence[int] = (0,)
) -> Plane:
    """Run an untrained model of `config.rule` for every pair of a block count and a loop count.

    The mean over seeds, for random tokens that fill the window. As for `norm_growth`, give `config` an init_std of
    n_embd ** -0.5 and embed_norm=True, so that the stream starts at RMS 1 and the branches are heard.
    """
    ends = torch.zeros(2, len(seeds), len(n_layers), len(n_loops))
    for s, seed in enumerate(seeds):
        for i, n_layer in enumerate(n_layers):
            for j, n_loop in enumerate(n_loops):
                model, idx = fresh(replace(config, n_layer=n_layer, n_loop=n_loop), seed, (2, config.block_size))
                start, end = model.embed(idx), model.eval()(idx, return_states=True)[2][-1]  # (B, T, C) each
                ends[:, s, i, j] = torch.stack((end, end - start)).square().mean((1, 2, 3)).sqrt()
    return Plane(*ends.mean(1))


# ----------------------------------------------------------------------------------------------------------------------
# The stream, visit by visit


@dataclass(frozen=True)
class Visits:
    """One pass of tokens (B, T) through L blocks and N loops. An RMS is over all B * T * C numbers of a stream.

    The increment of a visit is the stream after the block minus the stream before it. The increment of a loop is the
    same for the whole stack, with what happens at the loop's ends (re-injection, norm). Cosines are those of increments
    taken as one long vector each; an increment of zero has cosine 0 with all, itself too.
    """

    start: float  # R_0, before the first loop: to be named beside every slope
    stream: Tensor  # (N, L) RMS of the stream after each visit
    branch: Tensor  # (N, L) RMS of each visit's increment
    cosines: Tensor  # (N * L, N * L) between the visits' increments, in the order of the visits
    loop_cosines: Tensor  # (N, N) between the loops' increments

    @property
    def mean_cosine(self) -> float:
        """Mean of the cosines between different visits, of which there must be two."""
        return self.cosines[~torch.eye(len(self.cosines), dtype=torch.bool)].mean().item()


def cosine_matrix(increments: Sequence[Tensor]) -> Tensor:
    """Cosines between K tensors of one shape, (K, K)."""
    unit = nn.functional.normalize(torch.stack(list(increments)).flatten(1), dim=1)  # (K, B * T * C)
    return unit @ unit.mT


@torch.no_grad()
def visits(model: LoopedGPT, idx: Tensor, n_loop: int | None = None) -> Visits:
    """Norms and directions of the residual stream at every visit, in eval mode, for tokens idx (B, T).

    n_loop: another loop count than the trained one. Works on any model, at any checkpoint. Raises the model's own
    ValueError for tokens or a loop count that it cannot take.
    """
    before: list[Tensor] = []  # N * L streams (B, T, C), and as many behind the blocks
    after: list[Tensor] = []

    def record(block: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        before.append(at_least_float32(inputs[0]))
        after.append(at_least_float32(outputs[0]))

    with watched(model, model.blocks, record):
        states = model(idx, n_loop=n_loop, return_states=True)[2]
    ends = [before[0], *map(at_least_float32, states)]  # N + 1 streams: before the first loop, and after each
    increments = [b - a for a, b in zip(before, after, strict=True)]
    shape = (len(states), len(model.blocks))  # (N, L)
    return Visits(
        start=rms(before[0].flatten()).item(),
        stream=torch.stack([rms(h.flatten()) for h in after]).view(shape).cpu(),
        branch=torch.stack([rms(r.flatten()) for r in increments]).view(shape).cpu(),
        cosines=cosine_matrix(increments).cpu(),
        loop_cosines=cosine_matrix([b - a for a, b in pairwise(ends)]).cpu(),
    )


def training(config: LoopedConfig, *, lr: float, seed: int, batch: int) -> Iterator[tuple[LoopedGPT, Tensor]]:
    """A fresh model and the tokens (B, T) it trains on, before the first step and after each one, without end.

    As in [1]'s diagnostic of the start of training: AdamW at the base settings, and the same random tokens, which fill
    the window, in every step. It is one model all along: look at it before you ask for the next.
    """
    model, tokens = fresh(config, seed, (batch, config.block_size + 1))
    idx, targets = tokens[:, :-1], tokens[:, 1:]
    next_loss, optimizer = NextLoss(model), model.configure_optimizer(lr, weight_decay=0.1)
    while True:
        yield model, idx
        train_step(next_loss, optimizer, [(idx, targets)])


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
        shapes = [dict(n_layer=depth, n_loop=1) if row == "untied" else dict(n_loop=depth) for depth in depths]
        configs = [replace(config, rule=rule, **shape) for shape in shapes]
        return torch.tensor([[growth(config, seed) for config in configs] for seed in seeds], dtype=torch.float64)

    return {row: {rule: panel(row, rule) for rule in rules} for row, rules in PANELS.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Whether loops choose the same experts


def load_cosine(loads: Tensor) -> Tensor:
    """Cosine of the expert loads of every two loops, loads (N, L, E) -> (N, N, L).

    A weak measure: balanced loads are all alike, so that two random routers come close to 1. See `expert_overlap`.
    """
    unit = torch.nn.functional.normalize(loads.double(), dim=-1)
    return torch.einsum("nle,mle->nml", unit, unit)


def experts_in_common(choices: Tensor, n_expert: int) -> tuple[Tensor, Tensor]:
    """How many of a token's experts two loops share, (N, N, L, S) with 0..k in it, for choices (N, L, B, T, k).

    With it the choices as ones and zeros, (N, L, S, E), for the S = B * T tokens.
    """
    N, L, *_, k = choices.shape
    choices = choices.reshape(N, L, -1, k)  # (N, L, S, k)
    chosen = torch.zeros(*choices.shape[:3], n_expert, dtype=torch.float64, device=choices.device)
    chosen.scatter_(-1, choices, 1.0)
    return torch.einsum("nlse,mlse->nmls", chosen, chosen), chosen


def expert_overlap(choices: Tensor, n_expert: int) -> Tensor:
    """Share of a token's k experts that two loops have in common, mean over tokens. (N, L, B, T, k) -> (N, N, L)

    1 on the diagonal. Two routers that know nothing of each other have k / n_expert in common, if both are balanced.
    """
    return experts_in_common(choices, n_expert)[0].mean(-1) / choices.shape[-1]


# Chapter 7: the same questions, asked so that chance cannot answer them


@dataclass(frozen=True)
class Agreement:
    """What the loops of one model have in common when they choose experts, kept apart by pair of loops and by layer.

    N loops, L layers, E experts, k of them per token.
    """

    top_k: int
    loads: Tensor  # (N, L, E), tokens per expert
    overlap: Tensor  # (N, N, L), share of a token's k experts that two loops have in common, mean over tokens
    jaccard: Tensor  # (N, N, L), what two loops have in common over what either has, mean over tokens
    seen: Tensor  # (N, N, L), cosine between what the router sees of a token in two loops, mean over tokens
    distinct: Tensor  # (L,), experts that a token meets over all loops, mean over tokens

    @property
    def load_cosine(self) -> Tensor:
        """(N, N, L)"""
        return load_cosine(self.loads)

    @property
    def spread(self) -> Tensor:
        """Standard deviation over the experts of their share of a loop's load, (N, L); 0 is balanced."""
        shares = self.loads.double() / self.loads.sum(-1, keepdim=True)
        return shares.std(-1, correction=0)

    @property
    def chance(self) -> Tensor:
        """The overlap that these loads would have if two loops chose for different tokens, (N, N, L).

        The mean over all ways to pair one loop's tokens with another's. k / E where the loads are balanced.
        """
        shares = self.loads.double() * self.top_k / self.loads.sum(-1, keepdim=True)  # of the tokens, per expert
        return torch.einsum("nle,mle->nml", shares, shares) / self.top_k

    def stored(self) -> dict[str, Any]:
        """As lists, for a JSON file, rounded to four digits."""
        return {
            name: value if name == "top_k" else (value.double() * 1e4).round().div(1e4).tolist()
            for name, value in vars(self).items()
        }

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> "Agreement":
        """From what `stored` returned."""
        tensors = {name: torch.tensor(value) for name, value in values.items() if name != "top_k"}
        return cls(top_k=values["top_k"], **tensors)


@torch.no_grad()
def agreement(model: LoopedGPT, idx: Tensor, n_loop: int | None = None) -> Agreement:
    """How alike the loops of a model choose experts for tokens idx (B, T), in eval mode.

    Raises ValueError for a dense model.
    """
    config = model.config
    choices, loads, inputs = routing_and_inputs(model, idx, n_loop)  # (N, L, B, T, k), (N, L, E), (N, L, S, C)
    unit = nn.functional.normalize(inputs, dim=-1)
    common, chosen = experts_in_common(choices.cpu(), config.n_expert)
    return Agreement(
        top_k=config.top_k,
        loads=loads.cpu(),
        overlap=common.mean(-1) / config.top_k,
        jaccard=(common / (2 * config.top_k - common)).mean(-1),
        seen=torch.einsum("nlsc,mlsc->nml", unit, unit).cpu() / idx.numel(),
        distinct=chosen.amax(0).sum(-1).mean(-1),
    )


def distinct_by_chance(n_expert: int, top_k: int, n_loop: int) -> float:
    """Experts that a token meets in N loops if each loop draws k of the E anew."""
    return n_expert * (1 - (1 - top_k / n_expert) ** n_loop)


def jaccard_by_chance(n_expert: int, top_k: int) -> float:
    """What two loops have in common over what either has, mean over tokens, if each draws k of the E anew."""
    ways = [math.comb(top_k, m) * math.comb(n_expert - top_k, top_k - m) for m in range(top_k + 1)]  # m in common
    return sum(m / (2 * top_k - m) * way for m, way in enumerate(ways)) / math.comb(n_expert, top_k)


def spread_by_chance(n_expert: int, top_k: int, n_token: int) -> float:
    """`Agreement.spread`, root mean square, of a loop that draws k of the E experts anew for each of its tokens."""
    return ((n_expert / top_k - 1) / n_token) ** 0.5 / n_expert


def cosine_by_chance(loads: Tensor) -> Tensor:
    """The cosine of these loads if every loop had other favourites, loads (N, L, E) -> (N, N, L).

    The mean over all ways to rename the experts of one of the two loops. 1 where the loads are even.
    """
    total = torch.nn.functional.normalize(loads.double(), dim=-1).sum(-1)  # (N, L)
    return torch.einsum("nl,ml->nml", total, total) / loads.shape[-1]


@torch.no_grad()
def swapped_routers(model: LoopedGPT, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Loss in nats per token when loop i uses the router of loop j in every layer, (N, N); the diagonal is the model's.

    The last column, (N, N + 1) in all, is the loss when loop i uses a random router of the size of its own: what it
    costs not to know the loop and not to know the token either. batches: (x, y), each (B, T). The model is left as it
    was. Raises ValueError for a model whose loops have no routers of their own.
    """
    if not model.config.n_expert or model.config.router != "per_loop":
        raise ValueError("swapping routers needs a router per loop: set router='per_loop'")
    n_loop, generator = model.config.n_loop, torch.Generator().manual_seed(0)
    weights = [block.mlp.router.weight for block in model.blocks]  # (N, E, C) each
    before = [weight.detach().clone() for weight in weights]
    own = evaluate(model, batches)
    losses = torch.full((n_loop, n_loop + 1), own, dtype=torch.float64)
    for i in range(n_loop):
        for j in (j for j in range(n_loop + 1) if j != i):
            for weight, kept in zip(weights, before, strict=True):
                noise = torch.randn(kept[i].shape, generator=generator) * kept[i].std().cpu()
                weight[i] = kept[j] if j < n_loop else noise.to(kept.device)
            losses[i, j] = evaluate(model, batches)
        for weight, kept in zip(weights, before, strict=True):
            weight[i] = kept[i]
    return losses


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 8: how far the stream grows, whether or not a norm closes the loop


def end_variance(model: LoopedGPT, idx: Tensor) -> float:
    """Mean square of the stream after the last block, before a norm that closes the loop, for tokens idx (B, T)."""
    return visits(model, idx).stream[-1, -1].item() ** 2


def variance_over_loops(config: LoopedConfig, n_loops: Sequence[int], *, seeds: Sequence[int] = (0, 1, 2)) -> Tensor:
    """`end_variance` of untrained models with random tokens, (S, K): a row for each seed, a column for a loop count."""
    models = [[fresh(replace(config, n_loop=n), seed, (2, config.block_size)) for n in n_loops] for seed in seeds]
    return torch.tensor([[end_variance(*model) for model in row] for row in models], dtype=torch.float64)


# ----------------------------------------------------------------------------------------------------------------------
# Segmented backprop (chapter 9): what it holds, what it reaches, what its gradient has in common with the full one


def batch_bytes(model: LoopedGPT, idx: Tensor, targets: Tensor) -> int:
    """Most bytes that autograd holds while one batch (B, T) is trained, with a backward after each segment.

    See `saved_bytes`. Gradients are left as they were.
    """

    def run() -> None:
        for loss in model.segment_losses(idx, targets):
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    return saved_bytes(run, [*model.parameters(), *model.buffers()])


@torch.no_grad()
def loss_after_each_loop(
    model: LoopedGPT, batches: Iterable[tuple[Tensor, Tensor]], n_loop: int | None = None
) -> list[float]:
    """Cross-entropy in nats per token, read out after each loop, over (x, y) batches of (B, T) each, in eval mode.

    n_loop: another loop count than the trained one. One pass for all loops; targets must all count.
    """
    total, count = 0.0, 0
    with watched(model):
        for x, y in batches:
            states = model(x, n_loop=n_loop, return_states=True)[2]
            losses = [cross_entropy(model.logits(h).flatten(0, 1), y.flatten(), reduction="sum") for h in states]
            total, count = total + torch.stack(losses).double(), count + y.numel()
    return (total / count).tolist()


@torch.enable_grad()
def gradient_reach(model: LoopedGPT, idx: Tensor, targets: Tensor) -> Tensor:
    """Norm of the gradient of each segment's loss on the routers of each loop, (losses, N), in eval mode.

    Behind a cut it is exactly 0. A loop is reached when its routers are: no other weight belongs to one loop alone.
    idx, targets: (B, T). Raises ValueError for a model without a router per loop.
    """
    if model.config.router != "per_loop":
        raise ValueError("gradient_reach needs a weight of each loop's own: set n_expert > 0 and router='per_loop'")
    routers = [block.mlp.router.weight for block in model.blocks]  # L times (N, E, C)
    with watched(model):
        gradients = [torch.stack(torch.autograd.grad(loss, routers)) for loss in model.segment_losses(idx, targets)]
    return torch.stack(gradients).square().sum((1, 3, 4)).sqrt()


class Direction(NamedTuple):
    """One gradient beside another."""

    cosine: float
    ratio: float  # of the norms, the first over the second


MODEL_PARTS = ("embedding", "body", "routers", "read-out")


def part_of(name: str) -> str:
    """Which of MODEL_PARTS a parameter belongs to; the body is what all loops share. A tied head is the embedding."""
    if name.startswith("blocks."):
        return "routers" if ".router." in name else "body"
    return "embedding" if name.startswith(("wte.", "wpe.")) else "read-out"


@torch.enable_grad()
def gradient_agreement(model: LoopedGPT, idx: Tensor, targets: Tensor, segment: int) -> dict[str, dict[str, Direction]]:
    """Gradients of segmented backprop beside that of the last loop's loss by ordinary backprop, in eval mode.

    "cut": the last segment's loss, which sees `segment` loops: the same objective, truncated. "early losses": the mean
    of the losses after every segment, nothing cut: another objective. "segments": both at once, what training with one
    update a batch uses. For each, by MODEL_PARTS and for "all" parameters. idx, targets: (B, T). A cosine with a
    gradient of zero is 0.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)

    def gradient(loss: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        return [g.double().flatten() for g in found]

    with watched(model):
        twin = copy(model)  # the same parameters under another config
        twin.config = replace(model.config, segment=segment)
        states = model(idx, return_states=True)[2]
        ends = [states[loops[-1]] for loops in twin.config.segments()]
        losses = torch.stack([cross_entropy(model.logits(h).flatten(0, 1), targets.flatten()) for h in ends])
        cut = [gradient(loss) for loss in twin.segment_losses(idx, targets)]
    full = gradient(losses[-1])
    mean = [sum(parts) / len(cut) for parts in zip(*cut, strict=True)]
    ways = {"cut": cut[-1], "early losses": gradient(losses.mean()), "segments": mean}

    def compare(gradients: list[Tensor], part: str) -> Direction:
        chosen = [i for i, name in enumerate(names) if part in ("all", part_of(name))]
        a, b = (torch.cat([one[i] for i in chosen]) for one in (gradients, full))
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=0, eps=1e-30)
        return Direction(cosine.item(), (a.norm() / b.norm()).item())

    return {way: {part: compare(found, part) for part in ("all", *MODEL_PARTS)} for way, found in ways.items()}


def cpu_times(runs: Mapping[str, Callable[[], object]], rounds: int = 10) -> dict[str, Tensor]:
    """CPU seconds of each run, (rounds,), in turns: what slows the machine for a while slows all of them alike.

    Meant for ratios within a round. One round before the first is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            times[name].append(time.process_time() - began)
    return {name: torch.tensor(seconds[1:], dtype=torch.float64) for name, seconds in times.items()}


STATUS = Path("/proc/self/status")  # Linux: what a process holds


def resident(which: str) -> int:
    """Bytes of this process in memory: now, "VmRSS", or at most so far, "VmHWM". Linux only."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text(encoding="utf-8").splitlines())
    return int(fields[which].split()[0]) * 1024


def peak_memory(config: LoopedConfig, batch_size: int) -> int | None:
    """Bytes that training on one full batch adds to the memory of a fresh process, at most. None where not Linux.

    An untrained model in eval mode, three batches of random tokens, a backward after each segment, no optimizer. What
    is loaded once does not count: a batch of one window goes before. What the allocator does not give back does count.
    """
    if not STATUS.exists():
        return None
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(added_memory, config, batch_size, torch.get_num_threads()).result()


def added_memory(config: LoopedConfig, batch_size: int, threads: int) -> int:
    """`peak_memory` of this process, which has trained nothing before."""
    torch.set_num_threads(threads)
    model, tokens = fresh(config, 0, (batch_size, config.block_size + 1))
    model.eval()

    def train(tokens: Tensor) -> None:
        for loss in model.segment_losses(tokens[:, :-1], tokens[:, 1:]):
            loss.backward()

    train(tokens[:1])
    before = resident("VmRSS")
    for _ in range(3):
        train(tokens)
    return resident("VmHWM") - before


def largest_jump(losses: Sequence[float]) -> float:
    """How far any step's loss stands above the mean of the 20 steps before it: the size of a spike, in nats."""
    losses = torch.tensor(losses, dtype=torch.float64)
    before = losses[:-1].unfold(0, 20, 1).mean(-1)  # of each step from the twenty-first on
    return (losses[20:] - before).max().item()


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 6: what each visit of shared weights hears and says. [2] DeepLoop, arXiv 2607.13491


def visit_gradients(model: LoopedGPT, idx: Tensor, scalars: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Gradients of K scalars with respect to each sublayer's matrices, one visit at a time, in eval mode.

    scalars: from the logits (B, T, V) to K numbers, (K,). Returns 2L tensors (K, N, P), attention and MLP of each block
    in turn. P counts the entries of the sublayer's two matrices, as one long vector; biases and norms are left out. The
    sum over the N visits is the gradient of the shared matrices. Raises ValueError for a model with experts.
    """
    if model.config.n_expert:
        raise ValueError("visit_gradients needs a dense model: set n_expert to 0")
    blocks = model.blocks
    sublayers = [pair for b in blocks for pair in ((b.attn.qkv, b.attn.proj), (b.mlp.w_in, b.mlp.w_out))]
    heard: dict[nn.Module, list[Tensor]] = {matrix: [] for pair in sublayers for matrix in pair}
    said: dict[nn.Module, list[Tensor]] = {matrix: [] for matrix in heard}  # N of each: (B, T, I) and (B, T, O)

    def record(matrix: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        heard[matrix].append(inputs[0])
        said[matrix].append(output)

    with watched(model, heard, record):
        values = scalars(model(idx)[0])  # (K,)
    outputs = [output for matrix in said for output in said[matrix]]
    found: dict[nn.Module, list[Tensor]] = {matrix: [] for matrix in heard}  # K of (N, O * I)
    for value in values:
        slopes = iter(torch.autograd.grad(value, outputs, retain_graph=True))
        for matrix, inputs in heard.items():
            gradients = [torch.einsum("bto,bti->oi", next(slopes), x.detach()) for x in inputs]  # of W in W x
            found[matrix].append(torch.stack(gradients).flatten(1))
    return [torch.cat([torch.stack(found[matrix]) for matrix in pair], -1) for pair in sublayers]


def visit_alignment(U: Tensor, G: Tensor) -> float:
    """kappa_R of one sublayer from its R visits: what they do to the output, U (S, R, P), and to the loss, G (R, P).

        ||sum_r U_r|| ||sum_r G_r|| / (R max_r ||U_r|| max_r ||G_r||)

    with the norm of U taken over its S directions in the output, too. It is R for visits that agree, 1 for visits at
    right angles (and of one length), 0 for visits that cancel. In [2] two constants, which bound the norms of the
    visits, stand in place of the largest ones measured.
    """
    R = len(G)
    together = U.sum(1).norm() * G.sum(0).norm()
    return (together / (R * U.norm(dim=(0, 2)).max() * G.norm(dim=1).max())).item()


def kappa(model: LoopedGPT, idx: Tensor, *, directions: int = 4, seed: int = 0) -> float:
    """Visit alignment kappa_R: the largest `visit_alignment` of a model's sublayers, for tokens idx (B, T).

    U is with respect to the logits along `directions` random ones, G to the loss of the next token in idx. [2]
    """

    def scalars(logits: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(directions, *logits.shape, generator=generator).to(logits)  # (S, B, T, V)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
        return torch.cat(((drawn * logits).sum((1, 2, 3)), loss[None]))

    return max(visit_alignment(g[:-1], g[-1]) for g in visit_gradients(model, idx, scalars))


def stream_gradients(model: LoopedGPT, idx: Tensor, targets: Tensor) -> Tensor:
    """Norm of the loss's gradient with respect to the stream that enters each visit, (N, L), in eval mode."""
    before: list[Tensor] = []  # N * L streams (B, T, C)
    with watched(model, model.blocks, lambda block, inputs, outputs: before.append(inputs[0])):
        loss = model(idx, targets)[1]
    norms = [gradient.norm() for gradient in torch.autograd.grad(loss, before)]
    return torch.stack(norms).view(-1, len(model.blocks)).cpu()


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 11: reading every loop out


@torch.no_grad()
def accuracy_by_loop(model: LoopedGPT, task: Task, n_loop: int | None = None) -> list[float]:
    """Share of the scored targets that are the likeliest token, read out after each loop, in eval mode.

    task: x and y, (B, T) each, -100 where nothing is scored; n_loop: another loop count than the trained one.
    """
    scored = task.y != -100
    with evaluating(model):
        states = model(task.x, n_loop=n_loop, return_states=True)[2]
        return [(model.logits(h).argmax(-1) == task.y)[scored].double().mean().item() for h in states]


@dataclass(frozen=True)
class Lens:
    """What one sequence of T tokens would say after each of N loops. Each tensor is (N, T)."""

    token: Tensor  # int64, the likeliest next token
    right: Tensor  # probability of the right one
    rank: Tensor  # int64, place of the right one among all tokens, 1 is the likeliest


@torch.no_grad()
def logit_lens(model: LoopedGPT, idx: Tensor, targets: Tensor, n_loop: int | None = None) -> Lens:
    """Read the stream out after every loop, for one sequence, in eval mode. idx, targets: (T,)"""
    with evaluating(model):
        states = model(idx[None], n_loop=n_loop, return_states=True)[2]
        p = torch.cat([at_least_float32(model.logits(h)).softmax(-1) for h in states])  # (N, T, V)
    right = p.gather(-1, targets.expand(len(p), -1)[..., None])  # (N, T, 1)
    return Lens(p.argmax(-1), right[..., 0], 1 + (p > right).sum(-1))


@dataclass(frozen=True)
class Exits:
    """Where tokens left the loop. Each tensor is (B, T)."""

    loops: Tensor  # int64, loops that a token went through
    losses: Tensor  # nats, read out where it left


@torch.no_grad()
def early_exit(
    model: LoopedGPT,
    idx: Tensor,
    targets: Tensor,
    threshold: float,
    *,
    criterion: Literal["kl", "entropy"] = "kl",
    n_loop: int | None = None,
) -> Exits:
    """Let each token leave the loop when it seems to be done, in eval mode; after `n_loop` loops all leave.

    "kl": a token leaves after the loop t >= 2 in which KL(p_t || p_{t-1}) between the read-outs falls below
    `threshold` (nats); "entropy": after the first loop in which the entropy of p_t does. At 0 no token leaves early.
    The stream of a token that has left stays as it is: later loops of other tokens attend to keys and values made from
    it. idx, targets: (B, T). All loops are run here for all tokens; `Exits.loops` counts what had to be.
    """
    if criterion not in ("kl", "entropy"):
        raise ValueError(f"criterion={criterion!r} is not one of kl, entropy")
    n_loop = model.config.n_loop if n_loop is None else n_loop
    left, loops = torch.zeros_like(idx, dtype=torch.bool), torch.zeros_like(idx)
    memory = before = None
    with evaluating(model):
        h = x0 = model.embed(idx)
        for loop in range(n_loop):
            new, memory, _ = model.run_loop(h, loop, x0, memory)  # (B, T, C)
            h = torch.where(left[..., None], h, new)
            loops += ~left
            now = at_least_float32(model.logits(h)).log_softmax(-1)  # (B, T, V)
            if criterion == "entropy":
                left = left | (-(now.exp() * now).sum(-1) < threshold)
            elif before is not None:
                left = left | ((now.exp() * (now - before)).sum(-1).clamp_min(0) < threshold)  # rounding goes below 0
            before = now
    return Exits(loops, -now.gather(-1, targets[..., None])[..., 0])


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 10: what a training really takes


def step_memory(config: LoopedConfig, batch_size: int, dtype: str = "float32") -> int | None:
    """Bytes that two real training steps on the CPU add to the memory of a fresh process, at most. None if not Linux.

    What `plan.memory` foretells, measured without it: optimizer included, what torch itself takes left out.
    dtype: of matrix products, float32 or bfloat16.
    """
    if not STATUS.exists():
        return None
    # glibc keeps freed blocks below a threshold that it raises as it goes. Held at 1 MB, what is freed is given back.
    given_back = patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="1000000")
    with given_back, ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(added_by_steps, config, batch_size, dtype).result()


def added_by_steps(config: LoopedConfig, batch_size: int, dtype: str) -> int:
    """`step_memory` of this process, which has trained nothing before."""
    torch.set_num_threads(1)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")

    def two_steps(config: LoopedConfig, batch_size: int) -> None:
        model = LoopedGPT(config)
        optimizer = model.configure_optimizer(1e-3, 0.1)
        for _ in range(2):
            batch = tuple(torch.randint(config.vocab_size, (2, batch_size, config.block_size)))
            train_step(NextLoss(model), optimizer, [batch], grad_clip=1.0, autocast=autocast)

    two_steps(LoopedConfig(vocab_size=64, block_size=8, n_layer=1, n_head=1, n_embd=16), 2)
    before = resident("VmRSS")
    two_steps(config, batch_size)
    return resident("VmHWM") - before
