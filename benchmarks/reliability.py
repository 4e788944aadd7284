"""What is lost when things go wrong? python benchmarks/reliability.py

Every part below is a function that sets up one case in an empty folder, lets it go wrong, and raises an AssertionError
if a promise is broken. What a case draws depends on its part and its number alone:

    python benchmarks/reliability.py --replay mangled 17     one case again, with its traceback

    kills      a training process is killed (SIGKILL) ten times at random moments, and goes on each time: it ends with
               the bits and the log of a run that was left alone
    events     a training process kills itself at a random change to its files, the last evaluation and all that
               follows it included, and goes on with the same settings until it is finished: the same, and its final
               weights, picture and loss are there
    disk       from a random step on no file can grow past a random size, or a text is prepared on such a disk: one
               line that names the file, nothing half-written that looks whole, and the run goes on to the same bits
    configs    random settings of model and trainer, through Python or the shell, odd ones among them: they train, or a
               ValueError names a setting
    mangled    one file of the data, of a run, or a text is cut, overwritten or edited, or an option of a command is
               odd: it is noticed in one line, or does no harm. No other file changes, nothing takes longer than
               TIME_LIMIT
    strangers  files made to run code, or to read or write outside their folder: refused
    kernels    a training cell in a Jupyter kernel is interrupted at random moments and run again: kernel and model can
               be used, the first run is untouched, and resumed it ends with the same bits
    long       20,000 steps: memory, log, and the pace of the last thousand steps beside that of the first

The record is data/results/reliability.json, the page beside it sums it up. Sizes that are possible and merely take
long (a billion layers) are not drawn. About fifteen minutes of one CPU; what was
stopped goes on where it was, and the page shows how far it came.
"""

import atexit
import contextlib
import copy
import hashlib
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import psutil
import torch
import tyro
from safetensors.torch import load, save
from tiny_runs import (
    DENSE,
    ENDLESS,
    LOOM,
    TEXT,
    children,
    fingerprint,
    newest_step,
    prepared,
    settings,
    sign,
    start_child,
    train_until_killed,
)

from minilooped import cli
from minilooped.data import load_corpus
from minilooped.data.storage import FORMAT, MANIFEST, storage_dtype
from minilooped.engine.checkpoint import checkpoints, load_model
from minilooped.engine.log import read_log
from minilooped.model import LoopedConfig
from minilooped.science.records import RESULTS, record
from minilooped.train import Step, TrainConfig, train

TIME_LIMIT = 60  # seconds of CPU time for one command
PATH = RESULTS / "reliability.json"

Figures = dict[str, float]  # what came out of a case; sums over the cases of a part


# ----------------------------------------------------------------------------------------------------------------------
# Running a command and looking at what it did


class Hang(BaseException):
    """Not an Exception: nothing may take it for an error that it knows."""


@contextmanager
def time_limit(seconds: float = TIME_LIMIT) -> Iterator[None]:
    """Seconds of CPU time, or ten times as many of the clock: other programs may keep the computer busy."""

    def too_long(number: int, frame: Any):
        raise Hang(f"no answer within {seconds} s of CPU time")

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 10 * seconds))
    before = [signal.signal(number, too_long) for _, number, _ in timers]
    for timer, _, size in timers:
        signal.setitimer(timer, size)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


