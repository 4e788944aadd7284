"""What a model says after each of its loops, and when a token may leave, against slow loops by hand."""

import itertools

import pytest
import torch
from helpers import build, example, tiny
from small_models import looped

from minilooped.data.tasks import Task
from minilooped.science import probes


def test_loss_after_each_loop_is_that_of_a_pass_with_so_many_loops():
    model, idx, targets = looped(2)
    losses = probes.loss_after_each_loop(model, [(idx, targets), (idx[:1], targets[:1])], n_loop=7)
    model.eval()
    for n, loss in enumerate(losses, start=1):
        first, second = (model(idx[:b], targets[:b], n_loop=n)[1].item() for b in (2, 1))
        assert loss == pytest.approx((2 * first + second) / 3, rel=1e-12)
    assert len(losses) == 7 and len(probes.loss_after_each_loop(model, [(idx, targets)])) == 5


# Every probe with a loop count of its own.
WITH_LOOPS = {
    "loss_after_each_loop": lambda m, x, y, n: probes.loss_after_each_loop(m, [(x, y)], n),
    "accuracy_by_loop": lambda m, x, y, n: probes.accuracy_by_loop(m, Task(x, y), n),
    "logit_lens": lambda m, x, y, n: probes.logit_lens(m, x[0], y[0], n),
    "early_exit": lambda m, x, y, n: probes.early_exit(m, x, y, 0.1, n_loop=n),
    "visits": lambda m, x, y, n: probes.visits(m, x, n),
    "routing": lambda m, x, y, n: probes.routing(m, x, n),
    "agreement": lambda m, x, y, n: probes.agreement(m, x, n),
    "norm_growth": lambda m, x, y, n: probes.norm_growth(m.config, ["none"], [n]),
    "growth_plane": lambda m, x, y, n: probes.growth_plane(m.config, [1], [n]),
    "variance_over_loops": lambda m, x, y, n: probes.variance_over_loops(m.config, [n]),
}


@pytest.mark.parametrize("n_loop", [0, -1, 1.5])
@pytest.mark.parametrize("probe", WITH_LOOPS)
def test_a_loop_count_that_no_model_has_is_refused_in_the_models_words(probe, n_loop):
    with pytest.raises(ValueError, match=f"n_loop={n_loop} must be an int >= 1"):
        WITH_LOOPS[probe](*looped(), n_loop)


def test_a_mean_over_nothing_is_refused():
    model, idx, targets = looped()
    with pytest.raises(ValueError, match="batches is empty"):
        probes.loss_after_each_loop(model, [])
    with pytest.raises(ValueError, match="all of task.y are -100"):
        probes.accuracy_by_loop(model, Task(idx, torch.full_like(targets, -100)))


def test_accuracy_by_loop_counts_what_is_scored_in_a_pass_with_so_many_loops():
    model, idx, targets = looped()
    targets[0, ::2] = -100
    found = probes.accuracy_by_loop(model, Task(idx, targets), n_loop=6)
    for n, share in enumerate(found, start=1):
        said = model.eval()(idx, n_loop=n)[0].argmax(-1)
        pairs = [(a, b) for a, b in zip(said.flatten().tolist(), targets.flatten().tolist(), strict=True) if b != -100]
        assert share == sum(a == b for a, b in pairs) / len(pairs)
    assert len(found) == 6 and len(probes.accuracy_by_loop(model, Task(idx, targets))) == 5


def test_the_lens_reads_out_a_pass_with_so_many_loops():
    model, idx, targets = looped()
    lens = probes.logit_lens(model, idx[0], targets[0], n_loop=7)
    assert not model.eval().training and lens.token.shape == lens.right.shape == lens.rank.shape == (7, idx.shape[1])
    for n in range(1, 8):
        p = model(idx[:1], n_loop=n)[0][0].softmax(-1)  # (T, V)
        for t, target in enumerate(targets[0].tolist()):
            assert lens.token[n - 1, t] == p[t].argmax()
            assert lens.right[n - 1, t].item() == pytest.approx(p[t, target].item(), rel=1e-5)
            assert lens.rank[n - 1, t] == sorted(p[t].tolist(), reverse=True).index(p[t, target].item()) + 1


def exits_by_hand(model, idx, targets, threshold, criterion, n_loop) -> dict[tuple[int, int], tuple[int, float]]:
    """Loops and loss of each token, (b, t), one token after the other."""
    h = x0 = model.embed(idx)
    memory, read, gone = None, {}, {}
    for loop in range(1, n_loop + 1):
        new, memory, _ = model.run_loop(h, loop - 1, x0, memory)
        h = h.clone()
        for token in set(itertools.product(range(len(idx)), range(idx.shape[1]))) - gone.keys():
            h[token] = new[token]
            p, before = model.logits(h[token][None, None])[0, 0].softmax(-1), read.get(token)
            if criterion == "entropy":
                done = -(p * p.log()).sum() < threshold
            else:
                done = before is not None and (p * (p / before).log()).sum() < threshold
            if done or loop == n_loop:
                gone[token] = loop, -p[targets[token]].log().item()
            read[token] = p
    return gone


@pytest.mark.parametrize("criterion, thresholds", [("kl", (0.0, 0.01, 0.1, 1e9)), ("entropy", (0.0, 1.5, 2.0, 1e9))])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "loom"])
def test_early_exit_is_what_a_slow_loop_over_tokens_finds(criterion, thresholds, plain):
    model, idx, targets = looped() if not plain else (build(tiny(rule="none"), shaken=True), *example(tiny()))
    targets = targets.clamp_min(0)
    counts = []
    for threshold in thresholds:
        found = probes.early_exit(model, idx, targets, threshold, criterion=criterion, n_loop=6)
        with torch.no_grad():
            by_hand = exits_by_hand(model.eval(), idx, targets, threshold, criterion, 6)
        for token, (loops, loss) in by_hand.items():
            assert found.loops[token] == loops and found.losses[token].item() == pytest.approx(loss, rel=1e-9)
        counts.append(found.loops.double().mean().item())
    assert counts[0] == 6 > counts[2] > counts[3] == (2 if criterion == "kl" else 1)


def test_early_exit_at_threshold_zero_is_the_whole_loop_and_leaves_the_mode_alone():
    model, idx, targets = looped()
    model.train()
    for n_loop in (None, 3, 8):
        found = probes.early_exit(model, idx, targets, 0.0, n_loop=n_loop)
        whole = probes.loss_after_each_loop(model, [(idx, targets)], n_loop)
        assert found.loops.unique().tolist() == [len(whole)]
        assert found.losses.mean().item() == pytest.approx(whole[-1], rel=1e-12)
    assert model.training
    with pytest.raises(ValueError, match="criterion='norm' is not one of"):
        probes.early_exit(model, idx, targets, 0.0, criterion="norm")


def test_early_exit_at_threshold_zero_stands_rounding():
    """Where next to nothing changes, single precision finds divergences a little below zero."""
    model = build(tiny(rule="factored", lam=1e-4), dtype=torch.float32)
    idx, targets = example(tiny(), batch=16)
    assert (probes.early_exit(model, idx, targets.clamp_min(0), 0.0).loops == 3).all()
