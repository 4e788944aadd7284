"""Instruments against what can be counted by hand."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from helpers import LOOM_PARTS, Reference, build, example, rms, tiny, tokens

from minilooped.course import plots
from minilooped.data.tasks import Task
from minilooped.model import LoopedConfig, LoopedGPT, Router
from minilooped.science import probes, toy
from minilooped.science.probes import saved_bytes

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


def test_saved_bytes_forgets_what_no_backward_asks_for_once_its_results_are_gone():
    """An operation that saved its own result would otherwise hold itself."""

    def run():
        for _ in range(3):
            leaf().exp()

    assert saved_bytes(run) == 4000


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


def test_norm_growth_depends_on_its_seeds_alone_and_leaves_the_readers_generator_alone():
    config = tiny(rule="none")
    torch.manual_seed(5)
    first = probes.norm_growth(config, ("none",), (1, 2), seeds=(3,))
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)
    assert probes.norm_growth(config, ("none",), (1, 2), seeds=(3,)) == first

    torch.manual_seed(3)  # the same by hand
    model, idx = LoopedGPT(config).eval(), torch.randint(11, (2, 12))
    for n_loop, value in zip((1, 2), first["none"], strict=True):
        assert value == rms(model(idx, n_loop=n_loop, return_states=True)[2][-1])


# ----------------------------------------------------------------------------------------------------------------------
# visits

EXTRAS = [
    {},
    {"rule": "inverse", "segment": 2},
    {"rule": "deeploop"},  # post-norm, where an increment is not a branch
    {"rule": "layernorm_scaling", "norm": "layer"},
    {"rule": "loom", **LOOM_PARTS},
]


def by_hand(model: LoopedGPT, idx: torch.Tensor, n_loop: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The stream before and after every visit, for a model without re-injection and loop-end norm."""
    h, before, after = model.embed(idx), [], []
    for visit in range(n_loop * len(model.blocks)):
        gain = model.row.in_gain
        before.append(h)
        h = model.blocks[visit % len(model.blocks)](
            h, visit // len(model.blocks), gain(visit + 1) if callable(gain) else gain, model.rope[:, : idx.shape[1]]
        )[0]
        after.append(h)
    return before, after


@pytest.mark.parametrize("n_loop", [3, 1, 5])
@pytest.mark.parametrize("changes", EXTRAS[:-1], ids=str)
def test_visits_are_those_of_a_loop_by_hand(changes, n_loop):
    model = build(tiny(**changes), shaken=True).eval()
    idx = tokens(model.config, length=7)
    seen = probes.visits(model, idx, n_loop=n_loop)
    with torch.no_grad():
        before, after = by_hand(model, idx, n_loop)
    increments = [b - a for a, b in zip(before, after, strict=True)]
    assert seen.start == pytest.approx(rms(before[0]), rel=1e-12)
    assert seen.stream.flatten().tolist() == pytest.approx([rms(h) for h in after], rel=1e-12)
    assert seen.branch.flatten().tolist() == pytest.approx([rms(r) for r in increments], rel=1e-12)
    for i, a in enumerate(increments):
        for j, b in enumerate(increments):
            expected = torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()
            assert seen.cosines[i, j].item() == pytest.approx(expected, abs=1e-12)
    loops = [sum(increments[2 * n : 2 * n + 2]) for n in range(n_loop)]  # a loop's increment is the sum of its blocks'
    for i, a in enumerate(loops):
        for j, b in enumerate(loops):
            expected = torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()
            assert seen.loop_cosines[i, j].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("changes", EXTRAS, ids=str)
def test_norms_and_cosines_of_the_visits_are_of_one_walk(changes):
    model = build(tiny(**changes), shaken=True)
    idx = tokens(model.config)
    seen = probes.visits(model, idx)
    for matrix in (seen.cosines, seen.loop_cosines):
        torch.testing.assert_close(matrix, matrix.mT)
        torch.testing.assert_close(matrix.diagonal(), torch.ones(len(matrix), dtype=torch.float64))
    ends = [model.embed(idx), *model.eval()(idx, return_states=True)[2]]
    first, *_, last = loops = [b - a for a, b in itertools.pairwise(ends)]
    assert len(loops) == 3
    expected = torch.cosine_similarity(first.flatten(), last.flatten(), dim=0).item()
    assert seen.loop_cosines[0, -1].item() == pytest.approx(expected, abs=1e-12)
    if not model.config.reinject:  # then the visits' increments sum to what the whole loop has changed
        length = seen.branch.flatten()
        assert (length @ seen.cosines @ length).item() == pytest.approx(rms(ends[-1] - ends[0]) ** 2, rel=1e-10)


