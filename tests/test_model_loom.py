"""LOOM's parts (arXiv 2610.01153), each a switch: re-injection, looping residual, loop-end norm, MoE output norm."""

import math

import pytest
import torch
from helpers import LOOM_PARTS, MOE, Reference, build, example, gradients, rms, tiny, tokens
from torch import Tensor

from minilooped.model import LoopedGPT


class Recorder:
    """What passes through the blocks, visit by visit, of a model with skip 1: all it needs is hooks."""

    def __init__(self, model: LoopedGPT):
        self.entered, self.attention, self.after_attention, self.arguments = [], [], [], []
        for block in model.blocks:
            block.register_forward_pre_hook(self.enter)
            block.attn.register_forward_hook(lambda module, args, out: self.attention.append(out))
            block.mlp_pre_norm.register_forward_pre_hook(lambda module, args: self.after_attention.append(args[0]))

    def enter(self, module, args):
        self.entered.append(args[0])
        self.arguments.append(args)

    @property
    def updates(self) -> list[Tensor]:
        """What each visit's attention branch added to the stream."""
        return [after - before for before, after in zip(self.entered, self.after_attention, strict=True)]


def run(model: LoopedGPT, **options) -> tuple[Recorder, list[Tensor]]:
    recorder = Recorder(model)
    *_, states = model(tokens(model.config), return_states=True, **options)
    return recorder, states


# ----------------------------------------------------------------------------------------------------------------------
# Re-injection: z <- (1 - g_t) z + g_t x0, g_t = reinject_lam / (t sqrt L), at the start of loops t = 2, 3, ...


def measured_gains(n_loop: int, **changes) -> list[float]:
    """g_t for t = 2..n_loop, read from the stream: how far each loop's start lies between the last state and x0."""
    model = build(tiny(n_loop=n_loop, n_embd=8, n_head=1, n_inner=4, vocab_size=5, reinject=True, **changes))
    recorder, states = run(model)
    starts = recorder.entered[:: model.config.n_layer]
    x0 = starts[0]
    gains = []
    for state, start in zip(states[:-1], starts[1:], strict=True):
        toward = x0 - state
        gains.append((((start - state) * toward).sum() / toward.square().sum()).item())
        torch.testing.assert_close(start, state + gains[-1] * toward, rtol=1e-9, atol=1e-9)  # nothing else is mixed in
    return gains


@pytest.mark.parametrize(
    "n_layer, table", [(10, [0.0791, 0.0527, 0.0395, 0.0176, 0.0132]), (15, [0.0645, 0.0430, 0.0323, 0.0143, 0.0108])]
)
def test_reinjection_gain_table(n_layer, table):
    """lambda = 0.5, at t = 2, 3, 4, 9, 12; decreasing."""
    gains = measured_gains(12, n_layer=n_layer, rule="loom")
    assert [gains[t - 2] for t in (2, 3, 4, 9, 12)] == pytest.approx(table, abs=6e-5)
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("reinject_lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rule", ["none", "factored", "deepnorm"])
def test_reinjection_gain_has_its_own_constant(rule, reinject_lam):
    """Neither the rule nor its lambda enters."""
    gains = measured_gains(5, n_layer=2, rule=rule, lam=0.11, reinject_lam=reinject_lam)
    assert gains == pytest.approx([reinject_lam / (t * math.sqrt(2)) for t in range(2, 6)], abs=1e-9)


def test_reinjection_gain_is_clamped_to_one():
    """5 / (t sqrt 2) = 1.77, 1.18, 0.88 at t = 2, 3, 4."""
    assert measured_gains(4, n_layer=2, rule="none", reinject_lam=5.0) == pytest.approx([1, 1, 5 / (4 * 2**0.5)])


def test_first_loop_starts_from_the_embedding_untouched():
    model = build(tiny(reinject=True, reinject_lam=5.0, embed_norm=False))
    recorder, _ = run(model)
    assert torch.equal(recorder.entered[0], model.wte.weight[tokens(model.config)])
    assert model.reinjection_gain(0) == 0


def test_embedding_is_a_fixed_point_of_reinjection():
    """z = x0 stays x0, exactly: blocks that add nothing (ReZero at init) leave every state at the embedding."""
    _, states = run(build(tiny(rule="rezero", n_loop=6, reinject=True)))
    assert all(torch.equal(state, states[0]) for state in states)


