"""Chapter 6: right answers, written without the notebook's solutions, and mistakes that readers make."""

import torch

from minilooped.course import checks
from minilooped.science import toy

RIGHT = {
    checks.deeploop_visit: lambda x, f, alpha: toy.normalize(alpha * x + f(toy.normalize(x))),
    checks.multipliers: lambda K, R, p: torch.tensor([(2 * K * R) ** p, (8 * K * R) ** -p]),
    checks.by_visit: lambda x, g: torch.einsum("rto,rti->roi", g, x),
    checks.smallest_exponent: lambda gamma, sign_like: 0.5 if sign_like else (1 + gamma) / 4,
}


# What the answer computes instead, and what the reader is told.
WRONG = {
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
