"""Sweeps: nothing is run twice or lost, and the best learning rate is where a parabola with a known one has it."""

import csv
import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import DENSE, LOOM, prepared

from minilooped.model import RULES, Row
from minilooped.science.provenance import provenance
from minilooped.science.sweep import (
    LanguageModel,
    Regression,
    Trial,
    best,
    curve,
    grid,
    load,
    octaves,
    regret,
    shift,
    sizes,
    sweep,
    table,
    transfer,
    tuned,
)
from minilooped.train import TrainConfig, train

LRS = [2.0**k for k in range(-9, -3)]
TINY = Regression(width=8, n_input=3, n_example=16, steps=3)


@dataclass(frozen=True)
class Parabola:
    """Loss (log2 lr - optimum)^2, whose optimum each model and seed has for itself."""

    slope: float = -1.0  # octaves by which the optimum moves when the loops double

    def __call__(self, trial: Trial) -> float:
        optimum = -6.25 + self.slope * math.log2(trial.n_loop) + 0.25 * trial.seed
        return (math.log2(trial.lr) - optimum) ** 2


# ----------------------------------------------------------------------------------------------------------------------
# Running


def test_grid_is_every_combination_seed_by_seed():
    trials = grid(["none", "sqrt"], [2], [1, 4], [0.1, 0.2], [7, 8])
    assert len(set(trials)) == len(trials) == 16
    assert [trial.seed for trial in trials] == [7] * 8 + [8] * 8
    assert trials[0] == Trial("none", n_layer=2, n_loop=1, lr=0.1, seed=7)


class Killed(BaseException):
    pass


def test_killed_sweep_goes_on_where_it_was(tmp_path):
    trials, path, ran = grid(["none"], [1], [1, 2], LRS[:2], [0]), tmp_path / "new" / "sweep.csv", []

    @dataclass(frozen=True)
    class Task(Parabola):
        until: int = 99

        def __call__(self, trial: Trial) -> float:
            if len(ran) == self.until:
                raise Killed
            ran.append(trial)
            return super().__call__(trial)

    with pytest.raises(Killed):
        sweep(trials, Task(until=2), path, made_by="a test")
    with open(path, "a", encoding="utf-8") as file:
        file.write("none,1,2,0.0019")  # the kill came in the middle of a line
    object.__setattr__(task := Task(until=2), "until", 99)
    path.write_text(path.read_text(encoding="utf-8").replace('"until": 2', '"until": 99'), encoding="utf-8")
    losses = sweep(trials, task, path)
    assert ran == trials
    assert losses == {trial: Parabola()(trial) for trial in trials}
    assert load(path)[1] == losses

    more = [*trials, Trial("none", 1, 4, LRS[0], 0)]
    assert list(sweep(more, task, path)) == more and ran == more
    assert list(sweep(trials[:1], task, path)) == trials[:1] and len(load(path)[1]) == 5


def test_trial_that_two_grids_share_runs_once():
    ran = []
    trials = grid(["none"], [1], [1, 2], LRS[:2], [0])
    losses = sweep(trials + trials[1:], lambda trial: ran.append(trial) or 0.0)
    assert ran == trials and list(losses) == trials


def test_file_is_tidy_and_says_where_it_comes_from(tmp_path):
    path = tmp_path / "sweep.csv"
    trials = grid(["a rule, with a comma"], [1], [1], [0.1], [0, 1])
    sweep(trials, Parabola(), path, made_by="python benchmarks/mine.py")
    assert b"\r" not in path.read_bytes()
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    about = json.loads(head.removeprefix("# "))
    assert about["made_by"] == "python benchmarks/mine.py"
    assert about["task"] == "Parabola" and about["settings"] == {"slope": -1.0}
    assert set(provenance("")) <= set(about)
    rows = list(csv.DictReader(lines))
    assert [(row["rule"], int(row["seed"]), float(row["lr"])) for row in rows] == [
        ("a rule, with a comma", 0, 0.1),
        ("a rule, with a comma", 1, 0.1),
    ]


