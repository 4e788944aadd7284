"""The loop of the trainer: schedule, accumulation, updates, and loop counts that are drawn."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny_runs import DENSE, LOOM, cut_back, fingerprint, settings
from tiny_training import BOTH, gradients, tiny_batch, tiny_model

from minilooped.model import LoopedGPT
from minilooped.train import NextLoss, TrainConfig, accumulate, learning_rate, loops_of_step, train, train_step


def rates(**changes) -> list[float]:
    config = TrainConfig(**(dict(lr=1.0) | changes))
    return [learning_rate(step, config) for step in range(config.max_steps)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    "max_steps, warmup_steps, decay_steps",
    [
        (10, 10, 10),
        (1, 0, 0),
        (1, 1, 1),
        (1, 100, 100),
        (10, 0, 0),
        (10, 0, 10),
        (10, 20, 5),
        (10, 5, 0),
        (10, 9, 1),
        (1000, 100, 300),
    ],
)
def test_every_schedule_is_defined_and_positive(schedule, min_lr_ratio, max_steps, warmup_steps, decay_steps):
    lrs = rates(
        schedule=schedule,
        min_lr_ratio=min_lr_ratio,
        max_steps=max_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
    )
    assert all(0 < lr <= 1 for lr in lrs)
    peak = lrs.index(max(lrs))
    assert lrs[: peak + 1] == sorted(lrs[: peak + 1]) and lrs[peak:] == sorted(lrs[peak:], reverse=True)


def test_the_first_update_has_a_learning_rate():
    assert rates(max_steps=10, warmup_steps=4, schedule="wsd", decay_steps=0)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(max_steps=10, warmup_steps=0)[0] == 1.0


def test_the_descents_have_their_published_shapes():
    cosine = rates(max_steps=110, warmup_steps=10, min_lr_ratio=0.1)
    assert cosine[10] == 1.0 and cosine[60] == pytest.approx(0.55) and cosine[109] == pytest.approx(0.1, abs=1e-3)
    wsd = rates(max_steps=100, warmup_steps=10, schedule="wsd", decay_steps=20, min_lr_ratio=0.0)
    assert wsd[9:81] == [1.0] * 72 and wsd[90] == pytest.approx(0.5) and wsd[99] == pytest.approx(0.05)


def test_the_schedule_reaches_the_optimizer_with_each_groups_factor(tmp_path, monkeypatch):
    seen = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: (seen.append([g["lr"] for g in self.param_groups]), step(self))[1]
    )
    result = train(DENSE, settings(tmp_path, max_steps=3, warmup_steps=2, lr=1e-2))
    factors = {1.0, DENSE.row.lr_factor}
    assert len(factors) == 2
    for lrs, row in zip(seen, result.history, strict=True):
        assert set(lrs) == {row["lr"] * factor for factor in factors}
    assert [row["lr"] for row in result.history[:2]] == [5e-3, 1e-2]


def test_whole_numbers_serve_as_betas(tmp_path):
    """torch wants both to be floats."""
    assert train(DENSE, settings(tmp_path, max_steps=1, beta1=0, beta2=0.5)).step == 1


@BOTH
@pytest.mark.parametrize("ignored", [0, 19])
def test_four_micro_batches_of_two_equal_one_of_eight(model_config, ignored):
    """Loss and gradient, with micro-batches that hold 0 to 16 targets."""
    model_config = replace(model_config, z_coef=0.0, balance="none")  # auxiliary losses are means over all tokens
    results = []
    for rows in (8, 2):
        model = tiny_model(model_config)
        x, y = tiny_batch(8, ignored)
        if ignored and rows == 2:
            assert (y[:2] == -100).all() and (y[2:4] == -100).any(), "one micro-batch without, one with a few targets"
        batches = list(zip(x.split(rows), y.split(rows), strict=True))
        if ignored:
            batches = [(x, y) for x, y in batches if (y != -100).any()]
        losses = [loss.item() for loss in accumulate(NextLoss(model), batches)]
        results.append((losses, gradients(model)))
    (losses, grads), (losses_2, grads_2) = results
    assert losses == pytest.approx(losses_2, abs=1e-6) and len(losses) == (2 if model_config.segment else 1)
    assert grads.keys() == grads_2.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, grads_2[name], atol=1e-6, rtol=1e-6)


def test_the_logged_loss_is_the_mean_of_the_step(tmp_path):
    """The whole trainer, 4 x 2 against 1 x 8: the stream draws the same windows."""
    logs = [
        train(DENSE, settings(tmp_path, batch_size=b, grad_accum=a, dtype="float32")).history
        for b, a in ((8, 1), (2, 4))
    ]
    for one, four in zip(*logs, strict=True):
        for column in ("loss", "grad_norm", "tokens", "updates"):
            assert one[column] == pytest.approx(four[column], rel=1e-4)


def test_without_accumulation_the_gradient_is_that_of_plain_backward():
    model, batch = tiny_model(DENSE), tiny_batch(4)
    model(*batch)[1].backward()
    plain = gradients(model)
    model.zero_grad()
    list(accumulate(NextLoss(model), [batch]))
    assert all(torch.equal(grad, plain[name]) for name, grad in gradients(model).items())


def test_one_update_for_all_segments_takes_the_mean_of_their_gradients():
    model, batch = tiny_model(LOOM), tiny_batch(4)
    for loss in model.segment_losses(*batch):
        loss.backward()
    summed = gradients(model)
    model.zero_grad()
    seen = {}

    class Probe:
        def step(self):
            seen.update(gradients(model))

        def zero_grad(self):
            model.zero_grad()

    _, _, updates = train_step(NextLoss(model), Probe(), [batch], step_per_segment=False)
    assert updates == 1
    for name, grad in summed.items():
        torch.testing.assert_close(seen[name], grad / 2, atol=1e-12, rtol=1e-9)


def test_an_update_per_segment_is_seen_by_the_next_segment():
    model, batches = tiny_model(LOOM), [tiny_batch(4)]
    x, y = batches[0]
    reference = tiny_model(LOOM)
    optimizer, of_reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    for loss in reference.segment_losses(x, y):
        of_reference.zero_grad()
        loss.backward()
        of_reference.step()
    loss_2, _, updates = train_step(NextLoss(model), optimizer, batches, step_per_segment=True)
    assert updates == 2 and loss_2 == loss.item()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("asked, updates", [(None, 2), (True, 2), (False, 1)])
def test_step_per_segment_follows_the_model_unless_told(tmp_path, asked, updates):
    result = train(LOOM, settings(tmp_path, max_steps=1, step_per_segment=asked))
    assert result.history[-1]["updates"] == updates


def test_clipping_bounds_the_norm_and_the_log_has_the_norm_before(tmp_path):
    model, batch = tiny_model(DENSE), tiny_batch(4)
    list(accumulate(NextLoss(model), [batch]))
    true_norm = math.sqrt(sum(grad.square().sum().item() for grad in gradients(model).values()))
    model.zero_grad()
    for clip in (0.0, 0.01):
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        _, norm, _ = train_step(NextLoss(model), optimizer, [batch], grad_clip=clip)
        moved = math.sqrt(sum((p - q).square().sum().item() for p, q in zip(model.parameters(), start, strict=True)))
        assert norm == pytest.approx(true_norm) and moved == pytest.approx(clip or true_norm, rel=1e-4)
        with torch.no_grad():
            for parameter, before in zip(model.parameters(), start, strict=True):
                parameter.copy_(before)


DRAWN = dict(n_loop_sampling="uniform")


def test_drawn_loop_counts_are_even_and_follow_from_seed_and_step():
    config = TrainConfig(**DRAWN)
    counts = [loops_of_step(step, 4, config) for step in range(4000)]
    assert counts == [loops_of_step(step, 4, config) for step in range(4000)]
    assert all(abs(Counter(counts)[n] - 1000) < 100 for n in (1, 2, 3, 4)) and set(counts) == {1, 2, 3, 4}
    assert counts != [loops_of_step(step, 4, replace(config, seed=1)) for step in range(4000)]
    assert {loops_of_step(step, 4, TrainConfig()) for step in range(50)} == {4}
    assert {loops_of_step(step, 1, config) for step in range(50)} == {1}


@BOTH
@pytest.mark.parametrize("step_per_segment", [True, False])
def test_a_step_with_another_loop_count_is_that_of_a_pass_with_so_many_loops(model_config, step_per_segment):
    """Fewer loops than the model's, and with LOOM's segments of 2 fewer segments and updates too."""
    n_loop = 1 if model_config is LOOM else 2
    model, reference, batch = tiny_model(model_config), tiny_model(model_config), tiny_batch(4)
    optimizer, of_reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    found = train_step(NextLoss(model), optimizer, [batch], step_per_segment=step_per_segment, n_loop=n_loop)
    loss = reference(*batch, n_loop=n_loop)[1]
    loss.backward()
    of_reference.step()
    assert found[0] == loss.item() and found[2] == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@BOTH
def test_a_run_with_drawn_loops_uses_one_count_for_all_micro_batches_of_a_step(tmp_path, monkeypatch, model_config):
    asked, segment_losses = [], LoopedGPT.segment_losses

    def spy(model, x, y, *, n_loop=None):
        asked.append(n_loop)
        return segment_losses(model, x, y, n_loop=n_loop)

    monkeypatch.setattr(LoopedGPT, "segment_losses", spy)
    config = settings(tmp_path, batch_size=2, grad_accum=2, max_steps=12, dtype="float32", **DRAWN)
    result = train(model_config, config)
    expected = [loops_of_step(step, model_config.n_loop, config) for step in range(12)]
    assert asked == [None, None] + [n_loop for n_loop in expected for _ in range(2)]  # rehearsed is the full count
    assert len(set(expected)) == model_config.n_loop
    updates = [len(model_config.segments(n_loop)) for n_loop in expected]
    assert result.history[-1]["updates"] == sum(updates)


@BOTH
def test_a_run_with_drawn_loops_goes_on_bit_for_bit(tmp_path, model_config):
    config = settings(tmp_path, name="whole", **DRAWN)
    whole = train(model_config, config).run
    cut_back(whole, 10, tmp_path / "runs" / "cut")
    train(model_config, replace(config, name="cut"), resume=True)
    assert fingerprint(tmp_path / "runs" / "cut") == fingerprint(whole)
    cut_back(whole, 10, tmp_path / "runs" / "other")
    with pytest.raises(ValueError, match="n_loop_sampling was 'uniform' and is now 'fixed'"):
        train(model_config, replace(config, name="other", n_loop_sampling="fixed"), resume=True)


def test_a_run_from_before_there_was_a_choice_goes_on_as_it_was(tmp_path):
    config = settings(tmp_path, name="old")
    run = train(DENSE, config).run
    cut_back(run, 10, tmp_path / "runs" / "cut")
    stored = json.loads((tmp_path / "runs" / "cut" / "config.json").read_text(encoding="utf-8"))
    del stored["train"]["n_loop_sampling"]
    (tmp_path / "runs" / "cut" / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ValueError, match="n_loop_sampling was 'fixed' and is now 'uniform'"):
        train(DENSE, replace(config, name="cut", **DRAWN), resume=True)
    train(DENSE, replace(config, name="cut"), resume=True)
    assert fingerprint(tmp_path / "runs" / "cut") == fingerprint(run)


def test_the_start_says_that_loops_are_drawn(tmp_path, capsys):
    train(LOOM, settings(tmp_path, max_steps=1, **DRAWN))
    said = capsys.readouterr().out
    assert f"blocks x 1 to {LOOM.n_loop} loops" in said and "up to 2 updates each" in said
