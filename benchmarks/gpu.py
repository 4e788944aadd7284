"""All that the chapters need from a GPU, in steps: python benchmarks/gpu.py

    python benchmarks/gpu.py --list          # the steps, how long each may take, what of it is done
    python benchmarks/gpu.py                 # all of them, in order, each for nine minutes at most
    python benchmarks/gpu.py lr loom         # or some, by name
    python benchmarks/gpu.py --toy           # a rehearsal at toy size on the CPU, in a folder of its own

Every step writes data/results/gpu/STEP.json run by run, and goes on where it was: call the script again until --list
has nothing missing. On an 80 GB card `--minutes 5` should bring the first seed of the six training steps in 20 to 25
minutes, then the measurements, and later calls the rest. A 16 GB card takes the same command and more calls: the
training steps need 6 GB at most by `plan.memory`, a micro-batch of the presets is halved until it fits, and what cannot
fit at all is a row that says "out of memory". Give another card another folder with --out: no row of training is made
twice. With a quarter of an hour in all, begin with what tells most:

    python benchmarks/gpu.py eager compiled lr loom --minutes 3.5

The losses are meant for all 38 plays of Shakespeare:

    python data/make_shakespeare.py all_plays.txt
    minilooped prepare all_plays.txt
    python benchmarks/gpu.py --data prepared/all_plays

Without --data it is the embedded nine plays, of which 300 steps are two and a half passes.

The protocol was written down before any run. No run has been made on a GPU yet: the minutes are estimates for an H100.
The small models of the training steps are bound by the launch of their kernels, so those minutes count operations, at 7
microseconds each; the measurements count products, at a third of the card's best, and half a minute to compile a graph.

Training (steps lr to compute). Width 384, 6 heads of 64, windows of 256 tokens in batches of 32, SwiGLU,
init_std = width^(-1/2). 300 steps of AdamW (0.9, 0.95), weight decay 0.1, clipping at 1; a tenth of the steps warm-up,
flat, the last third down in a line to a tenth. bfloat16 products, float32 weights, not compiled. Losses in nats per
token over every fourth batch of validation windows, in float32. Seeds 1 and 2, the first one complete before the other
begins; seeds see the same batches in every arm. Learning rates by factors of two. Where the first seed's best one lies
at an edge of the grid, the grid goes on beyond it, by two factors at most. What is reported is the mean over seeds at
the best learning rate and the difference seed by seed. Two seeds show a difference when it has one sign and is larger
than the seeds differ among themselves; anything else is "not visible".

    lr         `inverse` and `sqrt`, 4 blocks in N = 1, 2, 4, 8 loops. By how many octaves does the best learning rate
               at N = 8 differ from that at N = 1 (`sweep.shift`)? Less than half an octave is none. Is the best loss of
               `inverse` at N = 8 below that of `sqrt` (P1-f: by 0.025)?
    loom       Every part of LOOM, 30 + 2 experts of which a token visits 6 + 2, 2 blocks in H = 1, 3, 6, 9 loops, an
               update for every 3 loops, against the naive loop with the same experts: rule `none`, one router, no
               re-injection, looping residual or norm at a loop's end, ordinary backprop. Does the naive loop get worse
               with H, or diverge, and LOOM not? Does its stream grow (P3-a: a mean square above 1000 from H = 6 on)?
               Recorded: the loss of every step, ten times on the way the mean square of the stream (`end_variance`).
    routers    LOOM at H = 9 with ordinary backprop, a router for each loop (equal at the start) or one for all. Do the
               loops of one router choose the same experts (P3-b: load cosine above 0.98), and do own routers lower the
               loss? Recorded: `probes.agreement` on 2,048 tokens, as `Agreement.stored`.
    deeploop   4 blocks in R = 1, 3 rounds, a head of its own, the embedding normed: `none` (pre-norm), `deepnorm`,
               `deeploop`. Is `deeploop` level with `none` at R = 1 and below it at R = 3 (published: +0.0004, -0.016)?
    moe        Experts traded for loops (P3-h): LOOM with ordinary backprop, 2 blocks, 32 experts, N = 1, 2, 3, 4, 6
               loops with 25, 11, 7, 4, 2 experts for a token, and as many steps as make the operations equal to those
               of 300 steps at N = 1. Same weights but for routers. Which N is best, and by more than the seeds differ?
    compute    `inverse`, 4 blocks in N = 1, 2, 4, 8 loops. A budget C is steps times loops, C = 600, 1200, 2400, so
               that all N take the same operations: at C = 2400 one loop sees 19.7 million tokens, eight see 2.5. Which
               N is best at each budget, and does it grow with the budget? A fit needs an optimum inside the Ns at two
               budgets or more; without that there is none.

Measurements (eager, compiled, memory). The GPT-2-scale presets with random tokens of GPT-2's vocabulary.

    eager      Tokens per second and MFU (over the executed depth, of the peak in `PEAK_TFLOPS`) of gpt2-small (at
    compiled   N = 3: gpt2-small-loop), its deeploop and 4x3 kin and loom-small, for N = 1, 3, 7. Steps of 4 micro-
               batches and an update, the median of three after two that warm up; with the 30 of the preset the update
               weighs less. compiled: by torch.compile, block by block; the seconds by which the first step is longer
               are its compile seconds (caches off). Do they grow with N? By construction they should not.
    memory     Most bytes allocated in two training steps and an evaluation of a micro-batch of 4 windows, H = 3, 6, 9,
               12: ordinary backprop, 3 loops in a segment, `recompute_loops`, and both; beside the estimate of
               `plan.memory`. Is the estimate within 15 %? With cuts, does the peak stop growing with H?

Every run has "outcome" (ok, diverged, out of memory, or why it did not compile), the seconds it took and the most bytes
allocated; one of training also val_loss, Infinity where there is none, steps, tokens, parameters, operations to train
on a token, and the card. `records.gpu_results` reads all steps of a folder. Mixtures of experts have a fast kernel on
cards of compute capability 9 and 10 (H100, B200) only; elsewhere they are several times slower.
"""