@contextmanager
def limit(kind: int, size: int) -> Iterator[None]:
    """One of the process's limits, in bytes."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextmanager
def quiet() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        yield out, err


def command(*argv: str) -> tuple[int, str]:
    """Exit status of a command, and its message if it failed. AssertionError for anything but one clear message."""
    argv = [str(part) for part in argv]
    with quiet() as (_, err), time_limit():
        try:
            status = cli.main(argv)
        except SystemExit as stop:  # of the parsers: usage and reason
            status = stop.code
    printed = err.getvalue()
    assert "Traceback" not in printed, printed
    if status == 0:
        return 0, ""
    if status == 2:
        assert printed.strip(), "a refusal without a word"
        return status, printed
    start = f"minilooped {argv[0]}: "
    assert status == 1 and printed.count(start) == 1, (status, printed)
    message = printed.partition(start)[2]
    assert message.strip() and message.count("\n") == 1, f"not one line: {message}"
    return status, message


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards_of(tokens: Path, folder: Path) -> Path:
    """The token files of a text as a folder of shards, without the library that streams data sets."""
    corpus = load_corpus(tokens)
    parts = [corpus.val, corpus.train[:1000], corpus.train[1000:]]
    folder.mkdir()
    shards = []
    for number, ids in enumerate(parts):
        name = f"{'train' if number else 'val'}-{number:05}.bin"
        (folder / name).write_bytes(ids.tobytes())
        shards.append(dict(file=name, tokens=len(ids), sha256=sha256(ids.tobytes()), last=dict(state={}, sha256="")))
    source = dict(dataset="pages", config=None, column="text", revision=None)
    manifest = dict(
        format=FORMAT,
        source=source,
        tokenizer=corpus.tokenizer.spec(),
        tokens=len(corpus.train) + len(corpus.val),
        dtype=storage_dtype(corpus.tokenizer.vocab_size),
        finished=True,
        shards=shards,
    )
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache
def stage() -> Path:
    """A folder with a text, token files, shards, and a run of four steps. Cases work on copies of it."""
    folder = Path(tempfile.mkdtemp(prefix="minilooped-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shards_of(prepared(folder), folder / "shards")
    with quiet(), chdir(folder):
        train(DENSE, replace(settings(folder), data="tokens", runs="runs", max_steps=4, save_every=2, threads=1))
    return folder


TRAIN = ["--eval-every", "2", "--sample-every", "0", "--threads", "1"]  # short, and yet all of it
TINY = (
    "train --block-size 8 --n-layer 1 --n-loop 2 --n-head 2 --n-embd 16 --max-steps 2 --batch-size 4 --lr 0.01"
).split() + TRAIN
RESUME = ["train", "--resume", "tiny", "--max-steps", "5"]
SAMPLE = ["sample", "tiny", "--max-new-tokens", "3"]


# ----------------------------------------------------------------------------------------------------------------------
# Kills

KILLS = 10  # in one case


def same_run(run: Path, other: Path) -> None:
    """AssertionError unless two runs ended with the same bits and the same log."""
    assert fingerprint(run) == fingerprint(other), "other bits"
    logs = [[row | dict(seconds=None) for row in read_log(path / "log.csv")] for path in (run, other)]
    assert logs[0] == logs[1], "another log"


def kills(draw: random.Random, folder: Path) -> Figures:
    config, run = settings(folder, **ENDLESS, threads=1), folder / "runs" / "tiny"
    early = 0
    for kill in range(KILLS):
        before = newest_step(run)
        at_work = kill == 0 or draw.random() < 0.5
        child = start_child(config, kill > 0, before if at_work else -1, run)
        time.sleep(draw.uniform(0, 0.05 if at_work else 0.6))  # while it works, or at any moment of its life
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL, child.exitcode
        early += newest_step(run) == before
    config = replace(config, max_steps=newest_step(run) + 2)
    with quiet():
        train(LOOM, config, resume=True)
        straight = train(LOOM, replace(config, name="straight", save_every=0))
    same_run(run, straight.run)
    return dict(kills=KILLS, before_a_new_checkpoint=early, steps=config.max_steps)


EVENTS = 75  # changes to the files of a run of six steps, a few more than there are


def events(draw: random.Random, folder: Path) -> Figures:
    config, run = settings(folder, max_steps=6, save_every=2, eval_every=3, threads=1), folder / "runs" / "tiny"
    figures: Counter[str] = Counter()
    for _ in range(3):
        child = children.Process(
            target=train_until_killed, args=(draw.randint(1, EVENTS), LOOM, config, bool(checkpoints(run))), daemon=True
        )
        child.start()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
        figures["ended by itself" if child.exitcode == 0 else "killed"] += 1
        if (run / "result.json").is_file():  # finished, even if it was killed after that
            break
        if not checkpoints(run):  # it died too young, and begins anew
            shutil.rmtree(run, ignore_errors=True)
    with quiet():
        if not (run / "result.json").is_file():
            train(LOOM, config, resume=bool(checkpoints(run)))
        straight = train(LOOM, replace(config, name="straight"))
    same_run(run, straight.run)
    for name in ("model.safetensors", "result.json", "loss.png", "best.safetensors"):
        assert (run / name).is_file(), f"{name} is missing"
    results = [json.loads((path / "result.json").read_text(encoding="utf-8")) for path in (run, straight.run)]
    assert results[0]["val_loss"] == results[1]["val_loss"], "another final loss"
    return dict(figures)


# ----------------------------------------------------------------------------------------------------------------------
# A full disk


def disk(draw: random.Random, folder: Path) -> Figures:
    size = int(10 ** draw.uniform(0, 5)) - 1  # 0 to 100,000 bytes
    return (disk_prepare if draw.random() < 0.25 else disk_train)(draw, folder, size)


def disk_prepare(draw: random.Random, folder: Path, size: int) -> Figures:
    """New token files, and other ones that are there already."""
    before = contents(prepared(folder, TEXT))
    (folder / "text.txt").write_text(TEXT * 2, encoding="utf-8")
    with chdir(folder), limit(resource.RLIMIT_FSIZE, size):
        refused = command("prepare", "text.txt", "--out", "tokens")
        status, message = command("prepare", "text.txt", "--out", "new")
    assert refused[0] == 1 and "holds other data" in refused[1], refused
    assert contents(folder / "tokens") == before
    if status == 0:
        assert len(load_corpus(folder / "new").train) > len(TEXT)
        return dict(fitted=1)
    assert "could not be written (File too large)" in message, message
    with contextlib.suppress(FileNotFoundError):  # that is said of files that are missing
        load_corpus(folder / "new")
        raise AssertionError("half of the new files is taken for the whole")
    with chdir(folder):
        assert command("prepare", "text.txt", "--out", "new")[0] == 0
    return dict(stopped=1)


def disk_train(draw: random.Random, folder: Path, size: int) -> Figures:
    config = settings(folder, max_steps=9, save_every=2, schedule="wsd", decay_steps=0, threads=1)
    full_at = draw.randint(1, 9)
    run = folder / "runs" / "tiny"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fills(step: Step) -> None:
        if step.number == full_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    before: list[Path] = []
    try:
        with quiet(), time_limit():
            train(DENSE, config, on_step=fills)
        status = "fitted"
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "could not be written" in str(error) and str(run) in str(error), error
        assert "\n" not in str(error), error
        status, before = "stopped", checkpoints(run)
        assert not list(run.glob("*.tmp")), "what is half-written fills the disk"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with quiet() as (out, _):
        straight = train(DENSE, replace(config, name="straight"))
        if status == "stopped":
            assert len(before) >= min(2, (full_at - 1) // 2), "a checkpoint was lost"
            if before and not (run / "result.json").is_file():
                train(DENSE, config, resume=True)
                assert "cannot be read" not in out.getvalue()
            if before:
                same_run(run, straight.run)
            else:
                again = train(DENSE, config)  # takes the next number
                assert again.run.name == "tiny-2"
                same_run(again.run, straight.run)
    return {status: 1}


# ----------------------------------------------------------------------------------------------------------------------
# Random settings

NUMBERS = {
    # model
    "vocab_size": range(1, 12),
    "block_size": range(1, 9),
    "n_layer": range(1, 4),
    "n_loop": range(1, 5),
    "n_head": range(1, 5),
    "n_embd": (2, 4, 6, 8, 12, 16),
    "n_inner": range(1, 10),
    "init_std": (1e-3, 0.02, 0.3, 1),
    "lam": (0.1, 1, 2.0),
    "l_ref": (1, 2, 12, 0.5),
    "reinject_lam": (0, 0.5, 5.0),
    "loop_residual": (0, 0.5, 0.99),
    "n_expert": range(0, 7),
    "n_expert_shared": range(0, 3),
    "top_k": range(1, 7),
    "balance_coef": (0, 2e-3, 1.0),
    "z_coef": (0, 1e-3, 1.0),
    "segment": range(1, 6),
    "loss_chunk": range(1, 40),
    # trainer
    "max_steps": range(1, 4),
    "batch_size": range(1, 6),
    "grad_accum": range(1, 4),
    "lr": (1e-4, 1e-2, 1, 1e4),
    "warmup_steps": range(0, 4),
    "decay_steps": range(0, 4),
    "min_lr_ratio": (0, 0.1, 1),
    "weight_decay": (0, 0.1, 1),
    "beta1": (0, 0.5, 0.9),
    "beta2": (0, 0.5, 0.999),
    "grad_clip": (0, 0.1, 1),
    "log_every": range(1, 4),
    "eval_every": range(0, 3),
    "eval_batches": range(1, 4),
    "sample_every": range(0, 3),
    "save_every": range(0, 3),
    "seed": (0, 1, 2**40),
    "threads": (1,),
    "peak_tflops": (1, 312.5),
}
WORDS = {"rule": ["none", "sqrt", "factored", "loom", "depth_mup", "rezero", "deepnorm", "deeploop"]}
FIXED = dict(runs="runs", data="tokens", tokenizer=None, device="auto", compile=False)  # tried elsewhere
ODD = [None, 0, -1, 2.5, -0.5, math.nan, math.inf, 10**12, 10**30, True, "", "none", "Ж/..\n", (), [1], {}]
LONG = ("max_steps", "eval_batches", "compile")  # a large one is merely slow


def plausible(draw: random.Random, field) -> Any:
    """A value that is right by itself. What several make together may still be impossible."""
    kinds = get_args(field.type) or (field.type,)
    if type(None) in kinds and draw.random() < 0.5:
        return None
    if field.name in WORDS:
        return draw.choice(WORDS[field.name])
    if get_origin(field.type) is Literal:
        return draw.choice(kinds)
    if bool in kinds:
        return draw.random() < 0.5
    return draw.choice(NUMBERS[field.name]) if field.name in NUMBERS else field.default


def draw_settings(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Values for all fields of the model and of the trainer, and the names of those that got an odd one."""
    parts = []
    for kind in (LoopedConfig, TrainConfig):
        parts.append({f.name: FIXED.get(f.name, plausible(draw, f)) for f in fields(kind)})
    model, training = parts
    if draw.random() < 0.8:  # else nearly every draw would be refused
        model["n_embd"] = 2 * model["n_head"] * draw.randint(1, 3)
        if model["n_expert"]:
            model["top_k"] = draw.randint(1, model["n_expert"])
        else:
            model |= dict(n_expert_shared=0, router="shared", moe_out_norm=False)
    odd = []
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        part = draw.choice(parts)
        name, value = draw.choice(list(part)), draw.choice(ODD)
        if not (name in LONG and value in (10**12, 10**30, True)):
            part[name] = value
            odd.append(name)
    return model, training, odd


