"""Text -> tokens -> batches: ids against other implementations, exact resume, exact coverage, and every message."""

import importlib.util
import itertools
import json

import numpy as np
import pytest
import requests
import tiktoken
import torch
from hypothesis import given
from hypothesis import strategies as st

from minilooped import data
from minilooped.data import BatchStream, BPETokenizer, CharTokenizer, eval_windows
from minilooped.data.tasks import Task, baselines, p_hop, permutations

FOX = "The quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def gpt2() -> BPETokenizer:
    return BPETokenizer("gpt2")


@pytest.fixture(scope="module")
def shakespeare() -> str:
    return data.embedded("shakespeare.txt").read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# The embedded files


@pytest.mark.parametrize("name", data.EMBEDDED_SHA256)
def test_embedded_file_is_the_recorded_one(name):
    digest = data.hashlib.sha256(data.embedded(name).read_bytes()).hexdigest()
    assert digest == data.EMBEDDED_SHA256[name]
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
    monkeypatch.setattr(data, "embedded", lambda name: tmp_path / name)
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
    tokenizers = pytest.importorskip("tokenizers")
    _version, *lines = data.embedded("vocab.bpe").read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split()) for line in lines]
    words = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge) for merge in merges]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
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


@pytest.mark.parametrize("wrong", [-1, 50257, 10**6])
def test_decode_refuses_ids_outside_the_vocabulary(gpt2, wrong):
    for tokenizer in (gpt2, CharTokenizer("abc")):
        with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([0, wrong])


@pytest.mark.parametrize("name", ["char", "gpt2"])
def test_spec_rebuilds_the_tokenizer(name):
    tokenizer = data.make_tokenizer(name, "some text, é")
    spec = json.loads(json.dumps(tokenizer.spec()))
    again = data.tokenizer_from_spec(spec)
    assert again.hash == tokenizer.hash and again.name == name
    assert again.encode("some text").tolist() == tokenizer.encode("some text").tolist()
    with pytest.raises(ValueError, match="can't be rebuilt"):
        data.tokenizer_from_spec(spec | {"hash": "0" * 64})


def test_tokenizers_with_other_ids_have_other_hashes(gpt2):
    tokenizers = [gpt2, CharTokenizer("abc"), CharTokenizer("abd"), CharTokenizer("abcd")]
    assert len({t.hash for t in tokenizers}) == 4
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
        data.make_tokenizer("word", "text")


# ---------------------------------------------------------------------------------------------------------------------
# Token files


@given(text=st.text(min_size=1))
def test_token_files_round_trip(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("tokens") / "split.bin"
    tokenizer = CharTokenizer(text)
    data.write_tokens(path, tokenizer.encode(text), tokenizer)
    ids, again = data.read_tokens(path)
    assert again.decode(ids) == text and again.hash == tokenizer.hash
    assert not ids.flags.writeable


def test_token_width_follows_the_vocabulary(tmp_path, gpt2):
    large = CharTokenizer("".join(map(chr, range(0x10000, 0x20001))))  # one more than two bytes can count
    for tokenizer, width in ((gpt2, 2), (large, 4)):
        path = tmp_path / f"{width}.bin"
        data.write_tokens(path, np.array([0, tokenizer.vocab_size - 1]), tokenizer)
        ids, _ = data.read_tokens(path)
        assert path.stat().st_size == 2 * width
        assert ids.tolist() == [0, tokenizer.vocab_size - 1]


@pytest.fixture
def token_file(tmp_path):
    tokenizer = CharTokenizer("abc")
    data.write_tokens(tmp_path / "split.bin", tokenizer.encode("abccba"), tokenizer)
    return tmp_path / "split.bin"


def test_truncated_token_file_is_noticed(token_file):
    token_file.write_bytes(token_file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"split.bin has 11 bytes, but 6 tokens of 2 .*minilooped prepare FILE"):
        data.read_tokens(token_file)


def test_foreign_ids_in_a_token_file_are_noticed(token_file):
    token_file.write_bytes(np.array([0, 1, 2, 3, 0, 0], dtype="<u2").tobytes())
    with pytest.raises(ValueError, match="split.bin: token id 3 is outside the vocabulary of 3"):
        data.read_tokens(token_file)


@pytest.mark.parametrize("suffix", [".bin", ".json"])
def test_missing_token_file_names_the_command(token_file, suffix):
    token_file.with_suffix(suffix).unlink()
    with pytest.raises(FileNotFoundError, match=f"split{suffix} is missing.*minilooped prepare FILE"):
        data.read_tokens(token_file)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        ({"format": 99}, "format 99"),
        ({"vocab_size": 4}, "not its tokenizer's"),
        ({"dtype": "<u4"}, "not its tokenizer's"),
        ({"tokenizer": {"name": "char", "hash": "0" * 64, "chars": "abc"}}, "can't be rebuilt"),
        ({"tokenizer": None}, "NoneType"),
    ],
)
def test_edited_header_is_noticed(token_file, edit, complaint):
    header = token_file.with_suffix(".json")
    header.write_text(json.dumps(json.loads(header.read_text(encoding="utf-8")) | edit), encoding="utf-8")
    with pytest.raises(ValueError, match=f"split.json is not a header that can be read.*{complaint}"):
        data.read_tokens(token_file)


