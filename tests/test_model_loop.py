"""The loop: one set of weights, N passes, and what must follow from that."""

import copy
import math
import pickle
from collections import Counter

import pytest
import torch
from helpers import LOOM_PARTS, MOE, RULE_NAMES, Reference, build, example, gradients, rms, tiny, tokens
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minilooped import model as looped
from minilooped.model import LoopedConfig, LoopedGPT

# Each entry switches on other parts of the model; together they cover every field that changes the function.
VARIANTS = {
    "llama": {},
    "gpt2": dict(norm="layer", pos="learned", bias=True, mlp="gelu"),
    "untied_head": dict(tie_embeddings=False, mlp="relu2", qk_norm=True),
    "layer_norm_without_bias": dict(norm="layer", embed_norm=True, pos="learned"),
    "n_inner": dict(n_inner=5, bias=True),
    "moe": dict(balance="none", **MOE),
    "moe_sigmoid_switch": dict(MOE, gate="sigmoid", balance="switch", n_expert_shared=2, mlp="gelu", bias=True),
    "loom": dict(LOOM_PARTS, balance="switch", router_init="independent"),
    "loom_dense": dict(reinject=True, reinject_lam=1.7, loop_residual=0.9, loop_end_norm=True),
}


def assert_equal_gradients(found: dict, expected: dict, **tolerance):
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