@pytest.mark.parametrize("n_loop", [None, 1, 2, 7])
@pytest.mark.parametrize("n_layer", [1, 2])
def test_case_B3_a_reused_block_has_one_record_per_visit(n_layer, n_loop):
    model = build(tiny(n_layer=n_layer, rule="none"))
    seen, N = probes.visits(model, tokens(model.config), n_loop=n_loop), n_loop or 3
    assert seen.stream.shape == seen.branch.shape == (N, n_layer)
    assert seen.cosines.shape == (N * n_layer, N * n_layer) and seen.loop_cosines.shape == (N, N)
    assert len(set(seen.stream.flatten().tolist())) == N * n_layer, "no visit's record stands for another's"


def test_visits_of_one_loop_count_are_the_first_of_a_larger_one():
    model = build(tiny(rule="sqrt"))
    few, many = (probes.visits(model, tokens(model.config), n_loop=n_loop) for n_loop in (2, 5))
    torch.testing.assert_close(few.stream, many.stream[:2])
    torch.testing.assert_close(few.cosines, many.cosines[:4, :4])


def test_visits_of_silent_branches_are_zero_and_finite():
    seen = probes.visits(build(tiny(rule="rezero")), torch.arange(10).view(2, 5))
    assert not seen.branch.any() and not seen.cosines.any() and not seen.loop_cosines.any()
    assert (seen.stream == seen.start).all()


def test_visits_take_a_half_precision_model_apart_in_single_precision():
    model = build(tiny(rule="none"), dtype=torch.bfloat16)
    seen = probes.visits(model, tokens(model.config))
    assert seen.stream.dtype == seen.branch.dtype == seen.cosines.dtype == torch.float32
    assert seen.start == pytest.approx(rms(model.embed(tokens(model.config)).float()), rel=1e-6)
    assert torch.allclose(seen.cosines.diagonal(), torch.ones(6))


@pytest.mark.parametrize("mode", [True, False])
def test_visits_leave_mode_hooks_generator_and_biases_alone(mode):
    model, idx = moe().train(mode), torch.arange(10).view(2, 5)
    state = torch.get_rng_state()
    probes.visits(model, idx)
    with pytest.raises(ValueError, match="block_size"):
        probes.visits(model, torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="n_loop=0"):
        probes.visits(model, idx, n_loop=0)
    assert model.training == mode and torch.equal(torch.get_rng_state(), state)
    assert not any(block._forward_hooks or block.mlp.router.bias.any() for block in model.blocks)
    assert all(parameter.grad is None for parameter in model.parameters())


# ----------------------------------------------------------------------------------------------------------------------
# The first steps of training


