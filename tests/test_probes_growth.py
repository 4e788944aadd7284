"""Growth of untrained models over loops and blocks, against a loop by hand."""

import pytest
import torch
from helpers import rms, tiny

from minilooped.course import plots
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.science import probes


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
