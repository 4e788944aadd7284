"""Runs that take a fraction of a second, for the tests of the trainer and for reliability.py."""

import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minilooped.data import prepare
from minilooped.engine.checkpoint import checkpoints, load_checkpoint
from minilooped.model import LoopedConfig
from minilooped.presets import LOOM_PARTS
from minilooped.train import TrainConfig, train

# Child processes start from a server that has imported torch once: importing it takes seconds, and forking the test
# process itself, threads and all, would be unsafe.
children = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
children.set_forkserver_preload(["minilooped.train", "torch._dynamo"])

TEXT = "".join(f"{i} times {j} is {i * j}.\n" for i in range(12) for j in range(12))

DENSE = LoopedConfig(block_size=8, n_layer=2, n_loop=2, n_head=2, n_embd=16, mlp="relu2", init_std=0.25)
# Everything that is carried from loop to loop, and state that is not a parameter: LOOM in miniature.
LOOM = replace(
    LOOM_PARTS,
    block_size=8,
    n_layer=1,
    n_loop=4,
    n_head=2,
    n_embd=16,
    init_std=0.25,
    n_expert=4,
    n_expert_shared=1,
    top_k=2,
    segment=2,
)


def prepared(folder: Path, text: str = TEXT, tokenizer: str = "char") -> Path:
    """A folder of token files, in place of the one that was there."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "tokens", ignore_errors=True)  # prepare itself overwrites no other data
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return prepare(folder / "text.txt", folder / "tokens", tokenizer)


def settings(folder: Path, **changes: Any) -> TrainConfig:
    """Settings of a tiny run in `folder`, on the text that lies there."""
    tokens = folder / "tokens"
    defaults = dict(
        name="tiny",
        runs=str(folder / "runs"),
        data=str(tokens if tokens.exists() else prepared(folder)),
        max_steps=12,
        batch_size=4,
        lr=1e-2,
        warmup_steps=4,
        eval_every=0,
        sample_every=0,
        log_every=1,
        save_every=5,
    )
    return TrainConfig(**(defaults | changes))


def train_in_child(model_config: LoopedConfig, config: TrainConfig, resume: bool):
    """The whole life of a child process, of which nobody reads what it prints."""
    torch.set_num_threads(1)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        train(model_config, config, resume=resume)


# A schedule that does not depend on max_steps, so that the length can be settled afterwards.
ENDLESS = dict(schedule="wsd", decay_steps=0, max_steps=10**6, save_every=1, optimizer="muon")


def train_until_killed(event: int, model_config: LoopedConfig, config: TrainConfig, resume: bool):
    """`train_in_child`, killed by itself at its `event`-th event that changes a file below the folder of all runs."""
    seen = 0

    def watch(name: str, arguments: tuple) -> None:
        nonlocal seen
        changes = name in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "shutil.copyfile")
        if name == "open" and isinstance(arguments[1], str):
            changes = any(letter in arguments[1] for letter in "wax+")
        if changes and str(config.runs) in str(arguments[0]):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    train_in_child(model_config, config, resume)


def newest_step(run: Path) -> int:
    found = checkpoints(run)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def start_child(config: TrainConfig, resume: bool, past_step: int, run: Path):
    """A process that trains LOOM and has made a checkpoint after `past_step`."""
    child = children.Process(target=train_in_child, args=(LOOM, config, resume), daemon=True)  # gone with the test
    child.start()
    deadline = time.monotonic() + 60
    while newest_step(run) <= past_step:
        assert child.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)
    return child


def cut_back(run: Path, step: int, to: Path) -> Path:
    """A copy of a run as it was after `step`, for which it must still have a checkpoint."""
    shutil.copytree(run, to)
    for path in checkpoints(to):
        if path.name != f"step-{step}":
            shutil.rmtree(path)
    assert checkpoints(to), f"{run} has no step {step}"
    return to


def sign(checkpoint: Path):
    """Make the sums of a checkpoint's files right again, as a stranger would who changed them."""
    files = (checkpoint / "model.safetensors", checkpoint / "state.pt")
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (checkpoint / "sha256").write_text("".join(lines), encoding="utf-8")


def fingerprint(run: Path) -> str:
    """sha256 of what the last checkpoint goes on with: weights, optimizer, random generators, data position."""
    _, step, weights, state = load_checkpoint(run)
    digest = hashlib.sha256(str(step).encode("utf-8"))

    def add(value: Any):
        if isinstance(value, torch.Tensor):
            digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode("utf-8"))
                add(value[key])
        elif isinstance(value, list | tuple):
            for part in value:
                add(part)
        else:
            digest.update(repr(value).encode("utf-8"))

    add(weights)
    add({key: part for key, part in state.items() if key not in ("seconds", "settings")})
    return digest.hexdigest()


def edit_state(run: Path, edit: Callable[[dict], None]):
    """Change the newest checkpoint's state as a stranger would, sums and all."""
    file = checkpoints(run)[-1] / "state.pt"
    state = torch.load(file, weights_only=True)
    edit(state)
    torch.save(state, file)
    sign(file.parent)
