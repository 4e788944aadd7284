"""The mixture of experts: routing, dispatch, balancing, and one router per loop."""

import pytest
import torch
from helpers import MOE, Reference, build, example, gradients, tiny, tokens
from torch import Tensor
from torch.nn import functional as F


def moe_model(dtype=torch.float64, shaken: bool = True, **changes):
    return build(tiny(**(MOE | changes)), dtype=dtype, shaken=shaken)


def inputs(dtype=torch.float64, batch: int = 2, length: int = 12, seed: int = 3) -> Tensor:
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def routings(model) -> list:
    """Fills up with one routing per visit as the model runs."""
    seen = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda module, args, out: seen.append(out[1]))
    return seen


# ----------------------------------------------------------------------------------------------------------------------
# Dispatch: sorted tokens and stacked experts against every expert for every token

TOLERANCE = {
    torch.float64: dict(rtol=1e-10, atol=1e-10),
    torch.float32: dict(rtol=1e-4, atol=1e-5),
    torch.bfloat16: dict(rtol=0.05, atol=0.05),
}


def assert_equals_dense_reference(model, x: Tensor, loop: int = 0):
    """Value and every gradient, of one MoE layer, in float64 on the same weights and inputs."""
    exact = Reference(model.double())
    w, x_exact = exact.visits[0][0], x.double().clone().requires_grad_()
    y_exact, aux = exact.experts(x_exact, w, loop + 1, exact.balance_bias[0]["mlp.router.bias"])
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (y_exact * direction).sum().backward()

    layer, x = model.to(x.dtype).blocks[0].mlp, x.clone().requires_grad_()
    y, routing = layer(x, loop)
    (y * direction.to(y.dtype)).sum().backward()
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(y.double(), y_exact, **tolerance)
    torch.testing.assert_close(routing.aux_loss.double(), aux, **tolerance)
    for found, expected in [(x.grad, x_exact.grad)] + [
        (p.grad, w[f"mlp.{name}"].grad) for name, p in layer.named_parameters()
    ]:
        spread = expected.abs().max().clamp_min(1e-6)  # gradients are compared relative to their largest entry
        torch.testing.assert_close(found.double() / spread, expected / spread, **tolerance)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("n_expert_shared", [0, 2])
