"""What a run keeps on disk, written so that a kill at any moment leaves a checkpoint that loads.

    runs/shakespeare/
        config.json            the model, the training settings and the tokenizer: what is needed to build it all again
        log.csv, loss.png      the losses
        best.safetensors       the weights with the lowest estimate of the validation loss so far
        model.safetensors      the weights at the end of the run, for whoever wants no more than these
        result.json            the loss over the whole validation split; it is written last, when the run is finished
        step-1500/             one complete checkpoint; the previous one is kept beside it
        step-2000/
            model.safetensors  the weights
            state.pt           what else it takes to go on bit for bit: optimizer, random generators, data position, ...
            sha256             of these two, so that a damaged checkpoint is noticed and the one before it used

A checkpoint is one folder, so weights and optimizer are always of the same step. It is written under another name and
renamed when everything has reached the disk: a folder called ``step-N`` is complete. Nothing that is loaded can run
code: safetensors holds numbers only, and the rest is read with ``weights_only=True``.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..data import Tokenizer, tokenizer_from_spec
from ..files import in_a_line, locked, make_folder, refuse_links, replacing, write_atomically, writing
from ..model import LoopedConfig, LoopedGPT
from .memory import fitting_memory

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
C = TypeVar("C", bound="DataclassInstance")

# What a run that could not write says.
KEPT = "checkpoints that are there are whole, and `minilooped train --resume` goes on from the newest"

# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


class Checkpoint(NamedTuple):
    path: Path
    step: int
    weights: dict[str, Tensor]  # on the CPU
    state: dict[str, Any]


def save_checkpoint(run: Path, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write ``run/step-N`` and remove all but the one before it. `state`: tensors, numbers, strings and containers.

    Raises FloatingPointError for a weight that is not finite, and OSError where the disk does not take it.
    """
    if bad := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise FloatingPointError(f"the weights of step {step} are not all finite ({bad[0]} and {len(bad) - 1} more)")
    path = run / f"step-{step}"
    temporary = run / f"{path.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a kill
    with writing(path, KEPT), ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, temporary, ignore_errors=True)  # half a checkpoint would fill the disk
        temporary.mkdir(parents=True)
        save_file(weights, temporary / "model.safetensors")
        torch.save(state, temporary / "state.pt")
        sums = "".join(map(_sum, (temporary / "model.safetensors", temporary / "state.pt")))
        (temporary / "sha256").write_text(sums, encoding="utf-8")
        for file in (*temporary.iterdir(), temporary):
            _flush_to_disk(file)
        if path.is_dir():  # one that could not be read: this is the same step, done again
            shutil.rmtree(path)
        os.replace(temporary, path)
        _flush_to_disk(run)
    for old in checkpoints(run)[:-2]:
        shutil.rmtree(old)
    return path


def publish_weights(run: Path, checkpoint: Path) -> Path:
    """Copy a checkpoint's weights to ``run/model.safetensors``, whole or not at all."""
    path = run / "model.safetensors"
    with replacing(path, KEPT) as temporary:
        shutil.copyfile(checkpoint / path.name, temporary)
    return path


def keep_best(run: Path, weights: dict[str, Tensor], step: int, val_loss: float) -> Path:
    """Write the weights with the lowest estimate so far to ``run/best.safetensors``, whole or not at all.

    The file's own metadata hold the step and the estimate.
    """
    path = run / "best.safetensors"
    with replacing(path, KEPT) as temporary:
        save_file(weights, temporary, {"step": str(step), "val_loss": repr(val_loss)})
    return path


def write_result(run: Path, result: dict[str, Any]) -> None:
    """Write ``result.json``, whole or not at all: the sign that a run is finished."""
    write_atomically(run / "result.json", json.dumps(result, indent=2) + "\n", KEPT)


