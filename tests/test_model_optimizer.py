"""The optimizer groups: complete, disjoint, with the rule's factors where they belong."""

import copy
from collections import Counter

import pytest
import torch
from helpers import LOOM_PARTS, MOE, RULE_NAMES, build, example, gradients, published_row, tiny

MODES = {"dense": {}, "gpt2": dict(norm="layer", pos="learned", bias=True, mlp="gelu", tie_embeddings=False)}
MODES |= {"loom": dict(LOOM_PARTS, tie_embeddings=False)}
OPTIMIZERS = ["adamw", "muon"]


def grouped(model, optimizer) -> dict[str, dict]:
    """The group of every parameter, by the parameter's name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


def one_step(model, optimizer) -> dict[str, torch.Tensor]:
    """Gradients of one batch, after which the optimizer has stepped."""
    optimizer.zero_grad()
    model(*example(model.config))[1].backward()
    found = gradients(model)
    optimizer.step()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_every_parameter_is_in_exactly_one_group_with_the_rules_factor(rule, mode, optimizer):
    """lr * lr_factor inside the blocks, lr outside; epsilon likewise; no decay below two dimensions."""
    model = build(tiny(rule=rule, l_ref=0.5, **MODES[mode]))
    groups = model.configure_optimizer(lr=0.01, weight_decay=0.3, eps=1e-6, optimizer=optimizer).param_groups
    members = Counter(id(p) for group in groups for p in group["params"])
    assert members == Counter(id(p) for p in model.parameters())
    row = published_row(model.config)
    found = grouped(model, model.configure_optimizer(lr=0.01, weight_decay=0.3, eps=1e-6, optimizer=optimizer))
    for name, parameter in model.named_parameters():
        hidden, group = name.startswith("blocks."), found[name]
        factor = row["lr_factor"] if hidden else 1.0
        assert group["lr_scale"] == pytest.approx(factor) and group["lr"] == pytest.approx(0.01 * factor), name
        assert group["weight_decay"] == (0.3 if parameter.dim() >= 2 else 0.0), name
        if not (optimizer == "muon" and hidden and parameter.dim() == 2):
            assert group["eps"] == pytest.approx(1e-6 * (row["eps_factor"] if hidden else 1.0)), name
            assert group["betas"] == (0.9, 0.95), name


def test_frozen_parameters_are_in_no_group():
    model = build(tiny())
    model.wte.weight.requires_grad_(False)
    assert "wte.weight" not in grouped(model, model.configure_optimizer(lr=0.01, weight_decay=0.1))


@pytest.mark.parametrize("rule", ["none", "factored", "depth_mup", "completep"])
def test_first_step_is_adamws_with_the_groups_numbers(rule):
    """After one step the moments are g and g^2: w <- w (1 - lr f wd) - lr f g / (|g| + eps e), f and e the factors."""
    model = build(tiny(rule=rule, n_layer=4))
    before = copy.deepcopy(model.state_dict())
    lr, decay, eps = 0.01, 0.5, 1e-2
    grads = one_step(model, model.configure_optimizer(lr, decay, eps=eps))
    row = published_row(model.config)
    for name, parameter in model.named_parameters():
        hidden, g = name.startswith("blocks."), grads[name]
        step = lr * (row["lr_factor"] if hidden else 1)
        kept = before[name] * (1 - step * (decay if parameter.dim() >= 2 else 0))
        expected = kept - step * g / (g.abs() + eps * (row["eps_factor"] if hidden else 1))
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_muon_has_the_hidden_matrices_and_nothing_else(mode):
    """2-D and inside the blocks. Stacked experts and routers have three dimensions and stay with AdamW."""
    model = build(tiny(rule="factored", **MODES[mode]))
    optimizer = model.configure_optimizer(lr=0.01, weight_decay=0.1, optimizer="muon")
    [muon] = [part for part in optimizer.optimizers if isinstance(part, torch.optim.Muon)]
    names = {id(p): name for name, p in model.named_parameters()}
    members = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert members == {n for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() == 2}
    assert {"blocks.0.attn.qkv.weight", "blocks.1.attn.proj.weight"} <= members


def test_muon_step_is_torchs_with_the_groups_rate():
    """Its update's RMS is matched to AdamW's, and the rule's factor multiplies the rate."""
    model = build(tiny(rule="factored", n_layer=4), dtype=torch.float32)
    alone = model.blocks[0].attn.qkv.weight.detach().clone().requires_grad_()
    reference = torch.optim.Muon([alone], lr=0.01 * 4**-0.5, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizer = model.configure_optimizer(lr=0.01, weight_decay=0.1, optimizer="muon")
    alone.grad = one_step(model, optimizer)["blocks.0.attn.qkv.weight"]
    reference.step()
    torch.testing.assert_close(model.blocks[0].attn.qkv.weight.detach(), alone.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_loop_gates_do_not_decay(optimizer):
    """ReZero's scalars, which open the loops: decay would shut them."""
    model = build(tiny(rule="rezero"))
    groups = grouped(model, model.configure_optimizer(lr=0.01, weight_decay=0.1, optimizer=optimizer))
    gates = [name for name, p in model.named_parameters() if p.dim() == 0]
    assert len(gates) == 2
    assert all(groups[name]["weight_decay"] == 0 for name in gates)
    assert all("no_decay" in groups[name]["name"] for name in gates)


@pytest.mark.parametrize("rule, extra", [("rezero", {}), ("loom", LOOM_PARTS)], ids=["rezero", "per_loop_routers"])
def test_loop_control_parameters_are_adamws(rule, extra):
    """Muon's first update would overwrite a start that means something: ReZero's zeros, equal routers."""
    model = build(tiny(rule=rule, **extra))
    optimizer = model.configure_optimizer(lr=0.01, weight_decay=0.1, optimizer="muon")
    [adamw] = [part for part in optimizer.optimizers if isinstance(part, torch.optim.AdamW)]
    members = {id(p) for group in adamw.param_groups for p in group["params"]}
    control = [p for n, p in model.named_parameters() if n.endswith((".branch", "router.weight"))]
    assert len(control) == 2 and all(id(p) in members for p in control)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_three_steps_stay_finite(rule, mode, optimizer):
    """From tables and scalars that start at zero too."""
    model = build(tiny(rule=rule, **MODES[mode]), dtype=torch.float32)
    stepper = model.configure_optimizer(lr=0.01, weight_decay=0.1, optimizer=optimizer)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        one_step(model, stepper)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert not torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_dict_round_trip_continues_the_run(optimizer):
    """Two steps, saved and loaded into a fresh optimizer, and a third: as three steps in one go."""
    model = build(tiny(**MOE))
    straight = model.configure_optimizer(lr=0.01, weight_decay=0.1, optimizer=optimizer)
    for _ in range(2):
        one_step(model, straight)
    resumed_model = copy.deepcopy(model)
    resumed = resumed_model.configure_optimizer(lr=0.5, weight_decay=0.0, optimizer=optimizer)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in straight.param_groups]
    one_step(model, straight)
    one_step(resumed_model, resumed)
    for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_schedule_reaches_every_group(optimizer):
    """group["lr"] = lr * group["lr_scale"]; at rate 0 nothing moves, and zero_grad clears every gradient."""
    model = build(tiny())
    stepper = model.configure_optimizer(lr=0.01, weight_decay=0.1, optimizer=optimizer)
    before = copy.deepcopy(model.state_dict())
    for group in stepper.param_groups:
        group["lr"] = 0.0 * group["lr_scale"]
    one_step(model, stepper)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    stepper.zero_grad()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())


