"""The trainer. The loop itself is `training_steps`, right below the settings.

    minilooped train                                       # from the shell, with the default preset
    minilooped train --resume shakespeare                  # go on after a stop, bit for bit
    minilooped train --from shakespeare --data prepared/my # new data and a new schedule for trained weights
    torchrun --nproc-per-node 2 -m minilooped.cli train    # data parallel

    from minilooped.train import TrainConfig, train        # from Python
    result = train(model_config, TrainConfig(max_steps=100))
    result.model, result.history, result.val_loss, result.run

A *step* is one batch: `grad_accum` micro-batches, and with segmented backprop as many optimizer updates as segments.
What a run leaves on disk is described in engine/checkpoint.py.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .data import BatchStream, Tokenizer, check_same_tokenizer, digest, eval_windows, load_corpus
from .data.storage import Tokens
from .engine.checkpoint import (
    check_place,
    find_run,
    is_finished,
    keep_best,
    load_checkpoint,
    new_run,
    newest_weights,
    only_writer,
    publish_weights,
    read_config,
    refuse_obstacles,
    restoring,
    run_tokenizer,
    save_checkpoint,
    write_config,
    write_result,
)
from .engine.console import Console
from .engine.log import LogRow, plot_losses, read_log, write_log
from .engine.machine import PEAK_TFLOPS as PEAK_TFLOPS  # older notebooks look for it here
from .engine.machine import Machine, attention_kernel, peak_tflops, pick_machine
from .engine.memory import fitting_memory, refuse_what_cannot_fit
from .engine.processes import processes, sum_over_processes, world_size
from .engine.report import Speed, end_lines, go_on, machine_lines, size_lines
from .engine.resume import changes, other_circumstances, refuse_changes, refuse_other_data
from .engine.state import kept_random_state, load_optimizer, random_state, set_random_state
from .engine.stopping import StopSignal
from .files import make_folder
from .model import LoopedConfig, LoopedGPT, OptimizerPair, check_settings, evaluating

Batch = tuple[Tensor, Tensor]  # inputs and targets, each (B, T) int64
Optimizer = torch.optim.Optimizer | OptimizerPair


# ----------------------------------------------------------------------------------------------------------------------
# Settings


# What the numbers must fulfil, where an int >= 1 or a float >= 0 would not do. A float32 ends near 1e38. OpenMP ends
# the process when the system refuses it a thread.
BOUNDS = {
    "lr": "> 0, <= 1e30",
    "weight_decay": ">= 0, <= 1e30",
    "grad_clip": ">= 0, <= 1e30",
    "min_lr_ratio": ">= 0, <= 1",
    "beta1": ">= 0, < 1",
    "beta2": ">= 0, < 1",
    "seed": ">= 0",
    "threads": ">= 1, <= 512",
    "peak_tflops": "> 0",
} | dict.fromkeys(("warmup_steps", "decay_steps", "eval_every", "eval_batches", "sample_every", "save_every"), ">= 0")


@dataclass(frozen=True)
class TrainConfig:
    """How to train. A value that cannot work raises a ValueError that names the field."""

    name: str = "run"  # folder of the run; where it exists, the new one becomes NAME-2, NAME-3, ...
    runs: str = "runs"  # folder of all runs
    data: str = "shakespeare"  # "shakespeare", or a folder made by `minilooped prepare`
    tokenizer: str | None = None  # char, gpt2 or another tiktoken encoding; None: the data's own

    max_steps: int = 1000  # batches to train on
    batch_size: int = 16  # sequences per micro-batch, over all processes together
    grad_accum: int = 1  # micro-batches per step
    step_per_segment: bool | None = None  # update after every segment; None: yes if the model has segments

    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the 2-D matrices in the blocks, AdamW for the rest
    lr: float = 1e-3  # peak learning rate
    schedule: Literal["cosine", "wsd"] = "cosine"  # after the warm-up: half a cosine; or flat, then down in a line
    warmup_steps: int = 100  # the learning rate grows in a line up to this step
    decay_steps: int = 100  # wsd: length of the descent at the end; at most all steps after the warm-up
    min_lr_ratio: float = 0.1  # the descent ends near lr * min_lr_ratio
    weight_decay: float = 0.1  # not for norms, biases and scalars
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping

    log_every: int = 10  # steps between rows of log.csv
    eval_every: int = 250  # steps between estimates of the validation loss; 0: only the full one at the end
    eval_batches: int = 10  # the same batches every time
    sample_every: int = 500  # steps between printed samples; 0: none, not even at the end
    save_every: int = 500  # steps between checkpoints; 0: only at the end, or when stopped

    seed: int = 1337  # of the initial weights and of the batches
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: a GPU where there is one
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products; weights stay float32
    threads: int | None = None  # CPU threads; None: torch's own choice
    compile: bool = False  # compile the block, once for all loops: pays on a GPU, takes a minute to start
    peak_tflops: float | None = None  # the device's best, for the share of it that is used; None: known for some GPUs
    n_loop_sampling: Literal["fixed", "uniform"] = "fixed"  # uniform: each step draws its loop count from 1..n_loop

    def __post_init__(self):
        check_settings(self, BOUNDS)
        if self.eval_every and not self.eval_batches:
            raise ValueError(f"eval_batches={self.eval_batches} must be >= 1 (or set eval_every=0)")


class Step(NamedTuple):
    """One step of training, when it is done."""

    number: int  # counted from 1
    loss: float  # of the last segment, mean over the step's targets, in nats per token
    grad_norm: float  # before clipping
    lr: float
    n_loop: int  # loops of this step
    updates: int  # optimizer updates in it
    seconds: float  # that it took
    model: LoopedGPT  # with the weights after the step. It is one model all along


# ----------------------------------------------------------------------------------------------------------------------
# The loop


def build(
    model_config: LoopedConfig,
    config: TrainConfig,
    device: torch.device | str = "cpu",
    kind: Callable[[LoopedConfig], LoopedGPT] = LoopedGPT,
) -> tuple[LoopedGPT, Optimizer]:
    """A fresh model on the device, and its optimizer. The weights depend on `config.seed` alone.

    kind: makes the model, where it is to be of another class.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)  # the CPU's, where the weights are drawn
        model = kind(model_config)
    model.to(device)
    betas = (float(config.beta1), float(config.beta2))
    return model, model.configure_optimizer(config.lr, config.weight_decay, betas=betas, optimizer=config.optimizer)


