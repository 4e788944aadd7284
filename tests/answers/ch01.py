"""Chapter 1: right answers, written without the notebook's solutions, and mistakes that readers make."""

from dataclasses import replace

import torch

from minilooped.course import checks
from minilooped.model import LoopedConfig, LoopedGPT


def layers_first(model, idx, n_loop):
    """A plain stack in which every block stands n_loop times in a row."""
    c = model.config
    stack = LoopedGPT(replace(c, n_layer=c.n_layer * n_loop, n_loop=1))
    stack.load_state_dict(model.state_dict(), strict=False)
    for i, block in enumerate(stack.blocks):
        block.load_state_dict(model.blocks[i // n_loop].state_dict())
    return stack(idx)[0]


def told_the_step(model, idx, signal, first=0, kept=True):
    h = x0 = model.embed(idx)
    for loop in range(len(signal)):
        told = h + signal[loop] * (loop >= first)
        h = model.run_loop(told, loop, x0)[0] - (0 if kept else signal[loop])
    return model.logits(h)


def gpt2_size(c: LoopedConfig) -> int:
    return c.n_layer * (12 * c.n_embd**2 + 2 * c.n_embd) + (c.block_size + 1) * c.n_embd


RIGHT = {
    checks.layer_loop: layers_first,
    checks.tied_gradient: lambda g, L: sum(torch.stack(visits) for visits in zip(*[iter(g)] * L, strict=True)),
    checks.albert_parameters: lambda c, E: gpt2_size(c) + E * (c.vocab_size + c.n_embd),
    checks.universal_transformer: told_the_step,
}


# What the answer computes instead, and what the reader is told.
WRONG = {
    checks.layer_loop: {
        "the whole stack again": (lambda m, idx, n: m(idx, n_loop=n)[0], "3 blocks x 2: .* of the values agree"),
        "one pass": (lambda m, idx, n: m(idx, n_loop=1)[0], "1 blocks x 3: 0% of the values agree"),
        "a loop too many": (lambda m, idx, n: layers_first(m, idx, n + 1), "1 blocks x 3: .* of the values agree"),
        "the stream": (lambda m, idx, n: m(idx, n_loop=n, return_states=True)[2][-1], "expected shape"),
        "the tuple": (lambda m, idx, n: m(idx), "expected a tensor, got tuple"),
        "the last position": (lambda m, idx, n: layers_first(m, idx, n)[:, -1], "expected shape"),
    },
    checks.tied_gradient: {
        "mean": (lambda g, L: g.view(-1, L, 4, 5).mean(dim=0), "1 blocks x 4 loops: 0% of the values agree"),
        "blocks first": (lambda g, L: g.view(L, -1, 4, 5).sum(dim=1), "3 blocks x 2 loops: .* of the values agree"),
        "over the blocks": (lambda g, L: g.view(-1, L, 4, 5).sum(dim=1), "1 blocks x 4 .* shape .*, got"),
        "all of it": (lambda g, L: g.sum(dim=0), "expected shape"),
        "the last visit": (lambda g, L: g[-L:], "1 blocks x 4 loops: 0% of the values agree"),
        "float32": (lambda g, L: g.view(-1, L, 4, 5).sum(dim=0).float(), "expected dtype torch.float64"),
    },
    checks.albert_parameters: {
        "unrolled": (
            lambda c, E: gpt2_size(replace(c, n_layer=c.n_unroll)) + E * (c.vocab_size + c.n_embd),
            "1 x 12, .* off by",
        ),
        "not factorised": (lambda c, E: gpt2_size(c) + c.vocab_size * c.n_embd, "1 x 12, C=16, E=4: .* is not right"),
        "no projection": (lambda c, E: gpt2_size(c) + E * c.vocab_size, "is not right"),
        "a head of its own": (lambda c, E: gpt2_size(c) + 2 * E * (c.vocab_size + c.n_embd), "is not right"),
        "no final norm": (lambda c, E: gpt2_size(c) - c.n_embd + E * (c.vocab_size + c.n_embd), "is not right"),
        "a float": (lambda c, E: torch.tensor(1.0), "expected a number, got Tensor"),
    },
    checks.universal_transformer: {
        "not told": (lambda m, idx, s: m(idx, n_loop=len(s))[0], "at n_loop=1: 0% of the values agree"),
        "after the pass": (lambda m, idx, s: m(idx, n_loop=len(s))[0] + m.logits(s[-1]), "of the values agree"),
        "told the first loop only": (
            lambda m, idx, s: told_the_step(m, idx, torch.cat((s[:1], 0 * s[1:]))),
            "at n_loop=2: .* of the values agree",
        ),
        "not in the first": (lambda m, idx, s: told_the_step(m, idx, s, first=1), "at n_loop=1: .* values agree"),
        "told the last step always": (
            lambda m, idx, s: told_the_step(m, idx, s[-1:].expand_as(s)),
            "at n_loop=2: .* of the values agree",
        ),
        "taken out again": (lambda m, idx, s: told_the_step(m, idx, s, kept=False), "at n_loop=1: .* values agree"),
        "the model's own count": (
            lambda m, idx, s: told_the_step(m, idx, s[[0]].expand(m.config.n_loop, -1, -1)),
            "at n_loop=2: .* of the values agree",
        ),
    },
}