def test_sweep_of_other_settings_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "sweep.csv"
    trials = grid(["none"], [1], [1], LRS[:1], [0])
    sweep(trials, Parabola(), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"sweep\.csv .*settings\.slope was -1\.0 and is now -2\.0.*another file"):
        sweep(trials, Parabola(slope=-2.0), path)
    with pytest.raises(ValueError, match="task was 'Parabola' and is now 'Regression'"):
        sweep(trials, TINY, path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "rule,lr\nnone,1\n", "# not JSON\n"])
def test_file_that_is_no_sweep_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "notes.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"notes\.csv is not a sweep"):
        sweep(grid(["none"], [1], [1], LRS[:1], [0]), Parabola(), path)
    assert path.read_text(encoding="utf-8") == text


def test_sweep_without_a_file_writes_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(sweep(grid(["none"], [1], [1], LRS[:2], [0]), lambda trial: trial.lr)) == 2
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------------------
# Reading


@given(optimum=st.floats(-8, -5), curvature=st.floats(0.01, 10), floor=st.floats(-3, 3))
def test_best_is_the_vertex_of_a_parabola(optimum, curvature, floor):
    losses = torch.tensor([floor + curvature * (math.log2(lr) - optimum) ** 2 for lr in LRS], dtype=torch.float64)
    found = best(LRS, losses)
    assert found.inside and math.log2(found.lr) == pytest.approx(optimum, abs=1e-6)
    assert found.loss == losses.min()
    each = torch.stack((losses - 1, losses + 1))
    assert best(LRS, each).lr == pytest.approx(found.lr)


def test_best_on_a_grid_of_unequal_steps():
    lrs = [2.0**-9, 2.0**-6, 2.0**-5, 2.0**-1]
    losses = torch.tensor([(math.log2(lr) + 5.8) ** 2 for lr in lrs], dtype=torch.float64)
    assert math.log2(best(lrs, losses).lr) == pytest.approx(-5.8)


@pytest.mark.parametrize(
    ("losses", "i", "inside"),
    [
        ([1, 2, 3], 0, False),  # at an edge the optimum may lie beyond
        ([3, 2, 1], 2, False),
        ([3, 1, math.inf], 1, True),  # no parabola through a diverged run
        ([1, 1, 1], 0, False),
        ([2, 1, 1, 2], 1, True),
    ],
)
def test_best_where_there_is_no_parabola_or_a_flat_one(losses, i, inside):
    found = best(LRS[: len(losses)], torch.tensor(losses, dtype=torch.float64))
    assert found.inside == inside and found.loss == 1
    assert found.lr == (LRS[1] * 2**0.5 if len(losses) == 4 else LRS[i])


def test_best_of_nothing_but_divergence():
    with pytest.raises(ValueError, match="every learning rate diverged"):
        best(LRS, torch.full((2, len(LRS)), math.inf))


def test_shift_is_in_octaves_with_students_interval_over_the_seeds():
    losses = sweep(grid(["none"], [1], [1, 2], LRS, [0, 1, 2]), Parabola())
    assert shift(losses, "none", (1, 1), (1, 2)) == pytest.approx((-1, -1, -1))
    assert str(shift(losses, "none", (1, 1), (1, 2))) == "-1.0 (-1.0 to -1.0)"
    assert shift(losses, "none", (1, 2), (1, 1)).octaves == pytest.approx(1)

    one = {trial: loss for trial, loss in losses.items() if trial.n_loop == 1}
    moved = one | {replace(t, n_loop=2): Parabola(slope=-0.5 * t.seed)(replace(t, n_loop=2)) for t in one}
    assert octaves(moved, "none", (1, 1), (1, 2)).tolist() == pytest.approx([0, -0.5, -1])
    half = 4.302653 * 0.5 / 3**0.5  # the three lie half an octave apart
    assert shift(moved, "none", (1, 1), (1, 2)) == pytest.approx((-0.5, -0.5 - half, -0.5 + half), rel=1e-4)
    alone = {trial: loss for trial, loss in moved.items() if trial.seed == 2}
    assert str(shift(alone, "none", (1, 1), (1, 2))) == "-1.0 (one seed)"


