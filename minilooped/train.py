"""The minimal trainer: one loop, read from top to bottom.

    minilooped train                                       # from the shell, with the default preset
    minilooped train --resume shakespeare                  # go on after a stop, bit for bit
    torchrun --nproc-per-node 2 -m minilooped.cli train    # data parallel

    from minilooped.train import TrainConfig, train        # from Python
    result = train(model_config, TrainConfig(max_steps=100))
    result.model, result.history, result.val_loss, result.run

A *step* is one batch: `grad_accum` micro-batches, and with segmented backprop as many optimizer updates as segments.
What a run leaves on disk is described in checkpoint.py.
"""

import json
import math
import random
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

from .data import BatchStream, Tokenizer, check_same_tokenizer, digest, eval_windows, load_corpus, tokenizer_from_spec
from .engine.checkpoint import (
    find_run,
    load_checkpoint,
    new_run,
    only_writer,
    publish_weights,
    read_config,
    restoring,
    run_tokenizer,
    save_checkpoint,
    shell_command,
    write_config,
)
from .engine.log import plot_losses, read_log, write_log
from .engine.machine import PEAK_TFLOPS as PEAK_TFLOPS  # older notebooks look for it here
from .engine.machine import attention_kernel, fitting_memory, peak_tflops, pick_device, pick_dtype
from .engine.processes import processes, sum_over_processes, world_size
from .engine.state import load_optimizer, random_state, set_random_state
from .engine.stopping import StopSignal
from .model import LoopedConfig, LoopedGPT, evaluating

# ----------------------------------------------------------------------------------------------------------------------
# Settings


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
        def need(ok: bool, name: str, rule: str):
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {rule}")

        for field in fields(self):
            value, kinds = getattr(self, field.name), get_args(field.type) or (field.type,)
            if get_origin(field.type) is Literal:
                need(value in kinds, field.name, f"one of {', '.join(kinds)}")
            else:
                fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
                of_type = " or ".join(kind.__name__ for kind in kinds).replace("NoneType", "None")
                need(fits and (bool in kinds or not isinstance(value, bool)), field.name, f"of type {of_type}")
        for name in ("max_steps", "batch_size", "grad_accum", "log_every"):
            need(getattr(self, name) >= 1, name, ">= 1")
        for name in ("warmup_steps", "decay_steps", "eval_every", "sample_every", "save_every", "weight_decay"):
            need(getattr(self, name) >= 0, name, ">= 0")
        need(self.eval_every == 0 or self.eval_batches >= 1, "eval_batches", ">= 1 (or set eval_every=0)")
        need(self.lr > 0 and math.isfinite(self.lr), "lr", "a finite number > 0")
        need(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "in [0, 1]")
        need(0 <= self.beta1 < 1, "beta1", "in [0, 1)")
        need(0 <= self.beta2 < 1, "beta2", "in [0, 1)")
        need(self.grad_clip >= 0, "grad_clip", ">= 0")
        need(self.threads is None or 1 <= self.threads <= 4096, "threads", "in [1, 4096], or None")
        need(0 <= self.seed < 2**63, "seed", "in [0, 2**63)")
        need(self.peak_tflops is None or 0 < self.peak_tflops < math.inf, "peak_tflops", "a finite number > 0, or None")


# What a resumed run may change: where it lies and runs, what memory it takes, how long it goes on, how often it
# reports. A new `max_steps` moves the schedule: from there on the learning rate is that of a run of the new length.
FREE_ON_RESUME = (
    "name",
    "runs",
    "max_steps",
    "log_every",
    "eval_every",
    "eval_batches",
    "sample_every",
    "save_every",
    "device",
    "threads",
    "compile",
    "peak_tflops",
    "recompute_loops",
    "loss_chunk",
)


@dataclass
class TrainResult:
    """What `train` returns."""

    model: LoopedGPT  # in eval mode
    tokenizer: Tokenizer
    run: Path  # the run's folder (in the first process, if there are several)
    step: int  # steps done
    history: list[dict[str, float | None]]  # the rows of log.csv
    val_loss: float | None  # over the whole validation split, nats per token; None: stopped before the end


# ----------------------------------------------------------------------------------------------------------------------
# Schedule, gradient, evaluation


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
        # The buffers (rotary table, router biases) are equal in all processes by construction.
        return DistributedDataParallel(self, broadcast_buffers=False, find_unused_parameters=unused)


def raw_model(next_loss: nn.Module) -> LoopedGPT:
    return (next_loss.module if isinstance(next_loss, DistributedDataParallel) else next_loss).model


