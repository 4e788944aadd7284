"""Checkpoints: whole or not there, safe to load, and a damaged one is passed over."""

import os
import pickle
import random
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tiny_runs import children, sign

from minilooped.data import CharTokenizer
from minilooped.engine import checkpoint
from minilooped.engine.checkpoint import (
    checkpoints,
    find_run,
    from_dict,
    load_checkpoint,
    load_model,
    new_run,
    only_writer,
    publish_weights,
    read_config,
    save_checkpoint,
    shell_command,
    write_config,
)
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.train import TrainConfig


def save(run, step):
    """A checkpoint in which every number is the step."""
    return save_checkpoint(run, step, {"weight": torch.full((50,), step)}, {"step": step, "moment": torch.tensor(step)})


def is_good(found):
    return (found.weights["weight"] == found.step).all() and found.state["step"] == found.state["moment"] == found.step


def test_a_checkpoint_comes_back_and_the_one_before_is_kept(tmp_path):
    for step in (9, 10, 11, 200):  # as words, "step-9" would be the newest
        save(tmp_path, step)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-11", "step-200"]
    assert load_checkpoint(tmp_path).step == 200 and is_good(load_checkpoint(tmp_path))


@pytest.mark.parametrize(
    "part, error",
    [("save_file", SafetensorError), ("torch.save", RuntimeError), ("fsync", OSError), ("os.replace", OSError)],
)
def test_a_save_that_breaks_off_leaves_the_last_checkpoint(tmp_path, monkeypatch, part, error):
    save(tmp_path, 1)

    def half_way(data, path, *_):
        open(path, "wb").write(b"half")
        raise error("no space left on device")

    def not_at_all(*_):
        raise OSError("input/output error")

    with monkeypatch.context() as broken:
        if part == "save_file":
            broken.setattr(checkpoint, "save_file", half_way)
        elif part == "torch.save":
            broken.setattr(torch, "save", half_way)
        else:
            broken.setattr(os, part.removeprefix("os."), not_at_all)
        with pytest.raises(OSError, match="step-2 could not be written .*--resume` goes on from the newest"):
            save(tmp_path, 2)
    assert load_checkpoint(tmp_path).step == 1 and is_good(load_checkpoint(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"], "nothing is left to fill the disk"
    save(tmp_path, 2)  # what the broken save left behind is in nobody's way
    assert load_checkpoint(tmp_path).step == 2 and is_good(load_checkpoint(tmp_path))


@pytest.mark.skipif(os.name != "posix", reason="elsewhere a folder cannot be flushed")
def test_everything_is_on_the_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    """Or a power cut could leave a name without its content."""
    flushed, before_rename = set(), set()
    fsync, rename = os.fsync, os.replace

    def recorded_fsync(descriptor):
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def recorded_rename(old, new):
        before_rename.update(flushed)
        flushed.clear()
        rename(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_rename)
    path = save(tmp_path, 1)
    assert before_rename == {file.stat().st_ino for file in (path, *path.iterdir())}
    assert flushed == {tmp_path.stat().st_ino}, "the name itself"


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
@pytest.mark.parametrize("damage", ["cut", "empty", "zeros", "missing", "one bit"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        bit = bytes((*content[:-9], content[-9] ^ 1, *content[-8:]))  # which neither of the two readers would notice
        zeros = bytes(len(content))
        file.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "zeros": zeros, "one bit": bit}[damage])
    found = load_checkpoint(tmp_path)
    assert found.step == 1 and is_good(found)
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'step-2'} cannot be read" in printed and printed.count("\n") == 1
    save(tmp_path, 2)  # training from step 1 comes to step 2 again
    assert load_checkpoint(tmp_path).step == 2 and is_good(load_checkpoint(tmp_path))


def test_a_checkpoint_without_sums_is_used_and_a_line_says_what_that_means(tmp_path, capsys):
    """Older versions wrote none, and their runs go on. Damage that a reader notices still counts."""
    save(tmp_path, 1)
    (save(tmp_path, 2) / "sha256").unlink()
    found = load_checkpoint(tmp_path)
    assert found.step == 2 and is_good(found)
    assert capsys.readouterr().out.startswith(f"notice   {tmp_path / 'step-2'} has no file sha256")
    (tmp_path / "step-2" / "state.pt").write_bytes(b"")
    assert load_checkpoint(tmp_path).step == 1
    assert f"{tmp_path / 'step-2'} cannot be read" in capsys.readouterr().out


def test_no_checkpoint_that_can_be_read_is_a_clear_error(tmp_path):
    (save(tmp_path, 1) / "state.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint that can be read"):
        load_checkpoint(tmp_path)


class Intruder:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")


def test_loading_a_strangers_file_runs_no_code(tmp_path, capsys):
    marker = tmp_path / "marker"
    save(tmp_path, 1)
    file = save(tmp_path, 2) / "state.pt"
    torch.save({"step": 2, "moment": Intruder(str(marker))}, file)
    sign(file.parent)
    assert load_checkpoint(tmp_path).step == 1 and not marker.exists()
    file.write_bytes(pickle.dumps(Intruder(str(marker)), protocol=2))  # a bare pickle, not torch's archive
    sign(file.parent)
    assert load_checkpoint(tmp_path).step == 1 and not marker.exists()
    assert "more than tensors, numbers and text" in capsys.readouterr().out
    pickle.loads(file.read_bytes())  # the intruder is a real one
    assert marker.exists()


def save_forever(run):
    step = load_checkpoint(run).step
    while True:
        step += 1
        save(run, step)


def test_ten_kills_in_the_middle_of_saving(tmp_path):
    """Whatever a kill interrupts, what is left loads, and weights and state are of one step."""
    save(tmp_path, 0)
    draw, steps = random.Random(0), [0]
    for _ in range(10):
        child = children.Process(target=save_forever, args=(tmp_path,))
        child.start()
        deadline = time.monotonic() + 60
        while checkpoints(tmp_path)[-1].name == f"step-{steps[-1]}":  # until it is saving
            assert child.is_alive() and time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.03))
        child.kill()
        child.join()
        found = load_checkpoint(tmp_path)
        assert is_good(found)
        assert found.path == checkpoints(tmp_path)[-1], "the newest one is good: it needed no second look"
        steps.append(found.step)
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_config_and_published_weights_are_written_whole_or_not_at_all(tmp_path, monkeypatch, name, broken):
    path = save(tmp_path, 1)

    def write():
        write_config(tmp_path, {"step": 1}) if name == "config.json" else publish_weights(tmp_path, path)

    write()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert set(before) == {name}

    def breaks(*arguments, **options):
        if broken == "write":
            target = arguments[0] if name == "config.json" else arguments[1]
            with open(target, "wb") as file:
                file.write(b"half")
        raise OSError(28, "disk full")

    with monkeypatch.context() as patch:
        if broken == "write":
            patch.setattr(Path, "write_bytes", breaks)
            patch.setattr(shutil, "copyfile", breaks)
        else:
            patch.setattr(os, broken, breaks)
        with pytest.raises(OSError, match=rf"{name} could not be written \(disk full\).*checkpoints .* are whole"):
            write()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_never_takes_the_folder_of_another(tmp_path):
    assert [new_run(tmp_path, "a").name for _ in range(3)] == ["a", "a-2", "a-3"]


