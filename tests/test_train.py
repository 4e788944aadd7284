"""The trainer: schedule, accumulation, resuming bit for bit, stopping, and numbers or settings that fail."""

import json
import math
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from tiny_runs import (
    DENSE,
    ENDLESS,
    LOOM,
    TEXT,
    children,
    cut_back,
    fingerprint,
    newest_step,
    prepared,
    settings,
    sign,
    start_child,
    train_in_child,
)
from torch import nn

from minilooped import train as trainer
from minilooped.data import BatchStream, load_corpus
from minilooped.engine.checkpoint import checkpoints, load_checkpoint, load_model, read_config, shell_command
from minilooped.engine.log import read_log
from minilooped.engine.machine import attention_kernel, cpu_has_bfloat16, pick_device, pick_dtype
from minilooped.engine.resume import changes
from minilooped.engine.state import random_state
from minilooped.engine.stopping import StopSignal
from minilooped.model import Block, LoopedConfig, LoopedGPT
from minilooped.presets import PRESETS
from minilooped.tools.plan import LiveBytes
from minilooped.train import (
    DEFAULTS,
    NextLoss,
    TrainConfig,
    accumulate,
    evaluate,
    fit_micro_batch,
    learning_rate,
    loop_rms,
    loops_of_step,
    rehearse,
    sample,
    train,
    train_step,
)

BOTH = pytest.mark.parametrize("model_config", [DENSE, LOOM], ids=["dense", "loom"])


@pytest.fixture
def dropout(monkeypatch):
    """A model that draws random numbers in training, torch's and Python's, as one with dropout does."""
    embed = LoopedGPT.embed

    def dropped(model, *args):
        if model.training:
            random.random()
        return nn.functional.dropout(embed(model, *args), 0.2, training=model.training)

    monkeypatch.setattr(LoopedGPT, "embed", dropped)


def tiny_model(config: LoopedConfig, dtype=torch.float64) -> LoopedGPT:
    torch.manual_seed(0)
    return LoopedGPT(replace(config, vocab_size=11)).to(dtype)


