"""Chapter 10: right answers, written without the notebook's solutions, and mistakes that readers make."""

from dataclasses import replace

import torch

from minilooped.course import checks
from minilooped.model import LoopedConfig, LoopedGPT


def operations(c: LoopedConfig) -> int:
    """By the weights of the blocks, which every loop meets, and the scores and values of attention."""
    model = LoopedGPT(c)
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim > 1)
    attention = 2 * 2 * c.block_size * c.n_embd * c.n_layer
    return 3 * (c.n_loop * (2 * matrices + attention) + 2 * c.vocab_size * c.n_embd)


def largest_divisor(sequences, most):
    grad_accum = next(n for n in range(1, sequences + 1) if sequences % n == 0 and sequences // n <= most)
    return torch.tensor([sequences // grad_accum, grad_accum])


RIGHT = {
    checks.training_flops: operations,
    checks.standing_bytes: lambda parameters, by_muon: 16 * (parameters - by_muon) + 12 * by_muon,
    checks.micro_batch: largest_divisor,
    checks.tokens_by_morning: lambda flops, tflops, mfu, hours: hours * 3600 / (flops / (mfu * tflops * 1e12)),
}


# What the answer computes instead, and what the reader is told.
WRONG = {
    checks.training_flops: {
        "unique depth": (lambda c: operations(replace(c, n_loop=1)), "at n_loop=3: .* off by -"),
        "forward only": (lambda c: operations(c) // 3, "at one block, one loop: .* off by -"),
        "no attention": (lambda c: operations(replace(c, block_size=1)), "at one block, one loop: .* off by -"),
        "a head per loop": (
            lambda c: operations(c) + 6 * (c.n_loop - 1) * c.vocab_size * c.n_embd,
            r"at n_loop=3: .* off by \+",
        ),
        "six times the parameters": (lambda c: 6 * LoopedGPT(c).num_params(), "at one block, one loop"),
        "a tensor": (lambda c: torch.tensor(operations(c)), "expected a number, got Tensor"),
    },
    checks.standing_bytes: {
        "weights alone": (lambda parameters, by_muon: 4 * parameters, "0 of them by Muon: .* off by -"),
        "one moment": (lambda parameters, by_muon: 12 * parameters, "0 of them by Muon: .* off by -"),
        "two bytes each": (lambda parameters, by_muon: 8 * parameters, "0 of them by Muon: .* off by -"),
        "Adam for all": (lambda parameters, by_muon: 16 * parameters, r"[1-9]\d* of them by Muon: .* off by \+"),
    },
    checks.micro_batch: {
        "as many as fit": (lambda n, most: torch.tensor([most, n // most]), "480 sequences where 7 fit"),
        "by halving": (
            lambda n, most: next(torch.tensor([n >> k, 1 << k]) for k in range(9) if n >> k <= most),
            "480 sequences where 16 fit",
        ),
        "the other way": (lambda *a: largest_divisor(*a).flip(0), "where 480 fit: 0% of"),
        "a list": (lambda *a: largest_divisor(*a).tolist(), "expected a tensor, got list"),
    },
    checks.tokens_by_morning: {
        "at the peak": (lambda flops, tflops, mfu, hours: 3600 * hours * tflops * 1e12 / flops, "off by"),
        "in seconds": (lambda flops, tflops, mfu, hours: hours * mfu * tflops * 1e12 / flops, "off by -"),
        "hours for a token": (lambda flops, tflops, mfu, hours: flops / (3600 * mfu * tflops * 1e12), "off by -"),
    },
}
