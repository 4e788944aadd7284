"""Runs that go on: bit for bit where they may, refused by name where they may not."""

import json
import math
import os
import random
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from tiny_runs import (
    DENSE,
    ENDLESS,
    LOOM,
    TEXT,
    cut_back,
    edit_state,
    fingerprint,
    newest_step,
    prepared,
    settings,
    sign,
    start_child,
)

from minilooped import train as trainer
from minilooped.data import BatchStream, load_corpus
from minilooped.engine.checkpoint import checkpoints, load_model, read_config
from minilooped.engine.log import read_log
from minilooped.engine.resume import changes
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.presets import PRESETS
from minilooped.train import DEFAULTS, TrainConfig, train

VARIANTS = {
    "dense, AdamW, 2 micro-batches": (DENSE, dict(grad_accum=2)),
    "dense, Muon, bfloat16": (DENSE, dict(optimizer="muon", dtype="bfloat16")),
    "LOOM, Muon, WSD": (LOOM, dict(optimizer="muon", schedule="wsd")),
    "LOOM, one update": (LOOM, dict(step_per_segment=False, dtype="float32")),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, dropout, variant):
    model_config, changes = VARIANTS[variant]
    config = settings(tmp_path, eval_every=4, sample_every=5, **changes)
    straight = train(model_config, config)
    copy = cut_back(straight.run, 10, tmp_path / "runs" / "copy")
    assert fingerprint(copy) != fingerprint(straight.run)
    torch.manual_seed(99), random.seed(99)  # whatever was drawn meanwhile
    resumed = train(model_config, replace(config, name="copy"), resume=True)
    assert fingerprint(copy) == fingerprint(straight.run)
    assert resumed.val_loss == straight.val_loss
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.history] for r in (straight, resumed)]
    assert timeless[0] == timeless[1]
    assert read_log(copy / "log.csv") == resumed.history


@pytest.mark.parametrize("forgotten", ["random", "stream", "optimizer", "buffers"])
def test_without_any_one_part_of_the_state_the_resumed_run_differs(tmp_path, monkeypatch, dropout, forgotten):
    """So the test above can see each of them."""
    straight = train(LOOM, settings(tmp_path))
    copy = cut_back(straight.run, 10, tmp_path / "runs" / "copy")
    if forgotten == "random":
        monkeypatch.setattr(trainer, "set_random_state", lambda state: None)
    elif forgotten == "stream":
        monkeypatch.setattr(BatchStream, "load_state_dict", lambda stream, state: None)
    elif forgotten == "optimizer":
        monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda optimizer, state: None)
    else:
        load = LoopedGPT.load_state_dict
        monkeypatch.setattr(
            LoopedGPT,
            "load_state_dict",
            lambda model, weights: load(
                model, {k: v for k, v in weights.items() if "router.bias" not in k}, strict=False
            ),
        )
    train(LOOM, settings(tmp_path, name="copy"), resume=True)
    assert fingerprint(copy) != fingerprint(straight.run)


def test_a_run_that_is_done_goes_on_only_to_a_larger_max_steps(tmp_path):
    config = settings(tmp_path, max_steps=4)
    run = train(DENSE, config).run
    with pytest.raises(ValueError, match="has done its 4 steps: give a larger max_steps"):
        train(DENSE, config, resume=True)
    result = train(DENSE, replace(config, max_steps=7), resume=True)
    assert result.step == 7 and result.run == run and [row["step"] for row in result.history] == [1, 2, 3, 4, 5, 6, 7]
    assert read_config(run)["train"]["max_steps"] == 7


@pytest.mark.parametrize(
    "part, name, value",
    [
        ("model", "n_loop", 3),
        ("model", "n_embd", 32),
        ("model", "rule", "sqrt"),
        ("train", "lr", 1.0),
        ("train", "seed", 2),
    ],
)
def test_changed_settings_are_refused_field_by_field(tmp_path, part, name, value):
    config = settings(tmp_path, max_steps=4)
    run = train(DENSE, config).run
    before = fingerprint(run)
    model_config, config = DENSE, replace(config, max_steps=8, beta1=0.5)
    if part == "model":
        model_config = replace(model_config, **{name: value})
    else:
        config = replace(config, **{name: value})
    with pytest.raises(ValueError) as refusal:
        train(model_config, config, resume=True)
    assert f"{name} was " in str(refusal.value) and f"now {value!r}" in str(refusal.value)
    assert "beta1 was 0.9 and is now 0.5" in str(refusal.value), "all of them are listed"
    assert "max_steps was" not in str(refusal.value), "this one may change"
    assert fingerprint(run) == before and read_config(run)["train"]["max_steps"] == 4


