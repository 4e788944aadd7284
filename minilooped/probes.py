"""Instruments: what a model does, loop by loop. Each returns plain numbers or arrays, for plots, widgets and tests."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .data import Tokenizer
from .model import LoopedGPT
from .train import evaluate, sample


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
