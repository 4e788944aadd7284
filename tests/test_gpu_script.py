"""benchmarks/gpu.py: every step at toy size on the CPU; what does not fit, what has no time, what the grids hold."""

import importlib.util
import itertools
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minilooped.science.records import gpu_results
from minilooped.science.sweep import LanguageModel, Trial, curve

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    sys.modules[spec.name] = script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    yield script
    del sys.modules[spec.name]


@pytest.fixture
def options(gpu, tmp_path):
    """Options of a rehearsal; what did not fit in an earlier test may fit now."""
    gpu.fits.cache_clear()
    return gpu.Options(toy=True, out=tmp_path)


@pytest.fixture(scope="module")
def recorded(gpu, tmp_path_factory):
    """The folder that a rehearsal of all steps leaves."""
    folder = tmp_path_factory.mktemp("gpu")
    gpu.main(gpu.Options(toy=True, out=folder))
    return folder


def runs(folder: Path, step: str) -> list[dict]:
    return gpu_results(folder)[step]["runs"]


# ----------------------------------------------------------------------------------------------------------------------
# A rehearsal


def test_every_step_leaves_a_file_with_its_provenance(recorded):
    found = gpu_results(recorded)
    assert sorted(found) == sorted(
        ["lr", "loom", "routers", "deeploop", "moe", "compute", "eager", "compiled", "memory"]
    )
    for step, content in found.items():
        assert content["provenance"]["made_by"].startswith(f"python benchmarks/gpu.py {step} --toy")
        assert {"gpu", "cuda", "driver", "commit"} <= content["provenance"].keys()
        assert [row["outcome"] for row in content["runs"]] == ["ok"] * len(content["runs"])


def test_training_rows_can_be_read_as_a_sweep(recorded):
    rows = runs(recorded, "lr")
    losses = {Trial(row["arm"], 4, row["n_loop"], row["lr"], row["seed"]): row["val_loss"] for row in rows}
    lrs, values = curve(losses, "sqrt", 4, 2)
    assert set(lrs) >= {1e-3, 2e-3} and values.isfinite().all() and values.shape[0] == 2
    one = {rule: curve(losses, rule, 4, 1)[1] for rule in ("inverse", "sqrt")}
    assert torch.equal(one["inverse"], one["sqrt"])  # at one loop they are one model
    assert losses[Trial("inverse", 4, 2, 1e-3, 1)] != losses[Trial("sqrt", 4, 2, 1e-3, 1)]


def test_steps_record_what_they_are_about(recorded):
    assert all(len(row["losses"]) == len(row["variances"]) == row["steps"] for row in runs(recorded, "loom"))
    loads = {row["arm"]: torch.tensor(row["agreement"]["loads"]) for row in runs(recorded, "routers")}
    assert loads["shared"].shape == loads["per_loop"].shape == (9, 1, 30)
    for row in runs(recorded, "eager"):
        assert row["tokens_per_second"] > 0 and row["compile_seconds"] is None and "float32" in row["kernel"]
    assert all(row["compile_seconds"] > 0 for row in runs(recorded, "compiled"))
    planned = {row["way"]: row["planned_bytes"] for row in runs(recorded, "memory")}
    assert planned["segments"] < planned["ordinary backprop"]
    assert planned["recomputed loops"] < planned["ordinary backprop"]


def test_a_second_call_makes_nothing_anew(gpu, recorded, monkeypatch, capsys):
    before = {path.name: path.read_bytes() for path in recorded.iterdir()}
    for kind in (gpu.Grid, gpu.Table):
        monkeypatch.setattr(kind, "measure", lambda *_, **run: pytest.fail(f"{run} was made already"))
    gpu.main(gpu.Options(toy=True, out=recorded))
    assert {path.name: path.read_bytes() for path in recorded.iterdir()} == before
    gpu.main(gpu.Options(toy=True, out=recorded, list=True))
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-9:]] == ["0"] * 9


