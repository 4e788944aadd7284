"""Segmented backprop: a loss per K loops, no gradient across a cut, and memory that does not grow with the loops."""

import math
import weakref

import pytest
import torch
from helpers import LOOM_PARTS, MOE, RULE_NAMES, Reference, build, example, gradients, tiny, tokens

MODES = {
    "dense": {},
    "reinject": dict(reinject=True),
    "loop_residual": dict(loop_residual=0.5),
    "moe": dict(MOE, balance="switch"),
    "loom": dict(LOOM_PARTS, gate="sigmoid"),
}


def backward_all(model, idx, targets, **options) -> list[torch.Tensor]:
    losses = []
    for loss in model.segment_losses(idx, targets, **options):
        loss.backward()
        losses.append(loss.detach())
    return losses


# ----------------------------------------------------------------------------------------------------------------------
# One segment is ordinary backprop


@pytest.mark.parametrize("segment", [None, 3, 4, 100])
@pytest.mark.parametrize("mode", MODES)
def test_segment_of_at_least_n_loops_is_ordinary_backprop_bit_for_bit(mode, segment):
    """One loss; it, every gradient and the collected loads equal the forward's."""
    config = tiny(segment=segment, **MODES[mode])
    plain, segmented = build(config, shaken=True), build(config, shaken=True)
    idx, targets = example(config)
    expected = plain(idx, targets)[1]
    expected.backward()
    [loss] = backward_all(segmented, idx, targets)
    assert torch.equal(loss, expected.detach())
    found, expected_gradients = gradients(segmented), gradients(plain)
    assert found.keys() == expected_gradients.keys()
    assert all(torch.equal(found[name], expected_gradients[name]) for name in found)
    assert all(torch.equal(a, b) for a, b in zip(segmented.buffers(), plain.buffers(), strict=True))


def test_segment_leaves_the_forward_alone():
    """It is a training choice: logits, loss and gradient of `forward` do not depend on it."""
    plain, segmented = build(tiny(**LOOM_PARTS)), build(tiny(segment=1, **LOOM_PARTS))
    idx, targets = example(plain.config)
    (logits, loss), (other_logits, other_loss) = plain(idx, targets), segmented(idx, targets)
    assert torch.equal(logits, other_logits) and torch.equal(loss, other_loss)
    loss.backward()
    other_loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain).values(), gradients(segmented).values(), strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# The cut


@pytest.mark.parametrize("n_loop, segment", [(3, 1), (4, 2), (5, 2), (7, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradient_equal_a_hand_detached_run(mode, n_loop, segment):
    """State and global memory detached by hand, x0 not; each loss a mean over the targets that are not ignored.
    ceil(N / K) losses, the last over fewer loops; g_t and the routers count loops from the start, not from the cut."""
    config = tiny(n_loop=n_loop, segment=segment, **(MODES[mode] | dict(balance="switch")))
    model = build(config, shaken=True)
    reference = Reference(model)
    idx, targets = example(config)
    targets[1, :5] = -100
    losses = backward_all(model, idx, targets)
    expected = reference.losses(idx, targets, segment)
    assert len(losses) == len(expected) == math.ceil(n_loop / segment)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected).detach(), rtol=1e-9, atol=1e-10)
    sum(expected).backward()
    found, expected_gradients = gradients(model), reference.gradients()
    assert found.keys() == expected_gradients.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected_gradients[name], rtol=1e-7, atol=1e-9, msg=name)