def trained_by_hand(config: LoopedConfig, steps: int, *, lr: float, seed: int) -> tuple[LoopedGPT, torch.Tensor]:
    torch.manual_seed(seed)
    model, sequence = LoopedGPT(config), torch.randint(config.vocab_size, (1, config.block_size + 1))
    optimizer = model.configure_optimizer(lr, weight_decay=0.1)
    for _ in range(steps):
        model(sequence[:, :-1], sequence[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), sequence[:, :-1]


@pytest.mark.parametrize("rule", ["none", "factored", "deeploop"])
def test_first_steps_are_the_visits_along_a_training_by_hand(rule):
    config = tiny(rule=rule)
    torch.manual_seed(9)
    state = torch.get_rng_state()
    seen = probes.first_steps(config, 3, lr=0.01, seed=4)
    assert torch.equal(torch.get_rng_state(), state), "the reader's generator stays where it was"
    assert len(seen) == 4 and seen[0].stream.shape == (3, 2)
    for step, visits in enumerate(seen):
        model, idx = trained_by_hand(config, step, lr=0.01, seed=4)
        expected = probes.visits(model, idx)
        torch.testing.assert_close(visits.stream, expected.stream)
        torch.testing.assert_close(visits.cosines, expected.cosines, atol=1e-5, rtol=0)
        assert visits.start == pytest.approx(expected.start, rel=1e-5)


def test_first_steps_takes_a_batch_and_refuses_less_than_no_step():
    config = tiny(rule="none")
    one, two = (probes.first_steps(config, 0, batch=batch) for batch in (1, 2))
    assert len(one) == len(two) == 1 and not torch.equal(one[0].stream, two[0].stream)
    with pytest.raises(ValueError, match="steps=-1"):
        probes.first_steps(config, -1)


def test_output_change_is_that_of_one_step_by_hand():
    config = tiny(rule="none")
    torch.manual_seed(9)
    state = torch.get_rng_state()
    changes = probes.output_change(config, lr=0.01, seeds=(4, 7))
    assert torch.equal(torch.get_rng_state(), state) and changes.shape == (2,)
    for seed, change in zip((4, 7), changes, strict=True):
        before, after = (trained_by_hand(config, steps, lr=0.01, seed=seed) for steps in (0, 1))
        a, b = (model(idx, return_states=True)[2][-1] for model, idx in (before, after))
        assert change.item() == pytest.approx(rms(b - a), rel=1e-4)


def test_output_change_of_a_small_step_is_flat_in_the_loops_at_one_over_n_alone():
    """[1] Theorem 2: like eta * eps * N, as long as eps * N is bounded. Where it is not, at least like that."""
    shape = dict(vocab_size=64, block_size=32, n_layer=2, n_head=4, n_embd=64, init_std=64**-0.5, embed_norm=True)
    n_loops, slope = (4, 8, 16, 32), {}
    for rule in ("none", "sqrt", "inverse"):
        configs = [LoopedConfig(n_loop=n_loop, rule=rule, **shape) for n_loop in n_loops]
        changes = torch.stack([probes.output_change(config, lr=1e-5) for config in configs], dim=1)  # (S, n_loops)
        slope[rule] = toy.fit_exponent(n_loops, changes).slope
    assert abs(slope["inverse"]) < 0.2 and slope["sqrt"] > 0.5 and slope["none"] > 1, slope
    twice = torch.stack([probes.output_change(config, lr=2e-5) for config in configs], dim=1)
    torch.testing.assert_close(twice, 2 * changes, rtol=0.05, atol=0)


def test_mean_cosine_is_over_pairs_of_different_visits():
    seen = probes.visits(build(tiny(rule="none")), torch.arange(10).view(2, 5))
    pairs = [seen.cosines[i, j].item() for i, j in itertools.permutations(range(6), 2)]
    assert seen.mean_cosine == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)


