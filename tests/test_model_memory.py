"""Ways to save memory in training that must change no result: activation checkpointing and a loss in chunks."""

import weakref
from dataclasses import replace

import pytest
import torch
from helpers import LOOM_PARTS, MOE, build, example, gradients, tiny, tokens

from minilooped.science.probes import saved_bytes

MODES = {
    "dense": {},
    "post-norm": dict(rule="deeploop"),
    "moe": dict(MOE, balance="switch"),
    "moe with a moving bias": dict(MOE, balance="bias", balance_coef=0.5),
    "loom": dict(LOOM_PARTS, gate="sigmoid", rule="loom", balance_coef=0.5),
    "loom in segments": dict(LOOM_PARTS, gate="sigmoid", rule="loom", balance_coef=0.5, segment=2),
}
SAVERS = {
    "recompute": dict(recompute_loops=True),
    "chunks": dict(loss_chunk=5),  # does not divide the 24 tokens
    "both": dict(recompute_loops=True, loss_chunk=5),
}


def trained(config) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Losses, gradients and buffers after two training batches; the selection biases alone move between them."""
    model, losses = build(config, shaken=True), []
    for _ in range(2):
        for loss in model.segment_losses(*example(config)):
            loss.backward()
            losses.append(loss.detach())
        model.move_biases()
    return losses, gradients(model), list(model.buffers())


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("mode", MODES)
def test_losses_gradients_and_buffers_are_the_plain_ones(mode, saver):
    config = tiny(**MODES[mode])
    plain, saving = trained(config), trained(replace(config, **SAVERS[saver]))
    torch.testing.assert_close(saving, plain, rtol=1e-12, atol=1e-14)
    if saver == "recompute":  # the very same operations
        assert all(torch.equal(one, other) for one, other in zip(saving[0], plain[0], strict=True))


def test_the_forward_recomputes_too():
    config = tiny()
    models = [build(replace(config, recompute_loops=on)) for on in (False, True)]
    for model in models:
        model(*example(config))[1].backward()
    plain, saving = (gradients(model) for model in models)
    torch.testing.assert_close(saving, plain, rtol=1e-12, atol=1e-14)


def held(n_loop: int, **changes) -> int:
    """Bytes that wait for the backward pass of a batch."""
    model = build(tiny(n_loop=n_loop, n_embd=32, block_size=64, **changes))
    idx = tokens(model.config)
    return saved_bytes(lambda: list(model.segment_losses(idx, idx)), [*model.parameters(), *model.buffers()])


def test_recomputed_loops_hold_one_stream_each():
    stream = 2 * 64 * 32 * 8  # (B, T, C) in float64
    assert held(12, recompute_loops=True) - held(4, recompute_loops=True) == 8 * stream
    assert held(12) - held(4) > 8 * 10 * stream


def test_recomputed_loops_hold_the_global_memory_too_and_let_it_go():
    stream = 2 * 64 * 32 * 8
    loom = LOOM_PARTS | dict(recompute_loops=True)
    assert held(12, **loom) - held(4, **loom) == 8 * (2 * stream + 8)  # and the memory's weight, one number
    model = build(tiny(**loom))
    written, run_loop = [], model.run_loop

    def noting(*inputs):
        outputs = run_loop(*inputs)
        written.append(weakref.ref(outputs[1].total))
        return outputs

    model.run_loop = noting
    (loss,) = model.segment_losses(*example(model.config))
    loss.backward()
    assert len(written) > 1 and not any(memory() for memory in written[:-1])


def test_chunks_hold_no_logits():
    vocab_size, logits = 5000, 2 * 64 * 5000 * 8
    assert held(2, vocab_size=vocab_size) - held(2, vocab_size=vocab_size, loss_chunk=16) > logits


def test_without_logits_the_loss_is_the_same_and_none_takes_their_place():
    config = tiny(**MODES["loom"])
    model = build(config)
    torch.testing.assert_close(
        model(*example(config), return_logits=False)[1], model(*example(config))[1], rtol=0, atol=0
    )
    assert model(*example(config), return_logits=False)[0] is None
    assert model(tokens(config), return_logits=False) == (None, None)


def test_generation_with_a_cache_goes_on_under_recomputation():
    model = build(tiny(recompute_loops=True))
    idx = tokens(model.config, length=3)
    with torch.enable_grad():
        assert torch.equal(
            model.generate(idx, 4, temperature=0), model.generate(idx, 4, temperature=0, use_cache=False)
        )


@pytest.mark.parametrize("changes", [dict(loss_chunk=0), dict(loss_chunk=1.5), dict(recompute_loops=1)])
def test_a_value_that_cannot_work_is_named(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        tiny(**changes)
