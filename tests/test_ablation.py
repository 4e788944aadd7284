"""LOOM's parts as switches, and the recorded ablation: what was run is what the protocol says."""

import runpy
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from minilooped.presets import LOOM_PARTS
from minilooped.science import ablation
from minilooped.science.ablation import ARMS, CONTROLS, PARTS, PLAIN, SETTINGS, Run, assembled, load, paired, reported
from minilooped.science.records import read, write

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "data" / "results" / "loom.json"


def changed(config, base=PLAIN) -> dict:
    return {name: value for name, value in asdict(config).items() if value != asdict(base)[name]}


# ----------------------------------------------------------------------------------------------------------------------
# The switches


def test_each_part_changes_what_it_says_and_nothing_else():
    for part, changes in PARTS.items():
        assert changed(assembled([part])) == changes
    assert assembled(()) == PLAIN


def test_all_parts_are_the_recipe_of_the_presets_without_segments():
    fields = {"rule", "reinject", "loop_residual", "loop_end_norm", "router", "moe_out_norm"}
    assert changed(assembled(PARTS)).keys() == fields
    same = (*fields, "gate", "tie_embeddings", "normalizes_embedding", "reinject_lam", "lam", "router_init", "balance")
    for name in same:
        assert getattr(assembled(PARTS), name) == getattr(LOOM_PARTS, name), name


def test_parts_go_onto_any_model_and_a_part_that_is_none_is_named():
    base = replace(PLAIN, n_loop=12)
    assert assembled(["scaling"], base) == replace(base, rule="loom")
    with pytest.raises(ValueError, match="^no part gamma; there are scaling, .*, doubled attention, quiet start$"):
        assembled(["scaling", "gamma"])


def test_arms_are_all_different_and_one_part_apart_where_they_say_so():
    configs = [assembled(parts) for parts in ARMS.values()]
    assert len({str(config) for config in configs}) == len(configs) == 18
    for part in PARTS:
        assert set(PARTS) - set(ARMS[f"without {part}"]) == {part}
    doubled = assembled(ARMS["doubled attention"])
    assert changed(doubled, assembled(PARTS)) == CONTROLS["doubled attention"] == dict(loop_residual=0.0)


def test_an_arm_from_a_quiet_start_differs_by_that_alone():
    again = [arm for arm in ARMS if arm.endswith(", quiet start")]
    assert len(again) == 3
    for arm in again:
        loud = assembled(ARMS[arm.removesuffix(", quiet start")])
        assert changed(assembled(ARMS[arm]), loud) == SETTINGS["quiet start"] == dict(init_std=0.05)


# ----------------------------------------------------------------------------------------------------------------------
# Reading runs


def run(arm: str, seed: int, val_loss: float, losses=(3.0,)) -> Run:
    return Run(arm, 0.01, seed, val_loss, list(losses), [], 10)


def test_rises_are_those_of_the_loss_averaged_over_ten_steps():
    falling = run("plain", 1, 2.0, [5 - 0.1 * step for step in range(30)])
    assert falling.smooth.tolist() == pytest.approx([4.55 - 0.1 * step for step in range(21)])
    assert falling.worst_rise == falling.end_rise == 0
    spike = run("plain", 1, 2.0, [2.0] * 20 + [7.0] + [2.0] * 20)
    assert spike.worst_rise == pytest.approx(0.5) and spike.end_rise == pytest.approx(0)
    lost = run("plain", 1, 2.0, [3.0] * 10 + [2.0] * 10 + [4.0] * 10)
    assert lost.worst_rise == lost.end_rise == pytest.approx(2)


def test_pairs_are_those_of_a_seed_and_seed_0_is_not_reported():
    runs = [run("full", seed, seed / 10) for seed in (3, 0, 1, 2)] + [run("plain", seed, 1.0) for seed in (0, 1, 3)]
    assert {seed: one.val_loss for seed, one in reported(runs, "full").items()} == {1: 0.1, 2: 0.2, 3: 0.3}
    assert paired(runs, "plain", "full").tolist() == pytest.approx([0.9, 0.7])
    assert paired(runs, "full", "plain").tolist() == pytest.approx([-0.9, -0.7])
    with pytest.raises(ValueError, match="no seed of plain and of without scaling was recorded"):
        paired(runs, "plain", "without scaling")


def test_reported_are_the_seeds_at_the_learning_rate_that_was_best_with_seed_0():
    found = ((0.1, 0, 2.5), (0.1, 1, 1.0), (0.2, 0, 2.25), (0.2, 1, 2.0), (0.2, 2, 2.5), (0.4, 0, 2.75), (0.4, 2, 1.0))
    runs = [replace(run("full", seed, loss), lr=lr) for lr, seed, loss in found]
    best = {seed: (one.lr, one.val_loss) for seed, one in reported(runs, "full").items()}
    assert best == {1: (0.2, 2.0), 2: (0.2, 2.5)}


def test_load_reads_what_was_written(tmp_path):
    runs = [run("full", 1, 2.0), run("plain", 1, float("inf"))]
    path = tmp_path / "loom.json"
    write(path, dict(provenance={}, settings={}, runs=[asdict(one) for one in runs]))
    assert load(path) == runs


# ----------------------------------------------------------------------------------------------------------------------
# The record


@pytest.fixture(scope="module")
def protocol():
    return runpy.run_path(str(ROOT / "benchmarks" / "loom.py"), run_name="protocol")


@pytest.fixture(scope="module")
def runs():
    return load(RECORDED)


def test_every_arm_was_run_with_three_seeds_at_the_learning_rate_of_the_protocol(runs, protocol):
    seekers = protocol["SEEKERS"]
    sought = {
        arm: min((run for run in runs if (run.arm, run.seed) == (arm, 0)), key=lambda run: run.val_loss).lr
        for arm in seekers
    }
    for arm, parts in ARMS.items():
        lr = sought[arm if arm in seekers else protocol["FOLLOWERS"].get(arm, "full")]
        lr = protocol["QUIET_LR"] if "quiet start" in parts else lr
        assert {seed: run.lr for seed, run in reported(runs, arm).items()} == dict.fromkeys((1, 2, 3), lr)
    assert len({(run.arm, run.lr, run.seed) for run in runs}) == len(runs)


def test_the_search_stopped_between_two_worse_learning_rates(runs, protocol):
    for arm in protocol["SEEKERS"]:
        found = {run.lr: run.val_loss for run in runs if (run.arm, run.seed) == (arm, 0)}
        best = min(found, key=found.get)
        assert best / 2 in found or best / 2 < 1e-3
        assert best * 2 in found or best * 2 > 64e-3


def test_every_run_is_whole_and_made_with_the_settings_of_the_protocol(runs, protocol):
    steps, every = protocol["TRAINING"].max_steps, protocol["EVERY"]
    for run in runs:
        assert run.every == every and 0 < run.val_loss < 5
        assert len(run.losses) == steps and len(run.variances) == steps // every
        assert torch.tensor(run.variances).min() > 0
    recorded = read(RECORDED)
    for made in (recorded["provenance"], *recorded["extended"]):
        assert made["commit"] and not made["commit"].endswith("+")
    assert ablation.PLAIN.n_loop == 6 and ablation.PLAIN.n_layer == 2