import gc
import math
import os
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from minilooped.data import digest, load_corpus
from minilooped.engine.machine import attention_kernel, peak_tflops, pick_device, pick_dtype, pick_machine
from minilooped.engine.memory import fitting_memory
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.presets import LOOM_PARTS, PRESETS
from minilooped.science import probes
from minilooped.science.records import RESULTS, gpu_results, record
from minilooped.science.sweep import LanguageModel, Trial
from minilooped.tools import plan
from minilooped.train import (
    NextLoss,
    TrainConfig,
    evaluate,
    fit_micro_batch,
    micro_batches_of_peak,
    rehearse,
    training_steps,
)

Name = Literal["lr", "loom", "routers", "deeploop", "moe", "compute", "eager", "compiled", "memory"]
GPU_RESULTS, TOY_RESULTS = RESULTS / "gpu", Path("runs") / "gpu-toy"

# -- the grids ---------------------------------------------------------------------------------------------------------

SEEDS = (1, 2)
LOOPS, HEIGHTS, ROUNDS = (1, 2, 4, 8), (1, 3, 6, 9), (1, 3)
LRS, FEW_LRS = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), (1e-3, 2e-3, 4e-3)
BUDGETS = (600, 1200, 2400)  # steps * loops
TRADES = {1: 25, 2: 11, 3: 7, 4: 4, 6: 2}  # loops: experts that a token visits in each
FOUR = ("gpt2-small", "gpt2-small-deeploop", "gpt2-small-4x3", "loom-small")
SPEEDS = tuple((preset, n) for n, preset in product((3, 1, 7), FOUR))  # where time is up, each preset has been seen
WAYS = {
    "ordinary backprop": dict(segment=None),
    "segments": dict(segment=3),
    "recomputed loops": dict(segment=None, recompute_loops=True),
    "segments, recomputed": dict(segment=3, recompute_loops=True),
}
MEMORY = tuple(product(("gpt2-small-loop", "loom-small"), (3, 6, 9, 12), WAYS))