def test_the_cut_changes_the_gradient():
    """So that the test above is not empty: without detaching, the same losses have another gradient."""
    config = tiny(segment=1, loop_residual=0.5)
    model = build(config, shaken=True)
    whole = Reference(model)
    idx, targets = example(config)
    backward_all(model, idx, targets)
    loops = whole.loops(idx)
    kept = targets != -100
    for state, _ in loops:
        log_p = whole.readout(state).log_softmax(dim=-1)[kept]
        (-log_p.gather(1, targets[kept][:, None]).mean()).backward(retain_graph=True)
    name = "blocks.0.attn.qkv.weight"
    assert not torch.allclose(gradients(model)[name], whole.gradients()[name], rtol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_state_before_a_cut_sees_no_gradient_from_behind_it(mode):
    """A hook on the output of segment 1's last block fires for the first loss and never again."""
    config = tiny(n_loop=4, segment=2, **MODES[mode])
    model = build(config, shaken=True)
    outputs, fired = [], []

    def watch(module, args, out):
        visit = len(outputs)
        outputs.append(out[0])
        out[0].register_hook(lambda grad: fired.append(visit))

    model.blocks[-1].register_forward_hook(watch)
    losses = model.segment_losses(*example(config))
    next(losses).backward()
    assert sorted(fired) == [0, 1]
    fired.clear()
    next(losses).backward()
    assert sorted(fired) == [2, 3]


def test_later_loss_has_no_gradient_on_earlier_routers():
    """Exactly zero, and the other way round: a segment's gradient stays in its own loops."""
    config = tiny(n_loop=4, segment=2, **LOOM_PARTS)
    model = build(config, shaken=True)
    for segment, loss in enumerate(model.segment_losses(*example(config))):
        model.zero_grad()
        loss.backward()
        for block in model.blocks:
            size = block.mlp.router.weight.grad.flatten(1).abs().sum(dim=1)  # per loop
            assert size.nonzero().flatten().tolist() == [2 * segment, 2 * segment + 1]


# ----------------------------------------------------------------------------------------------------------------------
# Number, size and order of the losses


@pytest.mark.parametrize("n_loop, segment", [(1, 1), (6, 2), (7, 2), (7, 3), (9, 3), (12, 5)])
def test_number_of_losses_is_n_over_k_rounded_up(n_loop, segment):
    """And the loops of each, counted by a hook; only the last may be shorter."""
    model = build(tiny(n_loop=n_loop, segment=segment))
    visits, counts = [], []
    model.blocks[0].register_forward_hook(lambda *args: visits.append(1))
    for _ in model.segment_losses(*example(model.config)):
        counts.append(len(visits))
        visits.clear()
    assert len(counts) == math.ceil(n_loop / segment)
    assert sum(counts) == n_loop and set(counts[:-1]) <= {segment} and counts[-1] <= segment


def test_last_loss_is_the_forwards():
    """The streams are the same; the cuts change gradients only."""
    model = build(tiny(segment=1, **LOOM_PARTS), shaken=True).eval()
    idx, targets = example(model.config)
    *_, last = model.segment_losses(idx, targets)
    torch.testing.assert_close(last, model(idx, targets)[1], rtol=1e-12, atol=1e-12)


def test_losses_are_made_one_at_a_time():
    """A generator: nothing of the second segment has run when the first loss is there."""
    model, visits = build(tiny(segment=1)), []
    model.blocks[0].register_forward_hook(lambda *args: visits.append(1))
    losses = model.segment_losses(*example(model.config))
    assert visits == []
    next(losses)
    assert len(visits) == 1


def test_another_loop_count_sets_the_number_of_segments():
    model = build(tiny(segment=2))
    reference = Reference(model, 5)
    idx, targets = example(model.config)
    losses = backward_all(model, idx, targets, n_loop=5)
    torch.testing.assert_close(
        torch.stack(losses), torch.stack(reference.losses(idx, targets, 2)).detach(), rtol=1e-9, atol=1e-9
    )


def test_generators_of_two_micro_batches_advance_together():
    """Gradient accumulation, one generator per micro-batch: the mean over equal halves is the batch's gradient."""
    config = tiny(n_loop=4, segment=2)
    whole, halves = build(config, shaken=True), build(config, shaken=True)
    idx, targets = tokens(config, batch=4, seed=1), tokens(config, batch=4, seed=2)
    backward_all(whole, idx, targets)
    parts = [halves.segment_losses(idx[part], targets[part]) for part in (slice(0, 2), slice(2, 4))]
    for losses in zip(*parts, strict=True):
        for loss in losses:
            (loss / 2).backward()
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(halves)[name], grad, rtol=1e-9, atol=1e-11)