def test_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="optimizer"):
        build(tiny()).configure_optimizer(lr=0.01, weight_decay=0.1, optimizer="sgd")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["none", "factored"])
def test_tied_loops_train_at_the_rate_of_untied_layers(rule):
    """L = 2, N = 6 tied against 12 separate layers, one learning rate, scaling off and on: tying alone is no disaster.
    From ln 11 = 2.4 nats, 40 steps on one batch leave both under 0.5, and under 0.2 apart (0.01 off, 0.1 on)."""
    finals = []
    for n_layer, n_loop in ((2, 6), (12, 1)):
        shape = dict(n_layer=n_layer, n_loop=n_loop, n_embd=32, init_std=32**-0.5)
        model = build(tiny(rule=rule, embed_norm=True, tie_embeddings=False, **shape), dtype=torch.float32)
        optimizer = model.configure_optimizer(lr=3e-3, weight_decay=0.1)
        idx, targets = example(model.config, batch=8)
        for _ in range(40):
            optimizer.zero_grad()
            loss = model(idx, targets)[1]
            loss.backward()
            optimizer.step()
        finals.append(loss.item())
    assert max(finals) < 0.5
    assert abs(finals[0] - finals[1]) < 0.2


def test_muon_with_frozen_blocks_is_adamw_for_the_rest():
    model = build(tiny())
    model.blocks.requires_grad_(False)
    optimizer = model.configure_optimizer(1e-3, 0.1, optimizer="muon")
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(p) for p in trained} == {id(p) for p in model.parameters() if p.requires_grad}
    one_step(model, optimizer)
