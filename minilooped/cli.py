"""The command line: ``minilooped train | plan | sample | prepare | sweep | claims | export | import | eval``.

Each command's options are the fields of a typed dataclass, its help their comments. torch is imported by the command
that needs it, so that ``minilooped --help`` answers at once.
"""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    from .data import Tokenizer
    from .model import LoopedGPT
    from .science.sweep import Trial

# The names of PRESETS, which cannot be imported here without torch; a test holds the two together.
Preset = Literal[
    "shakespeare",
    "shakespeare-moe",
    "gpt2-small",
    "gpt2-small-loop",
    "gpt2-small-deeploop",
    "gpt2-small-4x3",
    "loom-small",
]


def started(kind: type[Any], prog: str, argv: list[str]) -> Any:
    """A first look at a command's options: those of `kind`, which decide the defaults of all others."""
    import tyro

    return tyro.cli(kind, prog=prog, args=argv, add_help=False, return_unknown_args=True)[0]


def train(argv: list[str]) -> int:
    """train a model and leave checkpoints, a log and a plot in runs/NAME"""
    import tyro

    from .engine.checkpoint import find_run, from_dict, read_config
    from .model import LoopedConfig
    from .presets import PRESETS
    from .train import TrainConfig
    from .train import train as run_training

    one_of = tyro.conf.create_mutex_group(required=False)  # each of them sets the settings to start from

    @dataclass(frozen=True)
    class Start:
        preset: Annotated[Preset, one_of] = "shakespeare"  # the settings to start from
        resume: Annotated[str | None, one_of] = None  # go on with this run (its name or its folder), its own settings
        start: Annotated[str | None, one_of, tyro.conf.arg(name="from")] = None  # a new run with this run's weights

    @dataclass(frozen=True)
    class Train(Start):
        """Train a model. Every setting of the preset can be changed."""

        model: tyro.conf.OmitArgPrefixes[LoopedConfig] = LoopedConfig()
        train: tyro.conf.OmitArgPrefixes[TrainConfig] = TrainConfig()

    first = started(Start, "minilooped train", argv)
    model, training = PRESETS[first.preset]
    if first.resume is not None or first.start is not None:
        run = find_run(first.resume if first.start is None else first.start)
        stored = read_config(run)
        model = from_dict(LoopedConfig, stored["model"], run)
        training = replace(from_dict(TrainConfig, stored["train"], run), name=run.name, runs=str(run.parent))
    default = Train(first.preset, first.resume, first.start, model, training)
    asked = tyro.cli(Train, prog="minilooped train", args=argv, default=default)

    for option in ("name", "runs"):
        if asked.resume is not None and getattr(asked.train, option) != getattr(training, option):
            raise ValueError(f"--{option} cannot be changed with --resume, which goes on in {run}: leave it out")
    if asked.model.vocab_size != model.vocab_size:
        raise ValueError("vocab_size is set by the tokenizer: leave it out")
    before, now = (
        c.batch_size * c.grad_accum * m.block_size for m, c in ((model, training), (asked.model, asked.train))
    )
    if now < before and asked.train.lr == training.lr and os.environ.get("RANK", "0") == "0":
        print(
            f"notice   {now:,} tokens per step instead of the {before:,} that lr={training.lr:g} was chosen for: raise "
            "grad_accum to keep them, or lower lr"
        )
    result = run_training(asked.model, asked.train, resume=asked.resume is not None, start=asked.start)
    return 0 if result.step == asked.train.max_steps else 130  # 130: ended by a signal


def _trained(run: str, device: str, best: bool = False) -> "tuple[LoopedGPT, Tokenizer]":
    """The model of a run and its tokenizer, with as many threads from now on as it was trained with.

    What was few enough to train is few enough to use. best: the weights with the lowest estimate.
    """
    import torch

    from .engine.checkpoint import find_run, from_dict, load_model, read_config
    from .engine.machine import pick_device
    from .train import TrainConfig

    found = find_run(run)
    threads = from_dict(TrainConfig, {"threads": read_config(found)["train"].get("threads")}, found).threads
    if threads is not None:
        torch.set_num_threads(threads)
    return load_model(run, pick_device(device)[0], best=best)