def test_regret_is_what_a_kept_rate_costs_seed_by_seed():
    """By hand: the best of N = 1 is the second rate, of N = 2 the third, of N = 4 the second again."""
    curves = {
        (1, 1): [[3, 1, 2], [3, 2, 4]],
        (1, 2): [[9, 5, 4], [9, 4, 4.5]],  # mean 4.5 and 4.25
        (1, 4): [[9, 5, 6], [9, 6, 5]],
        (1, 8): [[1, math.inf, 2], [1, math.inf, 2]],
    }
    losses = {
        Trial("none", *model, lr, seed): loss
        for model, rows in curves.items()
        for seed, row in enumerate(rows)
        for lr, loss in zip(LRS, row, strict=False)
    }
    assert regret(losses, "none", (1, 1), (1, 1)).tolist() == [0, 0]
    assert regret(losses, "none", (1, 1), (1, 2)).tolist() == [1, -0.5]  # one seed's own best was the kept one
    assert regret(losses, "none", (1, 1), (1, 4)).tolist() == [0, 0]
    assert regret(losses, "none", (1, 2), (1, 1)).tolist() == [1, 2]

    found = transfer(losses, "none", (1, 1), (1, 2))
    mean, half = found.regret
    assert mean == 0.25 and half == pytest.approx(12.706205 * 0.75, rel=1e-4)
    assert found.cost == "0.250 ± 9.530" and (found.n_layer, found.n_loop, found.best.lr) == (1, 2, LRS[2])
    assert transfer(losses, "none", (1, 1), (1, 4)).cost == "0, same rate"
    assert transfer(losses, "none", (1, 1), (1, 8)).cost == "it diverges"
    assert sizes(losses, "none") == list(curves)


def test_table_has_a_row_for_every_rule_and_larger_model():
    losses = sweep(grid(["none", "sqrt"], [1, 2], [1, 2], LRS, [0, 1, 2]), Parabola())
    found = table(losses)
    assert found.index.tolist() == [(rule, size) for rule in ("none", "sqrt") for size in ("1 x 2", "2 x 1", "2 x 2")]
    for rule, size in found.index:
        expected = transfer(losses, rule, (1, 1), (int(size[0]), int(size[-1])))
        row = found.loc[(rule, size)]
        assert row["cost of keeping that of 1 x 1"] == expected.cost and row["octaves"] == str(expected.moved)
        assert float(row["best rate"]) == pytest.approx(expected.best.lr, rel=0.05)
    assert table(losses, start=(2, 1)).columns[2] == "cost of keeping that of 2 x 1"


def test_regret_wants_the_kept_rate_in_the_grid_and_the_same_seeds():
    losses = sweep(grid(["none"], [1], [1], LRS[:3], [0]) + grid(["none"], [1], [2], LRS[3:], [0]), Parabola())
    with pytest.raises(ValueError, match=rf"not swept at {LRS[2]:g}, the best of \(1, 1\), at \(1, 2\): add it"):
        regret(losses, "none", (1, 1), (1, 2))
    losses |= {replace(trial, seed=1): loss for trial, loss in losses.items() if trial.n_loop == 2}
    with pytest.raises(ValueError, match="not swept with the same seeds"):
        regret(losses, "none", (1, 1), (1, 2))


def test_shift_wants_the_same_seeds():
    losses = sweep(grid(["none"], [1], [1], LRS, [0, 1]) + grid(["none"], [1], [2], LRS, [1, 2]), Parabola())
    with pytest.raises(ValueError, match=r"not swept with the same seeds at \(1, 1\) and \(1, 2\)"):
        shift(losses, "none", (1, 1), (1, 2))


