"""The benchmark beside the peers: its arithmetic, its targets, its record and the page made from it."""

import json
import os
import runpy
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minilooped.model import LoopedGPT

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bench():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "bench.py"), run_name="protocol"))


@pytest.fixture
def small(bench, monkeypatch):
    """The step's table at a size that takes no time."""
    tiny = dict(n_embd=16, n_head=2)
    monkeypatch.setitem(bench.step.__globals__, "SHAPE", bench.SHAPE | tiny)
    monkeypatch.setitem(bench.step.__globals__, "OURS", replace(bench.OURS, **tiny))


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_a_ratio_takes_the_smallest_of_each_and_the_rest_round_by_round(bench):
    assert bench.spread([3.0, 8.0, 5.0, 4.0, 6.0], [1.0, 2.0, 2.0, 4.0, 2.0]) == dict(
        min=3.0, low=2.5, median=3.0, high=3.0
    )
    assert bench.spread([2.0, 1.0, 3.0]) == dict(min=1.0, low=1.5, median=2.0, high=2.5)
    assert bench.spread([7.0]) == dict(min=7.0, low=7.0, median=7.0, high=7.0)


def test_rounds_that_do_not_pair_up_raise(bench):
    with pytest.raises(ValueError):
        bench.spread([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    "bound, least, met", [(0.5, False, True), (0.49, False, False), (0.5, True, True), (0.51, True, False)]
)
def test_a_target_is_judged_by_the_median_and_its_bound_is_allowed(bench, bound, least, met):
    samples = dict(ours=[1.0, 2.0, 30.0], peer=[4.0, 4.0, 4.0])  # the mean would be far above
    judgement = bench.judged(bench.Target("ours", "peer", bound, least), samples)
    assert judgement["met"] is met and judgement["measured"]["median"] == 0.5
    assert ("**missed**" in bench.VERDICT[judgement["met"]]) is not met


def test_a_target_can_bind_the_values_themselves(bench):
    assert bench.judged(bench.Target("toy", None, 100), dict(toy=[90.0, 99.0, 120.0]))["met"] is True


@pytest.mark.parametrize("samples", [dict(ours=[1.0]), dict(peer=[1.0])])
def test_without_a_row_a_target_is_not_judged(bench, samples):
    judgement = bench.judged(bench.Target("ours", "peer", 0.5), samples)
    assert judgement["met"] is None and judgement["measured"] is None
    record = bench.as_record(bench.Table("title", "ms", samples, [bench.Target("ours", "peer", 0.5)]))
    assert "not measured" in bench.as_markdown(record)


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_variants_are_taken_in_turn_and_the_first_round_does_not_count(bench, monkeypatch):
    clock, order = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(time, "process_time", lambda: clock.now)

    def variant(name, seconds):
        def run():
            clock.now += seconds if order.count(name) else 100
            order.append(name)

        return run

    samples = bench.in_turn("title", dict(a=variant("a", 1), b=variant("b", 2)), rounds=3)
    assert order == ["a", "b"] * 4
    assert samples == dict(a=[1000.0] * 3, b=[2000.0] * 3)


def test_the_line_over_loops_is_fitted_without_the_count_that_it_judges(bench, monkeypatch):
    """Times of 5 + 2 n, but 30 at 12 loops: 12.5 shares."""
    monkeypatch.setitem(bench.loops.__globals__, "our_step", lambda config, *batch: None)
    times = {f"n_loop = {n}": [5.0 + 2 * n if n < 12 else 30.0] for n in (1, 2, 4, 8, 12)}
    monkeypatch.setitem(bench.loops.__globals__, "in_turn", lambda *_: times)
    line = bench.as_record(bench.loops(bench.Options())[1])
    assert [row["median"] for row in line["rows"]] == pytest.approx([5, 2, 12.5])
    assert line["targets"][0]["met"] is False


def test_a_collapsed_router_sends_every_token_to_the_same_two_experts(bench):
    models = []
    config = replace(bench.OURS, n_embd=16, n_head=2, n_expert=8, n_inner=8)
    make = lambda config: models.append(LoopedGPT(config)) or models[-1]  # noqa: E731
    bench.our_step(config, *torch.randint(512, (2, 1, 8)), collapsed=True, kind=make)
    for block in models[0].blocks:
        assert set(block.mlp.router(torch.randn(50, 16), 0).choice.unique().tolist()) == {0, 1}


def test_the_row_with_erf_is_the_same_model_but_for_its_gelu(bench):
    config = replace(bench.OURS, n_embd=16, n_head=2)
    torch.manual_seed(0)
    ours = LoopedGPT(config)
    torch.manual_seed(0)
    exact = bench.with_erf(config)
    for a, b in zip(ours.parameters(), exact.parameters(), strict=True):
        assert torch.equal(a, b)
    x = torch.linspace(-3, 3, 16).expand(4, 16)
    hidden = exact.blocks[0].mlp.w_in(x)
    assert torch.equal(exact.blocks[0].mlp(x), exact.blocks[0].mlp.w_out(torch.nn.functional.gelu(hidden)))


def test_resident_memory_rises_by_what_is_allocated(bench):
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux")
    before = bench.resident_peak()
    held = torch.ones(int(before + 64) * 2**18)  # MiB of float32, beyond any earlier peak
    assert 60 < bench.resident_peak() - before < held.nbytes / 2**20 + 64


@pytest.mark.parametrize("whole, compiled", [(True, ["LoopedGPT"]), (False, ["Block", "Block"])])
def test_compiling_costs_what_a_first_step_takes_beyond_a_second_children_included(
    bench, small, monkeypatch, whole, compiled
):
    parts, used = [], iter([0, 9, 9, 11, 11, 16, 16, 18])  # before and after each of four steps
    monkeypatch.setattr(torch.nn.Module, "compile", lambda part: parts.append(type(part).__name__))
    # User and system time, the same of ended children, and the wall clock, which does not count.
    monkeypatch.setattr(os, "times", lambda: (0, 0, 1, next(used), -5))
    assert bench.seconds_to_compile(whole, 1, 3) == [9 - 2, 5 - 2]
    assert parts == compiled


# -- peers, record and page --------------------------------------------------------------------------------------------

PEER = """
import torch
from dataclasses import dataclass

@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int
    n_head: int
    n_embd: int
    n_layer: int
    dropout: float
    bias: bool

class GPT(torch.nn.Linear):
    def __init__(self, config):
        super().__init__(1, 1)
    def configure_optimizers(self, weight_decay, lr, betas, device_type):
        print("chatter")
        return torch.optim.SGD(self.parameters(), lr)
    def forward(self, idx, targets):
        return None, self.weight.square().sum()
"""


def run(bench, tmp_path, *only, **options):
    bench.main(bench.Options(only=only, rounds=2, out=tmp_path, **options))
    return json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))


