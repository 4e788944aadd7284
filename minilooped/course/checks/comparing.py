"""What every checker is made of: an answer beside the expected one, and what is said of it."""

from collections.abc import Callable
from functools import wraps
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...model import LoopedConfig, LoopedGPT


def compare(name: str, answer: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    """Compare an answer, a number or a tensor, with what is expected.

    Returns False for a missing answer (None). Raises AssertionError on the first of type, shape, dtype and values that
    differs, and says by how much.
    """
    if answer is None:
        print(f"{name}: not answered yet")
        return False
    if not isinstance(expected, Tensor):
        if not isinstance(answer, Real) or isinstance(answer, bool):
            raise AssertionError(f"{name}: expected a number, got {type(answer).__name__}")
        if not abs(answer - expected) <= tolerance * max(1.0, abs(expected)):  # so that NaN is wrong too
            raise AssertionError(f"{name}: {answer:,} is not right, it is off by {answer - expected:+,.6g}")
        return True
    if not isinstance(answer, Tensor):
        raise AssertionError(f"{name}: expected a tensor, got {type(answer).__name__}")
    for what in ("shape", "dtype"):
        got, wanted = getattr(answer, what), getattr(expected, what)
        if got != wanted:
            raise AssertionError(f"{name}: expected {what} {wanted}, got {got}")
    answer = answer.cpu()  # a reader with a GPU may have computed it there
    close = torch.isclose(answer, expected, rtol=tolerance, atol=tolerance)
    if not close.all():
        furthest = (answer.double() - expected.double()).abs().max().item()  # of booleans too
        raise AssertionError(
            f"{name}: {close.float().mean():.0%} of the values agree; the furthest is off by {furthest:.3g}"
        )
    return True


def passed(name: str) -> None:
    print(f"{name}: correct")


Answer = TypeVar("Answer")


def exercise(checker: Callable[[Answer], None]) -> Callable[[Answer], None]:
    """Let a checker draw the same numbers at every call, and leave the reader's random generators where they were."""

    @wraps(checker)
    def drawing_the_same(answer: Answer) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # the CPU's alone: torch.manual_seed moves those of a GPU too
            checker(answer)

    return drawing_the_same


def _small_model(n_loop: int, seed: int, **changes: Any) -> LoopedGPT:
    torch.default_generator.manual_seed(seed)
    shape = dict(vocab_size=11, block_size=8, n_layer=2, n_loop=n_loop, n_head=2, n_embd=16, init_std=0.25)
    return LoopedGPT(LoopedConfig(**(shape | changes))).eval()
