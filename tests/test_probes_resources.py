"""What a model costs: saved bytes, operations, memory and time, against what can be counted by hand."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import build, example, tiny
from small_models import looped

from minilooped.science import probes
from minilooped.science.probes import saved_bytes


def leaf(n: int = 1000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x.exp(), 4000),  # its result
        (lambda x: x.sin(), 4000),  # its argument
        (lambda x: x.exp().sin(), 4000),  # one storage, saved twice
        (lambda x: x.sin().exp(), 8000),
        (lambda x: x * leaf(), 8000),
        (lambda x: x * x, 4000),
        (lambda x: x + 1, 0),
        (lambda x: (x + 1)[:10].sin(), 4000),  # a view keeps all of its storage alive
        (lambda x: x.double().sin(), 8000),
    ],
)
def test_saved_bytes_of_a_few_operations(run, expected):
    x = leaf()
    assert saved_bytes(lambda: run(x)) == expected


def test_saved_bytes_leaves_out_parameters_and_their_views():
    x, w = leaf(), leaf()
    assert saved_bytes(lambda: x * w, [w]) == 4000
    assert saved_bytes(lambda: x * w.view(10, 100).flatten(), [x, w]) == 0
    assert saved_bytes(lambda: x * w, iter([x, w])) == 0


def test_saved_bytes_counts_nothing_without_gradients():
    x = leaf()
    with torch.no_grad():
        assert saved_bytes(lambda: x.exp()) == 0
    assert saved_bytes(lambda: x.detach().exp()) == 0


def test_saved_bytes_is_the_most_at_one_time():
    """Two graphs one after the other hold no more than the larger; two at once hold both."""
    x, y = leaf(), leaf(500)

    def one_after_the_other():
        for z in (x, y, x):
            z.exp().sum().backward()

    def at_once():
        total = x.exp().sum() + y.exp().sum()
        total.backward()

    assert saved_bytes(one_after_the_other) == 4000
    assert saved_bytes(at_once) == 6000


def test_saved_bytes_forgets_what_no_backward_asks_for_once_its_results_are_gone():
    """An operation that saved its own result would otherwise hold itself."""

    def run():
        for _ in range(3):
            leaf().exp()

    assert saved_bytes(run) == 4000


def test_saved_bytes_leaves_results_and_gradients_alone():
    results = []
    for measured in (False, True):
        model = build(tiny())
        idx, targets = example(model.config)

        def run(model=model, idx=idx, targets=targets):
            model(idx, targets)[1].backward()

        if measured:
            assert saved_bytes(run, model.parameters()) > 0
        else:
            run()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def segmented(n_loop: int, segment: int | None) -> int:
    model = build(tiny(n_loop=n_loop, segment=segment), dtype=torch.float32)
    idx, targets = example(model.config)

    def run():
        for loss in model.segment_losses(idx, targets):
            loss.backward()

    return saved_bytes(run, [*model.parameters(), *model.buffers()])


def test_saved_bytes_of_a_loop_are_a_straight_line():
    two, three, seven = (segmented(n_loop, None) for n_loop in (2, 3, 7))
    assert three > two and seven - three == 4 * (three - two)


def test_saved_bytes_of_segments_are_flat():
    assert segmented(4, 2) == segmented(8, 2) == segmented(12, 2) == segmented(2, None)


def test_cost_counts_visits_but_for_parameters():
    shapes = [(1, 6), (2, 3), (6, 1)]
    looped, between, plain = (probes.cost(tiny(n_layer=n_layer, n_loop=n_loop)) for n_layer, n_loop in shapes)
    assert [(c.n_layer, c.n_loop) for c in (looped, between, plain)] == shapes
    assert looped.operations == between.operations == plain.operations
    assert looped.saved == between.saved == plain.saved
    assert plain.parameters - looped.parameters == 5 * (between.parameters - looped.parameters) > 0


def test_cost_is_that_of_the_model():
    config = tiny(n_loop=2)
    model = build(config, dtype=torch.float32)
    idx, targets = example(config, batch=1)
    cost = probes.cost(config)
    assert (cost.parameters, cost.operations) == (model.num_params(), model.flops_per_token())
    assert cost.saved == saved_bytes(lambda: model(idx, targets), [*model.parameters(), *model.buffers()])


def test_batch_bytes_are_those_of_the_longest_segment_and_leave_no_trace():
    whole = [probes.batch_bytes(*looped(n_loop=n)) for n in range(1, 6)]
    assert len({b - a for a, b in itertools.pairwise(whole)}) == 1 and whole[1] > whole[0]
    assert [probes.batch_bytes(*looped(K)) for K in (1, 2, 3, 5, 9)] == [whole[K - 1] for K in (1, 2, 3, 5, 5)]
    model, idx, targets = looped(2)
    model(idx, targets)[1].backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    probes.batch_bytes(model, idx, targets)
    assert all(torch.equal(a.grad, b) for a, b in zip(model.parameters(), before, strict=True))


def test_cpu_times_take_turns_and_leave_out_the_first_round(monkeypatch):
    clock, order = iter(n * n for n in itertools.count()), []  # read before and after: a run takes 1, 5, 9, ... seconds
    monkeypatch.setattr(probes.resources.time, "process_time", lambda: next(clock))
    times = probes.cpu_times({name: lambda name=name: order.append(name) for name in "ab"}, rounds=3)
    assert "".join(order) == "abababab"
    assert {name: seconds.tolist() for name, seconds in times.items()} == {"a": [9, 17, 25], "b": [13, 21, 29]}


def test_peak_memory_is_that_of_a_fresh_process_and_sees_a_cut():
    config = tiny(n_loop=12, block_size=64, n_embd=32)
    hoard = torch.zeros(30_000_000)  # of this process, not of the fresh one
    ordinary = probes.peak_memory(config, 64)
    if ordinary is None:
        pytest.skip("no /proc here")
    held = probes.saved_bytes(lambda: probes.fresh(config, 0, (1, 1))[0](*[torch.zeros(64, 64, dtype=int)] * 2))
    assert held < ordinary < 3 * held
    assert probes.peak_memory(replace(config, segment=2), 64) < 0.6 * ordinary
    del hoard


def test_added_memory_is_the_peak_above_what_was_there_before(monkeypatch):
    monkeypatch.setattr(probes.resources, "resident", {"VmRSS": 5, "VmHWM": 12}.get)
    assert probes.added_memory(tiny(), 2, torch.get_num_threads()) == 7


def test_peak_memory_is_none_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(probes.resources, "STATUS", tmp_path / "status")
    assert probes.peak_memory(tiny(), 2) is None


def test_resident_reads_kilobytes(monkeypatch, tmp_path):
    monkeypatch.setattr(probes.resources, "STATUS", tmp_path / "status")
    probes.resources.STATUS.write_text("Name:\tpython: x\nVmHWM:\t   12 kB\nVmRSS:\t    7 kB\n", encoding="utf-8")
    assert (probes.resident("VmHWM"), probes.resident("VmRSS")) == (12 * 1024, 7 * 1024)