def tiny_batch(rows: int, ignored: int = 0):
    """x and y, (rows, 8), with the first `ignored` targets of the flattened y left out."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randint(11, (2, rows, 8), generator=generator)
    y.view(-1)[:ignored] = -100
    return x, y


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


# -- a whole run -------------------------------------------------------------------------------------------------------


@BOTH
def test_a_run_leaves_its_files_and_says_how_to_go_on(tmp_path, capsys, model_config):
    config = settings(tmp_path, max_steps=6, eval_every=2, sample_every=3, save_every=2)
    result = train(model_config, config)
    printed = capsys.readouterr().out
    assert re.fullmatch(r"validation loss \d\.\d{3}", printed.splitlines()[-1])
    for line in (
        "device   cpu: ",
        "dtype    ",
        "threads  1",
        "step 2: validation loss about ",
        "in nats per character",
    ):
        assert line in printed
    assert f"{shell_command()} train --resume {result.run} --max-steps 12" in printed
    assert f"{shell_command()} sample {result.run} --prompt" in printed

    left = "best.safetensors config.json log.csv loss.png model.safetensors result.json step-4 step-6"
    assert sorted(path.name for path in result.run.iterdir() if path.name != ".lock") == left.split()
    assert json.loads((result.run / "result.json").read_text(encoding="utf-8"))["val_loss"] == result.val_loss
    assert result.run == tmp_path / "runs" / "tiny" and result.step == 6
    assert read_log(result.run / "log.csv") == result.history
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in result.history if row["val_loss"] is not None] == [2, 4]
    assert result.history[-1]["updates"] == 6 * (2 if model_config is LOOM else 1)
    assert result.history[-1]["tokens"] == 6 * 4 * 8
    stored = read_config(result.run)
    assert LoopedConfig(**stored["model"]) == replace(model_config, vocab_size=result.tokenizer.vocab_size)
    assert TrainConfig(**stored["train"]) == config

    model, tokenizer = load_model(result.run)
    assert tokenizer.hash == result.tokenizer.hash
    assert not model.training and not result.model.training
    x = torch.arange(8)[None]
    assert torch.equal(model(x)[0], result.model(x)[0])
    published = load_file(result.run / "model.safetensors")
    assert published.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, published[name]) for name, tensor in model.state_dict().items())


def test_the_default_run_learns(tmp_path):
    start, end = (train(DENSE, settings(tmp_path, max_steps=steps, lr=2e-2)).val_loss for steps in (1, 60))
    assert end < start - 0.5


def test_the_validation_loss_is_the_mean_over_every_token_of_the_split(tmp_path):
    result = train(DENSE, settings(tmp_path, max_steps=2))
    val = torch.from_numpy(load_corpus(tmp_path / "tokens").val.astype("int64"))
    total = count = 0
    with torch.no_grad():
        for start in range(0, len(val) - 1, 8):
            x, y = val[start : start + 8], val[start + 1 : start + 9]
            logits = result.model(x[None, : len(y)])[0][0]
            total -= logits.log_softmax(-1)[torch.arange(len(y)), y].sum().item()
            count += len(y)
    assert count == len(val) - 1
    assert result.val_loss == pytest.approx(total / count, abs=1e-5)


def test_evaluation_leaves_mode_and_random_numbers_alone(tmp_path, dropout):
    model = tiny_model(DENSE)
    before = torch.get_rng_state()
    losses = [evaluate(model, [tiny_batch(4, ignored=5)]) for _ in range(2)]
    assert losses[0] == losses[1], "no dropout"
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert evaluate(model, [tiny_batch(4)], n_loop=1) != evaluate(model, [tiny_batch(4)], n_loop=2)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_restores_the_mode_after_an_error_too(training):
    model = tiny_model(DENSE).train(training)
    x, y = tiny_batch(4)
    evaluate(model, [(x, y)]), loop_rms(model, x)
    assert model.training == model.blocks[0].training == training
    too_long = x.repeat(1, 2)
    for measure in (lambda: evaluate(model, [(x, y), (too_long, too_long)]), lambda: loop_rms(model, too_long)):
        with pytest.raises(ValueError, match="block_size"):
            measure()
        assert model.training == model.blocks[0].training == training


def test_a_sample_depends_on_its_seed_alone(tmp_path):
    result = train(DENSE, settings(tmp_path, max_steps=1))
    state = torch.get_rng_state()
    first, again = (sample(result.model, result.tokenizer, "1 times", max_new_tokens=20) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert first == again != sample(result.model, result.tokenizer, "1 times", max_new_tokens=20, seed=2)
    assert first.startswith("1 times") and len(first) == len("1 times") + 20
    with pytest.raises(ValueError, match="the prompt is empty"):
        sample(result.model, result.tokenizer, "")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_in_miniature(tmp_path, name):
    """All its choices but the sizes."""
    model, config = PRESETS[name]
    model = replace(model, n_layer=2, n_head=2, n_embd=16, block_size=8, n_inner=8)
    small = settings(tmp_path, max_steps=2, save_every=0)
    if config.tokenizer == "gpt2":
        prepared(tmp_path / "gpt2", TEXT, "gpt2")
        small = replace(small, data=str(tmp_path / "gpt2" / "tokens"))
    kept = dict(optimizer=config.optimizer, schedule=config.schedule, tokenizer=config.tokenizer)
    result = train(model, replace(small, **kept))
    assert math.isfinite(result.val_loss)
    assert result.model.config.vocab_size == (50257 if config.tokenizer == "gpt2" else result.tokenizer.vocab_size)


# -- the schedule ------------------------------------------------------------------------------------------------------


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
def test_case_C4_every_schedule_is_defined_and_positive(schedule, min_lr_ratio, max_steps, warmup_steps, decay_steps):
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


def test_case_C5_the_first_update_has_a_learning_rate():
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


# -- accumulation ------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("ignored", [0, 19])
def test_case_C9_four_micro_batches_of_two_equal_one_of_eight(model_config, ignored):
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


def test_case_C9_the_logged_loss_is_the_mean_of_the_step(tmp_path):
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
    for block in model.blocks:
        block.mlp.router.bias.zero_()  # where it was before the first pass
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


# -- resuming ----------------------------------------------------------------------------------------------------------

VARIANTS = {
    "dense, AdamW, 2 micro-batches": (DENSE, dict(grad_accum=2)),
    "dense, Muon, bfloat16": (DENSE, dict(optimizer="muon", dtype="bfloat16")),
    "LOOM, Muon, WSD": (LOOM, dict(optimizer="muon", schedule="wsd")),
    "LOOM, one update": (LOOM, dict(step_per_segment=False, dtype="float32")),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_case_C10_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, dropout, variant):
    model_config, changes = VARIANTS[variant]
    config = settings(tmp_path, eval_every=4, sample_every=5, **changes)
    straight = train(model_config, config)
    copy = cut_back(straight.run, 10, tmp_path / "runs" / "copy")
    assert fingerprint(copy) != fingerprint(straight.run)
    torch.manual_seed(99), random.seed(99)  # whatever was drawn meanwhile
    resumed = train(model_config, replace(config, name="copy"), resume=True)
    assert fingerprint(copy) == fingerprint(straight.run)
    assert resumed.val_loss == straight.val_loss
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.history] for r in (straight, resumed)]
    assert timeless[0] == timeless[1]
    assert read_log(copy / "log.csv") == resumed.history


@pytest.mark.parametrize("forgotten", ["random", "stream", "optimizer", "buffers"])
def test_case_C10_without_any_one_part_of_the_state_the_resumed_run_differs(tmp_path, monkeypatch, dropout, forgotten):
    """So the test above can see each of them."""
    straight = train(LOOM, settings(tmp_path))
    copy = cut_back(straight.run, 10, tmp_path / "runs" / "copy")
    if forgotten == "random":
        monkeypatch.setattr(trainer, "set_random_state", lambda state: None)
    elif forgotten == "stream":
        monkeypatch.setattr(BatchStream, "load_state_dict", lambda stream, state: None)
    elif forgotten == "optimizer":
        monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda optimizer, state: None)
    else:
        load = LoopedGPT.load_state_dict
        monkeypatch.setattr(
            LoopedGPT,
            "load_state_dict",
            lambda model, weights: load(
                model, {k: v for k, v in weights.items() if "router.bias" not in k}, strict=False
            ),
        )
    train(LOOM, settings(tmp_path, name="copy"), resume=True)
    assert fingerprint(copy) != fingerprint(straight.run)


def test_a_run_that_is_done_goes_on_only_to_a_larger_max_steps(tmp_path):
    config = settings(tmp_path, max_steps=4)
    run = train(DENSE, config).run
    with pytest.raises(ValueError, match="has done its 4 steps: give a larger max_steps"):
        train(DENSE, config, resume=True)
    result = train(DENSE, replace(config, max_steps=7), resume=True)
    assert result.step == 7 and result.run == run and [row["step"] for row in result.history] == [1, 2, 3, 4, 5, 6, 7]
    assert read_config(run)["train"]["max_steps"] == 7


@pytest.mark.parametrize(
    "part, name, value",
    [
        ("model", "n_loop", 3),
        ("model", "n_embd", 32),
        ("model", "rule", "sqrt"),
        ("train", "lr", 1.0),
        ("train", "seed", 2),
    ],
)
def test_changed_settings_are_refused_field_by_field(tmp_path, part, name, value):
    config = settings(tmp_path, max_steps=4)
    run = train(DENSE, config).run
    before = fingerprint(run)
    model_config, config = DENSE, replace(config, max_steps=8, beta1=0.5)
    if part == "model":
        model_config = replace(model_config, **{name: value})
    else:
        config = replace(config, **{name: value})
    with pytest.raises(ValueError) as refusal:
        train(model_config, config, resume=True)
    assert f"{name} was " in str(refusal.value) and f"now {value!r}" in str(refusal.value)
    assert "beta1 was 0.9 and is now 0.5" in str(refusal.value), "all of them are listed"
    assert "max_steps was" not in str(refusal.value), "this one may change"
    assert fingerprint(run) == before and read_config(run)["train"]["max_steps"] == 4


# Where a run lies and computes, what memory it takes, how long it goes on, how often it reports.
MAY_CHANGE = set(
    """
    name runs max_steps log_every eval_every eval_batches sample_every save_every device threads compile peak_tflops
    recompute_loops loss_chunk data
