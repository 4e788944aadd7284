"""Instruments against what can be counted by hand."""

import pytest
import torch
from helpers import build, example, tiny

from minilooped import plots, probes
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.probes import saved_bytes

# ----------------------------------------------------------------------------------------------------------------------
# saved_bytes


def leaf(n: int = 1000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x.exp(), 4000),  # its result
        (lambda x: x.sin(), 4000),  # its argument
        (lambda x: x.exp().sin(), 4000),  # one storage, saved twice
        (lambda x: x.sin().exp(), 8000),
        (lambda x: x * leaf(), 8000),
        (lambda x: x * x, 4000),
        (lambda x: x + 1, 0),
        (lambda x: (x + 1)[:10].sin(), 4000),  # a view keeps all of its storage alive
        (lambda x: x.double().sin(), 8000),
    ],
)
def test_saved_bytes_of_a_few_operations(run, expected):
    x = leaf()
    assert saved_bytes(lambda: run(x)) == expected


def test_saved_bytes_leaves_out_parameters_and_their_views():
    x, w = leaf(), leaf()
    assert saved_bytes(lambda: x * w, [w]) == 4000
    assert saved_bytes(lambda: x * w.view(10, 100).flatten(), [x, w]) == 0
    assert saved_bytes(lambda: x * w, iter([x, w])) == 0


def test_saved_bytes_counts_nothing_without_gradients():
    x = leaf()
    with torch.no_grad():
        assert saved_bytes(lambda: x.exp()) == 0
    assert saved_bytes(lambda: x.detach().exp()) == 0


def test_saved_bytes_is_the_most_at_one_time():
    """Two graphs one after the other hold no more than the larger; two at once hold both."""
    x, y = leaf(), leaf(500)

    def one_after_the_other():
        for z in (x, y, x):
            z.exp().sum().backward()

    def at_once():
        total = x.exp().sum() + y.exp().sum()
        total.backward()

    assert saved_bytes(one_after_the_other) == 4000
    assert saved_bytes(at_once) == 6000


def test_saved_bytes_leaves_results_and_gradients_alone():
    results = []
    for measured in (False, True):
        model = build(tiny())
        idx, targets = example(model.config)

        def run(model=model, idx=idx, targets=targets):
            model(idx, targets)[1].backward()

        if measured:
            assert saved_bytes(run, model.parameters()) > 0
        else:
            run()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def segmented(n_loop: int, segment: int | None) -> int:
    model = build(tiny(n_loop=n_loop, segment=segment), dtype=torch.float32)
    idx, targets = example(model.config)

    def run():
        for loss in model.segment_losses(idx, targets):
            loss.backward()

    return saved_bytes(run, [*model.parameters(), *model.buffers()])


def test_saved_bytes_of_a_loop_are_a_straight_line():
    two, three, seven = (segmented(n_loop, None) for n_loop in (2, 3, 7))
    assert three > two and seven - three == 4 * (three - two)


def test_saved_bytes_of_segments_are_flat():
    assert segmented(4, 2) == segmented(8, 2) == segmented(12, 2) == segmented(2, None)


# ----------------------------------------------------------------------------------------------------------------------
# cost


def test_cost_counts_visits_but_for_parameters():
    shapes = [(1, 6), (2, 3), (6, 1)]
    looped, between, plain = (probes.cost(tiny(n_layer=n_layer, n_loop=n_loop)) for n_layer, n_loop in shapes)
    assert [(c.n_layer, c.n_loop) for c in (looped, between, plain)] == shapes
    assert looped.operations == between.operations == plain.operations
    assert looped.saved == between.saved == plain.saved
    assert plain.parameters - looped.parameters == 5 * (between.parameters - looped.parameters) > 0


def test_cost_is_that_of_the_model():
    config = tiny(n_loop=2)
    model = build(config, dtype=torch.float32)
    idx, targets = example(config, batch=1)
    cost = probes.cost(config)
    assert (cost.parameters, cost.operations) == (model.num_params(), model.flops_per_token())
    assert cost.saved == saved_bytes(lambda: model(idx, targets), [*model.parameters(), *model.buffers()])


# ----------------------------------------------------------------------------------------------------------------------
# routing


