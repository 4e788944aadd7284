"""Do loops choose the same experts, and would chance?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...model import LoopedGPT, Routing, at_least_float32
from ...train import evaluate
from .running import beside, routers_of, watched


def routing(model: LoopedGPT, idx: Tensor, n_loop: int | None = None) -> tuple[Tensor, Tensor]:
    """Which experts each token meets at every visit, in eval mode, for tokens idx (B, T).

    Returns choices (N, L, B, T, k) int64 and loads (N, L, E) int64, tokens per expert. The record is kept per visit: a
    router that serves all loops is asked N times. Raises ValueError for a dense model.
    """
    choices, loads, _ = routing_and_inputs(model, idx, n_loop)
    return choices.cpu(), loads.cpu()


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

    (idx,) = beside(model, idx)
    with watched(model, routers_of(model), record):
        model(idx, n_loop=n_loop)
    choices = torch.stack([visit.choice for visit in visits])  # (N * L, B * T, k)
    loads = torch.stack([visit.load for visit in visits])  # (N * L, E)
    return (
        choices.view(-1, config.n_layer, *idx.shape, config.top_k),
        loads.view(-1, config.n_layer, config.n_expert),
        torch.stack(seen).unflatten(0, (-1, config.n_layer)),
    )


def load_cosine(loads: Tensor) -> Tensor:
    """Cosine of the expert loads of every two loops, loads (N, L, E) -> (N, N, L).

    A weak measure: balanced loads are all alike, so that two random routers come close to 1. See `expert_overlap`.
    """
    unit = torch.nn.functional.normalize(loads.cpu().double(), dim=-1)
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
    weights = [router.weight for router in routers_of(model)]  # (N, E, C) each
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
