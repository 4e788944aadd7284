"""The first steps of training, against a training by hand."""

import pytest
import torch
from helpers import rms, tiny

from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.science import probes, toy


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
