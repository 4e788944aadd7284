"""The visits of shared weights, against separate copies of them."""

import pytest
import torch
from helpers import Reference, build, example, tiny, tokens

from minilooped.science import probes

MATRICES = (("attn.qkv.weight", "attn.proj.weight"), ("mlp.w_in.weight", "mlp.w_out.weight"))


@pytest.mark.parametrize("rule", ["none", "factored", "deepnorm", "deeploop"])
def test_visit_gradients_are_those_of_separate_copies_and_sum_to_the_shared_gradient(rule):
    config = tiny(rule=rule)
    model, (idx, targets) = build(config, shaken=True), example(config)
    reference = Reference(model)
    reference.losses(idx, targets)[0].backward()

    def scalars(logits):
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return torch.stack([-2 * loss, loss])

    found = probes.visit_gradients(model, idx, scalars)
    model(idx, targets)[1].backward()
    shared = [block.get_parameter(name).grad for block in model.blocks for pair in MATRICES for name in pair]
    assert len(found) == 2 * config.n_layer
    for j, gradients in enumerate(found):
        layer, names = j // 2, MATRICES[j % 2]
        for n in range(config.n_loop):
            own = torch.cat([reference.visits[n][layer][name].grad.flatten() for name in names])
            torch.testing.assert_close(gradients[1, n], own)
            torch.testing.assert_close(gradients[0, n], -2 * own)
        torch.testing.assert_close(gradients[1].sum(0), torch.cat([g.flatten() for g in shared[2 * j : 2 * j + 2]]))


def test_visit_gradients_wants_a_dense_model_and_leaves_it_as_it_was():
    config = tiny()
    model = build(config)
    probes.kappa(model, tokens(config))
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="needs a dense model: set n_expert to 0"):
        probes.kappa(build(tiny(n_expert=4)), tokens(config))


@pytest.mark.parametrize("R", [1, 2, 5])
def test_alignment_of_constructed_visits(R):
    generator = torch.Generator().manual_seed(R)
    one, other = torch.randn(2, 1, 7, generator=generator, dtype=torch.float64)
    same = one.expand(R, 7), other.expand(R, 7)
    assert probes.visit_alignment(same[0][None], same[1]) == pytest.approx(R)
    several = torch.stack([same[0], -3 * same[0]])  # two directions in the output, (S, R, P)
    assert probes.visit_alignment(several, same[1]) == pytest.approx(R)
    orthogonal = torch.linalg.qr(torch.randn(7, 7, generator=generator, dtype=torch.float64))[0][:R]
    assert probes.visit_alignment(5 * orthogonal[None], orthogonal) == pytest.approx(1)
    assert probes.visit_alignment(orthogonal[None], same[1]) == pytest.approx(R**0.5)
    if R == 2:
        assert probes.visit_alignment(torch.stack([one, -one], 1), same[1]) == 0
        # By hand: sums (3, 4) and (1, 1), largest norms 4 and 1.
        U, G = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        assert probes.visit_alignment(U, G) == pytest.approx(5 * 2**0.5 / (2 * 4))


def test_kappa_is_the_largest_of_the_sublayers_and_one_at_one_loop(monkeypatch):
    config = tiny(rule="deeploop", n_loop=4)
    model, idx = build(config), tokens(config)
    found = []
    measure = probes.visit_alignment
    monkeypatch.setattr(probes.gradients, "visit_alignment", lambda U, G: found.append(measure(U, G)) or found[-1])
    kappa = probes.kappa(model, idx, directions=2)
    assert len(found) == 4 and kappa == max(found) > min(found)
    assert kappa == probes.kappa(model, idx, directions=2)
    assert probes.kappa(build(tiny(n_loop=1)), idx) == pytest.approx(1)


def test_kappa_of_silent_branches_is_the_number_of_loops():
    """Where a branch adds next to nothing all visits see one stream."""
    for n_loop in (2, 5):
        config = tiny(rule="inverse", lam=None, n_loop=n_loop, embed_norm=True)
        model = build(config)
        with torch.no_grad():
            for block in model.blocks:
                block.branch = 1e-7
        assert probes.kappa(model, tokens(config)) == pytest.approx(n_loop, rel=1e-5)


def test_kappa_needs_a_direction_and_a_next_token():
    model, (idx, _) = build(tiny()), example(tiny())
    with pytest.raises(ValueError, match="directions=0 must be at least 1"):
        probes.kappa(model, idx, directions=0)
    with pytest.raises(ValueError, match="kappa needs a next token"):
        probes.kappa(model, idx[:, :1])


@pytest.mark.parametrize("rule", ["none", "deepnorm", "deeploop"])
def test_stream_gradients_are_those_of_the_stream_before_each_visit(rule):
    config = tiny(rule=rule)
    model, (idx, targets) = build(config, shaken=True), example(config)
    h, before = model.embed(idx), []
    for _ in range(config.n_loop):
        for block in model.blocks:
            h.retain_grad()
            before.append(h)
            h = block(h, rope=model.rope[:, : idx.shape[1]])[0]
    torch.nn.functional.cross_entropy(model.logits(h).flatten(0, 1), targets.flatten()).backward()
    expected = torch.stack([h.grad.norm() for h in before]).view(config.n_loop, config.n_layer)
    torch.testing.assert_close(probes.stream_gradients(model, idx, targets), expected)
