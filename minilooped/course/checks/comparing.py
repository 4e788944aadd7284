"""What every checker is made of: an answer beside the expected one, and what is said of it."""

from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...model import LoopedConfig, LoopedGPT

Answer = TypeVar("Answer")


def compare(
    name: str, answer: Any, expected: Any, tolerance: float = 1e-5, mistakes: Mapping[str, Any] | None = None
) -> bool:
    """Compare an answer, a number or a tensor, with what is expected.

    mistakes: what is said of an answer, and the answer of which it is said. Returns False for a missing answer (None).
    Raises AssertionError for any other than the expected one. It says which mistake was made, or else what differs
    first, of type, shape, dtype and values, and by how much.
    """
    if answer is None:
        print(f"{name}: not answered yet")
        return False
    problem = _difference(answer, expected, tolerance)
    if problem is None:
        return True
    known = (said for said, wrong in (mistakes or {}).items() if _difference(answer, wrong, tolerance) is None)
    raise AssertionError(f"{name}: {next(known, problem)}")


def _difference(answer: Any, expected: Any, tolerance: float) -> str | None:
    """How an answer differs from the expected one, or None where it does not."""
    if not isinstance(expected, Tensor):
        if not isinstance(answer, Real) or isinstance(answer, bool):
            return f"expected a number, got {type(answer).__name__}"
        if not abs(answer - expected) <= tolerance * max(1.0, abs(expected)):  # so that NaN is wrong too
            return f"{answer:,} is not right, it is off by {answer - expected:+,.6g}"
        return None
    if not isinstance(answer, Tensor):
        return f"expected a tensor, got {type(answer).__name__}"
    for what in ("shape", "dtype"):
        got, wanted = getattr(answer, what), getattr(expected, what)
        if got != wanted:
            return f"expected {what} {wanted}, got {got}"
    answer = answer.cpu()  # a reader with a GPU may have computed it there
    close = torch.isclose(answer, expected, rtol=tolerance, atol=tolerance)
    if close.all():
        return None
    furthest = (answer.double() - expected.double()).abs().max().item()  # of booleans too
    return f"{close.float().mean():.0%} of the values agree; the furthest is off by {furthest:.3g}"


def passed(name: str) -> None:
    print(f"{name}: correct")


def exercise(checker: Callable[[Answer], None]) -> Callable[[Answer], None]:
    """A checker that draws the same models and tokens in every call, and leaves the reader's generator where it was."""

    @wraps(checker)
    def drawing_the_same(answer: Answer) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # the CPU's alone: torch.manual_seed would set a GPU's too
            checker(answer)

    return drawing_the_same


def _small_model(n_loop: int, seed: int, **changes: Any) -> LoopedGPT:
    torch.default_generator.manual_seed(seed)
    shape = dict(vocab_size=11, block_size=8, n_layer=2, n_loop=n_loop, n_head=2, n_embd=16, init_std=0.25)
    return LoopedGPT(LoopedConfig(**(shape | changes))).eval()