def configs(draw: random.Random, folder: Path) -> Figures:
    model, training, _ = draw_settings(draw)
    shutil.copytree(stage() / "tokens", folder / "tokens")
    before = contents(folder)
    # A size that no machine has must fail here as it would there, and not fill this one.
    room = psutil.Process().memory_info().vms + 2**31
    with chdir(folder), limit(resource.RLIMIT_AS, room):
        if draw.random() < 0.5:
            came = through_python(model, training)
        else:
            came = through_the_shell(draw, model, training)
    after = contents(folder)
    assert all(after[name] == content for name, content in before.items()), "the data has changed"
    return {came: 1}


NAMES = [f.name for kind in (LoopedConfig, TrainConfig) for f in fields(kind)]


def names_a_setting(message: str) -> None:
    words = message.replace("-", "_")
    assert any(name in words for name in (*NAMES, "Unrecognized options: ")), f"names no setting: {message}"


def through_python(model: dict[str, Any], training: dict[str, Any]) -> str:
    try:
        with quiet(), time_limit():
            result = train(LoopedConfig(**model), TrainConfig(**training))
    except FloatingPointError as error:
        assert "Try a lower lr" in str(error)
        return "diverged"
    except (ValueError, FileNotFoundError, MemoryError) as error:
        names_a_setting(str(error) if not isinstance(error, FileNotFoundError) else f"data {error}")
        return "refused"
    assert result.step == result.history[-1]["step"] == training["max_steps"]
    load_model(Path.cwd() / result.run)
    assert math.isfinite(result.val_loss), "a loss that is not finite is no result"
    return "trained"


