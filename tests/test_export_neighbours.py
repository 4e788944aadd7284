"""Tools around transformers and what they hand to a model: the exported folder takes it, or refuses it by name."""

import string
from pathlib import Path

import pytest
import torch
from helpers import tiny, tokens
from test_export import LOOPED, load, logits, run_of
from test_export import offline as offline  # a fixture
from transformers import AutoTokenizer, DynamicCache

from minilooped.data import CharTokenizer
from minilooped.engine.checkpoint import load_model
from minilooped.model import LoopedGPT
from minilooped.tools.export import export_hf

LETTERS = CharTokenizer("\n :?.!" + string.ascii_lowercase)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, offline) -> tuple[torch.nn.Module, LoopedGPT]:
    """An exported model and ours."""
    run, ours = run_of(tmp_path_factory.mktemp("pair") / "run", LOOPED["loom"])
    return load(export_hf(run), trust_remote_code=True), ours


# -- what a call may name ----------------------------------------------------------------------------------------------


def test_arguments_that_say_nothing_new_are_taken(pair):
    """As peft's wrappers and data collators name them."""
    theirs, ours = pair
    idx = tokens(ours.config)
    mask = torch.ones_like(idx)
    mask[1, 8:] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as transformers makes them
    found = theirs(
        input_ids=idx,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=DynamicCache(),
        inputs_embeds=None,
        labels=None,
        use_cache=True,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=True,
    )
    assert torch.equal(found.logits, logits(ours, idx)) and found.hidden_states is None
    assert torch.equal(theirs(idx, position_ids=torch.arange(idx.shape[1]), return_dict=False)[0], found.logits)


def test_hidden_states_are_the_embedding_and_the_stream_after_every_loop(pair):
    theirs, ours = pair
    idx = tokens(ours.config)
    for n_loop in (None, 2):
        _, _, states = ours(idx, n_loop=n_loop, return_states=True)
        found = theirs(idx, n_loop=n_loop, output_hidden_states=True).hidden_states
        assert len(found) == 1 + len(states) and torch.equal(found[0], ours.embed(idx))
        assert all(map(torch.equal, found[1:], states))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(input_ids=None), "input_ids is missing"),
        (dict(input_ids=None, inputs_embeds=torch.zeros(1, 4, 16)), "does not support inputs_embeds: leave that out"),
        (dict(output_attentions=True), "does not support output_attentions: leave that out"),
        (dict(position_ids=torch.arange(1, 5)[None]), "position_ids must count 0, 1, 2"),
        (dict(attention_mask=torch.tensor([[0, 1, 1, 1]])), "cannot skip padding in front of a token"),
        (
            dict(attention_mask=torch.ones(1, 1, 4, 4)),
            r"attention_mask \(1, 1, 4, 4\) must have the shape of input_ids",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        pair[0](**dict(input_ids=torch.ones(1, 4, dtype=torch.int64)) | arguments)


def test_a_cache_with_something_in_it_is_refused_by_name(pair):
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    with pytest.raises(ValueError, match="does not support past_key_values"):
        pair[0](torch.ones(1, 4, dtype=torch.int64), past_key_values=cache)


# -- a tokenizer of characters: a token that begins, ends and pads -----------------------------------------------------


@pytest.fixture(scope="module")
def letters(tmp_path_factory, offline) -> tuple[Path, LoopedGPT]:
    """The folder of an exported model of letters, and ours."""
    run, ours = run_of(tmp_path_factory.mktemp("letters") / "run", tiny(vocab_size=LETTERS.vocab_size), LETTERS)
    return export_hf(run), ours


def test_characters_have_one_token_that_begins_ends_and_pads(letters):
    folder, ours = letters
    tokenizer, V = AutoTokenizer.from_pretrained(folder, trust_remote_code=True), LETTERS.vocab_size
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == V
    assert tokenizer(["a", "abc"], padding=True)["input_ids"] == [
        [*LETTERS.encode("a"), V, V],
        LETTERS.encode("abc").tolist(),
    ]
    assert tokenizer.decode([V, *LETTERS.encode("ab\n"), V], skip_special_tokens=True) == "ab\n"


def test_the_token_of_no_text_is_read_as_the_opening_never_predicted_and_no_label(letters):
    folder, ours = letters
    theirs, V, line_break = load(folder, trust_remote_code=True), LETTERS.vocab_size, LETTERS.chars.index("\n")
    text = LETTERS.encode("a bc").tolist()
    begun, opened = torch.tensor([[V, *text]]), torch.tensor([[line_break, *text]])
    assert torch.equal(logits(theirs, begun), logits(ours, opened)) and logits(theirs, begun).shape[-1] == V
    labels = torch.tensor([[V, *text[:-1], V]])
    expected = ours(opened[:, :-1], torch.tensor([[*text[:-1], -100]]))[1]
    assert theirs(begun, labels=labels).loss.item() == pytest.approx(expected.item(), rel=1e-6)
    written = theirs.generate(max_new_tokens=8, do_sample=False)  # begins with its own token
    assert torch.equal(written[:, 1:], ours.generate(torch.tensor([[line_break]]), 8, temperature=0)[:, 1:])
    with pytest.raises(IndexError):
        theirs(torch.tensor([[V + 1]]))


# -- lm-evaluation-harness through transformers ------------------------------------------------------------------------


def test_the_harness_scores_the_exported_folder_as_it_scores_the_run(letters, tmp_path_factory, monkeypatch):
    """Its own adapter, HFLM, on the log-likelihoods and texts that its tasks ask for."""
    HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
    from test_harness import asks

    from minilooped.tools.harness import LoopedLM

    folder, _ = letters
    model, tokenizer = load_model(folder.parent)
    ours = LoopedLM(model, tokenizer)
    theirs = HFLM(str(folder), trust_remote_code=True, device="cpu", dtype="float32", batch_size=4)
    pairs = asks(("to be", " or not"), ("", "to be"), ("or", "not"), ("to be or not to be", " that is"))
    expected = ours.loglikelihood(pairs, disable_tqdm=True)
    found = theirs.loglikelihood(pairs, disable_tqdm=True)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], rel=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    texts = asks(("to be or not to be that is the question",))
    whole = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert whole == pytest.approx(ours.loglikelihood_rolling(texts, disable_tqdm=True), rel=1e-5)
    for context, stop in (("to be", ["?"]), ("abc", ["\n", "."])):
        request = asks((context, dict(until=stop, max_gen_toks=6, do_sample=False)))
        assert theirs.generate_until(request, disable_tqdm=True) == ours.generate_until(request, disable_tqdm=True)


# -- peft --------------------------------------------------------------------------------------------------------------


def test_lora_trains_an_exported_model_and_leaves_its_weights(letters):
    peft = pytest.importorskip("peft")
    folder, ours = letters
    theirs, idx = load(folder, trust_remote_code=True), tokens(ours.config)
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["qkv", "proj"]))
    assert torch.equal(logits(adapted, idx), logits(ours, idx)), "an adapter begins with nothing"
    adapted.train()
    trainable = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for _ in range(20):
        loss = adapted(input_ids=idx, attention_mask=torch.ones_like(idx), labels=idx).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0] and len(trainable) == 2 * 2 * ours.config.n_layer
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted.eval(), idx), logits(ours, idx))
    written = adapted.generate(input_ids=idx[:, :4], max_new_tokens=4, do_sample=False)
    merged = adapted.merge_and_unload()
    assert torch.equal(merged.generate(input_ids=idx[:, :4], max_new_tokens=4, do_sample=False), written)