# ----------------------------------------------------------------------------------------------------------------------
# Tied against untied


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_tied_stack_equals_untied_copies_and_its_gradient_is_their_sum(rule, variant):
    """With copied weights the two stacks are one function; d loss/d W tied = sum over visits of d loss/d W_visit."""
    config = tiny(rule=rule, **VARIANTS[variant])
    model = build(config, shaken=True)
    untied = Reference(model)
    idx, targets = example(config)
    logits, loss = model(idx, targets)
    [expected] = untied.losses(idx, targets)
    torch.testing.assert_close(logits, untied.readout(untied.loops(idx)[-1][0]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    loss.backward()
    expected.backward()
    assert_equal_gradients(gradients(model), untied.gradients(), rtol=1e-8, atol=1e-9)


# Rules that see the unrolled depth only are the same rule for N = 3 loops of 2 blocks and for 6 blocks once; `factored`
# and `loom` are if lambda takes the factor 1/sqrt(N) by which 1/(N sqrt L) and 1/sqrt(N L) differ.
UNROLLED = {"none": {}, "sqrt_depth": {}, "depth_mup": {}, "completep": {}, "layernorm_scaling": {}, "rezero": {}}
UNROLLED |= {"deepnorm": {}, "deeploop": {}, "factored": dict(lam=3**-0.5), "loom": dict(lam=0.5 * 3**-0.5)}


@pytest.mark.parametrize("rule", UNROLLED)
def test_looped_model_equals_a_deep_model_of_separate_blocks(rule):
    tied = build(tiny(rule=rule), shaken=True)
    deep = build(tiny(rule=rule, n_loop=1, n_layer=6, **UNROLLED[rule]))
    weights = tied.state_dict()
    for visit in range(6):
        weights |= {
            name.replace(f"blocks.{visit % 2}.", f"blocks.{visit}."): tensor
            for name, tensor in tied.state_dict().items()
            if name.startswith(f"blocks.{visit % 2}.")
        }
    deep.load_state_dict(weights)
    idx, targets = example(tied.config)
    (logits, loss), (deep_logits, deep_loss) = tied(idx, targets), deep(idx, targets)
    torch.testing.assert_close(logits, deep_logits, rtol=1e-12, atol=1e-12)
    loss.backward()
    deep_loss.backward()
    sums: dict = {}
    for name, grad in gradients(deep).items():
        if name.startswith("blocks."):
            _, visit, rest = name.split(".", 2)
            name = f"blocks.{int(visit) % 2}.{rest}"
        sums[name] = sums.get(name, 0) + grad
    assert_equal_gradients(gradients(tied), sums, rtol=1e-9, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# What looping costs and does not cost


@pytest.mark.parametrize("extra", [{}, MOE, dict(MOE, router="per_loop")], ids=["dense", "moe", "moe_per_loop"])
def test_parameter_count_does_not_depend_on_n_loop(extra):
    """Except for routers of their own: n_expert * n_embd weights per layer for every further loop."""
    counts = [build(tiny(n_loop=n, **extra)).num_params() for n in (1, 2, 8)]
    more = 2 * 4 * 16 if extra.get("router") == "per_loop" else 0
    assert counts == [counts[0], counts[0] + more, counts[0] + 7 * more]


def test_num_params_counts_every_weight_once():
    """V C + L (4 C^2 + 3 C I + 2 C) + C, tied; the head adds V C untied."""
    C, V, inner = 16, 11, 40  # 8 * 16 / 3 = 42.67, to the nearest multiple of 8
    blocks = 2 * (4 * C * C + 3 * C * inner + 2 * C)
    assert build(tiny()).num_params() == V * C + blocks + C
    assert build(tiny(tie_embeddings=False)).num_params() == 2 * V * C + blocks + C
    gpt2 = dict(norm="layer", pos="learned", bias=True, mlp="gelu")
    blocks = 2 * (4 * C * C + 4 * C + 8 * C * C + 5 * C + 4 * C)
    assert build(tiny(**gpt2)).num_params() == V * C + 12 * C + blocks + 2 * C


def test_gpt2_small_has_its_124_million_parameters():
    """124,439,808 in the released checkpoint."""
    with torch.device("meta"):
        model = LoopedGPT(LoopedConfig(norm="layer", pos="learned", bias=True, mlp="gelu", rule="none"))
    assert model.num_params() == 124_439_808


@pytest.mark.parametrize("n_loop", [1, 2, 5])
def test_every_visit_is_seen_by_a_hook(n_loop):
    """N x L executed block visits, in order, by L objects; each leaves a record of its own, none is overwritten."""
    model = build(tiny(n_loop=n_loop))
    visits, norms = [], []
    for layer, block in enumerate(model.blocks):
        block.register_forward_hook(lambda module, args, out, layer=layer: visits.append((layer, id(module))))
        block.register_forward_hook(lambda module, args, out: norms.append(rms(out[0])))
    model(tokens(model.config))
    assert [layer for layer, _ in visits] == [0, 1] * n_loop
    assert len(set(visits)) == 2
    assert len(norms) == len(set(norms)) == n_loop * 2


def test_flops_equal_those_counted_by_torch():
    """The forward's matrix products and attention, as torch's own counter sees them, at a full window."""
    config = tiny(n_loop=5, vocab_size=13, pos="learned")
    model, idx = build(config, dtype=torch.float32), tokens(config, batch=3)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(idx)
    assert model.flops_per_token(training=False) * idx.numel() == counter.get_total_flops()
    assert model.flops_per_token() == 3 * model.flops_per_token(training=False)  # the backward is two forwards


@pytest.mark.parametrize("mlp, width", [("swiglu", 3 * 40), ("gelu", 2 * 64), ("relu2", 2 * 64)])
def test_flops_of_one_loop_are_the_plain_models_and_of_n_loops_n_times_the_blocks(mlp, width):
    """6 per weight met and 12 T C per attention; the head is met once however often the blocks are."""
    C, T, V = 16, 12, 11
    block, head = 6 * (4 * C * C + width * C) + 12 * T * C, 6 * C * V
    for n_loop in (1, 8):
        assert build(tiny(n_loop=n_loop, mlp=mlp)).flops_per_token() == n_loop * 2 * block + head


def test_flops_count_active_experts_only():
    """k routed and all shared experts work on a token, and the router scores all E."""
    flops = [build(tiny(**(MOE | dict(n_expert=E)))).flops_per_token(training=False) for E in (4, 8)]
    assert flops[1] - flops[0] == 6 * 2 * 4 * 16
    dense = build(tiny(n_inner=3 * 8)).flops_per_token(training=False)  # as wide as 2 routed and 1 shared expert
    assert flops[0] == dense + 6 * 2 * 4 * 16


# ----------------------------------------------------------------------------------------------------------------------
# Other loop counts, states


@pytest.mark.parametrize("n_loop", [1, 2, 5])
@pytest.mark.parametrize("variant", ["llama", "loom"])
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_another_loop_count_keeps_the_trained_multipliers(rule, variant, n_loop):
    """The row stays the one of the trained N; routers beyond it reuse the last; g_t = lam / (t sqrt L) goes on."""
    model = build(tiny(rule=rule, **VARIANTS[variant]), shaken=True)
    idx = tokens(model.config)
    logits, loss, states = model(idx, n_loop=n_loop, return_states=True)
    reference = Reference(model, n_loop)
    expected = [state for state, _ in reference.loops(idx)]
    assert loss is None and len(states) == n_loop
    for found, state in zip(states, expected, strict=True):
        torch.testing.assert_close(found, state, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits, reference.readout(expected[-1]), rtol=1e-9, atol=1e-9)


def test_states_of_fewer_loops_are_a_prefix():
    """So one run at the largest count gives every smaller one, bit for bit."""
    model = build(tiny(**LOOM_PARTS), shaken=True).eval()
    idx = tokens(model.config)
    *_, longer = model(idx, n_loop=6, return_states=True)
    for n_loop in range(1, 6):
        *_, states = model(idx, n_loop=n_loop, return_states=True)
        assert all(torch.equal(a, b) for a, b in zip(states, longer[:n_loop], strict=True))


def test_states_have_the_streams_shape_and_the_last_one_gives_the_logits():
    model = build(tiny(), shaken=True)
    logits, _, states = model(tokens(model.config), return_states=True)
    assert [state.shape for state in states] == [(2, 12, 16)] * 3
    torch.testing.assert_close(logits, Reference(model).readout(states[-1]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n_loop", [0, -1, 1.5, 2.0, True, "2"])
def test_an_impossible_loop_count_is_refused(n_loop):
    """Never ignored: forward, segments and generation all name it."""
    model = build(tiny())
    idx, targets = example(model.config)
    for call in (
        lambda: model(idx, n_loop=n_loop),
        lambda: model(idx, n_loop=n_loop, return_states=True),
        lambda: next(model.segment_losses(idx, targets, n_loop=n_loop)),
        lambda: model.generate(idx, 1, n_loop=n_loop),
    ):
        with pytest.raises(ValueError, match="n_loop"):
            call()


def test_more_loops_than_trained_reuse_the_last_router():
    """Twice the trained loops: equal to a model whose table of routers goes on with the last one."""
    model = build(tiny(n_loop=3, rule="none", router="per_loop", router_init="independent", **MOE)).eval()
    longer = build(tiny(n_loop=6, rule="none", router="per_loop", router_init="independent", **MOE)).eval()
    weights = model.state_dict()
    for layer in range(2):
        name = f"blocks.{layer}.mlp.router.weight"
        weights[name] = torch.cat((weights[name], weights[name][-1:].expand(3, -1, -1)))
    longer.load_state_dict(weights)
    idx = tokens(model.config)
    assert torch.equal(model(idx, n_loop=6)[0], longer(idx)[0])


def test_loss_at_other_loop_counts_is_defined_and_depends_on_them():
    """Trained at N = 4, evaluated at N' = 1..16: every loss is finite, and training has favoured N' = 4 over N' = 1."""
    model = build(tiny(n_loop=4, rule="inverse", init_std=0.1), dtype=torch.float32)
    idx = tokens(model.config, batch=4)
    targets = idx.roll(-1, dims=1)
    optimizer = model.configure_optimizer(lr=1e-2, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        model(idx, targets)[1].backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [model(idx, targets, n_loop=n_loop)[1].item() for n_loop in range(1, 17)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[3] < losses[0]
    assert len(set(losses)) == 16


# ----------------------------------------------------------------------------------------------------------------------
# The forward's contract


def test_loss_is_the_mean_cross_entropy_over_targets_that_are_not_ignored():
    model = build(tiny())
    idx, targets = example(model.config)
    targets[1, 3:] = -100
    logits, loss = model(idx, targets)
    assert logits.shape == (2, 12, 11)
    picked = [(b, t) for b in range(2) for t in range(12) if targets[b, t] >= 0]
    by_hand = sum(logits[b, t].logsumexp(0) - logits[b, t, targets[b, t]] for b, t in picked) / len(picked)
    torch.testing.assert_close(loss, by_hand, rtol=1e-12, atol=1e-12)
    assert model(idx)[1] is None


def test_a_batch_without_targets_has_loss_and_gradient_zero():
    """All ignored: 0 / 0 would poison the weights with NaN. The segments' losses too."""
    model = build(tiny(segment=1))
    idx = tokens(model.config)
    for loss in (model(idx, torch.full_like(idx, -100))[1], *model.segment_losses(idx, torch.full_like(idx, -100))):
        model.zero_grad()
        loss.backward()
        assert loss.item() == 0
        assert all(grad.abs().max() == 0 for grad in gradients(model).values())


def test_untied_model_starts_near_the_uniform_loss():
    """ln V at small logits."""
    model = build(tiny(tie_embeddings=False, vocab_size=64, init_std=0.02))
    idx, targets = example(model.config, batch=8)
    assert model(idx, targets)[1].item() == pytest.approx(math.log(64), abs=0.03)


@pytest.mark.parametrize("vocab_size", [2, 11, 64])
def test_logits_have_one_column_per_token(vocab_size):
    model = build(tiny(vocab_size=vocab_size))
    assert model(tokens(model.config))[0].shape == (2, 12, vocab_size)


@pytest.mark.parametrize(
    "changes", [{}, dict(tie_embeddings=False), dict(loss_chunk=5), dict(LOOM_PARTS, segment=2)], ids=str
)
def test_a_padded_head_changes_no_logit_no_loss_and_no_gradient(changes, monkeypatch):
    """A GPU gets a matrix of a convenient width while it trains. Here the CPU does: 11 columns become 128, or 16."""
    config, products = tiny(**changes), []
    plain = build(config, shaken=True)
    idx, targets = example(config)
    logits, loss = plain(idx, targets)
    losses = [*plain.segment_losses(idx, targets)]
    torch.stack([loss, *losses]).sum().backward()

    monkeypatch.setattr(looped, "PADDED_DEVICES", ("cpu",))
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight, *bias: products.append(len(weight)) or linear(x, weight, *bias))
    for multiple in (128, 16):
        monkeypatch.setattr(looped, "PADDED_MULTIPLE", multiple)
        padded = build(config, shaken=True)
        found, found_loss = padded(idx, targets)
        assert found.shape == (2, 12, 11) and products[-1] == multiple
        torch.testing.assert_close(found, logits, rtol=1e-12, atol=1e-12)
        found_losses = [*padded.segment_losses(idx, targets)]
        torch.testing.assert_close([found_loss, *found_losses], [loss, *losses], rtol=1e-12, atol=1e-12)
        torch.stack([found_loss, *found_losses]).sum().backward()
        torch.testing.assert_close(gradients(padded), gradients(plain), rtol=1e-12, atol=1e-12)
        assert padded.num_params() == plain.num_params() and padded.state_dict().keys() == plain.state_dict().keys()
        with torch.no_grad():
            assert torch.equal(padded.eval()(idx)[0], plain.eval()(idx)[0]) and products[-1] == 11, "for training only"
        plain.train()


def test_gpt2s_vocabulary_is_padded_on_a_gpu_and_a_convenient_one_is_not():
    with torch.device("meta"):
        heads = [LoopedGPT(tiny(vocab_size=size)) for size in (50257, 50304)]
    assert looped.PADDED_DEVICES == ("cuda",)
    for model, is_padded in zip(heads, (True, False), strict=True):
        assert model._head() == (model.wte.weight, None), "not on this device"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(looped, "PADDED_DEVICES", ("meta",))
            weight, bias = model._head()
        assert weight.shape == (50304, 16) and (bias is not None) == is_padded


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_position_sees_a_later_one(variant):
    model = build(tiny(**VARIANTS[variant]), shaken=True).eval()
    idx = tokens(model.config)
    changed = idx.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    before, after = model(idx)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-12, atol=1e-12)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=-1).min() > 1e-4


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_order_of_earlier_tokens_matters(variant):
    """A causal model without positions would give the last token the same logits for any order in one layer."""
    model = build(tiny(n_layer=1, n_loop=1, **VARIANTS[variant]), shaken=True)
    idx = tokens(model.config)
    swapped = idx.clone()
    swapped[:, [0, 5]] = idx[:, [5, 0]]
    assert (idx != swapped).any(dim=1).all()
    assert (model(idx)[0][:, -1] - model(swapped)[0][:, -1]).abs().amax(dim=-1).min() > 1e-4


def test_a_rotary_block_refuses_to_run_without_its_positions():
    """Neither without the table, nor with the whole one, nor with one position, which would be all of theirs."""
    model = build(tiny())
    block, h = model.blocks[0], model.embed(tokens(model.config, length=5))
    whole, first = block(h, rope=model.rope[:, :5])[0], block(h[:, :3], rope=model.rope[:, :3])[0]
    torch.testing.assert_close(whole[:, :3], first, rtol=1e-12, atol=1e-12)
    for rope in (None, model.rope, model.rope[:, :1]):
        for run in (lambda rope=rope: block(h, rope=rope), lambda rope=rope: block.attn(h, rope)):
            with pytest.raises(ValueError, match=r"angles of these 5 positions: give rope=model.rope\[:, :5\]"):
                run()
    learned = build(tiny(pos="learned"))
    assert learned.blocks[0](learned.embed(tokens(learned.config)))[0].isfinite().all(), "which knows no table"


def test_two_identical_calls_agree():
    """Nothing random is drawn in the forward, in either mode."""
    model = build(tiny(balance="none", **LOOM_PARTS))
    idx, targets = example(model.config)
    for mode in (True, False):
        model.train(mode)
        (a, loss_a), (b, loss_b) = model(idx, targets), model(idx, targets)
        assert torch.equal(a, b) and torch.equal(loss_a, loss_b)


@pytest.mark.parametrize(
    "idx, message",
    [
        (torch.zeros(2, 13, dtype=torch.long), "block_size"),
        (torch.zeros(12, dtype=torch.long), "idx"),
        (torch.zeros(2, 0, dtype=torch.long), "idx"),
        (torch.zeros(2, 3, 4, dtype=torch.long), "idx"),
    ],
    ids=["too_long", "one_dimension", "no_token", "three_dimensions"],
)
def test_wrong_input_shapes_are_refused(idx, message):
    model = build(tiny())
    with pytest.raises(ValueError, match=message):
        model(idx)
    with pytest.raises(ValueError, match=message):
        next(model.segment_losses(idx, idx))


@pytest.mark.parametrize("shape", [(2, 11), (1, 12), (24,)])
def test_targets_of_another_shape_are_refused(shape):
    model = build(tiny())
    with pytest.raises(ValueError, match="targets"):
        model(tokens(model.config), torch.zeros(shape, dtype=torch.long))


def test_state_dict_round_trip_gives_the_same_model():
    config = tiny(**LOOM_PARTS)
    model, other = build(config, shaken=True), build(config, seed=5)
    idx, targets = example(config)
    model(idx, targets)
    model.move_biases()  # they must travel too
    assert model.blocks[0].mlp.router.bias.any()
    other.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(idx)[0], other.eval()(idx)[0])
    twin = copy.deepcopy(model)
    assert torch.equal(twin(idx)[0], model(idx)[0])


def test_tied_head_is_one_parameter():
    names = Counter(id(p) for p in build(tiny()).parameters())
    assert set(names.values()) == {1}
    shapes = [tuple(p.shape) for p in build(tiny()).parameters()]
    assert shapes.count((11, 16)) == 1
    assert [tuple(p.shape) for p in build(tiny(tie_embeddings=False)).parameters()].count((11, 16)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_lower_precision_stays_close_to_float64(variant, dtype):
    """Under autocast for bfloat16: 8 bits of mantissa, so a few per cent of the logits' spread."""
    config = tiny(**VARIANTS[variant])
    exact, model = build(config), build(config, dtype=torch.float32)
    idx = tokens(config)
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        logits = model(idx)[0]
    expected = exact(idx)[0]
    allowed = 1e-5 if dtype == torch.float32 else 0.1
    assert (logits.double() - expected).square().mean().sqrt() <= allowed * expected.std()


@pytest.mark.parametrize("length", [1, 5, 12])
def test_attention_in_bfloat16_is_causal_softmax_attention(length):
    """A path of its own on the CPU: against the written-out formula on the same rounded weights."""
    model = build(tiny(n_layer=1, n_loop=1, rule="none"), dtype=torch.float32)
    idx = tokens(model.config, length=length)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(idx)[0]
    exact = Reference(model.double())
    torch.testing.assert_close(logits.double(), exact.readout(exact.loops(idx)[-1][0]), rtol=0.05, atol=0.05)


# ----------------------------------------------------------------------------------------------------------------------
# Re-injection and one loop


@pytest.mark.parametrize("reinject", [False, True])
@pytest.mark.parametrize("rule", ["none", "sqrt", "inverse"])
def test_one_loop_is_the_plain_stack(rule, reinject):
    """Bit for bit, with re-injection too: it starts with the second loop, so the first is never doubled."""
    plain = build(tiny(n_loop=1, rule="none", n_layer=3))
    looped = build(tiny(n_loop=1, rule=rule, n_layer=3, reinject=reinject))
    idx, targets = example(plain.config)
    (logits, loss), (looped_logits, looped_loss) = plain(idx, targets), looped(idx, targets)
    assert torch.equal(logits, looped_logits) and torch.equal(loss, looped_loss)
    loss.backward()
    looped_loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain).values(), gradients(looped).values(), strict=True))


def test_logits_can_be_read_from_plain_functions_of_the_weights():
    """One dense layer by hand: embedding, norm, attention to itself at T = 1, MLP, final norm, tied head."""
    model = build(tiny(n_layer=1, n_loop=1, rule="none"), shaken=True)
    w = dict(model.named_parameters())
    h = w["wte.weight"][3]
    x = F.rms_norm(h, (16,), eps=1e-6) * w["blocks.0.attn_pre_norm.weight"]
    value = w["blocks.0.attn.qkv.weight"][32:] @ x  # the only position attends to itself with weight 1
    h = h + w["blocks.0.attn.proj.weight"] @ value
    x = F.rms_norm(h, (16,), eps=1e-6) * w["blocks.0.mlp_pre_norm.weight"]
    gate, up = (w["blocks.0.mlp.w_in.weight"] @ x).chunk(2)
    h = h + w["blocks.0.mlp.w_out.weight"] @ (F.silu(gate) * up)
    h = F.rms_norm(h, (16,), eps=1e-6) * w["final_norm.weight"]
    logits, _ = model(torch.tensor([[3]]))
    torch.testing.assert_close(logits[0, 0], w["wte.weight"] @ h, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_a_model_survives_pickling_and_copying(rule):
    """For worker processes and for averages of weights."""
    model = build(tiny(rule=rule))
    idx = tokens(model.config)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(other(idx)[0], model(idx)[0])


def graphs_of_compiled_blocks(model, *batch) -> int:
    """How many graphs torch.compile made of the blocks in one forward and backward."""
    torch.compiler.reset()
    graphs = []
    for block in model.blocks:
        block.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with torch.autocast("cpu", torch.bfloat16):
        model(*batch)[1].backward()
    return len(graphs)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [dict(), dict(rule="deeploop"), LOOM_PARTS], ids=["factored", "deeploop", "loom"])
def test_the_number_of_graphs_does_not_grow_with_the_loops(parts):
    """Dynamo unrolls Python loops; compiling the block keeps the loop outside. Experts in bfloat16, as on a GPU."""
    graphs = []
    for n_loop in (4, 16):
        model = build(tiny(n_loop=n_loop, n_embd=16, **parts), dtype=torch.float32)
        graphs.append(graphs_of_compiled_blocks(model, *example(model.config)))
    assert graphs[0] == graphs[1] <= 4


def graphs_so_far(calls) -> list[int]:
    """How many graphs torch.compile has made of the blocks after each call, a pair of a model and a loop count."""
    torch.compiler.reset()
    counter, counts = CompileCounter(), []
    for model, n_loop in calls:
        for block in model.blocks:
            block.compile(backend=counter)
        model(*example(model.config), n_loop=n_loop)[1].backward()
        counts.append(counter.frame_count)
    torch.compiler.reset()
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["factored", "sqrt", "deeploop"])
def test_another_loop_count_recompiles_nothing(rule):
    """Within a model the multipliers stay. Over models one graph holds the first, and one all others, as a symbol."""

    def model(n_loop):
        return build(tiny(n_loop=n_loop, rule=rule), dtype=torch.float32)

    one = model(3)
    assert graphs_so_far([(one, 3), (one, 6), (one, 12), (one, 1)]) == [1, 1, 1, 1]
    assert graphs_so_far([(model(n), n) for n in (1, 3, 6, 12)]) == [1, 2, 2, 2]