def test_peers_that_are_not_there_are_left_out_and_those_that_are_come_first(
    bench, small, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (table,) = run(bench, tmp_path, "step")["step"]["tables"]
    assert all(row["row"].startswith("ours") for row in table["rows"])
    assert {target["met"] for target in table["targets"]} == {None}
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "model.py").write_text(PEER, encoding="utf-8")
    capsys.readouterr()
    (table,) = run(bench, tmp_path, "step", nanogpt=clone)["step"]["tables"]
    assert table["rows"][0]["row"] == "nanoGPT, 12 untied" and table["rows"][0]["ratio"]["median"] == 1
    assert [target["met"] is None for target in table["targets"]] == [False] + [True] * 5
    assert "chatter" not in capsys.readouterr().out


def test_every_part_is_written_when_it_is_done_and_the_others_are_kept(bench, tmp_path):
    first = run(bench, tmp_path, "toy")
    both = run(bench, tmp_path, "graphs")
    assert both["toy"] == first["toy"] and list(both) == ["graphs", "toy"]  # the order of the page, not of the runs
    for name, part in both.items():
        assert f"--only {name}" in part["provenance"]["made_by"]
    assert (tmp_path / "bench.md").read_text(encoding="utf-8") == bench.page(both)


def test_a_path_that_is_no_clone_is_refused_before_anything_runs(bench, tmp_path):
    with pytest.raises(SystemExit, match="--looped-moe .*nowhere is not a folder"):
        run(bench, tmp_path, "toy", looped_moe=tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())


def test_the_recorded_page_is_made_from_the_record_with_every_part_and_every_peer(bench):
    recorded = json.loads((ROOT / "data/results/bench.json").read_text(encoding="utf-8"))
    assert (ROOT / "data/results/bench.md").read_text(encoding="utf-8") == bench.page(recorded)
    assert list(recorded) == list(bench.PARTS)
    tables = [table for part in recorded.values() for table in part["tables"]]
    for table in tables:
        samples = {row["row"]: row["samples"] for row in table["rows"]}
        for target in table["targets"]:
            assert target["met"] is not None, target["row"]
            again = bench.judged(bench.Target(target["row"], target["over"], target["bound"], target["least"]), samples)
            assert again["met"] == target["met"]
            assert again["measured"]["median"] == pytest.approx(target["measured"]["median"], rel=1e-3)
