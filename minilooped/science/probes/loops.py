"""What would a model say after each of its loops, and after how many does it need no more?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...data import Tokenizer
from ...data.tasks import Task
from ...model import LoopedGPT, at_least_float32, evaluating
from ...train import evaluate, sample
from .running import beside, watched


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


@torch.no_grad()
def loss_after_each_loop(
    model: LoopedGPT, batches: Iterable[tuple[Tensor, Tensor]], n_loop: int | None = None
) -> list[float]:
    """Cross-entropy in nats per token, read out after each loop, over (x, y) batches of (B, T) each, in eval mode.

    n_loop: another loop count than the trained one. One pass for all loops; targets must all count. Raises ValueError
    where there is no batch.
    """
    total, count = torch.zeros(1, dtype=torch.float64), 0
    with watched(model):
        for x, y in (beside(model, *batch) for batch in batches):
            states = model(x, n_loop=n_loop, return_states=True)[2]
            losses = [cross_entropy(model.logits(h).flatten(0, 1), y.flatten(), reduction="sum") for h in states]
            # An Apple GPU has no float64.
            total, count = total + torch.stack(losses).cpu().double(), count + y.numel()
    if not count:
        raise ValueError("a loss needs a batch, and batches is empty")
    return (total / count).tolist()


@torch.no_grad()
def accuracy_by_loop(model: LoopedGPT, task: Task, n_loop: int | None = None) -> list[float]:
    """Share of the scored targets that are the likeliest token, read out after each loop, in eval mode.

    task: x and y, (B, T) each, -100 where nothing is scored; n_loop: another loop count than the trained one. Raises
    ValueError where no target is scored.
    """
    x, y = beside(model, task.x, task.y)
    with evaluating(model):
        states = model(x, n_loop=n_loop, return_states=True)[2]
        right = [(model.logits(h).argmax(-1) == y).cpu() for h in states]  # (B, T) each
    scored = task.y.cpu() != -100
    if not scored.any():
        raise ValueError("an accuracy needs a target to score, and all of task.y are -100")
    return [of_loop[scored].double().mean().item() for of_loop in right]


@dataclass(frozen=True)
class Lens:
    """What one sequence of T tokens would say after each of N loops. Each tensor is (N, T)."""

    token: Tensor  # int64, the likeliest next token
    right: Tensor  # probability of the right one
    rank: Tensor  # int64, place of the right one among all tokens, 1 is the likeliest


@torch.no_grad()
def logit_lens(model: LoopedGPT, idx: Tensor, targets: Tensor, n_loop: int | None = None) -> Lens:
    """Read the stream out after every loop, for one sequence, in eval mode. idx, targets: (T,)"""
    idx, targets = beside(model, idx, targets)
    with evaluating(model):
        states = model(idx[None], n_loop=n_loop, return_states=True)[2]
        p = torch.cat([at_least_float32(model.logits(h)).softmax(-1) for h in states])  # (N, T, V)
    right = p.gather(-1, targets.expand(len(p), -1)[..., None])  # (N, T, 1)
    return Lens(p.argmax(-1).cpu(), right[..., 0].cpu(), 1 + (p > right).sum(-1).cpu())


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
    n_loop = model.loop_count(n_loop)
    idx, targets = beside(model, idx, targets)
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
    return Exits(loops.cpu(), -now.gather(-1, targets[..., None])[..., 0].cpu())
