"""How runs end: what a kill leaves can be finished, what only reports ends nothing, and what is bad is not kept."""

import io
import math
import os
import random
import shutil
import signal
import sys
import threading
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_runs import DENSE, LOOM, TEXT, fingerprint, prepared, settings
from tqdm import tqdm

from minilooped import train as trainer
from minilooped.engine.checkpoint import checkpoints, load_model, read_config
from minilooped.engine.log import read_log
from minilooped.engine.processes import processes
from minilooped.engine.stopping import POLITE, StopSignal
from minilooped.model import LoopedGPT
from minilooped.train import TrainConfig, train


class Killed(BaseException):
    """Ends a call as a kill would: no except clause of the package catches it."""


def killed(*_, **__):
    raise Killed


# -- a run that is killed can always be finished -----------------------------------------------------------------------


@pytest.mark.parametrize("at", ["evaluate", "publish_weights", "plot_losses", "write_result"])
def test_a_run_killed_after_its_last_step_is_finished_by_resuming_it(tmp_path, monkeypatch, capsys, at):
    whole = train(DENSE, settings(tmp_path, name="whole", max_steps=6))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, at, killed)
        with pytest.raises(Killed):
            train(DENSE, settings(tmp_path, max_steps=6))
    finished = train(DENSE, settings(tmp_path, max_steps=6), resume=True)
    assert finished.val_loss == whole.val_loss and f"validation loss {whole.val_loss:.3f}" in capsys.readouterr().out
    for name in ("model.safetensors", "log.csv", "loss.png", "result.json"):
        assert (finished.run / name).is_file()
    assert finished.history == [
        row | {"seconds": own["seconds"]} for row, own in zip(whole.history, finished.history, strict=True)
    ]
    with pytest.raises(ValueError, match="has done its 6 steps: give a larger max_steps"):
        train(DENSE, settings(tmp_path, max_steps=6), resume=True)


def test_a_run_killed_on_a_smaller_card_before_its_next_checkpoint_goes_on(tmp_path, monkeypatch):
    """The batch is halved on resuming. config.json must not say so before a checkpoint does."""
    config = settings(tmp_path, max_steps=6, save_every=2, device="cpu", dtype="float32")
    whole = train(DENSE, replace(config, name="whole"))
    run = train(DENSE, replace(config, max_steps=4)).run
    before = (run / "config.json").read_bytes()

    def small_device(next_loss, batches, *rest):
        if len(batches[0][0]) > 2:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "rehearse", small_device)
        patch.setattr(trainer, "training_steps", killed)
        with pytest.raises(Killed):
            train(DENSE, config, resume=True)
        assert (run / "config.json").read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "rehearse", small_device)
        end = train(DENSE, config, resume=True)
    assert read_config(run)["train"]["batch_size"] == 2 and read_config(run)["train"]["grad_accum"] == 2
    for name, weight in load_file(whole.run / "model.safetensors").items():
        torch.testing.assert_close(load_file(end.run / "model.safetensors")[name], weight, rtol=1e-5, atol=1e-6)


