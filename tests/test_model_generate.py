"""Generation: the key/value cache, sampling, and what a call leaves behind."""

import pytest
import torch
from helpers import LOOM_PARTS, RULE_NAMES, Reference, build, example, tiny, tokens

from minilooped.model import KVCache, pick

LOOM = dict(LOOM_PARTS, router_init="independent", balance="none", tie_embeddings=False)
GPT2 = dict(norm="layer", pos="learned", bias=True, mlp="gelu")


@torch.no_grad()
def greedy_by_hand(model, idx: torch.Tensor, max_new_tokens: int, n_loop: int | None = None) -> torch.Tensor:
    """Each token from a forward over the last block_size tokens."""
    for _ in range(max_new_tokens):
        logits = model(idx[:, -model.config.block_size :], n_loop=n_loop)[0]
        idx = torch.cat((idx, logits[:, -1:].argmax(dim=-1)), dim=1)
    return idx


def new_cache(model, n_loop: int, batch: int = 2) -> KVCache:
    return KVCache(model.config, n_loop, batch, model.wte.weight)


# ----------------------------------------------------------------------------------------------------------------------
# Cached equals uncached


@pytest.mark.parametrize(
    "extra, dtype, tolerance",
    [({}, torch.float64, 1e-10), (LOOM, torch.float64, 1e-10), (LOOM, torch.float32, 1e-5)],
    ids=["dense-float64", "loom-float64", "loom-float32"],
)
@pytest.mark.parametrize("n_loop", [1, 2, 6])
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_cached_generation_equals_uncached(rule, n_loop, extra, dtype, tolerance):
    """Greedy tokens equal to those of whole forwards; logits fed token by token equal to those of one forward,
    up to the rounding of the largest logit."""
    model = build(tiny(rule=rule, n_loop=n_loop, **extra), dtype=dtype)
    if rule == "rezero":  # so that its blocks do something
        with torch.no_grad():
            for block in model.blocks:
                block.branch.fill_(0.3)
    model.eval()
    idx = tokens(model.config, length=5)
    expected = greedy_by_hand(model, idx, 4)
    assert torch.equal(model.generate(idx, 4, temperature=0), expected)
    assert torch.equal(model.generate(idx, 4, temperature=0, use_cache=False), expected)

    idx, cache = expected, new_cache(model, n_loop)
    with torch.no_grad():
        whole = model(idx)[0]
        pieces = [model(idx[:, t : t + 1], cache=cache)[0] for t in range(idx.shape[1])]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=tolerance * whole.abs().max().item())


