"""What do a model and its training cost: parameters, operations, bytes, seconds?"""

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...model import LoopedConfig, LoopedGPT
from ...train import NextLoss, train_step
from .running import beside, fresh


def saved_bytes(run: Callable[[], object], parameters: Iterable[Tensor] = ()) -> int:
    """Most bytes that autograd holds for backward passes at any one time while `run` runs.

    Each storage counts once, however many operations saved it; those of `parameters` (give buffers too) not at all,
    since they are there anyway. If `run` itself calls backward, what that frees no longer counts.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    holders: Counter[int] = Counter()  # by address of the storage: how many saved tensors hold it
    held = peak = 0

    class Saved:
        """Lives exactly as long as autograd keeps the tensor."""

        def __init__(self, tensor: Tensor):
            nonlocal held, peak
            self.tensor = tensor.detach()  # an operation may save its own result, which holds the operation: a circle
            self.address = tensor.untyped_storage().data_ptr()
            if self.address not in own:
                holders[self.address] += 1
                if holders[self.address] == 1:
                    held += tensor.untyped_storage().nbytes()
                    peak = max(peak, held)

        def __del__(self):
            nonlocal held
            if self.address not in own:
                holders[self.address] -= 1
                if holders[self.address] == 0:
                    held -= self.tensor.untyped_storage().nbytes()

    with saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        run()
    return peak


@dataclass(frozen=True)
class Cost:
    """What a model of L unique blocks and N loops costs to train."""

    n_layer: int
    n_loop: int
    parameters: int  # unique ones
    operations: int  # floating-point operations per token, forward and backward
    saved: int  # bytes that autograd holds for the backward pass of one full window


def cost(config: LoopedConfig) -> Cost:
    """Build a model, run one window of `block_size` random tokens through it, and count."""
    model = LoopedGPT(config)
    idx, targets = torch.randint(config.vocab_size, (2, 1, config.block_size))  # (1, T) each
    saved = saved_bytes(lambda: model(idx, targets), [*model.parameters(), *model.buffers()])
    return Cost(config.n_layer, config.n_loop, model.num_params(), model.flops_per_token(), saved)


def batch_bytes(model: LoopedGPT, idx: Tensor, targets: Tensor) -> int:
    """Most bytes that autograd holds while one batch (B, T) is trained, with a backward after each segment.

    See `saved_bytes`. Gradients are left as they were.
    """
    idx, targets = beside(model, idx, targets)

    def run() -> None:
        for loss in model.segment_losses(idx, targets):
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    return saved_bytes(run, [*model.parameters(), *model.buffers()])


def cpu_times(runs: Mapping[str, Callable[[], object]], rounds: int = 10) -> dict[str, Tensor]:
    """CPU seconds of each run, (rounds,), in turns: what slows the machine for a while slows all of them alike.

    Meant for ratios within a round. One round before the first is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            times[name].append(time.process_time() - began)
    return {name: torch.tensor(seconds[1:], dtype=torch.float64) for name, seconds in times.items()}


STATUS = Path("/proc/self/status")  # Linux: what a process holds
M_MMAP_THRESHOLD = -3  # in glibc's malloc.h


def resident(which: str) -> int:
    """Bytes of this process in memory: now, "VmRSS", or at most so far, "VmHWM". Linux only."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text(encoding="utf-8").splitlines())
    return int(fields[which].split()[0]) * 1024


def peak_memory(config: LoopedConfig, batch_size: int) -> int | None:
    """Bytes that training on one full batch adds to the memory of a fresh process, at most. None where not Linux.

    An untrained model in eval mode, three batches of random tokens, a backward after each segment, no optimizer. What
    is loaded once does not count: a batch of one window goes before. What the allocator does not give back does count.
    """
    if not STATUS.exists():
        return None
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(added_memory, config, batch_size, torch.get_num_threads()).result()


def added_memory(config: LoopedConfig, batch_size: int, threads: int) -> int:
    """`peak_memory` of this process, which has trained nothing before."""
    torch.set_num_threads(threads)
    model, tokens = fresh(config, 0, (batch_size, config.block_size + 1))
    model.eval()

    def train(tokens: Tensor) -> None:
        for loss in model.segment_losses(tokens[:, :-1], tokens[:, 1:]):
            loss.backward()

    train(tokens[:1])
    before = resident("VmRSS")
    for _ in range(3):
        train(tokens)
    return resident("VmHWM") - before


def step_memory(config: LoopedConfig, batch_size: int, dtype: str = "float32") -> int | None:
    """Bytes that two real training steps on the CPU add to the memory of a fresh process, at most. None if not Linux.

    What `plan.memory` foretells, measured without it: optimizer included, what torch itself takes left out.
    dtype: of matrix products, float32 or bfloat16.
    """
    if not STATUS.exists():
        return None
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(added_by_steps, config, batch_size, dtype).result()


def added_by_steps(config: LoopedConfig, batch_size: int, dtype: str) -> int:
    """`step_memory` of this process, which has trained nothing before."""
    # glibc keeps freed blocks below a threshold that it raises as it goes. Held at 1 MB, what is freed is given back.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 1_000_000)
    torch.set_num_threads(1)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")

    def two_steps(config: LoopedConfig, batch_size: int) -> None:
        model = LoopedGPT(config)
        optimizer = model.configure_optimizer(1e-3, 0.1)
        for _ in range(2):
            batch = tuple(torch.randint(config.vocab_size, (2, batch_size, config.block_size)))
            train_step(NextLoss(model), optimizer, [batch], grad_clip=1.0, autocast=autocast)

    two_steps(LoopedConfig(vocab_size=64, block_size=8, n_layer=1, n_head=1, n_embd=16), 2)
    before = resident("VmRSS")
    two_steps(config, batch_size)
    return resident("VmHWM") - before
