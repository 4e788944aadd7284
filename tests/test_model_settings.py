"""Settings: what is refused, in which words, and what follows from them before a model is made."""

import json
import math
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Literal

import numpy as np
import pytest
import torch
from helpers import build, example, tiny

from minilooped.model import LoopedConfig, LoopedGPT, check_settings
from minilooped.train import TrainConfig

# ----------------------------------------------------------------------------------------------------------------------
# The check of any settings


@dataclass(frozen=True)
class Settings:
    count: int = 1
    share: float = 0.5
    limit: int | None = None
    kind: Literal["left", "right"] = "left"
    on: bool = False
    name: str = "x"

    def __post_init__(self):
        check_settings(self, {"share": ">= 0, < 1"})


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(count=0), "count=0 must be an int >= 1"),
        (dict(count=2.0), "count=2.0 must be an int >= 1"),
        (dict(count=None), "count=None must be an int >= 1"),
        (dict(count=True), "count=True must be an int >= 1"),
        (dict(count=10**30), f"count={10**30} must be an int <= 9e18"),
        (dict(share=-0.5), "share=-0.5 must be a finite number >= 0"),
        (dict(share=1), "share=1 must be a finite number < 1"),
        (dict(share=math.nan), "share=nan must be a finite number >= 0"),
        (dict(share="0.5"), "share='0.5' must be a finite number >= 0"),
        (dict(limit=-3), "limit=-3 must be an int >= 1, or None"),
        (dict(kind="up"), "kind='up' must be one of left, right"),
        (dict(kind=[1]), "kind=[1] must be one of left, right"),
        (dict(on=1), "on=1 must be True or False"),
        (dict(name=3), "name=3 must be a str"),
    ],
)
def test_a_setting_is_refused_with_its_name_its_value_and_what_it_must_be(changes, words):
    with pytest.raises(ValueError) as refusal:
        Settings(**changes)
    assert str(refusal.value) == words


def test_a_number_of_any_library_is_one_and_is_kept_as_pythons_own():
    found = Settings(count=np.int64(3), share=np.float32(0.25), limit=torch.tensor(7))
    assert found == Settings(3, 0.25, 7)
    assert [type(value) for value in asdict(found).values()] == [int, float, int, str, bool, str]
    assert type(Settings(share=0).share) is int, "a whole number stays one"
    for odd in (dict(count=np.float64(3)), dict(count=np.bool_(True)), dict(share=Decimal("0.5")), dict(limit=1 + 0j)):
        with pytest.raises(ValueError, match=next(iter(odd))):
            Settings(**odd)


def test_configurations_take_numbers_of_any_library():
    """Loop counts out of an array, widths out of a table."""
    model = tiny(n_loop=np.int64(3), n_embd=np.int32(16), lam=np.float64(0.5), loop_residual=np.float32(0.5))
    train = TrainConfig(max_steps=np.int64(5), lr=np.float32(0.5), threads=np.uint8(1))
    assert model == tiny(n_loop=3, n_embd=16, lam=0.5, loop_residual=0.5)
    assert train == TrainConfig(max_steps=5, lr=0.5, threads=1)
    for config in (model, train):
        assert json.loads(json.dumps(asdict(config))) == asdict(config)


