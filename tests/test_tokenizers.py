"""Tokenizers: ids against other implementations, exact round trips, little memory, and every message."""

import hashlib
import importlib.util
import json
import tracemalloc

import numpy as np
import pytest
import requests
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from minilooped import data
from minilooped.data import BPETokenizer, CharTokenizer, tokenizers

FOX = "The quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def gpt2() -> BPETokenizer:
    return BPETokenizer("gpt2")


@pytest.fixture(scope="module")
def shakespeare() -> str:
    return data.embedded("shakespeare.txt").read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# The embedded files


@pytest.mark.parametrize("name", tokenizers.EMBEDDED_SHA256)
def test_embedded_file_is_the_recorded_one(name):
    digest = hashlib.sha256(data.embedded(name).read_bytes()).hexdigest()
    assert digest == tokenizers.EMBEDDED_SHA256[name]
    assert digest in data.embedded("PROVENANCE.md").read_text(encoding="utf-8")


def test_embedded_text_is_speech_only(shakespeare):
    assert shakespeare.startswith(
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"
    )
    assert not set(shakespeare) & set("_*#[]\\\r\t")
    blocks = shakespeare.strip("\n").split("\n\n")
    assert all(block.split("\n")[0].endswith(":") and "\n" in block for block in blocks)


def test_missing_embedded_file_names_the_way_out():
    with pytest.raises(FileNotFoundError, match="install minilooped again"):
        data.embedded("nothing.txt")


def test_damaged_merges_are_noticed(tmp_path, monkeypatch):
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n", encoding="utf-8")
    monkeypatch.setattr(tokenizers, "embedded", lambda name: tmp_path / name)
    tokenizers._gpt2_encoding.cache_clear()
    with pytest.raises(ValueError, match="damaged"):
        BPETokenizer("gpt2")


def test_play_to_speeches(monkeypatch):
    folder = data.embedded("shakespeare.txt").parent
    monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location("make_shakespeare", folder / "make_shakespeare.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    play = (
        "# Play\n\n## ACT I\n\n### SCENE I.\n\n_Enter A, with\nB_\n\n**A**  \nYes,'\\--\n\n_Aside_\n\nno.  \n\n"
        "**B & C**  \n_\\[Within]_  \nAnd _\\[so]_  \nSenators, & C Peace!\n"
    )
    assert script.speeches(play) == "A:\nYes,'--\nno.\n\nB & C:\nAnd so\n\nSenators:\nPeace!\n"


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


def test_gpt2_known_ids(gpt2):
    assert gpt2.vocab_size == 50257
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode(FOX).tolist() == [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290]
    assert gpt2.decode([50256]) == "<|endoftext|>"


def test_special_token_in_a_text_is_text(gpt2):
    ids = gpt2.encode("<|endoftext|>")
    assert len(ids) == 7 and 50256 not in ids
    assert gpt2.decode(ids) == "<|endoftext|>"


spaced_text = st.text(st.one_of(st.sampled_from(" \n\t'sdtlr1a"), st.characters(exclude_categories=["Cs"])))


@pytest.fixture(scope="module")
def tiktokens_own(gpt2) -> tiktoken.Encoding:
    """Our ranks with the splitting pattern that tiktoken itself uses for GPT-2."""
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = {gpt2.encoding.decode_single_token_bytes(i): i for i in range(50256)}
    return tiktoken.Encoding("own", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})


@given(text=spaced_text)
def test_gpt2_splits_where_tiktoken_does(gpt2, tiktokens_own, text):
    assert gpt2.encode(text).tolist() == tiktokens_own.encode_ordinary(text)