@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_layer_equals_the_dense_reference(dtype, gate, n_expert_shared, top_k, mlp):
    """k = 1, k = 2 and k = n_expert; float64 loops over groups, the others use the grouped product."""
    model = moe_model(gate=gate, n_expert_shared=n_expert_shared, top_k=top_k, mlp=mlp, balance="switch")
    model = model.to(dtype)  # the reference then gets the rounded weights
    assert_equals_dense_reference(model, inputs(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["one_token", "one_expert", "zero_load"])
def test_odd_loads_equal_the_dense_reference(case, dtype):
    """One token; a single expert; experts that no token chooses, whose gradient is then zero, not missing."""
    model = moe_model(top_k=1, n_expert=1 if case == "one_expert" else 4).to(dtype)
    if case == "zero_load":
        with torch.no_grad():
            model.blocks[0].mlp.router.bias.copy_(torch.tensor([-9.0, 0.0, 9.0, -9.0]))
    x = inputs(dtype, *((1, 1) if case == "one_token" else ()))
    assert_equals_dense_reference(model, x)
    load = model.blocks[0].mlp(x)[1].load
    assert load.tolist() == {"zero_load": [0, 0, 24, 0], "one_expert": [24]}.get(case, load.tolist())
    for stack in model.blocks[0].mlp.experts.parameters():
        assert (stack.grad.flatten(1).abs().sum(dim=1) > 0).tolist() == (load > 0).tolist()


@pytest.fixture
def grouped_calls(monkeypatch) -> list:
    calls, original = [], F.grouped_mm
    monkeypatch.setattr(
        F, "grouped_mm", lambda *args, **kwargs: calls.append(args[0].dtype) or original(*args, **kwargs)
    )
    return calls


@pytest.mark.parametrize(
    "dtype, n_inner, grouped",
    [
        (torch.float32, 8, True),
        (torch.bfloat16, 8, True),
        (torch.float64, 8, False),
        (torch.float32, 5, False),
        (torch.bfloat16, 5, False),
    ],
)
def test_grouped_product_where_dtype_and_alignment_allow(grouped_calls, dtype, n_inner, grouped):
    """Rows that are no multiple of 16 bytes, and float64, take the loop over the sorted groups; both are right."""
    model = moe_model(n_inner=n_inner).to(dtype)
    assert_equals_dense_reference(model, inputs(dtype))
    assert (dtype in grouped_calls) == grouped


def test_grouped_product_runs_in_bfloat16_under_autocast(grouped_calls):
    model = moe_model(dtype=torch.float32)
    x = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = model.blocks[0].mlp(x)[0]
    assert set(grouped_calls) == {torch.bfloat16}
    torch.testing.assert_close(y.float(), model.blocks[0].mlp(x)[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_grouped_product_the_groups_are_looped_over(monkeypatch, dtype):
    """An older torch lacks the operator: same result, an expert without tokens included."""
    monkeypatch.delattr(F, "grouped_mm")
    model = moe_model(top_k=1).to(dtype)
    with torch.no_grad():
        model.blocks[0].mlp.router.bias[1] = -9
    assert_equals_dense_reference(model, inputs(dtype))


def test_dispatch_does_not_depend_on_the_batch():
    """No capacity, no dropped token: a token's output is the same alone as among others that want its experts."""
    layer, x = moe_model().blocks[0].mlp, inputs()
    together = layer(x)[0]
    for b, t in ((0, 0), (1, 7)):
        torch.testing.assert_close(layer(x[b : b + 1, t : t + 1])[0][0, 0], together[b, t], rtol=1e-12, atol=1e-12)
    crowd = x[:1, :1].expand(2, 12, 16)
    torch.testing.assert_close(layer(crowd)[0], together[0, 0].expand(2, 12, 16), rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# Routing


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("n_expert, top_k", [(4, 1), (4, 2), (4, 4), (30, 6)])
def test_every_token_gets_k_different_experts_and_weights_that_sum_to_one(n_expert, top_k, gate):
    """Except for k = 1, whose weight is the score itself."""
    layer, x = moe_model(n_expert=n_expert, top_k=top_k, gate=gate).blocks[0].mlp, inputs()
    routing = layer(x)[1]
    assert routing.choice.shape == routing.weight.shape == (24, top_k)
    assert all(len(set(row)) == top_k for row in routing.choice.tolist())
    assert routing.load.tolist() == routing.choice.flatten().bincount(minlength=n_expert).tolist()
    logits = x.view(24, 16) @ layer.router.weight[0].T
    score = logits.softmax(dim=-1) if gate == "softmax" else logits.sigmoid()
    best = score.topk(top_k).values
    expected = best / best.sum(dim=-1, keepdim=True) if top_k > 1 else best
    torch.testing.assert_close(routing.weight.sort(descending=True).values, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_router_learns_from_the_cross_entropy_alone(gate, top_k):
    """At k = 1 a renormalised weight would be the constant 1 and this gradient zero."""
    model = moe_model(top_k=top_k, gate=gate, balance="none", z_coef=0.0)
    idx, targets = example(model.config)
    model(idx, targets)[1].backward()
    assert all(block.mlp.router.weight.grad.abs().max() > 1e-6 for block in model.blocks)


def test_shared_experts_see_every_token_with_weight_one():
    """Without routed output the layer is the sum of the shared experts, each an MLP of the experts' width."""
    layer, x = moe_model(n_expert_shared=2).blocks[0].mlp, inputs()
    with torch.no_grad():
        layer.experts.w_out.zero_()
    w_in, w_out = layer.shared.w_in.weight, layer.shared.w_out.weight
    gate, up = w_in.chunk(2)
    each = [(F.silu(x @ gate[part].T) * (x @ up[part].T)) @ w_out[:, part].T for part in (slice(0, 8), slice(8, 16))]
    torch.testing.assert_close(layer(x)[0], each[0] + each[1], rtol=1e-10, atol=1e-10)


def test_routing_is_decided_in_float32_under_autocast():
    """bfloat16 scores would tie and flip: the choices are those of the float32 router."""
    model = moe_model(dtype=torch.float32, n_expert=64, n_inner=8, balance="switch")
    layer, x = model.blocks[0].mlp, inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)[1]
    for one, other in zip(mixed, layer(x)[1], strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


# ----------------------------------------------------------------------------------------------------------------------
# Balancing by a bias: added to the scores for selection only; moved once per update, by the loads collected since


def test_bias_changes_the_selection_and_not_the_weights():
    layer, x = moe_model().blocks[0].mlp, inputs()
    with torch.no_grad():
        layer.router.bias.copy_(torch.tensor([0.0, 5.0, 5.0, 0.0]))
    routing = layer(x)[1]
    assert routing.load.tolist() == [0, 24, 24, 0]
    score = (x.view(24, 16) @ layer.router.weight[0].T).softmax(dim=-1)[:, 1:3]
    expected = score / score.sum(dim=-1, keepdim=True)
    order = routing.choice.argsort(dim=-1)
    torch.testing.assert_close(routing.weight.gather(1, order), expected, rtol=1e-10, atol=1e-12)


def biases(model) -> Tensor:
    return torch.stack([block.mlp.router.bias.clone() for block in model.blocks])


def buffers(model) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def loads_of(visits: list) -> Tensor:
    """Loads summed over visits, which run loop by loop, two layers each: (L, E)."""
    return torch.stack([routing.load for routing in visits]).view(-1, 2, 4).sum(dim=0)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("router", ["shared", "per_loop"])
def test_bias_moves_one_step_by_the_loads_of_all_forwards_since_the_last_move(router, top_k):
    """bias <- bias + balance_coef * sign(mean load - load), one per layer, shared by loops and micro-batches."""
    model = moe_model(balance_coef=0.125, router=router, router_init="independent", top_k=top_k)
    expected = biases(model)
    assert expected.shape == (2, 4)
    for micro_batches in (1, 3, 0):  # the second move knows nothing of the first, and the third has nothing to go by
        seen = routings(model)
        for seed in range(micro_batches):
            idx = tokens(model.config, seed=seed)
            model(idx, idx)
        loads = loads_of(seen).double() if seen else torch.zeros(2, 4).double()
        step = 0.125 * torch.sign(loads.mean(dim=1, keepdim=True) - loads)
        assert step.any() == (micro_batches > 0)
        model.move_biases()
        expected = expected + step
        torch.testing.assert_close(biases(model), expected, rtol=0, atol=0)


def test_an_expert_with_exactly_the_mean_load_keeps_its_bias():
    """Also where float32 could not tell: 2^24 + 1 of 3 (2^24 + 1) + 3 tokens, say."""
    router = moe_model(balance_coef=0.125, dtype=torch.float32).blocks[0].mlp.router
    router.move_bias(torch.tensor([2**24 + 1, 2**24 + 2, 2**24, 2**24 + 1]))
    assert router.bias.tolist() == [0, -0.125, 0.125, 0]


MODES_OF_TRAINING = {
    "one loss": {},
    "segments": dict(segment=1),
    "recomputed": dict(recompute_loops=True),
    "recomputed segments": dict(recompute_loops=True, segment=2),
}


@pytest.mark.parametrize("mode", MODES_OF_TRAINING)
def test_a_training_pass_collects_each_load_once_and_changes_nothing_else(mode):
    """Recomputation runs every loop again in the backward pass, and must not count it again."""
    model = moe_model(**MODES_OF_TRAINING[mode])
    before, seen, loads = buffers(model), routings(model), 0
    for loss in model.segment_losses(*example(model.config)):
        loads = loads + loads_of(seen)
        loss.backward()
        seen.clear()
    after = buffers(model)
    for layer, load in enumerate(loads):
        assert torch.equal(after.pop(name := f"blocks.{layer}.mlp.router.collected"), load)
        assert load.sum() == 3 * 24 * 2 and not before.pop(name).any()
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items()) and after.keys() == before.keys()


@pytest.mark.parametrize("balance", ["switch", "none"])
def test_bias_stays_zero_under_other_balancing(balance):
    model = moe_model(balance=balance)
    model(*example(model.config))
    model.move_biases()
    assert torch.equal(biases(model), torch.zeros(2, 4).double())


def test_a_dense_model_has_no_bias_to_move():
    model = build(tiny())
    model(*example(model.config))
    model.move_biases()
    model.forget_loads()


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode", "generate", "forgotten"])
def test_a_forward_that_no_update_follows_changes_nothing(how):
    """In train mode too, where no gradient is wanted."""
    model = moe_model()
    before, (idx, targets) = buffers(model), example(model.config)
    model.train(how != "eval")
    if how == "generate":
        model.generate(idx[:, :3], 4)
    else:
        with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how, torch.enable_grad)():
            model(idx, targets)
            list(model.segment_losses(idx, targets))
    if how == "forgotten":
        model.forget_loads()
    after = buffers(model)
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())
    model.move_biases()
    assert not biases(model).any()


@pytest.mark.slow
def test_a_compiled_block_collects_the_same_loads():
    plain, compiled = (moe_model(n_embd=16, dtype=torch.float32) for _ in range(2))
    for block in compiled.blocks:
        block.compile(backend="aot_eager")
    for model in (plain, compiled):
        model(*example(model.config))[1].backward()
        model.move_biases()
    assert biases(plain).any() and torch.equal(biases(plain), biases(compiled))


def test_bias_is_a_saved_buffer_outside_autograd():
    model = moe_model()
    assert not [name for name, _ in model.named_parameters() if name.endswith("router.bias")]
    assert len([name for name in model.state_dict() if name.endswith("router.bias")]) == 2
    assert not [name for name in model.state_dict() if "collected" in name], "empty whenever a checkpoint is made"
    model(*example(model.config))[1].backward()
    assert all(
        block.mlp.router.bias.grad_fn is None and not block.mlp.router.bias.requires_grad for block in model.blocks
    )


def test_balancing_evens_out_the_loads():
    """20 steps from a lopsided router: the bias has moved and the variance of the loads has fallen."""
    model = moe_model(balance_coef=0.05, n_expert=4, top_k=1)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.router.weight[0, 0] += 0.5 * block.mlp_pre_norm.weight
    idx, targets = example(model.config, batch=8)
    seen = routings(model)
    for _ in range(20):
        model(idx, targets)
        model.move_biases()
    loads = torch.stack([r.load for r in seen]).double().view(20, 3, 2, 4).sum(dim=1)  # (steps, layers, experts)
    variance = loads.var(dim=-1).mean(dim=1)
    assert biases(model).abs().max() > 0.1
    assert variance[-5:].mean() < 0.5 * variance[0]


# ----------------------------------------------------------------------------------------------------------------------
# Auxiliary losses


def auxiliary(model) -> float:
    """What train mode adds to the cross-entropy."""
    idx, targets = example(model.config)
    trained = model(idx, targets)[1]
    return (trained - model.eval()(idx, targets)[1]).item()


def scores_of(*rows: list[float]) -> tuple:
    """A router whose logits for one-hot tokens are the given rows, and those tokens."""
    model = moe_model(n_expert=4, top_k=1, balance="switch", balance_coef=1.0, z_coef=0.0)
    logits = torch.tensor(rows, dtype=torch.float64)  # (S, E)
    router = model.blocks[0].mlp.router
    with torch.no_grad():
        router.weight.zero_()
        router.weight[0, :, : len(rows)] = logits.T
    return router, torch.eye(16, dtype=torch.float64)[: len(rows)]


def test_switch_loss_by_hand():
    """E sum_e f_e P_e. Tokens with scores (.7,.1,.1,.1), (.7,.1,.1,.1), (.1,.7,.1,.1): f = (2/3, 1/3, 0, 0),
    P = (.5, .3, .1, .1), so 4 (1/3 + 1/10) = 26/15."""
    high, low = torch.tensor([0.7, 0.1]).double().log().tolist()
    a, b = [high, low, low, low], [low, high, low, low]
    router, x = scores_of(a, a, b)
    assert router(x, 0).aux_loss.item() == pytest.approx(26 / 15)


def test_switch_loss_is_one_when_balanced_and_rises_when_lopsided():
    """Same scores up to a permutation of the experts: only the assignment differs."""
    values = []
    for favourites in ([0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 0, 1], [0, 0, 0, 0]):
        router, x = scores_of(*[[2.0 if e == f else 0.0 for e in range(4)] for f in favourites])
        values.append(router(x, 0).aux_loss.item())
    assert values[0] == pytest.approx(1)
    assert values == sorted(values) and len(set(values)) == 4


def test_switch_loss_alone_gives_the_router_a_gradient():
    """And its weight changes the total by exactly its share."""
    model = moe_model(balance="switch", z_coef=0.0)
    seen = routings(model)
    idx, targets = example(model.config)
    model(idx, targets)
    sum(r.aux_loss for r in seen).backward()
    assert all(block.mlp.router.weight.grad.abs().max() > 1e-9 for block in model.blocks)
    losses = [auxiliary(moe_model(balance="switch", z_coef=0.0, balance_coef=coef)) for coef in (0.0, 0.01, 0.02)]
    assert losses[0] == pytest.approx(0, abs=1e-12)
    assert losses[1] >= 0.009  # about 1 for a fair router
    assert losses[2] == pytest.approx(2 * losses[1])


def test_z_loss_is_the_mean_squared_logsumexp():
    """z_coef * mean over tokens of logsumexp(logits)^2, the mean over visits (arXiv 2202.08906)."""
    model = moe_model(balance="none", z_coef=0.25)
    inputs_of_experts = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda module, args, out: inputs_of_experts.append((module, args[0])))
    found = auxiliary(model)
    values = [
        (x.reshape(-1, 16) @ layer.router.weight[0].T).logsumexp(dim=-1).square().mean()
        for layer, x in inputs_of_experts[:6]
    ]
    assert found == pytest.approx(0.25 * (sum(values) / 6).item())


@pytest.mark.parametrize("n_loop", [1, 4])
def test_auxiliary_losses_are_means_over_visits(n_loop):
    """ReZero at init repeats the same visit N times: the auxiliary loss does not depend on N."""
    changes = dict(rule="rezero", balance="switch", balance_coef=0.3, z_coef=0.2, shaken=False)
    assert auxiliary(moe_model(n_loop=n_loop, **changes)) == pytest.approx(auxiliary(moe_model(n_loop=2, **changes)))


def test_auxiliary_losses_are_absent_in_eval_mode_and_without_experts():
    """There the loss is the cross-entropy alone."""
    model = moe_model(balance="switch", balance_coef=1.0, z_coef=1.0).eval()
    idx, targets = example(model.config)
    logits, loss = model(idx, targets)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100))
    assert auxiliary(build(tiny(balance="switch", z_coef=1.0))) == 0


