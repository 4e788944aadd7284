"""What a run goes on with, beside its weights: random generators and the moments of its optimizer."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..model import OptimizerPair


def random_state() -> dict[str, Any]:
    """The state of every generator that code running here may draw from."""
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all(), "python": random.getstate()}


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators into a state that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():  # else the run has moved to another machine
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Whatever draws inside, the generators of torch and of Python are afterwards what they were before."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def load_optimizer(optimizer: torch.optim.Optimizer | OptimizerPair, state: dict[str, Any]) -> None:
    """Load moments. ``ValueError`` unless they are those of this optimizer, whose options stay as they are.

    torch compares no shapes, and its fused kernels write past the end of a moment that is too small.
    """
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    parts = optimizer.optimizers if isinstance(optimizer, OptimizerPair) else (optimizer,)  # Muon and AdamW, or one
    for part in parts:
        names = {"momentum_buffer"} if isinstance(part, torch.optim.Muon) else {"step", "exp_avg", "exp_avg_sq"}
        for parameter, moments in part.state.items():
            if moments.keys() != names:
                raise ValueError(f"the moments of a parameter are {sorted(moments)}")
            for name, moment in moments.items():
                shape = () if name == "step" else parameter.shape
                if moment.shape != shape:
                    raise ValueError(f"{name} is {tuple(moment.shape)}, of a parameter of {tuple(parameter.shape)}")
            if "step" in moments:  # torch has put it where the optimizer that was saved wants it
                moments["step"] = moments["step"].to(parameter.device if part.defaults["fused"] else "cpu")
