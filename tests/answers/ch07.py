"""Chapter 7: right answers, written without the notebook's solutions, and mistakes that readers make."""

import torch

from minilooped.course import checks


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


RIGHT = {
    checks.routing_weights: weights_of_chosen,
    checks.jaccard: lambda a, b: (in_common(a, b) / (2 * a.shape[1] - in_common(a, b))).mean().item(),
    checks.overlap_by_chance: paired_by_chance,
    checks.sort_and_group: grouped,
}


# What the answer computes instead, and what the reader is told.
WRONG = {
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
}