def is_finished(run: Path, step: int) -> bool:
    """Whether all that a run leaves at its end is there, for a run of so many steps."""
    try:
        done = json.loads((run / "result.json").read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # it is written again
    return done == step and (run / "model.safetensors").is_file()


def load_checkpoint(run: Path) -> Checkpoint:
    """The newest checkpoint that can be read. Says so when it is not the newest; ``ValueError`` if there is none."""

    def read(path: Path) -> Checkpoint:
        state = torch.load(_unharmed(path / "state.pt"), map_location="cpu", weights_only=True)
        return Checkpoint(path, _step(path), load_file(_unharmed(path / "model.safetensors")), state)

    return _newest(run, checkpoints(run), read)


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first. Whatever else has a similar name is not the run's own."""
    own = (path for path in run.glob("step-*") if re.fullmatch(r"step-(0|[1-9]\d*)", path.name))
    return sorted((path for path in own if path.is_dir() and not path.is_symlink()), key=_step)


def refuse_obstacles(run: Path) -> None:
    """``ValueError`` for a file that has the name of a checkpoint, which is a folder: the checkpoint would not fit."""
    for path in run.glob("step-*"):
        if re.fullmatch(r"step-\d+", path.name) and (path.is_symlink() or not path.is_dir()):
            raise ValueError(f"{path} is no folder, and a checkpoint may need its name: move it away")


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _sum(file: Path) -> str:
    """The sha256 of a file, in a line as the command sha256sum writes it."""
    with open(file, "rb") as content:
        return f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {file.name}\n"


def _unharmed(file: Path) -> Path:
    """A file of a checkpoint; ``ValueError`` unless every byte is as it was written. Its readers would not notice."""
    sums = file.parent / "sha256"  # older versions wrote none
    if sums.exists() and _sum(file) not in sums.read_text(encoding="utf-8").splitlines(keepends=True):
        raise ValueError(f"{file.name} is not what was written: its sha256 differs")
    return file


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """One ValueError for whatever goes wrong when weights or state do not fit the run that they lie in."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError too
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError, OverflowError) as error:
        raise ValueError(
            f"{path} does not fit the config of its run ({in_a_line(error)}): restore it, or train again"
        ) from error


def _newest(run: Path, folders: list[Path], read: Callable[[Path], T]) -> T:
    for path in reversed(folders):
        try:
            found = read(path)
            if path != run and not (path / "sha256").exists():
                print(f"notice   {path} has no file sha256, as in older versions: damage to it may not be noticed")
            return found
        except Exception as error:  # a damaged file can make its reader fail in any way
            if isinstance(error, pickle.UnpicklingError):
                reason = "state.pt is damaged, or holds more than tensors, numbers and text"
            else:
                reason = in_a_line(error)
            print(f"{path} cannot be read ({reason}): trying the one before")
    raise ValueError(f"{run} has no checkpoint that can be read: restore one, or train again under another name")


def _flush_to_disk(path: Path) -> None:
    if path.is_file():
        with open(path, "r+b") as file:
            os.fsync(file.fileno())
    elif hasattr(os, "O_DIRECTORY"):  # POSIX: a rename is safe once its folder is on disk
        descriptor = os.open(path, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ----------------------------------------------------------------------------------------------------------------------
# Runs


def check_place(runs: str | Path, name: str) -> None:
    """``ValueError`` where no run of this name can be made in this folder."""
    if not re.fullmatch(r"[\w.+=-]+", name) or name.startswith("."):
        raise ValueError(f"name={name!r} has to be usable as a folder name: letters, digits and any of _ - + = .")
    if Path(runs).exists() and not Path(runs).is_dir():
        raise ValueError(f"runs={str(runs)!r} is a file, and the runs need a folder: name another one")


def new_run(runs: str | Path, name: str) -> Path:
    """Make the folder ``runs/name``, or ``runs/name-2``, ``-3``, ... where that exists: no run is ever overwritten."""
    check_place(runs, name)
    make_folder(Path(runs))
    run, number = Path(runs) / name, 1
    while True:
        with writing(run), suppress(FileExistsError):
            run.mkdir()
            return run
        number += 1
        run = Path(runs) / f"{name}-{number}"


def only_writer(run: Path) -> AbstractContextManager[None]:
    """``ValueError`` if another training writes to this run: two would mix up the log and delete each other's
    checkpoints."""
    return locked(run / ".lock", f"another process trains {run}: wait for it, stop it, or start a new run")


def shell_command() -> str:
    """How this shell calls minilooped: by name, or by path where PATH does not lead to it, as with make's .venv."""
    script = Path(sys.executable).with_name("minilooped")
    return "minilooped" if shutil.which("minilooped") or not script.exists() else os.path.relpath(script)


def find_run(run: str | Path, runs: str | Path = "runs") -> Path:
    """The folder of a run, given as a path or by its name in `runs`. ``ValueError`` if a link in it leads out of it."""
    for path in (Path(runs) / run, Path(run)):
        if (path / "config.json").is_file():
            refuse_links(path)
            return path
    names = sorted(path.parent.name for path in Path(runs).glob("*/config.json"))
    known = f"there are {', '.join(names)}" if names else "there are none yet: start one with `minilooped train`"
    raise FileNotFoundError(f"no run {str(run)!r} in {runs}; {known}")


def write_config(run: Path, config: dict[str, Any]) -> None:
    """Write ``config.json``, whole or not at all."""
    write_atomically(run / "config.json", json.dumps(config, indent=2) + "\n", KEPT)


def read_config(run: Path) -> dict[str, Any]:
    """``{"model": ..., "train": ..., "tokenizer": ...}``, plain dicts."""
    path = run / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(config[key], dict) for key in ("model", "train", "tokenizer")):
            raise ValueError("a part is missing")
        tokenizer = config["tokenizer"]
        if not all(
            isinstance(part, str) for part in (tokenizer["name"], tokenizer["hash"], tokenizer.get("chars", ""))
        ):
            raise ValueError("its tokenizer is not whole")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the config of a run ({error!r}): restore it, or train again") from error
    return config


