"""The command line: quick help, typed options, clear refusals, and the three commands in a row."""

import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from typing import get_args

import pytest
import torch
from tiny_runs import TEXT, cut_back, fingerprint, prepared

from minilooped.cli import COMMANDS, Preset, main
from minilooped.engine.checkpoint import shell_command
from minilooped.model import LoopedConfig
from minilooped.presets import PRESETS
from minilooped.train import TrainConfig

TINY = (
    "--block-size 8 --n-layer 1 --n-loop 2 --n-head 2 --n-embd 16 --max-steps 4 --batch-size 4 --lr 0.01 "
    "--sample-every 0 --threads 1 --dtype float32"
).split()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Commands run in a folder of their own, with a text in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")  # so that no message is wrapped
    prepared(tmp_path)
    return tmp_path


def train_tiny(*options):
    return main(["train", "--data", "tokens", *TINY, *options])


def python(*args, **options):
    return subprocess.Popen(
        [sys.executable, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def printed_by(capsys, *argv):
    """Exit status, stdout, stderr of a command that leaves through SystemExit or returns."""
    try:
        status = main(list(argv))
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


# -- help --------------------------------------------------------------------------------------------------------------


def test_help_answers_within_a_second_and_without_torch():
    code = (
        "import sys, time\nfrom minilooped.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('torch' in sys.modules, 'tyro' in sys.modules, time.process_time())"
    )
    took = []
    for _ in range(3):  # the computer may be busy: CPU time, and the best of three counts
        out, _ = python("-c", code).communicate()
        torch_there, tyro_there, seconds = out.split()[-3:]
        took.append(float(seconds))
        assert (torch_there, tyro_there) == ("False", "False")
        assert all(re.search(rf"^  {name} +\w+", out, re.MULTILINE) for name in COMMANDS)
    assert min(took) < 1


def test_help_of_train_lists_every_setting_with_its_comment_and_the_presets(capsys):
    status, out, _ = printed_by(capsys, "train", "--help")
    assert status == 0
    for field in (*fields(LoopedConfig), *fields(TrainConfig)):
        assert f"--{field.name.replace('_', '-')}" in out, field.name
    for comment in ("unique blocks L", "peak learning rate", "the settings to start from"):
        assert comment in out
    assert all(name in out for name in PRESETS)


def test_help_shows_the_defaults_of_the_preset(capsys):
    _, out, _ = printed_by(capsys, "train", "--help", "--preset", "gpt2-small-4x3")
    assert re.search(r"--n-layer INT .*\(default: 4\)", out) and re.search(r"--n-loop INT .*\n?.*\(default: 3\)", out)


def test_no_setting_of_the_trainer_hides_one_of_the_model():
    """On the command line they share one name space."""
    assert not {field.name for field in fields(LoopedConfig)} & {field.name for field in fields(TrainConfig)}


def test_the_name_alone_shows_the_help(capsys):
    status, out, _ = printed_by(capsys)
    assert status == 0 and out.startswith("usage: minilooped") and "commands:" in out


@pytest.mark.parametrize("field", [field.name for field in fields(TrainConfig)])
def test_every_setting_of_the_trainer_has_its_comment(field):
    """Its help, which is read from behind the field. A formatter that breaks a long line puts it elsewhere."""
    assert re.search(rf"^    {field}: [^#\n]*[^( ]  # \S", inspect.getsource(TrainConfig), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    status, out, _ = printed_by(capsys, command, "--help")
    assert status == 0 and f"usage: minilooped {command}" in out


# -- refusals: one clear line, and nothing begun -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, line",
    [
        ("walk", "invalid choice: 'walk' (choose from"),
        (
            "train --preset small",
            "invalid choice 'small' for argument '--preset'. Expected one of ('shakespeare', 'shake",
        ),
        ("train --n-lop 3", "Unrecognized options: --n-lop, 3"),
        ("train --n-loop x", "--n-loop: invalid literal for int()"),
        ("train --n-loop 0", "n_loop=0 must be"),
        ("train --n-head 5", "n_embd=128 must be a multiple of n_head=5"),
        ("train --lr -1", "lr=-1.0 must be a finite number > 0"),
        ("train --mlp gleu", "invalid choice 'gleu' for argument '--mlp'"),
        ("train --vocab-size 7", "vocab_size is set by the tokenizer: leave it out"),
        ("train --data nowhere", "no data at nowhere: use 'shakespeare', which is built in, or a folder made by"),
        ("train --data text.txt", "is a file, not prepared data: run `minilooped prepare text.txt`"),
        ("train --data tokens --tokenizer gpt2", "tokens was prepared with the tokenizer 'char', not 'gpt2'"),
        ("train --data tokens --block-size 5000", "one window takes block_size + 1 = 5001 tokens"),
        ("train --resume nothing", "no run 'nothing' in runs; there are none yet: start one with `minilooped train`"),
        ("train --resume nothing --preset shakespeare", "Arguments --resume and --preset are not allowed together"),
        ("sample nothing", "no run 'nothing' in runs; there are none yet"),
        ("prepare nothing.txt", "no text file at nothing.txt: give the path of a UTF-8 text file"),
        ("prepare text.txt --out text.txt", "text.txt could not be written (File exists): make room or choose another"),
        ("train --data tokens --block-size 8 --runs text.txt", "runs='text.txt' is a file, and the runs need a folder"),
        ("sweep --data tokens --block-size 8 --out tokens", "no recorded results at tokens: is the path right"),
        ("train --name a/b --data tokens --block-size 8", "name='a/b' has to be usable as a folder name"),
    ],
)
def test_what_cannot_work_is_one_clear_line(folder, capsys, argv, line):
    status, out, err = printed_by(capsys, *argv.split())
    assert status in (1, 2) and line in err and "Traceback" not in err
    assert not (folder / "runs").exists()


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setitem(COMMANDS, "train", lambda argv: [].index_of)
    with pytest.raises(AttributeError):
        main(["train"])


@pytest.mark.parametrize(
    "option", ["--prompt Ж", "--prompt=", "--n-loop 0", "--temperature -1", "--top-k -1", "--max-new-tokens -1"]
)
def test_what_cannot_be_sampled_is_one_clear_line(capsys, option):
    assert train_tiny() == 0
    capsys.readouterr()
    status, out, err = printed_by(capsys, "sample", "shakespeare", "--prompt", "1", *option.split())
    assert status == 1 and err.startswith("minilooped sample: ") and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize("text, start", [("ab\n" * 50, "\n"), ("ba" * 80, "a")])
def test_a_sample_without_prompt_starts_with_what_the_tokenizer_knows(folder, capsys, text, start):
    prepared(folder, text)
    assert train_tiny("--max-steps", "1") == 0
    capsys.readouterr()
    assert main(["sample", "shakespeare", "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(start) and len(out) == len(start) + 3 + 1


# -- the commands ------------------------------------------------------------------------------------------------------


def test_prepare_train_sample_and_resume_in_the_words_that_they_print(folder, capsys):
    (folder / "two tales.txt").write_text(TEXT, encoding="utf-8")
    assert main(["prepare", "two tales.txt", "--val-fraction", "0.2"]) == 0
    train_command = re.search(r"minilooped (train .*)", capsys.readouterr().out)[1]
    assert main([*shlex.split(train_command), *TINY]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(r"validation loss \d\.\d{3}", out.splitlines()[-1])
    resume_command, sample_command = re.findall(r"^    \S*minilooped (.*)", out, re.MULTILINE)
    assert main(resume_command.split()) == 0
    assert "resume   runs/shakespeare/step-4" in capsys.readouterr().out
    assert json.loads((folder / "runs/shakespeare/config.json").read_text(encoding="utf-8"))["train"]["max_steps"] == 8
    sample_command = shlex.split(sample_command)
    texts = []
    for options in ([], [], ["--seed", "2"], ["--n-loop", "1"], ["--temperature", "0"], ["--top-k", "1"]):
        assert main([*sample_command, "--max-new-tokens", "30", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len({*texts[:4]}) == 3, "the seed decides, and the loops count"
    assert texts[4] == texts[5], "the likeliest of all is the likeliest of one"
    assert texts[0].startswith(sample_command[-1]) and len(texts[0]) == len(sample_command[-1]) + 30 + 1


def test_a_second_run_of_a_name_takes_the_next_number(folder):
    for _ in range(2):
        assert train_tiny() == 0
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["shakespeare", "shakespeare-2"]


def test_resume_takes_the_runs_own_settings_and_refuses_others(folder, capsys):
    assert train_tiny("--rule", "sqrt", "--save-every", "2") == 0
    straight = fingerprint(folder / "runs/shakespeare")
    copy = cut_back(folder / "runs/shakespeare", 2, folder / "elsewhere")
    status, _, err = printed_by(capsys, "train", "--resume", "elsewhere", "--n-loop", "3", "--lr", "0.1")
    assert status == 1 and "n_loop was 2 and is now 3; lr was 0.01 and is now 0.1" in err
    assert main(["train", "--resume", "elsewhere"]) == 0
    assert fingerprint(copy) == straight
    assert not (folder / "runs/elsewhere").exists()


@pytest.mark.parametrize("option, value", [("name", "other"), ("runs", "there")])
def test_resume_goes_on_with_the_run_it_names_and_no_other(folder, capsys, option, value):
    """Even where another run answers to the options."""
    assert train_tiny() == train_tiny("--name", "other") == 0
    shutil.copytree(folder / "runs", folder / "there")
    before = {run: fingerprint(run) for run in folder.glob("*/*") if (run / "config.json").exists()}
    capsys.readouterr()
    status, _, err = printed_by(capsys, *f"train --resume shakespeare --max-steps 8 --{option} {value}".split())
    assert status == 1 and f"--{option} cannot be changed with --resume" in err and err.count("\n") == 1
    assert len(before) == 4 and before == {run: fingerprint(run) for run in before}
    assert main("train --resume shakespeare --name shakespeare --runs runs --max-steps 5".split()) == 0, "its own"


def test_fewer_tokens_per_step_at_the_same_learning_rate_are_pointed_out(capsys):
    """The loss climbs when a recipe's batch is cut to fit a smaller memory and its learning rate is left alone."""
    assert "notice   32 tokens per step instead of the" not in printed_by(capsys, "train", "--help")[1]
    assert train_tiny() == 0
    assert "tokens per step instead" not in capsys.readouterr().out, "another lr was given"
    without_lr = [part for part in TINY if part not in ("--lr", "0.01")]
    assert main(["train", "--data", "tokens", *without_lr]) == 0
    model, config = PRESETS["shakespeare"]
    tokens = config.batch_size * config.grad_accum * model.block_size
    out = capsys.readouterr().out
    assert f"notice   32 tokens per step instead of the {tokens:,} that lr={config.lr:g} was chosen for" in out
    assert "raise grad_accum" in out and "lower lr" in out
    assert main(["train", "--data", "tokens", *without_lr, "--grad-accum", str(tokens // 32)]) == 0
    assert "instead" not in capsys.readouterr().out


def test_ctrl_c_saves_and_the_printed_command_goes_on(folder):
    options = [*TINY, "--max-steps", "100000", "--log-every", "1", "--schedule", "wsd", "--decay-steps", "0"]
    child = python("-m", "minilooped.cli", "train", "--data", "tokens", *options)
    log, deadline = folder / "runs/shakespeare/log.csv", time.monotonic() + 60
    while not log.exists() or log.read_text(encoding="utf-8").count("\n") < 4:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in err
    step = int(re.search(r"Stopped after step (\d+) of 100000; saved runs/shakespeare/step-\1\. To go on:", out)[1])
    command = out.splitlines()[-1].split()
    assert command[:2] == [shell_command(), "train"]
    length = ["--max-steps", str(step + 2)]
    assert main([*command[1:], *length]) == 0
    resumed = fingerprint(folder / "runs/shakespeare")
    shutil.rmtree(folder / "runs")
    assert main(["train", "--data", "tokens", *options, *length]) == 0
    assert fingerprint(folder / "runs/shakespeare") == resumed


@pytest.mark.parametrize(("argv", "status"), [("train --help", 1), ("prepare text.txt", 0)])  # 0: the work is done
def test_a_reader_that_leaves_early_is_no_error(argv, status):
    """As with `| head`, whether Python writes to the closed pipe in the command or at its end."""
    child = python("-m", "minilooped.cli", *argv.split())
    child.stdout.close()
    assert child.stderr.read() == "" and child.wait(60) == status


def test_the_exit_status_of_a_pipeline_is_that_of_the_command(folder):
    child = python("-m", "minilooped.cli", "sample", "nothing", env=os.environ | {"PYTHONWARNINGS": "error"})
    out, err = child.communicate(timeout=60)
    assert child.returncode == 1 and out == "" and err.startswith("minilooped sample: no run 'nothing'")


def test_sampling_takes_the_threads_of_the_training(capsys):
    """On a busy computer a second thread can make a small model many times slower."""
    assert train_tiny("--name", "tiny") == 0
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert main(["sample", "tiny", "--max-new-tokens", "2"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


# ----------------------------------------------------------------------------------------------------------------------
# sweep

GRID = "--rules none inverse --n-loops 1 2 --n-layers 1 --lrs 0.01 0.1 1e30 --seeds 1".split()


def sweep_tiny(*options):
    return main(["sweep", *TINY, "--data", "tokens", "--warmup-steps", "0", *GRID, *options])


def test_sweep_prints_the_best_learning_rate_of_each_model_and_goes_on(folder, capsys):
    assert sweep_tiny() == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^(none|inverse) +1 x (\d) +(\d\.\d{4}) +(0\.01|0\.1) ", out, re.MULTILINE)
    assert [row[:2] for row in rows] == [("none", "1"), ("none", "2"), ("inverse", "1"), ("inverse", "2")]
    assert rows[0][2:] == rows[2][2:]  # one loop: the same model
    assert "to keep that of 1 x 1" in out and "0.000 (one seed)" in out and "+0.0 (one seed)" in out
    stored = (folder / "sweep.csv").read_bytes()
    assert b"inf" in stored and b"minilooped sweep" in stored

    assert sweep_tiny() == 0  # nothing is left to run
    assert capsys.readouterr().out == out and (folder / "sweep.csv").read_bytes() == stored
    assert sweep_tiny("--seeds", "1", "2") == 0
    assert (folder / "sweep.csv").read_bytes().startswith(stored)
    assert "0, same rate" in capsys.readouterr().out


def test_sweep_says_which_model_never_trained(capsys):
    assert sweep_tiny("--lrs", "1e30", "--n-loops", "1") == 0
    assert re.search(r"^none +1 x 1 +every learning rate diverged", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rules", "none", "nonsense"], "rule='nonsense' is not one of none, sqrt"),
        (["--n-loops", "2", "0"], "n_loop=0 must be an int >= 1"),
        (["--lrs", "0.1", "0"], "lr=0.0 must be a finite number > 0"),
        (["--lrs"], "give at least one value to each of --rules"),
    ],
)
def test_sweep_refuses_before_the_first_run(folder, capsys, options, message):
    assert sweep_tiny(*options) == 1
    assert message in capsys.readouterr().err and not (folder / "sweep.csv").exists()


def test_the_command_line_offers_every_preset():
    assert get_args(Preset) == tuple(PRESETS)