def test_header_that_is_not_json_is_noticed(token_file):
    for content in ("{", "[" * 100_000):
        token_file.with_suffix(".json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match="split.json is not a header that can be read"):
            data.read_tokens(token_file)


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path):
    """In a stranger's folder it could show any file of this machine."""
    (tmp_path / "text.txt").write_text("a text " * 50, encoding="utf-8")
    folder = data.prepare(tmp_path / "text.txt", tmp_path / "tokens")
    (folder / "train.bin").rename(tmp_path / "secret.bin")
    (folder / "train.bin").symlink_to("../secret.bin")
    with pytest.raises(ValueError, match="train.bin is a link that leads out of .*: put the file itself there"):
        data.load_corpus(folder)
    (tmp_path / "secret.bin").rename(folder / "inside.bin")
    (folder / "train.bin").unlink()
    (folder / "train.bin").symlink_to("inside.bin")
    (tmp_path / "alias").symlink_to(folder)
    data.load_corpus(tmp_path / "alias")  # one that the user made, and one that stays inside


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "train-1/../../secret.bin", "train-00001.bin\n", 7])
def test_a_manifest_leads_nowhere_else(tmp_path, name):
    """`minilooped prepare` deletes shards, too."""
    shard = dict(file=name, tokens=3, sha256="", last={})
    source = dict(dataset="a", config=None, column="text", revision=None)
    manifest = dict(
        format=data.FORMAT, tokenizer=CharTokenizer("abc").spec(), dtype="<u2", tokens=3, finished=True, source=source
    )
    (tmp_path / data.MANIFEST).write_text(json.dumps(manifest | {"shards": [shard]}), encoding="utf-8")
    with pytest.raises(ValueError, match="shards.json cannot be read"):
        data.load_corpus(tmp_path)


def test_write_refuses_what_could_not_be_read(tmp_path):
    with pytest.raises(ValueError, match="token id 3 is outside"):
        data.write_tokens(tmp_path / "split.bin", np.array([3]), CharTokenizer("abc"))
    with pytest.raises(ValueError, match="empty"):
        data.write_tokens(tmp_path / "split.bin", np.array([], dtype=np.int64), CharTokenizer("abc"))
    assert not list(tmp_path.iterdir())