def through_the_shell(draw: random.Random, model: dict[str, Any], training: dict[str, Any]) -> str:
    argv = ["train"]
    del model["vocab_size"]
    for name, value in (model | training).items():
        option = name.replace("_", "-")
        if isinstance(value, bool) and name not in ("embed_norm", "step_per_segment"):  # they also take None
            argv.append(f"--{option}" if value else f"--no-{option}")
        else:
            argv += [f"--{option}", str(value)]
    status, message = command(*argv)
    if status == 0:
        load_model("runs/" + next(iter(os.listdir("runs")))) if training["runs"] == "runs" else None
        return "trained"
    if "Try a lower lr" in message:
        return "diverged"
    names_a_setting(message)
    return "refused"


# ----------------------------------------------------------------------------------------------------------------------
# Mangled inputs


def mangle_bytes(draw: random.Random, content: bytes) -> bytes:
    at, length = draw.randrange(len(content) + 1), int(2 ** draw.uniform(0, 9))
    ways = {
        "cut": lambda: content[:at],
        "empty": lambda: b"",
        "one bit": lambda: flip(draw, content, 1),
        "bits": lambda: flip(draw, content, 20),
        "zeros": lambda: content[:at] + bytes(length) + content[at + length :],
        "noise": lambda: content[:at] + draw.randbytes(length) + content[at + length :],
        "inserted": lambda: content[:at] + draw.randbytes(length) + content[at:],
        "left out": lambda: content[:at] + content[at + length :],
        "twice": lambda: content + content,
        "all noise": lambda: draw.randbytes(len(content)),
    }
    return ways[draw.choice(list(ways))]()


def flip(draw: random.Random, content: bytes, bits: int) -> bytes:
    flipped = bytearray(content)
    for _ in range(bits):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def mangle_tree(draw: random.Random, tree: Any, odd: list[Any]) -> Any:
    """One place of nested dicts and lists gets an odd value, is left out, or is added to."""
    root = {"root": copy.deepcopy(tree)}
    place, key = root, "root"
    while isinstance(place[key], dict | list) and place[key] and (place is root or draw.random() < 0.8):
        place = place[key]
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
    if place is root or draw.random() < 0.6:
        place[key] = draw.choice(odd)
    elif draw.random() < 0.5:
        del place[key]
    elif isinstance(place, dict):
        place[f"{key}x"] = place.pop(key)
    else:
        place.append(draw.choice(odd))
    return root["root"]


def mangle_json(draw: random.Random, content: bytes) -> bytes:
    if draw.random() < 0.03:
        return b"[" * 100_000  # deeper than Python goes
    odd = [value for value in ODD if value not in ((),)] + ["../../etc/passwd", "gpt2", "\ud800", "x" * 10**5, 3, 10**5]
    return json.dumps(mangle_tree(draw, json.loads(content), odd)).encode("utf-8")


def mangle_state(draw: random.Random, content: bytes) -> bytes:
    state = torch.load(io.BytesIO(content), weights_only=True)
    odd = [*ODD, torch.zeros(3), torch.zeros(0), torch.full((), math.nan), torch.zeros(2, 2, dtype=torch.int64)]
    file = io.BytesIO()
    torch.save(mangle_tree(draw, state, odd), file)
    return file.getvalue()


def mangle_weights(draw: random.Random, content: bytes) -> bytes:
    weights = load(content)
    name = draw.choice(sorted(weights))
    weight = weights.pop(name)
    other = [
        {},
        {name: weight.flatten()},
        {name: weight[..., :1].clone()},
        {name: weight.to(torch.int8)},
        {name: torch.full_like(weight, math.nan)},
        {f"{name}.x": weight},
        {name: weight.double()},
    ]
    return save(weights | draw.choice(other))


