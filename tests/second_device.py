"""A second device with real data, on a machine that has none: tensors on "meta" whose numbers lie in a CPU tensor.

Inside `second_device()` a tensor that is made on, or moved to, the device "meta" is wrapped, and every operation runs
on what is in the wrapping. An operation that mixes such a tensor with one that stayed on the CPU raises, as on a GPU.
So does a conversion to NumPy. Numbers without dimensions may mix, as they may on a GPU.
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


MAY_MIX = {"copy_", "_to_copy", "index_put_", "index_put", "index", "set_"}  # as on CUDA: indices may lie on the CPU


def run(func, args, kwargs):
    flat, _ = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    there = [value for value in tensors if isinstance(value, There)]
    name = func.overloadpacket.__name__
    asked = kwargs.get("device")
    moves = asked is not None and "device" in kwargs
    if there and name not in MAY_MIX and any(value.dim() and not isinstance(value, There) for value in tensors):
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