def test_six_panels_are_the_final_norms_along_the_first_steps():
    """Row by row: depth is blocks at one loop, or loops through the blocks of the config."""
    config = tiny(n_layer=2, n_loop=7, embed_norm=True)
    panels = probes.six_panels(config, (1, 3), steps=2, lr=0.01, seeds=(0, 5))
    rules = {"untied": ["none", "sqrt_depth", "completep"], "tied": ["none", "sqrt", "inverse"]}
    assert {row: list(values) for row, values in panels.items()} == rules
    for row, rule in [(row, rule) for row, columns in rules.items() for rule in columns]:
        assert panels[row][rule].shape == (2, 2, 3)
        shape = dict(n_layer=3, n_loop=1) if row == "untied" else dict(n_layer=2, n_loop=3)
        steps = probes.first_steps(tiny(rule=rule, embed_norm=True, **shape), 2, lr=0.01, seed=5)
        expected = [visits.stream[-1, -1].item() for visits in steps]
        assert panels[row][rule][1, 1].tolist() == pytest.approx(expected, rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# load_cosine, expert_overlap


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


def test_case_B12_the_loads_of_independent_routers_look_alike_and_their_choices_do_not():
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


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 7: agreement between loops, and routers swapped


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


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 8


@pytest.mark.parametrize("loop_end_norm", [False, True])
def test_end_variance_is_that_of_the_last_block_s_output_whatever_closes_the_loop(loop_end_norm):
    config = LoopedConfig(
        vocab_size=9,
        block_size=6,
        n_layer=2,
        n_loop=3,
        n_head=2,
        n_embd=16,
        init_std=0.25,
        embed_norm=True,
        rule="none",
        loop_end_norm=loop_end_norm,
    )
    model, idx = probes.fresh(config, 0, (2, 6))
    outputs = []
    handle = model.blocks[-1].register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    with torch.no_grad():
        model(idx)
    handle.remove()
    assert len(outputs) == 3
    assert probes.end_variance(model, idx) == pytest.approx(outputs[-1].square().mean().item())
    assert probes.end_variance(model, idx) > 1.2, "a closing norm would make it 1"


def test_variance_over_loops_has_a_row_for_each_seed_and_a_column_for_each_loop_count():
    config = LoopedConfig(vocab_size=9, block_size=6, n_layer=1, n_head=2, n_embd=16, init_std=0.25, rule="none")
    before = torch.get_rng_state()
    found = probes.variance_over_loops(config, (1, 2, 5), seeds=(3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert found.shape == (2, 3)
    for i, seed in enumerate((3, 4)):
        for j, n_loop in enumerate((1, 2, 5)):
            model = probes.fresh(replace(config, n_loop=n_loop), seed, (2, 6))
            assert found[i, j].item() == probes.end_variance(*model)


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 9: batch_bytes, loss_after_each_loop, gradient_reach, gradient_agreement, cpu_times, peak_memory


def looped(segment: int | None = None, n_loop: int = 5, **changes) -> tuple[LoopedGPT, torch.Tensor, torch.Tensor]:
    """Every part of LOOM, with weights that no 0 or 1 hides, and a batch whose targets all count."""
    config = tiny(**(LOOM_PARTS | dict(n_loop=n_loop, segment=segment) | changes))
    return build(config, shaken=True), tokens(config, seed=1), tokens(config, seed=2)


def test_batch_bytes_are_those_of_the_longest_segment_and_leave_no_trace():
    whole = [probes.batch_bytes(*looped(n_loop=n)) for n in range(1, 6)]
    assert len({b - a for a, b in itertools.pairwise(whole)}) == 1 and whole[1] > whole[0]
    assert [probes.batch_bytes(*looped(K)) for K in (1, 2, 3, 5, 9)] == [whole[K - 1] for K in (1, 2, 3, 5, 5)]
    model, idx, targets = looped(2)
    model(idx, targets)[1].backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    probes.batch_bytes(model, idx, targets)
    assert all(torch.equal(a.grad, b) for a, b in zip(model.parameters(), before, strict=True))


def test_loss_after_each_loop_is_that_of_a_pass_with_so_many_loops():
    model, idx, targets = looped(2)
    losses = probes.loss_after_each_loop(model, [(idx, targets), (idx[:1], targets[:1])], n_loop=7)
    model.eval()
    for n, loss in enumerate(losses, start=1):
        first, second = (model(idx[:b], targets[:b], n_loop=n)[1].item() for b in (2, 1))
        assert loss == pytest.approx((2 * first + second) / 3, rel=1e-12)
    assert len(losses) == 7 and len(probes.loss_after_each_loop(model, [(idx, targets)])) == 5


@pytest.mark.parametrize("segment", [None, 1, 2, 3, 7])
def test_gradient_reaches_the_loops_of_its_own_segment_and_no_other(segment):
    model, idx, targets = looped(segment, gate="sigmoid")
    bias = [block.mlp.router.bias.clone() for block in model.blocks]
    reach = probes.gradient_reach(model, idx, targets)
    expected = [[loop in loops for loop in range(5)] for loops in model.config.segments()]
    assert (reach > 0).tolist() == expected
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(block.mlp.router.bias, b) for block, b in zip(model.blocks, bias, strict=True))
    if segment is None:
        model.eval()(idx, targets)[1].backward()
        norms = sum(block.mlp.router.weight.grad.square().sum((1, 2)) for block in model.blocks).sqrt()
        torch.testing.assert_close(reach[0], norms, rtol=1e-10, atol=0)


def test_gradient_reach_needs_a_router_of_each_loops_own():
    model, idx, targets = looped(2, router="shared")
    with pytest.raises(ValueError, match="set n_expert > 0 and router='per_loop'"):
        probes.gradient_reach(model, idx, targets)


def gradient_of(model, loss) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_agreement_tells_truncation_from_another_objective():
    """Each of the three gradients, made otherwise, beside the whole one."""
    model, idx, targets = looped(gate="sigmoid")
    bias = [block.mlp.router.bias.clone() for block in model.blocks]
    found = probes.gradient_agreement(model, idx, targets, 2)
    assert model.training and model.config.segment is None
    assert all(torch.equal(block.mlp.router.bias, b) for block, b in zip(model.blocks, bias, strict=True))

    model.eval()
    twin, _, _ = looped(2, gate="sigmoid")
    twin.eval()
    full = gradient_of(model, model(idx, targets)[1])
    early = gradient_of(model, sum(model(idx, targets, n_loop=n)[1] for n in (2, 4, 5)) / 3)
    twin.zero_grad()
    *_, last = twin.segment_losses(idx, targets)
    cut = gradient_of(twin, last)
    twin.zero_grad()
    for loss in twin.segment_losses(idx, targets):
        (loss / 3).backward()
    both = torch.cat([p.grad.flatten() for p in twin.parameters()])
    for way, gradient in (("early losses", early), ("cut", cut), ("segments", both)):
        cosine, ratio = torch.cosine_similarity(gradient, full, dim=0).item(), (gradient.norm() / full.norm()).item()
        assert found[way]["all"] == pytest.approx((cosine, ratio), rel=1e-9)
    cosines = {round(found[way]["all"].cosine, 6) for way in found}
    assert len(cosines) == 3 and max(cosines) < 1


def test_agreement_of_one_segment_is_whole_and_parts_add_up():
    model, idx, targets = looped(gate="sigmoid", tie_embeddings=False)
    for parts in probes.gradient_agreement(model, idx, targets, 5).values():
        assert all(agreement == pytest.approx((1, 1), rel=1e-9) for agreement in parts.values())
    names = [name for name, _ in model.named_parameters()]
    by_part = {part: [name for name in names if probes.part_of(name) == part] for part in probes.MODEL_PARTS}
    assert by_part["embedding"] == ["wte.weight"] and by_part["read-out"] == ["final_norm.weight", "head.weight"]
    assert by_part["routers"] == [f"blocks.{layer}.mlp.router.weight" for layer in range(model.config.n_layer)]
    assert sum(map(len, by_part.values())) == len(names)


def test_a_part_that_a_cut_leaves_without_gradient_has_cosine_zero():
    """Without re-injection the embedding is heard in the first segment only."""
    model, idx, targets = looped(reinject=False, tie_embeddings=False)
    assert probes.gradient_agreement(model, idx, targets, 2)["cut"]["embedding"] == (0, 0)


def test_cpu_times_take_turns_and_leave_out_the_first_round(monkeypatch):
    clock, order = iter(n * n for n in itertools.count()), []  # read before and after: a run takes 1, 5, 9, ... seconds
    monkeypatch.setattr(probes.resources.time, "process_time", lambda: next(clock))
    times = probes.cpu_times({name: lambda name=name: order.append(name) for name in "ab"}, rounds=3)
    assert "".join(order) == "abababab"
    assert {name: seconds.tolist() for name, seconds in times.items()} == {"a": [9, 17, 25], "b": [13, 21, 29]}


def test_peak_memory_is_that_of_a_fresh_process_and_sees_a_cut():
    config = tiny(n_loop=12, block_size=64, n_embd=32)
    hoard = torch.zeros(30_000_000)  # of this process, not of the fresh one
    ordinary = probes.peak_memory(config, 64)
    if ordinary is None:
        pytest.skip("no /proc here")
    held = probes.saved_bytes(lambda: probes.fresh(config, 0, (1, 1))[0](*[torch.zeros(64, 64, dtype=int)] * 2))
    assert held < ordinary < 3 * held
    assert probes.peak_memory(replace(config, segment=2), 64) < 0.6 * ordinary
    del hoard


def test_added_memory_is_the_peak_above_what_was_there_before(monkeypatch):
    monkeypatch.setattr(probes.resources, "resident", {"VmRSS": 5, "VmHWM": 12}.get)
    assert probes.added_memory(tiny(), 2, torch.get_num_threads()) == 7


def test_peak_memory_is_none_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(probes.resources, "STATUS", tmp_path / "status")
    assert probes.peak_memory(tiny(), 2) is None


def test_resident_reads_kilobytes(monkeypatch, tmp_path):
    monkeypatch.setattr(probes.resources, "STATUS", tmp_path / "status")
    probes.resources.STATUS.write_text("Name:\tpython: x\nVmHWM:\t   12 kB\nVmRSS:\t    7 kB\n", encoding="utf-8")
    assert (probes.resident("VmHWM"), probes.resident("VmRSS")) == (12 * 1024, 7 * 1024)


def test_largest_jump_is_above_the_twenty_steps_before():
    falling = [float(60 - step) for step in range(60)]
    assert probes.largest_jump(falling) == -10.5  # a step of a line below the mean of the 20 before it
    spiked = [*falling[:40], 25.0, *falling[41:]]  # was 20, after 40 to 21 with a mean of 30.5
    assert probes.largest_jump(spiked) == -5.5
    assert probes.largest_jump([1.0] * 20 + [4.0]) == 3 and probes.largest_jump([9.0] + [1.0] * 20 + [4.0]) == 3


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 6: the visits of shared weights

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


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 11: accuracy_by_loop, logit_lens, early_exit


def test_accuracy_by_loop_counts_what_is_scored_in_a_pass_with_so_many_loops():
    model, idx, targets = looped()
    targets[0, ::2] = -100
    found = probes.accuracy_by_loop(model, Task(idx, targets), n_loop=6)
    for n, share in enumerate(found, start=1):
        said = model.eval()(idx, n_loop=n)[0].argmax(-1)
        pairs = [(a, b) for a, b in zip(said.flatten().tolist(), targets.flatten().tolist(), strict=True) if b != -100]
        assert share == sum(a == b for a, b in pairs) / len(pairs)
    assert len(found) == 6 and len(probes.accuracy_by_loop(model, Task(idx, targets))) == 5


def test_the_lens_reads_out_a_pass_with_so_many_loops():
    model, idx, targets = looped()
    lens = probes.logit_lens(model, idx[0], targets[0], n_loop=7)
    assert not model.eval().training and lens.token.shape == lens.right.shape == lens.rank.shape == (7, idx.shape[1])
    for n in range(1, 8):
        p = model(idx[:1], n_loop=n)[0][0].softmax(-1)  # (T, V)
        for t, target in enumerate(targets[0].tolist()):
            assert lens.token[n - 1, t] == p[t].argmax()
            assert lens.right[n - 1, t].item() == pytest.approx(p[t, target].item(), rel=1e-5)
            assert lens.rank[n - 1, t] == sorted(p[t].tolist(), reverse=True).index(p[t, target].item()) + 1


def exits_by_hand(model, idx, targets, threshold, criterion, n_loop) -> dict[tuple[int, int], tuple[int, float]]:
    """Loops and loss of each token, (b, t), one token after the other."""
    h = x0 = model.embed(idx)
    memory, read, gone = None, {}, {}
    for loop in range(1, n_loop + 1):
        new, memory, _ = model.run_loop(h, loop - 1, x0, memory)
        h = h.clone()
        for token in set(itertools.product(range(len(idx)), range(idx.shape[1]))) - gone.keys():
            h[token] = new[token]
            p, before = model.logits(h[token][None, None])[0, 0].softmax(-1), read.get(token)
            if criterion == "entropy":
                done = -(p * p.log()).sum() < threshold
            else:
                done = before is not None and (p * (p / before).log()).sum() < threshold
            if done or loop == n_loop:
                gone[token] = loop, -p[targets[token]].log().item()
            read[token] = p
    return gone


@pytest.mark.parametrize("criterion, thresholds", [("kl", (0.0, 0.01, 0.1, 1e9)), ("entropy", (0.0, 1.5, 2.0, 1e9))])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "loom"])
def test_early_exit_is_what_a_slow_loop_over_tokens_finds(criterion, thresholds, plain):
    model, idx, targets = looped() if not plain else (build(tiny(rule="none"), shaken=True), *example(tiny()))
    targets = targets.clamp_min(0)
    counts = []
    for threshold in thresholds:
        found = probes.early_exit(model, idx, targets, threshold, criterion=criterion, n_loop=6)
        with torch.no_grad():
            by_hand = exits_by_hand(model.eval(), idx, targets, threshold, criterion, 6)
        for token, (loops, loss) in by_hand.items():
            assert found.loops[token] == loops and found.losses[token].item() == pytest.approx(loss, rel=1e-9)
        counts.append(found.loops.double().mean().item())
    assert counts[0] == 6 > counts[2] > counts[3] == (2 if criterion == "kl" else 1)


def test_early_exit_at_threshold_zero_is_the_whole_loop_and_leaves_the_mode_alone():
    model, idx, targets = looped()
    model.train()
    for n_loop in (None, 3, 8):
        found = probes.early_exit(model, idx, targets, 0.0, n_loop=n_loop)
        whole = probes.loss_after_each_loop(model, [(idx, targets)], n_loop)
        assert found.loops.unique().tolist() == [len(whole)]
        assert found.losses.mean().item() == pytest.approx(whole[-1], rel=1e-12)
    assert model.training
    with pytest.raises(ValueError, match="criterion='norm' is not one of"):
        probes.early_exit(model, idx, targets, 0.0, criterion="norm")


def test_early_exit_at_threshold_zero_stands_rounding():
    """Where next to nothing changes, single precision finds divergences a little below zero."""
    model = build(tiny(rule="factored", lam=1e-4), dtype=torch.float32)
    idx, targets = example(tiny(), batch=16)
    assert (probes.early_exit(model, idx, targets.clamp_min(0), 0.0).loops == 3).all()
