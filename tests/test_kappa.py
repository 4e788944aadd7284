"""The recording of chapter 6's visit alignment, benchmarks/kappa.py."""

import json
import runpy
from pathlib import Path

import pytest

from minilooped.model import LoopedConfig
from minilooped.science import probes

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "data" / "results" / "kappa.json"


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "kappa.py"), run_name="protocol")


def test_every_run_of_the_protocol_is_recorded_once_and_lies_between_its_bounds(script):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    steps, runs = recorded["settings"]["steps"], recorded["runs"]
    planned = {(rule, R, seed) for rule in script["RULES"] for R in script["R_ALL"] for seed in script["SEEDS"]}
    assert len(runs) == len(planned) and {(run["rule"], run["R"], run["seed"]) for run in runs} == planned
    assert all(len(run["kappa"]) == len(steps) and 0 < min(run["kappa"]) for run in runs)
    assert all(max(run["kappa"]) <= run["R"] * (1 + 1e-6) for run in runs)


def test_the_record_before_training_is_the_probe_of_an_untrained_model(script):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    run = next(run for run in recorded["runs"] if run["rule"] == "factored" and run["R"] == 4)
    task = script["TASK"]
    model = recorded["settings"]["model"] | dict(
        rule="factored", n_layer=2, n_loop=4, vocab_size=task.corpus.tokenizer.vocab_size
    )
    found = probes.kappa(probes.fresh(LoopedConfig(**model), run["seed"], (1, 1))[0], task.windows[0][0][:4])
    assert found == pytest.approx(run["kappa"][0], rel=1e-3)