def sample(argv: list[str]) -> int:
    """let a trained model continue a text"""
    import tyro

    from .train import sample as continue_text

    @dataclass(frozen=True)
    class Sample:
        """Let a trained model continue a text."""

        run: tyro.conf.Positional[str]  # a run: its name in runs/, or its folder
        prompt: str | None = None  # the text to continue; None: a line break, or the first character known
        n_loop: int | None = None  # loops per token; None: as many as it was trained with
        temperature: float = 0.8  # 0: always the likeliest token
        top_k: int | None = None  # draw from the k likeliest tokens only
        max_new_tokens: int = 300  # tokens to add
        seed: int = 1337  # the same seed draws the same text
        best: bool = False  # the weights with the lowest estimate of the validation loss, not those of the end
        stop_at_end: bool = True  # end where the model ends a document, if its tokenizer has a token for that
        device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: a GPU where there is one

    asked = tyro.cli(Sample, prog="minilooped sample", args=argv)
    model, tokenizer = _trained(asked.run, asked.device, asked.best)
    text = continue_text(
        model,
        tokenizer,
        asked.prompt,
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        n_loop=asked.n_loop,
        seed=asked.seed,
        stop_at_end=asked.stop_at_end,
    )
    print(text)
    return 0


def prepare(argv: list[str]) -> int:
    """turn texts or a data set into tokens to train on"""
    import tyro

    from .data import prepare as prepare_text
    from .data.streaming import FINEWEB_EDU, Source, prepare_stream
    from .engine.checkpoint import shell_command
    from .files import say

    @dataclass(frozen=True)
    class Prepare:
        """Turn UTF-8 texts or a data set into tokens to train on.

        A folder of text files becomes a document per file. A data set is streamed: fineweb-edu --tokens 1e9, or
        --hf-dataset NAME --tokens 1e9. It can be larger than the memory, and what was stopped goes on with the same
        command. A folder that holds other data is never overwritten.
        """

        source: tyro.conf.Positional[str | None] = None  # a text file, a folder of text files, or fineweb-edu
        hf_dataset: str | None = None  # another data set: name on the Hugging Face hub, or folder of parquet or JSON
        config: str | None = None  # which part of the data set; None: its only one, of fineweb-edu sample-10BT
        column: str | None = None  # where the data set has its text; None: in text
        tokens: float | None = None  # how many to take of the data set: 1e9 is a billion
        tokenizer: str | None = None  # char, gpt2, or a tiktoken encoding (downloaded); None: char, for data sets gpt2
        out: Path | None = None  # folder to write; None: prepared/NAME for NAME.txt, a folder NAME or a data set NAME
        val_fraction: float | None = None  # share kept to validate on; None: the last 0.1, of data sets the first 0.001

    asked = tyro.cli(Prepare, prog="minilooped prepare", args=argv)
    if (asked.source is None) == (asked.hf_dataset is None):
        raise ValueError("name one thing to prepare: a text file, fineweb-edu, or a data set with --hf-dataset NAME")

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}

    if asked.source in (None, "fineweb-edu"):
        if asked.tokens is None or not math.isfinite(asked.tokens):
            raise ValueError("say how many tokens to take of the data set, as in --tokens 1e9")
        source = replace(Source(asked.hf_dataset) if asked.hf_dataset else FINEWEB_EDU, **given("config", "column"))
        folder = prepare_stream(source, round(asked.tokens), asked.out, **given("tokenizer", "val_fraction"))
    else:
        for name in given("config", "column", "tokens"):
            raise ValueError(f"--{name} is for data sets, and {asked.source} is taken for a text file: leave it out")
        folder = prepare_text(asked.source, asked.out, **given("tokenizer", "val_fraction"))
    say(f"The tokens are in {folder}. To train on them:\n    {shell_command()} train --data {shlex.quote(str(folder))}")
    return 0


