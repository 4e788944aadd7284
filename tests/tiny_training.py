"""What the tests of training steps share: both kinds of tiny models, batches, and their gradients."""

from dataclasses import replace

import pytest
import torch
from tiny_runs import DENSE, LOOM

from minilooped.model import LoopedConfig, LoopedGPT

BOTH = pytest.mark.parametrize("model_config", [DENSE, LOOM], ids=["dense", "loom"])


def tiny_model(config: LoopedConfig, dtype=torch.float64) -> LoopedGPT:
    torch.manual_seed(0)
    return LoopedGPT(replace(config, vocab_size=11)).to(dtype)


def tiny_batch(rows: int, ignored: int = 0):
    """x and y, (rows, 8), with the first `ignored` targets of the flattened y left out."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randint(11, (2, rows, 8), generator=generator)
    y.view(-1)[:ignored] = -100
    return x, y


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
