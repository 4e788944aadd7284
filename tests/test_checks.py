"""The exercises' checkers: the right answer passes; a wrong one is told what differs; a missing one does no harm."""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from minilooped.course import checks
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.science import toy


@pytest.fixture
def printed(capsys: pytest.CaptureFixture) -> Callable[[], str]:
    return lambda: capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# installation


def test_installation_prints_versions_device_and_reasons(printed, monkeypatch):
    device = torch.device("cuda"), "torch sees a gold-plated GPU"
    monkeypatch.setattr(checks.ch00_start_here, "pick_device", lambda: device)
    monkeypatch.setattr(
        checks.ch00_start_here, "pick_dtype", lambda chosen: (torch.bfloat16, f"{chosen.type} likes it")
    )
    checks.installation()
    lines = dict(line.split(maxsplit=1) for line in printed().splitlines())
    for package in ("minilooped", "torch", "jupyterlab", "ipywidgets", "matplotlib"):
        assert lines[package] == version(package)
    assert lines["device"] == "cuda: torch sees a gold-plated GPU"
    assert lines["dtype"] == "bfloat16: cuda likes it"
    assert lines["threads"] == str(torch.get_num_threads())


def test_installation_works_on_this_machine(printed):
    checks.installation()
    assert re.search(r"^device +(cpu|cuda|mps): \w+", printed(), re.MULTILINE)


# ----------------------------------------------------------------------------------------------------------------------
# compare


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        ("4", 4, "expected a number, got str"),
        (True, 1, "expected a number, got bool"),
        (torch.tensor(4), 4, "expected a number, got Tensor"),
        (8, 4, r"8 is not right, it is off by \+4"),
        (-4, 4, r"-4 is not right, it is off by -8"),
        (4.001, 4, "4.001 is not right"),
        (math.inf, 4, "inf is not right"),
        (1234567, 7, "1,234,567 is not right"),
        ([1.0, 2.0], torch.ones(2), "expected a tensor, got list"),
        (torch.ones(3), torch.ones(2), r"expected shape torch.Size\(\[2\]\), got torch.Size\(\[3\]\)"),
        (torch.ones(2, dtype=torch.long), torch.ones(2), "expected dtype torch.float32, got torch.int64"),
        (torch.tensor([1.0, 1.5, 1.0, 0.0]), torch.ones(4), "50% of the values agree; the furthest is off by 1"),
        (torch.tensor([1.0, 1.001]), torch.ones(2), "50% of the values agree; the furthest is off by 0.001"),
        (torch.tensor([math.nan, 1.0]), torch.ones(2), "50% of the values agree"),
    ],
)
def test_compare_says_what_differs(answer, expected, message):
    with pytest.raises(AssertionError, match=f"^name: .*{message}"):
        checks.compare("name", answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"), [(4, 4), (4.0, 4), (1e6 + 1, 1e6), (torch.ones(2) + 1e-6, torch.ones(2))]
)
def test_compare_accepts_what_differs_by_rounding(answer, expected, printed):
    assert checks.compare("name", answer, expected)
    assert printed() == ""


def test_compare_needs_more_than_a_small_difference_when_asked_to():
    with pytest.raises(AssertionError):
        checks.compare("name", 1_000_001, 1_000_000, tolerance=0)


# ----------------------------------------------------------------------------------------------------------------------
# The exercises: right answers, written without the notebook's solutions, and the mistakes that readers make


def blocks(model: LoopedGPT) -> int:
    """Parameters of one loop's blocks, counted by name."""
    return sum(p.numel() for name, p in model.state_dict().items() if name.startswith("blocks."))


def read_out(model, h, targets):
    logits = model.logits(h)
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def losses_of_states(model, idx, targets, n_loop):
    return torch.stack([read_out(model, h, targets) for h in model(idx, n_loop=n_loop, return_states=True)[2]])


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


def start_and_products(h0, r, eps):
    """By the Gram matrix of the start and the increments, of which these three are parts."""
    vectors = torch.cat([h0[None], eps * r])
    products = vectors @ vectors.T / len(h0)
    return torch.stack([products[0, 0], 2 * products[0, 1:].sum(), products[1:, 1:].sum()])


def first_flat(final_norm, tolerance=1.1, grid=range(13)):
    return next(k / 8 for k in grid if final_norm(64, k / 8) / final_norm(8, k / 8) <= tolerance)


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


