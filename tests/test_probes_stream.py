"""The stream at every visit, against a loop by hand."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import LOOM_PARTS, build, rms, tiny, tokens
from small_models import moe

from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.science import probes

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
def test_a_reused_block_has_one_record_per_visit(n_layer, n_loop):
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


def test_mean_cosine_is_over_pairs_of_different_visits():
    seen = probes.visits(build(tiny(rule="none")), torch.arange(10).view(2, 5))
    pairs = [seen.cosines[i, j].item() for i, j in itertools.permutations(range(6), 2)]
    assert seen.mean_cosine == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)


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
