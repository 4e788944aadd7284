"""Settings of the trainer, and what it chooses by itself."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tiny_runs import DENSE, TEXT, prepared, settings

from minilooped.engine.machine import cpu_has_bfloat16, pick_device, pick_dtype
from minilooped.model import LoopedConfig
from minilooped.presets import PRESETS
from minilooped.train import TrainConfig, train


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
def test_bfloat16_only_where_the_hardware_computes_in_it(monkeypatch, device, bf16_hardware, dtype):
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