def sweep(argv: list[str]) -> int:
    """train over a grid of learning rates, and say whether one serves every model"""
    import torch
    import tyro

    from .model import LoopedConfig
    from .presets import PRESETS
    from .science.sweep import LanguageModel, grid
    from .science.sweep import sweep as run_sweep
    from .train import TrainConfig

    @dataclass(frozen=True)
    class Start:
        preset: Preset = "shakespeare"  # the settings to start from

    prog = "minilooped sweep"
    start = started(Start, prog, argv)
    preset = PRESETS[start.preset]

    @dataclass(frozen=True)
    class Sweep(Start):
        """Train over a grid of learning rates and say whether one serves every model.

        The lists below take the place of rule, n_layer, n_loop, lr and seed of the preset. Results go to a file as they
        come: a sweep that was stopped goes on, one that is extended runs what is new.
        """

        out: Path = Path("sweep.csv")  # the file that takes the results
        rules: tuple[str, ...] = (preset.model.rule,)  # scaling rules
        n_layers: tuple[int, ...] = (preset.model.n_layer,)  # unique blocks
        n_loops: tuple[int, ...] = (1, preset.model.n_loop)  # loops
        lrs: tuple[float, ...] = tuple(preset.train.lr * 2.0**k for k in (-2, -1, 0, 1, 2))  # peak learning rates
        seeds: tuple[int, ...] = (1, 2)  # of weights and batches
        model: tyro.conf.OmitArgPrefixes[LoopedConfig] = preset.model
        train: tyro.conf.OmitArgPrefixes[TrainConfig] = preset.train

    asked = tyro.cli(Sweep, prog=prog, args=argv)
    if asked.train.threads is not None:
        torch.set_num_threads(asked.train.threads)
    trials = grid(asked.rules, asked.n_layers, asked.n_loops, asked.lrs, asked.seeds)
    if not trials:
        raise ValueError("give at least one value to each of --rules, --n-layers, --n-loops, --lrs and --seeds")
    for trial in trials:  # what cannot work is refused before the first run
        replace(asked.model, rule=trial.rule, n_layer=trial.n_layer, n_loop=trial.n_loop)
        replace(asked.train, lr=trial.lr, seed=trial.seed)
    made_by = shlex.join(["minilooped", "sweep", *argv])
    losses = run_sweep(trials, LanguageModel(asked.model, asked.train), asked.out, made_by=made_by)
    print_transfer(losses, asked.rules)
    print(
        f"Losses are in {asked.out}. To keep a learning rate costs nats per token over the model's own best, paired by "
        "seed. Intervals: 95 % by Student's t."
    )
    return 0


def print_transfer(losses: "dict[Trial, float]", rules: tuple[str, ...]) -> None:
    """A line for each rule and size: its best learning rate, and what it costs to keep that of the smallest size."""
    from .science.sweep import sizes, transfer

    smallest = sizes(losses, rules[0])[0]
    kept = f"to keep that of {smallest[0]} x {smallest[1]}"
    print(f"{'rule':18}{'L x N':>8}{'loss':>9}{'best lr':>10}  {kept:24}octaves from there")
    for rule in rules:
        for model in sizes(losses, rule):
            print(f"{rule:18}{f'{model[0]} x {model[1]}':>8}", end="")
            try:
                found = transfer(losses, rule, smallest, model)
            except ValueError as error:  # all diverged
                print(f"  {error}")
                continue
            edge = "" if found.best.inside else "  at the edge of the grid: give more --lrs"
            print(f"{found.best.loss:9.4f}{found.best.lr:10.2g}  {found.cost:24}{found.moved}{edge}")


def claims(argv: list[str]) -> int:
    """measure what the papers claim, and say what holds here"""
    import torch
    import tyro

    from .science.claims import Tier, report, select

    @dataclass(frozen=True)
    class Claims:
        """Measure what the papers claim, and say what holds here."""

        ids: tyro.conf.Positional[tuple[str, ...]] = ()  # the claims, as in P1-b P2-e; none: all of the tier
        tier: Tier | None = None  # what a measurement takes; None: seconds, or any for claims that are named
        out: Path | None = None  # folder for claims.json and the page claims.md; both keep the claims not measured now

    asked = tyro.cli(Claims, prog="minilooped claims", args=argv)
    chosen = select(asked.ids, asked.tier)
    torch.set_num_threads(1)  # the matrices are small
    results = report(chosen, asked.out, shlex.join(["minilooped", "claims", *argv]))
    if asked.out is not None and results:
        print(f"Wrote {asked.out / 'claims.json'} and {asked.out / 'claims.md'}")
    return 0


