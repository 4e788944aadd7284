"""Learning-rate sweeps: grids of short training runs, the best learning rate of each model, and how far it moves.

    trials = grid(rules=["inverse", "sqrt"], n_layers=[2], n_loops=[1, 4], lrs=[1e-3, 2e-3, 4e-3], seeds=[1, 2])
    losses = sweep(trials, Regression(), "sweep.csv")   # goes on where a killed sweep was
    best(*curve(losses, "inverse", 2, 4))               # the learning rate with the lowest loss
    regret(losses, "inverse", (2, 1), (2, 4))           # what it costs to keep that of one loop, seed by seed
    shift(losses, "inverse", (2, 1), (2, 4))            # how many octaves the two lie apart
    transfer(losses, "inverse", (2, 1), (2, 4))         # all three
    table(losses)                                       # of every rule and size, as a pandas table

The result is a dictionary from a trial to its loss, and a tidy CSV file, one line per trial, with its provenance on top
(pandas reads it with ``comment="#"``).
"""

import csv
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property, partial
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from ..data import BatchStream, Corpus, eval_windows, load_corpus
from ..engine.machine import pick_machine
from ..files import make_folder, write_atomically, writing
from ..model import LoopedConfig, LoopedGPT, Row, rms_norm
from ..train import Batch, TrainConfig, build, evaluate, training_steps
from .records import differences, existing, only_user, source
from .stats import interval


@dataclass(frozen=True)
class Trial:
    """One training run of a grid."""

    rule: str  # a row of RULES
    n_layer: int  # unique blocks L
    n_loop: int  # loops N
    lr: float  # peak learning rate
    seed: int  # of weights and batches


Losses = Mapping[Trial, float]  # inf: the run diverged


def grid(
    rules: Iterable[str], n_layers: Iterable[int], n_loops: Iterable[int], lrs: Iterable[float], seeds: Iterable[int]
) -> list[Trial]:
    """Every combination. Seed by seed, so that a sweep cut short is still a grid."""
    return [Trial(*rest, seed) for seed in seeds for rest in product(rules, n_layers, n_loops, lrs)]


# ----------------------------------------------------------------------------------------------------------------------
# A training run without anything around it


def bare_training(
    model_config: LoopedConfig,
    config: TrainConfig,
    batches: Iterator[Batch],
    kind: Callable[[LoopedConfig], LoopedGPT] = LoopedGPT,
) -> Iterator[tuple[LoopedGPT, float]]:
    """A fresh model and its training loss after each step, as `train.train` makes them, and no file, log or sample.

    batches: micro-batches (x, y), (B, T) each, without end. kind: makes the model, where it is to be of another class.
    It is one model all along: look at it before the next step. Raises FloatingPointError when a loss or a gradient
    stops being finite.
    """
    machine = pick_machine(config.device, config.dtype)
    model, optimizer = build(model_config, config, machine.device, kind)
    for step in training_steps(model, optimizer, batches, config, autocast=machine.autocast):
        yield step.model, step.loss


# ----------------------------------------------------------------------------------------------------------------------
# What a trial trains. A task is a function from a trial to a loss, and a dataclass, so that its settings can be stored.


