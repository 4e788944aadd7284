"""Segmented backprop: which loops a gradient reaches, and how it differs from the whole one."""

import pytest
import torch
from small_models import looped

from minilooped.science import probes


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


def test_largest_jump_is_above_the_twenty_steps_before():
    falling = [float(60 - step) for step in range(60)]
    assert probes.largest_jump(falling) == -10.5  # a step of a line below the mean of the 20 before it
    spiked = [*falling[:40], 25.0, *falling[41:]]  # was 20, after 40 to 21 with a mean of 30.5
    assert probes.largest_jump(spiked) == -5.5
    assert probes.largest_jump([1.0] * 20 + [4.0]) == 3 and probes.largest_jump([9.0] + [1.0] * 20 + [4.0]) == 3
    with pytest.raises(ValueError, match="20 losses are too few"):
        probes.largest_jump([1.0] * 20)