@pytest.mark.parametrize("runs", ["file", "file/runs", "link"])
def test_a_place_where_no_folder_can_be_made_is_named(tmp_path, runs):
    """A link to nowhere is neither there nor can it be made."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "runs")
    said = f"runs='{tmp_path / runs}' is a file" if runs == "file" else "could not be written .*choose another place"
    with pytest.raises((OSError, ValueError), match=said):
        new_run(tmp_path / runs, "a")


@pytest.mark.skipif(os.name != "posix", reason="needs the locks of POSIX")
def test_a_run_has_one_writer_and_is_free_when_that_is_gone(tmp_path):
    def hold():
        with only_writer(tmp_path):
            pass

    with only_writer(tmp_path):
        with pytest.raises(ValueError, match=f"another process trains {tmp_path}: wait for it"):
            hold()
    with pytest.raises(KeyError), only_writer(tmp_path):
        raise KeyError
    hold()
    child = children.Process(target=hold_forever, args=(tmp_path,), daemon=True)
    child.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "held").exists():
        assert child.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.raises(ValueError, match="another process"):
        hold()
    child.kill()
    child.join()
    hold()


def hold_forever(run):
    with only_writer(run):
        (run / "held").touch()
        time.sleep(600)


def test_where_a_drive_has_no_locks_training_goes_on(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*_):
        raise OSError("bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with only_writer(tmp_path), only_writer(tmp_path):
        pass


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", ".hidden"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="name="):
        new_run(tmp_path, name)


def test_a_run_is_found_by_name_and_by_path_and_else_the_known_ones_are_listed(tmp_path):
    with pytest.raises(FileNotFoundError, match="there are none yet: start one with `minilooped train`"):
        find_run("a", tmp_path)
    for name in ("a", "b"):
        write_config(new_run(tmp_path, name), {})
    assert find_run("a", tmp_path) == find_run(tmp_path / "a") == tmp_path / "a"
    with pytest.raises(FileNotFoundError, match="no run 'c' in .*; there are a, b"):
        find_run("c", tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        "[" * 100_000,
        '{"model": 1, "train": {}, "tokenizer": {}}',
        '{"model": {}, "train": {}, "tokenizer": {}}',
        '{"model": {}, "train": {}, "tokenizer": {"name": "char"}}',
        '{"model": {}, "train": {}, "tokenizer": {"name": "char", "hash": 5}}',
        '{"model": {}, "train": {}, "tokenizer": {"name": "char", "hash": "ab", "chars": [1]}}',
    ],
)
def test_a_config_that_is_none_is_a_clear_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="is not the config of a run"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "kind, values, complaint",
    [
        (LoopedConfig, {"n_loop": "3"}, "n_loop='3' must be"),
        (LoopedConfig, {"n_embd": 48.0}, "n_embd=48.0 must be"),
        (TrainConfig, {"lr": "fast"}, "lr='fast' must be"),
        (TrainConfig, {"max_steps": [4]}, r"max_steps=\[4\] must be"),
        (TrainConfig, {"schedule": {}}, "schedule={} must be"),
    ],
)
def test_a_value_of_another_type_in_a_config_is_named(tmp_path, kind, values, complaint):
    with pytest.raises(ValueError, match=rf"config.json is not the config of a run \({complaint}.*\): restore it"):
        from_dict(kind, values, tmp_path)


def test_a_setting_of_another_version_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"settings that this version of minilooped does not know \(n_lop\)"):
        from_dict(LoopedConfig, {"n_loop": 2, "n_lop": 3}, tmp_path)


def test_a_tokenizer_that_cannot_be_rebuilt_names_its_file(tmp_path):
    with pytest.raises(ValueError, match="config.json: unknown tokenizer 'word': choose"):
        checkpoint.run_tokenizer(tmp_path, {"tokenizer": {"name": "word", "hash": ""}})


def test_a_model_of_a_run_without_checkpoint_is_a_clear_error(tmp_path):
    write_config(
        tmp_path, {"model": {"n_layer": 1, "n_embd": 48}, "train": {}, "tokenizer": {"name": "char", "hash": ""}}
    )
    with pytest.raises(ValueError, match="no checkpoint"):
        load_model(tmp_path)


@pytest.mark.parametrize("lost", ["nothing", "checkpoints", "published"])
def test_a_model_comes_from_the_newest_checkpoint_or_else_from_the_published_weights(tmp_path, lost):
    config = LoopedConfig(vocab_size=2, block_size=2, n_layer=1, n_loop=1, n_head=1, n_embd=2)
    tokenizer = CharTokenizer("ab")
    write_config(tmp_path, {"model": asdict(config), "train": {}, "tokenizer": tokenizer.spec()})
    model = LoopedGPT(config)
    for step in (1, 2):
        torch.nn.init.constant_(model.wte.weight, step)
        path = save_checkpoint(tmp_path, step, model.state_dict(), {})
        if step == 1:
            publish_weights(tmp_path, path)
    if lost == "checkpoints":
        for path in checkpoints(tmp_path):
            shutil.rmtree(path)
    elif lost == "published":
        (tmp_path / "model.safetensors").unlink()
    loaded, loaded_tokenizer = load_model(tmp_path)
    assert (loaded.wte.weight == (1 if lost == "checkpoints" else 2)).all() and not loaded.training
    assert loaded_tokenizer.hash == tokenizer.hash


def test_the_printed_command_works_where_path_does_not_lead_to_it(tmp_path, monkeypatch):
    """After `make train` no environment is active: the command has to name the script by its path."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "minilooped"
    script.write_text("#!/bin/sh\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "")
    assert shell_command() == os.path.join("bin", "minilooped")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert shell_command() == "minilooped"