@dataclass(frozen=True)
class LanguageModel:
    """Train a small `LoopedGPT` and return its validation loss in nats per token.

    A trial takes the place of rule, n_layer and n_loop in `model`, and of lr and seed in `train`. The fields of `train`
    about runs, logs and checkpoints are not used: nothing is written.
    """

    model: LoopedConfig
    train: TrainConfig
    eval_every_nth: int = 4  # of the validation windows, so many apart are evaluated

    @cached_property
    def corpus(self) -> Corpus:
        return load_corpus(self.train.data, self.train.tokenizer)

    @cached_property
    def windows(self) -> list[tuple[Tensor, Tensor]]:
        """Validation windows (x, y), each (B, T), the same for every trial."""
        return list(eval_windows(self.corpus.val, self.model.block_size, self.train.batch_size))[:: self.eval_every_nth]

    def training(
        self, trial: Trial, kind: Callable[[LoopedConfig], LoopedGPT] = LoopedGPT
    ) -> Iterator[tuple[LoopedGPT, float]]:
        """`bare_training` of what the trial makes of this task. kind: makes the model."""
        vocab_size = self.corpus.tokenizer.vocab_size
        shape = replace(self.model, rule=trial.rule, n_layer=trial.n_layer, n_loop=trial.n_loop)
        config = replace(shape, vocab_size=vocab_size)
        train = replace(self.train, lr=trial.lr, seed=trial.seed)
        stream = BatchStream(self.corpus.train, train.batch_size, config.block_size, seed=train.seed)
        return bare_training(config, train, stream, kind)

    def trained(self, trial: Trial) -> LoopedGPT:
        """The model at the end of `training`. Raises FloatingPointError for a trial that diverges."""
        ((model, _),) = deque(self.training(trial), maxlen=1)
        return model

    def __call__(self, trial: Trial) -> float:
        try:
            loss = evaluate(self.trained(trial), self.windows)
        except FloatingPointError:
            return math.inf
        return loss if math.isfinite(loss) else math.inf


@dataclass(frozen=True)
class Regression:
    """Fit a random function by a residual MLP in a loop: the smallest model whose best learning rate can move.

    h <- h + branch * W2 relu(W1 rms_norm(h)) with L pairs (W1, W2) in N loops, between a fixed random input map and a
    trained read-out; `branch` is what the trial's rule says, and so is the learning rate of W1 and W2. The target is a
    random two-layer network. Full-batch AdamW. Returns the mean squared error over the target's variance, averaged over
    the last ten steps. Raises ValueError for a rule that does more than scale a branch or a learning rate.
    """

    width: int = 32  # d
    n_input: int = 8
    n_example: int = 256
    steps: int = 150
    decay: bool = True  # the learning rate, in a line to 0. At a constant one the loss is mostly the noise of its steps
    weight_decay: float = 0.0

    def __call__(self, trial: Trial) -> float:
        d, generator = self.width, torch.Generator().manual_seed(trial.seed)
        randn = partial(torch.randn, generator=generator)
        row = LoopedConfig(n_layer=trial.n_layer, n_loop=trial.n_loop, rule=trial.rule).row
        if replace(row, branch=1.0, lr_factor=1.0, eps_factor=1.0, embed_norm=False) != Row():
            raise ValueError(f"rule {trial.rule} does more than scale a branch, and the regression has only that")
        x = randn(self.n_example, self.n_input)
        y = torch.tanh(x @ randn(self.n_input, 16)) @ randn(16, 1)  # (examples, 1)
        y = (y - y.mean()) / y.std()
        h0 = rms_norm(x @ randn(self.n_input, d))  # (examples, d), at RMS 1
        blocks = [(randn(d, 4 * d) * d**-0.5, randn(4 * d, d) * (4 * d) ** -0.5) for _ in range(trial.n_layer)]
        weights, read = [W.requires_grad_() for block in blocks for W in block], torch.zeros(d, 1, requires_grad=True)
        hidden = dict(params=weights, lr=trial.lr * row.lr_factor, eps=1e-8 * row.eps_factor)
        groups: list[dict[str, Any]] = [hidden, dict(params=[read])]
        optimizer = torch.optim.AdamW(groups, lr=trial.lr, weight_decay=self.weight_decay)
        fade = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - self.decay * step / self.steps)

        last: list[float] = []
        for _ in range(self.steps):
            h = h0
            for W1, W2 in blocks * trial.n_loop:
                h = h + row.branch * (torch.relu(rms_norm(h) @ W1) @ W2)
            error = F.mse_loss(rms_norm(h) @ read, y)
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            fade.step()
            last = [*last[-9:], error.item()]
        loss = sum(last) / len(last)
        return loss if math.isfinite(loss) else math.inf


# ----------------------------------------------------------------------------------------------------------------------
# Run a grid


