"""Instruments: what a model does, loop by loop. Each returns plain numbers or arrays, for plots, widgets and tests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .data import Tokenizer
from .model import LoopedConfig, LoopedGPT
from .train import evaluate, loop_rms, sample


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


def norm_growth(
    config: LoopedConfig, rules: Sequence[str], n_loops: Sequence[int], *, seeds: Sequence[int] = (0, 1, 2)
) -> dict[str, list[float]]:
    """RMS of the stream after the last loop of an untrained model, per rule, one value per loop count.

    The mean over seeds, for random tokens that fill the window. Give `config` an init_std of n_embd ** -0.5 and
    embed_norm=True: the stream then starts at RMS 1, and the branches are large enough for a slope to show.
    """
    growth: dict[str, list[float]] = {}
    for rule in rules:
        growth[rule] = []
        for n_loop in n_loops:
            total = 0.0
            for seed in seeds:
                torch.manual_seed(seed)
                model = LoopedGPT(replace(config, rule=rule, n_loop=n_loop))
                total += loop_rms(model, torch.randint(config.vocab_size, (2, config.block_size)))[-1]
            growth[rule].append(total / len(seeds))
    return growth