@pytest.mark.parametrize("chunks", [(4, 8), (1, 11), (11, 1), (5, 1, 6), (12,), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("extra", [{}, LOOM, GPT2], ids=["dense", "loom", "gpt2"])
def test_a_prompt_in_chunks_gives_equal_logits(extra, chunks):
    """The chunk's positions start where the cache ends, and each of its tokens sees itself and all before."""
    model = build(tiny(**extra), shaken=True).eval()
    idx, cache, start, pieces = tokens(model.config), new_cache(model, 3), 0, []
    for size in chunks:
        pieces.append(model(idx[:, start : start + size], cache=cache)[0])
        start += size
    whole = model(idx[:, :start])[0]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunks", [(4, 8), (1, 2, 3, 4)], ids=str)
def test_chunks_in_bfloat16_are_close(chunks):
    """The bfloat16 attention of the CPU masks a chunk by its offset too."""
    model = build(tiny(), dtype=torch.float32).eval()
    idx, cache, start, pieces = tokens(model.config), new_cache(model, 3), 0, []
    with torch.autocast("cpu", torch.bfloat16):
        for size in chunks:
            pieces.append(model(idx[:, start : start + size], cache=cache)[0])
            start += size
    whole = model(idx[:, :start])[0]
    torch.testing.assert_close(torch.cat(pieces, dim=1).float(), whole, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("length", [1, 2, 9, 10, 11, 12, 13, 20])
@pytest.mark.parametrize("extra", [{}, LOOM, GPT2], ids=["dense", "loom", "gpt2"])
def test_prompts_at_and_beyond_the_edge_of_the_window(extra, length):
    """block_size = 12, and 10 tokens more: block_size - 2 is where a bound on the chunk alone would run past the
    positions. Beyond the edge the window is the last block_size tokens."""
    model = build(tiny(**extra), shaken=True).eval()
    idx = tokens(model.config, length=length)
    expected = greedy_by_hand(model, idx, 10)
    assert torch.equal(model.generate(idx, 10, temperature=0), expected)
    assert torch.equal(model.generate(idx, 10, temperature=0, use_cache=False), expected)


def test_too_many_tokens_for_the_cache_are_refused():
    """Bounded by cached plus new tokens, not by the new ones."""
    model = build(tiny()).eval()
    idx, cache = tokens(model.config), new_cache(model, 3)
    model(idx[:, :8], cache=cache)
    with pytest.raises(ValueError, match="block_size"):
        model(idx[:, :5], cache=cache)
    model(idx[:, :4], cache=cache)
    with pytest.raises(ValueError, match="block_size"):
        model(idx[:, :1], cache=cache)


def processed_tokens(model) -> list[int]:
    """Fills up with the number of positions of every block visit."""
    seen = []
    model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    return seen


def test_cache_spares_the_earlier_positions():
    """After the prompt every visit works on one position; without the cache on all of them."""
    model = build(tiny())
    seen, idx = processed_tokens(model), tokens(model.config, length=3)
    model.generate(idx, 4)
    assert seen == [3] * 3 + [1] * 9
    seen.clear()
    model.generate(idx, 4, use_cache=False)
    assert seen == [length for length in (3, 4, 5, 6) for _ in range(3)]


def test_cache_is_preallocated_with_one_slot_per_loop_and_layer():
    """Keys and values of N L visits; its memory does not move while it fills."""
    model = build(tiny())
    cache = new_cache(model, 3)
    store = [value for value in vars(cache).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in store) == 3 * 2 * 2 * 2 * 12 * 16  # N, L, keys and values, B, T, C
    pointers = [tensor.data_ptr() for tensor in store]
    with torch.no_grad():
        model(tokens(model.config, length=5), cache=cache)
        model(tokens(model.config, length=7), cache=cache)
    assert [value.data_ptr() for value in vars(cache).values() if isinstance(value, torch.Tensor)] == pointers


@pytest.mark.parametrize("n_loop", [1, 2, 5])
@pytest.mark.parametrize("extra", [{}, LOOM], ids=["dense", "loom"])
def test_generation_with_another_loop_count(extra, n_loop):
    model = build(tiny(**extra), shaken=True).eval()
    idx = tokens(model.config, length=4)
    expected = greedy_by_hand(model, idx, 10, n_loop)
    assert torch.equal(model.generate(idx, 10, temperature=0, n_loop=n_loop), expected)
    assert torch.equal(model.generate(idx, 10, temperature=0, n_loop=n_loop, use_cache=False), expected)
    reference = Reference(model, n_loop)
    first = reference.readout(reference.loops(idx)[-1][0])[:, -1].argmax(dim=-1)
    assert torch.equal(expected[:, 4], first)


def test_rows_of_a_batch_do_not_meet():
    model = build(tiny(**LOOM), shaken=True)
    idx = tokens(model.config, batch=3, length=5)
    together = model.generate(idx, 10, temperature=0)
    for row in range(3):
        assert torch.equal(model.generate(idx[row : row + 1], 10, temperature=0), together[row : row + 1])


# ----------------------------------------------------------------------------------------------------------------------
# Sampling


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("use_cache", [True, False])
def test_top_k_off_and_above_the_vocabulary_are_the_same(use_cache):
    """None and 0 are off, more than V is V: equal draws."""
    model = build(tiny())
    idx = tokens(model.config, length=3)
    draws = [
        model.generate(idx, 20, top_k=top_k, use_cache=use_cache, generator=seeded())
        for top_k in (None, 0, 11, 12, 999)
    ]
    assert all(torch.equal(draw, draws[0]) for draw in draws)


def test_top_k_of_one_is_greedy():
    model = build(tiny())
    idx = tokens(model.config, length=3)
    assert torch.equal(model.generate(idx, 20, top_k=1), model.generate(idx, 20, temperature=0))


def frequencies(model, idx, **options) -> torch.Tensor:
    draws = model.generate(idx.expand(20_000, -1), 1, generator=seeded(), **options)[:, -1]
    return draws.bincount(minlength=11) / 20_000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax_of_the_scaled_logits(temperature):
    """20,000 draws: each frequency within 0.015 (four standard errors) of softmax(logits / temperature)."""
    model = build(tiny(n_loop=1, n_layer=1), dtype=torch.float32)
    idx = torch.tensor([[1, 2, 3]])
    expected = (model(idx)[0][0, -1] / temperature).softmax(dim=-1)
    torch.testing.assert_close(frequencies(model, idx, temperature=temperature), expected, rtol=0, atol=0.015)


def test_top_k_draws_from_the_k_likeliest_only():
    model = build(tiny(n_loop=1, n_layer=1), dtype=torch.float32)
    idx = torch.tensor([[1, 2, 3]])
    logits = model(idx)[0][0, -1]
    likeliest = logits.topk(3).indices
    expected = torch.zeros(11).scatter(0, likeliest, logits[likeliest].softmax(dim=-1))
    found = frequencies(model, idx, top_k=3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.015)
    assert found.nonzero().flatten().tolist() == sorted(likeliest.tolist())


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-46, 5e-324])
def test_tiny_temperature_is_greedy_and_finite(temperature):
    """The scaled logits would overflow float32 at the second, and the third is 0 in float32."""
    model = build(tiny(), dtype=torch.float32)
    idx = tokens(model.config, length=3)
    assert torch.equal(model.generate(idx, 10, temperature=temperature), model.generate(idx, 10, temperature=0))


def test_equal_generators_give_equal_text():
    """Whatever the global generator does, which a passed one leaves alone; cached and uncached alike."""
    model = build(tiny(), dtype=torch.float64)
    idx = tokens(model.config, length=3)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = model.generate(idx, 20, generator=seeded(4))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(model.generate(idx, 20, generator=seeded(4)), first)
    assert torch.equal(model.generate(idx, 20, generator=seeded(4), use_cache=False), first)
    assert not torch.equal(model.generate(idx, 20, generator=seeded(5)), first)


# ----------------------------------------------------------------------------------------------------------------------
# The stop token


def cut_at(row: list[int], start: int, stop_token: int) -> list[int]:
    """A row up to the first stop token that was drawn, this one included."""
    drawn = row[start:]
    return row[:start] + (drawn[: drawn.index(stop_token) + 1] if stop_token in drawn else drawn)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("length", [3, 8])
def test_a_row_ends_with_the_stop_token_and_the_call_with_the_last_row(length, use_cache):
    """Each row equals what it is without a stop token, up to there; one in the prompt ends nothing; past the window,
    and for every token as the stop token, those included that no row or every row draws."""
    model = build(tiny())
    idx = tokens(model.config, batch=3, length=length)
    free = model.generate(idx, 12, generator=seeded(), use_cache=use_cache).tolist()
    ends = set()
    for stop_token in range(11):
        rows = [cut_at(row, length, stop_token) for row in free]
        longest = max(map(len, rows))
        out = model.generate(idx, 12, stop_token=stop_token, generator=seeded(), use_cache=use_cache)
        assert out.tolist() == [row + [stop_token] * (longest - len(row)) for row in rows]
        ends.add(longest < length + 12)
    assert ends == {True, False}, "some stop tokens end all rows early, some do not"


def test_greedy_rows_end_at_once_where_all_draw_the_stop_token_first():
    model = build(tiny())
    idx = tokens(model.config, batch=1, length=3).expand(2, -1)
    first = model.generate(idx, 1, temperature=0)
    assert torch.equal(model.generate(idx, 9, temperature=0, stop_token=int(first[0, -1])), first)


# ----------------------------------------------------------------------------------------------------------------------
# What a call leaves behind, and what it refuses


@pytest.mark.parametrize("max_new_tokens", [0, 1, 15])
def test_prompt_is_kept_and_the_asked_number_of_tokens_added(max_new_tokens):
    model = build(tiny())
    idx = tokens(model.config, length=5)
    kept = idx.clone()
    out = model.generate(idx, max_new_tokens)
    assert out.shape == (2, 5 + max_new_tokens) and out.dtype == idx.dtype
    assert torch.equal(out[:, :5], kept) and torch.equal(idx, kept)
    assert 0 <= out.min() and out.max() < 11


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored(training):
    """Also when the run fails half way; in between it is eval mode."""
    model, modes = build(tiny()).train(training), []
    model.blocks[1].register_forward_hook(lambda module, args, out: modes.append(module.training))
    model.generate(tokens(model.config, length=3), 2)
    assert model.training == model.blocks[0].training == training and set(modes) == {False}

    def fail(module, args):
        raise RuntimeError("out of memory")

    model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.generate(tokens(model.config, length=3), 2)
    assert model.training == model.blocks[0].training == training


def test_generation_keeps_no_graph_and_changes_no_weight():
    model = build(tiny(**LOOM_PARTS))
    idx, targets = example(model.config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tracked = []
    hook = model.blocks[0].register_forward_hook(lambda module, args, out: tracked.append(out[0].requires_grad))
    model.generate(idx[:, :3], 5)
    hook.remove()
    assert tracked and not any(tracked)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model(idx, targets)[1].backward()  # training goes on as if nothing had been


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "options, field",
    [
        (dict(temperature=-0.1), "temperature"),
        (dict(temperature="hot"), "temperature='hot' must be a finite number >= 0"),
        (dict(top_k=-1), "top_k"),
        (dict(top_k=2.5), "top_k=2.5 must be an int >= 0"),
        (dict(max_new_tokens=-1), "max_new_tokens"),
        (dict(max_new_tokens=3.0), "max_new_tokens=3.0 must be an int >= 0"),
        (dict(stop_token=-1), "stop_token=-1 must be an int >= 0"),
        (dict(stop_token=11), "stop_token=11 must be an int < 11, or None"),
        (dict(n_loop=0), "n_loop"),
        (dict(n_loop=-2), "n_loop"),
    ],
    ids=str,
)
def test_impossible_options_are_refused_by_name(options, field, use_cache):
    model = build(tiny())
    options = dict(max_new_tokens=2, use_cache=use_cache) | options
    with pytest.raises(ValueError, match=field):
        model.generate(tokens(model.config, length=3), **options)


def test_temperature_that_is_no_number_is_refused():
    model = build(tiny())
    with pytest.raises(ValueError, match="temperature"):
        model.generate(tokens(model.config, length=3), 2, temperature=float("nan"))


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("row", [[torch.nan, 1.0, 2.0], [1.0, torch.inf, 2.0], [-torch.inf] * 3], ids=str)
def test_logits_that_are_not_finite_are_refused_in_one_line(row, temperature):
    """Greedy drawing would take a NaN for the largest, and torch's sampling names neither model nor cause."""
    logits = torch.tensor([[0.0, 1.0, 2.0], row])
    with pytest.raises(
        FloatingPointError, match="^the model's logits are not finite: its weights or its stream have diverged$"
    ):
        pick(logits, temperature, None, seeded())
    model = build(tiny())
    with torch.no_grad():
        model.wte.weight[3, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        model.generate(tokens(model.config, length=3), 2, temperature=temperature)


def test_a_token_with_logit_minus_infinity_is_never_drawn():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]]).expand(200, -1)
    assert set(pick(logits, 1.0, None, seeded()).flatten().tolist()) == {0, 2}


def test_empty_prompt_is_refused():
    model = build(tiny())
    with pytest.raises(ValueError, match="idx"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), 3)


def test_top_k_lets_exactly_k_tokens_through_when_logits_tie():
    logits, generator = torch.zeros(1, 9), torch.Generator().manual_seed(0)
    drawn = {pick(logits, 1.0, 2, generator).item() for _ in range(200)}
    assert len(drawn) == 2
