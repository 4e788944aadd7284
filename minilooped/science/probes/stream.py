"""What does every visit of a block add to the stream, and in which direction?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...model import LoopedConfig, LoopedGPT, at_least_float32
from ..toy import rms
from .running import beside, fresh, watched


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

    (idx,) = beside(model, idx)
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


def end_variance(model: LoopedGPT, idx: Tensor) -> float:
    """Mean square of the stream after the last block, before a norm that closes the loop, for tokens idx (B, T)."""
    return visits(model, idx).stream[-1, -1].item() ** 2


def variance_over_loops(config: LoopedConfig, n_loops: Sequence[int], *, seeds: Sequence[int] = (0, 1, 2)) -> Tensor:
    """`end_variance` of untrained models with random tokens, (S, K): a row for each seed, a column for a loop count."""
    models = [[fresh(replace(config, n_loop=n), seed, (2, config.block_size)) for n in n_loops] for seed in seeds]
    return torch.tensor([[end_variance(*model) for model in row] for row in models], dtype=torch.float64)