def run_tokenizer(run: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a run's config records. ``ValueError`` if it can't be rebuilt."""
    try:
        return tokenizer_from_spec(config["tokenizer"])
    except ValueError as error:
        raise ValueError(f"{run / 'config.json'}: {error}") from error


def from_dict(kind: type[C], values: dict[str, Any], origin: Path) -> C:
    """Build a config dataclass. ``ValueError`` on values that it refuses and on fields of another version."""
    unknown = sorted(values.keys() - {field.name for field in fields(kind)})
    if unknown:
        raise ValueError(
            f"{origin}/config.json has settings that this version of minilooped does not know ({', '.join(unknown)}): "
            "use the version that made the run"
        )
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(
            f"{origin}/config.json is not the config of a run ({error}): restore it, or train again"
        ) from error


def newest_weights(run: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file of a run's newest weights, and what it holds."""
    published = [run] if (run / "model.safetensors").is_file() else []

    def read(folder: Path) -> tuple[Path, dict[str, Tensor]]:
        file = folder / "model.safetensors"
        return file, load_file(file if folder == run else _unharmed(file))

    return _newest(run, published + checkpoints(run), read)


def _best_weights(run: Path) -> tuple[Path, dict[str, Tensor]]:
    file = run / "best.safetensors"
    if not file.is_file():
        raise ValueError(f"{run} kept no best weights, because it made no estimate on its way: leave that option out")
    try:
        return file, load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({in_a_line(error)}): leave that option out") from error


def load_model(
    run: str | Path, device: str | torch.device = "cpu", *, best: bool = False
) -> tuple[LoopedGPT, Tokenizer]:
    """The trained model of a run (its path, or its name in ``runs/``), in eval mode, and its tokenizer.

    The newest checkpoint counts; a run that holds no more than the published weights is read from these. best: the
    weights with the lowest estimate of the validation loss instead. ``ValueError`` where the run kept none.
    """
    run = find_run(run)
    config = read_config(run)
    with fitting_memory():
        model = LoopedGPT(from_dict(LoopedConfig, config["model"], run))
    file, weights = _best_weights(run) if best else newest_weights(run)
    with restoring(file):
        model.load_state_dict(weights)
    return model.to(device).eval(), run_tokenizer(run, config)
