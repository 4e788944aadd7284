"""Does the stream of an untrained model grow with its loops and blocks?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...model import LoopedConfig
from ...train import loop_rms
from .running import fresh


def norm_growth(
    config: LoopedConfig, rules: Sequence[str], n_loops: Sequence[int], *, seeds: Sequence[int] = (0, 1, 2)
) -> dict[str, list[float]]:
    """RMS of the stream after the last loop of an untrained model, per rule, one value per loop count.

    The mean over seeds, for random tokens that fill the window. Give `config` an init_std of n_embd ** -0.5 and
    embed_norm=True: the stream then starts at RMS 1, and the branches are large enough for a slope to show.
    """
    growth: dict[str, list[float]] = {}
    for rule in rules:
        growth[rule] = []
        for n_loop in n_loops:
            total = 0.0
            for seed in seeds:
                total += loop_rms(*fresh(replace(config, rule=rule, n_loop=n_loop), seed, (2, config.block_size)))[-1]
            growth[rule].append(total / len(seeds))
    return growth


@dataclass(frozen=True)
class Plane:
    """Where an untrained stream ends, over blocks L (rows) and loops N (columns). Each tensor is (L, N), as counted."""

    rms: Tensor  # RMS of the stream after the last loop
    moved: Tensor  # RMS of its distance from where it started

    @property
    def over_loops(self) -> float:
        """The largest factor by which the RMS at one L differs between two loop counts; 1 is flat."""
        return (self.rms.amax(1) / self.rms.amin(1)).max().item()

    @property
    def over_layers(self) -> float:
        """The largest factor by which the RMS at one N differs between two block counts; 1 is flat."""
        return (self.rms.amax(0) / self.rms.amin(0)).max().item()


@torch.no_grad()
def growth_plane(
    config: LoopedConfig, n_layers: Sequence[int], n_loops: Sequence[int], *, seeds: Sequence[int] = (0,)
) -> Plane:
    """Run an untrained model of `config.rule` for every pair of a block count and a loop count.

    The mean over seeds, for random tokens that fill the window. As for `norm_growth`, give `config` an init_std of
    n_embd ** -0.5 and embed_norm=True, so that the stream starts at RMS 1 and the branches are heard.
    """
    ends = torch.zeros(2, len(seeds), len(n_layers), len(n_loops))
    for s, seed in enumerate(seeds):
        for i, n_layer in enumerate(n_layers):
            for j, n_loop in enumerate(n_loops):
                model, idx = fresh(replace(config, n_layer=n_layer, n_loop=n_loop), seed, (2, config.block_size))
                start, end = model.embed(idx), model.eval()(idx, return_states=True)[2][-1]  # (B, T, C) each
                ends[:, s, i, j] = torch.stack((end, end - start)).square().mean((1, 2, 3)).sqrt()
    return Plane(*ends.mean(1))