@pytest.mark.parametrize("integer", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_calls_take_integers_of_any_library(integer):
    model, (idx, targets) = build(tiny()), example(tiny())
    two, three = integer(2), integer(3)
    assert torch.equal(model(idx, n_loop=two)[0], model(idx, n_loop=2)[0])
    assert len(model(idx, n_loop=two, return_states=True)[2]) == 2
    assert len(list(model.segment_losses(idx, targets, n_loop=two))) == 1
    assert model.flops_per_token(n_loop=two) == model.flops_per_token(n_loop=2)
    drawn = [
        model.generate(idx[:, :2], count, top_k=k, n_loop=n, generator=torch.Generator().manual_seed(0))
        for count, k, n in ((three, three, two), (3, 3, 2))
    ]
    assert torch.equal(*drawn) and drawn[0].shape == (2, 5)


# ----------------------------------------------------------------------------------------------------------------------
# The configuration of a model


@pytest.mark.parametrize(
    "changes, field",
    [
        (dict(n_head=3), "n_head"),
        (dict(n_embd=6, n_head=2), "pos"),
        (dict(rule="magic"), "rule"),
        (dict(mlp="tanh"), "mlp"),
        (dict(norm="batch"), "norm"),
        (dict(pos="alibi"), "pos"),
        (dict(n_loop=0), "n_loop"),
        (dict(n_layer=0), "n_layer"),
        (dict(n_layer=2.0), "n_layer"),
        (dict(block_size=0), "block_size"),
        (dict(vocab_size=0), "vocab_size"),
        (dict(n_inner=0), "n_inner"),
        (dict(init_std=0.0), "init_std"),
        (dict(init_std=math.nan), "init_std"),
        (dict(lam=0.0), "lam"),
        (dict(l_ref=0), "l_ref"),
        (dict(l_ref=-1), "l_ref"),
        (dict(reinject_lam=-0.1), "reinject_lam"),
        (dict(loop_residual=1.0), "loop_residual"),
        (dict(loop_residual=-0.1), "loop_residual"),
        (dict(loop_residual=True), "loop_residual"),
        (dict(n_expert=-1), "n_expert"),
        (dict(n_expert=4, top_k=5), "top_k"),
        (dict(n_expert=4, top_k=0), "top_k"),
        (dict(n_expert=4, gate="tanh"), "gate"),
        (dict(n_expert=4, balance="loss"), "balance"),
        (dict(n_expert=4, router="each"), "router"),
        (dict(n_expert=4, router_init="zero"), "router_init"),
        (dict(n_expert_shared=1), "n_expert_shared"),
        (dict(router="per_loop"), "router"),
        (dict(moe_out_norm=True), "moe_out_norm"),
        (dict(segment=-1), "segment"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_impossible_configuration_is_refused_by_name(changes, field):
    with pytest.raises(ValueError, match=field):
        tiny(**changes)


def test_configuration_cannot_be_changed_after_its_check():
    with pytest.raises(AttributeError):
        tiny().n_loop = 5


@pytest.mark.parametrize(
    "changes, width",
    [
        (dict(n_embd=768), 2048),
        (dict(n_embd=768, mlp="gelu"), 3072),
        (dict(n_embd=768, mlp="relu2"), 3072),
        (dict(n_embd=16), 40),
        (dict(n_embd=20), 56),
        (dict(n_embd=20, n_expert=8, top_k=3), 16),
        (dict(n_embd=768, n_inner=100), 100),
        (dict(n_embd=768, n_expert=8, top_k=2), 1024),
        (dict(n_embd=768, n_expert=8, top_k=3), 680),
        (dict(n_embd=768, n_expert=8, top_k=2, n_expert_shared=1), 680),
        (dict(n_embd=768, n_expert=8, top_k=2, mlp="gelu"), 1536),
        (dict(n_embd=768, n_expert=8, top_k=2, n_inner=100), 100),
    ],
)
def test_default_mlp_width(changes, width):
    """4 C, for swiglu 8 C / 3, divided over the active experts, to the nearest multiple of 8."""
    with torch.device("meta"):
        model = LoopedGPT(tiny(n_layer=1, **changes))
    shapes = {name: tuple(p.shape) for name, p in model.blocks[0].mlp.named_parameters()}
    name = "experts.w_out" if "n_expert" in changes else "w_out.weight"
    assert width in shapes[name][-2:]


def test_defaults_are_those_of_gpt2_small_with_llamas_parts():
    config = LoopedConfig()
    assert (config.vocab_size, config.block_size, config.n_layer, config.n_loop) == (50257, 1024, 12, 1)
    assert (config.n_head, config.n_embd, config.n_inner, config.mlp) == (12, 768, None, "swiglu")
    assert (config.norm, config.pos, config.bias, config.tie_embeddings) == ("rms", "rope", False, True)
    assert (config.init_std, config.rule, config.lam, config.l_ref, config.embed_norm) == (
        0.02,
        "factored",
        None,
        1,
        None,
    )
    assert (config.reinject, config.reinject_lam, config.loop_residual, config.loop_end_norm) == (
        False,
        0.5,
        None,
        False,
    )
    assert (config.n_expert, config.n_expert_shared, config.top_k, config.gate) == (0, 0, 2, "softmax")
    assert (config.router, config.router_init, config.balance) == ("shared", "copy", "bias")
    assert (config.balance_coef, config.z_coef, config.moe_out_norm, config.segment) == (2e-3, 1e-3, False, None)
    assert not config.qk_norm


# ----------------------------------------------------------------------------------------------------------------------
# Sizes, reckoned before anything is made


def test_depths_that_no_forward_pass_gets_through_are_refused_by_name():
    for name in ("n_layer", "n_loop"):
        tiny(**{name: 100_000})
        with pytest.raises(ValueError, match=f"{name}=100001 must be an int <= 100000"):
            tiny(**{name: 100_001})
    model = build(tiny())
    with pytest.raises(ValueError, match="n_loop=10000000 must be an int <= 100000"):
        model.generate(example(tiny())[0], 1, n_loop=10**7)


def test_parameters_of_a_model_that_nobody_could_build_are_counted_at_once():
    """12 C^2 in a plain GPT-2 block with 4 C^2 in attention and 8 C^2 in the MLP; V C in a tied table."""
    config = LoopedConfig(vocab_size=10**6, n_layer=100_000, n_embd=2**20, n_head=2**10, mlp="gelu", norm="rms")
    blocks, norms = 100_000 * 12 * 2**40, (2 * 100_000 + 1) * 2**20
    assert config.num_params() == blocks + norms + 10**6 * 2**20


def test_gpt2s_published_parameter_count_follows_from_its_settings():
    gpt2 = dict(norm="layer", pos="learned", bias=True, mlp="gelu", rule="none")
    assert LoopedConfig(**gpt2).num_params() == 124_439_808
    assert LoopedConfig(**gpt2, n_layer=48, n_head=25, n_embd=1600).num_params() == 1_557_611_200