def test_curve_needs_a_whole_grid():
    losses = sweep(grid(["none"], [1], [1], LRS, [3, 4]), Parabola())
    lrs, values = curve(losses, "none", 1, 1)
    assert lrs == LRS and values.shape == (2, 6)
    assert values[1, 2] == losses[Trial("none", 1, 1, LRS[2], 4)]
    with pytest.raises(ValueError, match="no whole grid .* for none, 1 x 1"):
        curve(dict(list(losses.items())[:-1]), "none", 1, 1)
    with pytest.raises(ValueError, match="for sqrt, 1 x 1"):
        curve(losses, "sqrt", 1, 1)


# ----------------------------------------------------------------------------------------------------------------------
# Tasks


@pytest.mark.slow
def test_language_model_is_what_the_trainer_trains(tmp_path):
    """The same weights, batches, schedule and updates: the same loss as a run, to the last bit."""
    settings = TrainConfig(
        runs=str(tmp_path / "runs"),
        data=str(prepared(tmp_path / "data")),
        max_steps=12,
        batch_size=4,
        grad_accum=2,
        warmup_steps=3,
        schedule="wsd",
        decay_steps=5,
        optimizer="muon",
        eval_every=0,
        sample_every=0,
        seed=11,
        lr=0.01,
    )
    config = replace(DENSE, rule="factored", n_layer=3, n_loop=2)  # a rule with a learning rate of its own
    trained = train(config, settings)
    task = LanguageModel(DENSE, replace(settings, lr=1.0, seed=1), eval_every_nth=1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert task(Trial("factored", 3, 2, lr=0.01, seed=11)) == trained.val_loss
    assert torch.equal(torch.get_rng_state(), before)
    assert task(Trial("factored", 3, 2, lr=0.01, seed=12)) != trained.val_loss


@pytest.mark.parametrize("step_per_segment", [None, False])
def test_language_model_with_segments_is_what_the_trainer_trains(tmp_path, step_per_segment):
    settings = TrainConfig(
        runs=str(tmp_path / "runs"),
        data=str(prepared(tmp_path / "data")),
        max_steps=4,
        batch_size=4,
        eval_every=0,
        sample_every=0,
        log_every=1,
        seed=11,
        lr=0.01,
        step_per_segment=step_per_segment,
    )
    trained = train(LOOM, settings)
    task = LanguageModel(LOOM, settings, eval_every_nth=1)
    trial = Trial("loom", LOOM.n_layer, LOOM.n_loop, lr=0.01, seed=11)
    assert [loss for _, loss in task.training(trial)] == [row["loss"] for row in trained.history]
    assert task(trial) == trained.val_loss


def test_diverged_run_has_infinite_loss(tmp_path):
    settings = TrainConfig(data=str(prepared(tmp_path)), max_steps=20, batch_size=2, warmup_steps=0, dtype="float32")
    assert LanguageModel(DENSE, settings)(Trial("none", 2, 2, lr=1e30, seed=0)) == math.inf
    assert Regression(steps=5)(Trial("none", 1, 2, lr=1e30, seed=0)) == math.inf


def test_regression_starts_at_the_variance_and_learns():
    first = replace(TINY, steps=1)(Trial("none", 1, 1, 0.01, 0))
    assert first == pytest.approx(15 / 16)  # the read-out starts at 0; the variance is over n - 1
    assert Regression(steps=60)(Trial("inverse", 1, 4, 0.01, 0)) < 0.2


def test_regression_takes_every_factor_of_the_row(monkeypatch):
    loss = TINY(Trial("none", 2, 2, 0.05, 0))
    assert TINY(Trial("none", 2, 2, 0.05, 0)) == loss
    assert (
        TINY(Trial("inverse", 2, 1, 0.05, 0))
        == TINY(Trial("sqrt", 2, 1, 0.05, 0))
        == TINY(Trial("none", 2, 1, 0.05, 0))
    )
    for row in (Row(branch=0.5), Row(lr_factor=0.5), Row(eps_factor=1e6)):
        monkeypatch.setitem(RULES, "mine", lambda c, row=row: row)
        assert TINY(Trial("mine", 2, 2, 0.05, 0)) != loss, row
    for rule in ("layernorm_scaling", "rezero", "deepnorm", "deeploop"):
        with pytest.raises(ValueError, match=f"rule {rule} does more than scale a branch"):
            TINY(Trial(rule, 2, 2, 0.05, 0))


def test_regression_tells_loops_from_layers_and_from_none_and_decay_from_a_constant_rate():
    one, loops, layers = (TINY(Trial("none", L, N, 0.05, 0)) for L, N in ((1, 1), (1, 2), (2, 1)))
    assert len({one, loops, layers, replace(TINY, decay=False)(Trial("none", 1, 1, 0.05, 0))}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_best_learning_rate_moves_without_scaling_and_not_with_it(weight_decay):
    """Measured by a sweep, with and without weight decay: a flat norm at the start would not prove it."""
    lrs = [4e-3 * 2**k for k in range(4)]
    task = Regression(width=16, n_example=64, weight_decay=weight_decay)
    losses = sweep(grid(["none", "inverse"], [1], [1, 8], lrs, [1, 2]), task)
    assert shift(losses, "none", (1, 1), (1, 8)).octaves < -0.5
    assert abs(shift(losses, "inverse", (1, 1), (1, 8)).octaves) < 0.5


# -- files that are odd, and two at work ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, named",
    [
        (b"\x80abc", "is not a sweep .*first line"),
        (b"", "is not a sweep .*first line"),
        (b"# 3\nrule,n_layer,n_loop,lr,seed,loss\n", "is not a sweep .*it is no object"),
        (b"# " + b"[" * 100_000, "is not a sweep .*first line"),
        (b"# {}\nnone,1,1,0.1,1,2.5\n", "line 2 must be rule,n_layer,n_loop,lr,seed,loss: put it in"),
        (b"# {}\nrule,n_layer,n_loop,lr,seed,loss\nnone,1,1,0.1,1\n", "line 3 is no trial"),
        (b"# {}\nrule,n_layer,n_loop,lr,seed,loss\nnone,1,1,0.1,1,2\n\n", "line 4 is no trial"),
        (b"# {}\nrule,n_layer,n_loop,lr,seed,loss\nnone,1,1,0.1,1,2\nnone,1,1,0.1\nnone,1,1,0.2,1,2\n", "line 4"),
        (b"# {}\nrule,n_layer,n_loop,lr,seed,loss\nnone,1,x,0.1,1,2.5\n", "line 3 is no trial"),
    ],
    ids=range(9),
)
def test_a_file_that_is_no_sweep_is_named_with_its_line_and_left_alone(tmp_path, content, named):
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}.*{named}|{named}") as refusal:
        sweep([Trial("none", 1, 1, 0.1, 1)], Regression(), path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value) and path.read_bytes() == content