SHAPE = dict(block_size=256, n_head=6, n_embd=384, init_std=384**-0.5)
DENSE = LoopedConfig(**SHAPE, n_layer=4)
LOOM = replace(LOOM_PARTS, **SHAPE, n_layer=2)
NAIVE = replace(
    LOOM,
    rule="none",
    embed_norm=True,
    router="shared",
    reinject=False,
    loop_residual=None,
    loop_end_norm=False,
    moe_out_norm=False,
    segment=None,
)
STEPS, MICRO_BATCHES, REPEATS, WINDOWS = 300, 4, 3, 4


@dataclass(frozen=True)
class Options:
    steps: tyro.conf.Positional[tuple[Name, ...]] = ()  # which; none: all, in order
    minutes: float = 9  # a step begins no further run after so long
    toy: bool = False  # toy size, on the CPU
    data: str = "shakespeare"  # what to train on: the embedded text, or a folder made by `minilooped prepare`
    out: Path | None = None  # folder for the results; None: data/results/gpu, of a rehearsal runs/gpu-toy
    list: bool = False  # show the steps, and run none


# -- what does not fit -------------------------------------------------------------------------------------------------


def attempt(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """What `work` returns, with the outcome "ok" unless it names another; "out of memory" where it does not fit."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began, outcome = time.perf_counter(), "ok"
    try:
        with fitting_memory():
            found = work() or {}
    except MemoryError:
        found, outcome = {}, "out of memory"
    # Only here, where no exception holds them, the tensors of a run that failed can go.
    seconds, peak = time.perf_counter() - began, None
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        gc.collect()
        torch.cuda.empty_cache()
    return dict(outcome=outcome, seconds=round(seconds, 2), peak_bytes=peak) | found


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Training runs: every arm at every loop count, learning rate and seed."""

    minutes: float  # an estimate, on an H100
    arms: tuple[str, ...]
    n_loops: tuple[int, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    task: Callable[[str, int], LanguageModel]  # of an arm at a loop count
    watch: Literal["stream", "experts"] | None = None  # what is recorded besides the losses
    widen: int = 2  # factors of two by which the grid may grow beyond each of its edges

    def settings(self) -> dict[str, Any]:
        tasks = {f"{arm}, {n} loops": self.task(arm, n) for arm, n in product(self.arms, self.n_loops)}
        corpus = next(iter(tasks.values())).corpus
        # The text counts, not where it lies.
        text = dict(name=corpus.name, tokens=len(corpus.train), sha256=digest(corpus.train))
        unplaced = {name: replace(task, train=replace(task.train, data=corpus.name)) for name, task in tasks.items()}
        return dict(text=text) | {name: asdict(task) for name, task in unplaced.items()}

    def widened(self, arm: str, n_loop: int, rows: list[dict[str, Any]]) -> list[float]:
        """The learning rates of a model: those of the grid, and beyond the edge where the first seed has its best."""
        mine = [row for row in rows if (row["arm"], row["n_loop"], row["seed"]) == (arm, n_loop, self.seeds[0])]
        losses = {row["lr"]: row["val_loss"] for row in mine if row["outcome"] != "out of memory"}
        lrs = sorted({*self.lrs, *losses})
        if losses.keys() >= set(lrs):
            best = min(losses, key=losses.get)
            if best == lrs[0] > self.lrs[0] / 2**self.widen:
                return [best / 2, *lrs]
            if best == lrs[-1] < self.lrs[-1] * 2**self.widen:
                return [*lrs, best * 2]
        return lrs

    def runs(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All runs, seed by seed, as far as what is recorded tells them."""
        models = [(arm, n, self.widened(arm, n, rows)) for arm, n in product(self.arms, self.n_loops)]
        grid = ((arm, n, lr, seed) for seed in self.seeds for arm, n, lrs in models for lr in lrs)
        return [dict(arm=arm, n_loop=n, lr=lr, seed=seed) for arm, n, lr, seed in grid]

    def measure(self, arm: str, n_loop: int, lr: float, seed: int) -> dict[str, Any]:
        task = self.task(arm, n_loop)
        config = of_text(task.model, task, n_loop)
        about = dict(
            gpu=device_name(),
            steps=task.train.max_steps,
            parameters=counted(config)[0],
            flops_per_token=counted(config)[1],
            tokens=plan.training_tokens(config, task.train),
            val_loss=math.inf,
        )
        if not fits(task, n_loop):
            return about | dict(outcome="out of memory")
        return about | attempt(lambda: self.train(task, n_loop, lr, seed))

    def train(self, task: LanguageModel, n_loop: int, lr: float, seed: int) -> dict[str, Any]:
        losses, variances, every = [], [], max(1, task.train.max_steps // 10)
        idx = task.windows[0][0][:8].to(pick_device(task.train.device)[0])  # (8, T)
        found: dict[str, Any] = dict(val_loss=math.inf)
        try:
            for model, loss in task.training(trial(task, n_loop, lr, seed)):
                losses.append(round(loss, 4))
                if self.watch == "stream" and len(losses) % every == 0:
                    variances.append(float(f"{probes.end_variance(model, idx):.5g}"))
            loss = evaluate(model, task.windows)
            found = dict(val_loss=round(loss, 5)) if math.isfinite(loss) else dict(outcome="diverged")
        except FloatingPointError:
            found = dict(outcome="diverged")
        if self.watch == "stream":
            found |= dict(losses=losses, variances=variances, every=every)
        elif self.watch == "experts" and "outcome" not in found:
            found |= dict(agreement=probes.agreement(model, idx).stored())
        return found


def trial(task: LanguageModel, n_loop: int, lr: float, seed: int) -> Trial:
    return Trial(task.model.rule, task.model.n_layer, n_loop, lr, seed)


def of_text(config: LoopedConfig, task: LanguageModel, n_loop: int) -> LoopedConfig:
    return replace(config, n_loop=n_loop, vocab_size=task.corpus.tokenizer.vocab_size)


def counted(config: LoopedConfig) -> tuple[int, int]:
    """Parameters, and the operations to train on a token."""
    with torch.device("meta"):
        model = LoopedGPT(config)
    return model.num_params(), model.flops_per_token()


@cache
def fits(task: LanguageModel, n_loop: int) -> bool:
    """Whether a step and an evaluation of this shape fit: a dry run, once for all its learning rates and seeds."""

    def dry_run() -> None:
        with suppress(FloatingPointError):  # the run itself will say so
            for model, _ in islice(task.training(trial(task, n_loop, lr=1e-6, seed=0)), 1):
                evaluate(model, task.windows[:1])

    return attempt(dry_run)["outcome"] == "ok"


@dataclass(frozen=True)
class Tasks:
    """What the arms of the steps train, by name of the arm and number of loops: a method for each step."""

    data: str
    toy: bool

    def text(self, model: LoopedConfig, steps: int = STEPS) -> LanguageModel:
        """The task that all steps share, for a model and a number of steps."""
        train = TrainConfig(
            data=self.data,
            max_steps=steps,
            batch_size=32,
            schedule="wsd",
            warmup_steps=steps // 10,
            decay_steps=steps // 3,
            weight_decay=0.1,
        )
        if not self.toy:
            return LanguageModel(model, train, eval_every_nth=4)
        inner = model.n_inner and 8
        model = replace(model, block_size=8, n_head=2, n_embd=16, n_layer=1, init_std=0.25, n_inner=inner)
        short = dict(max_steps=max(2, steps // 100), batch_size=2, warmup_steps=1, decay_steps=1)
        return LanguageModel(model, replace(train, device="cpu", dtype="float32", **short), eval_every_nth=3000)

    def rule(self, arm: str, n_loop: int) -> LanguageModel:
        return self.text(replace(DENSE, rule=arm, n_loop=n_loop))

    def loom(self, arm: str, n_loop: int) -> LanguageModel:
        return self.text(replace(LOOM if arm == "loom" else NAIVE, n_loop=n_loop))

    def routers(self, arm: str, n_loop: int) -> LanguageModel:
        return self.text(replace(LOOM, n_loop=n_loop, segment=None, router=arm))

    def deeploop(self, arm: str, n_loop: int) -> LanguageModel:
        return self.text(replace(DENSE, rule=arm, n_loop=n_loop, embed_norm=True, tie_embeddings=False))

    def moe(self, arm: str, n_loop: int) -> LanguageModel:
        """Experts traded for loops: as many steps as make the operations equal to those of STEPS at one loop."""

        def traded(n: int) -> LoopedConfig:
            return replace(LOOM, n_loop=n, segment=None, n_expert=32, n_expert_shared=0, top_k=TRADES[n], n_inner=256)

        def flops(n: int) -> int:
            task = self.text(traded(n))
            return counted(of_text(task.model, task, n))[1]

        return self.text(traded(n_loop), round(STEPS * flops(1) / flops(n_loop)))

    def compute(self, arm: str, n_loop: int) -> LanguageModel:
        """The name of the arm is its budget, steps times loops."""
        return self.text(replace(DENSE, rule="inverse", n_loop=n_loop), int(arm) // n_loop)


def grids(data: str, toy: bool) -> dict[str, Grid]:
    """The steps that train, by name."""
    tasks, budgets = Tasks(data, toy), tuple(map(str, BUDGETS))
    found = dict(
        lr=Grid(8, ("inverse", "sqrt"), LOOPS, LRS, SEEDS, cache(tasks.rule)),
        loom=Grid(8, ("loom", "naive"), HEIGHTS, FEW_LRS, SEEDS, cache(tasks.loom), "stream"),
        routers=Grid(3, ("per_loop", "shared"), (9,), FEW_LRS, SEEDS, cache(tasks.routers), "experts"),
        deeploop=Grid(3, ("none", "deepnorm", "deeploop"), ROUNDS, LRS[:4], SEEDS, cache(tasks.deeploop)),
        moe=Grid(4, ("loom",), tuple(TRADES), FEW_LRS, SEEDS, cache(tasks.moe)),
        compute=Grid(9, budgets, LOOPS, FEW_LRS, SEEDS, cache(tasks.compute)),
    )
    if toy:
        short = dict(lrs=(1e-3,), seeds=(1,), widen=0)
        found = {name: replace(grid, n_loops=grid.n_loops[-1:], **short) for name, grid in found.items()}
        found["lr"] = replace(found["lr"], n_loops=(1, 2), seeds=SEEDS, widen=1)
    return found


# -- measurements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Measurements, a row each, on the device that is here."""

    minutes: float  # an estimate, on an H100
    rows: tuple[dict[str, Any], ...]
    configs: dict[str, Any]  # the presets as they are measured
    measured: Callable[..., dict[str, Any]]

    def settings(self) -> dict[str, Any]:
        return self.configs

    def runs(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [dict(gpu=device_name(), **row) for row in self.rows]

    def measure(self, gpu: str, **run: Any) -> dict[str, Any]:
        return self.measured(**run)


class Bench:
    """A model of random weights on the device, with its optimizer, and random tokens to train it on."""

    def __init__(self, config: LoopedConfig, train: TrainConfig):
        self.config, self.train = config, train
        machine = pick_machine(train.device, train.dtype)
        self.device, self.autocast = machine.device, machine.autocast
        with self.device:  # made there: a CPU draws 300 million weights in seconds
            self.model = LoopedGPT(config)
        self.optimizer = self.model.configure_optimizer(train.lr, train.weight_decay, optimizer=train.optimizer)
        self.next_loss = NextLoss(self.model)

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y, each (size, T)."""
        shape = (2, size, self.config.block_size)
        return tuple(torch.randint(self.config.vocab_size, shape, device=self.device))

    def rehearse(self, batch_size: int) -> None:
        grad_accum = MICRO_BATCHES * self.train.batch_size // batch_size
        batches = [self.batch(batch_size)] * micro_batches_of_peak(self.config, grad_accum)
        rehearse(self.next_loss, batches, self.autocast, 8 * self.model.num_params())

    def seconds_of_a_step(self) -> Iterator[float]:
        """Seconds of one training step after the other, without end."""
        batches = [self.batch(self.train.batch_size) for _ in range(self.train.grad_accum)]
        endless = replace(self.train, max_steps=10**9)
        steps = training_steps(self.model, self.optimizer, cycle(batches), endless, autocast=self.autocast)
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        while True:
            synchronize()
            began = time.perf_counter()
            next(steps)
            synchronize()
            yield time.perf_counter() - began


def speed(config: LoopedConfig, train: TrainConfig, backend: str | None) -> dict[str, Any]:
    """Tokens per second and MFU of training; backend: of torch.compile, None: not compiled."""
    bench = Bench(config, train)
    bench.train = fit_micro_batch(replace(train, grad_accum=MICRO_BATCHES), bench.rehearse)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # of what fits, not of what was tried
    found = dict(kernel=attention_kernel(bench.model, bench.batch(1)[0], bench.autocast))
    if backend is not None:
        torch.compiler.reset()
        for block in bench.model.blocks:
            block.compile(backend=backend)
    try:
        with fitting_memory():
            first, _, *steady = islice(bench.seconds_of_a_step(), 2 + REPEATS)
    except Exception as error:
        if backend is None or isinstance(error, MemoryError):
            raise
        return found | dict(outcome=f"not compiled: {type(error).__name__}: {str(error).splitlines()[0]}")
    seconds = statistics.median(steady)
    tokens = bench.train.batch_size * bench.train.grad_accum * config.block_size
    peak, flops = peak_tflops(device_name()), bench.model.flops_per_token()
    return found | dict(
        batch_size=bench.train.batch_size,
        grad_accum=bench.train.grad_accum,
        parameters=bench.model.num_params(),
        flops_per_token=flops,
        tokens_per_second=tokens / seconds,
        peak_tflops=peak,
        mfu=peak and tokens / seconds * flops / (peak * 1e12),
        compile_seconds=first - seconds if backend else None,
    )


def peak_memory(config: LoopedConfig, train: TrainConfig) -> dict[str, Any]:
    """What `attempt` sees as the peak of two training steps and an evaluation; and the seconds of the second step."""
    bench = Bench(config, train)
    _, step_seconds = islice(bench.seconds_of_a_step(), 2)
    bench.model.eval()
    with torch.no_grad():
        bench.model(*bench.batch(train.batch_size), return_logits=False)
    return dict(step_seconds=step_seconds)


def tables(toy: bool) -> dict[str, Table]:
    def model(preset: str, n_loop: int, **changes: Any) -> LoopedConfig:
        config = replace(PRESETS[preset].model, n_loop=n_loop, **changes)
        if not toy:
            return config
        small = dict(vocab_size=50, block_size=8, n_layer=1, n_head=2, n_embd=16, loss_chunk=8)
        return replace(config, **small, n_inner=config.n_inner and 8)

    def training(preset: str, **changes: Any) -> TrainConfig:
        small = dict(device="cpu", dtype="float32", batch_size=2) if toy else {}
        return replace(PRESETS[preset].train, **changes | small)

    def speed_of(backend: str | None, preset: str, n_loop: int) -> dict[str, Any]:
        return attempt(lambda: speed(model(preset, n_loop), training(preset), backend))

    def memory_of(preset: str, n_loop: int, way: str) -> dict[str, Any]:
        config, train = model(preset, n_loop, **WAYS[way]), training(preset, batch_size=WINDOWS, grad_accum=1)
        dtype, _ = pick_dtype(pick_device(train.device)[0], train.dtype)
        return dict(planned_bytes=plan.memory(config, train, dtype).peak) | attempt(lambda: peak_memory(config, train))

    speeds, memories = SPEEDS, MEMORY
    if toy:  # one dense model, one with experts
        speeds, memories = [("gpt2-small", 3), ("loom-small", 1)], [("loom-small", 6, way) for way in WAYS]
    speeds = tuple(dict(preset=preset, n_loop=n) for preset, n in speeds)
    memories = tuple(dict(preset=preset, n_loop=n, way=way) for preset, n, way in memories)
    configs = {
        preset: dict(model=asdict(model(preset, 1)), train=asdict(training(preset)))
        for preset in dict.fromkeys(run["preset"] for run in (*speeds, *memories))
    }
    return dict(
        eager=Table(3, speeds, configs, partial(speed_of, None)),
        # The toy's backend compiles nothing: it runs what was traced.
        compiled=Table(12, speeds, configs, partial(speed_of, "eager" if toy else "inductor")),
        memory=Table(7, memories, configs | dict(windows=WINDOWS, ways=WAYS), memory_of),
    )


# -- all together ------------------------------------------------------------------------------------------------------


def missing(step: Grid | Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of a step that are not among the recorded rows, in order."""
    return [run for run in step.runs(rows) if not any(run.items() <= row.items() for row in rows)]


def due(step: Grid | Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of them to make next: of one seed, since what it shows may widen the grid of the others."""
    left = missing(step, rows)
    return [run for run in left if run.get("seed") == left[0].get("seed")]


def main(options: Options) -> None:
    if not (options.toy or options.list or torch.cuda.is_available()):
        sys.exit("torch sees no GPU here: run this where there is one, or rehearse at toy size on the CPU with --toy")
    try:
        load_corpus(options.data)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))
    out = options.out or (TOY_RESULTS if options.toy else GPU_RESULTS)
    steps: dict[str, Grid | Table] = grids(options.data, options.toy) | tables(options.toy)

    def rows(name: str) -> list[dict[str, Any]]:
        return ((gpu_results(out) or {}).get(name) or dict(runs=[]))["runs"]

    if options.list:
        print(f"{'step':10}{'minutes':>8}{'recorded':>10}{'missing':>9}   in {out}, on {device_name()}")
        for name, step in steps.items():
            print(f"{name:10}{step.minutes:8g}{len(rows(name)):10}{len(missing(step, rows(name))):9}")
        return

    failed = []
    for name in options.steps or steps:
        step, until = steps[name], time.monotonic() + 60 * options.minutes
        again = ["python", "benchmarks/gpu.py", name, *(["--toy"] if options.toy else [])]
        again += ["--data", options.data] if options.data != Options.data else []
        again += ["--out", str(options.out)] if options.out else []
        try:
            finished, settings = True, step.settings()
            while finished and (now := due(step, rows(name))):
                finished = record(
                    out / f"{name}.json", settings, now, step.measure, made_by=shlex.join(again), until=until
                )
        except Exception as error:  # the other steps need not wait for what is wrong with this one
            if not isinstance(error, ValueError | FileNotFoundError):
                traceback.print_exc()
            print(f"{name}: failed ({error}). What was recorded is kept. To go on: {shlex.join(again)}")
            failed.append(name)
            continue
        where = f"{len(rows(name))} runs in {out / name}.json"
        print(f"{name}: {where}" if finished else f"{name}: time is up, {where}. To go on: {shlex.join(again)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # else a second call measures how fast a cache is
    asked = tyro.cli(Options, description=__doc__)
    if asked.toy:
        torch.set_num_threads(1)
    main(asked)
