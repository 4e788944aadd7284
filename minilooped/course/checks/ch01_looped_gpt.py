"""Exercises of chapter 1."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...model import LoopedConfig, LoopedGPT
from .comparing import _small_model, compare, exercise, passed


@exercise
def layer_loop(answer: Callable[[LoopedGPT, Tensor, int], Tensor]) -> None:
    """Exercise: the logits when every block is repeated before the next one has its turn."""
    name = "layer_loop"
    for n_layer, n_loop in ((1, 3), (2, 1), (3, 2)):
        model = _small_model(n_loop, seed=n_layer, n_layer=n_layer, pos="learned", rule="none")
        idx = torch.randint(11, (2, 5))
        with torch.no_grad():
            h = model.embed(idx)
            for block in model.blocks:
                for _ in range(n_loop):
                    h = block(h)[0]
            label = f"{name} of {n_layer} blocks x {n_loop}"
            if not compare(label, answer(model, idx, n_loop), model.logits(h)):
                return
    passed(name)


@exercise
def tied_gradient(answer: Callable[[Tensor, int], Tensor]) -> None:
    """Exercise: the gradient of the shared matrices from those of the untied copies."""
    name = "tied_gradient"
    for n_layer, n_loop in ((1, 4), (3, 2), (2, 3)):
        torch.default_generator.manual_seed(n_layer)
        grads = torch.randn(n_layer * n_loop, 4, 5, dtype=torch.float64)
        expected = torch.stack([grads[layer::n_layer].sum(dim=0) for layer in range(n_layer)])
        if not compare(f"{name} of {n_layer} blocks x {n_loop} loops", answer(grads, n_layer), expected, 1e-10):
            return
    passed(name)


@exercise
def albert_parameters(answer: Callable[[LoopedConfig, int], int]) -> None:
    """Exercise: unique parameters of a looped model whose embedding is factorised as ALBERT's."""
    name = "albert_parameters"
    for n_layer, n_loop, width, factor in ((1, 12, 16, 4), (3, 2, 32, 8), (2, 1, 16, 16)):
        changes = dict(n_layer=n_layer, n_embd=width, vocab_size=50, mlp="gelu", pos="learned")
        model = _small_model(n_loop, seed=0, **changes)
        expected = model.num_params() - 50 * width + 50 * factor + factor * width
        label = f"{name} of {n_layer} x {n_loop}, C={width}, E={factor}"
        if not compare(label, answer(model.config, factor), expected, 0):
            return
    passed(name)


@exercise
def universal_transformer(answer: Callable[[LoopedGPT, Tensor, Tensor], Tensor]) -> None:
    """Exercise: the logits when every loop is told which one it is."""
    name = "universal_transformer"
    for n_loop in (1, 2, 4):
        model = _small_model(n_loop, seed=n_loop)
        idx = torch.randint(11, (2, 5))
        signal = torch.randn(n_loop, 5, 16)
        with torch.no_grad():
            h = x0 = model.embed(idx)
            for loop in range(n_loop):
                h, _, _ = model.run_loop(h + signal[loop], loop, x0)
            if not compare(f"{name} at n_loop={n_loop}", answer(model, idx, signal), model.logits(h)):
                return
    passed(name)