# Where a run lies and computes, what memory it takes, how long it goes on, how often it reports.
MAY_CHANGE = set(
    """
    name runs max_steps log_every eval_every eval_batches sample_every save_every device threads compile peak_tflops
    recompute_loops loss_chunk data
""".split()
)


@pytest.mark.parametrize(
    "part, name",
    [(part, field.name) for part, kind in (("model", LoopedConfig), ("train", TrainConfig)) for field in fields(kind)],
)
def test_every_setting_that_moves_a_number_is_compared(part, name):
    before, now = ({"model": asdict(DENSE), "train": asdict(TrainConfig())} for _ in range(2))
    assert changes(before, now, DEFAULTS) == ""
    another = 7 if name in ("batch_size", "grad_accum") else "another"
    now[part][name] = another
    line = f"{name} was {before[part][name]!r} and is now {another!r}"
    if another == 7:  # the division into micro-batches is free, the tokens of a step are not
        line = f"batch_size x grad_accum was 16 and is now {7 if name == 'batch_size' else 16 * 7}"
    assert changes(before, now, DEFAULTS) == ("" if name in MAY_CHANGE else line)


def test_the_same_tokens_of_a_step_may_be_divided_otherwise():
    before, now = ({"model": asdict(DENSE), "train": asdict(TrainConfig())} for _ in range(2))
    now["train"] |= {"batch_size": 4, "grad_accum": 4}
    assert changes(before, now, DEFAULTS) == ""


def test_the_descent_of_wsd_may_begin_elsewhere_and_that_of_a_cosine_has_no_such_setting():
    before, now = ({"model": asdict(DENSE), "train": asdict(TrainConfig(schedule="wsd"))} for _ in range(2))
    now["train"]["decay_steps"] = 5
    assert changes(before, now, DEFAULTS) == ""
    before["train"]["schedule"] = now["train"]["schedule"] = "cosine"
    assert changes(before, now, DEFAULTS) == "decay_steps was 100 and is now 5"


def test_a_config_that_was_edited_under_its_checkpoint_is_refused(tmp_path):
    """Another loop count fits the weights, and would go on with another model."""
    config = settings(tmp_path, max_steps=2)
    run = train(DENSE, config).run
    stored = read_config(run)
    stored["model"]["n_loop"] = 3
    (run / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"config.json is not that of step-2 \(n_loop was 2 and is now 3\): restore it"
    ):
        train(replace(DENSE, n_loop=3), replace(config, max_steps=3), resume=True)


@pytest.mark.parametrize("value", [None, -math.inf, [], torch.zeros(3)], ids=["none", "inf", "list", "tensor"])
def test_a_state_of_other_types_is_refused_in_one_line(tmp_path, value):
    config = settings(tmp_path, max_steps=1)
    run = train(DENSE, config).run
    file = checkpoints(run)[-1] / "state.pt"
    before = torch.load(file, weights_only=True)
    odd = [{key: value} for key in before.keys() - {"seconds"}] + [{"machine": before["machine"] | {"threads": value}}]
    for part in odd:
        torch.save(before | part, file)
        sign(file.parent)
        with pytest.raises(ValueError, match="(not fit the config of its run|was trained on other tokens)") as refusal:
            train(DENSE, replace(config, max_steps=2), resume=True)
        assert "\n" not in str(refusal.value), part


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_optimizers_options_are_the_configs_and_not_the_states(tmp_path, optimizer):
    config = settings(tmp_path, optimizer=optimizer)
    straight = train(DENSE, config).run
    copy = cut_back(straight, 10, tmp_path / "runs" / "copy")

    def edit(state):
        for part in state["optimizer"].get("optimizers", [state["optimizer"]]):
            for group in part["param_groups"]:
                others = dict(weight_decay=9.0, lr_scale=7.0, betas=(0.1, 0.1), momentum=0.1)
                group |= {name: value for name, value in others.items() if name in group}

    edit_state(copy, edit)
    train(DENSE, replace(config, name="copy"), resume=True)
    assert fingerprint(copy) == fingerprint(straight)