def mangle_header(draw: random.Random, content: bytes) -> bytes:
    """The JSON at the start of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    header = mangle_json(draw, content[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def mangle_table(draw: random.Random, content: bytes) -> bytes:
    rows = [line.split(",") for line in content.decode("utf-8").split("\r\n")]
    row = draw.choice(rows)
    row[draw.randrange(len(row))] = draw.choice(["", "x", "nan", "-1", "1e999", '"', "9" * 5000, "1,2", "\0"])
    return "\r\n".join(map(",".join, rows)).encode("utf-8")


def mangle_text(draw: random.Random, content: bytes) -> bytes:
    text = content.decode("utf-8")
    ways = [
        text.encode("utf-16"),
        ("é" + text).encode("latin-1"),
        b"\xef\xbb\xbf" + content,
        content[:1],
        content[:2],
        b"a" * 10_000,
        text.replace("\n", "\r\n").encode("utf-8"),
        b"\0" * 100,
        b"\xed\xa0\x80" * 9,
        b"<|endoftext|>" * 9,
        "".join(map(chr, range(0x4E00, 0x9000))).encode("utf-8"),
        b"\n" * 50,
    ]
    return draw.choice(ways)


# By file: the ways to mangle it beside mangle_bytes, and the commands that read it.
DATA, SHARDS = [*TINY, "--data", "tokens"], [*TINY, "--data", "shards"]
PREPARE = ["prepare", "text.txt", "--out", "new"]
FILES = {
    "tokens/train.bin": ([], [DATA]),
    "tokens/val.bin": ([], [DATA]),
    "tokens/train.json": ([mangle_json] * 2, [DATA]),
    "tokens/val.json": ([mangle_json] * 2, [DATA]),
    "shards/shards.json": ([mangle_json] * 3, [SHARDS]),
    "shards/train-00002.bin": ([], [SHARDS]),
    "shards/val-00000.bin": ([], [SHARDS]),
    "runs/tiny/config.json": ([mangle_json] * 3, [RESUME, SAMPLE, SAMPLE]),
    "runs/tiny/log.csv": ([mangle_table], [RESUME]),
    "runs/tiny/model.safetensors": ([mangle_weights, mangle_header], [SAMPLE]),
    "runs/tiny/step-4/model.safetensors": ([mangle_weights, mangle_header], [RESUME, SAMPLE]),
    "runs/tiny/step-4/state.pt": ([mangle_state] * 2, [RESUME]),
    "runs/tiny/step-4/sha256": ([], [RESUME, SAMPLE]),
    "text.txt": ([mangle_text] * 2, [PREPARE, [*PREPARE, "--tokenizer", "gpt2"]]),
}
OPTIONS = {
    "train": [f"--{name.replace('_', '-')}" for name in NAMES] + ["--preset", "--resume", "--nonsense"],
    "sample": ["--prompt", "--n-loop", "--temperature", "--top-k", "--max-new-tokens", "--seed", "--device"],
    "prepare": ["--hf-dataset", "--config", "--column", "--tokens", "--tokenizer", "--out", "--val-fraction"],
    "plan": ["--gpu", "--gpu-memory", "--mfu", "--preset", "--n-embd", "--batch-size", "--data", "--vocab-size"],
    "sweep": ["--rules", "--n-layers", "--lrs", "--seeds", "--out"],
    "export": ["--to", "--out"],
    "eval": ["--tasks", "--limit", "--n-loop"],
    "claims": ["--tier", "--out", "P9-z", "--ids"],
}
START = {
    "train": DATA,
    "sample": SAMPLE,
    "prepare": PREPARE,
    "plan": ["plan", "--preset", "shakespeare"],
    "sweep": ["sweep", *TINY[1:], "--data", "tokens", "--lrs", "0.01", "--seeds", "1", "--n-loops", "1"],
    "export": ["export", "tiny"],
    "eval": ["eval", "tiny"],
    "claims": ["claims", "nonsense"],
}
ODD_WORDS = [
    "",
    " ",
    "0",
    "-1",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e30",
    "1e-400",
    "9" * 25,
    "9" * 5000,
    "None",
    "True",
    "x",
    "..",
    "/",
    "runs",
    "text.txt",
    "tokens",
    "a/b",
    "Ж",
    "\n",
    "\udcff",
    "--",
    "-",
    "'",
    "💥" * 300,
    "%s",
    "{}",
    "~",
]


def mangled(draw: random.Random, folder: Path) -> Figures:
    shutil.copytree(stage(), folder, dirs_exist_ok=True)
    room = psutil.Process().memory_info().vms + 2**32
    if draw.random() < 0.25:
        name = draw.choice(list(OPTIONS))
        argv, mine = list(START[name]), None
        for _ in range(draw.choice((1, 1, 2))):
            argv.append(draw.choice(OPTIONS[name]))
            if draw.random() < 0.9:
                argv.append(draw.choice(ODD_WORDS))
        if "1e30" in argv or "9" * 25 in argv:
            argv = [part for part in argv if part not in ("--max-steps", "--eval-batches", "--max-new-tokens")]
    else:
        mine = draw.choice(list(FILES))
        own, commands = FILES[mine]
        argv, file = draw.choice(commands), folder / mine
        content = file.read_bytes()
        changed = draw.choice([mangle_bytes, *own])(draw, content)
        file.write_bytes(changed)
        if "step-4" in mine and not mine.endswith("sha256"):
            if draw.random() < 0.7:
                sign(file.parent)
            shutil.rmtree(folder / "runs/tiny/step-2") if draw.random() < 0.5 else None
            if argv == SAMPLE:
                (folder / "runs/tiny/model.safetensors").unlink()
    before = contents(folder)
    with chdir(folder), limit(resource.RLIMIT_AS, room):
        status, message = command(*argv)
    after = contents(folder)
    if status == 0:  # it went on, or began something new
        ours = {name for name in before if argv == RESUME and name.startswith("runs/tiny/")}
        kept = {name: content for name, content in before.items() if name not in ours}
    else:
        kept = before
    assert all(after.get(name) == content for name, content in kept.items()), "a file has changed"
    if status == 1 and mine is not None:
        place = "tiny" if mine.startswith("runs") else Path(mine).name
        assert Path(place).stem in message, f"names no file: {message}"
    return {"refused" if status else "harmless": 1}


# ----------------------------------------------------------------------------------------------------------------------
# Files from strangers


class Intruder:
    """A pickle that makes a file when it is read."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def edit_json(path: Path, edit: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def attacks(folder: Path, secret: Path, marker: Path) -> dict[str, tuple[Callable[[], Any], list[str]]]:
    """What a stranger could put into a folder that is given away, and the command that then reads it."""
    run, tokens, shards = folder / "runs/tiny", folder / "tokens", folder / "shards"
    step, intruder = run / "step-4", Intruder(marker)
    pickled = pickle.dumps(intruder, protocol=2)

    def into(path: Path, write: Callable[[Path], Any]) -> Callable[[], Any]:
        def attack():
            for other in checkpoints(run):
                if other != step:
                    shutil.rmtree(other)
            (run / "model.safetensors").unlink()
            write(path)
            sign(step)

        return attack

    def bare(path: Path) -> None:
        path.write_bytes(pickled)

    def names(*places: str) -> Callable[[], Any]:
        def edit(manifest: dict) -> None:
            for place, shard in zip(places, manifest["shards"], strict=False):
                if place != shard["file"]:
                    shard |= dict(file=place, tokens=secret.stat().st_size // 2, sha256=sha256(secret.read_bytes()))

        return lambda: edit_json(shards / MANIFEST, edit)

    def unfinished(manifest: dict) -> None:
        manifest |= dict(finished=False, shards=manifest["shards"][:1])
        manifest["shards"][0] |= dict(
            file="../../secret.bin", tokens=secret.stat().st_size // 2, sha256=sha256(secret.read_bytes())
        )
        manifest["tokens"] = 10

    hub = folder / "hub"
    return {
        "pickle in torch's archive": (
            into(step / "state.pt", lambda p: torch.save({"optimizer": intruder}, p)),
            RESUME,
        ),
        "bare pickle for a state": (into(step / "state.pt", bare), RESUME),
        "pickle for weights": (into(step / "model.safetensors", bare), SAMPLE),
        "archive for weights": (into(step / "model.safetensors", lambda p: torch.save(intruder, p)), SAMPLE),
        "pickle for published weights": (
            lambda: (bare(run / "model.safetensors"), [shutil.rmtree(path) for path in checkpoints(run)]),
            SAMPLE,
        ),
        "pickle for tokens": (lambda: bare(tokens / "train.bin"), DATA),
        "pickle for a header": (lambda: bare(tokens / "train.json"), DATA),
        "pickle for a manifest": (lambda: bare(shards / MANIFEST), SHARDS),
        "pickle for a config": (lambda: bare(run / "config.json"), RESUME),
        "pickle for a log": (lambda: bare(run / "log.csv"), RESUME),
        "pickle for a text": (lambda: bare(folder / "text.txt"), PREPARE),
        "code for a rule": (
            lambda: edit_json(run / "config.json", lambda c: c["model"].update(rule="__import__('os')")),
            RESUME,
        ),
        "shard above the folder": (names("../../secret.bin"), SHARDS),
        "shard by its full path": (names(str(secret)), SHARDS),
        "training shard above the folder": (names("val-00000.bin", "train-1/../../../secret.bin"), SHARDS),
        "shard that preparing would delete": (
            lambda: edit_json(shards / MANIFEST, unfinished),
            ["prepare", "--hf-dataset", "pages", "--tokens", "5", "--out", "shards"],
        ),
        "tokenizer from a path": (
            lambda: edit_json(tokens / "train.json", lambda h: h["tokenizer"].update(name="../../secret.bin")),
            DATA,
        ),
        "link for tokens": (lambda: link(tokens / "train.bin", secret), DATA),
        "link for a header": (lambda: link(tokens / "train.json", secret), DATA),
        "link for a shard": (lambda: link(shards / "train-00001.bin", secret), SHARDS),
        "link for weights": (lambda: link(step / "model.safetensors", secret), SAMPLE),
        "link for a config": (lambda: link(run / "config.json", secret), SAMPLE),
        "link for a log": (lambda: link(run / "log.csv", secret), RESUME),
        "link for a plot": (lambda: link(run / "loss.png", secret), RESUME),
        "link for what is written next": (lambda: link(run / "config.json.tmp", secret), RESUME),
        "link for the next checkpoint": (lambda: (run / "step-5.tmp").symlink_to(secret.parent), RESUME),
        "pickle for an imported GPT-2": (
            lambda: (
                hub.mkdir(),
                (hub / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8"),
                bare(hub / "pytorch_model.bin"),
            ),
            ["import", "gpt2", "hub"],
        ),
    }


ATTACKS = list(attacks(Path("a"), Path("b"), Path("c")))


def strangers(draw: random.Random, folder: Path, name: str | None = None) -> Figures:
    shutil.copytree(stage(), folder / "given")
    secret, marker = folder / "secret.bin", folder / "marker"
    shutil.copy(folder / "given" / "tokens" / "train.bin", secret)  # as tokens it would do
    before = secret.read_bytes(), sorted(os.listdir(folder))
    attack, argv = attacks(folder / "given", secret, marker)[name or draw.choice(ATTACKS)]
    attack()
    inside = contents(folder / "given")
    with chdir(folder / "given"):
        status, message = command(*argv)
    assert status, "taken for a good one"
    assert (secret.read_bytes(), sorted(os.listdir(folder))) == before, "something outside has changed"
    assert contents(folder / "given") == inside, "something inside has changed"
    return dict(refused=1)


# ----------------------------------------------------------------------------------------------------------------------
# Notebook kernels

INTERRUPTS = 5  # in one case, of one kernel


def kernels(draw: random.Random, folder: Path, interrupts: int = INTERRUPTS) -> Figures:
    from jupyter_client.manager import start_new_kernel

    config = settings(folder, **ENDLESS | dict(save_every=3), threads=1)
    root = str(Path(cli.__file__).parents[1])
    environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=root)
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=environment)

    def run(code: str, expect: tuple[str, ...] = ("ok",)) -> dict[str, Any]:
        return answer(execute(code), code, expect)

    def execute(code: str) -> str:
        return client.execute(code, stop_on_error=False)  # else what comes soon after an error is thrown away

    def answer(asked: str, code: str, expect: tuple[str, ...]) -> dict[str, Any]:
        reply = {}
        while reply.get("parent_header", {}).get("msg_id") != asked:
            reply = client.get_shell_msg(timeout=120)
        content = reply["content"]
        assert content["status"] in expect, (code, content)
        return content

    figures = Counter()
    try:
        run("from dataclasses import replace\nimport torch\nfrom minilooped.model import LoopedConfig")
        run(f"from minilooped.train import TrainConfig, train\nmodel_config, config = {DENSE!r}, {config!r}")
        # So that the moments below are of training.
        run("train(model_config, replace(config, name='warm', max_steps=1))")
        for number in range(interrupts):
            cell, runs = (
                f"print('begun', flush=True)\nresult = train(model_config, replace(config, name='cell{number}'))",
                [],
            )
            for again in range(2):  # the cell, and the cell once more
                first = {path: fingerprint(path) for path in runs}
                run("result = None")
                asked = execute(cell)
                message = {}  # an interrupt before the cell begins ends in the kernel, and the cell is never answered
                while (message.get("msg_type"), message.get("parent_header", {}).get("msg_id")) != ("stream", asked):
                    message = client.get_iopub_msg(timeout=120)
                time.sleep(draw.uniform(0, 0.6))
                manager.interrupt_kernel()
                content = answer(asked, cell, ("ok", "error"))
                if content["status"] == "ok":
                    run("assert result.val_loss is None and result.step > 0")
                    run("result.model.generate(torch.zeros((1, 1), dtype=torch.int64), 3)")
                    figures["stopped after a step"] += 1
                else:
                    assert content["ename"] == "KeyboardInterrupt", content
                    figures["stopped before the first step"] += 1
                assert all(fingerprint(path) == bits for path, bits in first.items()), "the first run has changed"
                name = f"cell{number}" + ("-2" if again and runs else "")
                runs += [path for path in [folder / "runs" / name] if path.exists() and checkpoints(path)]
            for path in runs:
                steps = newest_step(path) + 2
                run(f"train(model_config, replace(config, name={path.name!r}, max_steps={steps}), resume=True)")
                straight = replace(config, name=f"{path.name}-straight", max_steps=steps, save_every=0)
                with quiet():
                    straight = train(DENSE, straight)
                same_run(path, straight.run)
                figures["resumed"] += 1
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return dict(figures)


