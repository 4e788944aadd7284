"""Chapter 3: right answers, written without the notebook's solutions, and mistakes that readers make."""

import itertools

import numpy as np
import torch

from minilooped.course import checks
from minilooped.model import LoopedConfig


def norms_along_the_blocks(model, idx, rope=True):
    """Without a hook: each block called by hand."""
    h, rows = model.embed(idx), []
    for loop in range(model.config.n_loop):
        for block in model.blocks:
            h = block(h, loop, rope=model.rope[:, : idx.shape[1]])[0]
            rows.append(h.square().mean().sqrt())
    return torch.stack(rows).view(model.config.n_loop, -1)


def norms_of_loops(model, idx):
    return torch.stack([h.square().mean().sqrt() for h in model(idx, return_states=True)[2]])[:, None]


def hooked(keep, what=1, remove=True):
    """The RMS of a block's input (0), output (1) or increment (2), by hooks; `keep(records, block, value)`."""

    def answer(model, idx):
        records = {}

        def hook(block, inputs, outputs):
            h = (inputs[0], outputs[0], outputs[0] - inputs[0])[what]
            keep(records, block, h.square().mean().sqrt())

        handles = [block.register_forward_hook(hook) for block in model.blocks]
        model(idx)
        for handle in handles if remove else ():
            handle.remove()
        return torch.stack([torch.stack(column) for column in records.values()], dim=1)  # (N, L)

    return answer


def append(records, block, value):
    records.setdefault(block, []).append(value)


def overwrite(records, block, value):
    records[block] = [value]


def pairwise_cosine(states, increments=True, dims=None):
    steps = [b - a for a, b in itertools.pairwise(states)] if increments else states[1:]
    return float(
        np.mean(
            [
                torch.cosine_similarity(a if dims else a.flatten(), b if dims else b.flatten(), dim=-1).mean()
                for a, b in itertools.combinations(steps, 2)
            ]
        )
    )


def with_the_diagonal(states):
    N = len(states) - 1
    return (pairwise_cosine(states) * (N - 1) + 1) / N


RIGHT = {
    checks.visit_norms: norms_along_the_blocks,
    checks.mean_loop_cosine: pairwise_cosine,
    checks.striped_length: lambda L, N, cosine: L * N * (1 - cosine) + cosine * L * N**2,
    checks.hide_the_growth: lambda: {"loop_end_norm": True},
}


# What the answer computes instead, and what the reader is told.
WRONG = {
    checks.visit_norms: {
        "the last loop": (hooked(overwrite), r"1 blocks x 3 loops: .*\[3, 1\]\), got torch.Size\(\[1, 1\]"),
        "hooks left": (hooked(append, remove=False), "1 blocks x 3 loops: hooks are left on the model, 1 of them"),
        "the inputs": (hooked(append, what=0), "1 blocks x 3 loops: 0% of the values agree"),
        "the increments": (hooked(append, what=2), "1 blocks x 3 loops: 0% of the values agree"),
        "blocks first": (lambda *a: hooked(append)(*a).T.contiguous(), r"\[3, 1\]\), got torch.Size\(\[1, 3\]"),
        "flat": (lambda *a: hooked(append)(*a).flatten(), r"got torch.Size\(\[3\]"),
        "loops for visits": (norms_of_loops, r"3 blocks x 1 loops: expected shape"),
        "a dict": (lambda *_: {}, "expected a tensor, got dict"),
    },
    checks.mean_loop_cosine: {
        "the diagonal too": (with_the_diagonal, "of 2 loops: .* off by"),
        "the states": (lambda states: pairwise_cosine(states, increments=False), "of 2 loops: .* off by"),
        "token by token": (lambda states: pairwise_cosine(states, dims=True), "of 2 loops: .* off by"),
        "a tensor": (lambda states: torch.tensor(pairwise_cosine(states)), "expected a number, got Tensor"),
        "first and last": (
            lambda states: pairwise_cosine([states[0], states[1], states[-2], states[-1]]),
            "of [247] loops: .* off by",
        ),
    },
    checks.striped_length: {
        "one block": (lambda L, N, cosine: N + cosine * N * (N - 1), "64 blocks x 1 loops, cosine 0.7: .* off by"),
        "all agree": (
            lambda L, N, cosine: L * N + cosine * L * N * (L * N - 1),
            "64 blocks x 1 loops, cosine 0.7: .* off by",
        ),
        "the length": (
            lambda L, N, cosine: (L * (N + cosine * N * (N - 1))) ** 0.5,
            "1 blocks x 64 loops, cosine 0.7: .* off by",
        ),
        "swapped": (lambda L, N, cosine: N * (L + cosine * L * (L - 1)), "1 blocks x 64 loops, .*: 64.0 is not"),
    },
    checks.hide_the_growth: {
        "nothing": (dict, r"R at \(8, 16, 32\) loops is .*, a slope of 1.*; get it below 0.3"),
        "louder": (lambda: {"init_std": 1.0}, "a slope of 1.* below 0.3"),
        "a small start": (lambda: {"embed_norm": False}, "a slope of 1.* below 0.3"),
        "a rule": (lambda: {"rule": "inverse"}, "leave rule as it is"),
        "another depth": (lambda: {"n_layer": 2, "n_loop": 1}, "leave n_layer, n_loop as it is"),
        "no field": (lambda: {"std": 0.02}, "unexpected keyword argument 'std'"),
        "impossible": (lambda: {"n_head": 3}, "n_embd=32 must be a multiple of n_head=3"),
        "a config": (lambda: LoopedConfig(), "expected a dict of fields of LoopedConfig, got LoopedConfig"),
    },
}
