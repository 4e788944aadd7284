"""Several processes that train one model (torchrun). With one process all of this does nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed


@contextmanager
def processes() -> Iterator[tuple[int, int]]:
    """(rank, number of processes), joining the group that torchrun started, if it did."""
    if not distributed.is_available() or not (distributed.is_initialized() or distributed.is_torchelastic_launched()):
        yield 0, 1
        return
    own = not distributed.is_initialized()
    if own:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group()
    try:
        yield distributed.get_rank(), distributed.get_world_size()
    finally:
        if own:
            distributed.destroy_process_group()


def world_size() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def sum_over_processes(values: Tensor) -> Tensor:
    if world_size() > 1:
        distributed.all_reduce(values)
    return values
