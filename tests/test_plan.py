"""The plan of a run: its memory against what real runs take, and its page."""

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import minilooped.plan as planning
import pytest
import torch
from tiny_runs import LOOM, children

from minilooped.cli import main
from minilooped.course import widgets
from minilooped.engine.machine import PEAK_TFLOPS, peak_tflops
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.presets import PRESETS
from minilooped.science.probes.resources import added_by_steps, step_memory
from minilooped.tools.plan import LiveBytes, Memory, at_loops, hours, load_counts, memory, plan, training_tokens
from minilooped.train import TrainConfig

SMALL = LoopedConfig(vocab_size=500, block_size=64, n_layer=2, n_loop=3, n_head=4, n_embd=64)


def test_live_bytes_follow_a_tensors_life():
    with LiveBytes() as live:
        x = torch.ones(10, dtype=torch.float64)
        y = x + 1
        view = y[2:]
        assert live.now == 160
        del x
        assert live.now == 80
        del y
        assert live.now == 80, "the view holds the storage"
        del view
    assert (live.now, live.peak) == (0, 160)


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, dict(rule="deeploop", mlp="gelu"), dict(recompute_loops=True, loss_chunk=50)])
def test_without_data_the_count_is_that_of_a_real_step(monkeypatch, changes, dtype, grad_accum):
    config, training = replace(SMALL, **changes), TrainConfig(batch_size=2, grad_accum=grad_accum)
    planned = memory(config, training, dtype)
    monkeypatch.setattr(planning, "FakeTensorMode", LiveBytes)  # a second count in the place of the fake tensors
    assert memory(config, training, dtype) == planned


def test_the_parts_are_what_they_say():
    training = TrainConfig(batch_size=4)
    found, parameters = memory(SMALL, training, torch.float32), LoopedGPT(SMALL).num_params()
    rotary = 2 * SMALL.block_size * (SMALL.n_embd // SMALL.n_head) * 4
    assert found.gradients == 4 * parameters and found.weights == 4 * parameters + rotary
    assert 0 <= found.optimizer - 8 * parameters < 1000  # a step counter for each parameter besides
    assert found.peak >= found.weights + found.optimizer + found.gradients
    muon = memory(SMALL, replace(training, optimizer="muon"), torch.float32)
    assert found.optimizer - muon.optimizer > 0.9 * 4 * sum(p.numel() for p in LoopedGPT(SMALL).blocks.parameters())


def test_activations_grow_with_the_batch_and_the_loops_and_not_with_the_segments():
    @cache
    def activations(n_loop=2, batch_size=4, segment=None):
        config = replace(SMALL, n_loop=n_loop, segment=segment)
        return memory(config, TrainConfig(batch_size=batch_size), torch.float32).activations

    assert activations(batch_size=8) == pytest.approx(2 * activations(), rel=0.03)
    assert activations(n_loop=6) - activations(n_loop=4) == activations(n_loop=4) - activations()
    assert activations(n_loop=6, segment=2) == activations(n_loop=4, segment=2) <= 1.01 * activations()


def test_streams_that_wait_for_their_next_segment_are_counted():
    config = replace(LOOM, vocab_size=40, n_embd=64, block_size=64)
    training = TrainConfig(batch_size=4, grad_accum=5)
    planned = memory(config, training, torch.float32).peak
    assert planned == planning._simulated(config, training, torch.float32, 5).peak
    assert planned > memory(config, replace(training, grad_accum=3), torch.float32).peak


@pytest.mark.parametrize("changes", [{}, dict(rule="deeploop"), dict(recompute_loops=True, loss_chunk=50, l_ref=2)])
def test_three_counts_give_the_memory_of_every_loop_count(changes):
    def count(n_loop):
        return memory(replace(SMALL, n_loop=n_loop, **changes), TrainConfig(batch_size=8, grad_accum=2))

    counts = [count(n_loop) for n_loop in (1, 2, 3)]
    assert [at_loops(counts, n_loop) for n_loop in (1, 2, 3)] == counts
    found, expected = at_loops(counts, 5), count(5)
    assert replace(found, peak=0) == replace(expected, peak=0)
    assert found.peak == pytest.approx(expected.peak, rel=1e-4)  # a few single numbers come and go
    assert counts[2].peak > 1.01 * counts[1].peak, "else this test says nothing"


COUNTS = Path(__file__).parents[1] / "data/results/memory.json"


def test_the_recorded_counts_cover_the_planner_and_are_those_of_the_code_as_it_is():
    counts = load_counts(COUNTS)
    assert list(counts) == list(product(*widgets.PLANNED.values()))
    model, training = PRESETS["gpt2-small-4x3"]
    changes = dict(recompute_loops=True, loss_chunk=4096)
    for n_loop, rel in ((1, 0), (5, 1e-4)):
        found = memory(replace(model, n_loop=n_loop, **changes), replace(training, batch_size=8))
        recorded = at_loops(counts["gpt2-small-4x3", 8, True, 4096], n_loop)
        assert replace(recorded, peak=0) == replace(found, peak=0), "run python benchmarks/memory.py"
        assert recorded.peak == pytest.approx(found.peak, rel=rel)


def of_a_forked_process(config, batch_size, dtype):
    """`step_memory`, but for the seconds in which a process of its own imports torch."""
    with ProcessPoolExecutor(1, children) as process:
        return process.submit(added_by_steps, config, batch_size, dtype).result()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "measure, dtype, changes",
    [
        (step_memory, "float32", {}),
        (of_a_forked_process, "bfloat16", {}),
        (of_a_forked_process, "float32", dict(segment=2)),
        (of_a_forked_process, "float32", dict(recompute_loops=True)),
    ],
)
def test_the_plan_is_within_15_percent_of_the_memory_that_a_run_takes(measure, dtype, changes):
    config = LoopedConfig(
        vocab_size=2000, block_size=256, n_layer=2, n_loop=4, n_head=4, n_embd=128, loss_chunk=512, **changes
    )
    planned = memory(config, TrainConfig(batch_size=16), getattr(torch, dtype)).peak
    assert planned == pytest.approx(measure(config, 16, dtype), rel=0.15)


