"""Numbers that stop being finite, and memory that does not suffice."""

import math
import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_runs import DENSE, LOOM, settings
from tiny_training import BOTH, gradients, tiny_batch, tiny_model

from minilooped import train as trainer
from minilooped.engine.checkpoint import load_checkpoint, read_config
from minilooped.engine.state import random_state
from minilooped.model import Block, LoopedGPT
from minilooped.tools.plan import LiveBytes
from minilooped.train import NextLoss, TrainConfig, accumulate, fit_micro_batch, rehearse, train, train_step


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_step_that_is_not_finite_changes_no_weight(poison):
    model = tiny_model(DENSE)
    with torch.no_grad():
        model.blocks[0].mlp.w_in.weight[0, 0] = poison
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = model.configure_optimizer(1e-2, 0.1)
    with pytest.raises(FloatingPointError, match="loss nan, gradient norm nan"):
        train_step(NextLoss(model), optimizer, [tiny_batch(4)])
    for a, b in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert not optimizer.state_dict()["state"], "no moment has seen it"


def test_updates_of_earlier_segments_stand_when_a_later_one_is_not_finite(monkeypatch):
    model, batch = tiny_model(LOOM), tiny_batch(4)
    segment_losses = LoopedGPT.segment_losses

    def poisoned(model, *args, **options):
        for segment, loss in enumerate(segment_losses(model, *args, **options), start=1):
            yield loss * math.nan if segment == 2 else loss

    reference = tiny_model(LOOM)
    next(accumulate(NextLoss(reference), [batch]))
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    monkeypatch.setattr(LoopedGPT, "segment_losses", poisoned)
    with pytest.raises(FloatingPointError, match="update 2: loss nan, gradient norm nan"):
        train_step(NextLoss(model), torch.optim.SGD(model.parameters(), lr=0.1), [batch], step_per_segment=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_loss_that_is_not_finite_over_a_finite_gradient_is_found(monkeypatch):
    segment_losses = LoopedGPT.segment_losses
    monkeypatch.setattr(
        LoopedGPT, "segment_losses", lambda *a, **o: (loss + math.inf for loss in segment_losses(*a, **o))
    )
    model = tiny_model(DENSE)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(FloatingPointError, match=r"loss inf, gradient norm \d"):
        train_step(NextLoss(model), model.configure_optimizer(1e-2, 0.1), [tiny_batch(4)])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_found():
    model = tiny_model(DENSE)
    model.final_norm.weight.register_hook(lambda grad: grad * math.inf)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(FloatingPointError, match=r"loss \d\.\d+, gradient norm (inf|nan)"):
        train_step(NextLoss(model), model.configure_optimizer(1e-2, 0.1), [tiny_batch(4)])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@BOTH
def test_a_run_that_blows_up_says_where_and_what_is_left(tmp_path, monkeypatch, model_config):
    """At a step that is not logged."""
    rate = trainer.learning_rate
    monkeypatch.setattr(trainer, "learning_rate", lambda step, config: math.inf if step == 6 else rate(step, config))
    config = settings(tmp_path, log_every=10, save_every=3, step_per_segment=False, dtype="float32")
    with pytest.raises(FloatingPointError) as stop:
        train(model_config, config)
    message = str(stop.value)
    assert "stopped after step 7: step 8, update 1: loss nan, gradient norm nan; learning rate 0.00" in message
    norms = re.search("RMS of the stream after each loop: ([^;]*)[.] Last", message)[1].split(", ")
    assert len(norms) == model_config.n_loop and any(not math.isfinite(float(norm)) for norm in norms)
    assert f"Last good checkpoint: {tmp_path / 'runs' / 'tiny' / 'step-6'}" in message
    assert load_checkpoint(tmp_path / "runs" / "tiny").step == 6


@BOTH
def test_a_rehearsal_leaves_no_trace(model_config, dropout):
    model = tiny_model(model_config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = random_state()
    rehearse(NextLoss(model), [tiny_batch(4)], partial(torch.autocast, "cpu", enabled=False))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(states["torch"], torch.get_rng_state()) and states["python"] == random.getstate()
    assert not gradients(model)


def test_a_step_that_does_not_fit_fails_before_training_and_names_the_knobs(tmp_path, monkeypatch):
    run_loop = LoopedGPT.run_loop

    def too_large(model, h, *arguments):
        if len(h) > 1:  # a single window fits, as when the kernel is looked up
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        return run_loop(model, h, *arguments)

    monkeypatch.setattr(LoopedGPT, "run_loop", too_large)
    with pytest.raises(MemoryError) as failure:
        train(DENSE, settings(tmp_path, batch_size=3))
    assert all(knob in str(failure.value) for knob in ("batch_size", "grad_accum", "block_size", "n_loop", "segment"))
    assert not (tmp_path / "runs").exists(), "nothing was begun"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 16000000000 bytes"
        ),
        RuntimeError("Storage size calculation overflowed with sizes=[4000000000, 4000000000]"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17 GiB, max allowed: 18 GiB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_model_that_does_not_fit_is_the_same_error(tmp_path, monkeypatch, error):
    """The allocators of CPU and GPU raise errors of their own."""

    def too_large(*_):
        raise error

    monkeypatch.setattr(Block, "__init__", too_large)
    with pytest.raises(MemoryError, match="lower block_size, n_loop, n_layer or n_embd"):
        train(DENSE, settings(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_a_micro_batch_that_does_not_fit_is_halved_and_the_run_is_the_same(tmp_path, monkeypatch, capsys):
    whole = train(DENSE, settings(tmp_path, name="whole", batch_size=8, dtype="float32"))
    run_loop = LoopedGPT.run_loop

    def small_device(model, h, *arguments):
        if torch.is_grad_enabled() and len(h) > 2:
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        return run_loop(model, h, *arguments)

    monkeypatch.setattr(LoopedGPT, "run_loop", small_device)
    halved = train(DENSE, settings(tmp_path, name="halved", batch_size=8, dtype="float32"))
    assert "batch_size 2, grad_accum 4 now" in capsys.readouterr().out
    stored = read_config(halved.run)["train"]
    assert (stored["batch_size"], stored["grad_accum"]) == (2, 4)
    for one, other in zip(halved.history, whole.history, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4) and one["tokens"] == other["tokens"]
    goes_on = TrainConfig(**stored | dict(name=halved.run.name, max_steps=2 * whole.step))
    assert train(DENSE, goes_on, resume=True).step == 2 * whole.step


def test_an_odd_micro_batch_is_not_halved():
    def never(batch_size: int):
        raise MemoryError(f"{batch_size} rows")

    with pytest.raises(MemoryError, match="3 rows"):
        fit_micro_batch(TrainConfig(batch_size=6), never, lambda line: None)


@pytest.mark.parametrize("segment, alive", [(None, 2), (1, 5)])
def test_a_rehearsal_takes_as_much_memory_as_a_step_of_many_micro_batches(tmp_path, monkeypatch, segment, alive):
    """One micro-batch alone takes less: it meets no gradients, and none waits for its next segment."""
    model_config, rehearsed = replace(DENSE, segment=segment), []

    def peak(batches):
        model = LoopedGPT(model_config)
        with LiveBytes() as live:
            rehearse(NextLoss(model), batches)
        return live.peak

    def spy(next_loss, batches, *_):
        rehearsed.append(batches)
        if len(batches[0][0]) > 2:
            raise MemoryError

    monkeypatch.setattr(trainer, "rehearse", spy)
    train(model_config, settings(tmp_path, batch_size=2, grad_accum=5, max_steps=1, dtype="float32"))
    (batches,) = rehearsed
    assert len(batches) == alive
    assert peak(batches[:1]) < peak(batches) == peak(batches[:1] * 5)

    rehearsed.clear()
    train(model_config, settings(tmp_path, batch_size=4, grad_accum=1, max_steps=1, dtype="float32"))
    assert [len(batches) for batches in rehearsed] == [1, 2], "halved, and twice as many"


def test_room_is_kept_for_what_the_first_update_makes(monkeypatch):
    empty = torch.empty

    def full(*size, **options):
        if size == (10**6,):
            raise torch.OutOfMemoryError("tried to allocate a megabyte")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError, match="batch_size"):
        rehearse(NextLoss(tiny_model(DENSE)), [tiny_batch(4)], reserve=10**6)