""".split()
)


@pytest.mark.parametrize(
    "part, name",
    [(part, field.name) for part, kind in (("model", LoopedConfig), ("train", TrainConfig)) for field in fields(kind)],
)
def test_every_setting_that_moves_a_number_is_compared(part, name):
    before, now = ({"model": asdict(DENSE), "train": asdict(TrainConfig())} for _ in range(2))
    assert changes(before, now, DEFAULTS) == ""
    another = 7 if name in ("batch_size", "grad_accum") else "another"
    now[part][name] = another
    line = f"{name} was {before[part][name]!r} and is now {another!r}"
    if another == 7:  # the division into micro-batches is free, the tokens of a step are not
        line = f"batch_size x grad_accum was 16 and is now {7 if name == 'batch_size' else 16 * 7}"
    assert changes(before, now, DEFAULTS) == ("" if name in MAY_CHANGE else line)


def test_the_same_tokens_of_a_step_may_be_divided_otherwise():
    before, now = ({"model": asdict(DENSE), "train": asdict(TrainConfig())} for _ in range(2))
    now["train"] |= {"batch_size": 4, "grad_accum": 4}
    assert changes(before, now, DEFAULTS) == ""


def test_the_descent_of_wsd_may_begin_elsewhere_and_that_of_a_cosine_has_no_such_setting():
    before, now = ({"model": asdict(DENSE), "train": asdict(TrainConfig(schedule="wsd"))} for _ in range(2))
    now["train"]["decay_steps"] = 5
    assert changes(before, now, DEFAULTS) == ""
    before["train"]["schedule"] = now["train"]["schedule"] = "cosine"
    assert changes(before, now, DEFAULTS) == "decay_steps was 100 and is now 5"


def test_a_config_that_was_edited_under_its_checkpoint_is_refused(tmp_path):
    """Another loop count fits the weights, and would go on with another model."""
    config = settings(tmp_path, max_steps=2)
    run = train(DENSE, config).run
    stored = read_config(run)
    stored["model"]["n_loop"] = 3
    (run / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"config.json is not that of step-2 \(n_loop was 2 and is now 3\): restore it"
    ):
        train(replace(DENSE, n_loop=3), replace(config, max_steps=3), resume=True)


def edit_state(run: Path, edit: Callable[[dict], None]):
    """Change the newest checkpoint's state as a stranger would, sums and all."""
    file = checkpoints(run)[-1] / "state.pt"
    state = torch.load(file, weights_only=True)
    edit(state)
    torch.save(state, file)
    sign(file.parent)


