"""A second device with real data, on a machine that has none: tensors on "meta" whose numbers lie in a CPU tensor.

Inside `second_device()` a tensor that is made on, or moved to, the device "meta" is wrapped, and every operation runs
on what is in the wrapping. An operation that mixes such a tensor with one that stayed on the CPU raises, as on a GPU.
So does a conversion to NumPy, and, as on an Apple GPU, float64. What may mix on a GPU may mix here: numbers without
dimensions in arithmetic, and indices on the CPU into a tensor on the device.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")


class There(torch.Tensor):
    """A tensor on the second device."""

    @staticmethod
    def __new__(cls, here: torch.Tensor):
        if here.dtype in (torch.float64, torch.complex128):
            raise TypeError("the second device has no float64, as an Apple GPU has none")
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
            requires_grad=here.requires_grad,
        )
        wrapper.here = here
        return wrapper

    def __repr__(self):
        return f"There({self.here})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __format__(self, spec):
        return format(self.here, spec)

    def tolist(self):
        return self.here.tolist()

    def numpy(self, *_, **__):
        raise TypeError("can't convert a tensor of the second device to numpy: use Tensor.cpu() first")

    __array__ = numpy


MOVES = {"copy_", "_to_copy", "set_"}
JOINS = {"cat", "stack"}
INDEXES = {"index", "index_put", "index_put_"}


def mixes(name: str, args: tuple, strangers: list[torch.Tensor]) -> bool:
    """Whether a GPU would refuse this operation on tensors of its own together with these of the CPU."""
    if name in MOVES:
        return False
    if name in JOINS:
        return bool(strangers)
    if name in INDEXES:  # the indices may lie on the CPU, and a single value
        values = args[2:3]
        return not isinstance(args[0], There) or any(v.dim() and not isinstance(v, There) for v in values)
    return any(value.dim() for value in strangers)


def run(func, args, kwargs):
    flat, _ = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    there = [value for value in tensors if isinstance(value, There)]
    name = func.overloadpacket.__name__
    asked = kwargs.get("device")
    moves = asked is not None and "device" in kwargs
    if there and mixes(name, args, [value for value in tensors if not isinstance(value, There)]):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found meta and cpu")
    to_there = torch.device(asked) == DEVICE if moves else bool(there)
    inside = tree_map(lambda value: value.here if isinstance(value, There) else value, (args, kwargs))
    own_args, own_kwargs = inside
    if moves:
        own_kwargs = {**own_kwargs, "device": torch.device("cpu")}
    out = func(*own_args, **own_kwargs)
    if name.endswith("_") and not name.endswith("__") and isinstance(args[0], torch.Tensor):
        return args[0]  # in place
    known = {id(value.here): value for value in there}

    def wrap(value):
        if not isinstance(value, torch.Tensor) or not to_there:
            return value
        return known.get(id(value)) or There(value)

    return tree_map(wrap, out)


class Everywhere(TorchDispatchMode):
    """Catches what makes tensors on the second device, or moves them there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class OfCPU(torch.Generator):
    """There is no generator on the second device: its random numbers are drawn on the CPU."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls)

    def __init__(self, device="cpu"):
        pass


@contextmanager
def second_device() -> Iterator[torch.device]:
    """The device, for as long as the context lasts. Autocast knows no such device, and its numbers are the CPU's."""
    with ExitStack() as inside:
        inside.enter_context(Everywhere())
        inside.enter_context(patch("torch.autocast", lambda *_, **__: nullcontext()))
        inside.enter_context(patch("torch.is_autocast_enabled", lambda *_: False))
        inside.enter_context(patch("torch.Generator", OfCPU))
        yield DEVICE