def training_steps(
    model: LoopedGPT,
    optimizer: Optimizer,
    batches: Iterator[Batch],
    config: TrainConfig,
    *,
    first_step: int = 0,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    next_loss: nn.Module | None = None,
) -> Iterator[Step]:
    """Train a model, and yield every step when it is done, until there are `config.max_steps`.

    batches: micro-batches (x, y), each (B, T) int64, without end. Of `config` count what concerns the steps: their
    number and micro-batches, the schedule, clipping, updates per segment, drawn loop counts. first_step: steps that the
    model has behind it. next_loss: the model as processes share it, where that is made already. Raises
    FloatingPointError when a loss or a gradient is not finite: that update is not made.
    """
    next_loss = NextLoss(model).parallel() if next_loss is None else next_loss
    for step in range(first_step, config.max_steps):
        began = time.perf_counter()
        micro_batches = [next(batches) for _ in range(config.grad_accum)]
        n_loop = loops_of_step(step, model.config.n_loop, config)
        every_segment = updates_every_segment(model, config, n_loop)
        lr = learning_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        updates = 0
        for mean_loss in accumulate(next_loss, micro_batches, autocast, n_loop, every_segment=every_segment):
            updates += 1
            where = f"step {step + 1}, update {updates}"
            loss, grad_norm = update(model, optimizer, mean_loss, config.grad_clip, where)
        yield Step(step + 1, loss, grad_norm, lr, n_loop, updates, time.perf_counter() - began, model)


def accumulate(
    next_loss: nn.Module,
    batches: Sequence[Batch],
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    n_loop: int | None = None,
    *,
    every_segment: bool = True,
) -> Iterator[Tensor]:
    """Backpropagate one step's micro-batches, and yield the loss, (), whenever its gradient stands in `.grad`.

    batches: this process's (x, y), each (B, T) on any device. The loss is the mean over all targets that count (not
    -100) in all micro-batches and processes: a micro-batch weighs by its number of targets, so that neither
    `grad_accum` nor the number of processes changes loss or gradient. n_loop: another loop count than the model's own.
    every_segment: yield after each segment of segmented backprop, with this segment's gradient. False: yield once,
    after the last segment, with the mean of the segments' gradients and the last one's loss.
    """
    model = raw_model(next_loss)
    device = model.wte.weight.device
    counts = [int((y != -100).sum()) for _, y in batches]
    total = max(1, int(sum_over_processes(torch.tensor(sum(counts)))))
    # A generator for each micro-batch, which runs one segment and yields its loss whenever it is asked.
    losses = [model.segment_losses(x.to(device), y.to(device), n_loop=n_loop) for x, y in batches]
    n_segments = len(model.config.segments(n_loop))
    scale = 1.0 if every_segment else 1 / n_segments
    for left in reversed(range(n_segments)):
        mean = torch.zeros((), device=device)
        for i, count in enumerate(counts):
            with exchanging_gradients(next_loss, last=i == len(counts) - 1):
                with autocast():
                    loss = next_loss(losses[i])
                # DistributedDataParallel averages over the processes, hence the factor.
                (loss * (scale * world_size() * count / total)).backward()
            mean = mean + loss.detach() * (count / total)
            if not left:
                losses[i].close()  # lets go of its stream before the next micro-batch
        if every_segment or not left:
            yield sum_over_processes(mean)


