"""Which experts the loops choose, against sets counted by hand."""

import itertools
import json

import pytest
import torch
from helpers import build, tiny
from small_models import moe

from minilooped.model import LoopedConfig, Router
from minilooped.science import probes


@pytest.mark.parametrize("n_loop", [None, 1, 5])
def test_routing_has_one_record_per_visit_and_loads_that_count_its_choices(n_loop):
    model, idx = moe(), torch.arange(10).view(2, 5)
    choices, loads = probes.routing(model, idx, n_loop=n_loop)
    N = n_loop or 3
    assert choices.shape == (N, 2, 2, 5, 2) and loads.shape == (N, 2, 5)
    for loop in range(N):
        for layer in range(2):
            assert torch.equal(loads[loop, layer], choices[loop, layer].flatten().bincount(minlength=5))


def test_routing_is_what_the_routers_choose_along_the_loop():
    model, idx = moe().eval(), torch.arange(10).view(2, 5)
    choices, _ = probes.routing(model, idx)
    with torch.no_grad():
        h = x0 = model.embed(idx)
        for loop in range(3):
            h, _, visits = model.run_loop(h, loop, x0)
            for layer, visit in enumerate(visits):
                assert torch.equal(choices[loop, layer].view(10, 2), visit.choice)


def test_routing_leaves_no_hook_and_no_mode_behind_and_moves_no_bias():
    model = moe().train()
    probes.routing(model, torch.arange(10).view(2, 5))
    assert model.training
    for block in model.blocks:
        assert not block.mlp.router._forward_hooks and not block.mlp.router.bias.any()
    with pytest.raises(ValueError, match="block_size"):
        probes.routing(model, torch.zeros(1, 9, dtype=torch.long))
    assert model.training and not any(block.mlp.router._forward_hooks for block in model.blocks)


def test_routing_of_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="n_expert"):
        probes.routing(moe(n_expert=0, router="shared"), torch.zeros(1, 2, dtype=torch.long))


def test_overlap_and_load_cosine_by_hand():
    """Three loops, one layer, two tokens, 2 of 4 experts: the second half like the first, the third not at all."""
    choices = torch.tensor([[[0, 1], [2, 0]], [[1, 3], [0, 2]], [[2, 3], [1, 3]]]).view(3, 1, 1, 2, 2)
    loads = torch.stack([choice.flatten().bincount(minlength=4) for choice in choices])[:, None]
    overlap, cosine = probes.expert_overlap(choices, 4), probes.load_cosine(loads)
    assert overlap[..., 0].tolist() == [[1, 0.75, 0], [0.75, 1, 0.25], [0, 0.25, 1]]
    # loads (2, 1, 1, 0), (1, 1, 1, 1), (0, 1, 1, 2)
    expected = torch.tensor([[1, 4 / 24**0.5, 2 / 6], [4 / 24**0.5, 1, 4 / 24**0.5], [2 / 6, 4 / 24**0.5, 1]])
    torch.testing.assert_close(cosine[..., 0], expected.double(), rtol=1e-6, atol=0)


def test_overlap_keeps_layers_apart():
    model, idx = moe(), torch.arange(10).view(2, 5)
    choices, loads = probes.routing(model, idx)
    overlap, cosine = probes.expert_overlap(choices, 5), probes.load_cosine(loads)
    assert overlap.shape == cosine.shape == (3, 3, 2)
    for layer in (0, 1):
        own = choices[:, layer : layer + 1], loads[:, layer : layer + 1]
        assert torch.equal(probes.expert_overlap(own[0], 5)[..., 0], overlap[..., layer])
        torch.testing.assert_close(probes.load_cosine(own[1])[..., 0], cosine[..., layer])


def test_the_loads_of_independent_routers_look_alike_and_their_choices_do_not():
    """So a cosine of loads near 1 says nothing about collapse; the overlap stays at its chance level k / E."""
    torch.manual_seed(0)
    router = Router(LoopedConfig(n_embd=256, n_head=4, n_loop=4, n_expert=30, top_k=6, router="per_loop"))
    torch.nn.init.normal_(router.weight)
    tokens = torch.randn(4096, 256)
    visits = [router(tokens, loop) for loop in range(4)]
    choices = torch.stack([visit.choice for visit in visits]).view(4, 1, 1, 4096, 6)
    loads = torch.stack([visit.load for visit in visits])[:, None]
    pairs = ~torch.eye(4, dtype=torch.bool)
    assert probes.load_cosine(loads)[pairs].min() > 0.98
    assert probes.expert_overlap(choices, 30)[pairs].numpy() == pytest.approx(6 / 30, abs=0.03)
    same = torch.stack([choices[0], choices[0]])
    assert probes.expert_overlap(same, 30)[0, 1].item() == 1


def test_agreement_is_what_sets_of_experts_say():
    """Pair by pair and layer by layer, token by token; chance by pairing every token with every other."""
    model, idx = moe(n_expert=6, top_k=3).train(), torch.arange(8).view(2, 4)
    found, (choices, loads) = probes.agreement(model, idx), probes.routing(model, idx)
    assert model.training and torch.equal(found.loads, loads) and found.top_k == 3
    sets = [
        [[set(token) for token in choices[n, layer].flatten(0, 1).tolist()] for layer in range(2)] for n in range(3)
    ]
    for n, m, layer in itertools.product(range(3), range(3), range(2)):
        pairs = list(zip(sets[n][layer], sets[m][layer], strict=True))
        assert found.overlap[n, m, layer].item() == pytest.approx(sum(len(a & b) for a, b in pairs) / 8 / 3)
        assert found.jaccard[n, m, layer].item() == pytest.approx(sum(len(a & b) / len(a | b) for a, b in pairs) / 8)
        everyone = [len(a & b) for a in sets[n][layer] for b in sets[m][layer]]
        assert found.chance[n, m, layer].item() == pytest.approx(sum(everyone) / 64 / 3)
    for layer in range(2):
        met = [len(set.union(*(sets[n][layer][token] for n in range(3)))) for token in range(8)]
        assert found.distinct[layer].item() == pytest.approx(sum(met) / 8)
    torch.testing.assert_close(found.load_cosine, probes.load_cosine(loads))
    assert found.spread[1, 0].item() == pytest.approx(loads[1, 0].double().std(correction=0).item() / 24)