def test_results_of_another_size_are_refused_and_left_alone(gpu, recorded, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    before = (recorded / "moe.json").read_bytes()
    with pytest.raises(SystemExit, match="failed: moe"):
        gpu.main(gpu.Options(steps=("moe",), out=recorded))
    assert "recorded with other settings" in capsys.readouterr().out
    assert (recorded / "moe.json").read_bytes() == before


# ----------------------------------------------------------------------------------------------------------------------
# No GPU, no time, no memory


def test_without_a_gpu_it_says_so(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no GPU here.* --toy"):
        gpu.main(gpu.Options(out=tmp_path))
    assert not list(tmp_path.iterdir())
    gpu.main(gpu.Options(out=tmp_path, list=True))  # needs none
    assert "compute" in capsys.readouterr().out


def test_data_that_is_not_there_is_named_before_anything_runs(gpu, options):
    with pytest.raises(SystemExit, match="no data at nowhere"):
        gpu.main(replace(options, data="nowhere"))


def test_when_time_is_up_it_says_how_to_go_on(gpu, options, monkeypatch, capsys):
    now, measure = 0.0, gpu.Grid.measure
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def a_minute(self, **run):
        nonlocal now
        now += 60
        return measure(self, **run)

    monkeypatch.setattr(gpu.Grid, "measure", a_minute)
    gpu.main(replace(options, steps=("deeploop", "moe"), minutes=1.5))
    said = capsys.readouterr().out
    assert len(runs(options.out, "deeploop")) == 2 and len(runs(options.out, "moe")) == 1
    assert f"deeploop: time is up, 2 runs in {options.out / 'deeploop.json'}" in said
    assert f"To go on: python benchmarks/gpu.py deeploop --toy --out {options.out}" in said
    gpu.main(replace(options, steps=("deeploop",)))
    assert [row["arm"] for row in runs(options.out, "deeploop")] == ["none", "deepnorm", "deeploop"]


@pytest.mark.parametrize("dry", [True, False], ids=["in the dry run", "later"])
def test_a_shape_that_does_not_fit_costs_its_rows_and_not_the_step(gpu, options, monkeypatch, dry):
    training, tried = LanguageModel.training, []

    def small_memory(self, trial):
        if trial.n_loop == 2 and (dry or trial.seed > 0):
            tried.append(trial)
            raise torch.OutOfMemoryError("full")
        return training(self, trial)

    monkeypatch.setattr(LanguageModel, "training", small_memory)
    gpu.main(replace(options, steps=("lr",)))
    for row in runs(options.out, "lr"):
        assert row["outcome"] == ("out of memory" if row["n_loop"] == 2 else "ok")
        assert math.isfinite(row["val_loss"]) == (row["n_loop"] == 1)
    rows_of_two = 4  # two rules, two seeds; and the grid of learning rates does not grow
    assert len([row for row in runs(options.out, "lr") if row["n_loop"] == 2]) == rows_of_two
    assert len(tried) == (2 if dry else rows_of_two)  # one dry run for each rule


def test_a_run_that_diverges_is_a_row(gpu, options, monkeypatch):
    def diverges(self, trial):
        yield from itertools.islice(training(self, trial), 1)
        raise FloatingPointError

    training = LanguageModel.training
    monkeypatch.setattr(LanguageModel, "training", diverges)
    gpu.main(replace(options, steps=("loom",)))
    assert [row["outcome"] for row in runs(options.out, "loom")] == ["diverged"] * 2
    assert all(row["val_loss"] == math.inf and len(row["losses"]) == 1 for row in runs(options.out, "loom"))


def test_a_micro_batch_is_halved_and_what_never_fits_is_a_row(gpu, options, monkeypatch):
    def small_memory(next_loss, batches, *_):
        if next_loss.model.config.n_expert or len(batches[0][0]) > 1:
            raise MemoryError("full")

    monkeypatch.setattr(gpu, "rehearse", small_memory)
    gpu.main(replace(options, steps=("eager",)))
    dense, experts = runs(options.out, "eager")
    assert (dense["outcome"], dense["batch_size"], dense["grad_accum"]) == ("ok", 1, 8)
    assert experts["outcome"] == "out of memory" and "tokens_per_second" not in experts


def test_a_plan_stands_beside_what_does_not_fit(gpu, options, monkeypatch):
    def full(self):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(gpu.Bench, "seconds_of_a_step", full)
    gpu.main(replace(options, steps=("memory",)))
    assert all(row["outcome"] == "out of memory" and row["planned_bytes"] > 0 for row in runs(options.out, "memory"))


def test_what_does_not_compile_is_a_row_and_a_fault_stops_only_its_step(gpu, options, monkeypatch, capsys):
    def broken(self):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(gpu.Bench, "seconds_of_a_step", broken)
    with pytest.raises(SystemExit, match="failed: eager$"):
        gpu.main(replace(options, steps=("eager", "compiled")))
    assert [row["outcome"] for row in runs(options.out, "compiled")] == [
        "not compiled: RuntimeError: no such kernel"
    ] * 2
    assert "eager" not in gpu_results(options.out)
    assert "To go on: python benchmarks/gpu.py eager --toy" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# What is measured, and the grids


def test_speed_is_the_median_of_the_steady_steps(gpu, options, monkeypatch):
    seconds = itertools.cycle([9.0, 5.0, 2.0, 1.0, 30.0])
    monkeypatch.setattr(gpu.Bench, "seconds_of_a_step", lambda self: seconds)
    monkeypatch.setattr(gpu, "peak_tflops", lambda name: 1e-6)
    gpu.main(replace(options, steps=("eager", "compiled")))
    for row in runs(options.out, "eager") + runs(options.out, "compiled"):
        assert row["tokens_per_second"] == 2 * 4 * 8 / 2.0
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * row["flops_per_token"] / 1e6)
    assert [row["compile_seconds"] for row in runs(options.out, "compiled")] == [7.0, 7.0]


def rows_of(made: list[dict], loss) -> list[dict]:
    return [run | dict(outcome="ok", val_loss=loss(run["lr"])) for run in made]


@pytest.mark.parametrize(
    "best, grid",
    [
        (2e-3, [1e-3, 2e-3, 4e-3]),  # inside
        (8e-3, [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]),  # one beyond the edge, and one more to see that it is inside
        (1.0, [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]),  # two at most
        (1e-9, [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]),
    ],
)
def test_the_grid_grows_where_the_first_seed_has_its_best_at_an_edge(gpu, best, grid):
    step = gpu.Grid(1, ("a",), (1,), (1e-3, 2e-3, 4e-3), (1, 2), task=None)
    rows: list[dict] = []
    while now := gpu.due(step, rows):
        assert len({run["seed"] for run in now}) == 1, "the first seed is complete before the other begins"
        rows += rows_of(now, lambda lr: abs(math.log(lr / best)))
    assert [sorted(row["lr"] for row in rows if row["seed"] == seed) for seed in (1, 2)] == [grid, grid]


def test_every_shape_is_at_least_as_wide_as_was_asked_for_and_trades_are_fair(gpu):
    grids = gpu.grids("shakespeare", toy=False)
    tasks = {
        (step, arm, n): grid.task(arm, n) for step, grid in grids.items() for arm in grid.arms for n in grid.n_loops
    }
    assert all(task.model.n_embd >= 384 and task.model.n_loop == n for (_, _, n), task in tasks.items())
    operations = {
        key: task.train.max_steps * gpu.counted(gpu.of_text(task.model, task, key[2]))[1] for key, task in tasks.items()
    }
    moe = [operations["moe", "loom", n] for n in gpu.TRADES]
    assert max(moe) / min(moe) < 1.005
    for budget in gpu.BUDGETS:
        equal = [operations["compute", str(budget), n] for n in gpu.LOOPS]
        assert max(equal) / min(equal) < 1.01


def test_the_table_covers_what_was_asked_for(gpu):
    tables = gpu.tables(toy=False)
    speeds = {(run["preset"], run["n_loop"]) for run in tables["compiled"].rows}
    of_gpt2_scale = ("gpt2-small", "gpt2-small-deeploop", "gpt2-small-4x3", "loom-small")
    assert speeds == {(preset, n) for preset in of_gpt2_scale for n in (1, 3, 7)}
    assert tables["eager"].rows == tables["compiled"].rows
    assert {run["way"] for run in tables["memory"].rows} == set(gpu.WAYS) and len(tables["memory"].rows) == 32


def test_the_docstring_explains_every_step(gpu):
    for step in (*gpu.grids("shakespeare", toy=False), *gpu.tables(toy=False)):
        assert f"\n    {step} " in gpu.__doc__, step
    assert json.dumps(gpu.tables(toy=False)["memory"].settings())