# ----------------------------------------------------------------------------------------------------------------------
# A long run

STEPS = 20_000


def own_memory() -> int:
    """Bytes of this process, without the files that it maps: those the system drops and reads again as it likes."""
    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)  # Linux counts them


def long(draw: random.Random, folder: Path, steps: int = STEPS) -> Figures:
    """Memory after a twentieth of the steps beside that at the end; CPU time of the first and the last twentieth."""
    part, marks = steps // 20, []
    config = settings(
        folder, max_steps=steps, log_every=10, eval_every=part, save_every=part, sample_every=part, threads=1
    )

    def mark(step: Step) -> None:
        if step.number % part == 1 or step.number == steps:
            marks.append((step.number, time.process_time(), own_memory()))

    with quiet():
        result = train(DENSE, config, on_step=mark)
    rows = read_log(result.run / "log.csv")
    assert [row["step"] for row in rows] == list(range(10, steps + 1, 10))
    assert all(math.isfinite(row["loss"]) and row["tokens"] == 32 * row["step"] for row in rows)
    assert (result.run / "log.csv").read_bytes().count(b"\n") == len(rows) + 1
    assert [path.name for path in checkpoints(result.run)] == [f"step-{steps - part}", f"step-{steps}"]
    paces = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(marks, marks[1:], strict=False)]
    return dict(
        steps=steps,
        megabytes_after_a_twentieth=round(marks[1][2] / 1e6, 1),
        megabytes_at_the_end=round(marks[-1][2] / 1e6, 1),
        ms_of_the_first_steps=round(1e3 * paces[0], 3),
        ms_of_the_last_steps=round(1e3 * paces[-1], 3),
        last_to_first=round(paces[-1] / paces[0], 3),
        log_rows=len(rows),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Counting

# The function of a part, its number of cases, and how many of them make a row of the record.
PARTS: dict[str, tuple[Callable[[random.Random, Path], Figures], int, int]] = {
    "kills": (kills, 20, 2),
    "events": (events, 20, 5),
    "disk": (disk, 200, 50),
    "configs": (configs, 1000, 100),
    "mangled": (mangled, 1000, 100),
    "strangers": (strangers, len(ATTACKS), len(ATTACKS)),
    "kernels": (kernels, 4, 1),
    "long": (long, 1, 1),
}


def case(part: str, number: int) -> Figures:
    """One case, in a folder of its own. AssertionError, or whatever else went wrong, if a promise is broken."""
    with tempfile.TemporaryDirectory(prefix="minilooped-") as folder:
        options = dict(name=ATTACKS[number]) if part == "strangers" else {}
        return PARTS[part][0](random.Random(f"{part} {number}"), Path(folder), **options)


def measure(part: str, first: int, cases: int) -> dict[str, Any]:
    """Cases `first` up to `first + cases`: their figures, those that failed, and the slowest one."""
    figures, failed, seconds = Counter(), {}, []
    for number in range(first, first + cases):
        start = time.process_time()
        try:
            figures.update(case(part, number))
        except (Exception, Hang) as error:
            failed[str(number)] = f"{type(error).__name__}: {error}"[:300]
        seconds.append((round(time.process_time() - start, 2), number))
    slowest = max(seconds)
    return dict(figures=dict(figures), failed=failed, slowest_cpu_seconds=slowest[0], slowest_case=slowest[1])


def page(stored: dict[str, Any]) -> str:
    """The record, summed up for a reader."""
    about = stored["provenance"]
    later = "".join(f", gone on with at {part['commit']} on {part['date']}" for part in stored.get("extended", []))
    lines = [
        "# What is lost when things go wrong",
        "",
        f"Made by `{about['made_by']}` at commit {about['commit']} on {about['date']} (torch {about['torch']}, "
        f"{about['cpu']}){later}. What a case is stands at the top of that file; `--replay PART NUMBER` runs one "
        "again.",
        "",
        "| part | cases | what came out | broken promises | slowest case, CPU s (number) |",
        "|---|---:|---|---:|---:|",
    ]
    for part in PARTS:
        rows = [row for row in stored["runs"] if row["part"] == part]
        if not rows:
            continue
        figures, failed = Counter(), {}
        for row in rows:
            figures.update(row["figures"])
            failed |= row["failed"]
        slowest = max((row["slowest_cpu_seconds"], row["slowest_case"]) for row in rows)
        told = ", ".join(f"{name.replace('_', ' ')} {round(value, 3):,}" for name, value in figures.items())
        broken = f"{len(failed)}" + (f" ({', '.join(failed)})" if failed else "")
        cases = sum(row["cases"] for row in rows)
        lines.append(f"| {part} | {cases:,} | {told} | {broken} | {slowest[0]} ({slowest[1]}) |")
    return "\n".join(lines) + "\n"


def main(
    parts: tuple[Literal[tuple(PARTS)], ...] = tuple(PARTS), replay: tuple[Literal[tuple(PARTS)], int] | None = None
) -> None:
    """Count what goes wrong.

    Args:
        parts: the parts to run; what the record already has is not run again.
        replay: run one case of one part, by its number, and say what came out.
    """
    torch.set_num_threads(1)
    if replay is not None:
        print(case(*replay))
        return
    runs = [
        dict(part=part, first=first, cases=min(size, count - first))
        for part, (_, count, size) in PARTS.items()
        if part in parts
        for first in range(0, count, size)
    ]
    record(PATH, dict(kills_in_a_case=KILLS, interrupts_in_a_case=2 * INTERRUPTS, time_limit=TIME_LIMIT), runs, measure)
    PATH.with_suffix(".md").write_text(page(json.loads(PATH.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
