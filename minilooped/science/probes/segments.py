"""What does segmented backprop reach, and what has its gradient in common with the full one?"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...model import LoopedGPT
from .running import beside, routers_of, watched


@torch.enable_grad()
def gradient_reach(model: LoopedGPT, idx: Tensor, targets: Tensor) -> Tensor:
    """Norm of the gradient of each segment's loss on the routers of each loop, (losses, N), in eval mode.

    Behind a cut it is exactly 0. A loop is reached when its routers are: no other weight belongs to one loop alone.
    idx, targets: (B, T). Raises ValueError for a model without a router per loop.
    """
    if model.config.router != "per_loop":
        raise ValueError("gradient_reach needs a weight of each loop's own: set n_expert > 0 and router='per_loop'")
    routers = [router.weight for router in routers_of(model)]  # L times (N, E, C)
    idx, targets = beside(model, idx, targets)
    with watched(model):
        gradients = [torch.stack(torch.autograd.grad(loss, routers)) for loss in model.segment_losses(idx, targets)]
    return torch.stack(gradients).square().sum((1, 3, 4)).sqrt().cpu()


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
        return [g.cpu().double().flatten() for g in found]

    idx, targets = beside(model, idx, targets)
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


def largest_jump(losses: Sequence[float]) -> float:
    """How far any step's loss stands above the mean of the 20 steps before it: the size of a spike, in nats.

    Raises ValueError for fewer than 21 losses.
    """
    if len(losses) < 21:
        raise ValueError(f"a jump is measured from the 20 steps before it: {len(losses)} losses are too few")
    curve = torch.tensor(losses, dtype=torch.float64)
    before = curve[:-1].unfold(0, 20, 1).mean(-1)  # of each step from the twenty-first on
    return (curve[20:] - before).max().item()