@pytest.mark.skipif(os.name != "posix", reason="needs the locks of POSIX")
def test_two_trainings_of_one_run_are_refused(tmp_path):
    config = settings(tmp_path, **ENDLESS)
    run = tmp_path / "runs" / "tiny"
    child = start_child(config, False, 0, run)
    with pytest.raises(ValueError, match=f"another process trains {run}: wait for it, stop it, or start a new run"):
        train(LOOM, replace(config, max_steps=newest_step(run) + 99), resume=True)
    child.kill()
    child.join()
    config = replace(config, max_steps=newest_step(run) + 1)
    assert train(LOOM, config, resume=True).step == config.max_steps


def test_another_tokenizer_and_other_data_are_refused(tmp_path):
    config = settings(tmp_path, max_steps=2)
    train(DENSE, config)
    config = replace(config, max_steps=4)
    prepared(tmp_path, TEXT + "10 times 10 is 100.\n" * 20)  # the same characters
    with pytest.raises(ValueError, match="was trained on 2209 tokens"):
        train(DENSE, config, resume=True)
    prepared(tmp_path, TEXT.replace("2", "x").replace("3", "2").replace("x", "3"))  # and as many of them
    with pytest.raises(ValueError, match="was trained on other tokens than .* now has"):
        train(DENSE, config, resume=True)
    prepared(tmp_path, TEXT.replace("t", "T"))
    with pytest.raises(ValueError, match="trained with the tokenizer 'char'"):
        train(DENSE, config, resume=True)
    prepared(tmp_path, TEXT + "?")
    with pytest.raises(ValueError, match="vocab_size was"):
        train(DENSE, config, resume=True)


def test_another_length_is_announced_with_the_learning_rates(tmp_path, capsys):
    """After a finished descent the next step may be at the peak again."""
    config = settings(tmp_path, max_steps=6, schedule="wsd", warmup_steps=0, decay_steps=4, min_lr_ratio=0.0, lr=0.02)
    first = train(DENSE, config)
    assert "notice" not in capsys.readouterr().out
    longer = train(DENSE, replace(config, max_steps=12), resume=True)
    line = "notice   max_steps was 6, now 12: the next step has learning rate 0.02, the last one had 0.005\n"
    assert line in capsys.readouterr().out
    assert (first.history[-1]["lr"], longer.history[6]["lr"]) == (0.005, 0.02)


