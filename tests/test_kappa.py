"""The recording of chapter 6's visit alignment, benchmarks/kappa.py."""

import json
import runpy
from pathlib import Path

import pytest

from minilooped import probes
from minilooped.model import LoopedConfig

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "data" / "results" / "kappa.jsonl"


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "kappa.py"), run_name="protocol")


def test_every_run_of_the_protocol_is_recorded_once_and_lies_between_its_bounds(script):
    head, *runs = map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines())
    assert head["steps"] == list(script["MEASURED_AT"]) and head["lr"] == script["LR"]
    planned = {(rule, R, seed) for rule in script["RULES"] for R in script["R_ALL"] for seed in script["SEEDS"]}
    assert len(runs) == len(planned) and {(run["rule"], run["R"], run["seed"]) for run in runs} == planned
    assert all(len(run["kappa"]) == len(head["steps"]) and 0 < min(run["kappa"]) for run in runs)
    assert all(max(run["kappa"]) <= run["R"] * (1 + 1e-6) for run in runs)


def test_the_record_before_training_is_the_probe_of_an_untrained_model(script):
    head, *runs = map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines())
    run = next(run for run in runs if run["rule"] == "factored" and run["R"] == 4)
    task = script["TASK"]
    model = head["model"] | dict(rule="factored", n_layer=2, n_loop=4, vocab_size=task.corpus.tokenizer.vocab_size)
    found = probes.kappa(probes.fresh(LoopedConfig(**model), run["seed"], (1, 1))[0], task.windows[0][0][:4])
    assert found == pytest.approx(run["kappa"][0], rel=1e-3)


def test_a_stopped_recording_goes_on_and_one_of_other_settings_is_left_alone(script, tmp_path, capsys):
    main, asked = script["main"], []
    here = main.__globals__
    here |= dict(OUT=tmp_path / "kappa.jsonl", RULES=("none",), R_ALL=(2,), SEEDS=(1, 2))
    here["one_run"] = lambda rule, R, seed: asked.append(seed) or dict(rule=rule, R=R, seed=seed, kappa=[1.0])
    main()
    first, second = here["OUT"].read_text(encoding="utf-8").splitlines(keepends=True)[:2]
    here["OUT"].write_text(first + second, encoding="utf-8")  # stopped after its first run
    main()
    assert asked == [1, 2, 2]
    here["LR"] = 1.0
    before = here["OUT"].read_bytes()
    with pytest.raises(SystemExit, match="other settings: move it away"):
        main()
    assert here["OUT"].read_bytes() == before and asked == [1, 2, 2]