def test_the_division_of_a_step_may_change_on_resume_and_its_tokens_may_not(tmp_path):
    config = settings(tmp_path, max_steps=2)
    train(DENSE, config)
    divided = replace(config, max_steps=3, batch_size=config.batch_size // 2, grad_accum=2)
    assert train(DENSE, divided, resume=True).step == 3
    with pytest.raises(ValueError, match="batch_size x grad_accum was 4 and is now 8"):
        train(DENSE, replace(divided, max_steps=4, batch_size=4), resume=True)


def test_after_a_halving_the_evaluation_has_the_smaller_batch_too(tmp_path, monkeypatch):
    sizes = []

    def small_device(next_loss, batches, *rest):
        if len(batches[0][0]) > 2:
            raise MemoryError

    def spy(model, batches, n_loop=None):
        batches = list(batches)
        sizes.extend(len(x) for x, _ in batches)
        return 1.0

    monkeypatch.setattr(trainer, "rehearse", small_device)
    monkeypatch.setattr(trainer, "evaluate", spy)
    train(DENSE, settings(tmp_path, max_steps=2, eval_every=1))
    assert max(sizes) == 2


# -- where the data lie ------------------------------------------------------------------------------------------------


def test_data_that_moved_are_the_same_data(tmp_path):
    config = settings(tmp_path, max_steps=2)
    train(DENSE, config)
    shutil.move(config.data, tmp_path / "moved")
    moved = replace(config, max_steps=4, data=str(tmp_path / "moved"))
    end = train(DENSE, moved, resume=True)
    assert end.step == 4 and read_config(end.run)["train"]["data"] == moved.data
    other = prepared(tmp_path / "other", TEXT.replace("2", "x").replace("3", "2").replace("x", "3"))
    with pytest.raises(ValueError, match="was trained on other tokens than .* now has"):
        train(DENSE, replace(moved, max_steps=6, data=str(other)), resume=True)


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_the_weights_of_the_lowest_estimate_are_kept_and_named(tmp_path, capsys, monkeypatch):
    estimates = iter([3.0, 2.0, 2.5, 4.0, 1.5])  # the last one is the final loss
    monkeypatch.setattr(trainer, "evaluate", lambda model, batches, n_loop=None: next(estimates))
    weights = {}
    result = train(
        DENSE,
        settings(tmp_path, max_steps=10, eval_every=2),
        on_step=lambda step: weights.update({step.number: step.model.wte.weight.detach().clone()}),
    )
    with safe_open(result.run / "best.safetensors", "pt") as file:
        assert file.metadata() == {"step": "4", "val_loss": "2.0"}
    assert "The lowest estimate was 2.000, after step 4: best.safetensors has its weights." in capsys.readouterr().out
    assert torch.equal(load_model(result.run, best=True)[0].wte.weight, weights[4])
    assert torch.equal(load_model(result.run)[0].wte.weight, weights[10])


def test_a_run_without_estimates_has_no_best_weights(tmp_path):
    with pytest.raises(ValueError, match="kept no best weights"):
        load_model(train(DENSE, settings(tmp_path, max_steps=1)).run, best=True)


def poisoned_update(step: int):
    """An on_step that makes a weight NaN after this step."""

    def poison(done):
        if done.number == step:
            with torch.no_grad():
                done.model.wte.weight[0, 0] = math.nan

    return poison


@pytest.mark.parametrize("options", [dict(), dict(sample_every=5), dict(eval_every=5)], ids=["save", "sample", "eval"])
def test_weights_that_are_not_finite_are_never_a_good_checkpoint(tmp_path, options):
    """Whoever meets them first, a save, a sample or an estimate: the error is one, and the run before it is left."""
    config = settings(tmp_path, max_steps=12, save_every=4, **options)
    with pytest.raises(FloatingPointError, match="stopped after step [58]: .*Last good checkpoint: .*step-4"):
        train(DENSE, config, on_step=poisoned_update(5))
    run = tmp_path / "runs" / "tiny"
    assert [path.name for path in checkpoints(run)] == ["step-4"] and not (run / "model.safetensors").exists()
    assert load_model(run)[0].wte.weight.isfinite().all()


@pytest.mark.parametrize("sample_every", [0, 1])
def test_a_last_step_that_blows_up_publishes_nothing_and_fails(tmp_path, sample_every):
    """The first step's loss is that of the initial weights, and nothing after the step looks at the new ones."""
    config = settings(
        tmp_path, max_steps=1, lr=1e12, warmup_steps=0, weight_decay=0.0, sample_every=sample_every, dtype="float32"
    )
    with pytest.raises(FloatingPointError, match="stopped after step 1: .*Try a lower lr"):
        train(replace(DENSE, mlp="swiglu"), config, on_step=poisoned_update(1))
    assert not (tmp_path / "runs" / "tiny" / "model.safetensors").exists()


# -- what only reports ends nothing ------------------------------------------------------------------------------------


class Stream:
    """A stream that fails in its own way on every write."""

    encoding = "utf-8"

    def __init__(self, error: Exception):
        self.error = error

    def write(self, text):
        raise self.error

    flush = isatty = lambda self: False


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error"), ValueError("I/O on closed file")]
)
def test_a_run_goes_on_without_its_streams_and_holds_up_no_other_thread(tmp_path, monkeypatch, error):
    monkeypatch.setattr(sys, "stdout", Stream(error))
    monkeypatch.setattr(sys, "stderr", Stream(error))
    result = train(DENSE, settings(tmp_path, max_steps=4, eval_every=2, sample_every=2))
    assert result.step == 4 and math.isfinite(result.val_loss) and (result.run / "result.json").is_file()
    another = threading.Thread(target=tqdm, kwargs=dict(file=io.StringIO()), daemon=True)
    another.start()
    another.join(20)
    assert not another.is_alive(), "its bar waits for the lock of tqdm"


