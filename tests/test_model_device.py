"""The model on another device than the CPU, without one: fake tensors have a device and a type, and no data.

The device is torch's "meta", which stands for any GPU. An operation that mixes devices raises, as it would on a card:
so a tensor that is made without saying where is seen, and one that `model.to(device)` leaves behind.
"""

from contextlib import nullcontext

import pytest
import torch
from helpers import LOOM_PARTS, tiny
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from minilooped.engine.state import load_optimizer
from minilooped.model import Experts, LoopedGPT
from minilooped.tools.plan import any_expert_linear

SHORT = dict(block_size=5, n_loop=2)
FAMILIES = {
    "dense": tiny(**SHORT, qk_norm=True, rule="layernorm_scaling", recompute_loops=True),
    "gpt2": tiny(**SHORT, pos="learned", norm="layer", bias=True, mlp="gelu", rule="rezero"),
    "loom": tiny(**SHORT, rule="loom", segment=1, loss_chunk=4, gate="sigmoid", **LOOM_PARTS),
    "switch": tiny(**SHORT, rule="deeploop", balance="switch", recompute_loops=True, **LOOM_PARTS),
}


@pytest.fixture(params=FAMILIES)
def model(request, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no such device
    monkeypatch.setattr(Experts, "product", staticmethod(any_expert_linear))  # the sizes of the groups are data
    model = LoopedGPT(FAMILIES[request.param]).to("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):  # the parameters, moved before, as fake tensors refuse to be
        yield model


@pytest.fixture
def batch(model):
    shape = (2, model.config.block_size)
    return tuple(torch.zeros(shape, dtype=torch.int64, device="meta") for _ in "xy")


@pytest.mark.slow
def test_a_training_step_stays_on_the_device(model, batch):
    for loss in model.segment_losses(*batch):
        loss.backward()
        assert loss.device.type == "meta"
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer = model.configure_optimizer(1e-3, 0.1, optimizer="muon")
    optimizer.step()
    model(*batch)[1].backward()
    assert all(parameter.grad.device.type == "meta" for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.slow
def test_reading_and_writing_stay_on_the_device(model, batch):
    x, y = batch
    logits, loss, states = model.eval()(x, y, return_states=True, n_loop=model.config.n_loop + 1)
    assert {tensor.device.type for tensor in (logits, loss, *states)} == {"meta"}
    for use_cache in (True, False):  # past the window, where the cache is given up
        out = model.generate(x[:, :3], model.config.block_size, top_k=5, use_cache=use_cache)
        assert out.device.type == "meta" and out.shape == (2, 3 + model.config.block_size)


@pytest.mark.parametrize("fused", [True, False])
def test_a_run_that_moves_has_its_step_counts_where_the_new_optimizer_wants_them(fused):
    """A fused optimizer, as on CUDA, has them on the device, another on the CPU; torch asks the one that was saved."""
    with FakeTensorMode():
        weight = nn.Parameter(torch.zeros(3, device="meta"))
        optimizer = torch.optim.AdamW([weight])
        state = optimizer.state_dict()
        state["param_groups"][0]["fused"] = not fused
        state["state"] = {0: dict(step=torch.tensor(7.0), exp_avg=torch.zeros(3), exp_avg_sq=torch.zeros(3))}
        optimizer.defaults["fused"] = fused
        load_optimizer(optimizer, state)
        (moments,) = optimizer.state.values()
        assert moments["step"].device.type == ("meta" if fused else "cpu")
        assert moments["exp_avg"].device.type == "meta"
