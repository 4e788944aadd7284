"""Every `minilooped` command of the README runs as it stands there, at a small size and without a network."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minilooped import cli, train
from minilooped.cli import main
from minilooped.data import streaming as shards
from minilooped.data.streaming import Source
from minilooped.tools import harness, plan

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(command, comments=True)[1:]
    for line in re.findall(r"^    (minilooped .+)$", README, re.MULTILINE)
    for command in line.split(" && ")
]

# What makes a command small, put behind what the README says: (words that it contains, options to add).
SMALL = [
    (("train",), "--max-steps 2 --eval-every 0 --sample-every 0"),
    (("train", "--resume"), "--max-steps 4"),
    (("gpt2-small-loop",), "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --batch-size 2"),
    (("train", "gpt2-small-loop"), "--grad-accum 1 --no-compile"),  # compiling takes a minute
    (("prepare", "fineweb-edu"), "--tokens 2e3"),
    (("sample",), "--max-new-tokens 5"),
    (("sweep",), "--max-steps 2 --lrs 1e-3 --seeds 1"),
    (("eval",), "--limit 2 --include-path tasks"),
]


def smaller(command: list[str]) -> list[str]:
    """The command with the options that make it small; an option that is given twice counts the last time."""
    added = [options.split() for words, options in SMALL if all(word in command for word in words)]
    return command + [word for options in added for word in options]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the README's commands are given by their user: a text, a GPT-2, and here also what a hub would have."""
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my.txt").write_text("To be, or not to be: that is the question. " * 40, encoding="utf-8")
    (folder / "hub/fineweb-edu").mkdir(parents=True)
    rows = dict(text=[f"Page {i}: " + "all the world's a stage. " * 20 for i in range(30)])
    datasets.Dataset.from_dict(rows).to_parquet(folder / "hub/fineweb-edu/0.parquet")
    torch.manual_seed(0)
    sizes = dict(vocab_size=50257, n_positions=12, n_layer=1, n_head=2, n_embd=8)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder / "path/to/gpt2")
    return folder


def test_there_are_commands_and_each_is_known():
    assert len(COMMANDS) > 10
    assert {command[0] for command in COMMANDS} == set(cli.COMMANDS) - {"claims"}  # that one stands in a sentence


def test_the_commands_of_the_readme_run_in_its_order(folder, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(shards, "FINEWEB_EDU", Source(str(folder / "hub/fineweb-edu")))
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: 4.0)  # seconds over the whole validation split
    scored = []  # the harness's own tasks take a network once
    monkeypatch.setattr(harness, "load_tasks", lambda names, *_: names)
    monkeypatch.setattr(harness, "scores", lambda lm, tasks, limit: scored.append((lm.n_loop, tasks)) or [])
    memory = plan.memory
    monkeypatch.setattr(plan, "memory", lambda c, t, dtype: memory(replace(c, vocab_size=100), t, dtype))
    for command in COMMANDS:
        capsys.readouterr()
        assert main(smaller(command)) == 0, f"{shlex.join(command)}: {capsys.readouterr().err}"
    runs = {path.name for path in (folder / "runs").iterdir()}
    assert {"shakespeare", "shakespeare-2", "shakespeare-moe", "my", "gpt2-small-loop", "gpt2"} <= runs
    assert (folder / "runs/shakespeare/step-4").is_dir() and (folder / "runs/shakespeare/hf/config.json").is_file()
    assert (folder / "my-sweep.csv").is_file() and scored == [(n, ("loom",)) for n in (1, 3, 6)]