def pairs(W):
    """A block-diagonal (d, d) of a 2 x 2 block."""
    return lambda d: torch.block_diag(*[torch.tensor(W)] * (d // 2))


def all_into_the_first(d):
    """Adds all other coordinates into the first one, which it does not see."""
    W = torch.zeros(d, d)
    W[0, 1:] = 1.0
    return W


def slopes(branch, n):
    """a and b of c N^-a L^-b, from 1 to n."""
    fall = [math.log(branch(1, 1) / branch(*point), n) for point in ((1, n), (n, 1))]
    return torch.tensor(fall)


def octaves_by_polynomial(lrs, small, large, mean=lambda losses: losses.mean(0)):
    """A parabola fitted to all points, which is the one through any three of them."""
    x = torch.tensor(lrs, dtype=torch.float64).log2()
    terms = torch.stack((x**2, x, torch.ones_like(x)), 1)  # (K, 3)
    a, b, _ = torch.linalg.lstsq(terms, torch.stack((mean(small), mean(large)), 1)).solution  # (2,) each
    return (-b / (2 * a)).diff().item()


def lowest_on_the_grid(lrs, small, large):
    return math.log2(lrs[int(large.mean(0).argmin())] / lrs[int(small.mean(0).argmin())])


def side_by_side(W, dW, h0, N, eps, seen=lambda moved, h: moved):
    phi, h, moved, direct = toy.BRANCHES["pre_norm"], h0, h0, torch.zeros_like(h0)
    for _ in range(N):
        direct = direct + eps * dW @ phi(seen(moved, h))
        h, moved = h + eps * W @ phi(h), moved + eps * (W + dW) @ phi(moved)
    return torch.stack([direct, moved - h - direct])


# -- chapter 9


def pieces(n_loop, segment, row=lambda loops, n_loop: [loop in loops for loop in range(n_loop)]):
    return torch.tensor(
        [row(range(first, min(first + segment, n_loop)), n_loop) for first in range(0, n_loop, segment)]
    )


def most_loops(held, n_loop, memory, asked=(3, 5), least=0):
    (m, at_m), (n, at_n) = ((n, held(n)) for n in asked)
    per_loop = (at_n - at_m) // (n - m)
    return max([n for n in range(1, n_loop + 1) if at_m + (n - m) * per_loop <= memory], default=least)


def detached(step, h0, n_loop, K, late=0):
    h = h0
    for loop in range(n_loop):
        h = step(h.detach() if loop == n_loop - K + late else h)
    return h


def gaussian(d):
    return torch.randn(d, d, generator=torch.Generator().manual_seed(3)) / d**0.5


# -- chapter 7


def weights_of_chosen(score, bias, k, biased=False, renormalised=True):
    scored = score + bias if biased else score
    kept = torch.zeros_like(score).scatter(1, (score + bias).topk(k).indices, 1.0) * scored
    return kept / kept.sum(1, keepdim=True) if renormalised else kept


def in_common(first, second):
    """(S,)"""
    return (first[:, :, None] == second[:, None, :]).sum((1, 2)).double()


def paired_by_chance(first, second):
    E, k = int(max(first.max(), second.max())) + 1, first.shape[1]
    a, b = (c.flatten().bincount(minlength=E).double() / len(c) for c in (first, second))
    return (a @ b / k).item()


def grouped(x, choice, weight, experts, weighted=True):
    y = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, place = (choice == e).nonzero(as_tuple=True)
        if len(token):
            out = expert(x[token])
            y.index_add_(0, token, weight[token, place, None] * out if weighted else out)
    return y


def one_by_one(x, choice, weight, experts):
    y = torch.zeros_like(x)
    for token, (own, ws) in enumerate(zip(choice.tolist(), weight, strict=True)):
        for e, w in zip(own, ws, strict=True):
            y[token] += w * experts[e](x[token : token + 1])[0]
    return y


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
    checks.untied_parameters: lambda m: sum(p.numel() for p in m.parameters()) + (m.config.n_loop - 1) * blocks(m),
    checks.loss_after_every_loop: losses_of_states,
    checks.extra_compute: lambda m, n_loop: flops(m, n_loop) / flops(m, m.config.n_loop),
    checks.layer_loop: layers_first,
    checks.tied_gradient: lambda g, L: sum(torch.stack(visits) for visits in zip(*[iter(g)] * L, strict=True)),
    checks.albert_parameters: lambda c, E: gpt2_size(c) + E * (c.vocab_size + c.n_embd),
    checks.universal_transformer: told_the_step,
    checks.start_and_sum: start_and_products,
    checks.squared_length: lambda N, cosine: float(N * (1 - cosine) + N**2 * cosine),
    checks.bounded_alpha: first_flat,
    checks.break_the_theorem: lambda d: (-(gaussian(d) @ gaussian(d).T) / 2**0.5, "A1"),
    checks.branch_exponents: lambda branch: slopes(branch, 3),
    checks.gram_sum: lambda N, L, same, other: L * (N + same * N * (N - 1)) + other * (N * L * (N * L - N)),
    checks.literal_lam: lambda lam, l_ref: lam * math.sqrt(l_ref),
    checks.fixup_gain: lambda L, N: 0.3 / math.sqrt(N * math.sqrt(L)),  # the constant is free
    checks.visit_norms: norms_along_the_blocks,
    checks.mean_loop_cosine: pairwise_cosine,
    checks.striped_length: lambda L, N, cosine: L * N * (1 - cosine) + cosine * L * N**2,
    checks.hide_the_growth: lambda: {"loop_end_norm": True},
    checks.carried_lr: lambda lr, n_loop, alpha: lr * n_loop**alpha / n_loop,
    checks.coherence: lambda dW, u, eta: (u @ dW.T).sum(0).norm() / u.sum(0).norm() / eta,
    checks.octaves: octaves_by_polynomial,
    checks.direct_and_passed_on: side_by_side,
    checks.routing_weights: weights_of_chosen,
    checks.jaccard: lambda a, b: (in_common(a, b) / (2 * a.shape[1] - in_common(a, b))).mean().item(),
    checks.overlap_by_chance: paired_by_chance,
    checks.sort_and_group: grouped,
    checks.loops_reached: pieces,
    checks.longest_segment: most_loops,
    checks.last_k_visits: detached,
    # chapter 6
    checks.deeploop_visit: lambda x, f, alpha: toy.normalize(alpha * x + f(toy.normalize(x))),
    checks.multipliers: lambda K, R, p: torch.tensor([(2 * K * R) ** p, (8 * K * R) ** -p]),
    checks.by_visit: lambda x, g: torch.einsum("rto,rti->roi", g, x),
    checks.smallest_exponent: lambda gamma, sign_like: 0.5 if sign_like else (1 + gamma) / 4,
    # chapter 10
    checks.training_flops: operations,
    checks.standing_bytes: lambda parameters, by_muon: 16 * (parameters - by_muon) + 12 * by_muon,
    checks.micro_batch: largest_divisor,
    checks.tokens_by_morning: lambda flops, tflops, mfu, hours: hours * 3600 / (flops / (mfu * tflops * 1e12)),
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
    checks.start_and_sum: {
        "not over d": (lambda h0, r, eps: start_and_products(h0, r, eps) * len(h0), "at N=3, .*: 0% of the values"),
        "eps not squared": (
            lambda h0, r, eps: start_and_products(h0, r, eps) * torch.tensor([1, 1, 1 / eps], dtype=torch.float64),
            "at N=3, d=2, eps=0.5: 67% of the values agree",
        ),
        "half of B": (
            lambda h0, r, eps: start_and_products(h0, r, eps) * torch.tensor([1, 0.5, 1], dtype=torch.float64),
            "67% of the values agree",
        ),
        "the diagonal for C": (
            lambda h0, r, eps: torch.cat(
                [start_and_products(h0, r, eps)[:2], eps**2 * r.square().sum()[None] / len(h0)]
            ),
            "67% of the values agree",
        ),
        "their sum": (lambda *a: start_and_products(*a).sum(), r"shape torch.Size\(\[3\]\), got torch.Size\(\[\]\)"),
        "float32": (lambda *a: start_and_products(*a).float(), "dtype torch.float64, got torch.float32"),
    },
    checks.squared_length: {
        "the length": (lambda N, cosine: (N + cosine * N * (N - 1)) ** 0.5, "at N=64, cosine=0.0: 8.0 is not right"),
        "each pair once": (lambda N, cosine: N + cosine * N * (N - 1) / 2, "at N=64, cosine=1.0"),
        "diagonal twice": (lambda N, cosine: N + cosine * N**2, "at N=1, cosine=0.5: 1.5 is not right"),
        "always straight": (lambda N, cosine: N**2, "at N=64, cosine=0.0: .* off by"),
    },
    checks.bounded_alpha: {
        "of the loop": (lambda final_norm: 1.0, "for a matrix for each visit: .* a smaller alpha is right"),
        "of the stack": (lambda final_norm: 0.5, "for one matrix: .* R is .* after 8 .* a larger alpha is right"),
        "the largest": (lambda final_norm: 1.5, "for one matrix: .* a smaller alpha"),
        "too strict": (lambda final_norm: first_flat(final_norm, tolerance=0.99), "a smaller alpha"),
        "too coarse": (lambda final_norm: first_flat(final_norm, grid=(0, 3, 6, 9)), "a smaller alpha"),
        "an index": (lambda final_norm: int(8 * first_flat(final_norm)), "8 is not right"),
        "none found": (lambda final_norm: "none", "expected a number, got str"),
    },
    checks.break_the_theorem: {
        "zero": (lambda d: (torch.zeros(d, d), "A3"), "is 0; .* stay within 0.5 and 2"),
        "nearly zero": (lambda d: (-0.01 * torch.eye(d), "A1"), "is 0.0001; .* stay within"),
        "huge": (lambda d: (-2 * torch.eye(d), "A1"), "is 4; "),
        "not a number": (lambda d: (torch.full((d, d), math.nan), "A1"), "is nan; "),
        "Gaussian": (lambda d: (gaussian(d), "A3"), r"still grows like N\^(1.9|2)"),
        "identity": (lambda d: (torch.eye(d), "A2"), r"still grows like N\^"),
        "the wrong one": (lambda d: (-torch.eye(d), "A3"), "A3 holds: .* the gain of W on the summed inputs is 1"),
        "never this one": (lambda d: (-torch.eye(d), "A2"), "A2 holds: .* mean square activation is 0.0"),
        "mass that stays": (
            lambda d: (pairs([[-1.0, 1.0], [1.0, -1.0]])(d) / 2**0.5, "A1"),
            "A1 holds: .* mean activation is 0.3",
        ),
        "no assumption": (lambda d: -torch.eye(d), "expected a matrix and one of"),
        "a fourth assumption": (lambda d: (-torch.eye(d), "A4"), "expected a matrix and one of"),
        "a row": (lambda d: (torch.zeros(d), "A1"), r"of shape \(64, 64\), got shape \(64,\)"),
        "a list": (lambda d: ((-torch.eye(d)).tolist(), "A1"), r"of shape \(64, 64\), got list"),
    },
    checks.branch_exponents: {
        "the other way round": (lambda branch: slopes(branch, 2).flip(0), "of 1 N.* 0% of the values agree"),
        "with their sign": (lambda branch: -slopes(branch, 2), "of 1 N.* 0% of the values agree"),
        "not divided by c": (
            lambda branch: -torch.tensor([branch(1, 2), branch(2, 1)]).log2(),
            r"of 0.5 N\^-0.5 L\^-1: 0% of the values agree",
        ),
        "both counts at once": (
            lambda branch: torch.tensor([math.log2(branch(1, 1) / branch(2, 2))] * 2),
            "0% of the values agree",
        ),
        "a pair": (lambda branch: tuple(slopes(branch, 2).tolist()), "expected a tensor, got tuple"),
    },
    checks.gram_sum: {
        "the stripes alone": (lambda N, L, same, other: L * N**2 * same, "at N=1, L=3.*: 2.7 is not right"),
        "the diagonal": (lambda N, L, same, other: N * L, "at N=4, L=1, .*: 4 is not right, it is off by"),
        "each pair once": (
            lambda N, L, same, other: N * L + same * L * N * (N - 1) / 2 + other * L * (L - 1) * N**2 / 2,
            "at N=4, L=1",
        ),
        "no other blocks": (
            lambda N, L, same, other: N * L + same * L * N * (N - 1),
            "at N=5, L=4, same=0.8, other=0.1: .* off by -30",
        ),
        "blocks for loops": (
            lambda N, L, same, other: N * L + same * N * L * (L - 1) + other * N * (N - 1) * L**2,
            "at N=1, L=3",
        ),
        "the length": (lambda N, L, same, other: (N * L + same * L * N * (N - 1)) ** 0.5, "at N=1, L=3, .*: 1.7"),
    },
    checks.literal_lam: {
        "as it is": (lambda lam, l_ref: lam, "of lam=1, l_ref=12: 1.0 is not right"),
        "divided": (lambda lam, l_ref: lam / l_ref**0.5, "of lam=1, l_ref=12"),
        "without the root": (lambda lam, l_ref: lam * l_ref, "of lam=1, l_ref=12: 12.0 is not right"),
        "without lambda": (lambda lam, l_ref: l_ref**0.5, "of lam=0.5, l_ref=4: 2.0 is not right"),
    },
    checks.fixup_gain: {
        "Fixup's own": (lambda L, N: L**-0.25, "at L=1, N=4: 1.0 is not right, it is off by"),
        "the unrolled depth": (lambda L, N: (L * N) ** -0.25, "at L=1, N=4: 0.707.* is not right"),
        "of two matrices": (lambda L, N: 1 / (N * L**0.5), "at L=4, N=1: 0.5 is not right"),
        "loops alone": (lambda L, N: N**-0.5, "at L=4, N=1: 1.0 is not right"),
        "both as loops": (lambda L, N: (N * L) ** -0.5, "at L=4, N=1: 0.5 is not right"),
        "zero": (lambda L, N: 0.0, "at L=1, N=1: 0.0 is not right, a gain is positive"),
        "negative": (lambda L, N: -1 / (N * L**0.5), "at L=1, N=1: .* a gain is positive"),
        "not a number": (lambda L, N: math.nan, "at L=1, N=1: nan is not right"),
        "a tensor": (lambda L, N: torch.tensor(1.0), "at L=1, N=1: expected a number, got Tensor"),
    },
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
    checks.carried_lr: {
        "the other way": (lambda lr, N, alpha: lr * N ** (1 - alpha), "of 0.01 at N=8, alpha=0: .* off by"),
        "for any rule": (lambda lr, N, alpha: lr / N, "of 0.02 at N=16, alpha=0.5: .* off by"),
        "kept": (lambda lr, N, alpha: lr, "at N=8, alpha=0: .* off by"),
    },
    checks.coherence: {
        "visit by visit": (
            lambda dW, u, eta: (u @ dW.T).norm(dim=1).sum() / (eta * u.sum(0).norm()),
            "at N=5, d=8, eta=0.001: 0% of the values agree",
        ),
        "transposed": (lambda dW, u, eta: (u.sum(0) @ dW).norm() / (eta * u.sum(0).norm()), "at N=1, d=4"),
        "without eta": (lambda dW, u, eta: (dW @ u.sum(0)).norm() / u.sum(0).norm(), "at N=1, d=4, eta=0.1"),
        "a float": (lambda dW, u, eta: 1.0, "expected a tensor, got float"),
        "one entry": (lambda dW, u, eta: (dW @ u.sum(0)).norm().view(1), r"got torch.Size\(\[1\]\)"),
    },
    checks.octaves: {
        "the grid's": (lowest_on_the_grid, "for 2 seeds: .* off by"),
        "backwards": (lambda lrs, small, large: octaves_by_polynomial(lrs, large, small), "for 2 seeds: .* off by"),
        "the first seed's": (
            lambda *a: octaves_by_polynomial(*a, mean=lambda losses: losses[0]),
            "for 2 seeds: .* off by",
        ),
        "the mean of the seeds'": (
            lambda lrs, *a: (
                sum(octaves_by_polynomial(lrs, s[None], b[None]) for s, b in zip(*a, strict=True)) / len(a[0])
            ),
            "for 2 seeds: .* off by",
        ),
        "a factor": (lambda *a: 2 ** octaves_by_polynomial(*a), "for 1 seeds: .* off by"),
    },
    checks.direct_and_passed_on: {
        "at the old stream": (
            lambda *a: side_by_side(*a, seen=lambda moved, h: h),
            "at N=[38], .*: .* of the values agree",  # few and small, the draw may leave nothing to differ
        ),
        "the other way round": (lambda *a: side_by_side(*a).flip(0), "at N=1, d=4, eps=1: 0% of the values agree"),
        "their sum": (lambda *a: side_by_side(*a).sum(0), "expected shape"),
    },
    checks.routing_weights: {
        "the bias in the weights": (lambda *a: weights_of_chosen(*a, biased=True), "for S=5, E=4, k=2: .* agree"),
        "not renormalised": (lambda *a: weights_of_chosen(*a, renormalised=False), "for S=1, E=2, k=1: .* agree"),
        "the bias ignored": (lambda score, bias, k: weights_of_chosen(score, 0 * bias, k), "for S=.*: .* agree"),
    },
    checks.jaccard: {
        "the overlap": (lambda a, b: (in_common(a, b) / a.shape[1]).mean().item(), "for S=.* is not right"),
        "place by place": (lambda a, b: (a == b).double().mean().item(), "for S=.* is not right"),
        "of all tokens together": (
            lambda a, b: (in_common(a, b).sum() / (2 * a.numel() - in_common(a, b).sum())).item(),
            "for S=(7|50), .* is not right",
        ),
    },
    checks.overlap_by_chance: {
        "balanced": (lambda a, b: a.shape[1] / (int(a.max()) + 1), "for S=.* is not right"),
        "measured": (lambda a, b: (in_common(a, b) / a.shape[1]).mean().item(), "for S=.* is not right"),
        "the cosine of the loads": (
            lambda a, b: torch.cosine_similarity(
                *(c.flatten().bincount(minlength=9).double() for c in (a, b)), dim=0
            ).item(),
            "for S=.* is not right",
        ),
    },
    checks.sort_and_group: {
        "a call per job": (one_by_one, "an expert was called [0-9]+ times, and once is enough"),
        "unweighted": (lambda *a: grouped(*a, weighted=False), "for S=1, E=2, k=2: 0% of the values agree"),
        "left in groups": (
            lambda x, choice, weight, experts: grouped(x, choice, weight, experts)[choice[:, 0].argsort()],
            "for S=6, E=4, k=2: .* agree",
        ),
    },
    checks.loops_reached: {
        "all before": (
            lambda n, K: pieces(n, K, lambda loops, n: [loop <= loops[-1] for loop in range(n)]),
            "of 6 loops, 2 in a segment: 67% of the values agree",
        ),
        "the read-outs": (
            lambda n, K: pieces(n, K, lambda loops, n: [loop == loops[-1] for loop in range(n)]),
            "of 3 loops, 3 in a segment: 33% of the values agree",
        ),
        "a last one too short": (lambda n, K: pieces(n, K)[: max(1, n // K)], r"of 7 loops, 3 in .*expected shape"),
        "numbers": (lambda n, K: pieces(n, K).int(), "expected dtype torch.bool, got torch.int32"),
        "loops first": (lambda n, K: pieces(n, K).T, r"got torch.Size\(\[3, 1\]\)"),
    },
    checks.longest_segment: {
        "no constant": (lambda held, n, memory: min(n, memory // (held(2) - held(1))), "for 12 loops, .* off by"),
        "beyond the loops": (
            lambda held, n, memory: (
                (memory - held(0)) // (held(1) - held(0)) if n == 6 else most_loops(held, n, memory)
            ),
            "for 6 loops, .*: 56 is not right, it is off by",
        ),
        "at least one": (lambda *a: most_loops(*a, least=1), "for 5 loops, .*: 1 is not right"),
        "one by one": (
            lambda held, n, memory: max([k for k in range(1, n + 1) if held(k) <= memory], default=0),
            "for 12 loops, .*: 12 measurements, and two are enough",
        ),
    },
    checks.last_k_visits: {
        "all of them": (lambda step, h0, n, K: detached(step, h0, n, n), "of 5 loops, K=2, gradient of the shared"),
        "one too few": (lambda *a: detached(*a, late=1), "of 4 loops, K=4, gradient of the shared weight"),
        "one too many": (lambda *a: detached(*a, late=-1), "of 5 loops, K=2, gradient of the shared weight"),
        "none": (lambda *a: detached(*a).detach(), "of 4 loops, K=4: .* no gradient at all"),
        "K loops only": (lambda step, h0, n, K: detached(step, h0, min(n, K), K), "of 5 loops, K=2: 0% of"),
        "the start": (lambda *a: detached(*a) + 0 * a[1] + (a[1] - a[1].detach()), "K=2: a gradient reaches the start"),
        "a list": (lambda *a: detached(*a).tolist(), "expected a tensor, got list"),
    },
    # chapter 6
    checks.deeploop_visit: {
        "alpha on the branch": (
            lambda x, f, alpha: toy.normalize(x + alpha * f(toy.normalize(x))),
            "at d=4, alpha=2: .* of the values agree",
        ),
        "one norm": (lambda x, f, alpha: toy.normalize(alpha * x + f(x)), "at d=4, alpha=2"),
        "no closing norm": (lambda x, f, alpha: alpha * x + f(toy.normalize(x)), "at d=4, alpha=2"),
    },
    checks.multipliers: {
        "the blocks alone": (lambda K, R, p: torch.tensor([(2 * K) ** p, (8 * K) ** -p]), "at K=2, R=8, p=0.25"),
        "swapped": (lambda K, R, p: torch.tensor([(8 * K * R) ** -p, (2 * K * R) ** p]), "at K=1, R=1, p=0.25"),
        "DeepLoop's for both": (
            lambda K, R, p: torch.tensor([(2 * K * R) ** 0.5, (8 * K * R) ** -0.5]),
            "at K=1, R=1, p=0.25",
        ),
    },
    checks.by_visit: {
        "summed over the visits": (lambda x, g: torch.einsum("rto,rti->oi", g, x), "of 1 visits.*: expected shape"),
        "transposed": (lambda x, g: torch.einsum("rto,rti->rio", g, x), "of 1 visits.*: expected shape"),
        "mean over the tokens": (
            lambda x, g: torch.einsum("rto,rti->roi", g, x) / x.shape[1],
            "of 1 visits, 2 tokens.*: 0% of the values",
        ),
        "another visit's input": (
            lambda x, g: torch.einsum("rto,rti->roi", g, x.flip(0)),
            "of 4 visits.*: .* of the values agree",
        ),
    },
    checks.smallest_exponent: {
        "for any step": (lambda gamma, sign_like: (1 + gamma) / 4, "of a sign-like step, gamma=0: .* off by"),
        "halves": (lambda gamma, sign_like: (1 + gamma) / 2, "of a gradient step, gamma=0: .* off by"),
        "DeepLoop's": (lambda gamma, sign_like: 0.5, "of a gradient step, gamma=0: .* off by"),
    },
}


# -- chapter 8 ---------------------------------------------------------------------------------------------------------


def averages(o: torch.Tensor, beta: float, *, clear: bool = True, from_reads: bool = True) -> torch.Tensor:
    """The looping residual's updates (H, M, d), from the weights of the closed form.

    clear: empty the local memory at each loop's start; from_reads: feed the global one by what the local one reads.
    """

    def mean(written: torch.Tensor) -> torch.Tensor:
        weights = beta ** torch.arange(len(written) - 1.0, -1.0, -1.0, dtype=written.dtype)
        return weights @ written / weights.sum()

    H, M, d = o.shape
    flat, reads, updates = o.reshape(H * M, d), [], []
    for visit in range(H * M):
        first = visit - visit % M if clear else 0
        reads.append(mean(flat[first : visit + 1]))
        updates.append(reads[-1] + mean(torch.stack(reads) if from_reads else flat[: visit + 1]))
    return torch.stack(updates).view(H, M, d)


def survives(H: int, M: int, lam: float) -> float:
    """By the Gamma function: the product over t of (t - c) / t."""
    c = lam / M**0.5
    return math.exp(math.lgamma(H + 1 - c) - math.lgamma(2 - c) - math.lgamma(H + 1))


RIGHT |= {
    checks.surviving_share: survives,
    checks.looping_residual: averages,
    checks.paired_interval: lambda one, other, t: torch.stack(
        [(one - other).mean(), t * ((one - other).var() / len(one)).sqrt()]
    ),
}
WRONG |= {
    checks.surviving_share: {
        "from the first loop": (lambda H, M, lam: survives(H, M, lam) * (1 - lam / M**0.5), "at H=1, M=2.* off by"),
        "the rest": (lambda H, M, lam: 1 - survives(H, M, lam), "at H=1, M=2, lam=0.5: 0.0 is not right"),
        "one block": (lambda H, M, lam: survives(H, 1, lam), "at H=9, M=10, lam=0.5: .* off by"),
    },
    checks.looping_residual: {
        "one local memory for all": (partial(averages, clear=False), "at H=3, M=1, beta=0.9: .* of the values agree"),
        "both fed by the output": (partial(averages, from_reads=False), "at H=1, M=3, beta=0.5: .* agree"),
        "the local mean alone": (lambda o, beta: averages(o[:1], beta).expand(len(o), -1, -1) / 2, "at H=1, M=1"),
        "one row": (lambda o, beta: averages(o, beta).flatten(0, 1), "expected shape"),
    },
    checks.paired_interval: {
        "unpaired": (
            lambda one, other, t: torch.stack(
                [(one - other).mean(), t * ((one.var() + other.var()) / len(one)).sqrt()]
            ),
            "for 2 seeds: 50% of the values agree",
        ),
        "the spread": (
            lambda one, other, t: torch.stack([(one - other).mean(), t * (one - other).std()]),
            "for 2 seeds: 50% of the values agree",
        ),
        "two standard errors": (
            lambda one, other, t: RIGHT[checks.paired_interval](one, other, 2),
            "for 2 seeds: 50% of the values agree",
        ),
        "the other way": (
            lambda one, other, t: RIGHT[checks.paired_interval](other, one, t),
            "for 2 seeds: 50% of the values agree",
        ),
        "a float": (lambda one, other, t: (one - other).mean().item(), "expected a tensor, got float"),
    },
    # chapter 10
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


# -- chapter 11 --------------------------------------------------------------------------------------------------------


def changed_least(log_p, threshold, *, first=2, swapped=False):
    before, now = (log_p[1:], log_p[:-1]) if swapped else (log_p[:-1], log_p[1:])
    small = (now.exp() * (now - before)).sum(-1) < threshold  # (N - 1, T)
    loops = torch.arange(first, first + len(small))[:, None]
    return torch.where(small, loops, len(log_p)).amin(0) if len(small) else torch.ones(log_p.shape[1], dtype=torch.long)


def bottom(x, losses):
    a, b, _ = np.polyfit(x.numpy(), losses.numpy(), 2)
    return -b / (2 * a)


def fitted_bottom(n_loops, losses):
    return 2 ** bottom(n_loops.log2(), losses)


def before_the_first_rise(log_p, threshold):
    """Leaves as soon as a change is small, and comes back when it is not."""
    small = (log_p[1:].exp() * (log_p[1:] - log_p[:-1])).sum(-1) < threshold
    return len(log_p) - small.sum(0)


RIGHT |= {
    checks.drawn_loss: lambda *a: losses_of_states(*a).mean(),
    checks.exit_loops: changed_least,
    checks.best_loops: fitted_bottom,
}
WRONG |= {
    checks.drawn_loss: {
        "the last loop": (lambda *a: losses_of_states(*a)[-1], "at n_loop=2"),
        "the sum": (lambda *a: losses_of_states(*a).sum(), "at n_loop=2"),
        "the mean count": (lambda m, x, y, n: m(x, y, n_loop=(n + 1) // 2)[1], "at n_loop=2"),
        "a pass for each": (
            lambda m, x, y, n: torch.stack([m(x, y, n_loop=i)[1] for i in range(1, n + 1)]).mean(),
            "3 passes through the stack, and 2 are enough",
        ),
        "a float": (lambda *a: losses_of_states(*a).mean().item(), "expected a tensor, got float"),
    },
    checks.exit_loops: {
        "counted from 0": (partial(changed_least, first=1), "of 4 loops, threshold 0.1"),
        "the divergence the other way": (partial(changed_least, swapped=True), "of [46] loops, threshold 0.[12]"),
        "comes back": (before_the_first_rise, "of 4 loops, threshold 0.1"),
        "never": (lambda p, _: torch.full((p.shape[1],), len(p)), "of 4 loops, threshold 0.1"),
    },
    checks.best_loops: {
        "the grid's best": (lambda n, losses: n[losses.argmin()].item(), "of N = 1, 2, 4"),
        "over N itself": (bottom, "of N = 1, 2, 4"),
        "in octaves": (lambda n, losses: bottom(n.log2(), losses), "of N = 1, 2, 4"),
        "through three points": (lambda n, losses: fitted_bottom(n[:3], losses[:3]), "of N = 1, 2, 4, 8"),
    },
}


def public_checkers() -> set:
    own = {
        value
        for name, value in vars(checks).items()
        if str(getattr(value, "__module__", "")).startswith(checks.__name__)
    }
    tools = {checks.installation, checks.compare, checks.exercise, checks.passed}
    return {f for f in own if f.__name__[0] != "_"} - tools


def test_every_checker_is_tested():
    assert public_checkers() == RIGHT.keys() == WRONG.keys()


@pytest.mark.parametrize("checker", RIGHT, ids=lambda checker: checker.__name__)
def test_right_answer_passes(checker, printed):
    checker(RIGHT[checker])
    assert printed() == f"{checker.__name__}: correct\n"


@pytest.mark.parametrize(
    ("W", "assumption"),
    [
        (lambda d: -torch.eye(d), "A1"),
        (pairs([[0.0, -1.0], [1.0, 0.0]]), "A1"),
        (lambda d: pairs([[-1.0, 1.0], [1.0, -1.0]])(d) / 2**0.5, "A3"),
        (lambda d: -torch.diag(torch.arange(d) % 2 * 2**0.5), "A3"),
        (all_into_the_first, "A3"),  # its gain falls slowly, like N^-1/2
        (lambda d: all_into_the_first(d).T, "A3"),  # from some starts nothing moves at all
    ],
)
def test_theorem_can_be_broken_in_more_ways_than_one(W, assumption, printed):
    checks.break_the_theorem(lambda d: (W(d), assumption))
    assert printed() == "break_the_theorem: correct\n"


@pytest.mark.parametrize("checker", RIGHT, ids=lambda checker: checker.__name__)
def test_missing_answer_does_not_stop_the_notebook(checker, printed):
    checker(lambda *_: None)
    assert re.fullmatch(rf"{checker.__name__} .*: not answered yet\n", printed())


@pytest.mark.parametrize(
    ("checker", "mistake"),
    [(checker, mistake) for checker, mistakes in WRONG.items() for mistake in mistakes],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_wrong_answer_is_told_what_differs(checker, mistake, printed):
    answer, message = WRONG[checker][mistake]
    with pytest.raises(AssertionError, match=message) as error:
        checker(answer)
    assert str(error.value).startswith(checker.__name__)
    assert printed() == ""


@pytest.mark.parametrize(("n_layer", "n_loop"), [(1, 1), (4, 1), (1, 4), (3, 5)])
def test_fixup_gain_keeps_the_first_gradient_step_of_three_matrices(n_layer, n_loop):
    d, eta, gain = 256, 1e-4, RIGHT[checks.fixup_gain](n_layer, n_loop)
    torch.manual_seed(0)
    h0, wish = torch.randn(2, d, dtype=torch.float64)
    W_1, W_2 = gain * torch.randn(2, n_layer, d, d, dtype=torch.float64) * (2 / d) ** 0.5  # relu halves the square
    W_3 = torch.zeros(n_layer, d, d, dtype=torch.float64, requires_grad=True)

    def run(W_3):
        h = h0
        for _ in range(n_loop):
            for layer in range(n_layer):
                h = h + W_3[layer] @ torch.relu(W_2[layer] @ torch.relu(W_1[layer] @ h))
        return h

    (grad,) = torch.autograd.grad(run(W_3) @ wish / d, W_3)
    moved = toy.rms(run(W_3 - eta * grad) - h0) / eta
    # 0.3 at one block and one loop; by the law of large numbers |relu(W_2 relu(W_1 h))|^2 = gain^4 |h|^2
    assert moved.item() == pytest.approx(0.3**4 * (h0 @ h0 / d * toy.rms(wish)).item(), rel=0.25)


def test_a_number_is_a_number_whoever_made_it_and_nan_is_none():
    assert checks.compare("name", np.int64(4), 4) and checks.compare("name", np.float32(4), 4)
    for wrong, expected in ((float("nan"), 4), (1, 0), (29_999, 30_000)):
        with pytest.raises(AssertionError, match="is not right, it is off by"):
            checks.compare("name", wrong, expected, 0)


def test_losses_after_every_loop_take_one_pass_with_the_loops_own_numbers():
    def many_passes(model, idx, targets, n_loop):
        return torch.stack([model(idx, targets, n_loop=n)[1] for n in range(1, n_loop + 1)])

    def one_loop_again_and_again(model, idx, targets, n_loop):
        h, losses = model.embed(idx), []
        for _ in range(n_loop):
            h = model.run_loop(h, 0, h)[0]
            losses.append(cross_entropy(model.logits(h).flatten(0, 1), targets.flatten()))
        return torch.stack(losses)

    with pytest.raises(AssertionError, match="at n_loop=2|3 passes through the stack, and 2 are enough"):
        checks.loss_after_every_loop(many_passes)
    with pytest.raises(AssertionError, match="at n_loop=2"):
        checks.loss_after_every_loop(one_loop_again_and_again)


@pytest.mark.parametrize("checker", RIGHT, ids=lambda checker: checker.__name__)
def test_a_checker_leaves_the_readers_generator_alone(checker):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    checker(RIGHT[checker])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("checker", RIGHT, ids=lambda checker: checker.__name__)
def test_what_a_checker_draws_does_not_depend_on_the_readers_generators(checker, monkeypatch):
    """Nor does it set them: torch.manual_seed would set those of all GPUs."""

    def drawn(seed: int) -> list[str]:
        torch.default_generator.manual_seed(seed)
        given = []
        checker(lambda *args: given.append(repr([a for a in args if isinstance(a, torch.Tensor)])))
        return given

    monkeypatch.setattr(torch, "manual_seed", None)
    assert drawn(1) == drawn(2)