def moe(**changes) -> LoopedGPT:
    torch.manual_seed(0)
    shape = dict(vocab_size=11, block_size=8, n_layer=2, n_loop=3, n_head=2, n_embd=16, init_std=0.25)
    experts = dict(n_expert=5, top_k=2, n_inner=8, router="per_loop", router_init="independent")
    return LoopedGPT(LoopedConfig(**(shape | experts | changes)))


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


# ----------------------------------------------------------------------------------------------------------------------
# norm_growth


def test_norm_growth_of_the_readmes_picture_has_the_slopes_it_shows():
    """Unscaled like N, with 1/sqrt(N) like sqrt(N), with 1/N flat; at one loop the three are one model."""
    shape = dict(vocab_size=11, block_size=16, n_layer=2, n_head=2, n_embd=64, init_std=64**-0.5, embed_norm=True)
    growth = probes.norm_growth(LoopedConfig(**shape), ("none", "sqrt", "inverse"), (1, 16, 64), seeds=(0, 1))
    assert growth["none"][0] == growth["sqrt"][0] == growth["inverse"][0]
    for rule, slope in (("none", 1), ("sqrt", 0.5), ("inverse", 0)):
        at_16, at_64 = growth[rule][1:]
        assert abs(torch.tensor(at_64 / at_16).log2() / 2 - slope) < 0.1, rule

    ax = plots.norm_growth((1, 16, 64), growth)
    for line, (rule, values) in zip(ax.lines, growth.items(), strict=False):
        assert line.get_label() == rule and line.get_ydata() == pytest.approx(values)
    assert [guide.get_ydata()[-1] for guide in ax.lines[3:]] == [64, 8, 1] and ax.get_xlabel() == "loops N"


# ----------------------------------------------------------------------------------------------------------------------
# growth_plane


def growing(**changes) -> LoopedConfig:
    shape = dict(vocab_size=11, block_size=8, n_head=2, n_embd=32, init_std=32**-0.5, embed_norm=True)
    return LoopedConfig(**(shape | changes))


@pytest.mark.parametrize("rule", ["none", "factored", "deeploop"])
def test_growth_plane_is_what_the_states_say_at_every_point(rule):
    n_layers, n_loops, seeds = (1, 3), (1, 2, 5), (0, 4)
    plane = probes.growth_plane(growing(rule=rule), n_layers, n_loops, seeds=seeds)
    assert plane.rms.shape == plane.moved.shape == (2, 3)
    for i, n_layer in enumerate(n_layers):
        for j, n_loop in enumerate(n_loops):
            rms, moved = [], []
            for seed in seeds:
                torch.manual_seed(seed)
                model = LoopedGPT(growing(rule=rule, n_layer=n_layer, n_loop=n_loop))
                idx = torch.randint(11, (2, 8))
                h = start = model.embed(idx)
                for loop in range(n_loop):
                    h = model.run_loop(h, loop, start)[0]
                rms.append(h.square().mean().sqrt().item())
                moved.append((h - start).square().mean().sqrt().item())
            assert plane.rms[i, j].item() == pytest.approx(sum(rms) / 2, rel=1e-5)
            assert plane.moved[i, j].item() == pytest.approx(sum(moved) / 2, rel=1e-4)


def test_growth_plane_of_a_stream_that_stands_still():
    plane = probes.growth_plane(growing(rule="rezero"), (1, 2), (1, 3))
    assert not plane.moved.any()
    assert (plane.over_loops, plane.over_layers) == pytest.approx((1, 1), abs=1e-5)
    torch.testing.assert_close(plane.rms, torch.ones(2, 2), rtol=1e-3, atol=0)


def test_plane_says_by_which_factor_the_rms_differs_along_each_axis():
    rms = torch.tensor([[1.0, 2.0, 3.0], [10.0, 2.5, 5.0]])  # (L, N)
    plane = probes.Plane(rms, moved=torch.zeros(2, 3))
    assert (plane.over_loops, plane.over_layers) == (4.0, 10.0)


def test_growth_plane_leaves_the_generator_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    probes.growth_plane(growing(), (1,), (1,))
    assert torch.equal(torch.get_rng_state(), before)