def test_a_stream_that_lacks_a_character_shows_another(tmp_path, monkeypatch):
    """As on Windows with an output that goes to a file."""
    text = "".join(f"{i}は{j}、{i * j}です。\n" for i in range(12) for j in range(12))
    prepared(tmp_path, text)
    file = open(tmp_path / "log.txt", "w", encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", file)
    result = train(DENSE, settings(tmp_path, max_steps=4, sample_every=2, save_every=2))
    file.close()
    said = (tmp_path / "log.txt").read_text(encoding="cp1252")
    assert result.step == 4 and "validation loss" in said and "?" in said


def test_a_plot_asks_for_no_backend_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://nowhere.backend")
    assert (train(DENSE, settings(tmp_path, max_steps=2)).run / "loss.png").is_file()


def test_a_sample_that_fails_is_a_notice(tmp_path, monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError("no\nsuch thing")

    monkeypatch.setattr(trainer, "sample", fails)
    result = train(DENSE, settings(tmp_path, max_steps=2, sample_every=1))
    said = capsys.readouterr().out
    assert "notice   a sample failed and is left out (RuntimeError: no such thing)" in said
    assert math.isfinite(result.val_loss)


def test_a_run_whose_folder_is_deleted_makes_it_again_and_says_so(tmp_path, capsys):
    config = settings(tmp_path, max_steps=6, save_every=3, log_every=4)
    run = tmp_path / "runs" / "tiny"
    result = train(DENSE, config, on_step=lambda step: shutil.rmtree(run) if step.number == 1 else None)
    assert f"notice   {run} has been deleted: it is made again" in capsys.readouterr().out
    assert read_config(run)["train"] == asdict(config) and read_log(run / "log.csv") == result.history
    assert train(DENSE, replace(config, max_steps=7), resume=True).step == 7


def test_a_missing_log_is_begun_anew(tmp_path, capsys):
    config = settings(tmp_path, max_steps=4)
    run = train(DENSE, config).run
    (run / "log.csv").unlink()
    result = train(DENSE, replace(config, max_steps=6), resume=True)
    assert f"notice   {run / 'log.csv'} is missing" in capsys.readouterr().out
    assert [row["step"] for row in result.history] == [5, 6] and read_log(run / "log.csv") == result.history


# -- only what the run wrote is touched --------------------------------------------------------------------------------


def test_a_copy_under_a_similar_name_is_left_alone(tmp_path):
    config = settings(tmp_path, max_steps=4, save_every=1)
    run = train(DENSE, config).run
    shutil.copytree(run / "step-4", run / "step-0001")
    train(DENSE, replace(config, max_steps=8), resume=True)
    assert (run / "step-0001" / "state.pt").is_file()
    assert [path.name for path in checkpoints(run)] == ["step-7", "step-8"]


def test_a_file_in_a_checkpoints_place_is_named_before_the_first_step(tmp_path):
    config = settings(tmp_path, max_steps=2)
    run = train(DENSE, config).run
    (run / "step-4").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="step-4 is no folder, and a checkpoint may need its name: move it away"):
        train(DENSE, replace(config, max_steps=4), resume=True)
    assert (run / "step-4").read_text(encoding="utf-8") == "mine"


# -- signals, generators, processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", POLITE)
def test_every_polite_signal_saves(tmp_path, number):
    config = settings(tmp_path, max_steps=12, save_every=0)
    stopped = train(DENSE, config, on_step=lambda step: signal.raise_signal(number) if step.number == 3 else None)
    assert stopped.step == 3 and [path.name for path in checkpoints(stopped.run)] == ["step-3"]
    whole = train(DENSE, replace(config, name="whole"))
    assert fingerprint(train(DENSE, config, resume=True).run) == fingerprint(whole.run)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.asked
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_callers_random_numbers_are_left_alone(tmp_path):
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    train(DENSE, settings(tmp_path, max_steps=2, sample_every=1))
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]