def update(model: LoopedGPT, optimizer: Optimizer, loss: Tensor, grad_clip: float, where: str) -> tuple[float, float]:
    """Make one optimizer update with the gradients that are there, and clear them.

    loss: (), the loss they belong to. grad_clip: largest gradient norm; 0: no clipping. where: the name of this update
    in an error. Returns the loss and the gradient's norm before clipping. Raises FloatingPointError if one of them is
    not finite: no update is made then.
    """
    # One kernel for many tensors, where the device has it.
    foreach = True if loss.device.type in ("cpu", "cuda") else None
    norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf, foreach=foreach)
    numbers = torch.stack((loss, norm)).tolist()
    if not all(map(math.isfinite, numbers)):
        optimizer.zero_grad()
        model.forget_loads()
        raise FloatingPointError(f"{where}: loss {numbers[0]}, gradient norm {numbers[1]}")
    optimizer.step()
    model.move_biases()
    optimizer.zero_grad()
    return numbers[0], numbers[1]


def train_step(
    next_loss: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    *,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    step_per_segment: bool = False,
    grad_clip: float = 0.0,
    n_loop: int | None = None,
) -> tuple[float, float, int]:
    """One step of `training_steps` by itself, on the micro-batches and at the learning rate that are there.

    Returns the loss of the last segment, the gradient norm before clipping and the number of updates.
    """
    model, updates = raw_model(next_loss), 0
    for mean_loss in accumulate(next_loss, batches, autocast, n_loop, every_segment=step_per_segment):
        updates += 1
        loss, norm = update(model, optimizer, mean_loss, grad_clip, f"update {updates}")
    return loss, norm, updates


class NextLoss(nn.Module):
    """Runs one segment: the next loss of `model.segment_losses`, as the forward of a module.

    DistributedDataParallel sums gradients for a backward whose forward it has seen. This is that forward.
    """

    def __init__(self, model: LoopedGPT):
        super().__init__()
        self.model = model

    def forward(self, losses: Iterator[Tensor]) -> Tensor:
        return next(losses)

    def parallel(self) -> nn.Module:
        """Itself, or shared with the other processes if there are any."""
        if world_size() == 1:
            return self
        # A segment that starts from a detached stream uses no embedding unless it is re-injected.
        unused = self.model.config.segment is not None
        # The buffers (rotary table, router biases) are equal in all processes by construction. Since torch 2.13 the
        # option that leaves them alone has a new name, and the old one warns.
        known = signature(DistributedDataParallel).parameters
        buffers: dict[str, Any] = {known_as: False for known_as in ("forward_sync_buffers",) if known_as in known}
        return DistributedDataParallel(self, find_unused_parameters=unused, **(buffers or {"broadcast_buffers": False}))


def raw_model(next_loss: nn.Module) -> LoopedGPT:
    """The model behind a `NextLoss`, whether processes share it or not."""
    own = next_loss.module if isinstance(next_loss, DistributedDataParallel) else next_loss
    assert isinstance(own, NextLoss)
    return own.model


def exchanging_gradients(next_loss: nn.Module, last: bool) -> AbstractContextManager:
    """Several processes exchange their gradients once, in the backward pass of a step's last micro-batch."""
    if last or not isinstance(next_loss, DistributedDataParallel):
        return nullcontext()
    return next_loss.no_sync()