def sweep(
    trials: Sequence[Trial], task: Callable[[Trial], float], path: str | Path | None = None, *, made_by: str = ""
) -> dict[Trial, float]:
    """The loss of each trial, with a progress bar.

    path: a CSV file that takes each result as it comes. Where it exists, its trials are not run again: a sweep that was
    killed goes on, one that is extended runs what is new. Raises ValueError for a file of another task, or of other
    settings of this one, and while another process adds to it; the file stays as it was. made_by: the command, for the
    file's provenance.
    """
    if path is None:
        return {trial: task(trial) for trial in tqdm(dict.fromkeys(trials), unit="run")}
    path = Path(path)
    make_folder(path.parent)
    with only_user(path):
        done = _opened(path, task, made_by)
        for trial in tqdm([trial for trial in dict.fromkeys(trials) if trial not in done], unit="run"):
            done[trial] = task(trial)
            with (
                writing(path, "the results before this one are there, and the same command goes on"),
                open(path, "a", encoding="utf-8", newline="") as file,
            ):
                csv.writer(file, lineterminator="\n").writerow([*asdict(trial).values(), done[trial]])
    return {trial: done[trial] for trial in trials}


def _opened(path: Path, task: Callable[[Trial], float], made_by: str) -> dict[Trial, float]:
    """The losses in the file, which is then there, and without the line that a kill may have cut."""
    head = json.loads(json.dumps({"task": type(task).__name__, "settings": asdict(cast(Any, task))}))
    done: dict[Trial, float] = {}
    if path.exists():
        stored, done = load(path)
        if differing := differences(stored, head):
            raise ValueError(f"{path} holds a sweep with other settings ({differing}): give another file")
        head = stored
    else:
        head |= source(path, made_by)
    text = _as_text(head, done)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)
    return done


COLUMNS = [*(field.name for field in fields(Trial)), "loss"]