def export(argv: list[str]) -> int:
    """write a trained model as a folder that transformers loads"""
    import tyro

    from .tools.export import export_hf

    @dataclass(frozen=True)
    class Export:
        """Write a trained model as a folder that transformers loads."""

        run: tyro.conf.Positional[str]  # a run: its name in runs/, or its folder
        to: Literal["hf"] = "hf"  # hf: weights, config, tokenizer and code, as Hugging Face's transformers wants them
        out: Path | None = None  # folder to write; None: hf in the run's folder

    asked = tyro.cli(Export, prog="minilooped export", args=argv)
    folder = export_hf(asked.run, asked.out)
    code = (folder / "modeling_minilooped.py").is_file()
    arguments = f"({str(folder)!r}{', trust_remote_code=True' if code else ''})"
    print(f"Wrote {folder}, {'a looped model and its code' if code else 'a plain GPT-2'}. To load it:")
    print(f"    model = transformers.AutoModelForCausalLM.from_pretrained{arguments}")
    if (folder / "tokenizer.json").is_file():
        print(f"    tokenizer = transformers.AutoTokenizer.from_pretrained{arguments}")
    else:
        print("It has no tokenizer: encode text with the tiktoken encoding that the run was trained with.")
    return 0


def import_(argv: list[str]) -> int:
    """make a run of the GPT-2 in a local Hugging Face folder"""
    import tyro

    from .engine.checkpoint import shell_command
    from .tools.export import import_gpt2

    @dataclass(frozen=True)
    class Import:
        """Make a run of the GPT-2 in a local Hugging Face folder."""

        kind: tyro.conf.Positional[Literal["gpt2"]]  # what to import
        path: tyro.conf.Positional[Path]  # the folder: config.json, model.safetensors, and its tokenizer if it has one
        name: str = "gpt2"  # folder of the run; where it exists, the new one becomes NAME-2, NAME-3, ...
        runs: str = "runs"  # folder of all runs

    asked = tyro.cli(Import, prog="minilooped import", args=argv)
    run = import_gpt2(asked.path, asked.name, asked.runs)
    print(f"Wrote {run}. To sample:\n    {shell_command()} sample {shlex.quote(str(run))} --prompt 'Hello'")
    return 0


def plan(argv: list[str]) -> int:
    """say what a training run will take: parameters, operations, memory, hours"""
    import tyro

    from .model import LoopedConfig
    from .presets import PRESETS
    from .tools.plan import plan as page
    from .train import TrainConfig

    @dataclass(frozen=True)
    class Start:
        preset: Preset = "gpt2-small-loop"  # the settings to start from

    @dataclass(frozen=True)
    class Plan(Start):
        """Say what a training run will take. Every setting of the preset can be changed, as for `minilooped train`."""

        gpu: str | None = None  # the GPU, as in A100; None: the one that is here, else a few for comparison
        gpu_memory: float | None = None  # gigabytes that it has: the micro-batch is then made to fit
        mfu: float = 0.4  # the share of its best that is expected
        model: tyro.conf.OmitArgPrefixes[LoopedConfig] = LoopedConfig()
        train: tyro.conf.OmitArgPrefixes[TrainConfig] = TrainConfig()

    prog = "minilooped plan"
    start = started(Start, prog, argv)
    preset = PRESETS[start.preset]
    default = Plan(start.preset, model=preset.model, train=preset.train)
    asked = tyro.cli(Plan, prog=prog, args=argv, default=default)
    print(page(asked.model, asked.train, gpu=asked.gpu, mfu=asked.mfu, gpu_memory=asked.gpu_memory))
    return 0


