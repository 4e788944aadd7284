"""Chapter 9: right answers, written without the notebook's solutions, and mistakes that readers make."""

import torch

from minilooped.course import checks


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


RIGHT = {checks.loops_reached: pieces, checks.longest_segment: most_loops, checks.last_k_visits: detached}


# What the answer computes instead, and what the reader is told.
WRONG = {
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
}