def load(path: str | Path) -> tuple[dict[str, Any], dict[Trial, float]]:
    """The provenance and the losses in a file that `sweep` wrote; a line that a kill cut short is left out.

    ``FileNotFoundError`` if there is no such file, ``ValueError`` with the line if it is no sweep.
    """
    path = existing(path)
    try:
        with open(path, encoding="utf-8", newline="") as file:
            head, *lines = file.read().splitlines(keepends=True) or [""]
        about = json.loads(head.removeprefix("#"))
        if not isinstance(about, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8, too
        raise ValueError(
            f"{path} is not a sweep ({error}): its first line must be # and the provenance as JSON. Give another file"
        ) from error
    rows = csv.reader(line for line in lines if line.endswith("\n"))
    if next(rows, COLUMNS) != COLUMNS:
        raise ValueError(f"{path}, line 2 must be {','.join(COLUMNS)}: put it in, or give another file")
    losses = {}
    try:
        for rule, n_layer, n_loop, lr, seed, loss in rows:
            losses[Trial(rule, int(n_layer), int(n_loop), float(lr), int(seed))] = float(loss)
    except (ValueError, csv.Error) as error:
        raise ValueError(
            f"{path}, line {rows.line_num + 1} is no trial ({error}): take the line out, or give another file"
        ) from error
    return about, losses


def _as_text(head: Mapping[str, Any], losses: Losses) -> str:
    text = StringIO(newline="")
    text.write(f"# {json.dumps(head)}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([*asdict(trial).values(), loss] for trial, loss in losses.items())
    return text.getvalue()


def tuned(loss: Callable[[float], float], lrs: Sequence[float], start: float) -> float:
    """The learning rate that is better than both its neighbours in `lrs`, rising: downhill from `start`, one of them.

    loss: of a run at a learning rate, with a seed that is not counted afterwards. It is called once for each learning
    rate that is tried. Raises ValueError where the way leads to an end of `lrs`: the best may lie beyond.
    """
    loss, i = cache(loss), lrs.index(start)
    while 0 < i < len(lrs) - 1:
        lowest = min((i, i - 1, i + 1), key=lambda k: loss(lrs[k]))  # a tie stays where it is
        if lowest == i:
            return lrs[i]
        i = lowest
    raise ValueError(f"the best learning rate is {lrs[i]:g} or beyond it, at the end of those given: give more of them")


# ----------------------------------------------------------------------------------------------------------------------
# Read a grid


def curve(losses: Losses, rule: str, n_layer: int, n_loop: int) -> tuple[list[float], Tensor]:
    """Learning rates (K,), rising, and the losses of one model at them, (S, K), a row for each of the S seeds.

    Raises ValueError where the sweep has no such model, or not every seed at every learning rate.
    """
    own = {
        (t.seed, t.lr): loss for t, loss in losses.items() if (t.rule, t.n_layer, t.n_loop) == (rule, n_layer, n_loop)
    }
    seeds, lrs = sorted({seed for seed, _ in own}), sorted({lr for _, lr in own})
    if not own or len(own) != len(seeds) * len(lrs):
        raise ValueError(f"the sweep has no whole grid of learning rates and seeds for {rule}, {n_layer} x {n_loop}")
    return lrs, torch.tensor([[own[seed, lr] for lr in lrs] for seed in seeds], dtype=torch.float64)


class Best(NamedTuple):
    """The best learning rate of one curve."""

    lr: float  # the lowest point of a parabola through the grid's best and its neighbours, or the grid's best
    loss: float  # at the grid's best
    inside: bool  # whether the grid goes on to both sides of its best; if not, the optimum may lie outside


def best(lrs: Sequence[float], losses: Tensor) -> Best:
    """Where losses (K,), or the mean over seeds of (S, K), are lowest over learning rates (K,), rising.

    The parabola is over log2 of the learning rate. It is not drawn where a neighbour is missing or diverged.
    """
    mean = losses if losses.ndim == 1 else losses.mean(0)
    i = int(mean.argmin())
    if not math.isfinite(mean[i]):
        raise ValueError("every learning rate diverged: there is no best one")
    inside = 0 < i < len(lrs) - 1
    lr = lrs[i]
    if inside and mean[i - 1 : i + 2].isfinite().all():
        (left, at, right), (x0, x1, x2) = mean[i - 1 : i + 2].tolist(), [math.log2(lr) for lr in lrs[i - 1 : i + 2]]
        rise, fall = (right - at) / (x2 - x1), (at - left) / (x1 - x0)  # the two slopes; fall <= 0 <= rise
        if rise > fall:
            curvature = (rise - fall) / (x2 - x0)
            lr = 2 ** ((x0 + x1) / 2 - fall / (2 * curvature))
    return Best(lr, mean[i].item(), inside)


def _paired(
    losses: Losses, rule: str, start: tuple[int, int], end: tuple[int, int]
) -> list[tuple[list[float], Tensor]]:
    """The curves of two models, each (n_layer, n_loop), whose rows belong to the same seeds."""
    seeds = [{t.seed for t in losses if (t.rule, t.n_layer, t.n_loop) == (rule, *model)} for model in (start, end)]
    if seeds[0] != seeds[1]:
        raise ValueError(f"{rule} was not swept with the same seeds at {start} and {end}: nothing to pair")
    return [curve(losses, rule, *model) for model in (start, end)]


def regret(losses: Losses, rule: str, start: tuple[int, int], end: tuple[int, int]) -> Tensor:
    """What it costs model `end` to keep the learning rate that is best for model `start`, a value per seed, (S,).

    It is the loss of `end` at that learning rate less its loss at its own best, in the unit of the losses. Either best
    is the grid's, of the mean over seeds. So the mean over seeds is never negative, and it is 0 in each seed where the
    two models have one best learning rate. Models: (n_layer, n_loop). Raises ValueError where `curve` does, for models
    that were not trained with the same seeds, and where `end` was not trained at that learning rate.
    """
    (lrs_start, first), (lrs_end, second) = _paired(losses, rule, start, end)
    kept = lrs_start[int(first.mean(0).argmin())]
    if kept not in lrs_end:
        raise ValueError(f"{rule} was not swept at {kept:g}, the best of {start}, at {end}: add it to the grid")
    kept, own = lrs_end.index(kept), int(second.mean(0).argmin())
    return second[:, kept] - second[:, own] if kept != own else torch.zeros(len(second), dtype=torch.float64)


def octaves(losses: Losses, rule: str, start: tuple[int, int], end: tuple[int, int]) -> Tensor:
    """How far the best learning rate moves from model `start` to model `end`, a value per seed, (S,), in octaves.

    Of each seed's own curves, by `best`. Models: (n_layer, n_loop). Raises ValueError where `curve` does, and for
    models that were not trained with the same seeds.
    """
    (lrs_start, first), (lrs_end, second) = _paired(losses, rule, start, end)
    moved = [
        math.log2(best(lrs_end, after).lr / best(lrs_start, before).lr)
        for before, after in zip(first, second, strict=True)
    ]
    return torch.tensor(moved, dtype=torch.float64)


class Shift(NamedTuple):
    """How far the best learning rate moves from one model to another, in octaves (factors of two)."""

    octaves: float  # mean over seeds
    low: float  # the ends of its 95 % interval by Student's t; without any for a single seed, and then NaN
    high: float

    def __str__(self) -> str:
        mean, low, high = (f"{round(x, 1) + 0.0:+.1f}" for x in self)
        return f"{mean} ({low} to {high})" if math.isfinite(self.low) else f"{mean} (one seed)"


def shift(losses: Losses, rule: str, start: tuple[int, int], end: tuple[int, int]) -> Shift:
    """Mean over seeds of `octaves`, and its interval. Raises ValueError where `octaves` does."""
    moved = octaves(losses, rule, start, end)
    mean, half = interval(moved) if len(moved) > 1 else (moved.item(), math.nan)
    return Shift(mean, mean - half, mean + half)


class Transfer(NamedTuple):
    """A model of a sweep beside another one: does one learning rate serve both?"""

    rule: str
    n_layer: int
    n_loop: int
    best: Best
    regret: tuple[float, float]  # mean over seeds, and half of its 95 % interval; NaN for a single seed
    moved: Shift

    @property
    def cost(self) -> str:
        """The regret as text."""
        mean, half = self.regret
        if mean == half == 0:
            return "0, same rate"
        if not math.isfinite(mean):
            return "it diverges"
        return f"{mean:.3f}" + (f" ± {half:.3f}" if math.isfinite(half) else " (one seed)")


def transfer(losses: Losses, rule: str, start: tuple[int, int], end: tuple[int, int]) -> Transfer:
    """What the best rate of model `start` costs `end`, each (n_layer, n_loop). Raises ValueError as `regret` does."""
    cost = regret(losses, rule, start, end)
    found = interval(cost) if len(cost) > 1 else (cost.item(), math.nan)
    return Transfer(rule, *end, best(*curve(losses, rule, *end)), found, shift(losses, rule, start, end))


def table(losses: Losses, start: tuple[int, int] | None = None) -> pd.DataFrame:
    """What each model of a sweep pays for the best learning rate of model `start`, and how far its own best is from it.

    A row for each rule and each model (n_layer, n_loop) but `start`, with its lowest loss, its best learning rate, what
    it costs to keep that of `start`, as `Transfer.cost`, and the octaves, as `Shift`. start: the smallest model where
    none is given.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for rule in dict.fromkeys(trial.rule for trial in losses):
        smallest = start or sizes(losses, rule)[0]
        for found in (transfer(losses, rule, smallest, model) for model in sizes(losses, rule) if model != smallest):
            rows[rule, f"{found.n_layer} x {found.n_loop}"] = {
                "lowest loss": f"{found.best.loss:.4f}",
                "best rate": f"{found.best.lr:.2g}",
                f"cost of keeping that of {smallest[0]} x {smallest[1]}": found.cost,
                "octaves": str(found.moved),
            }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index=["rule", "L x N"])


def sizes(losses: Losses, rule: str) -> list[tuple[int, int]]:
    """The models (n_layer, n_loop) of a rule, from the smallest on."""
    return sorted({(trial.n_layer, trial.n_loop) for trial in losses if trial.rule == rule})