def accumulate(
    next_loss: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    scale: float = 1.0,
    n_loop: int | None = None,
) -> Iterator[Tensor]:
    """Backpropagate one step's micro-batches; yield a loss per segment, its gradient times `scale` added to `.grad`.

    batches: this process's (x, y), each (B, T) on any device. The loss, (), is the mean over all targets that count
    (not -100) in all micro-batches and processes: micro-batches weigh by their number of targets, so that neither
    `grad_accum` nor the number of processes changes loss or gradient. n_loop: another loop count than the model's own.
    """
    model = raw_model(next_loss)
    device = model.wte.weight.device
    counts = [int((y != -100).sum()) for _, y in batches]
    total = max(1, int(sum_over_processes(torch.tensor(sum(counts)))))
    losses = [model.segment_losses(x.to(device), y.to(device), n_loop=n_loop) for x, y in batches]
    for left in reversed(range(len(model.config.segments(n_loop)))):
        mean = 0.0
        for i, count in enumerate(counts):
            # Gradients are exchanged once, after the last micro-batch.
            exchange = i == len(counts) - 1 or not isinstance(next_loss, DistributedDataParallel)
            with nullcontext() if exchange else next_loss.no_sync():
                with autocast():
                    loss = next_loss(losses[i])
                # DistributedDataParallel averages over the processes, hence the factor.
                (loss * (scale * world_size() * count / total)).backward()
            mean = mean + loss.detach() * (count / total)
            if not left:
                losses[i].close()  # lets go of its stream before the next micro-batch
        yield sum_over_processes(mean)


def train_step(
    next_loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    *,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    step_per_segment: bool = False,
    grad_clip: float = 0.0,
    n_loop: int | None = None,
) -> tuple[float, float, int]:
    """Backpropagate one step's micro-batches and update, at the end or after every segment.

    n_loop: another loop count than the model's own; the segments are then those of so many loops.

    Returns the loss of the last segment, the gradient norm before clipping (0: no clipping) and the number of updates.
    Raises FloatingPointError if loss or norm is not finite: this update is not made, updates of earlier segments stand.
    """
    model, updates = raw_model(next_loss), 0
    n_segments = len(model.config.segments(n_loop))
    n_updates = n_segments if step_per_segment else 1
    scale = 1.0 if step_per_segment else 1 / n_segments
    # One kernel for many tensors, where the device has it.
    foreach = True if model.wte.weight.device.type in ("cpu", "cuda") else None
    for segment, loss in enumerate(accumulate(next_loss, batches, autocast, scale, n_loop), start=1):
        if not step_per_segment and segment < n_segments:
            continue
        norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf, foreach=foreach)
        loss, norm = torch.stack((loss, norm)).tolist()
        if not math.isfinite(loss + norm):
            optimizer.zero_grad()
            raise FloatingPointError(f"update {updates + 1} of {n_updates}: loss {loss}, gradient norm {norm}")
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
    return loss, norm, updates


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
) -> str:
    """The prompt and its continuation. The draw depends on `seed` alone and leaves torch's generators as they are.

    prompt None: the tokenizer's `opening`.
    """
    prompt = tokenizer.opening if prompt is None else prompt
    if not prompt:
        raise ValueError("the prompt is empty: give at least one character")
    device = model.wte.weight.device
    idx = torch.as_tensor(tokenizer.encode(prompt), device=device)[None]  # (1, T)
    generator = torch.Generator(device=device).manual_seed(seed)
    options = dict(temperature=temperature, top_k=top_k, n_loop=n_loop, generator=generator)
    return tokenizer.decode(model.generate(idx, max_new_tokens, **options)[0].cpu())


@torch.no_grad()
def loop_rms(model: LoopedGPT, idx: Tensor) -> list[float]:
    """RMS of the stream after each loop, for tokens idx (B, T)."""
    with evaluating(model):
        states = model(idx, return_states=True)[2]
    return [state.square().mean().sqrt().item() for state in states]


# ----------------------------------------------------------------------------------------------------------------------
# Stopping, resuming, rehearsing


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
    random_before, buffers = random_state(), [buffer.clone() for buffer in model.buffers()]
    try:
        with fitting_memory():
            kept_free = torch.empty(reserve, dtype=torch.uint8, device=model.wte.weight.device)
            for _ in accumulate(next_loss, batches, autocast):
                pass
            del kept_free
    finally:
        model.zero_grad()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
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


def changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs in the settings of model and training, but for those that a resumed run may change."""
    # A field that came later than the run had its default.
    before = {"model": asdict(LoopedConfig()) | before["model"], "train": asdict(TrainConfig()) | before["train"]}
    return "; ".join(
        f"{name} was {before[part][name]!r} and is now {value!r}"
        for part in before
        for name, value in now[part].items()
        if name not in FREE_ON_RESUME and before[part][name] != value
    )


def refuse_changes(run: Path, stored: dict[str, Any], now: dict[str, Any]):
    """``ValueError`` that lists what differs from the settings the run was trained with."""
    if changed := changes(stored, now):
        raise ValueError(f"{run} cannot go on with other settings ({changed}): give the old ones, or a new run")
    check_same_tokenizer(run_tokenizer(run, stored), tokenizer_from_spec(now["tokenizer"]))


# ----------------------------------------------------------------------------------------------------------------------
# Training


def train(model_config: LoopedConfig, train_config: TrainConfig, *, resume: bool = False) -> TrainResult:
    """Train a model and leave a run on disk.

    `vocab_size` of the model is set by the tokenizer. Ctrl-C and SIGTERM save a checkpoint at the end of the step and
    return. resume: go on with the run called `train_config.name`; on the same machine, thread count and torch the
    result is the uninterrupted one, bit for bit. Raises ValueError or FileNotFoundError for settings and data that
    cannot work, FloatingPointError when the loss or the gradient stops being finite.
    """
    config = train_config
    with ExitStack() as cleanup:
        rank, n_processes = cleanup.enter_context(processes())
        cleanup.enter_context(fitting_memory())
        say = print if rank == 0 else lambda *_, **__: None

        # -- where and how --
        device, device_reason = pick_device(config.device)
        dtype, dtype_reason = pick_dtype(device, config.dtype)
        autocast = partial(torch.autocast, device.type, dtype=dtype, enabled=dtype != torch.float32)
        if config.threads is not None:
            cleanup.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.threads)
        machine = dict(
            torch=str(torch.__version__),
            device=device.type,
            dtype=str(dtype),
            threads=torch.get_num_threads(),
            processes=n_processes,
            compile=config.compile,
        )
        say(f"device   {device.type}: {device_reason}")
        say(f"dtype    {str(dtype).removeprefix('torch.')}: {dtype_reason}")
        say(f"threads  {machine['threads']}" + (f" in each of {n_processes} processes" if n_processes > 1 else ""))
        peak = config.peak_tflops or (peak_tflops(torch.cuda.get_device_name()) if device.type == "cuda" else None)

        # -- data, model, optimizer --
        corpus = load_corpus(config.data, config.tokenizer)
        model_config = replace(model_config, vocab_size=corpus.tokenizer.vocab_size)
        draw = partial(
            BatchStream,
            batch_size=config.batch_size,
            block_size=model_config.block_size,
            seed=config.seed,
            rank=rank,
            world_size=n_processes,
        )
        stream, tokens_sha256 = draw(corpus.train), digest(corpus.train)
        if config.eval_every and len(corpus.val) <= model_config.block_size:
            raise ValueError(
                f"one window takes block_size + 1 = {model_config.block_size + 1} tokens, but the validation split of "
                f"{corpus.name} has {len(corpus.val)}: prepare the text with a larger --val-fraction, use a smaller "
                "block_size, or set eval_every=0"
            )
        eval_batches = list(islice(draw(corpus.val), config.eval_batches)) if config.eval_every else []
        opening = corpus.tokenizer.decode(corpus.val[:64])
        prompt = opening[:1]  # of the samples on the way
        torch.manual_seed(config.seed)
        random.seed(config.seed)
        model = LoopedGPT(model_config).to(device)
        optimizer = model.configure_optimizer(
            config.lr, config.weight_decay, betas=(float(config.beta1), float(config.beta2)), optimizer=config.optimizer
        )
        n_segments = len(model_config.segments())
        step_per_segment = n_segments > 1 and config.step_per_segment is not False
        tokens_per_step = config.batch_size * config.grad_accum * model_config.block_size
        say(f"data     {corpus.name}: {len(corpus.train):,} tokens to train on, {len(corpus.val):,} to validate on")
        fewer = config.n_loop_sampling != "fixed"
        say(
            f"model    {model_config.n_layer} blocks x {'1 to ' * fewer}{model_config.n_loop} loops, "
            f"{model.num_params():,} parameters, rule {model_config.rule}, "
            f"{model.flops_per_token() / 1e6:,.1f} MFLOP per token" + " at most" * fewer
        )
        say(
            f"batch    {config.batch_size * config.grad_accum} sequences x {model_config.block_size} = "
            f"{tokens_per_step:,} tokens per step"
            + (f", {'up to ' * fewer}{n_segments} updates each" if step_per_segment else "")
        )

        if (epochs := config.max_steps * tokens_per_step / len(corpus.train)) > 10:
            say(f"notice   {epochs:,.0f} times over the training data: use a longer text, or a smaller max_steps")

        # -- go on with an old run --
        step = updates = 0
        seconds, history, last_good = 0.0, [], None
        settings = {"model": asdict(model_config), "train": asdict(config), "tokenizer": corpus.tokenizer.spec()}
        if resume:
            run = find_run(config.name, config.runs)
            if rank == 0:
                cleanup.enter_context(only_writer(run))
            stored = read_config(run)
            refuse_changes(run, stored, settings)
            last_good, step, weights, state = load_checkpoint(run)
            if step >= config.max_steps:
                raise ValueError(f"{run} has done its {step} steps: give a larger max_steps to go on")
            with restoring(last_good):
                n_tokens, its_sha256 = int(state["n_tokens"]), str(state["tokens_sha256"])
                updates, seconds = int(state["updates"]), float(state["seconds"])
                its_machine = {key: type(now)(state["machine"][key]) for key, now in machine.items()}
                edited = changes(json.loads(json.dumps(state.get("settings", stored))), settings)
            if edited:
                raise ValueError(f"{run / 'config.json'} is not that of {last_good.name} ({edited}): restore it")
            if n_tokens != len(corpus.train):
                raise ValueError(
                    f"{run} was trained on {n_tokens} tokens, {config.data!r} now has {len(corpus.train)}: "
                    "bring the old data back, or start a new run"
                )
            if its_sha256 != tokens_sha256:
                raise ValueError(
                    f"{run} was trained on other tokens than {config.data!r} now has: bring the old data back, or "
                    "start a new run"
                )
            with restoring(last_good):
                model.load_state_dict(weights)
                load_optimizer(optimizer, state["optimizer"])
                stream.load_state_dict(state["stream"])
                set_random_state(state["random"])
            history = [row for row in read_log(run / "log.csv") if row["step"] <= step]
            say(f"resume   {last_good}")
            before = replace(config, max_steps=stored["train"]["max_steps"])
            if config.max_steps != before.max_steps:
                say(
                    f"notice   max_steps was {before.max_steps}, now {config.max_steps}: the next step has learning "
                    f"rate {learning_rate(step, config):.3g}, the last one had {learning_rate(step - 1, before):.3g}"
                )
            for key, now in machine.items():
                if its_machine[key] != now:
                    say(f"notice   {key} was {its_machine[key]}, now {now}: not the bits of an uninterrupted run")

        # -- compile and rehearse --
        next_loss = NextLoss(model).parallel()
        do_step = partial(
            train_step,
            next_loss,
            optimizer,
            autocast=autocast,
            step_per_segment=step_per_segment,
            grad_clip=config.grad_clip,
        )
        eager = nullcontext
        if config.compile:
            eager = partial(torch.compiler.set_stance, "force_eager")
            for block in model.blocks:
                block.compile()  # in place: the names in the state dict stay as they are

        def rehearsal(batch_size: int):
            batch = next(draw(corpus.train, batch_size=batch_size))
            grad_accum = config.grad_accum * config.batch_size // batch_size
            moments = 0 if resume else 8 * model.num_params()  # two of float32, with the first update
            rehearse(next_loss, [batch] * micro_batches_of_peak(model_config, grad_accum), autocast, moments)

        try:
            config = fit_micro_batch(config, rehearsal, say)
        except Exception as error:
            if not config.compile or isinstance(error, MemoryError):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".partition("\n\n")[0].split())
            say(f"compile  failed, going on without it ({reason})")
            cleanup.enter_context(eager())
            config = fit_micro_batch(config, rehearsal, say)
        with eager():
            window = next(draw(corpus.train))[0][:1].to(device)
            say(f"kernel   attention: {attention_kernel(model, window, autocast)}")
        stream.batch_size = config.batch_size
        settings["train"] = asdict(config)

        # -- the folder --
        if not resume:
            run = new_run(config.runs, config.name) if rank == 0 else Path(config.runs) / config.name
            if rank == 0:
                cleanup.enter_context(only_writer(run))
        if rank == 0:
            write_config(run, settings)
            write_log(run / "log.csv", history)
        say(f"run      {run}")

        # -- the loop --
        def save() -> Path | None:
            state = dict(
                optimizer=optimizer.state_dict(),
                stream=stream.state_dict(),
                random=random_state(),
                updates=updates,
                seconds=seconds,
                n_tokens=len(corpus.train),
                tokens_sha256=tokens_sha256,
                machine=machine,
                settings=settings,
            )
            return save_checkpoint(run, step, model.state_dict(), state) if rank == 0 else None

        def due(every: int) -> bool:
            return every > 0 and step % every == 0

        finished = stopped = False
        first_step, first_second, flops = step, seconds, 0
        progress_bar = tqdm if rank == 0 else partial(tqdm, disable=True)
        with StopSignal() as stop, progress_bar(total=config.max_steps, initial=step, unit="step") as bar:
            while not (finished or stopped):
                started = time.perf_counter()
                batches = [next(stream) for _ in range(config.grad_accum)]
                lr = learning_rate(step, config)
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]
                n_loop = loops_of_step(step, model_config.n_loop, config)
                try:
                    loss, norm, n_updates = do_step(batches, n_loop=n_loop)
                except FloatingPointError as error:
                    with eager():
                        rms = ", ".join(f"{value:.3g}" for value in loop_rms(model, batches[0][0].to(device)))
                    raise FloatingPointError(
                        f"step {step + 1} stopped before {error}, at learning rate {lr:.3g}; RMS of the stream "
                        f"after each loop: {rms}. Last good checkpoint: {last_good or 'none yet'}. "
                        "Try a lower lr, or another rule"
                    ) from error
                step, updates = step + 1, updates + n_updates
                seconds += time.perf_counter() - started
                flops += tokens_per_step * model.flops_per_token(n_loop=n_loop)

                finished = step == config.max_steps
                stopped = not finished and bool(sum_over_processes(torch.tensor(int(stop.asked))))
                val_loss = None
                if due(config.eval_every) and not finished:
                    with eager():
                        val_loss = evaluate(model, eval_batches)
                    if rank == 0:
                        bar.write(f"step {step}: validation loss about {val_loss:.3f}")
                if due(config.sample_every) and not finished and rank == 0:
                    with eager():
                        bar.write(sample(model, corpus.tokenizer, prompt, max_new_tokens=200, seed=config.seed) + "\n")
                if due(config.log_every) or val_loss is not None or finished:
                    row = dict(
                        step=step,
                        loss=loss,
                        val_loss=val_loss,
                        lr=lr,
                        grad_norm=norm,
                        updates=updates,
                        tokens=step * tokens_per_step,
                        seconds=round(seconds, 3),
                    )
                    history.append(row)
                    if rank == 0:
                        write_log(run / "log.csv", [row], mode="a")
                if due(config.save_every) or finished or stopped:
                    last_good = save()
                speed = (step - first_step) * tokens_per_step / (seconds - first_second)
                progress = {"loss": f"{loss:.3f}", "tokens/s": f"{speed:,.0f}"}
                if peak is not None:
                    used = flops / (seconds - first_second) / (n_processes * peak * 1e12)
                    progress["MFU"] = f"{used:.1%}"
                bar.set_postfix(progress, refresh=False)
                bar.update()

        # -- the end --
        model.eval()
        if peak is not None:
            say(f"speed    {speed:,.0f} tokens/s, MFU {used:.1%} of {n_processes} x {peak:g} TFLOP/s")
        go_on = f"{shell_command()} train --resume {shlex.quote(str(run))}"
        if stopped:
            say(f"Stopped after step {step} of {config.max_steps}; saved {last_good}. To go on:\n    {go_on}")
            return TrainResult(model, corpus.tokenizer, run, step, history, val_loss=None)
        with eager():
            windows = eval_windows(corpus.val, model_config.block_size, config.batch_size)
            val_loss = evaluate(model, islice(windows, rank, None, n_processes))
            if rank == 0:
                publish_weights(run, last_good)
                plot_losses(history, val_loss, run / "loss.png")
            if rank == 0 and config.sample_every:
                say(f"\nA sample:\n{sample(model, corpus.tokenizer, prompt, seed=config.seed)}\n")
        example = " ".join(opening.split()[1:3]) or prompt  # the first word may be cut
        unit = "character" if corpus.tokenizer.name == "char" else "token"
        say(f"Saved model.safetensors, log.csv and loss.png in {run}. To train longer, or to sample:")
        say(f"    {go_on} --max-steps {2 * config.max_steps}")
        say(f"    {shell_command()} sample {shlex.quote(str(run))} --prompt {shlex.quote(example)}")
        say(f"Over the whole validation split ({len(corpus.val):,} tokens), in nats per {unit}:")
        say(f"validation loss {val_loss:.3f}")
        return TrainResult(model, corpus.tokenizer, run, step, history, val_loss)