def test_two_sweeps_into_one_file_are_refused(tmp_path):
    path = tmp_path / "mine.csv"

    @dataclass(frozen=True)
    class Second:
        """A task in which somebody else begins with the same file."""

        def __call__(self, trial: Trial) -> float:
            with pytest.raises(ValueError, match="another process adds to .*mine.csv: wait for it"):
                sweep([trial], Second(), path)
            return 1.0

    assert list(sweep([Trial("none", 1, 1, 0.1, 1)], Second(), path).values()) == [1.0]


# -- the rate of an arm, by descent -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", LRS[1:-1])
def test_tuned_walks_downhill_to_the_best_inside(start):
    tried = []

    def loss(lr: float) -> float:
        tried.append(lr)
        return (math.log2(lr) - math.log2(LRS[3])) ** 2

    assert tuned(loss, LRS, start) == LRS[3]
    assert len(tried) == len(set(tried)) and set(LRS[2:5]) <= set(tried)


def test_tuned_refuses_a_best_at_the_end_and_a_diverged_neighbour_is_worse():
    with pytest.raises(ValueError, match=f"{LRS[-1]:g} or beyond"):
        tuned(lambda lr: -lr, LRS, LRS[2])
    assert tuned(lambda lr: math.inf if lr > LRS[1] else -lr, LRS, LRS[1]) == LRS[1]