def test_a_crash_while_writing_leaves_no_file_that_looks_whole(token_file, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    tokenizer = CharTokenizer("xyz")
    with pytest.raises(OSError, match="disk full"):
        data.write_tokens(token_file, tokenizer.encode("zyxxyz"), tokenizer)
    assert [file.name for file in token_file.parent.iterdir()] == ["split.bin"]
    with pytest.raises(FileNotFoundError, match="split.json is missing"):
        data.read_tokens(token_file)


def test_a_digest_tells_token_files_apart(tmp_path):
    million = 2**20  # more tokens than are looked at
    ids = np.arange(3 * million, dtype="<u2")
    others = [ids[:-1], ids[1:], ids.copy(), ids.copy()]
    others[2][million // 2 - 1] ^= 1
    others[3][-million // 2] ^= 1
    assert len({data.digest(ids), *map(data.digest, others)}) == 5
    data.write_tokens(tmp_path / "a.bin", ids[:9] % 3, CharTokenizer("abc"))
    assert data.digest(data.read_tokens(tmp_path / "a.bin")[0]) == data.digest(ids[:9] % 3), "from the disk the same"


# ---------------------------------------------------------------------------------------------------------------------
# Corpora


@pytest.mark.parametrize("name", ["char", "gpt2"])
def test_embedded_corpus_is_cut_by_position(shakespeare, name):
    corpus = data.load_corpus(tokenizer=name)
    assert corpus.name == "shakespeare" and corpus.tokenizer.name == name
    train, val = corpus.tokenizer.decode(corpus.train), corpus.tokenizer.decode(corpus.val)
    assert train + val == shakespeare
    assert len(val) == round(0.1 * len(shakespeare))


@pytest.mark.parametrize("name", ["char", "gpt2"])
def test_prepare_and_load(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    book = tmp_path / "my book.txt"
    book.write_bytes("\ufeffEin Käse,\r\nzwei Käse.\r\n".encode() * 20)
    folder = data.prepare(book, tokenizer=name, val_fraction=0.25)
    assert folder == data.Path("prepared/my book")
    corpus = data.load_corpus(folder)
    text = ("\ufeffEin Käse,\nzwei Käse.\n" * 20).removeprefix("\ufeff")
    assert corpus.name == "my book" and corpus.tokenizer.name == name
    assert corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(corpus.val) == text
    assert len(corpus.tokenizer.decode(corpus.val)) == round(0.25 * len(text))


def test_case_C14_forty_bytes(tmp_path):
    book = tmp_path / "short.txt"
    book.write_text("To be, or not to be, that is a question.", encoding="utf-8")
    assert book.stat().st_size == 40
    corpus = data.load_corpus(data.prepare(book, tmp_path / "out"))
    assert (len(corpus.train), len(corpus.val)) == (36, 4)
    x, y = next(BatchStream(corpus.train, batch_size=2, block_size=8, seed=0))
    assert x.shape == y.shape == (2, 8)
    assert sum(y.numel() for _, y in eval_windows(corpus.val, block_size=8, batch_size=2)) == 3
    with pytest.raises(ValueError, match="block_size . 1 = 65 tokens, but the text has 36: use a smaller block_size"):
        BatchStream(corpus.train, batch_size=2, block_size=64, seed=0)
    with pytest.raises(ValueError, match="short.txt leaves 1 tokens for the validation split.*val_fraction .now 0.02"):
        data.prepare(book, tmp_path / "out", val_fraction=0.02)


def test_prepare_errors(tmp_path):
    book = tmp_path / "book.txt"
    with pytest.raises(FileNotFoundError, match="no text file at .*book.txt: give the path"):
        data.prepare(book)
    book.write_bytes("première\nligne\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"book.txt is not UTF-8 text: byte 0xe8 at offset 5 \(line 1\).*save the"):
        data.prepare(book)
    book.write_bytes(b"one\ntwo\nthr\xff")
    with pytest.raises(ValueError, match=r"byte 0xff at offset 11 \(line 3\)"):
        data.prepare(book)
    book.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="book.txt leaves 0 tokens for the training split"):
        data.prepare(book)
    for fraction in (-0.1, 0, 1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="val_fraction is .*between 0 and 1"):
            data.prepare(book, val_fraction=fraction)
    with pytest.raises(ValueError, match="unknown tokenizer"):
        data.prepare(book, tokenizer="word")
    assert [file.name for file in tmp_path.iterdir()] == ["book.txt"]


def test_load_corpus_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no data at .*nowhere: use 'shakespeare'.*minilooped prepare FILE"):
        data.load_corpus(tmp_path / "nowhere")
    book = tmp_path / "book.txt"
    book.write_text("abc" * 20, encoding="utf-8")
    with pytest.raises(ValueError, match="is a file, not prepared data: run `minilooped prepare .*book.txt`"):
        data.load_corpus(book)
    folder = data.prepare(book, tmp_path / "out")
    with pytest.raises(ValueError, match="prepared with the tokenizer 'char', not 'gpt2'"):
        data.load_corpus(folder, tokenizer="gpt2")
    other = CharTokenizer("abcd")
    data.write_tokens(folder / "val.bin", other.encode("abcd"), other)
    with pytest.raises(ValueError, match="train.bin and val.bin differ"):
        data.load_corpus(folder)
    (folder / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match="val.bin is missing.*minilooped prepare FILE"):
        data.load_corpus(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Batches

TOKENS = np.arange(1000, dtype=np.uint16)  # each token is its own position


def test_batches_are_windows_and_targets_are_one_ahead():
    x, y = next(BatchStream(TOKENS, batch_size=5, block_size=7, seed=0))
    assert x.shape == y.shape == (5, 7) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(7))


def test_every_window_can_be_drawn():
    stream = BatchStream(TOKENS[:10], batch_size=64, block_size=7, seed=0)
    assert {row[0].item() for row in next(stream)[0]} == {0, 1, 2}


def test_batches_depend_on_the_seed_alone():
    def first(seed):
        return next(BatchStream(TOKENS, batch_size=4, block_size=8, seed=seed))[0]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(first(3), first(3)) and not torch.equal(first(3), first(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_stream_resumes_exactly(tmp_path):
    straight = BatchStream(TOKENS, batch_size=4, block_size=8, seed=1)
    for _ in range(5):
        next(straight)
    torch.save(straight.state_dict(), tmp_path / "stream.pt")
    resumed = BatchStream(TOKENS, batch_size=4, block_size=8, seed=2)
    resumed.load_state_dict(torch.load(tmp_path / "stream.pt", weights_only=True))
    for (x, y), (x_again, y_again), _ in zip(straight, resumed, range(5), strict=False):
        assert torch.equal(x, x_again) and torch.equal(y, y_again)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_together_see_the_batch_of_one_process(world_size):
    one = BatchStream(TOKENS, batch_size=6, block_size=8, seed=0)
    ranks = [BatchStream(TOKENS, 6, 8, 0, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(3):
        x, y = next(one)
        for rank, stream in enumerate(ranks):
            x_rank, y_rank = next(stream)
            assert torch.equal(x_rank, x[rank::world_size]) and torch.equal(y_rank, y[rank::world_size])


def test_stream_errors():
    with pytest.raises(ValueError, match="block_size . 1 = 1001 tokens, but the text has 1000"):
        BatchStream(TOKENS, batch_size=1, block_size=1000, seed=0)
    assert next(BatchStream(TOKENS, batch_size=1, block_size=999, seed=0))[1][0, -1] == 999
    for sizes in ((0, 8), (4, 0)):
        with pytest.raises(ValueError, match="batch_size and block_size have to be 1 or more"):
            BatchStream(TOKENS, *sizes, seed=0)
    for rank, world_size in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"batch_size 4 can't be shared equally by {world_size} processes"):
            BatchStream(TOKENS, 4, 8, 0, rank=rank, world_size=world_size)


@given(count=st.integers(2, 200), block_size=st.integers(1, 40), batch_size=st.integers(1, 9))
def test_evaluation_meets_every_target_once_and_in_order(count, block_size, batch_size):
    batches = list(eval_windows(TOKENS[:count], block_size, batch_size))
    assert torch.cat([x.flatten() for x, _ in batches]).tolist() == list(range(count - 1))
    assert torch.cat([y.flatten() for _, y in batches]).tolist() == list(range(1, count))
    assert all(x.shape[0] <= batch_size and x.shape[1] <= block_size for x, _ in batches)
    assert all(x.shape[1] == block_size for x, _ in batches[:-1])


def test_evaluation_needs_a_target():
    with pytest.raises(ValueError, match="the split has 1 tokens, but an evaluation needs 2 or more"):
        next(eval_windows(TOKENS[:1], block_size=8, batch_size=2))


# ----------------------------------------------------------------------------------------------------------------------
# Tasks


def hop_by_hand(text: list[int], at: int, p: int) -> int | None:
    """The letter p jumps from position `at`, or None where there is no jump."""
    for _ in range(p):
        earlier = [i for i in range(at) if text[i] == text[at]]
        if not earlier:
            return None
        at = earlier[-1] + 1
    return text[at]


@pytest.mark.parametrize("letters, length, hops", [(4, 33, (1, 2, 4)), (3, 12, (3,)), (8, 40, (2, 5)), (4, 3, (1,))])
def test_p_hop_is_what_a_reader_with_a_finger_finds(letters, length, hops):
    (x, y), p = p_hop(40, length, hops, letters=letters, generator=torch.Generator().manual_seed(length))
    assert x.shape == y.shape == (40, length) and set(p.tolist()) == set(hops)
    for row, said, count in zip(x.tolist(), y.tolist(), p.tolist(), strict=True):
        text = row[1:]
        assert row[0] == letters + count and 0 <= min(text) and max(text) < letters
        assert all(a != b for a, b in itertools.pairwise(text)), "a letter follows itself"
        by_hand = [hop_by_hand(text, at, count) for at in range(len(text))]
        assert said == [-100] + [-100 if letter is None else letter for letter in by_hand]


def test_p_hop_uses_every_letter_evenly_and_depends_on_its_generator_alone():
    draw = [p_hop(500, 9, (1, 2), letters=5, generator=torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    assert torch.equal(draw[0].x, draw[1].x) and not torch.equal(draw[0].x, draw[2].x)
    shares = [draw[0].x[:, 1:].flatten().bincount(minlength=5) / 4000, draw[0].x[:, 1].bincount(minlength=5) / 500]
    assert all((share - 0.2).abs().max() < 0.06 for share in shares)


def test_without_repeats_the_letter_just_read_is_no_answer_to_one_hop():
    """What handing out the letters freely would give away: they repeat once in four."""
    task, _ = p_hop(2000, 33, (1,), generator=torch.Generator().manual_seed(0))
    assert baselines(task)["repeat"] == 0 and baselines(task)["commonest"] < 0.28


@pytest.mark.parametrize("n", [2, 3, 5])
def test_permutations_are_done_in_turn(n):
    x, y = permutations(30, 7, n=n, generator=torch.Generator().manual_seed(n))
    every = list(itertools.permutations(range(n)))
    assert x.max() < len(every) and (n == 5 or x.unique().numel() == len(every))
    for row, products in zip(x.tolist(), y.tolist(), strict=True):
        things = list(range(n))  # where each thing is now
        for token, product in zip(row, products, strict=True):
            things = [every[token][place] for place in things]
            assert tuple(things) == every[product]


def test_permutations_do_not_commute_and_depend_on_their_generator_alone():
    draw = [permutations(50, 4, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draw[0].y, draw[1].y) and not torch.equal(draw[0].x, draw[2].x)
    swap, turn = 1, 3  # of S3: (0, 2, 1) and (1, 2, 0)
    products = data._products(3)
    assert products[swap, turn] != products[turn, swap] and products[0].tolist() == list(range(6))


def test_baselines_are_shares_of_what_is_scored():
    x, y = torch.tensor([[7, 1, 2, 3]]), torch.tensor([[-100, 1, 1, 0]])
    assert baselines(Task(x, y)) == pytest.approx({"commonest": 2 / 3, "repeat": 1 / 3})


@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: p_hop(1, 8, (1,), letters=2), "letters >= 3"),
        (lambda: p_hop(1, 8, (0, 1)), "hops >= 1"),
        (lambda: p_hop(1, 8, ()), "hops >= 1"),
        (lambda: p_hop(1, 2), "length >= 3"),
        (lambda: permutations(1, 8, n=1), "n=1 must be from 2 to 6"),
        (lambda: permutations(1, 8, n=7), "n=7 must be from 2 to 6"),
    ],
)
def test_a_task_that_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