def test_torchrun_on_the_cpu_touches_no_gpu(monkeypatch):
    """More processes than GPUs are fine there, and on CUDA they are refused by name."""
    asked = []
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: asked.append(backend))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(device))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with processes(torch.device("cpu")) as joined:
        assert joined == (1, 2) and asked == ["gloo"]
    with pytest.raises(ValueError, match="process 1 of this machine has no GPU, for there are 1: .*device=cpu"):
        with processes(torch.device("cuda")):
            pass


# -- sizes and recipes that cannot be meant ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, training, named",
    [
        (dict(n_layer=10**5), {}, "n_layer=100000"),
        (dict(n_loop=10**5, n_embd=160), {}, "200000 block visits"),
        ({}, dict(grad_accum=10**9), "grad_accum=1000000000"),
        ({}, dict(batch_size=10**10), "batch_size=10000000000"),
    ],
)
def test_what_no_memory_can_hold_is_refused_before_anything_is_made(tmp_path, monkeypatch, model, training, named):
    monkeypatch.setattr(LoopedGPT, "to", killed)  # no model gets as far as its device
    monkeypatch.setattr("minilooped.engine.memory.total_memory", lambda device: 10**9)
    with pytest.raises(MemoryError, match=rf"{named}.* would take .* [GT]B, and the device has 1.00 GB"):
        train(replace(DENSE, **model), settings(tmp_path, **training))


def test_a_warm_up_longer_than_the_training_is_announced(tmp_path, capsys):
    train(DENSE, settings(tmp_path, max_steps=2, warmup_steps=14))
    said = "notice   warmup_steps=14 is more than max_steps=2: the rate ends at 14% of its peak. Lower warmup_steps too"
    assert said in capsys.readouterr().out


def test_any_number_of_estimates_is_drawn_as_it_goes(tmp_path, monkeypatch):
    """A billion of them would fill the memory before the first step."""
    taken = []
    monkeypatch.setattr(
        trainer, "evaluate", lambda model, batches, n_loop=None: taken.append(next(iter(batches))) or 1.0
    )
    train(DENSE, settings(tmp_path, max_steps=2, eval_every=1, eval_batches=10**9))
    assert len(taken) == 2


def test_the_branch_of_a_stable_run_gets_its_descent(tmp_path, capsys):
    """wsd: copy the folder of a stable run, and let the copy go down."""
    stable = settings(tmp_path, schedule="wsd", decay_steps=0, min_lr_ratio=0.0, warmup_steps=0, max_steps=6)
    run = train(DENSE, stable).run
    shutil.copytree(run, run.with_name("branch"))
    branch = replace(stable, name="branch", max_steps=8, decay_steps=2)
    result = train(DENSE, branch, resume=True)
    assert "notice   decay_steps was 0, now 2: the next step has learning rate 0.01" in capsys.readouterr().out
    assert [row["lr"] for row in result.history[-3:]] == [0.01, 0.01, 0.005]


