"""How much memory there is, what a training takes at least, and one error for all ways in which it can run short."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..model import LoopedConfig, LoopedGPT

# How torch says that memory is short where it raises no OutOfMemoryError: on the CPU, on Apple's GPU, in CUDA's
# libraries, whose own working memory torch does not manage, and for a tensor whose bytes no 64-bit number can count.
FULL = "allocate memory|not enough memory|out of memory|ALLOC_FAILED|storage size calculation overflowed"


@contextmanager
def fitting_memory() -> Iterator[None]:
    """Turn what torch raises where memory does not suffice into one MemoryError that names the settings that help."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or re.search(FULL, str(error), re.I):
            raise MemoryError(
                "this does not fit in the memory of the device: lower batch_size and raise grad_accum by the same "
                "factor, or set recompute_loops, loss_chunk or segment, or lower block_size, n_loop, n_layer or n_embd"
            ) from error
        raise


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory that the device has in all; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None


def in_bytes(size: float) -> str:
    """A number of bytes as a person reads it: 12.3 MB, 4.56 GB, 789 TB."""
    for unit, power in (("MB", 6), ("GB", 9)):
        if size < 10 ** (power + 3):
            return f"{size / 10**power:,.1f} {unit}" if unit == "MB" else f"{size / 10**power:,.2f} {unit}"
    return f"{size / 1e12:,.0f} TB"


def least_bytes(config: LoopedConfig, batch_size: int, grad_accum: int) -> dict[str, int]:
    """Bytes that a training takes at least, by the settings that they come from. Nothing is made to find out."""
    tokens = batch_size * config.block_size  # of a micro-batch
    with torch.device("meta"):
        (block,) = LoopedGPT(replace(config, n_layer=1, n_loop=1, vocab_size=1, block_size=1)).blocks
    weights = config.n_layer * sum(parameter.numel() for parameter in block.parameters())
    weights += config.vocab_size * config.n_embd * (1 if config.tie_embeddings else 2)
    # The stream that enters a block visit waits for the backward pass, but for loops that are cut off or run again.
    loops = 1 if config.recompute_loops else min(config.segment or config.n_loop, config.n_loop)
    visits = config.n_layer * loops
    return {
        f"a model of n_layer={config.n_layer}, n_embd={config.n_embd}, vocab_size={config.vocab_size}": 16 * weights,
        f"a step of batch_size={batch_size} x grad_accum={grad_accum} windows of {config.block_size} tokens": (
            16 * tokens * grad_accum
        ),
        f"a micro-batch of batch_size={batch_size} in {visits} block visits": 2 * tokens * config.n_embd * visits,
    }


def refuse_what_cannot_fit(config: LoopedConfig, batch_size: int, grad_accum: int, device: torch.device) -> None:
    """Raise MemoryError for sizes that exceed the device's memory by themselves, and name them."""
    memory = total_memory(device)
    for what, size in least_bytes(config, batch_size, grad_accum).items():
        if memory is not None and size > memory:
            raise MemoryError(f"{what} would take {in_bytes(size)}, and the device has {in_bytes(memory)}: lower them")
