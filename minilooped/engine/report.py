"""The lines that a run prints at its start and at its end, and how fast it is."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from ..data import Corpus
from ..model import LoopedGPT
from .checkpoint import shell_command
from .log import LogRow
from .machine import Machine


def machine_lines(machine: Machine, n_processes: int) -> list[str]:
    """Where and how the run computes, and why."""
    processes = f" in each of {n_processes} processes" if n_processes > 1 else ""
    return [
        f"device   {machine.device.type}: {machine.device_reason}",
        f"dtype    {str(machine.dtype).removeprefix('torch.')}: {machine.dtype_reason}",
        f"threads  {torch.get_num_threads()}{processes}",
    ]


def size_lines(model: LoopedGPT, corpus: Corpus, sequences: int, *, drawn: bool, every_segment: bool) -> list[str]:
    """How large data, model and step are.

    sequences: of a step. drawn: whether each step draws its loop count. every_segment: whether each of the model's
    segments ends with an update.
    """
    c, n_segments = model.config, len(model.config.segments())
    updates = f", {'up to ' * drawn}{n_segments} updates each" if every_segment else ""
    return [
        f"data     {corpus.name}: {len(corpus.train):,} tokens to train on, {len(corpus.val):,} to validate on",
        f"model    {c.n_layer} blocks x {'1 to ' * drawn}{c.n_loop} loops, {model.num_params():,} parameters, "
        f"rule {c.rule}, {model.flops_per_token() / 1e6:,.1f} MFLOP per token" + " at most" * drawn,
        f"batch    {sequences} sequences x {c.block_size} = {sequences * c.block_size:,} tokens per step{updates}",
    ]


def go_on(run: Path, max_steps: int | None = None) -> str:
    """The command that goes on with a run."""
    longer = f" --max-steps {max_steps}" if max_steps is not None else ""
    return f"{shell_command()} train --resume {shlex.quote(str(run))}{longer}"


def end_lines(run: Path, max_steps: int, history: list[LogRow], corpus: Corpus, val_loss: float) -> list[str]:
    """What a run has left, what can be done with it, and what came out."""
    opening = corpus.tokenizer.decode(corpus.val[:64])
    example = " ".join(opening.split()[1:3]) or opening[:1]  # the first word may be cut
    lines = [
        f"Saved model.safetensors, log.csv and loss.png in {run}. To train longer, or to sample:",
        f"    {go_on(run, 2 * max_steps)}",
        f"    {shell_command()} sample {shlex.quote(str(run))} --prompt {shlex.quote(example)}",
    ]
    estimates = [(row["val_loss"], row["step"]) for row in history if row["val_loss"] is not None]
    if estimates and min(estimates)[1] != estimates[-1][1]:
        loss, step = min(estimates)
        lines.append(f"The lowest estimate was {loss:.3f}, after step {step}: best.safetensors has its weights.")
    unit = "character" if corpus.tokenizer.name == "char" else "token"
    return [
        *lines,
        f"Over the whole validation split ({len(corpus.val):,} tokens), in nats per {unit}:",
        f"validation loss {val_loss:.3f}",
    ]


@dataclass
class Speed:
    """Counts what one call of the trainer does, and in what time."""

    peak_tflops: float | None  # the best of all devices together, in 1e12 operations a second; None: not known
    tokens: int = 0
    flops: float = 0
    seconds: float = 0.0

    def count(self, tokens: int, flops: float, seconds: float) -> None:
        self.tokens, self.flops, self.seconds = self.tokens + tokens, self.flops + flops, self.seconds + seconds

    def shown(self) -> dict[str, str]:
        """Tokens per second, and the share of the devices' best (MFU) where that is known."""
        said = {"tokens/s": f"{self.tokens / self.seconds:,.0f}"}
        if self.peak_tflops is not None:
            said["MFU"] = f"{self.flops / self.seconds / (self.peak_tflops * 1e12):.1%}"
        return said