def updates_every_segment(model: LoopedGPT, config: TrainConfig, n_loop: int | None = None) -> bool:
    """Whether every segment of segmented backprop ends with an optimizer update."""
    return len(model.config.segments(n_loop)) > 1 and config.step_per_segment is not False


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0. Warm-up: step 0 already has 1 / warmup_steps of the peak."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
        height = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    else:  # warm-up, stable, decay
        decay_steps = min(config.decay_steps, config.max_steps - config.warmup_steps)
        height = min(1.0, (config.max_steps - step) / max(1, decay_steps))
    return config.lr * min(warmup, config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


def loops_of_step(step: int, n_loop: int, config: TrainConfig) -> int:
    """The loop count of a step, counted from 0: `n_loop`, or what `n_loop_sampling` draws for it from 1..n_loop.

    It follows from seed and step alone, so that it is the same in all processes, and in a run that goes on.
    """
    if config.n_loop_sampling == "fixed":
        return n_loop
    return random.Random(f"loops {config.seed} {step}").randint(1, n_loop)


# ----------------------------------------------------------------------------------------------------------------------
# Looking at a model


@torch.no_grad()
def evaluate(model: LoopedGPT, batches: Iterable[tuple[Tensor, Tensor]], n_loop: int | None = None) -> float:
    """Mean cross-entropy in nats per token over (x, y) batches, in eval mode and float32."""
    device, total, count = model.wte.weight.device, 0.0, 0
    with evaluating(model):
        for x, y in batches:
            valid = int((y != -100).sum())
            loss = model(x.to(device), y.to(device), n_loop=n_loop, return_logits=False)[1]
            total += loss.item() * valid
            count += valid
    total, count = sum_over_processes(torch.tensor((total, count), dtype=torch.float64)).tolist()
    return total / count


def sample(
    model: LoopedGPT,
    tokenizer: Tokenizer,
    prompt: str | None = None,
    *,
    max_new_tokens: int = 300,
    temperature: float = 0.8,
    top_k: int | None = None,
    n_loop: int | None = None,
    seed: int = 1337,
    stop_at_end: bool = True,
) -> str:
    """The prompt and its continuation. The draw depends on `seed` alone and leaves torch's generators as they are.

    prompt None: the tokenizer's `opening`. stop_at_end: end with the text that the model ends, where the tokenizer has
    a token for that; its own text is not shown. Raises ValueError for an empty prompt or a seed out of range.
    """
    prompt = tokenizer.opening if prompt is None else prompt
    if not prompt:
        raise ValueError("the prompt is empty: give at least one character")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} must lie in [0, 2**63)")
    device, asked = model.wte.weight.device, tokenizer.encode(prompt)
    idx = torch.as_tensor(asked, device=device)[None]  # (1, T)
    generator = torch.Generator(device=device).manual_seed(seed)
    end = tokenizer.end if stop_at_end else None
    text = model.generate(
        idx, max_new_tokens, temperature=temperature, top_k=top_k, n_loop=n_loop, generator=generator, stop_token=end
    )[0].tolist()  # T + max_new_tokens ids, or fewer
    if end in text[len(asked) :]:
        text = text[: text.index(end, len(asked))]
    return tokenizer.decode(text)


@torch.no_grad()
def loop_rms(model: LoopedGPT, idx: Tensor) -> list[float]:
    """RMS of the stream after each loop, for tokens idx (B, T)."""
    with evaluating(model):
        states = model(idx.to(model.wte.weight.device), return_states=True)[2]
    return [state.square().mean().sqrt().item() for state in states]


# ----------------------------------------------------------------------------------------------------------------------
# Before the first step


def micro_batches_of_peak(model_config: LoopedConfig, grad_accum: int) -> int:
    """How many of a step's micro-batches take as much memory as all of them.

    The second meets the gradients of the first. With segments every one waits for its next, and holds its stream.
    """
    return grad_accum if len(model_config.segments()) > 1 else min(2, grad_accum)


def rehearse(
    next_loss: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    reserve: int = 0,
):
    """Forward and backward of micro-batches, of which no trace remains: what fails, fails before training.

    reserve: bytes to keep free meanwhile, for what only the first update will make. Raises MemoryError where the device
    has not enough.
    """
    model = raw_model(next_loss)
    random_before = random_state()
    try:
        with fitting_memory():
            kept_free = torch.empty(reserve, dtype=torch.uint8, device=model.wte.weight.device)
            for _ in accumulate(next_loss, batches, autocast):
                pass
            del kept_free
    finally:
        model.zero_grad()
        model.forget_loads()
        set_random_state(random_before)


