"""Exercises of chapter 10."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ...model import LoopedConfig, LoopedGPT
from .comparing import _small_model, compare, exercise, passed


@exercise
def training_flops(answer: Callable[[LoopedConfig], int]) -> None:
    """Exercise: operations to train a dense model on one token, from its config alone."""
    name = "training_flops"
    small: dict[str, Any] = dict(vocab_size=50, block_size=16, n_layer=1, n_head=2, n_embd=24)
    for changes in (
        {},
        dict(n_loop=3),
        dict(n_layer=4, n_loop=2),
        dict(vocab_size=1000, block_size=7),
        dict(n_embd=64),
    ):
        config = LoopedConfig(**small | changes)
        label = ", ".join(f"{key}={value}" for key, value in changes.items()) or "one block, one loop"
        if not compare(f"{name} at {label}", answer(config), LoopedGPT(config).flops_per_token(), 0):
            return
    passed(name)


@exercise
def standing_bytes(answer: Callable[[int, int], int]) -> None:
    """Exercise: bytes of weights, gradients and optimizer state, when some of the weights are trained by Muon."""
    name = "standing_bytes"
    cases: list[tuple[int, Literal["adamw", "muon"]]] = [(1, "adamw"), (3, "adamw"), (2, "muon")]
    for n_loop, optimizer in cases:
        model = _small_model(n_loop, seed=0, n_layer=n_loop + 1)
        chosen = model.configure_optimizer(1e-3, 0.1, optimizer=optimizer)
        model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))[1].backward()
        chosen.step()
        by_muon = sum(
            p.numel() for group in chosen.param_groups if group["name"].endswith("muon") for p in group["params"]
        )
        there = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
        for part in getattr(chosen, "optimizers", [chosen]):
            there += [t for state in part.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
        expected = sum(t.numel() * t.element_size() for t in there)
        where = f"{name} of {model.num_params()} parameters, {by_muon} of them by Muon"
        if not compare(where, answer(model.num_params(), by_muon), expected, 0):
            return
    passed(name)


@exercise
def micro_batch(answer: Callable[[int, int], Tensor]) -> None:
    """Exercise: the largest micro-batch that fits, and how many of them make the batch that the recipe asks for."""
    name = "micro_batch"
    for sequences, most in ((480, 480), (480, 16), (480, 7), (480, 100), (36, 35), (13, 12)):
        batch_size = max(size for size in range(1, most + 1) if sequences % size == 0)
        expected = torch.tensor([batch_size, sequences // batch_size])
        if not compare(f"{name} of {sequences} sequences where {most} fit", answer(sequences, most), expected, 0):
            return
    passed(name)


@exercise
def tokens_by_morning(answer: Callable[[float, float, float, float], float]) -> None:
    """Exercise: how many tokens a model can be trained on in the hours there are."""
    name = "tokens_by_morning"
    for flops, tflops, mfu, hours in ((1e9, 312, 0.4, 10.0), (2.5e9, 121, 0.3, 8.0), (7e6, 0.1, 0.25, 0.5)):
        expected = 3600 * hours * mfu * tflops * 1e12 / flops
        where = f"{name} for {flops:g} operations a token, {tflops:g} TFLOP/s, {mfu:.0%} of them, {hours:g} hours"
        if not compare(where, answer(flops, tflops, mfu, hours), expected):
            return
    passed(name)
