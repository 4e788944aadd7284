"""Exercises of chapter 7."""

from collections.abc import Callable

import torch
from torch import Tensor

from .comparing import compare, exercise, passed


@exercise
def routing_weights(answer: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    """Exercise: a row per token with the weights of its chosen experts, and 0 for all others."""
    name = "routing_weights"
    for S, E, k in ((1, 2, 1), (5, 4, 2), (64, 9, 5)):
        score, bias = torch.rand(S, E), torch.randn(E)
        chosen = torch.zeros(S, E, dtype=torch.bool).scatter(1, (score + bias).topk(k).indices, True)
        kept = score.masked_fill(~chosen, 0)
        if not compare(f"{name} for S={S}, E={E}, k={k}", answer(score, bias, k), kept / kept.sum(1, keepdim=True)):
            return
    passed(name)


def _two_choices(S: int, E: int, k: int) -> Tensor:
    """Experts of S tokens in two loops, (2, S, k), in no order. The second loop leans towards those of the first."""
    first, second = torch.randn(2, S, E)
    choices = torch.stack((first, second + 1.5 * first)).topk(k).indices
    return choices.gather(-1, torch.rand(choices.shape).argsort(-1))


@exercise
def jaccard(answer: Callable[[Tensor, Tensor], float]) -> None:
    """Exercise: experts that two loops have in common over those that either chose, mean over tokens."""
    name = "jaccard"
    for S, E, k in ((1, 8, 2), (7, 5, 3), (50, 32, 6)):
        first, second = _two_choices(S, E, k)
        sets = [(set(a), set(b)) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
        expected = sum(len(a & b) / len(a | b) for a, b in sets) / S
        if not compare(f"{name} for S={S}, E={E}, k={k}", answer(first, second), expected):
            return
    passed(name)


@exercise
def overlap_by_chance(answer: Callable[[Tensor, Tensor], float]) -> None:
    """Exercise: the mean overlap of two loops over all ways to pair the tokens of one with those of the other."""
    name = "overlap_by_chance"
    for S, E, k in ((3, 4, 1), (5, 6, 2), (40, 8, 3)):
        first, second = _two_choices(S, E, k)
        common = (first[:, None, :, None] == second[None, :, None, :]).sum((2, 3)).double()  # (S, S), token by token
        expected = common.mean().item() / k
        if not compare(f"{name} for S={S}, E={E}, k={k}", answer(first, second), expected):
            return
    passed(name)


def _expert(matrix: Tensor, calls: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """An expert (n, C) -> (n, C), whose matrix is (C, C). It appends what it is called with to `calls`."""

    def expert(x: Tensor) -> Tensor:
        calls.append(x)
        return torch.tanh(x @ matrix)

    return expert


@exercise
def sort_and_group(answer: Callable[[Tensor, Tensor, Tensor, list[Callable[[Tensor], Tensor]]], Tensor]) -> None:
    """Exercise: the weighted sum of each token's experts, with no expert called twice."""
    name = "sort_and_group"
    for S, E, k in ((1, 2, 2), (6, 4, 2), (20, 3, 1)):
        x, weight, matrices = torch.randn(S, 5), torch.rand(S, k), torch.randn(E, 5, 5)
        choice = torch.rand(S, E).topk(k).indices
        calls: list[list[Tensor]] = [[] for _ in range(E)]
        given = answer(x, choice, weight, [_expert(*one) for one in zip(matrices, calls, strict=True)])
        every = torch.tanh(torch.einsum("sc,ecd->sed", x, matrices))  # (S, E, C), all experts for all tokens
        own = every.gather(1, choice[..., None].expand(-1, -1, 5))  # (S, k, C)
        if not compare(f"{name} for S={S}, E={E}, k={k}", given, (weight[..., None] * own).sum(1)):
            return
        if (most := max(map(len, calls))) > 1:
            raise AssertionError(f"{name}: an expert was called {most} times, and once is enough")
    passed(name)