def test_many_passes_over_a_text_are_announced(tmp_path, capsys):
    tokens = len(load_corpus(settings(tmp_path).data).train)
    for passes in (9, 11):
        train(DENSE, settings(tmp_path, max_steps=1, batch_size=passes * tokens // DENSE.block_size + 1))
        assert (f"notice   {passes} times over the training data" in capsys.readouterr().out) == (passes > 10)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass_a_few_times_over_the_embedded_text_or_need_a_longer_one(name):
    model, config = PRESETS[name]
    tokens = config.max_steps * config.batch_size * config.grad_accum * model.block_size
    passes = tokens / len(load_corpus("shakespeare", config.tokenizer).train)
    assert passes < 5 if name.startswith("shakespeare") else passes > 100


def test_another_machine_is_announced(tmp_path, capsys):
    config = settings(tmp_path, max_steps=2, dtype="float32")
    run = train(DENSE, config).run
    edit_state(run, lambda state: state["machine"].update(threads=7))
    capsys.readouterr()
    train(DENSE, replace(config, max_steps=3), resume=True)
    printed = capsys.readouterr().out
    assert "notice   threads was 7, now 1: not the bits of an uninterrupted run" in printed
    assert printed.count("not the bits") == 1


def test_a_log_row_that_a_kill_cut_short_is_left_out(tmp_path):
    config = settings(tmp_path, max_steps=4)
    run = train(DENSE, config).run
    with open(run / "log.csv", "a", encoding="utf-8") as file:
        file.write("5,1.2")
    result = train(DENSE, replace(config, max_steps=6), resume=True)
    assert (
        [row["step"] for row in read_log(run / "log.csv")] == [1, 2, 3, 4, 5, 6] == [r["step"] for r in result.history]
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("edit", ["shape", "name", "missing"])
def test_a_state_that_does_not_fit_is_refused_before_a_step(tmp_path, optimizer, edit):
    """torch takes it; its fused kernels then write past the end of a moment that is too small."""
    config = settings(tmp_path, max_steps=2, optimizer=optimizer)
    run = train(DENSE, config).run

    def misfit(state):
        part = state["optimizer"].get("optimizers", [state["optimizer"]])[0]
        moments = part["state"][0]
        name = sorted(moments)[0]
        if edit == "shape":
            moments[name] = torch.zeros(3)
        elif edit == "name":
            moments["other"] = moments.pop(name)
        else:
            del part["param_groups"]

    edit_state(run, misfit)
    with pytest.raises(
        ValueError, match=r"step-2 does not fit the config of its run \(.*\): restore it, or train again"
    ):
        train(DENSE, replace(config, max_steps=3), resume=True)


def test_weights_of_another_model_are_refused(tmp_path):
    config = settings(tmp_path, max_steps=2)
    run = train(DENSE, config).run
    other = train(replace(DENSE, n_embd=32), replace(config, name="other")).run
    shutil.copytree(other / "step-2", run / "step-2", dirs_exist_ok=True)
    shutil.copy(other / "model.safetensors", run)
    with pytest.raises(ValueError, match="does not fit the config of its run .*wte.weight|RuntimeError"):
        load_model(run)
    with pytest.raises(ValueError, match=r"is not that of step-2 \(n_embd was 32 and is now 16\): restore it"):
        train(DENSE, replace(config, max_steps=3), resume=True)
    edit_state(run, lambda state: state.pop("settings"))  # as in older versions
    with pytest.raises(ValueError, match="does not fit the config of its run .*wte.weight|RuntimeError"):
        train(DENSE, replace(config, max_steps=3), resume=True)


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "step,loss\n1,2\n", "\0", "9" * 200_000])
def test_a_log_that_is_none_is_named_and_left_alone(tmp_path, content):
    config = settings(tmp_path, max_steps=2)
    log = train(DENSE, config).run / "log.csv"
    text = log.read_text(encoding="utf-8")
    if content:
        log.write_text(text.partition("\n")[0] * (content == "\0") + content + "\n" + text, encoding="utf-8")
    else:
        log.write_text(text.replace("\n1,", "\nx,"), encoding="utf-8")
    before = log.read_bytes()
    with pytest.raises(ValueError, match="log.csv is not the log of a run .*: restore it, or move it away"):
        train(DENSE, replace(config, max_steps=3), resume=True)
    assert log.read_bytes() == before


def test_a_log_is_written_anew_whole_or_not_at_all(tmp_path, monkeypatch):
    """Resuming writes it anew: what breaks off then must not cost the rows that were there."""
    config = settings(tmp_path, max_steps=3)
    log = train(DENSE, config).run / "log.csv"
    before = log.read_bytes()
    write = Path.write_bytes

    def full(path, content):
        if path.name.startswith("log"):
            raise OSError(28, "disk full")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"log.csv could not be written \(disk full\)"):
        train(DENSE, replace(config, max_steps=4), resume=True)
    assert log.read_bytes() == before


def test_a_plot_that_cannot_be_drawn_is_a_notice_and_the_run_is_whole(tmp_path, monkeypatch, capsys):
    def half_way(figure, path, **options):
        path.write_bytes(b"half")
        raise OSError(28, "disk full")

    monkeypatch.setattr(Figure, "savefig", half_way)
    result = train(DENSE, settings(tmp_path, max_steps=2))
    assert "notice   the picture of the losses failed and is left out" in capsys.readouterr().out
    assert not list(result.run.glob("loss*")) and load_model(result.run) and math.isfinite(result.val_loss)
