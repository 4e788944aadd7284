"""Recorded results: what is made is kept, nothing is made twice, and the file says where each run comes from."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import minilooped
from minilooped.science import provenance as module
from minilooped.science.provenance import differences, gpu_results, provenance, record

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# The scripts that record run by run, but for reliability.py, which draws its runs, and gpu.py, which waits for a GPU.
SCRIPTS = [path for path in sorted(BENCHMARKS.glob("*.py")) if " record(RESULTS" in path.read_text(encoding="utf-8")]

RUNS = [dict(arm=arm, seed=seed) for seed in (1, 2) for arm in ("a", "b")]


def content(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_record_that_was_killed_goes_on_where_it_was(tmp_path):
    path, made = tmp_path / "new" / "mine.json", []

    def measure(arm, seed):
        if len(made) == 3 and not path.with_name("again").exists():
            raise KeyboardInterrupt
        made.append(dict(arm=arm, seed=seed))
        return dict(loss=float("inf") if arm == "b" else 0.1)

    with pytest.raises(KeyboardInterrupt):
        record(path, dict(width=(8, 16)), RUNS, measure)
    assert made == RUNS[:3] == [{name: row[name] for name in ("arm", "seed")} for row in content(path)["runs"]]
    path.with_name("again").touch()
    assert record(path, dict(width=(8, 16)), RUNS, measure)
    assert made == RUNS
    assert content(path)["runs"] == [run | dict(loss=float("inf") if run["arm"] == "b" else 0.1) for run in RUNS]
    assert content(path)["provenance"] == provenance("python benchmarks/mine.py")
    before = path.read_bytes()
    assert record(path, dict(width=(8, 16)), RUNS[:2], measure) and made == RUNS
    assert path.read_bytes() == before
    assert {file.name for file in path.parent.iterdir()} == {"mine.json", "again"}


def test_a_kill_while_the_file_is_written_loses_one_run(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    record(path, {}, RUNS[:1], lambda **run: {})
    before = path.read_bytes()

    def cut_short(self, content):
        with open(self, "wb") as file:
            file.write(content[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.write_bytes", cut_short)
    with pytest.raises(KeyboardInterrupt):
        record(path, {}, RUNS, lambda **run: {})
    assert path.read_bytes() == before


def test_arms_may_be_added_and_not_changed(tmp_path):
    path, few = tmp_path / "mine.json", dict(width=8, arms=dict(a=dict(lr=1)))
    record(path, few, RUNS[:1], lambda **run: {})
    more = dict(width=8, arms=dict(b=dict(lr=2)))
    record(path, more, RUNS[:2], lambda **run: {})
    assert content(path)["settings"] == dict(width=8, arms=dict(a=dict(lr=1), b=dict(lr=2)))
    for arm in ("a", "b"):
        with pytest.raises(ValueError, match=rf"arms\.{arm}\.lr was . and is now 3"):
            record(path, dict(width=8, arms={arm: dict(lr=3)}), RUNS, lambda **run: {})


def test_a_record_of_other_settings_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "mine.json"
    record(path, dict(width=8), RUNS, lambda **run: {})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"mine\.json was recorded with other settings \(width was 8 and is now 16\)"):
        record(path, dict(width=16), RUNS, lambda **run: {})
    assert path.read_bytes() == before


def test_no_run_is_begun_when_time_is_up(tmp_path, monkeypatch):
    path, now = tmp_path / "mine.json", 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def ten_seconds(**run):
        nonlocal now
        now += 10
        return {}

    assert not record(path, {}, RUNS, ten_seconds, until=115.0)
    assert len(content(path)["runs"]) == 2  # the second one was begun in time, and is finished
    assert not record(path, {}, RUNS, ten_seconds, until=now)
    assert len(content(path)["runs"]) == 2
    assert record(path, {}, RUNS, ten_seconds) and len(content(path)["runs"]) == 4
    assert record(path, {}, RUNS, ten_seconds, until=0.0)  # all are there


def test_runs_of_other_code_have_a_provenance_of_their_own(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    record(path, {}, RUNS[:2], lambda **run: {}, made_by="first")
    record(path, {}, RUNS[:3], lambda **run: {}, made_by="first")
    assert "extended" not in content(path)
    facts = module.provenance("first") | dict(commit="another", gpu="a card")
    monkeypatch.setattr(module, "provenance", lambda made_by: facts)
    record(path, {}, RUNS[:3], lambda **run: {}, made_by="first")
    assert "extended" not in content(path)  # nothing was made
    record(path, {}, RUNS, lambda **run: {}, made_by="first")
    assert content(path)["provenance"]["commit"] != "another" and content(path)["extended"] == [facts]


def test_provenance_names_the_gpu_its_cuda_and_its_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [provenance("")[name] for name in ("gpu", "cuda", "driver")] == [None, None, None]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [provenance("")[name] for name in ("gpu", "cuda", "driver")] == ["A card", "13.0", None]
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.1\necho 580.1\n", encoding="utf-8")
    program.chmod(0o755)
    assert provenance("")["driver"] == "580.1"


def test_the_commit_is_that_of_the_start_and_none_outside_a_checkout(tmp_path, monkeypatch):
    commit = provenance("this")["commit"]
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert provenance("this")["commit"] == commit  # whatever this process has written since
    module._commit.cache_clear()
    try:
        assert provenance("this")["commit"] is None
    finally:
        module._commit.cache_clear()


def test_gpu_results_by_step_or_none(tmp_path):
    assert gpu_results(tmp_path / "nowhere") is None and gpu_results(tmp_path) is None
    record(tmp_path / "lr.json", dict(width=8), RUNS, lambda **run: dict(loss=1.0))
    found = gpu_results(tmp_path)
    assert list(found) == ["lr"] and found["lr"]["settings"] == dict(width=8)
    assert found["lr"]["runs"][0] == RUNS[0] | dict(loss=1.0)


def test_a_switch_that_came_after_a_recording_agrees_while_it_is_off():
    stored = dict(model=dict(width=8), lr=1e-3)
    assert differences(stored, dict(model=dict(width=8, recompute=False, chunk=None), lr=1e-3)) == ""
    assert differences(stored, dict(model=dict(width=8, recompute=True), lr=1e-3)) == (
        "model.recompute was None and is now True"
    )
    assert differences(dict(model=dict(recompute=True)), dict(model=dict(recompute=False)))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_finds_all_its_runs_recorded_with_the_settings_that_it_has_now(script, monkeypatch):
    def nothing_to_do(made_by):
        raise AssertionError("a run is missing")

    monkeypatch.setattr(module, "provenance", nothing_to_do)
    monkeypatch.syspath_prepend(BENCHMARKS)  # they import each other
    runpy.run_path(str(script), run_name="__main__")


def test_in_somebody_elses_repository_there_is_no_commit(tmp_path):
    """An installed package lies in a folder that git may know and this package's files it does not."""
    package = shutil.copytree(Path(minilooped.__file__).parent, tmp_path / "site" / "minilooped")
    for command in ("init", "-c user.name=a -c user.email=a@b commit --allow-empty -m theirs"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True, capture_output=True)
    code = "from minilooped.science.provenance import provenance; print(provenance('by hand')['commit'])"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(package.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "None"