@pytest.mark.parametrize("value", [None, -math.inf, [], torch.zeros(3)], ids=["none", "inf", "list", "tensor"])
def test_a_state_of_other_types_is_refused_in_one_line(tmp_path, value):
    config = settings(tmp_path, max_steps=1)
    run = train(DENSE, config).run
    file = checkpoints(run)[-1] / "state.pt"
    before = torch.load(file, weights_only=True)
    odd = [{key: value} for key in before.keys() - {"seconds"}] + [{"machine": before["machine"] | {"threads": value}}]
    for part in odd:
        torch.save(before | part, file)
        sign(file.parent)
        with pytest.raises(ValueError, match="(not fit the config of its run|was trained on other tokens)") as refusal:
            train(DENSE, replace(config, max_steps=2), resume=True)
        assert "\n" not in str(refusal.value), part


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_optimizers_options_are_the_configs_and_not_the_states(tmp_path, optimizer):
    config = settings(tmp_path, optimizer=optimizer)
    straight = train(DENSE, config).run
    copy = cut_back(straight, 10, tmp_path / "runs" / "copy")

    def edit(state):
        for part in state["optimizer"].get("optimizers", [state["optimizer"]]):
            for group in part["param_groups"]:
                others = dict(weight_decay=9.0, lr_scale=7.0, betas=(0.1, 0.1), momentum=0.1)
                group |= {name: value for name, value in others.items() if name in group}

    edit_state(copy, edit)
    train(DENSE, replace(config, name="copy"), resume=True)
    assert fingerprint(copy) == fingerprint(straight)


@pytest.mark.skipif(os.name != "posix", reason="needs the locks of POSIX")
def test_two_trainings_of_one_run_are_refused(tmp_path):
    config = settings(tmp_path, **ENDLESS)
    run = tmp_path / "runs" / "tiny"
    child = start_child(config, False, 0, run)
    with pytest.raises(ValueError, match=f"another process trains {run}: wait for it, stop it, or start a new run"):
        train(LOOM, replace(config, max_steps=newest_step(run) + 99), resume=True)
    child.kill()
    child.join()
    config = replace(config, max_steps=newest_step(run) + 1)
    assert train(LOOM, config, resume=True).step == config.max_steps


def test_another_tokenizer_and_other_data_are_refused(tmp_path):
    config = settings(tmp_path, max_steps=2)
    train(DENSE, config)
    config = replace(config, max_steps=4)
    prepared(tmp_path, TEXT + "10 times 10 is 100.\n" * 20)  # the same characters
    with pytest.raises(ValueError, match="was trained on 2209 tokens"):
        train(DENSE, config, resume=True)
    prepared(tmp_path, TEXT.replace("2", "x").replace("3", "2").replace("x", "3"))  # and as many of them
    with pytest.raises(ValueError, match="was trained on other tokens than .* now has"):
        train(DENSE, config, resume=True)
    prepared(tmp_path, TEXT.replace("t", "T"))
    with pytest.raises(ValueError, match="trained with the tokenizer 'char'"):
        train(DENSE, config, resume=True)
    prepared(tmp_path, TEXT + "?")
    with pytest.raises(ValueError, match="vocab_size was"):
        train(DENSE, config, resume=True)


