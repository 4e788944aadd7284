"""Tasks that take several steps to solve (chapter 11). Nothing to load: every batch is drawn anew."""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Task(NamedTuple):
    """A batch of a task: targets stand where they are to be said, not one token ahead as in a text."""

    x: Tensor  # (B, T) int64
    y: Tensor  # (B, T) int64, -100 where nothing is scored


def p_hop(
    batch: int, length: int, hops: Sequence[int] = (1,), *, letters: int = 4, generator: torch.Generator | None = None
) -> tuple[Task, Tensor]:
    """p-hop induction: jump back p times through a random text, and say the letter where you land.

    A jump from a position goes to the one after the latest earlier occurrence of its letter. Row by row p is drawn from
    `hops`. x: p as the token `letters` + p, then `length` - 1 letters 0, 1, ...; y: at every letter the one p jumps
    away, where there are that many. Returns the batch and each row's p, (B,). Tokens go up to `letters` + max(hops).

    No letter follows itself: of letters drawn freely the last two are equal once in `letters` times, such a jump lands
    where it began, and saying the current letter would pass for an answer. The task is one of arXiv 2502.17416; p in
    front and a score at every letter are ours. Raises ValueError for fewer than 3 letters, which leave nothing to draw,
    a window without room for a jump, or a p below 1.
    """
    if letters < 3 or length < 3 or not hops or min(hops) < 1:
        raise ValueError(f"p-hop needs letters >= 3, length >= 3 and hops >= 1, not {letters}, {length}, {tuple(hops)}")
    steps = torch.randint(1, letters, (batch, length - 1), generator=generator)  # from letter to letter, never 0
    first = torch.randint(letters, (batch, 1), generator=generator)
    text = (first + steps.cumsum(1) - steps[:, :1]) % letters  # (B, T - 1)
    p = torch.as_tensor(hops)[torch.randint(len(hops), (batch,), generator=generator)]  # (B,)

    here = torch.arange(length - 1)
    before = here[1:] <= here[:, None]  # (T - 1, T - 2): position j can be jumped to from t if j <= t, and ...
    same = text[:, :, None] == text[:, None, :-1]  # ... if the letter before it is the one at t; (B, T - 1, T - 2)
    jump = torch.where(before & same, here[1:], 0).amax(2)  # the latest such j, (B, T - 1); 0: there is none
    at = here.expand_as(text)
    for done in range(max(hops)):  # from 0 every jump leads to 0
        at = torch.where((done < p)[:, None], jump.gather(1, at), at)
    said = torch.where(at > 0, text.gather(1, at), -100)
    x = torch.cat(((letters + p)[:, None], text), dim=1)
    return Task(x, torch.cat((torch.full_like(x[:, :1], -100), said), dim=1)), p


def cycle_hops(
    batch: int, steps: int, *, things: int = 11, told: int | None = None, generator: torch.Generator | None = None
) -> Task:
    """Follow a pointer: one cycle through all things is written down, and the last token asks what lies steps ahead.

    x: (B, things + 1) int64: place k = 0, 1, ... holds the thing that follows thing k, and the last place holds the
    thing to start from. y: -100, and in the last place the thing that is reached. Each row has a cycle and a start of
    its own. x does not say how many steps are asked for: a model that takes a step in each loop needs no telling. For
    one that does, told is the largest number of steps that is ever asked for. x then has one more token before the
    start, `things` + steps - 1, so that tokens go up to `things` + told - 1.

    Since there is one cycle, an even guess among the other things is right once in things - 1 times, however many the
    steps, and the start is never right. Raises ValueError unless 0 < steps < things, and where told is less than steps.
    """
    if not 0 < steps < things or (told is not None and told < steps):
        raise ValueError(f"cycle_hops needs 0 < steps < things, and told >= steps, not {steps}, {things}, {told}")
    order = torch.rand(batch, things, generator=generator).argsort(1)  # (B, things), the cycle
    follows = torch.empty_like(order).scatter_(1, order, order.roll(-1, 1))  # thing k is followed by follows[:, k]
    start = torch.randint(things, (batch, 1), generator=generator)
    at = start
    for _ in range(steps):
        at = follows.gather(1, at)
    asked = [] if told is None else [torch.full_like(start, things + steps - 1)]
    x = torch.cat([follows, *asked, start], dim=1)
    y = torch.full_like(x, -100)
    y[:, -1:] = at
    return Task(x, y)


def permutations(batch: int, length: int, *, n: int = 5, generator: torch.Generator | None = None) -> Task:
    """The word problem of S_n: what the first 1, 2, ..., T of a sequence of permutations make when done in turn.

    Tokens are the n! permutations of n things, in lexicographic order. x: (B, T) drawn evenly; y: at position t the
    product of the first t + 1, the earliest done first. S5 is the smallest symmetric group that is not solvable.
    Raises ValueError unless 2 <= n <= 6.
    """
    if not 2 <= n <= 6:
        raise ValueError(f"n={n} must be from 2 to 6: the vocabulary has n! tokens, and their products n! squared")
    product = _products(n)
    x = torch.randint(len(product), (batch, length), generator=generator)
    y = x.clone()
    for t in range(1, length):
        y[:, t] = product[y[:, t - 1], x[:, t]]
    return Task(x, y)


@cache
def _products(n: int) -> Tensor:
    """(n!, n!): the number of "first i, then j", with permutations numbered in lexicographic order."""
    everything = torch.tensor(list(itertools.permutations(range(n))))  # (n!, n); thing k goes to place [i, k]
    weight = n ** torch.arange(n - 1, -1, -1)
    product = everything[:, everything]  # [j, i, k] = j(i(k)), (n!, n!, n)
    return torch.searchsorted(everything @ weight, (product @ weight).mT.contiguous())


def baselines(task: Task) -> dict[str, float]:
    """What two answers that need no thought would score: the commonest target, and the token just read.

    Shares of the scored positions, to be named beside every accuracy.
    """
    scored = task.y != -100
    answers = task.y[scored]
    return {
        "commonest": (answers.bincount().max() / len(answers)).item(),
        "repeat": (answers == task.x[scored]).double().mean().item(),
    }
