"""Properties over configurations drawn at random: nothing but a trained step or a refusal that names a field."""

from dataclasses import fields

import pytest
import torch
from helpers import RULE_NAMES, example, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minilooped.model import LoopedConfig, LoopedGPT


def bounded(max_examples: int) -> settings:
    """The same examples in every run, as many as named, without a time limit: a pass here is a pass everywhere."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


FIELDS = [field.name for field in fields(LoopedConfig)]

# One entry per field: values that are right by themselves. What they make together may still be impossible.
PLAUSIBLE = {
    "vocab_size": st.integers(1, 12),
    "block_size": st.integers(1, 9),
    "n_layer": st.integers(1, 3),
    "n_loop": st.integers(1, 4),
    "n_head": st.integers(1, 4),
    "n_embd": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
    "n_inner": st.none() | st.integers(1, 9),
    "mlp": st.sampled_from(["swiglu", "gelu", "relu2"]),
    "qk_norm": st.booleans(),
    "norm": st.sampled_from(["rms", "layer"]),
    "pos": st.sampled_from(["rope", "learned"]),
    "bias": st.booleans(),
    "tie_embeddings": st.booleans(),
    "init_std": st.sampled_from([1e-3, 0.02, 0.3, 1]),
    "rule": st.sampled_from(RULE_NAMES),
    "lam": st.none() | st.sampled_from([0.1, 1, 2.0]),
    "l_ref": st.sampled_from([1, 2, 12, 0.5]),
    "embed_norm": st.none() | st.booleans(),
    "reinject": st.booleans(),
    "reinject_lam": st.sampled_from([0, 0.0, 0.5, 1, 5.0]),
    "loop_residual": st.none() | st.sampled_from([0, 0.0, 0.5, 0.99]),
    "loop_end_norm": st.booleans(),
    "n_expert": st.integers(0, 6),
    "n_expert_shared": st.integers(0, 2),
    "top_k": st.integers(1, 6),
    "router": st.sampled_from(["shared", "per_loop"]),
    "router_init": st.sampled_from(["copy", "independent"]),
    "gate": st.sampled_from(["softmax", "sigmoid"]),
    "balance": st.sampled_from(["bias", "switch", "none"]),
    "balance_coef": st.sampled_from([0, 0.0, 2e-3, 1.0]),
    "z_coef": st.sampled_from([0, 0.0, 1e-3, 1.0]),
    "moe_out_norm": st.booleans(),
    "segment": st.none() | st.integers(1, 5),
    "recompute_loops": st.booleans(),
    "loss_chunk": st.none() | st.integers(1, 7),
}
# Values of the wrong kind, sign or spelling; most fields refuse most of them.
ODD = st.sampled_from([None, 0, -1, 2.5, -0.5, 1.0, float("nan"), float("inf"), True, "", "rms", "none", (), [1]])


@st.composite
def choices(draw) -> dict:
    """Plausible values for all fields, and sometimes an odd one for one or two."""
    values = {name: draw(strategy) for name, strategy in PLAUSIBLE.items()}
    if not values["n_expert"] and draw(st.integers(0, 3)):  # else nearly every dense draw would be refused
        values |= dict(n_expert_shared=0, router="shared", moe_out_norm=False)
    if draw(st.integers(0, 3)):  # likewise for heads that do not divide the width
        values["n_embd"] = 2 * values["n_head"] * draw(st.sampled_from([1, 2, 3]))
    if values["n_expert"] and draw(st.integers(0, 3)):
        values["top_k"] = draw(st.integers(1, values["n_expert"]))
    if draw(st.integers(0, 4)) == 0:
        values |= draw(st.dictionaries(st.sampled_from(FIELDS), ODD, min_size=1, max_size=2))
    return values


def test_every_field_is_drawn():
    assert sorted(PLAUSIBLE) == sorted(FIELDS)


def construct(values: dict) -> LoopedConfig | None:
    """The configuration, or None if it is refused as it should be: by a ValueError that names a field."""
    try:
        return LoopedConfig(**values)
    except ValueError as error:
        assert any(name in str(error) for name in FIELDS), str(error)
        return None


@pytest.mark.slow
@bounded(250)
@given(values=choices())
def test_any_configuration_trains_a_step_or_is_refused_by_name(values):
    """Forward, segments, and an optimizer step: finite loss, a finite gradient for every parameter, finite weights."""
    config = construct(values)
    if config is None:
        return
    torch.manual_seed(0)
    model = LoopedGPT(config)
    assert config.num_params() == model.num_params()
    idx, targets = example(config)
    model(idx, targets)[1].backward()
    check_gradients(model)
    model.zero_grad()
    optimizer = model.configure_optimizer(lr=1e-3, weight_decay=0.1)
    for loss in model.segment_losses(idx, targets):
        assert loss.isfinite()
        loss.backward()
    check_gradients(model)
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def check_gradients(model: LoopedGPT):
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.slow
@bounded(60)
@given(values=choices(), length=st.integers(1, 12), extra_loops=st.integers(-2, 3))
def test_any_model_generates_the_same_with_and_without_cache(values, length, extra_loops):
    """Greedy, in float64, at any loop count, from a prompt of any length."""
    config = construct(values)
    if config is None:
        return
    torch.manual_seed(0)
    model = LoopedGPT(config).double()
    idx, n_loop = tokens(config, length=length), max(1, config.n_loop + extra_loops)
    with torch.no_grad():
        for parameter in model.parameters():  # off the initial values, where ties between tokens are common
            parameter += 0.05 * torch.randn_like(parameter)
    cached = model.generate(idx, 4, temperature=0, n_loop=n_loop)
    assert torch.equal(cached, model.generate(idx, 4, temperature=0, n_loop=n_loop, use_cache=False))
    assert cached.shape == (2, length + 4) and cached.max() < config.vocab_size


@bounded(60)
@given(values=choices())
def test_any_models_parameters_are_all_in_one_optimizer_group(values):
    config = construct(values)
    if config is None:
        return
    model = LoopedGPT(config)
    for optimizer in ("adamw", "muon"):
        groups = model.configure_optimizer(1e-3, 0.1, optimizer=optimizer).param_groups
        members = [id(p) for group in groups for p in group["params"]]
        assert sorted(members) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("name", FIELDS)
@bounded(30)
@given(value=ODD)
def test_an_odd_value_in_any_field_is_accepted_or_refused_by_its_name(name, value):
    """A wrong type or sign never reaches torch."""
    base = dict(vocab_size=5, block_size=4, n_layer=1, n_loop=2, n_head=2, n_embd=4, n_expert=2, top_k=1)
    try:
        config = LoopedConfig(**(base | {name: value}))
    except ValueError as error:
        assert name in str(error)
    else:
        LoopedGPT(config)(tokens(config))