# ----------------------------------------------------------------------------------------------------------------------
# One router per loop


def test_copied_routers_decide_alike_on_equal_input_at_step_zero():
    layer, x = moe_model(router="per_loop", shaken=False).blocks[0].mlp, inputs()
    first, *others = [layer(x, loop)[1] for loop in range(3)]
    for other in others:
        assert torch.equal(first.choice, other.choice) and torch.equal(first.weight, other.weight)


def test_independent_routers_differ_at_step_zero():
    layer, x = moe_model(router="per_loop", router_init="independent", shaken=False).blocks[0].mlp, inputs()
    routing = [layer(x, loop)[1] for loop in range(3)]
    assert all(not torch.equal(routing[a].choice, routing[b].choice) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_layers_have_different_routers_at_init():
    """Copies are made over the loops of one layer, not over the layers."""
    one, two = (block.mlp.router.weight for block in moe_model(router="per_loop", shaken=False).blocks)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("n_loop", [1, 3, 5])
def test_router_parameters(n_loop):
    """N E C per layer, or E C if shared; the experts are there once."""
    for router, count in (("per_loop", n_loop), ("shared", 1)):
        layer = moe_model(router=router, n_loop=n_loop).blocks[0].mlp
        assert layer.router.weight.numel() == count * 4 * 16
        assert sum(p.numel() for p in layer.experts.parameters()) == 4 * (16 * 2 * 8 + 8 * 16)


def test_router_gets_its_gradient_from_its_own_loop_only():
    """The loss after N' loops reaches the first N' routers and no other; each gradient is that loop's own."""
    model = moe_model(router="per_loop")
    idx, targets = example(model.config)
    reference = Reference(model, 2)
    model(idx, targets, n_loop=2)[1].backward()
    reference.losses(idx, targets)[0].backward()
    for layer, block in enumerate(model.blocks):
        grad = block.mlp.router.weight.grad
        assert (grad.flatten(1).abs().sum(dim=1) > 0).tolist() == [True, True, False]
        for loop in range(2):
            own = reference.visits[loop][layer]["mlp.router.weight"].grad[loop]
            torch.testing.assert_close(grad[loop], own, rtol=1e-8, atol=1e-11)


def test_shared_router_is_visited_by_every_loop():
    """Its gradient is the sum over the loops of an untied copy's."""
    model = moe_model(router="shared")
    idx, targets = example(model.config)
    reference = Reference(model)
    model(idx, targets)[1].backward()
    reference.losses(idx, targets)[0].backward()
    for layer in range(2):
        parts = [visit[layer]["mlp.router.weight"].grad for visit in reference.visits]
        assert all(part.abs().max() > 0 for part in parts)
        torch.testing.assert_close(
            gradients(model)[f"blocks.{layer}.mlp.router.weight"], sum(parts), rtol=1e-8, atol=1e-11
        )


def test_loop_t_asks_router_t():
    """Swapping two routers swaps their loops' choices on equal input."""
    model = moe_model(router="per_loop", router_init="independent", shaken=False, rule="rezero", balance="none")
    seen, idx = routings(model), tokens(model.config)
    model(idx)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.router.weight.copy_(block.mlp.router.weight[[1, 0, 2]])
    model(idx)
    before, after = seen[:6], seen[6:]
    for visit, other in ((0, 2), (1, 3), (2, 0), (3, 1), (4, 4), (5, 5)):  # visits run loop by loop, two layers each
        assert torch.equal(after[visit].choice, before[other].choice)