# -- time and page -----------------------------------------------------------------------------------------------------


def test_hours_are_operations_over_speed():
    training = TrainConfig(max_steps=10, batch_size=3, grad_accum=2)
    assert training_tokens(SMALL, training) == 10 * 3 * 2 * SMALL.block_size
    flops = 10 * 3 * 2 * SMALL.block_size * LoopedGPT(SMALL).flops_per_token()
    assert hours(SMALL, training, tflops=2.0, mfu=0.5) == pytest.approx(flops / 1e12 / 3600)
    drawn = replace(training, n_loop_sampling="uniform")  # from 1 to 3: two on average, and the head once in any case
    two = hours(replace(SMALL, n_loop=2), training, tflops=2.0, mfu=0.5)
    assert hours(SMALL, drawn, tflops=2.0, mfu=0.5) == pytest.approx(two)


def test_every_name_in_the_table_of_peaks_finds_its_own_entry():
    # H200 is part of GH200, A10 of A100 and of A10G: the longer name has to come first
    assert all(peak_tflops(f"NVIDIA {name} 80GB") == peak for name, peak in PEAK_TFLOPS.items())
    assert peak_tflops("NVIDIA GeForce RTX 2080") is peak_tflops("NVIDIA RTX A4000") is None


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_plan(preset, capsys, monkeypatch):
    monkeypatch.setattr(planning, "memory", lambda *_: Memory(1, 2, 3, 4, 10))  # seconds for the large ones
    assert main(["plan", "--preset", preset, "--gpu", "A100"]) == 0
    page = capsys.readouterr().out
    model, training = PRESETS[preset]
    assert f"{model.n_layer} blocks x {model.n_loop} loops = {model.n_unroll} block visits" in page
    assert f"{training.max_steps:,} steps" in page and "A100" in page and "not compiled" in page


def test_the_micro_batch_is_halved_until_it_fits_and_the_tokens_stay(monkeypatch):
    monkeypatch.setattr(planning, "memory", lambda _, training, __: Memory(0, 0, 0, 0, training.batch_size * 10**9))
    model, training = PRESETS["gpt2-small"]
    assert "4 GB want --batch-size 4 --grad-accum 120" in plan(model, training, gpu_memory=4)
    assert "491,520 tokens" in plan(model, training, gpu_memory=4)
    assert "want" not in plan(model, training, gpu_memory=16)
    assert "more than 0.5 GB: set --recompute-loops" in plan(model, training, gpu_memory=0.5)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--gpu", "abacus"], "gpu='abacus' is none of"),
        (["--mfu", "1.5"], "mfu=1.5"),
        (["--mfu", "0"], "mfu=0"),
        (["--gpu-memory", "-1"], "gpu_memory=-1"),
        (["--gpu-memory", "nan"], "gpu_memory=nan"),
    ],
)
def test_what_cannot_be_is_named(arguments, said, capsys):
    assert main(["plan", "--preset", "shakespeare", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_a_peak_that_is_given_beats_the_table(capsys):
    assert main(["plan", "--preset", "shakespeare", "--gpu", "abacus", "--peak-tflops", "0.001"]) == 0
    assert "hours on abacus, if it spends 40% of its 0.001 TFLOP/s" in capsys.readouterr().out


def test_a_micro_batch_that_no_device_holds_is_refused_at_once():
    small = LoopedConfig(vocab_size=63, block_size=64, n_layer=1, n_head=2, n_embd=16)
    with pytest.raises(
        ValueError, match="batch_size=1000000000 windows of 64 are 64,000,000,000 tokens in one micro-batch"
    ):
        plan(small, TrainConfig(batch_size=10**9))


def test_the_package_patches_nothing():
    for path in Path(planning.__file__).parents[1].rglob("*.py"):
        assert "unittest.mock" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{}", "counts.json: runs is missing"),
        ('{"runs": [{"preset": "a"}]}', r"runs\[0\].batch_size is missing"),
        ("[", "JSON"),
    ],
)
def test_counts_that_are_no_record_are_named(tmp_path, content, named):
    path = tmp_path / "counts.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=named):
        load_counts(path)
    with pytest.raises(FileNotFoundError, match="absent.json is missing"):
        load_counts(tmp_path / "absent.json")