def fit_micro_batch(
    config: TrainConfig, rehearsal: Callable[[int], None], say: Callable[[str], None] = print
) -> TrainConfig:
    """Halve `batch_size` and double `grad_accum` until `rehearsal(batch_size)` raises no MemoryError.

    A step keeps its tokens, its gradient and its learning rate. A batch that can't be halved, or is shared by several
    processes, raises the MemoryError.
    """
    while True:
        try:
            rehearsal(config.batch_size)
            return config
        except MemoryError:
            if config.batch_size % 2 or world_size() > 1:
                raise
        # Here, and not above: an exception that is being handled holds the memory of all that led to it.
        if config.compile:  # else the second size would be compiled as any size, which is slower in all steps to come
            torch.compiler.reset()
        config = replace(config, batch_size=config.batch_size // 2, grad_accum=config.grad_accum * 2)
        say(f"notice   a micro-batch did not fit: batch_size {config.batch_size}, grad_accum {config.grad_accum} now")


# ----------------------------------------------------------------------------------------------------------------------
# A run


@dataclass
class TrainResult:
    """What `train` returns."""

    model: LoopedGPT  # in eval mode
    tokenizer: Tokenizer
    run: Path  # the run's folder (in the first process, if there are several)
    step: int  # steps done
    history: list[LogRow]  # the rows of log.csv
    val_loss: float | None  # over the whole validation split, nats per token; None: stopped before the end


def train(
    model_config: LoopedConfig,
    train_config: TrainConfig,
    *,
    resume: bool = False,
    start: str | Path | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> TrainResult:
    """Train a model and leave a run on disk.

    `vocab_size` of the model is set by the tokenizer. A signal that ends processes politely (Ctrl-C, SIGTERM, SIGHUP)
    saves a checkpoint at the end of the step, and the call returns. The generators of torch and Python are left as
    they were.

    resume: go on with the run called `train_config.name`. On the same machine, thread count and torch the result is the
        uninterrupted one, bit for bit. A run whose steps are done, but not what comes after them, is finished.
    start: a run (its name or its folder) whose weights the new run begins with, in place of random ones.
    on_step: called after every step, before its row and its checkpoint are written, with the step and the model in it.
        What it raises ends the run; what it draws from torch's or Python's generator goes on after a stop.

    Raises ValueError or FileNotFoundError for settings and data that cannot work, FloatingPointError when a loss, a
    gradient or a weight stops being finite, MemoryError where the device has not enough.
    """
    if not resume:
        check_place(train_config.runs, train_config.name)
    with ExitStack() as cleanup:
        cleanup.enter_context(fitting_memory())
        cleanup.enter_context(kept_random_state())
        machine = pick_machine(train_config.device, train_config.dtype)
        cleanup.enter_context(machine.configured(train_config.threads))
        rank, n_processes = cleanup.enter_context(processes(machine.device))
        if resume and rank == 0:
            cleanup.enter_context(only_writer(find_run(train_config.name, train_config.runs)))
        trainer = Trainer(model_config, train_config, machine, rank, n_processes)
        trainer.introduce()
        if resume:
            trainer.restore()
        elif start is not None:
            trainer.take_weights(start)
        trainer.rehearse(cleanup)
        trainer.open_run(cleanup)
        stopped = trainer.loop(on_step)
        return trainer.stop() if stopped else trainer.finish()


class Trainer:
    """One run under way, in one of `n_processes` processes. Its methods are the stages of `train`, in order."""

    def __init__(self, model_config: LoopedConfig, config: TrainConfig, machine: Machine, rank: int, n_processes: int):
        self.config, self.machine, self.rank, self.n_processes = config, machine, rank, n_processes
        self.console = Console(speaks=rank == 0)
        self.corpus = load_corpus(config.data, config.tokenizer)
        self.model_config = replace(model_config, vocab_size=self.corpus.tokenizer.vocab_size)
        self.refuse_what_cannot_work()
        torch.manual_seed(config.seed)
        random.seed(config.seed)
        self.model, self.optimizer = build(self.model_config, config, machine.device)
        self.stream, self.tokens_sha256 = self.draw(self.corpus.train), digest(self.corpus.train)
        self.window = next(self.draw(self.corpus.train))[0][:1].to(machine.device)  # (1, T), to look at the model with
        self.run = Path(config.runs) / config.name  # where it exists, a new run takes another name
        self.resumed = False
        self.step = self.updates = 0
        self.seconds = 0.0
        self.history: list[LogRow] = []
        self.last_good: Path | None = None
        self.config_is_written = False
        self.next_loss: nn.Module = NextLoss(self.model)
        self.uncompiled: Callable[[], AbstractContextManager] = nullcontext
        name = torch.cuda.get_device_name() if machine.device.type == "cuda" else ""
        peak = config.peak_tflops or peak_tflops(name)
        self.speed = Speed(peak and peak * n_processes)

    def draw(self, tokens: Tokens, batch_size: int | None = None) -> BatchStream:
        """An endless stream of this process's batches, from its beginning."""
        shape = batch_size or self.config.batch_size, self.model_config.block_size
        return BatchStream(tokens, *shape, seed=self.config.seed, rank=self.rank, world_size=self.n_processes)

    @property
    def settings(self) -> dict[str, Any]:
        """All that it takes to build model, trainer and tokenizer again."""
        model, training = asdict(self.model_config), asdict(self.config)
        return {"model": model, "train": training, "tokenizer": self.corpus.tokenizer.spec()}

    @property
    def facts(self) -> dict[str, Any]:
        """What the bits of a run depend on besides its settings."""
        return {
            "torch": str(torch.__version__),
            "device": self.machine.device.type,
            "dtype": str(self.machine.dtype),
            "threads": torch.get_num_threads(),
            "processes": self.n_processes,
            "compile": self.config.compile,
        }

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.grad_accum * self.model_config.block_size

    # -- what is refused and said at the start -------------------------------------------------------------------------

    def refuse_what_cannot_work(self) -> None:
        """Raise ValueError or MemoryError for sizes that data or memory cannot serve, before anything is made."""
        c, block_size = self.config, self.model_config.block_size
        if c.eval_every and len(self.corpus.val) <= block_size:
            raise ValueError(
                f"one window takes block_size + 1 = {block_size + 1} tokens, but the validation split of "
                f"{self.corpus.name} has {len(self.corpus.val)}: prepare the text with a larger --val-fraction, use a "
                "smaller block_size, or set eval_every=0"
            )
        refuse_what_cannot_fit(self.model_config, c.batch_size, c.grad_accum, self.machine.device)

    def introduce(self) -> None:
        """Say what is trained, on what, and where; and what looks like a mistake."""
        c, corpus, drawn = self.config, self.corpus, self.config.n_loop_sampling != "fixed"
        every_segment = updates_every_segment(self.model, c)
        lines = machine_lines(self.machine, self.n_processes)
        lines += size_lines(self.model, corpus, c.batch_size * c.grad_accum, drawn=drawn, every_segment=every_segment)
        if (epochs := c.max_steps * self.tokens_per_step / len(corpus.train)) > 10:
            lines.append(f"notice   {epochs:,.0f} times over the training data: use a longer text, or fewer max_steps")
        if c.warmup_steps > c.max_steps:
            share = learning_rate(c.max_steps - 1, c) / c.lr
            lines.append(
                f"notice   warmup_steps={c.warmup_steps} is more than max_steps={c.max_steps}: the rate ends at "
                f"{share:.0%} of its peak. Lower warmup_steps too"
            )
        for line in lines:
            self.console.say(line)

    # -- old weights ---------------------------------------------------------------------------------------------------

    def take_weights(self, start: str | Path) -> None:
        """Begin with the newest weights of another run, which has to have the same tokenizer and the same shapes."""
        run = find_run(start, self.config.runs)
        check_same_tokenizer(run_tokenizer(run, read_config(run)), self.corpus.tokenizer)
        file, weights = newest_weights(run)
        with restoring(file):
            self.model.load_state_dict(weights)
        self.console.say(f"weights  {file}")

    def restore(self) -> None:
        """Go on where the newest checkpoint of the run was made, after a look at whether it is this run's."""
        config, run = self.config, find_run(self.config.name, self.config.runs)
        refuse_obstacles(run)
        stored = read_config(run)
        refuse_changes(run, stored, self.settings, DEFAULTS)
        self.run, self.resumed = run, True
        self.last_good, self.step, weights, state = load_checkpoint(run)
        if self.step > config.max_steps or (self.step == config.max_steps and is_finished(run, self.step)):
            raise ValueError(f"{run} has done its {self.step} steps: give a larger max_steps to go on")
        with restoring(self.last_good):
            saved_with = json.loads(json.dumps(state.get("settings", stored)))
            edited = changes(saved_with, self.settings, DEFAULTS)
            its_facts = {name: type(now)(state["machine"][name]) for name, now in self.facts.items()}
            version = int(state.get("version", 1))
            its_tokens = int(state["n_tokens"]), str(state["tokens_sha256"])
            self.updates, self.seconds = int(state["updates"]), seconds(state["seconds"])
        if edited:
            raise ValueError(f"{run / 'config.json'} is not that of {self.last_good.name} ({edited}): restore it")
        refuse_other_data(run, config.data, *its_tokens, self.corpus.train)
        with restoring(self.last_good):
            self.model.load_state_dict(weights)
            load_optimizer(self.optimizer, state["optimizer"])
            self.stream.load_state_dict(state["stream"])
            set_random_state(state["random"])
        self.console.say(f"resume   {self.last_good}")
        self.history = self.old_rows(run)
        self.announce_changes(saved_with["train"])
        for notice in other_circumstances(its_facts, self.facts):
            self.console.say(notice)
        if version < 2 and self.model_config.n_expert and self.model_config.balance == "bias":
            self.console.say(
                "notice   until now the routers' biases moved with every micro-batch and segment, from here "
                "on they move once per update: not the bits of an uninterrupted run"
            )

    def old_rows(self, run: Path) -> list[LogRow]:
        """The rows of the log up to the checkpoint."""
        if not (run / "log.csv").is_file():
            self.console.say(f"notice   {run / 'log.csv'} is missing: a new one begins here")
            return []
        return [row for row in read_log(run / "log.csv") if row["step"] <= self.step]

    def announce_changes(self, saved_with: dict[str, Any]) -> None:
        """Say how a new schedule meets the old one."""
        names = [field.name for field in fields(TrainConfig) if field.name in saved_with]
        before = replace(self.config, **{name: saved_with[name] for name in names})
        for name in ("max_steps", "decay_steps"):
            if (was := getattr(before, name)) != (now := getattr(self.config, name)):
                next_lr, last_lr = learning_rate(self.step, self.config), learning_rate(self.step - 1, before)
                self.console.say(
                    f"notice   {name} was {was}, now {now}: the next step has learning rate {next_lr:.3g}, the last "
                    f"one had {last_lr:.3g}"
                )

    # -- compile and rehearse ------------------------------------------------------------------------------------------

    def rehearse(self, cleanup: ExitStack) -> None:
        """Compile, find the micro-batch that fits, and see which attention runs: what fails, fails before training."""
        if self.config.compile:
            self.uncompiled = partial(torch.compiler.set_stance, "force_eager")
            for block in self.model.blocks:
                block.compile()  # in place: the names in the state dict stay as they are
        self.next_loss = NextLoss(self.model).parallel()
        try:
            self.fit()
        except Exception as error:
            if not self.config.compile or isinstance(error, MemoryError):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".partition("\n\n")[0].split())
            self.console.say(f"compile  failed, going on without it ({reason})")
            cleanup.enter_context(self.uncompiled())
            self.fit()
        with self.uncompiled():
            kernel = attention_kernel(self.model, self.window, self.machine.autocast)
        self.console.say(f"kernel   attention: {kernel}")

    def fit(self) -> None:
        """Halve the micro-batch until a step of it fits."""

        def rehearsal(batch_size: int) -> None:
            batch = next(self.draw(self.corpus.train, batch_size))
            grad_accum = self.config.grad_accum * self.config.batch_size // batch_size
            batches = [batch] * micro_batches_of_peak(self.model_config, grad_accum)
            moments = 0 if self.resumed else 8 * self.model.num_params()  # two of float32, with the first update
            rehearse(self.next_loss, batches, self.machine.autocast, moments)

        self.config = fit_micro_batch(self.config, rehearsal, self.console.say)
        self.stream.batch_size = self.config.batch_size

    # -- the loop ------------------------------------------------------------------------------------------------------

    def open_run(self, cleanup: ExitStack) -> None:
        """Make the folder of a new run, and see that nobody else writes to it."""
        if self.rank == 0 and not self.resumed:
            self.run = new_run(self.config.runs, self.config.name)
            cleanup.enter_context(only_writer(self.run))
            self.write_config()
        if self.rank == 0:
            write_log(self.run / "log.csv", self.history)
        self.console.say(f"run      {self.run}")

    def write_config(self) -> None:
        """Write config.json. In a run that goes on, the first checkpoint made with these settings comes before it."""
        write_config(self.run, self.settings)
        self.config_is_written = True

    def loop(self, on_step: Callable[[Step], None] | None = None) -> bool:
        """Train, and report on the way. Returns whether a signal has stopped the run before its end."""
        c, console = self.config, self.console
        steps = training_steps(
            self.model,
            self.optimizer,
            self.stream,
            c,
            first_step=self.step,
            autocast=self.machine.autocast,
            next_loss=self.next_loss,
        )
        with StopSignal() as stop, console.progress(c.max_steps, self.step), self.watching_numbers():
            for done in steps:
                self.count(done)
                if on_step is not None:
                    on_step(done)
                at_end = self.step == c.max_steps
                stopped = not at_end and bool(sum_over_processes(torch.tensor(int(stop.asked))))
                estimate = self.estimate() if self.due(c.eval_every) and not at_end else None
                if self.due(c.log_every) or estimate is not None or at_end:
                    self.log(done, estimate)
                if self.due(c.save_every) or at_end or stopped:
                    self.save()
                # What is only for reading comes after what must not be lost.
                if estimate is not None:
                    console.say(f"step {self.step}: validation loss about {estimate:.3f}")
                if self.due(c.sample_every) and not at_end:
                    self.say_sample(max_new_tokens=200)
                console.advance(loss=f"{done.loss:.3f}", **self.speed.shown())
                if stopped:
                    return True
        return False

    def count(self, done: Step) -> None:
        """Take note of a step."""
        self.step, self.updates = done.number, self.updates + done.updates
        self.seconds += done.seconds
        flops = self.tokens_per_step * self.model.flops_per_token(n_loop=done.n_loop)
        self.speed.count(self.tokens_per_step, flops, done.seconds)

    def due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    @contextmanager
    def watching_numbers(self) -> Iterator[None]:
        """When numbers stop being finite, say where the run stood and what is left of it."""
        try:
            yield
        except FloatingPointError as error:
            with self.uncompiled():
                rms = ", ".join(f"{value:.3g}" for value in loop_rms(self.model, self.window))
            lr = learning_rate(min(self.step, self.config.max_steps - 1), self.config)
            raise FloatingPointError(
                f"stopped after step {self.step}: {error}; learning rate {lr:.3g}; RMS of the stream after each loop: "
                f"{rms}. Last good checkpoint: {self.last_good or 'none yet'}. Try a lower lr, or another rule"
            ) from error

    def estimate(self) -> float:
        """The validation loss over a few batches, the same ones every time. The best weights so far are kept."""
        batches = islice(self.draw(self.corpus.val), self.config.eval_batches)
        with self.uncompiled():
            loss = finite_loss(evaluate(self.model, batches))
        best = min((row["val_loss"] for row in self.history if row["val_loss"] is not None), default=math.inf)
        if loss < best and self.rank == 0 and self.run.is_dir():
            keep_best(self.run, self.model.state_dict(), self.step, loss)
        return loss

    def log(self, done: Step, estimate: float | None) -> None:
        """Add a row to the log."""
        row: LogRow = {"step": done.number, "loss": done.loss, "val_loss": estimate, "lr": done.lr}
        row |= {"grad_norm": done.grad_norm, "updates": self.updates}
        row |= {"tokens": done.number * self.tokens_per_step, "seconds": round(self.seconds, 3)}
        self.history.append(row)
        if self.rank == 0 and self.run.is_dir():
            write_log(self.run / "log.csv", [row], mode="a")

    def save(self) -> None:
        """Write a checkpoint, and then config.json where that has still to follow."""
        if self.rank != 0:
            return
        if not self.run.is_dir():
            self.console.say(f"notice   {self.run} has been deleted: it is made again, without its older checkpoints")
            make_folder(self.run)
            write_log(self.run / "log.csv", self.history)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "random": random_state(),
            "updates": self.updates,
            "seconds": self.seconds,
            "n_tokens": len(self.corpus.train),
            "tokens_sha256": self.tokens_sha256,
            "machine": self.facts,
            "settings": self.settings,
            "version": 2,  # of what a state means: since 2 the routers' biases move once per update
        }
        self.last_good = save_checkpoint(self.run, self.step, self.model.state_dict(), state)
        if not (self.config_is_written and (self.run / "config.json").is_file()):
            self.write_config()

    def say_sample(self, before: str = "", max_new_tokens: int = 300) -> None:
        """Print how the model goes on from the first character of the validation split."""
        if self.rank != 0:
            return
        tokenizer, seed = self.corpus.tokenizer, self.config.seed
        with self.uncompiled(), self.console.reporting("a sample"):
            prompt = tokenizer.decode(self.corpus.val[:64])[:1]
            text = sample(self.model, tokenizer, prompt, max_new_tokens=max_new_tokens, seed=seed)
            self.console.say(f"{before}{text}\n")

    # -- the end -------------------------------------------------------------------------------------------------------

    def result(self, val_loss: float | None) -> TrainResult:
        return TrainResult(self.model, self.corpus.tokenizer, self.run, self.step, self.history, val_loss)

    def say_speed(self) -> None:
        """How much of the devices' best was used, where that is known."""
        if self.speed.tokens and self.speed.peak_tflops is not None:
            shown, each = self.speed.shown(), self.speed.peak_tflops / self.n_processes
            best = f"{self.n_processes} x {each:g} TFLOP/s"
            self.console.say(f"speed    {shown['tokens/s']} tokens/s, MFU {shown['MFU']} of {best}")

    def stop(self) -> TrainResult:
        """Say how a run that was stopped goes on."""
        self.model.eval()
        self.say_speed()
        where = f"step {self.step} of {self.config.max_steps}"
        self.console.say(f"Stopped after {where}; saved {self.last_good}. To go on:\n    {go_on(self.run)}")
        return self.result(None)

    def finish(self) -> TrainResult:
        """Evaluate the weights of the last step, publish them, and draw the losses.

        All it needs is the last checkpoint, so that a run that was killed in here is finished by resuming it.
        """
        self.model.eval()
        self.say_speed()
        windows = eval_windows(self.corpus.val, self.model_config.block_size, self.config.batch_size)
        with self.uncompiled(), self.watching_numbers():
            val_loss = finite_loss(evaluate(self.model, islice(windows, self.rank, None, self.n_processes)))
        if self.rank == 0:
            assert self.last_good is not None  # the last step ends with a checkpoint
            publish_weights(self.run, self.last_good)
            with self.console.reporting("the picture of the losses"):
                plot_losses(self.history, val_loss, self.run / "loss.png")
            tokens = self.step * self.tokens_per_step
            write_result(self.run, {"step": self.step, "val_loss": val_loss, "tokens": tokens, "seconds": self.seconds})
        if self.config.sample_every:
            self.say_sample(before="\nA sample:\n")
        for line in end_lines(self.run, self.config.max_steps, self.history, self.corpus, val_loss):
            self.console.say(line)
        return self.result(val_loss)


# What a setting had been that a stored config does not know.
DEFAULTS = {"model": asdict(LoopedConfig()), "train": asdict(TrainConfig())}


def seconds(value: Any) -> float:
    """A stored time in seconds. ``ValueError`` for a number that can be none."""
    if not 0 <= float(value) < 1e12:
        raise ValueError(f"{value} is no number of seconds")
    return float(value)


def finite_loss(loss: float) -> float:
    """The validation loss. FloatingPointError unless it is finite."""
    if not math.isfinite(loss):
        raise FloatingPointError(f"validation loss {loss}")
    return loss