def eval_(argv: list[str]) -> int:
    """score a trained model on benchmarks, at one or several loop counts"""
    import json
    from dataclasses import asdict
    from importlib.metadata import version

    import tyro

    from .files import make_folder, write_atomically
    from .science.provenance import provenance

    @dataclass(frozen=True)
    class Eval:
        """Score a trained model on tasks of lm-evaluation-harness, at one or several loop counts.

        --tasks loom is LOOM's zero-shot suite: ARC easy and challenge, HellaSwag, OpenBookQA, PIQA, WinoGrande and
        Social IQa. The harness downloads the data of its own tasks once; `lm-eval ls tasks` lists them.
        """

        run: tyro.conf.Positional[str]  # a run: its name in runs/, or its folder
        tasks: tuple[str, ...]  # names of tasks or groups of them
        n_loop: tuple[int, ...] = ()  # loop counts to score at; none: the one it was trained with
        num_fewshot: int | None = None  # solved examples before each question; None: as the task says, else 0
        limit: int | None = None  # only so many documents of each task, to try things out
        batch_size: int = 16  # rows per forward pass
        device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: a GPU where there is one
        include_path: Path | None = None  # folder with the YAML files of your own tasks, whose Python functions run too
        best: bool = False  # the weights with the lowest estimate of the validation loss, not those of the end
        out: Path | None = None  # JSON file to write, with where the numbers come from; after every loop count

    asked = tyro.cli(Eval, prog="minilooped eval", args=argv)
    try:
        from .tools.harness import LoopedLM, load_tasks, scores, table
    except ImportError as error:  # the extra is not installed
        raise ValueError(str(error)) from error

    for name, least in (("limit", 1), ("num_fewshot", 0)):
        if (value := getattr(asked, name)) is not None and value < least:
            raise ValueError(f"{name}={value} must be >= {least}")
    if asked.out is not None:  # what cannot be written is refused before the work
        if asked.out.exists():
            raise ValueError(f"{asked.out} exists: give another file with --out, or remove it")
        make_folder(asked.out.parent)
    model, tokenizer = _trained(asked.run, asked.device, asked.best)
    lms = [LoopedLM(model, tokenizer, n, asked.batch_size) for n in dict.fromkeys(asked.n_loop or [None])]
    tasks = load_tasks(asked.tasks, asked.include_path, asked.num_fewshot)
    source = provenance(shlex.join(["minilooped", "eval", *argv])) | {"lm_eval": version("lm_eval")}
    rows = []
    for lm in lms:
        rows += scores(lm, tasks, asked.limit)
        if asked.out is not None:
            record = dict(provenance=source, model=asdict(model.config), scores=[row._asdict() for row in rows])
            write_atomically(asked.out, json.dumps(record, indent=1) + "\n")
    print(table(rows))
    if asked.limit is not None:
        print(f"Only the first {asked.limit} documents of each task count here.")
    if asked.out is not None:
        print(f"Wrote {asked.out}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "plan": plan,
    "sample": sample,
    "prepare": prepare,
    "claims": claims,
    "sweep": sweep,
    "export": export,
    "import": import_,
    "eval": eval_,
}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status. What the user can put right is one line, not a traceback."""
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="minilooped",
        description="Looped transformers to build, break and measure.",
        epilog="\n".join(["commands:", *(f"  {name:9} {run.__doc__}" for name, run in COMMANDS.items())])
        + "\n\n`minilooped COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minilooped {__version__}")
    parser.add_argument("command", choices=COMMANDS, nargs="?", metavar="COMMAND")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...")
    for stream in (sys.stdout, sys.stderr):  # no character that a stream lacks may end a command
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    asked = parser.parse_args(argv)
    if asked.command is None:
        parser.print_help()
        return 0
    status = 1
    try:
        try:
            status = COMMANDS[asked.command](asked.options)
        finally:
            sys.stdout.flush()  # here a reader that has left can still be caught
        return status
    except BrokenPipeError:  # as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return status  # of a command whose work was done when its last words found no reader: 0
    except (ValueError, OSError, MemoryError, FloatingPointError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None:  # the system's own words
            message = f"{error.filename}: {error.strerror}: is the path right, and are you allowed to use it?"
        print(f"minilooped {asked.command}: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"minilooped {asked.command}: stopped at once", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