@pytest.fixture(scope="module")
def hugging_face():
    """An independent implementation, fed with the same merges."""
    library = pytest.importorskip("tokenizers")
    _version, *lines = data.embedded("vocab.bpe").read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split()) for line in lines]
    words = sorted(library.pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge) for merge in merges]
    tokenizer = library.Tokenizer(library.models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


# Long-settled blocks only: the two libraries may know different editions of Unicode.
@given(text=st.text(st.one_of(st.sampled_from(" \n\t'sdtlr1a"), st.characters(max_codepoint=0x24F))))
def test_gpt2_agrees_with_another_implementation(gpt2, hugging_face, text):
    assert gpt2.encode(text).tolist() == hugging_face.encode(text).ids


def test_gpt2_agrees_with_another_implementation_on_a_play(gpt2, hugging_face, shakespeare):
    play = shakespeare[:100_000]
    assert gpt2.encode(play).tolist() == hugging_face.encode(play).ids


@given(text=spaced_text)
def test_round_trips(gpt2, text):
    assert gpt2.decode(gpt2.encode(text)) == text
    char = CharTokenizer(text)
    ids = char.encode(text)
    assert char.decode(ids) == text
    assert ids.dtype == np.int64 and ids.shape == (len(text),)
    assert char.vocab_size == len(set(text)) == len(set(ids.tolist()))


def test_char_ids_are_places_in_the_sorted_characters():
    assert CharTokenizer("banana!").encode("nab!").tolist() == [3, 1, 2, 0]


def test_unknown_character_is_named_with_its_position():
    with pytest.raises(ValueError, match=r"character 'é' at position 3 .* of the 5 .*'gpt2'"):
        CharTokenizer("caf e").encode("cafés à la")


def test_the_position_of_an_unknown_character_counts_from_the_start_of_the_text(monkeypatch):
    monkeypatch.setattr(tokenizers, "CHUNK", 4)
    known = CharTokenizer("ab")
    for position in range(12):
        with pytest.raises(ValueError, match=f"character 'Ж' at position {position} "):
            known.encode("a" * position + "Ж" + "Ж" * (position % 5))


@given(text=spaced_text, chunk=st.integers(1, 9))
def test_packed_ids_are_the_same_in_fewer_bytes(gpt2, text, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "CHUNK", chunk)
        for tokenizer in (gpt2, CharTokenizer(text)):
            packed = tokenizer.pack(text)
            assert packed.tolist() == tokenizer.encode(text).tolist()
            assert packed.dtype == tokenizers.storage_dtype(tokenizer.vocab_size) == "<u2"
        assert gpt2.pack(text).tolist() == gpt2.encoding.encode_ordinary(text)
        assert CharTokenizer(text).pack(text).tolist() == [sorted(set(text)).index(c) for c in text]


def test_half_a_surrogate_pair_is_encoded_as_tiktoken_does(gpt2):
    for text in ("\udcff a", "a\ud800b<|endoftext|>"):
        assert gpt2.pack(text).tolist() == gpt2.encoding.encode_ordinary(text)


@pytest.mark.parametrize("name", ["char", "gpt2"])
def test_ids_take_a_few_times_the_memory_of_the_text(shakespeare, name):
    """Once it was 21 times, by int64 and by a Python list of all ids."""
    text = shakespeare * 4  # 4.8 MB
    tokenizer = tokenizers.make_tokenizer(name, shakespeare)
    tokenizer.encode(shakespeare[:100])  # what is built once
    tracemalloc.start()
    ids = tokenizer.pack(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ids.nbytes <= 2 * len(text) and peak <= ids.nbytes + (2e6 if name == "char" else 5 * len(text))


def test_a_document_ends_with_an_id_where_there_is_one(gpt2, monkeypatch):
    assert gpt2.end == 50256 and CharTokenizer("abc").end is None
    ranks = {bytes([byte]): byte for byte in range(256)}
    without = tiktoken.Encoding("without", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens={"<|x|>": 256})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: without)
    assert BPETokenizer("cl100k_base").end is None


@pytest.mark.parametrize("wrong", [-1, 50257, 10**6])
def test_decode_refuses_ids_outside_the_vocabulary(gpt2, wrong):
    for tokenizer in (gpt2, CharTokenizer("abc")):
        with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([0, wrong])


@pytest.mark.parametrize("name", ["char", "gpt2"])
def test_spec_rebuilds_the_tokenizer(name):
    tokenizer = tokenizers.make_tokenizer(name, "some text, é")
    spec = json.loads(json.dumps(tokenizer.spec()))
    again = data.tokenizer_from_spec(spec)
    assert again.hash == tokenizer.hash and again.name == name
    assert again.encode("some text").tolist() == tokenizer.encode("some text").tolist()
    with pytest.raises(ValueError, match="can't be rebuilt"):
        data.tokenizer_from_spec(spec | {"hash": "0" * 64})


def test_tokenizers_with_other_ids_have_other_hashes(gpt2):
    others = [gpt2, CharTokenizer("abc"), CharTokenizer("abd"), CharTokenizer("abcd")]
    assert len({t.hash for t in others}) == 4
    assert CharTokenizer("cabbage").hash == CharTokenizer("gabec").hash
    data.check_same_tokenizer(CharTokenizer("cab"), CharTokenizer("abc"))
    with pytest.raises(ValueError, match="checkpoint was trained with .*'char' .3 tokens.*made with 'gpt2' .50257"):
        data.check_same_tokenizer(CharTokenizer("abc"), gpt2)


def test_another_encoding_without_network(monkeypatch):
    def no_network(name):
        raise requests.exceptions.ConnectionError("Max retries exceeded")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(
        ConnectionError, match="'cl100k_base' has to be downloaded.*TIKTOKEN_CACHE_DIR.*'gpt2' or 'char'"
    ):
        BPETokenizer("cl100k_base")


def test_another_encoding_with_network(monkeypatch, gpt2):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: gpt2.encoding)
    other = BPETokenizer("r50k_base")
    assert other.encode(FOX).tolist() == gpt2.encode(FOX).tolist()
    assert other.hash != gpt2.hash  # the name counts: it stands for the splitting pattern


def test_encoding_with_unused_ids(monkeypatch):
    ranks = {bytes([byte]): byte for byte in range(256)}
    gap = tiktoken.Encoding("gap", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens={"<|end|>": 300})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: gap)
    tokenizer = BPETokenizer("cl100k_base")
    assert tokenizer.vocab_size == 301 and len(tokenizer.hash) == 64
    assert tokenizer.decode([104, 105, 300]) == "hi<|end|>"
    with pytest.raises(ValueError, match="'cl100k_base' has no token for one of these ids"):
        tokenizer.decode([104, 299])


def test_unknown_tokenizer_is_refused():
    with pytest.raises(ValueError, match="unknown tokenizer 'word': choose 'char', 'gpt2'"):
        tokenizers.make_tokenizer("word", "text")
