"""Instruments: what a model does, loop by loop. Each returns plain numbers or arrays, for plots, widgets and tests."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .data import Tokenizer
from .model import LoopedConfig, LoopedGPT, Routing, evaluating
from .train import evaluate, loop_rms, sample


@dataclass(frozen=True)
class Dial:
    """One position of the loop dial."""

    n_loop: int
    loss: float  # nats per token
    text: str  # the prompt and its continuation


def loop_dial(
    model: LoopedGPT,
    tokenizer: Tokenizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    n_loops: Sequence[int],
    *,
    prompt: str = "\n",
    max_new_tokens: int = 120,
    seed: int = 1337,
) -> list[Dial]:
    """Loss and a sample at each loop count, of one model whose weights do not change.

    batches: (x, y) pairs, each (B, T), that the loss is over. Every sample is drawn with the same seed.
    """
    return [
        Dial(
            n_loop,
            evaluate(model, batches, n_loop=n_loop),
            sample(model, tokenizer, prompt, max_new_tokens=max_new_tokens, n_loop=n_loop, seed=seed),
        )
        for n_loop in n_loops
    ]


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
                torch.manual_seed(seed)
                model = LoopedGPT(replace(config, rule=rule, n_loop=n_loop))
                total += loop_rms(model, torch.randint(config.vocab_size, (2, config.block_size)))[-1]
            growth[rule].append(total / len(seeds))
    return growth


def saved_bytes(run: Callable[[], object], parameters: Iterable[Tensor] = ()) -> int:
    """Most bytes that autograd holds for backward passes at any one time while `run` runs.

    Each storage counts once, however many operations saved it; those of `parameters` (give buffers too) not at all,
    since they are there anyway. If `run` itself calls backward, what that frees no longer counts.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    holders: Counter[int] = Counter()  # by address of the storage: how many saved tensors hold it
    held = peak = 0

    class Saved:
        """Lives exactly as long as autograd keeps the tensor."""

        def __init__(self, tensor: Tensor):
            nonlocal held, peak
            self.tensor, self.address = tensor, tensor.untyped_storage().data_ptr()
            if self.address not in own:
                holders[self.address] += 1
                if holders[self.address] == 1:
                    held += tensor.untyped_storage().nbytes()
                    peak = max(peak, held)

        def __del__(self):
            nonlocal held
            if self.address not in own:
                holders[self.address] -= 1
                if holders[self.address] == 0:
                    held -= self.tensor.untyped_storage().nbytes()

    with saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        run()
    return peak


@dataclass(frozen=True)
class Cost:
    """What a model of L unique blocks and N loops costs to train."""

    n_layer: int
    n_loop: int
    parameters: int  # unique ones
    operations: int  # floating-point operations per token, forward and backward
    saved: int  # bytes that autograd holds for the backward pass of one full window


def cost(config: LoopedConfig) -> Cost:
    """Build a model, run one window of `block_size` random tokens through it, and count."""
    model = LoopedGPT(config)
    idx, targets = torch.randint(config.vocab_size, (2, 1, config.block_size))  # (1, T) each
    saved = saved_bytes(lambda: model(idx, targets), [*model.parameters(), *model.buffers()])
    return Cost(config.n_layer, config.n_loop, model.num_params(), model.flops_per_token(), saved)


@torch.no_grad()
def routing(model: LoopedGPT, idx: Tensor, n_loop: int | None = None) -> tuple[Tensor, Tensor]:
    """Which experts each token meets at every visit, in eval mode, for tokens idx (B, T).

    Returns choices (N, L, B, T, k) int64 and loads (N, L, E) int64, tokens per expert. The record is kept per visit: a
    router that serves all loops is asked N times. Raises ValueError for a dense model.
    """
    config = model.config
    if not config.n_expert:
        raise ValueError("routing needs a model with experts: set n_expert > 0")
    visits: list[Routing] = []
    hooks = [
        block.mlp.router.register_forward_hook(lambda module, inputs, routing: visits.append(routing))
        for block in model.blocks
    ]
    try:
        with evaluating(model):
            model(idx, n_loop=n_loop)
    finally:
        for hook in hooks:
            hook.remove()
    choices = torch.stack([visit.choice for visit in visits])  # (N * L, B * T, k)
    loads = torch.stack([visit.load for visit in visits])  # (N * L, E)
    return choices.view(-1, config.n_layer, *idx.shape, config.top_k), loads.view(-1, config.n_layer, config.n_expert)


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


@torch.random.fork_rng(devices=[])
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
                torch.manual_seed(seed)
                model = LoopedGPT(replace(config, n_layer=n_layer, n_loop=n_loop)).eval()
                idx = torch.randint(config.vocab_size, (2, config.block_size))  # (B, T)
                start, end = model.embed(idx), model(idx, return_states=True)[2][-1]  # (B, T, C) each
                ends[:, s, i, j] = torch.stack((end, end - start)).square().mean((1, 2, 3)).sqrt()
    return Plane(*ends.mean(1))