# ----------------------------------------------------------------------------------------------------------------------
# A step after every segment


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_step_per_segment_runs(mode, tie_embeddings):
    """Weights change in place between two backward passes: no graph may need the old ones."""
    config = tiny(n_loop=5, segment=2, tie_embeddings=tie_embeddings, **MODES[mode])
    model = build(config)
    optimizer = model.configure_optimizer(lr=1e-3, weight_decay=0.1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for loss in model.segment_losses(*example(config)):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("n_loop", [2, 4])
def test_later_segment_sees_the_updated_weights_and_embedding(n_loop):
    """x0 is recomputed: after a change of every weight between two segments, the second loss is that of the carried
    state under the new weights, the re-injected embedding included."""
    config = tiny(n_loop=n_loop, segment=n_loop // 2, reinject=True, reinject_lam=2.0, embed_norm=True)
    model = build(config, shaken=True)
    old = Reference(model)
    idx, targets = example(config)
    losses = model.segment_losses(idx, targets)
    next(losses).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    loss = next(losses)

    mixed = Reference(model)  # the new weights, and the old ones for the loops that have run
    half = n_loop // 2
    state = old.loops(idx)[half - 1][0]
    mixed.visits = mixed.visits[half:]
    expected = run_from(mixed, state, idx, targets, first=half + 1)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)


def run_from(reference: Reference, state, idx, targets, first: int):
    """The loss after the remaining loops, first.., from the given state: the equations once more, for this case."""
    c, z = reference.config, state
    for t, visit in enumerate(reference.visits, start=first):
        g = min(1.0, c.reinject_lam / (t * math.sqrt(c.n_layer)))
        z = (1 - g) * z + g * reference.embedding(idx)
        for w in visit:
            branch = reference.row["branch"]
            z = z + branch * reference.attention(reference.norm(z, w, "attn_pre_norm"), w)
            z = z + branch * reference.mlp(reference.norm(z, w, "mlp_pre_norm"), w, "mlp.")
    kept = targets != -100
    return -reference.readout(z).log_softmax(dim=-1)[kept].gather(1, targets[kept][:, None]).mean()


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def saved_bytes(n_loop: int, segment: int | None, **changes) -> int:
    """Most bytes that autograd holds for the backward pass at once: unique storages alive, without parameters."""
    config = tiny(n_loop=n_loop, segment=segment, n_embd=64, n_head=4, vocab_size=128, block_size=64, **changes)
    model = build(config, dtype=torch.float32)
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    alive = weakref.WeakSet()

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            alive.add(self)

    peak = 0
    idx, targets = example(config)
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        for loss in model.segment_losses(idx, targets):
            storages = {s.tensor.untyped_storage().data_ptr(): s.tensor.untyped_storage().nbytes() for s in alive}
            peak = max(peak, sum(size for pointer, size in storages.items() if pointer not in own))
            loss.backward()
    return peak


@pytest.mark.parametrize(
    "extra", [{}, dict(reinject=True, loop_residual=0.5, loop_end_norm=True)], ids=["dense", "loom"]
)
def test_saved_activations_do_not_grow_with_the_loops(extra):
    """At K = 3: the same bytes for N = 6, 12 and 24 (a first segment lacks the global memory and re-injection)."""
    assert saved_bytes(6, 3, **extra) == saved_bytes(12, 3, **extra) == saved_bytes(24, 3, **extra)


def test_saved_activations_of_ordinary_backprop_grow_with_the_loops():
    """By the same bytes for every loop."""
    four, eight, twelve = (saved_bytes(n_loop, None) for n_loop in (4, 8, 12))
    assert twelve - eight == eight - four > 0


def test_three_of_twelve_loops_hold_little_more_than_a_quarter():
    """3/12 of the blocks' activations, and the logits once in either case. The published shape is 2 layers, width 256,
    vocabulary 512, batch 8 x 256; here everything is four times smaller, which leaves the ratio as it is."""
    assert saved_bytes(12, 3) <= 0.27 * saved_bytes(12, None)


# ----------------------------------------------------------------------------------------------------------------------
# Every mode trains every parameter


@pytest.mark.parametrize("segment", [1, 3, 6])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_every_parameter_gets_a_finite_gradient(rule, mode, segment):
    """Segments of 1, N, N + 3 loops, every injection: nothing is cut off from the loss, the embedding included.
    A gradient of zero is right only where the rule says so: ReZero's matrices at init."""
    config = tiny(rule=rule, segment=segment, tie_embeddings=False, **MODES[mode])
    model = build(config)
    backward_all(model, *example(config))
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, grad in found.items():
        assert grad.isfinite().all(), name
        zero = rule == "rezero" and name.startswith("blocks.") and not name.endswith("branch")
        assert zero or grad.abs().max() > 0, name


@pytest.mark.parametrize("segment", [0, -1, 1.5, True])
def test_an_empty_segment_is_refused(segment):
    """Zero loops per segment would detach everything and still look like training."""
    with pytest.raises(ValueError, match="segment"):
        tiny(segment=segment)


def test_every_segment_of_a_training_step_reads_the_head_out():
    """Operations: a segment costs one more pass of the head; without training there is one head, as ever."""
    config = tiny(n_layer=2, n_loop=7)
    head = 2 * config.n_embd * config.vocab_size
    plain, cut = build(config), build(tiny(n_layer=2, n_loop=7, segment=3))
    assert (
        cut.flops_per_token() - plain.flops_per_token() == 3 * 2 * head
    )  # ceil(7 / 3) = 3 heads; backward counts twice
    assert cut.flops_per_token(training=False) == plain.flops_per_token(training=False)


def test_segments_without_targets_are_refused_at_once():
    model = build(tiny(segment=1))
    with pytest.raises(ValueError, match="targets"):
        model.segment_losses(tokens(model.config), None)
    with pytest.raises(ValueError, match="n_loop"):
        model.segment_losses(*example(model.config), n_loop=0)
