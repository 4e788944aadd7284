"""Recorded results: what is made is kept, nothing is made twice, and what is read says where it is wrong."""

import json
import multiprocessing
import re
import runpy
import time
from pathlib import Path

import pytest

from minilooped.model import RULES
from minilooped.science import ablation, records, sweep
from minilooped.science.provenance import provenance
from minilooped.science.records import differences, gpu_results, keep, only_user, read, record, runs, write

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# The scripts that record run by run, but for reliability.py, which draws its runs, and gpu.py, which waits for a GPU.
SCRIPTS = [
    path
    for path in sorted(BENCHMARKS.glob("*.py"))
    if re.search(r"\brecord\((RESULTS|PATH|OUT)\b", path.read_text(encoding="utf-8"))
    and path.stem not in ("reliability", "gpu")
]

RUNS = [dict(arm=arm, seed=seed) for seed in (1, 2) for arm in ("a", "b")]


def content(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------------------------
# Run by run


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
    facts = records.provenance("first") | dict(commit="another", gpu="a card")
    monkeypatch.setattr(records, "provenance", lambda made_by: facts)
    record(path, {}, RUNS[:3], lambda **run: {}, made_by="first")
    assert "extended" not in content(path)  # nothing was made
    record(path, {}, RUNS, lambda **run: {}, made_by="first")
    assert content(path)["provenance"]["commit"] != "another" and content(path)["extended"] == [facts]


def test_a_record_of_changed_code_is_announced_before_the_work(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.json"
    facts = provenance("this")
    for commit, said in (("abc", False), (None, False), ("abc+", True)):
        monkeypatch.setattr(records, "provenance", lambda made_by, commit=commit: facts | dict(commit=commit))

        def measure(said=said, **run):
            notice = capsys.readouterr().err
            assert (f"notice   {path} will name abc+ as its commit" in notice) == said
            return {}

        path.unlink(missing_ok=True)
        assert record(path, {}, RUNS[:1], measure)


# ----------------------------------------------------------------------------------------------------------------------
# In one go


def test_what_is_kept_in_one_go_is_read_as_it_was_measured(tmp_path):
    path = tmp_path / "new" / "mine.json"
    found = keep(path, lambda: dict(depths=[1, 2], rows=[dict(rms=0.1), dict(rms=float("inf"))]), width=8)
    assert found == dict(depths=[1, 2], rows=[dict(rms=0.1), dict(rms=float("inf"))])
    assert read(path) == dict(provenance=provenance("python benchmarks/mine.py") | dict(width=8)) | found
    assert [file.name for file in path.parent.iterdir()] == ["mine.json"]


def test_a_measurement_that_fails_leaves_what_was_kept(tmp_path):
    path = tmp_path / "mine.json"
    keep(path, lambda: dict(loss=1))
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        keep(path, lambda: dict(loss=1 / 0))
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["mine.json"]


# ----------------------------------------------------------------------------------------------------------------------
# Two at once


def hold(path, held, done) -> None:
    with only_user(path):
        held.set()
        done.wait(30)


@pytest.fixture
def another_process(tmp_path):
    """A path to which another process adds, until the event is set."""
    path, context = tmp_path / "mine.json", multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(path, held, done))
    process.start()
    assert held.wait(60)
    yield path, done
    done.set()
    process.join()


def test_two_processes_do_not_add_to_one_file(another_process):
    path, done = another_process
    refusal = rf"another process adds to {re.escape(str(path))}: wait for it, or give another file"
    with pytest.raises(ValueError, match=refusal):
        record(path, {}, RUNS, lambda **run: pytest.fail("measured twice"))
    with pytest.raises(ValueError, match=refusal):
        keep(path, lambda: pytest.fail("measured twice"))
    assert not path.exists()
    done.set()
    with only_user(path, wait=30):
        write(path, {})
    assert record(path.with_name("another.json"), {}, RUNS, lambda **run: {})


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def test_runs_are_a_table_of_those_with_the_chosen_settings(tmp_path):
    path = tmp_path / "mine.json"
    made = [run | dict(budget=budget) for run in RUNS for budget in (None, 8)]
    record(path, {}, made, lambda arm, seed, budget: dict(losses=[seed, float("inf")]))
    assert runs(path).drop(columns=["budget", "losses"]).to_dict("records") == [run for run in RUNS for _ in range(2)]
    table = runs(path, "losses", arm="b", budget=8)
    assert table["seed"].tolist() == [1, 2] and table["losses"].tolist() == [[1, float("inf")], [2, float("inf")]]
    assert runs(path, arm="b", budget=None)["seed"].tolist() == [1, 2] and runs(path, arm="c").empty
    write(path, dict(provenance={}, settings={}, runs=[]))
    assert runs(path, "losses", arm="b").empty


# What stands in the file, and what the refusal says of it.
DAMAGED = {
    b"": "is not JSON",
    b"\x80 provenance": "is not JSON",
    b"[" * 100_000: "is not JSON",
    b"[1, 2]": "has to be an object",
    b'{"settings": {}}': "runs is missing",
    b'{"settings": {}, "runs": {"arm": "a"}}': "runs is .*, but has to be a list",
    b'{"runs": []}': "settings is missing",
    b'{"settings": {}, "runs": [{"arm": "a"}, 3]}': r"runs\[1\] is 3, but has to be an object",
}


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_record_is_named_by_every_reader_and_left_alone(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    for reader in (
        runs,
        lambda path: gpu_results(path.parent),
        lambda path: record(path, {}, RUNS, lambda **run: pytest.fail("measured")),
    ):
        with pytest.raises(
            ValueError, match=f"{re.escape(str(path))}.*{DAMAGED[content]}.*: restore the file, or move it away"
        ) as refusal:
            reader(path)
        assert "\n" not in str(refusal.value)
    assert path.read_bytes() == content and [file.name for file in tmp_path.iterdir()] == ["mine.json"]


def test_a_run_that_lacks_what_is_asked_for_is_named(tmp_path):
    path = tmp_path / "mine.json"
    write(path, dict(provenance={}, settings={}, runs=[dict(arm="a", lr=1), dict(arm="a")]))
    for ask in (lambda: runs(path, "lr"), lambda: runs(path, arm="a", lr=1)):
        with pytest.raises(ValueError, match=r"mine\.json: runs\[1\] has no lr: restore the file"):
            ask()
    with pytest.raises(ValueError, match=r"mine\.json: runs\[0\] has no seed, val_loss, losses, variances, every"):
        ablation.load(path)


def test_what_is_not_there_is_said_to_come_with_the_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path / "site-packages" / "data" / "results")
    for reader in (read, runs, ablation.load, sweep.load):
        with pytest.raises(FileNotFoundError, match="they come with the repository, not with an installed package"):
            reader(records.RESULTS / "mine.json")
        with pytest.raises(FileNotFoundError, match=r"no recorded results at .*mine\.json: is the path right\?"):
            reader(tmp_path / "mine.json")


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (dict(provenance=7), "provenance is 7, but has to be an object"),
        (dict(provenance={}), r"provenance\.date is missing"),
        (dict(provenance=dict(date=""), extended=None), "extended is null, but has to be a list"),
        (dict(provenance=dict(date=""), extended=[dict(date=""), {}]), r"extended\[1\]\.date is missing"),
    ],
)
def test_a_record_without_a_whole_provenance_takes_no_further_run(tmp_path, odd, named):
    path = tmp_path / "mine.json"
    write(path, odd | dict(settings={}, runs=[]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"mine\.json: {named}: restore the file, or move it away"):
        record(path, {}, RUNS, lambda **run: pytest.fail("measured"))
    assert path.read_bytes() == before


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


def test_another_device_is_another_machine_and_no_other_setting():
    assert differences(dict(train=dict(device="auto", lr=1)), dict(train=dict(device="cpu", lr=1))) == ""


# ----------------------------------------------------------------------------------------------------------------------
# The scripts and what they recorded


@pytest.fixture
def nothing_to_do(monkeypatch):
    """Whatever would be measured fails."""

    def a_run_is_missing(*_, **run):
        raise AssertionError(f"{run} is not recorded with these settings")

    monkeypatch.setattr(records, "provenance", a_run_is_missing)
    for task in (sweep.LanguageModel, sweep.Regression):
        monkeypatch.setattr(task, "__call__", a_run_is_missing)
    monkeypatch.syspath_prepend(BENCHMARKS)  # they import each other


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_finds_all_its_runs_recorded_with_the_settings_that_it_has_now(script, nothing_to_do):
    runpy.run_path(str(script), run_name="__main__")


def test_the_sweeps_find_all_their_trials_recorded(nothing_to_do, monkeypatch):
    for rule in ("inverse, lambda = 4", "factored, one learning rate"):
        monkeypatch.setitem(RULES, rule, None)  # so that they are gone afterwards
    written = {path: path.stat().st_mtime_ns for path in records.RESULTS.glob("*.csv")}
    runpy.run_path(str(BENCHMARKS / "deeploop.py"), run_name="__main__")
    sweeps = runpy.run_path(str(BENCHMARKS / "lr_transfer.py"))
    for name in ("language_model", "many_loops", "regression"):
        sweeps[name]()
    assert {path: path.stat().st_mtime_ns for path in written} == written, "nor is a whole file written again"