def test_another_length_is_announced_with_the_learning_rates(tmp_path, capsys):
    """After a finished descent the next step may be at the peak again."""
    config = settings(tmp_path, max_steps=6, schedule="wsd", warmup_steps=0, decay_steps=4, min_lr_ratio=0.0, lr=0.02)
    first = train(DENSE, config)
    assert "notice" not in capsys.readouterr().out
    longer = train(DENSE, replace(config, max_steps=12), resume=True)
    line = "notice   max_steps was 6, now 12: the next step has learning rate 0.02, the last one had 0.005\n"
    assert line in capsys.readouterr().out
    assert (first.history[-1]["lr"], longer.history[6]["lr"]) == (0.005, 0.02)


def test_many_passes_over_a_text_are_announced(tmp_path, capsys):
    tokens = len(load_corpus(settings(tmp_path).data).train)
    for passes in (9, 11):
        train(DENSE, settings(tmp_path, max_steps=1, batch_size=passes * tokens // DENSE.block_size + 1))
        assert (f"notice   {passes} times over the training data" in capsys.readouterr().out) == (passes > 10)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass_a_few_times_over_the_embedded_text_or_need_a_longer_one(name):
    model, config = PRESETS[name]
    tokens = config.max_steps * config.batch_size * config.grad_accum * model.block_size
    passes = tokens / len(load_corpus("shakespeare", config.tokenizer).train)
    assert passes < 5 if name.startswith("shakespeare") else passes > 100


def test_another_machine_is_announced(tmp_path, capsys):
    config = settings(tmp_path, max_steps=2, dtype="float32")
    run = train(DENSE, config).run
    edit_state(run, lambda state: state["machine"].update(threads=7))
    capsys.readouterr()
    train(DENSE, replace(config, max_steps=3), resume=True)
    printed = capsys.readouterr().out
    assert "notice   threads was 7, now 1: not the bits of an uninterrupted run" in printed
    assert printed.count("not the bits") == 1


def test_a_log_row_that_a_kill_cut_short_is_left_out(tmp_path):
    config = settings(tmp_path, max_steps=4)
    run = train(DENSE, config).run
    with open(run / "log.csv", "a", encoding="utf-8") as file:
        file.write("5,1.2")
    result = train(DENSE, replace(config, max_steps=6), resume=True)
    assert (
        [row["step"] for row in read_log(run / "log.csv")] == [1, 2, 3, 4, 5, 6] == [r["step"] for r in result.history]
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("edit", ["shape", "name", "missing"])
def test_a_state_that_does_not_fit_is_refused_before_a_step(tmp_path, optimizer, edit):
    """torch takes it; its fused kernels then write past the end of a moment that is too small."""
    config = settings(tmp_path, max_steps=2, optimizer=optimizer)
    run = train(DENSE, config).run

    def misfit(state):
        part = state["optimizer"].get("optimizers", [state["optimizer"]])[0]
        moments = part["state"][0]
        name = sorted(moments)[0]
        if edit == "shape":
            moments[name] = torch.zeros(3)
        elif edit == "name":
            moments["other"] = moments.pop(name)
        else:
            del part["param_groups"]

    edit_state(run, misfit)
    with pytest.raises(
        ValueError, match=r"step-2 does not fit the config of its run \(.*\): restore it, or train again"
    ):
        train(DENSE, replace(config, max_steps=3), resume=True)


def test_weights_of_another_model_are_refused(tmp_path):
    config = settings(tmp_path, max_steps=2)
    run = train(DENSE, config).run
    other = train(replace(DENSE, n_embd=32), replace(config, name="other")).run
    shutil.copytree(other / "step-2", run / "step-2", dirs_exist_ok=True)
    shutil.copy(other / "model.safetensors", run)
    with pytest.raises(ValueError, match="does not fit the config of its run .*wte.weight|RuntimeError"):
        load_model(run)
    with pytest.raises(ValueError, match=r"is not that of step-2 \(n_embd was 32 and is now 16\): restore it"):
        train(DENSE, replace(config, max_steps=3), resume=True)
    edit_state(run, lambda state: state.pop("settings"))  # as in older versions
    with pytest.raises(ValueError, match="does not fit the config of its run .*wte.weight|RuntimeError"):
        train(DENSE, replace(config, max_steps=3), resume=True)


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "step,loss\n1,2\n", "\0", "9" * 200_000])
def test_a_log_that_is_none_is_named_and_left_alone(tmp_path, content):
    config = settings(tmp_path, max_steps=2)
    log = train(DENSE, config).run / "log.csv"
    text = log.read_text(encoding="utf-8")
    if content:
        log.write_text(text.partition("\n")[0] * (content == "\0") + content + "\n" + text, encoding="utf-8")
    else:
        log.write_text(text.replace("\n1,", "\nx,"), encoding="utf-8")
    before = log.read_bytes()
    with pytest.raises(ValueError, match="log.csv is not the log of a run .*: restore it, or move it away"):
        train(DENSE, replace(config, max_steps=3), resume=True)
    assert log.read_bytes() == before


def test_a_log_is_written_anew_whole_or_not_at_all(tmp_path, monkeypatch):
    """Resuming writes it anew: what breaks off then must not cost the rows that were there."""
    config = settings(tmp_path, max_steps=3)
    log = train(DENSE, config).run / "log.csv"
    before = log.read_bytes()
    write = Path.write_bytes

    def full(path, content):
        if path.name.startswith("log"):
            raise OSError(28, "disk full")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"log.csv could not be written \(disk full\)"):
        train(DENSE, replace(config, max_steps=4), resume=True)
    assert log.read_bytes() == before


