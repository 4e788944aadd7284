"""Exercises of chapter 0."""

import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from ...engine.machine import pick_device, pick_dtype
from ...model import LoopedGPT
from .comparing import _small_model, compare, exercise, passed


def installation() -> None:
    """Print the versions that matter, and what the trainer will compute with, and why."""
    device, device_reason = pick_device()
    dtype, dtype_reason = pick_dtype(device)
    print(f"python      {platform.python_version()}")
    for package in ("minilooped", "torch", "jupyterlab", "ipywidgets", "matplotlib"):
        print(f"{package:11} {version(package)}")
    print(f"device      {device.type}: {device_reason}")
    print(f"dtype       {str(dtype).removeprefix('torch.')}: {dtype_reason}")
    print(f"threads     {torch.get_num_threads()}")


@exercise
def untied_parameters(answer: Callable[[LoopedGPT], int]) -> None:
    """Exercise: parameters of the same depth without tying."""
    name = "untied_parameters"
    for n_loop in (1, 3, 5):
        model = _small_model(n_loop, seed=n_loop)
        blocks = sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
        if not compare(f"{name} at n_loop={n_loop}", answer(model), model.num_params() + (n_loop - 1) * blocks, 0):
            return
    passed(name)


@exercise
def loss_after_every_loop(answer: Callable[[LoopedGPT, Tensor, Tensor, int], Tensor]) -> None:
    """Exercise: the cross-entropy read out after each loop of one pass."""
    name = "loss_after_every_loop"
    for n_loop in (1, 2, 7):
        model = _small_model(n_loop=2, seed=n_loop, reinject=True)  # so that x0 and the loop's number count
        idx, targets = torch.randint(11, (2, 3, 1 + n_loop))
        if not _in_one_pass(name, answer, model, idx, targets, n_loop, lambda losses: losses):
            return
    passed(name)


def _in_one_pass(
    name: str,
    answer: Callable[[LoopedGPT, Tensor, Tensor, int], Tensor],
    model: LoopedGPT,
    idx: Tensor,
    targets: Tensor,
    n_loop: int,
    of_losses: Callable[[Tensor], Tensor],
) -> bool:
    """Compare an answer with a function of the losses after 1..N loops, and count its passes through the stack."""
    with torch.no_grad():
        expected = of_losses(torch.stack([model(idx, targets, n_loop=n)[1] for n in range(1, n_loop + 1)]))
        passes, run_loop = [], model.run_loop

        def counted(*args: Any, **kwargs: Any) -> Any:
            passes.append(1)
            return run_loop(*args, **kwargs)

        model.run_loop = counted  # type: ignore[method-assign]
        if not compare(f"{name} at n_loop={n_loop}", answer(model, idx, targets, n_loop), expected):
            return False
    if len(passes) != n_loop:
        raise AssertionError(f"{name}: {len(passes)} passes through the stack, and {n_loop} are enough")
    return True


@exercise
def extra_compute(answer: Callable[[LoopedGPT, int], float]) -> None:
    """Exercise: how many times the operations of the trained loop count another count takes."""
    name = "extra_compute"
    for trained, n_loop in ((1, 2), (4, 8), (3, 1)):
        model = _small_model(trained, seed=0)
        other = _small_model(n_loop, seed=0)
        expected = other.flops_per_token(training=False) / model.flops_per_token(training=False)
        if not compare(f"{name} from {trained} to {n_loop} loops", answer(model, n_loop), expected):
            return
    passed(name)