# -- weights of another run --------------------------------------------------------------------------------------------


def test_a_run_can_begin_with_anothers_weights_on_other_data(tmp_path):
    first = train(LOOM, settings(tmp_path, max_steps=3)).run
    other = prepared(tmp_path / "other", TEXT[::-1])
    seen = []
    config = settings(tmp_path, name="second", data=str(other), max_steps=2, lr=1e-3, optimizer="muon")
    result = train(LOOM, config, start=first, on_step=lambda step: seen.append(step.number))
    assert seen == [1, 2] and result.run.name == "second"
    same = train(
        LOOM, replace(config, name="again", lr=1e-30, weight_decay=0.0), start="tiny"
    )  # by name; it moves nothing
    for name, weight in load_file(first / "model.safetensors").items():
        if not name.endswith("router.bias"):
            torch.testing.assert_close(load_file(same.run / "model.safetensors")[name], weight, rtol=0, atol=1e-7)


def test_weights_with_other_characters_or_shapes_are_refused(tmp_path):
    train(DENSE, settings(tmp_path, max_steps=1))
    with pytest.raises(ValueError, match="does not fit the config of its run"):
        train(replace(DENSE, n_layer=3), settings(tmp_path, name="b", max_steps=1), start="tiny")
    other = prepared(tmp_path / "other", TEXT.replace("t", "T"))
    with pytest.raises(ValueError, match="trained with the tokenizer 'char'"):
        train(DENSE, settings(tmp_path, name="b", data=str(other)), start="tiny")
    with pytest.raises(FileNotFoundError, match="no run 'nothing'"):
        train(DENSE, settings(tmp_path, name="b"), start="nothing")


# -- on_step -----------------------------------------------------------------------------------------------------------


def test_on_step_sees_every_step_with_its_model_and_moves_nothing(tmp_path):
    seen = []
    result = train(LOOM, settings(tmp_path, max_steps=4), on_step=seen.append)
    assert [step.number for step in seen] == [1, 2, 3, 4] and {id(step.model) for step in seen} == {id(result.model)}
    rows = [(row["loss"], row["grad_norm"], row["lr"]) for row in result.history]
    assert [(step.loss, step.grad_norm, step.lr) for step in seen] == rows and seen[0].updates == 2
    without = train(LOOM, settings(tmp_path, name="without", max_steps=4))
    assert fingerprint(result.run) == fingerprint(without.run)


def test_an_error_in_on_step_ends_the_run_and_leaves_its_checkpoints(tmp_path):
    def fails(step):
        if step.number == 7:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(DENSE, settings(tmp_path, max_steps=12, save_every=3), on_step=fails)
    assert [path.name for path in checkpoints(tmp_path / "runs" / "tiny")] == ["step-3", "step-6"]


@pytest.mark.parametrize("name", ["a/b", ".hidden", ""])
def test_a_bad_name_is_refused_before_the_work(tmp_path, monkeypatch, name):
    monkeypatch.setattr(trainer, "load_corpus", killed)
    with pytest.raises(ValueError, match="has to be usable as a folder name"):
        train(DENSE, TrainConfig(name=name, runs=str(tmp_path)))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="is a file, and the runs need a folder"):
        train(DENSE, TrainConfig(runs=str(tmp_path / "file")))


def test_a_message_with_overflow_in_it_is_not_about_memory(tmp_path):
    def fails(step):
        raise RuntimeError("value cannot be converted without overflow")

    with pytest.raises(RuntimeError, match="without overflow"):
        train(DENSE, settings(tmp_path, max_steps=2), on_step=fails)
    assert os.path.exists(tmp_path / "runs" / "tiny" / "config.json")