def test_a_plot_that_cannot_be_drawn_is_a_notice_and_the_run_is_whole(tmp_path, monkeypatch, capsys):
    def half_way(figure, path, **options):
        path.write_bytes(b"half")
        raise OSError(28, "disk full")

    monkeypatch.setattr(Figure, "savefig", half_way)
    result = train(DENSE, settings(tmp_path, max_steps=2))
    assert "notice   the picture of the losses failed and is left out" in capsys.readouterr().out
    assert not list(result.run.glob("loss*")) and load_model(result.run) and math.isfinite(result.val_loss)


# -- kills and signals -------------------------------------------------------------------------------------------------


def test_ten_kills_at_random_moments_and_the_run_ends_as_if_there_had_been_none(tmp_path):
    config, run, draw = settings(tmp_path, **ENDLESS), tmp_path / "runs" / "tiny", random.Random(1)
    for kill in range(10):
        child = start_child(config, kill > 0, newest_step(run), run)
        time.sleep(draw.uniform(0, 0.05))
        child.kill()
        child.join()
    config = replace(config, max_steps=newest_step(run) + 3)
    assert config.max_steps >= 13
    train(LOOM, config, resume=True)
    straight = train(LOOM, replace(config, name="straight", save_every=0))
    assert fingerprint(run) == fingerprint(straight.run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_from_outside_saves_at_the_end_of_the_step(tmp_path, number):
    config, run = settings(tmp_path, **ENDLESS | dict(save_every=0)), tmp_path / "runs" / "tiny"
    child = children.Process(target=train_in_child, args=(LOOM, config, False), daemon=True)  # it may not stop
    child.start()
    deadline = time.monotonic() + 60
    while not (run / "log.csv").exists() or len(read_log(run / "log.csv")) < 3:
        assert child.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(child.pid, number)
    child.join(60)
    assert child.exitcode == 0 and newest_step(run) >= 3
    config = replace(config, max_steps=newest_step(run) + 3)
    train(LOOM, config, resume=True)
    straight = train(LOOM, replace(config, name="straight"))
    assert fingerprint(run) == fingerprint(straight.run)


def signal_at(step, number, monkeypatch, times=1):
    """Let the signal arrive in the middle of a step."""
    rate = trainer.learning_rate

    def interrupted(now, config):
        if now == step:
            for _ in range(times):
                signal.raise_signal(number)
        return rate(now, config)

    monkeypatch.setattr(trainer, "learning_rate", interrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_notebook_kernel_ends_the_call_and_not_the_kernel(tmp_path, capsys, monkeypatch, number):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    config = settings(tmp_path, save_every=0)
    with monkeypatch.context() as patch:
        signal_at(6, number, patch)
        result = train(DENSE, config)
    assert result.step == 7 and result.val_loss is None and newest_step(result.run) == 7
    printed = capsys.readouterr().out
    assert f"Stopped after step 7 of 12; saved {result.run / 'step-7'}. To go on:" in printed
    assert f"{shell_command()} train --resume {result.run}\n" in printed
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    train(DENSE, config, resume=True)
    straight = train(DENSE, replace(config, name="straight"))
    assert fingerprint(result.run) == fingerprint(straight.run)


def test_a_second_ctrl_c_stops_at_once(tmp_path, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    signal_at(6, signal.SIGINT, monkeypatch, times=2)
    with pytest.raises(KeyboardInterrupt):
        train(DENSE, settings(tmp_path))
    assert newest_step(tmp_path / "runs" / "tiny") == 5, "the regular checkpoint stands"
    assert signal.getsignal(signal.SIGINT) is handler
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # not impatience: torchrun may repeat it
    assert stop.asked


def test_outside_the_main_thread_signals_are_left_alone(tmp_path):
    handler, results = signal.getsignal(signal.SIGINT), []

    def work():
        results.append(train(DENSE, settings(tmp_path, max_steps=2)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results[0].step == 2 and signal.getsignal(signal.SIGINT) is handler


# -- numbers that fail, memory that does not suffice -------------------------------------------------------------------


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


# -- speed -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, T, kernel",
    [
        (torch.float32, 8, "flash_attention_for_cpu kernel in float32"),
        (torch.bfloat16, 8, "plain matrix products"),
        (torch.bfloat16, 600, "flash_attention_for_cpu kernel in bfloat16"),
    ],
)
def test_the_attention_that_ran_is_named(dtype, T, kernel):
    model = tiny_model(replace(DENSE, block_size=T), torch.float32)
    autocast = partial(torch.autocast, "cpu", dtype=dtype, enabled=dtype != torch.float32)
    assert attention_kernel(model, torch.zeros(1, T, dtype=torch.int64), autocast) == kernel


def test_tokens_per_second_and_the_share_of_the_peak_are_said(tmp_path, capsys):
    result = train(DENSE, settings(tmp_path, peak_tflops=0.001))
    said = capsys.readouterr().out
    speed, share = re.search(r"speed    ([\d,]+) tokens/s, MFU ([\d.]+)% of 1 x 0.001 TFLOP/s", said).groups()
    expected = int(speed.replace(",", "")) * result.model.flops_per_token() / 1e9
    assert float(share) == pytest.approx(100 * expected, abs=0.06)
    assert "kernel   attention: " in said and "MFLOP per token" in said
    train(DENSE, settings(tmp_path, name="unknown"))
    assert "MFU" not in capsys.readouterr().out  # no peak is known for a CPU


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        dict(max_steps=0),
        dict(batch_size=0),
        dict(grad_accum=0),
        dict(log_every=0),
        dict(lr=0.0),
        dict(lr=math.inf),
        dict(warmup_steps=-1),
        dict(decay_steps=-1),
        dict(min_lr_ratio=1.5),
        dict(beta1=1.0),
        dict(beta2=-0.1),
        dict(grad_clip=-1.0),
        dict(weight_decay=-1.0),
        dict(threads=0),
        dict(threads=10**12),
        dict(seed=10**30),
        dict(seed=-1),
        dict(eval_batches=0),
        dict(save_every=-1),
        dict(max_steps=2.5),
        dict(max_steps=True),
        dict(threads="2"),
        dict(seed=None),
        dict(lr="x"),
        dict(beta1=None),
        dict(compile=1),
        dict(step_per_segment="yes"),
        dict(schedule="linear"),
        dict(optimizer="sgd"),
        dict(dtype="float16"),
        dict(device=None),
        dict(name=None),
        dict(tokenizer=3),
        dict(data=Path("tokens")),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} must be")):
        TrainConfig(**changes)


def test_a_whole_number_serves_where_a_fraction_may_stand():
    assert TrainConfig(lr=1, grad_clip=0, threads=None, tokenizer="gpt2", step_per_segment=False).lr == 1


def test_a_validation_split_shorter_than_a_window_is_named_with_the_ways_out(tmp_path):
    prepared(tmp_path, TEXT[:80])  # 8 tokens to validate on, which fill no window of 8 + 1
    with pytest.raises(ValueError) as refusal:
        train(DENSE, settings(tmp_path, eval_every=2))
    assert "block_size + 1 = 9 tokens, but the validation split of tokens has 8" in str(refusal.value)
    assert all(way_out in str(refusal.value) for way_out in ("larger --val-fraction", "block_size", "eval_every=0"))
    assert not (tmp_path / "runs").exists()
    assert train(DENSE, settings(tmp_path, max_steps=2)).val_loss > 0, "eval_every=0 is one"
    prepared(tmp_path / "longer", TEXT[:90])
    assert train(DENSE, settings(tmp_path / "longer", max_steps=2, eval_every=2)).val_loss > 0


def test_settings_survive_json():
    for model, config in PRESETS.values():
        again = json.loads(json.dumps([asdict(model), asdict(config)]))
        assert (LoopedConfig(**again[0]), TrainConfig(**again[1])) == (model, config)


def test_the_device_is_chosen_with_a_reason(monkeypatch):
    def see(cuda=False, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    see()
    assert pick_device() == (torch.device("cpu"), "torch sees no GPU")
    with pytest.raises(ValueError, match="device='cuda' was asked for, but torch sees none here"):
        pick_device("cuda")
    see(mps=True)
    assert pick_device()[0].type == "mps" and "numbers differ" in pick_device()[1]
    see(cuda=True, mps=True)
    assert pick_device()[0].type == "cuda" and "H200" in pick_device()[1]
    assert pick_device("cpu") == (torch.device("cpu"), "asked for")


@pytest.mark.parametrize(
    "device, bf16_hardware, dtype",
    [
        ("cuda", True, torch.bfloat16),
        ("cuda", False, torch.float32),
        ("cpu", True, torch.bfloat16),
        ("cpu", False, torch.float32),
        ("mps", True, torch.float32),
    ],
)
def test_case_C11_bfloat16_only_where_the_hardware_computes_in_it(monkeypatch, device, bf16_hardware, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16_hardware)
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: dict(avx512_bf16=bf16_hardware, avx2=True), raising=False
    )
    chosen, reason = pick_dtype(torch.device(device))
    assert chosen == dtype and reason
    assert pick_dtype(torch.device(device), "float32") == (torch.float32, "asked for")


def test_a_torch_without_get_capabilities_is_asked_in_its_own_way(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    for found in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda found=found: found, raising=False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
        assert cpu_has_bfloat16() is found


def test_the_thread_count_is_set_for_the_run_and_put_back(tmp_path, monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    train(DENSE, settings(tmp_path, max_steps=1, threads=3))
    assert set_to == [3, torch.get_num_threads()]


# -- compile -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch):
    """Compile without generating machine code; counts the graphs."""
    torch._dynamo.reset()
    graphs = Counter()

    def backend(graph, _):
        graphs["n"] += 1
        return graph.forward

    monkeypatch.setattr(Block, "compile", lambda block: nn.Module.compile(block, backend=backend))
    yield graphs
    torch._dynamo.reset()


def test_case_C1_a_compiled_run_has_the_same_keys_and_goes_on_without_compiling_and_back(tmp_path, graphs):
    config = settings(tmp_path, max_steps=2, dtype="float32")
    run = train(DENSE, replace(config, compile=True)).run
    assert graphs["n"] > 0
    _, _, weights, _ = load_checkpoint(run)
    assert weights.keys() == LoopedGPT(replace(DENSE, vocab_size=21)).state_dict().keys()
    load_model(run)
    train(DENSE, replace(config, max_steps=4), resume=True)
    compiled = train(DENSE, replace(config, max_steps=6, compile=True), resume=True)
    eager = train(DENSE, replace(config, max_steps=6, name="eager"))
    assert compiled.step == 6 and compiled.val_loss == pytest.approx(eager.val_loss, abs=0.2)


@pytest.mark.parametrize("n_loop", [1, 8, 64])
def test_case_D1_one_graph_serves_all_loops_and_layers(tmp_path, graphs, n_loop):
    config = settings(tmp_path, max_steps=2, eval_every=1, eval_batches=1, dtype="float32", compile=True)
    train(replace(DENSE, n_loop=n_loop), config)
    assert graphs["n"] == 1


def test_a_halved_micro_batch_is_compiled_for_its_own_size(tmp_path, monkeypatch, graphs):
    """Left to itself torch compiles the second size as any size, and does not compile the third."""
    run_loop = LoopedGPT.run_loop

    def small_device(model, h, *arguments):
        out = run_loop(model, h, *arguments)
        if torch.is_grad_enabled() and len(h) > 2:
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        return out

    monkeypatch.setattr(LoopedGPT, "run_loop", small_device)
    train(DENSE, settings(tmp_path, batch_size=8, max_steps=1, dtype="float32", compile=True))
    assert graphs["n"] == 3, "for 8 rows, 4 and 2"


@pytest.mark.parametrize("n_loop", [1, 5])
def test_case_D3_compiled_and_eager_training_agree(tmp_path, graphs, n_loop):
    config = settings(tmp_path, max_steps=20, dtype="float32", eval_every=7, sample_every=9)
    model_config = replace(DENSE, n_loop=n_loop)
    compiled = train(model_config, replace(config, compile=True))
    assert graphs["n"] > 0
    eager = train(model_config, config)
    for a, b in zip(compiled.history, eager.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_where_compiling_fails_one_line_says_so_and_training_goes_on(tmp_path, capsys, monkeypatch):
    def no_compiler(graph, _):
        raise RuntimeError("no C++ compiler found")

    torch._dynamo.reset()
    monkeypatch.setattr(Block, "compile", lambda block: nn.Module.compile(block, backend=no_compiler))
    config = settings(tmp_path, max_steps=3)
    result = train(DENSE, replace(config, compile=True))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compile")]
    assert len(lines) == 1 and "failed, going on without it" in lines[0] and "no C++ compiler found" in lines[0]
    assert result.history[-1]["loss"] == train(DENSE, config).history[-1]["loss"]
    torch._dynamo.reset()


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 11: loop counts that are drawn

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
