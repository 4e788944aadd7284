"""Token files: what is written is read, other data is never touched, and a break at any moment mixes nothing."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from disk_events import all_events, disturbed
from hypothesis import given
from hypothesis import strategies as st

from minilooped.data import BPETokenizer, CharTokenizer, load_corpus, prepare
from minilooped.data.storage import (
    FORMAT,
    MANIFEST,
    ShardedTokens,
    digest,
    read_shards,
    read_splits,
    read_tokens,
    same_tokens,
    shard_name,
    write_splits,
    write_tokens,
)

# ---------------------------------------------------------------------------------------------------------------------
# One file and its header


@pytest.mark.slow
@given(text=st.text(min_size=1))
def test_token_files_round_trip(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("tokens") / "split.bin"
    tokenizer = CharTokenizer(text)
    write_tokens(path, tokenizer.encode(text), tokenizer)
    ids, again = read_tokens(path)
    assert again.decode(ids) == text and again.hash == tokenizer.hash
    assert not ids.flags.writeable


def test_token_width_follows_the_vocabulary(tmp_path):
    large = CharTokenizer("".join(map(chr, range(0x10000, 0x20001))))  # one more than two bytes can count
    for tokenizer, width in ((BPETokenizer(), 2), (large, 4)):
        path = tmp_path / f"{width}.bin"
        write_tokens(path, np.array([0, tokenizer.vocab_size - 1]), tokenizer)
        ids, _ = read_tokens(path)
        assert path.stat().st_size == 2 * width
        assert ids.tolist() == [0, tokenizer.vocab_size - 1]


@pytest.fixture
def token_file(tmp_path):
    tokenizer = CharTokenizer("abc")
    write_tokens(tmp_path / "split.bin", tokenizer.encode("abccba"), tokenizer)
    return tmp_path / "split.bin"


def test_truncated_token_file_is_noticed(token_file):
    token_file.write_bytes(token_file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"split.bin has 11 bytes, but 6 tokens of 2 .*minilooped prepare FILE"):
        read_tokens(token_file)


def test_foreign_ids_in_a_token_file_are_noticed(token_file):
    token_file.write_bytes(np.array([0, 1, 2, 3, 0, 0], dtype="<u2").tobytes())
    with pytest.raises(ValueError, match="split.bin: token id 3 is outside the vocabulary of 3"):
        read_tokens(token_file)


@pytest.mark.parametrize("suffix", [".bin", ".json"])
def test_missing_token_file_names_the_command(token_file, suffix):
    token_file.with_suffix(suffix).unlink()
    with pytest.raises(FileNotFoundError, match=f"split{suffix} is missing.*minilooped prepare FILE"):
        read_tokens(token_file)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        ({"format": 99}, "format is 99, but has to be 1"),
        ({"vocab_size": 4}, "vocab_size is 4, but its tokenizer needs 3"),
        ({"vocab_size": "3"}, 'vocab_size is "3", but has to be a whole number'),
        ({"dtype": "<u4"}, "dtype is '<u4', but its tokenizer needs '<u2'"),
        ({"dtype": 2}, "dtype is 2, but has to be text"),
        ({"count": None}, "count is null, but has to be a whole number of 1 or more"),
        ({"count": 6.0}, "count is 6.0, but has to be a whole number"),
        ({"count": -1}, "count is -1, but has to be a whole number of 1 or more"),
        ({"sha256": 5}, "sha256 is 5, but has to be text or null"),
        ({"tokenizer": {"name": "char", "hash": "0" * 64, "chars": "abc"}}, "the tokenizer 'char' .* can't be rebuilt"),
        ({"tokenizer": {"name": "char", "hash": "0" * 64, "chars": None}}, "the tokenizer 'char' .* can't be rebuilt"),
        ({"tokenizer": {"name": ["char"], "hash": "0" * 64}}, r'tokenizer.name is \["char"\], but has to be text'),
        ({"tokenizer": {"name": "char"}}, "tokenizer.hash is missing"),
        ({"tokenizer": {"name": "word", "hash": "0" * 64}}, "unknown tokenizer 'word'"),
        ({"tokenizer": None}, "tokenizer is null, but has to be an object"),
    ],
)
def test_edited_header_is_noticed(token_file, edit, complaint):
    header = token_file.with_suffix(".json")
    header.write_text(json.dumps(json.loads(header.read_text(encoding="utf-8")) | edit), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"split\.json: {complaint}.*: make it again with `minilooped prepare FILE`"):
        read_tokens(token_file)


def test_header_that_is_not_json_is_noticed(token_file):
    for content in ("{", "[" * 100_000):
        token_file.with_suffix(".json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=r"split\.json is not JSON .*: make it again"):
            read_tokens(token_file)


def test_write_refuses_what_could_not_be_read(tmp_path):
    with pytest.raises(ValueError, match="token id 3 is outside"):
        write_tokens(tmp_path / "split.bin", np.array([3]), CharTokenizer("abc"))
    with pytest.raises(ValueError, match="empty"):
        write_tokens(tmp_path / "split.bin", np.array([], dtype=np.int64), CharTokenizer("abc"))
    assert not list(tmp_path.iterdir())


def test_a_changed_byte_that_still_makes_sense_is_noticed(token_file):
    token_file.write_bytes(np.array([0, 1, 2, 2, 1, 1], dtype="<u2").tobytes())
    with pytest.raises(ValueError, match="split.bin is not what was written: its sha256 differs: make it again"):
        read_tokens(token_file)


def without_sums(folder: Path) -> Path:
    """The token files of a folder as older versions wrote them."""
    for header in folder.glob("*.json"):
        content = json.loads(header.read_text(encoding="utf-8"))
        del content["sha256"]
        header.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return folder


def test_what_older_versions_wrote_is_read(token_file):
    without_sums(token_file.parent)
    ids, tokenizer = read_tokens(token_file)
    assert tokenizer.decode(ids) == "abccba" and ids.sha256 is None


# ---------------------------------------------------------------------------------------------------------------------
# The two files of a text

ABC = CharTokenizer("abc")
OLD = {"train": ABC.encode("abcabc"), "val": ABC.encode("cba")}
NEW = {"train": ABC.encode("aabbcc"), "val": ABC.encode("bab")}


def text_in(folder: Path) -> tuple[list[int], list[int]] | None:
    """The ids that are loaded from a folder, or None if it says that they are not whole."""
    try:
        train, val, _ = read_splits(folder)
    except (FileNotFoundError, ValueError) as error:
        assert "make it again with `minilooped prepare FILE`" in str(error)
        return None
    return train.tolist(), val.tolist()


def ids(splits: dict[str, np.ndarray]) -> tuple[list[int], list[int]]:
    return splits["train"].tolist(), splits["val"].tolist()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("what", ["kill", "error", "full disk"])
def test_a_text_is_there_or_not_and_never_half_of_it(tmp_path, what):
    """Whatever happens at whichever event of the file system. The same call then finishes it."""
    count = all_events(tmp_path, lambda: write_splits(tmp_path / "whole", NEW, ABC))
    assert count > 20 and text_in(tmp_path / "whole") == ids(NEW)
    states = []
    for number in range(count):
        folder = tmp_path / f"{number}"
        with disturbed(tmp_path, number, what) as died:
            write_splits(folder, NEW, ABC)
        if died.error is not None and what != "kill":
            assert isinstance(died.error, OSError) and "could not be written" in str(died.error)
        states.append(text_in(folder))
        assert states[-1] in (None, ids(NEW))
        assert (states[-1] is None) or contents(folder) == contents(tmp_path / "whole")
        assert write_splits(folder, NEW, ABC) == (states[-1] is None), "the same call finishes it"
        assert contents(folder) == contents(tmp_path / "whole")
        assert sorted(path.name for path in folder.iterdir()) == sorted(contents(folder)), "kills leave nothing behind"
    assert None in states


@pytest.mark.parametrize("what", ["kill", "error", "full disk"])
@pytest.mark.parametrize("sums", [True, False])
def test_what_is_there_stays_whole_when_it_is_written_again(tmp_path, what, sums):
    write_splits(tmp_path / "old", OLD, ABC)
    before = contents(tmp_path / "old" if sums else without_sums(tmp_path / "old"))
    assert not write_splits(tmp_path / "old", OLD, ABC), "it is there already"
    for number in range(all_events(tmp_path, lambda: write_splits(tmp_path / "old", OLD, ABC)) + 1):
        with disturbed(tmp_path, number, what):
            write_splits(tmp_path / "old", OLD, ABC)
        assert contents(tmp_path / "old") == before and text_in(tmp_path / "old") == ids(OLD)


OTHERS = {
    "another text": (NEW, ABC, "other tokens in train.bin"),
    "a longer text": ({**OLD, "train": ABC.encode("abcabcabc")}, ABC, "6 tokens in train.bin, not 9"),
    "the same training tokens": ({**OLD, "val": ABC.encode("abc")}, ABC, "other tokens in val.bin"),
    "another tokenizer": (OLD, CharTokenizer("abcd"), "made with another tokenizer, 'char' of 3 tokens"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("sums", [True, False])
def test_other_data_is_never_overwritten(tmp_path, name, sums):
    splits, tokenizer, reason = OTHERS[name]
    write_splits(tmp_path, OLD, ABC)
    before = contents(tmp_path if sums else without_sums(tmp_path))
    line = rf"holds other data \({reason}\): choose another folder \(--out\), or delete [a-z., ]+ there$"
    with pytest.raises(ValueError, match=line) as caught:
        write_splits(tmp_path, splits, tokenizer)
    assert all(name in str(caught.value) for name in before), "all that has to go"
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "train.json", "val.json"])
def test_somebody_elses_file_is_never_overwritten(tmp_path, name):
    (tmp_path / name).write_bytes(b"not ours")
    reason = f"{name} is not one of ours" if name.endswith("json") else f"{name} has no header of ours"
    with pytest.raises(ValueError, match=rf"holds other data \({reason}\): choose another .*, or delete {name} there"):
        write_splits(tmp_path, NEW, ABC)
    assert contents(tmp_path) == {name: b"not ours"}


def test_files_beside_the_data_are_left_alone(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"mine")
    (tmp_path / "train.bin.tmp").write_bytes(b"mine")
    write_splits(tmp_path, NEW, ABC)
    assert text_in(tmp_path) == ids(NEW) and len(contents(tmp_path)) == 6


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_damaged_file_of_the_same_text_is_made_again(tmp_path, name):
    write_splits(tmp_path, NEW, ABC)
    before = contents(tmp_path)
    (tmp_path / name).write_bytes(before[name][:-2] + b"\0\0")
    assert write_splits(tmp_path, NEW, ABC) and contents(tmp_path) == before
    (tmp_path / name).unlink()
    assert write_splits(tmp_path, NEW, ABC) and contents(tmp_path) == before


def test_splits_of_two_tokenizers_are_not_a_text(tmp_path):
    write_splits(tmp_path / "a", NEW, ABC)
    write_splits(tmp_path / "b", NEW, CharTokenizer("abcd"))
    for name in ("val.bin", "val.json"):
        shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
    with pytest.raises(ValueError, match="train.bin and val.bin differ in tokenizer"):
        read_splits(tmp_path / "a")


# ---------------------------------------------------------------------------------------------------------------------
# Shards

PARTS = [np.arange(start, stop, dtype="<u2") for start, stop in ((0, 5), (5, 6), (6, 20), (20, 31))]


@given(st.integers(-40, 40) | st.none(), st.integers(-40, 40) | st.none())
def test_sharded_tokens_read_like_one_array(start, stop):
    sharded, one = ShardedTokens(PARTS, "hash"), np.arange(31, dtype="<u2")
    assert len(sharded) == 31 and sharded.dtype == one.dtype
    part = sharded[start:stop]
    assert np.array_equal(part, one[start:stop]) and part.dtype == one.dtype


def test_sharded_tokens_are_read_forwards_alone():
    with pytest.raises(ValueError, match="a slice of step 2"):
        ShardedTokens(PARTS, "hash")[::2]


def shards_in(folder: Path, *edits) -> Path:
    """A finished folder of three shards, and what `edits` make of its manifest."""
    folder.mkdir(exist_ok=True)
    shards = []
    for number, text in enumerate(("abc", "abca", "cba")):
        content = ABC.pack(text).tobytes()
        (folder / shard_name(number)).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        last = dict(state={}, sha256="")
        shards.append(dict(file=shard_name(number), tokens=len(text), sha256=sha256, last=last))
    manifest = dict(
        format=FORMAT,
        source=dict(dataset="pages", config=None, column="text", revision=None),
        tokenizer=ABC.spec(),
        dtype="<u2",
        tokens=10,
        finished=True,
        shards=shards,
    )
    for edit in edits:
        edit(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def test_a_folder_of_shards_is_read(tmp_path):
    train, val, tokenizer = read_shards(shards_in(tmp_path))
    assert tokenizer.decode(train[:]) == "abcacba" and tokenizer.decode(val) == "abc"


def put(**values):
    return lambda manifest: manifest.update(values)


def put_in_shard(number: int, **values):
    return lambda manifest: manifest["shards"][number].update(values)


def leave_out(name: str):
    return lambda manifest: manifest.pop(name)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (put(format=99), "format is 99, but has to be 1"),
        (put(dtype="<u4"), "dtype is '<u4', which is not its tokenizer's"),
        (put(dtype=None), "dtype is null, but has to be text"),
        (put(tokenizer={"name": "gpt2", "hash": "0" * 64}), "the tokenizer 'gpt2' .* can't be rebuilt"),
        (put(tokenizer=None), "tokenizer is null, but has to be an object"),
        (put(tokens=None), "tokens is null, but has to be a whole number of 1 or more"),
        (put(tokens="10"), 'tokens is "10", but has to be a whole number'),
        (put(finished=1), "finished is 1, but has to be true or false"),
        (put(shards=None), "shards is null, but has to be a list"),
        (put(shards=[{"file": "val-00000.bin"}]), r"shards\[0\].tokens is missing"),
        (put(shards=[]), "shards has less than two entries, but one is to validate on"),
        (lambda manifest: manifest["shards"].pop(), None),
        (lambda manifest: [manifest["shards"].pop() for _ in range(2)], "shards has less than two entries"),
        (put(source={"dataset": "a/b"}), "source.column is missing"),
        (put_in_shard(2, tokens=None), r"shards\[2\].tokens is null, but has to be a whole number of 1 or more"),
        (put_in_shard(1, tokens=0), r"shards\[1\].tokens is 0, but has to be a whole number of 1 or more"),
        (put_in_shard(1, sha256=7), r"shards\[1\].sha256 is 7, but has to be text"),
        (put_in_shard(0, last=None), r"shards\[0\].last is null, but has to be an object"),
        (put_in_shard(0, last={"state": [], "sha256": ""}), r"shards\[0\].last.state is \[\], but has to be an object"),
        (leave_out("finished"), "finished is missing"),
        (leave_out("source"), "source is missing"),
        # Another name could lead anywhere, and `minilooped prepare` deletes shards, too.
        *(
            (put_in_shard(1, file=name), r"shards\[1\].file is ")
            for name in ("../secret.bin", "/etc/passwd", "train-1/../../secret.bin", "train-00001.bin\n", 7)
        ),
        (
            put_in_shard(0, file="train-00001.bin"),
            r"shards\[0\].file is 'train-00001.bin', but has to be 'val-00000.bin'",
        ),
    ],
)
def test_an_odd_value_in_a_manifest_is_named(tmp_path, edit, complaint):
    folder = shards_in(tmp_path, edit)
    if complaint is None:
        assert len(read_shards(folder)[0]) == 4, "fewer shards are fewer tokens"
        return
    with pytest.raises(ValueError, match=rf"shards\.json: {complaint}.*: prepare the data again, in another folder"):
        load_corpus(folder)


def test_an_unfinished_folder_says_so(tmp_path):
    with pytest.raises(ValueError, match="has 10 of the 20 tokens that were asked for: run the `minilooped prepare`"):
        read_shards(shards_in(tmp_path, put(finished=False, tokens=20)))


def test_text_does_not_go_where_shards_are(tmp_path):
    folder = shards_in(tmp_path / "out")
    before = contents(folder)
    (tmp_path / "text.txt").write_text("a text " * 50, encoding="utf-8")
    with pytest.raises(ValueError, match="holds a data set in shards: choose another folder"):
        prepare(tmp_path / "text.txt", folder)
    assert contents(folder) == before


# ---------------------------------------------------------------------------------------------------------------------
# Which data is it


def test_a_digest_tells_tokens_apart_wherever_they_differ(tmp_path):
    tokens = np.arange(3 * 2**20, dtype="<u2")
    others = [tokens[:-1], tokens[1:], *(tokens.copy() for _ in range(3))]
    for other, position in zip(others[2:], (0, len(tokens) // 2, -1), strict=True):
        other[position] ^= 1
    assert len({digest(tokens), *map(digest, others)}) == 6
    assert digest(tokens) == hashlib.sha256(tokens.tobytes()).hexdigest()
    for folder in (tmp_path / "a", tmp_path / "b"):
        write_splits(folder, NEW, ABC)
    without_sums(tmp_path / "b")
    packed = NEW["train"].astype("<u2")
    for folder in (tmp_path / "a", tmp_path / "b"):
        train, _, _ = read_splits(folder)
        assert digest(train) == digest(packed), "from the disk the same, with a sum in the header and without"
        assert digest(train[1:]) == digest(packed[1:]) != digest(train)


def old_digest(tokens: np.ndarray) -> str:
    """As runs recorded it when only the ends counted."""
    ends = tokens[: 2**19].tobytes() + tokens[-(2**19) :].tobytes()
    return hashlib.sha256(len(tokens).to_bytes(8, "little") + ends).hexdigest()


def test_runs_that_recorded_an_older_digest_know_their_tokens(tmp_path):
    tokens = np.arange(3 * 2**20, dtype="<u2")
    other = tokens[::-1].copy()
    assert same_tokens(tokens, digest(tokens)) and same_tokens(tokens, old_digest(tokens))
    assert not same_tokens(other, digest(tokens)) and not same_tokens(other, old_digest(tokens))
    train, _, _ = read_shards(shards_in(tmp_path))
    assert same_tokens(train, train.sha256) and not same_tokens(train, digest(tokens))
