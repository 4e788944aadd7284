"""Several processes that train one model (torchrun). With one process all of this does nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed


@contextmanager
def processes(device: torch.device) -> Iterator[tuple[int, int]]:
    """(rank, number of processes), after joining the group that torchrun started, if torchrun started this process.

    device: where this process computes. On CUDA each process of a machine takes the GPU of its local rank.
    Raises ValueError where a machine has more processes than GPUs.
    """
    if not distributed.is_available() or not (distributed.is_initialized() or distributed.is_torchelastic_launched()):
        yield 0, 1
        return
    own = not distributed.is_initialized()
    if own:
        if device.type == "cuda":
            rank, n_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if rank >= n_gpu:
                raise ValueError(
                    f"process {rank} of this machine has no GPU, for there are {n_gpu}: start torchrun with "
                    f"--nproc-per-node {n_gpu}, or train with device=cpu"
                )
            torch.cuda.set_device(rank)
        distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield distributed.get_rank(), distributed.get_world_size()
    finally:
        if own:
            distributed.destroy_process_group()


def world_size() -> int:
    """The number of processes that train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes, in place."""
    if world_size() > 1:
        distributed.all_reduce(values)
    return values
