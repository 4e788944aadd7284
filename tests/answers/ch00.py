"""Chapter 0: right answers, written without the notebook's solutions, and mistakes that readers make."""

from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy

from minilooped.course import checks
from minilooped.model import LoopedGPT


def blocks(model: LoopedGPT) -> int:
    """Parameters of one loop's blocks, counted by name."""
    return sum(p.numel() for name, p in model.state_dict().items() if name.startswith("blocks."))


def read_out(model, h, targets):
    logits = model.logits(h)
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def losses_of_states(model, idx, targets, n_loop):
    return torch.stack([read_out(model, h, targets) for h in model(idx, n_loop=n_loop, return_states=True)[2]])


def losses_by_loops(model, idx, targets, n_loop, run_loop):
    """With a loop of the reader's own, and `run_loop(model, h, loop, x0)` as the reader writes it."""
    h, losses = model.embed(idx), []
    x0 = h
    for loop in range(n_loop):
        h = run_loop(model, h, loop, x0)[0]
        losses.append(read_out(model, h, targets))
    return torch.stack(losses)


def started_anew_each_loop(model, idx, targets, n_loop):
    x0 = model.embed(idx)
    return torch.stack([read_out(model, model.run_loop(x0, t, x0)[0], targets) for t in range(n_loop)])


def read_before_the_loop(model, idx, targets, n_loop):
    states = [model.embed(idx), *model(idx, n_loop=n_loop, return_states=True)[2]]
    return torch.stack([read_out(model, h, targets) for h in states[:-1]])


def embedding_read_out_too(model, idx, targets, n_loop):
    return torch.cat([read_out(model, model.embed(idx), targets)[None], losses_of_states(model, idx, targets, n_loop)])


def without_final_norm(model, idx, targets, n_loop):
    states = model(idx, n_loop=n_loop, return_states=True)[2]
    return torch.stack([cross_entropy((h @ model.wte.weight.T).flatten(0, 1), targets.flatten()) for h in states])


def flops(model: LoopedGPT, n_loop: int) -> float:
    """Two operations per weight of a matrix, and two per channel and position for the scores and for the values."""
    c = model.config
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim > 1)
    return n_loop * (2 * matrices + c.n_layer * 4 * c.block_size * c.n_embd) + 2 * model.wte.weight.numel()


RIGHT = {
    checks.untied_parameters: lambda m: sum(p.numel() for p in m.parameters()) + (m.config.n_loop - 1) * blocks(m),
    checks.loss_after_every_loop: losses_of_states,
    checks.extra_compute: lambda m, n_loop: flops(m, n_loop) / flops(m, m.config.n_loop),
}


# What the answer computes instead, and what the reader is told.
WRONG = {
    checks.untied_parameters: {
        "tied": (lambda m: m.num_params(), "at n_loop=3: .* off by"),
        "a loop too many": (lambda m: m.num_params() + m.config.n_loop * blocks(m), "at n_loop=1: .* off by"),
        "all of it repeated": (lambda m: m.config.n_loop * m.num_params(), "at n_loop=3: .* off by"),
        "no embedding": (lambda m: m.config.n_loop * blocks(m), "at n_loop=1: .* off by"),
        "the model": (lambda m: m, "expected a number, got LoopedGPT"),
        "a tensor": (lambda m: torch.tensor(m.num_params()), "expected a number, got Tensor"),
    },
    checks.loss_after_every_loop: {
        "the last loop": (lambda *a: losses_of_states(*a)[-1], r"shape torch.Size\(\[1\]\), got torch.Size\(\[\]\)"),
        "a list": (lambda *a: losses_of_states(*a).tolist(), "expected a tensor, got list"),
        "a column": (lambda *a: losses_of_states(*a)[:, None], r"got torch.Size\(\[1, 1\]\)"),
        "float64": (lambda *a: losses_of_states(*a).double(), "expected dtype torch.float32, got torch.float64"),
        "the model's own count": (
            lambda m, idx, targets, n_loop: losses_of_states(m, idx, targets, m.config.n_loop),
            r"at n_loop=1: expected shape torch.Size\(\[1\]\), got torch.Size\(\[2\]\)",
        ),
        "backwards": (lambda *a: losses_of_states(*a).flip(0), "at n_loop=2: 0% of the values agree"),
        "started anew": (started_anew_each_loop, "at n_loop=2: 50% of the values agree"),
        "off by one": (read_before_the_loop, "at n_loop=1: 0% of the values agree"),
        "the embedding too": (embedding_read_out_too, r"at n_loop=1: .* got torch.Size\(\[2\]\)"),
        "no final norm": (without_final_norm, "at n_loop=1: 0% of the values agree"),
        "sum for mean": (lambda *a: losses_of_states(*a) * a[1].numel(), "at n_loop=1: 0% of the values agree"),
    },
    checks.extra_compute: {
        "the loops alone": (lambda m, n_loop: n_loop / m.config.n_loop, "from 1 to 2 loops: 2.0 .* off by"),
        "upside down": (lambda m, n_loop: flops(m, m.config.n_loop) / flops(m, n_loop), "from 1 to 2 .* off by -1"),
        "difference": (lambda m, n_loop: flops(m, n_loop) - flops(m, m.config.n_loop), "from 1 to 2 loops"),
        "parameters": (
            lambda m, n_loop: LoopedGPT(replace(m.config, n_loop=n_loop)).num_params() / m.num_params(),
            "from 1 to 2 loops: 1.0 is not right",
        ),
    },
}