def test_agreement_sees_what_the_router_sees():
    model, idx = moe(), torch.arange(8).view(2, 4)
    seen: list[torch.Tensor] = []  # in the order of the visits: loop by loop, layer by layer
    hooks = [block.mlp.register_forward_hook(lambda _, inputs, out: seen.append(inputs[0])) for block in model.blocks]
    model(idx)
    for hook in hooks:
        hook.remove()
    found = probes.agreement(model, idx).seen
    for n, m, layer in itertools.product(range(3), range(3), range(2)):
        expected = torch.cosine_similarity(seen[2 * n + layer], seen[2 * m + layer], dim=-1).mean().item()
        assert found[n, m, layer].item() == pytest.approx(expected, abs=1e-5)


def test_agreement_comes_back_from_json_and_needs_experts():
    found = probes.agreement(moe(), torch.arange(8).view(2, 4))
    back = probes.Agreement.restored(json.loads(json.dumps(found.stored())))
    assert back.top_k == found.top_k and torch.equal(back.loads, found.loads.double())
    for name in ("overlap", "jaccard", "seen", "distinct", "chance", "spread"):
        assert getattr(back, name).numpy() == pytest.approx(getattr(found, name).numpy(), abs=1e-4)
    with pytest.raises(ValueError, match="n_expert > 0"):
        probes.agreement(build(tiny()).float(), torch.arange(5)[None])


def test_distinct_experts_by_chance_are_what_random_choices_meet():
    drawn = torch.rand(6, 20_000, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices  # (N, tokens, k)
    met = torch.zeros(20_000, 8).scatter(1, drawn.transpose(0, 1).flatten(1), 1.0).sum(1).mean().item()
    assert probes.distinct_by_chance(8, 2, 6) == pytest.approx(met, abs=0.02)
    assert probes.distinct_by_chance(5, 2, 1) == pytest.approx(2)


@pytest.mark.parametrize(("n_expert", "top_k"), [(4, 2), (5, 3), (6, 1), (3, 3)])
def test_jaccard_by_chance_is_the_mean_over_all_pairs_of_choices(n_expert, top_k):
    sets = [set(choice) for choice in itertools.combinations(range(n_expert), top_k)]
    every = [len(a & b) / len(a | b) for a in sets for b in sets]
    assert probes.jaccard_by_chance(n_expert, top_k) == pytest.approx(sum(every) / len(every))


def test_spread_by_chance_is_that_of_random_choices():
    drawn = torch.rand(2000, 64, 6, generator=torch.Generator().manual_seed(0)).topk(2).indices.flatten(1)
    loads = torch.zeros(2000, 1, 6).scatter_add_(2, drawn[:, None], torch.ones(2000, 1, 128))  # (N, L, E)
    found = probes.Agreement(2, loads, *[torch.empty(0)] * 4).spread.square().mean().sqrt().item()
    assert probes.spread_by_chance(6, 2, 64) == pytest.approx(found, rel=0.02)


def test_cosine_by_chance_is_the_mean_over_all_renamings_of_the_experts():
    loads = torch.randint(9, (2, 3, 4), generator=torch.Generator().manual_seed(0))  # (N, L, E)
    found = probes.cosine_by_chance(loads)
    assert found.shape == (2, 2, 3) and torch.equal(found, found.transpose(0, 1))
    for layer in range(3):
        renamed = [loads[1, layer, list(order)] for order in itertools.permutations(range(4))]
        cosines = [torch.cosine_similarity(loads[0, layer].double(), other.double(), dim=0) for other in renamed]
        assert found[0, 1, layer].item() == pytest.approx(torch.stack(cosines).mean().item())
    assert probes.cosine_by_chance(torch.ones(2, 1, 5)).flatten().tolist() == pytest.approx([1] * 4)  # even loads


def test_swapped_routers_are_those_of_a_model_with_the_rows_moved():
    model, idx, targets = moe(), *torch.randint(11, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = probes.swapped_routers(model, [(idx, targets)])
    assert losses.shape == (3, 4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for i, j in itertools.product(range(3), range(3)):
        other = moe()
        with torch.no_grad():
            for block in other.blocks:
                block.mlp.router.weight[i] = block.mlp.router.weight[j].clone()
            expected = other.eval()(idx, targets)[1].item()
        assert losses[i, j].item() == pytest.approx(expected, rel=1e-6)
    assert losses.unique().numel() == 3 * 3 + 1  # the diagonal is the model's own, all others differ
    copies = probes.swapped_routers(moe(router_init="copy"), [(idx, targets)])
    assert copies[:, :3].unique().numel() == 1 and (copies[:, 3] != copies[0, 0]).all()
    with pytest.raises(ValueError, match="router='per_loop'"):
        probes.swapped_routers(moe(router="shared"), [(idx, targets)])