def test_reinjected_embedding_is_the_normed_one():
    """x0 is what entered the first loop: of unit RMS under `embed_norm`, and with gain 1 the loop starts there."""
    recorder, _ = run(build(tiny(reinject=True, reinject_lam=100.0, embed_norm=True)))
    first, *others = recorder.entered[::2]
    assert rms(first) == pytest.approx(1, rel=1e-3)
    for start in others:
        torch.testing.assert_close(start, first, rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# Looping residual: with o the scaled attention output of a visit,
#   local  N <- beta N + o, D <- beta D + 1, r_l = N/D, cleared at every loop start;
#   global N <- beta N + r_l, D <- beta D + 1, r_g = N/D, kept; the stream gets r_l + r_g in place of o.


def ema_weights(m: int, beta: float) -> list[float]:
    """w_j = beta^(m-j) (1 - beta) / (1 - beta^m), j = 1..m."""
    return [beta ** (m - j) * (1 - beta) / (1 - beta**m) for j in range(1, m + 1)]


def test_closed_form_weights_of_the_ema():
    """beta = 0.5: (1/3, 2/3) and (1/7, 2/7, 4/7); they sum to 1."""
    assert ema_weights(2, 0.5) == pytest.approx([1 / 3, 2 / 3])
    assert ema_weights(3, 0.5) == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    assert sum(ema_weights(9, 0.9)) == pytest.approx(1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("rule", ["none", "factored", "loom", "layernorm_scaling"])
def test_looping_residual_has_the_closed_form_weights(rule, beta):
    """Local: over the writes of its own loop only. Global: over the local readings of all visits so far."""
    config = tiny(rule=rule, loop_residual=beta, n_layer=3, n_loop=4)
    recorder, _ = run(build(config, shaken=True))
    branch = {"none": 1, "factored": 1 / (4 * 3**0.5), "loom": 0.5 / (4 * 3**0.5), "layernorm_scaling": 1}[rule]
    outputs = [branch * o for o in recorder.attention]
    local_readings = []
    for visit, update in enumerate(recorder.updates):
        m = visit % 3 + 1
        own_loop = outputs[visit - m + 1 : visit + 1]
        local_readings.append(sum(w * o for w, o in zip(ema_weights(m, beta), own_loop, strict=True)))
        weights = ema_weights(visit + 1, beta)
        global_reading = sum(w * r for w, r in zip(weights, local_readings, strict=True))
        torch.testing.assert_close(update, local_readings[-1] + global_reading, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_constant_attention_output_gives_exactly_twice_it(beta):
    """Weights sum to 1 in both memories, so r_l = r_g = o for any beta: the update is 2 o at every visit."""
    model = build(tiny(rule="inverse", loop_residual=beta, bias=True, n_layer=3, n_loop=4))
    with torch.no_grad():
        for block in model.blocks:
            block.attn.proj.weight.zero_()
            block.attn.proj.bias.copy_(torch.linspace(-1, 1, 16))
    recorder, _ = run(model)
    for update in recorder.updates:
        torch.testing.assert_close(update, (2 * torch.linspace(-1, 1, 16) / 4).double().expand(2, 12, 16))


def test_zero_decay_doubles_every_attention_update():
    """beta = 0 remembers the last write only: r_l = r_g = o, not the plain residual, which is None."""
    recorder, _ = run(build(tiny(rule="none", loop_residual=0.0), shaken=True))
    for update, output in zip(recorder.updates, recorder.attention, strict=True):
        torch.testing.assert_close(update, 2 * output, rtol=1e-12, atol=1e-12)


def test_looping_residual_off_is_bypassed_bit_for_bit():
    """None: the stream gets o itself, and no memory is made."""
    recorder, _ = run(build(tiny(rule="none", loop_residual=None), shaken=True))
    for before, output, after in zip(recorder.entered, recorder.attention, recorder.after_attention, strict=True):
        assert torch.equal(after, before + output)
    assert all(memory_tensors(args) == [] for args in recorder.arguments)


def memory_tensors(args) -> list[Tensor]:
    """Tensors in a block's arguments beyond the stream and the rotary table: what it is handed of the memories."""
    found, stack = [], list(args[1:])
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor) and item.shape[-1:] == args[0].shape[-1:] and item.dim() == 3:
            found.append(item)
        elif isinstance(item, tuple | list):
            stack += item
    return found


def test_memory_does_not_grow_with_the_loops():
    """One tensor each for the local and the global memory, however many visits there are."""
    for n_loop in (2, 9):
        recorder, _ = run(build(tiny(n_loop=n_loop, loop_residual=0.5)))
        assert {len(memory_tensors(args)) for args in recorder.arguments} == {2}


@pytest.mark.parametrize("cast", ["autocast", "bfloat16"])
def test_memories_are_float32_in_bfloat16(cast):
    model = build(tiny(loop_residual=0.5), dtype=torch.bfloat16 if cast == "bfloat16" else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast == "autocast"):
        recorder, states = run(model)
    memories = [m for args in recorder.arguments for m in memory_tensors(args)]
    assert memories and {m.dtype for m in memories} == {torch.float32}
    assert all(state.isfinite().all() for state in states)


def test_looping_residual_acts_on_attention_only():
    """The MLP's update is the plain one: branch * MLP(norm(h))."""
    model = build(tiny(rule="none", n_layer=1, loop_residual=0.5), shaken=True)
    outputs = []
    model.blocks[0].mlp.register_forward_hook(lambda module, args, out: outputs.append(out))
    recorder, states = run(model)
    for state, middle, output in zip(states, recorder.after_attention, outputs, strict=True):
        assert torch.equal(state, middle + output)


def test_gradient_flows_through_the_memories():
    """Earlier visits reach the loss through later reads too: the gradient is that of the written-out memories."""
    config = tiny(rule="none", loop_residual=0.9)
    model = build(config, shaken=True)
    reference = Reference(model)
    idx, targets = example(config)
    model(idx, targets)[1].backward()
    reference.losses(idx, targets)[0].backward()
    for name, grad in reference.gradients().items():
        torch.testing.assert_close(gradients(model)[name], grad, rtol=1e-8, atol=1e-10)


# ----------------------------------------------------------------------------------------------------------------------
# Loop-end norm, norm on the MoE output


@pytest.mark.parametrize("rule", ["none", "loom", "deepnorm"])
def test_loop_end_norm_gives_every_state_unit_rms(rule):
    """Of every token, after every loop; without a parameter."""
    model = build(tiny(rule=rule, loop_end_norm=True, init_std=1.0), shaken=True)
    _, states = run(model)
    for state in states:
        torch.testing.assert_close(state.square().mean(dim=-1), torch.ones(2, 12).double(), rtol=1e-4, atol=0)
    assert model.num_params() == build(tiny(rule=rule)).num_params()


def test_loop_end_norm_closes_the_loop_and_not_the_block():
    """The second block still sees a stream that has grown."""
    model = build(tiny(rule="none", loop_end_norm=True, embed_norm=True), shaken=True)
    recorder, _ = run(model)
    firsts, seconds = recorder.entered[::2], recorder.entered[1::2]
    assert all(rms(z) == pytest.approx(1, rel=1e-4) for z in firsts)
    assert all(rms(z) > 1.2 for z in seconds)


def test_without_loop_end_norm_the_unscaled_stream_grows():
    _, states = run(build(tiny(rule="none", n_loop=12, embed_norm=True, init_std=1.0)))
    assert rms(states[-1]) > 5 * rms(states[0])


def test_norm_on_the_moe_output_fixes_its_size():
    """Parameter 1: the update has unit RMS times the branch, whatever the size of the experts."""
    config = tiny(rule="inverse", n_layer=1, moe_out_norm=True, **MOE)
    model = build(config)
    with torch.no_grad():
        for name, parameter in model.blocks[0].mlp.named_parameters():
            if "router" not in name:
                parameter *= 10
    recorder, states = run(model)
    for middle, state in zip(recorder.after_attention, states, strict=True):
        assert rms(state - middle) == pytest.approx(1 / 3, rel=1e-3)


def test_norm_on_the_moe_output_is_learned():
    config = tiny(moe_out_norm=True, **MOE)
    assert build(config).num_params() == build(tiny(**MOE)).num_params() + 2 * 16


# ----------------------------------------------------------------------------------------------------------------------
# Together


def test_loom_rule_switches_none_of_the_parts_on():
    """It sets the scale, and the embedding's norm: with gamma = 1 by lambda it is the plain normed stack."""
    config = tiny(rule="loom", lam=3 * 2**0.5)
    plain = tiny(rule="none", embed_norm=True)
    idx = tokens(config)
    torch.testing.assert_close(build(config)(idx)[0], build(plain)(idx)[0], rtol=1e-12, atol=1e-12)


PARTS = {
    "reinject": dict(reinject=True),
    "loop_residual": dict(loop_residual=0.5),
    "loop_end_norm": dict(loop_end_norm=True),
    "moe_out_norm": dict(moe_out_norm=True),
    "router": dict(router="per_loop", router_init="independent"),
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_a_switch_of_its_own(part):
    """Alone it changes the function of N = 3 loops, and the equations still hold."""
    plain, config = tiny(rule="loom", **MOE), tiny(rule="loom", **MOE, **PARTS[part])
    model, idx = build(config, shaken=True), tokens(config)
    reference = Reference(model)
    expected = reference.readout(reference.loops(idx)[-1][0])
    torch.testing.assert_close(model.eval()(idx)[0], expected, rtol=1e-9, atol=1e-9)
    model = build(config)
    same_start = build(plain)
    same_start.load_state_dict(
        {k: v[:1] if k.endswith("router.weight") else v for k, v in model.state_dict().items() if "out_norm" not in k}
    )
    assert not torch.equal(model.eval()(idx)[0], same_start.eval()(idx)[0])


def test_full_recipe_trains():
    """All parts, three segments of one loop, a step after each: the loss on one batch falls."""
    config = tiny(rule="loom", segment=1, tie_embeddings=False, gate="sigmoid", **LOOM_PARTS)
    model = build(config, dtype=torch.float32)
    idx, targets = example(config)
    optimizer = model.configure_optimizer(lr=3e-3, weight_decay=0.1)
    history = []
    for _ in range(30):
        for loss in model.segment_losses(idx, targets):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.7 * history[0]
