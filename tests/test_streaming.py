"""Data sets in shards: the ids of every document in order, whatever breaks, and training that goes on bit for bit."""

import hashlib
import io
import json
import os
import shutil
import sys
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import tiktoken
import torch
from disk_events import all_events, disturbed
from tiny_runs import DENSE, children, cut_back, fingerprint, settings

from minilooped.cli import main
from minilooped.data import BatchStream, BPETokenizer, digest, eval_windows, load_corpus, prepare, sources, streaming
from minilooped.data.sources import way_out
from minilooped.data.storage import MANIFEST
from minilooped.data.streaming import FINEWEB_EDU, Source, prepare_stream
from minilooped.files import SCRATCH
from minilooped.train import train

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
pyarrow_parquet = pytest.importorskip("pyarrow.parquet")

# Documents of very different lengths, one with the text of a special token; rows without text are in between.
ROWS = [f"Document {i}: " + "to be or not to be, " * (7 * i % 11) for i in range(61)]
ROWS[3], ROWS[7], ROWS[20], ROWS[21] = None, "", "Not an end: <|endoftext|>.", None
TOKENS, VAL, SHARD = 1500, 0.1, 300  # of 2210 that there are
END = 50256


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    """A data set of the form of FineWeb-Edu: parquet files in row groups, with other columns beside the text."""
    folder = tmp_path_factory.mktemp("pages")
    for number, rows in enumerate((ROWS[:25], ROWS[25:32], ROWS[32:])):
        table = datasets.Dataset.from_dict({"id": [f"{number}-{i}" for i in range(len(rows))], "text": rows})
        pyarrow_parquet.write_table(table.data.table, folder / f"{number:03}.parquet", row_group_size=4)
    return Source(str(folder))


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """The ids of all documents by tiktoken itself, each closed by the end-of-text token."""
    encoding = BPETokenizer().encoding
    return np.concatenate([[*encoding.encode(text, disallowed_special=()), END] for text in ROWS if text])


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that a shard ends in the middle of a batch, and a batch in the middle of a shard."""
    monkeypatch.setattr(streaming, "BATCH_CHARACTERS", 400)


def prepared(source: Source, folder: Path, tokens: int = TOKENS, **changes) -> Path:
    return prepare_stream(source, tokens, folder, **({"val_fraction": VAL, "shard_tokens": SHARD} | changes))


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """A folder that was prepared without a break. Not to be changed."""
    return prepared(source, tmp_path_factory.mktemp("whole") / "pages")


def manifest(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def contents(folder: Path) -> dict[str, Any]:
    """All that is in a folder, but for the states of the stream: the same place can be written in more than one way."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    told = manifest(folder) if MANIFEST in files else {"shards": []}
    for shard in told["shards"]:
        del shard["last"]["state"]
    return files | {MANIFEST: told}


def ids_on_disk(folder: Path) -> np.ndarray:
    return np.concatenate([np.fromfile(folder / shard["file"], "<u2") for shard in manifest(folder)["shards"]])


def break_at(monkeypatch, document: int, error: BaseException):
    """The tokenizer fails at a document, counted from 1."""
    pack, calls = BPETokenizer.pack, []

    def failing(self, text):
        calls.append(text)
        if len(calls) >= document:
            raise error
        return pack(self, text)

    monkeypatch.setattr(BPETokenizer, "pack", failing)
    return calls


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def test_shards_hold_every_document_in_order(whole, expected):
    shards_of = manifest(whole)["shards"]
    names = ["val-00000.bin", *(f"train-{i:05}.bin" for i in range(1, len(shards_of)))]
    assert [shard["file"] for shard in shards_of] == names and len(names) == 5
    assert sorted(path.name for path in whole.iterdir()) == sorted([*names, MANIFEST])
    ids = ids_on_disk(whole)
    assert np.array_equal(ids, expected[: len(ids)])
    longest = np.diff(np.flatnonzero(expected == END)).max()
    assert TOKENS <= len(ids) < TOKENS + longest and TOKENS < len(expected)
    for shard in shards_of:
        ids = np.fromfile(whole / shard["file"], "<u2")
        assert len(ids) == shard["tokens"] and ids[-1] == END, "whole documents"
    asked = [VAL * TOKENS, *(SHARD for _ in shards_of[1:-1])]
    assert all(0 <= shard["tokens"] - size < longest for shard, size in zip(shards_of, asked, strict=False))


def test_json_lines_and_another_column(tmp_path, expected):
    (tmp_path / "lines").mkdir()
    lines = "".join(json.dumps({"page": text}) + "\n" for text in ROWS)
    (tmp_path / "lines" / "part.jsonl").write_text(lines, encoding="utf-8")
    folder = prepared(Source(str(tmp_path / "lines"), column="page"), tmp_path / "out")
    ids = ids_on_disk(folder)
    assert np.array_equal(ids, expected[: len(ids)])


def documents(folder: Path) -> list[str]:
    """The texts of all documents of a folder, in order."""
    text = BPETokenizer().decode(ids_on_disk(folder))
    assert text.endswith("<|endoftext|>")
    return text.removesuffix("<|endoftext|>").split("<|endoftext|>")


def as_parquet(path: Path, columns: dict[str, list]) -> None:
    pyarrow_parquet.write_table(pyarrow.table(columns), path.with_suffix(".parquet"))


def as_json_lines(path: Path, columns: dict[str, list]) -> None:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.with_suffix(".jsonl").write_text(lines, encoding="utf-8")


TEXTS = [[f"Page {i} of {part}, with some words." for i in range(200)] for part in ("one", "two")]


@pytest.mark.parametrize("write", [as_parquet, as_json_lines])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"score": [None] * 200}, {"score": [0.5] * 200}),  # no type in the first file, numbers in the second
        ({}, {"score": [0.5] * 200}),
        ({"score": [0.5] * 200}, {}),
        ({"score": [1] * 200}, {"score": ["high"] * 200}),
        ({"score": [{"by": 1}] * 200}, {"score": [[1, 2]] * 200}),
    ],
)
def test_other_columns_may_be_what_they_want(tmp_path, write, first, second):
    """Only the wanted column is read, and all of its rows."""
    (tmp_path / "pages").mkdir()
    write(tmp_path / "pages" / "1", first | {"text": TEXTS[0]})
    write(tmp_path / "pages" / "2", {"text": TEXTS[1]} | second)
    folder = prepared(Source(str(tmp_path / "pages")), tmp_path / "out", tokens=10**4, val_fraction=0.01)
    assert documents(folder) == [*TEXTS[0], *TEXTS[1]]


@pytest.mark.parametrize("write", [as_parquet, as_json_lines])
def test_files_that_are_not_read_are_named(tmp_path, write, capsys):
    """The library takes the format of most files, and sets those apart that are called test."""
    (tmp_path / "pages").mkdir()
    for name in ("1", "2"):
        write(tmp_path / "pages" / name, {"text": TEXTS[0]})
    prepared(Source(str(tmp_path / "pages")), tmp_path / "all", tokens=100)
    assert "are not, such as" not in capsys.readouterr().out
    (tmp_path / "pages" / "notes.txt").write_text("a note", encoding="utf-8")
    folder = prepared(Source(str(tmp_path / "pages")), tmp_path / "out", tokens=10**5, val_fraction=0.001)
    assert "notice   2 files of " in (out := capsys.readouterr().out) and "1 are not, such as notes.txt" in out
    assert documents(folder) == [*TEXTS[0], *TEXTS[0]]


@pytest.mark.parametrize("write", [as_parquet, as_json_lines])
def test_a_first_file_without_any_text_settles_nothing(tmp_path, write):
    (tmp_path / "pages").mkdir()
    write(tmp_path / "pages" / "1", {"text": [None] * 200})
    write(tmp_path / "pages" / "2", {"text": TEXTS[1]})
    folder = prepared(Source(str(tmp_path / "pages")), tmp_path / "out", tokens=10**4, val_fraction=0.01)
    assert documents(folder) == TEXTS[1]


@pytest.mark.parametrize("write", [as_parquet, as_json_lines])
def test_a_later_file_without_the_column_is_an_error_and_not_left_out(tmp_path, write):
    (tmp_path / "pages").mkdir()
    write(tmp_path / "pages" / "1", {"text": TEXTS[0]})
    write(tmp_path / "pages" / "2", {"words": TEXTS[1]})
    with pytest.raises((OSError, ValueError), match="pages.* column 'text'"):
        prepared(Source(str(tmp_path / "pages")), tmp_path / "out", tokens=10**4, val_fraction=0.01)


BOOKS = {"b/two.txt": "Zwei.\r\nZeilen.\r\n", "a.txt": "\ufeffOne.\n\nAnd long.\n", "c.txt": "Drei" * 9}


def test_a_folder_of_texts_is_a_document_per_file(tmp_path, capsys):
    """Not a document per line, with the line breaks gone. A break in the middle goes on behind the right file."""
    for name, text in BOOKS.items():
        (tmp_path / "books" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / name).write_bytes(text.encode("utf-8"))
    source = Source(str(tmp_path / "books"))
    folder = prepared(source, tmp_path / "out", tokens=15, val_fraction=0.1)
    first = documents(folder)
    assert len(first) == 2 and "wrote    2 documents of " in capsys.readouterr().out
    prepared(source, folder, tokens=1000)
    assert sorted(documents(folder)) == ["Drei" * 9, "One.\n\nAnd long.\n", "Zwei.\nZeilen.\n"]
    assert documents(folder)[:2] == first
    assert "wrote    1 documents of " in capsys.readouterr().out


@pytest.mark.parametrize("characters", [1, 10**9])
def test_the_size_of_a_batch_changes_no_token(source, whole, tmp_path, monkeypatch, characters):
    monkeypatch.setattr(streaming, "BATCH_CHARACTERS", characters)
    folder = prepared(source, tmp_path / "pages")
    assert np.array_equal(ids_on_disk(folder), ids_on_disk(whole))


def test_documents_are_tokenized_side_by_side(source, tmp_path, monkeypatch):
    pack, together = BPETokenizer.pack, threading.Barrier(2)

    def with_another(self, text):
        together.wait(timeout=20)  # for a second document
        return pack(self, text)

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(BPETokenizer, "pack", with_another)
    monkeypatch.setattr(streaming, "BATCH_CHARACTERS", 10**9)  # one batch
    rows = sum(map(bool, ROWS))
    assert rows % 2 == 0
    prepared(source, tmp_path / "out")


def test_a_data_set_that_ends_early_gives_what_it_has(source, tmp_path, expected, capsys):
    folder = prepared(source, tmp_path / "out", tokens=10**6, val_fraction=1e-4, shard_tokens=1000)
    assert f"ends here, after {len(expected):,} tokens" in "".join(capsys.readouterr())
    assert np.array_equal(ids_on_disk(folder), expected)
    corpus = load_corpus(folder)
    assert len(corpus.train) + len(corpus.val) == len(expected)


def test_size_and_time_are_said_before_anything_is_written(source, tmp_path, monkeypatch, capsys, expected):
    break_at(monkeypatch, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):  # while the first documents are read, which the estimate needs
        prepared(source, tmp_path / "out")
    monkeypatch.undo()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(streaming, "add_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        prepared(source, tmp_path / "out", tokens=10**9)
    out = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert f"source   {source.dataset} (column text)" in out
    assert "1,000,000,000 tokens, 0 of them there" in out and "2,000 MB to write in" in out and "MB are free" in out
    characters_per_token = sum(len(text) for text in ROWS if text) / len(expected)
    said = int(out.partition("about ")[2].partition(" MB")[0].replace(",", ""))
    assert said == pytest.approx(1000 * characters_per_token, rel=0.05)
    assert "time     about " in out and " min, at the pace of the first " in out
    assert "which have 12 to 213 characters" in out


# ---------------------------------------------------------------------------------------------------------------------
# What is read


def test_batches_and_evaluation_cross_the_borders_of_shards(whole):
    corpus = load_corpus(whole)
    one = np.concatenate(corpus.train.shards)
    assert corpus.name == "pages" and len(corpus.train.shards) == 4 and len(one) == len(corpus.train)
    assert np.array_equal(np.concatenate([corpus.val, one]), ids_on_disk(whole))
    streams = [BatchStream(tokens, batch_size=8, block_size=100, seed=3) for tokens in (corpus.train, one)]
    walks = [eval_windows(tokens, block_size=100, batch_size=2) for tokens in (corpus.train, one)]
    for pairs in (zip(*streams, range(20), strict=False), zip(*walks, strict=True)):
        for (x, y), (x_one, y_one), *_ in pairs:
            assert torch.equal(x, x_one) and torch.equal(y, y_one)


def test_shards_stay_on_the_disk(whole):
    corpus = load_corpus(whole)
    for ids in (*corpus.train.shards, corpus.val):
        assert isinstance(ids, np.memmap) and not ids.flags.writeable


def test_digest_stands_for_the_training_shards(whole, source, tmp_path):
    train_ids = load_corpus(whole).train
    again, shorter = prepared(source, tmp_path / "again"), prepared(source, tmp_path / "shorter", tokens=TOKENS - 300)
    assert digest(train_ids) == digest(load_corpus(again).train) != digest(load_corpus(shorter).train)
    train_ids.shards = None
    assert digest(train_ids), "known without reading anything again"


# ---------------------------------------------------------------------------------------------------------------------
# Breaks


@pytest.mark.parametrize("documents", [(4,), (30,), (20, 12, 9), (9, 9, 9, 9)])
def test_what_was_stopped_goes_on_and_no_whole_shard_is_made_again(source, whole, tmp_path, monkeypatch, documents):
    """Also when it is stopped again after it went on."""
    folder, kept = tmp_path / "pages", {}
    for count in documents:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            break_at(patch, count, KeyboardInterrupt())
            prepared(source, folder)
        there = {path.name: path.stat().st_ino for path in folder.glob("*") if path.name != MANIFEST}
        assert kept.items() <= there.items() and all(name.endswith(".bin") for name in there)
        kept = there
    assert (len(kept) > 0) == (documents != (4,))
    if kept:
        with pytest.raises(
            ValueError, match=r"has \S+ of the 1,500 tokens that were asked for: run the `minilooped pre"
        ):
            load_corpus(folder)
    read = break_at(monkeypatch, 10**9, KeyboardInterrupt())
    prepared(source, folder)
    assert kept.items() <= {path.name: path.stat().st_ino for path in folder.glob("*.bin")}.items()
    assert contents(folder) == contents(whole)
    done = sum(shard["file"] in kept for shard in manifest(whole)["shards"])
    documents_left = sum((np.fromfile(whole / s["file"], "<u2") == END).sum() for s in manifest(whole)["shards"][done:])
    assert documents_left <= len(read) < documents_left + 12, "read on from there, up to the end of a batch"


def die_at(document: int, source: Source, folder: Path):
    """The whole life of a child process, which is killed in the middle."""
    pack, calls = BPETokenizer.pack, []

    def deadly(self, text):
        calls.append(text)
        return pack(self, text) if len(calls) < document else os._exit(9)

    BPETokenizer.pack = deadly
    streaming.BATCH_CHARACTERS = 400
    prepared(source, folder)


def test_a_kill_costs_no_more_than_the_shard_at_work(source, whole, tmp_path):
    child = children.Process(target=die_at, args=(30, source, tmp_path / "pages"))
    child.start()
    child.join(120)
    assert child.exitcode == 9
    left = [path.name for path in (tmp_path / "pages").iterdir()]
    assert "train-00001.bin" in left and any(name.startswith(SCRATCH) for name in left)
    prepared(source, tmp_path / "pages")
    assert contents(tmp_path / "pages") == contents(whole)


def test_asking_for_more_adds_shards(source, whole, tmp_path, expected):
    folder = shutil.copytree(whole, tmp_path / "pages")
    before = contents(folder)
    prepared(source, folder, tokens=TOKENS + 200)
    after = contents(folder)
    assert (
        all(after[name] == before[name] for name in before if name.endswith(".bin")) and len(after) == len(before) + 1
    )
    ids = ids_on_disk(folder)
    assert len(ids) >= TOKENS + 200 and np.array_equal(ids, expected[: len(ids)])


def test_what_is_done_is_not_opened_again(source, whole, tmp_path, monkeypatch):
    folder = shutil.copytree(whole, tmp_path / "pages")
    monkeypatch.setattr(streaming, "open_stream", None)
    assert prepared(source, folder) == folder and contents(folder) == contents(whole)


def test_asking_for_more_than_there_is_changes_nothing(source, whole, tmp_path, capsys):
    folder = prepared(source, tmp_path / "pages", tokens=10**4, val_fraction=0.01)
    before = contents(folder)
    capsys.readouterr()
    prepared(source, folder, tokens=2 * 10**4)
    assert "ends here, after 2,2" in "".join(capsys.readouterr())
    assert contents(folder) == before | {MANIFEST: before[MANIFEST] | {"tokens": 2 * 10**4}}
    load_corpus(folder)


def cut_short(path: Path):
    path.write_bytes(path.read_bytes()[:-1])


def change(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (cut_short, r"has \d+ bytes, but \d+ were written"),
        (change, "is not what was written: its sha256 differs"),
        (Path.unlink, "is missing"),
    ],
)
@pytest.mark.parametrize("name", ["train-00004.bin", "train-00002.bin", "val-00000.bin"])
def test_a_damaged_shard_is_noticed_and_made_again(source, whole, tmp_path, capsys, harm, complaint, name):
    folder = shutil.copytree(whole, tmp_path / "pages")
    harm(folder / name)
    with pytest.raises(ValueError, match=f"{name} {complaint}: run the `minilooped prepare` that made it once more"):
        load_corpus(folder)
    prepared(source, folder)
    assert f"{name} " in capsys.readouterr().out
    assert contents(folder) == contents(whole)


def test_a_data_set_that_has_changed_is_not_gone_on_with(source, whole, tmp_path):
    copy = shutil.copytree(source.dataset, tmp_path / "copy")
    folder = prepared(replace(source, dataset=str(copy)), tmp_path / "pages")
    before = contents(folder)
    (copy / "000.parquet").unlink()
    with pytest.raises(ValueError, match="copy is not what it was when the last shard was written.*--out"):
        prepared(replace(source, dataset=str(copy)), folder, tokens=TOKENS + 200)
    assert contents(folder) == before


class Unreliable:
    """A stream that fails at its row 40."""

    def __init__(self, stream, error):
        self.stream, self.state_dict, self.load_state_dict = stream, stream.state_dict, stream.load_state_dict
        self.error = error

    def __iter__(self):
        for number, row in enumerate(self.stream):
            if number == 40:
                raise self.error
            yield row


@pytest.mark.parametrize(
    ("error", "local", "advice"),
    [
        (ConnectionError("connection lost\nby the hub"), False, "the same command goes on from the last shard"),
        (httpx.ReadTimeout("too slow"), False, "the same command goes on from the last shard"),
        (TypeError("Couldn't cast array"), False, "its files cannot be read as they are: choose another part"),
        (TypeError("Couldn't cast array"), True, "see whether every file there is whole and has text in its column"),
        (OSError("Input/output error"), True, "see whether every file there is whole and has text in its column"),
    ],
)
def test_a_failure_to_read_says_what_helps_and_nothing_else(source, whole, tmp_path, monkeypatch, error, local, advice):
    """To try again helps where the network failed. Where types are wrong it never does."""
    open_stream = streaming.open_stream
    with monkeypatch.context() as patch:
        patch.setattr(streaming, "open_stream", lambda s: (Unreliable(open_stream(s)[0], error), s))
        patch.setattr(sources, "way_out", lambda error, s: way_out(error, s if local else Source("on/the-hub")))
        with pytest.raises(OSError, match=rf"reading .* failed \({type(error).__name__}: .*\): {advice}") as caught:
            prepared(source, tmp_path / "pages")
    assert ("the same command" in str(caught.value)) == ("the same command" in advice)
    assert (tmp_path / "pages" / "train-00001.bin").exists() and "\n" not in str(caught.value)
    prepared(source, tmp_path / "pages")
    assert contents(tmp_path / "pages") == contents(whole)


def test_no_memory_is_not_taken_for_a_bad_data_set(source, tmp_path, monkeypatch):
    open_stream = streaming.open_stream
    monkeypatch.setattr(streaming, "open_stream", lambda s: (Unreliable(open_stream(s)[0], MemoryError("none")), s))
    with pytest.raises(MemoryError, match="none"):
        prepared(source, tmp_path / "pages")


class Rows:
    """A stream of the same documents without a library, which would take most of the time."""

    def __init__(self):
        self.row = 0

    def state_dict(self):
        return {"row": self.row}

    def load_state_dict(self, state):
        self.row = state["row"]

    def __iter__(self):
        while self.row < len(ROWS):
            self.row += 1
            yield {"text": ROWS[self.row - 1]}


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("what", ["kill", "error", "full disk"])
def test_whatever_happens_to_the_disk_no_whole_shard_is_lost(source, tmp_path, monkeypatch, what, damage):
    """At every event of the file system, also while a damaged shard and those after it are made again."""
    monkeypatch.setattr(streaming, "open_stream", lambda source: (Rows(), source))
    monkeypatch.setattr(streaming, "BPETokenizer", cache(BPETokenizer))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it is an event, and takes long
    small = dict(tokens=260, shard_tokens=130)
    good = prepared(source, tmp_path / "good", **small)
    assert len(manifest(good)["shards"]) == 3
    damaged = shutil.copytree(good, tmp_path / "damaged")
    change(damaged / "train-00001.bin")
    folder = tmp_path / "pages"

    def begin():
        shutil.rmtree(folder, ignore_errors=True)
        if damage:
            shutil.copytree(damaged, folder)

    begin()
    count = all_events(folder, lambda: prepared(source, folder, **small))
    assert count > 20
    for number in range(count):
        begin()
        with disturbed(folder, number, what) as died:
            prepared(source, folder, **small)
        if died.error is not None and what != "kill":
            assert isinstance(died.error, OSError) and "could not be written" in str(died.error), died.error
        if damage:
            assert "val-00000.bin" in [path.name for path in folder.iterdir()]
        prepared(source, folder, **small)
        assert contents(folder) == contents(good), "the same call goes on"
        assert not [path for path in folder.iterdir() if path.is_dir()], "kills leave nothing behind"


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tokenizer="char"), "'char' is made from the whole text.*use 'gpt2'"),
        (dict(tokenizer="word"), "unknown tokenizer 'word'"),
        (dict(tokens=0), "tokens and shard_tokens have to be 1 or more, not 0 and 300"),
        (dict(shard_tokens=0), "tokens and shard_tokens have to be 1 or more, not 1500 and 0"),
        (dict(val_fraction=0.0), "val_fraction is 0.0, but has to lie between 0 and 1"),
        (dict(val_fraction=1.0), "val_fraction is 1.0"),
        (dict(tokens=10**6), "leaves no tokens to train on .2,... of the 1,000,000 asked for .*smaller val_fraction"),
        (dict(column="page"), "has no column 'page': choose one of id, text"),
        (dict(column="id", dataset="numbers"), "the column 'id' of .*numbers holds int64, not text: choose another"),
    ],
)
def test_what_cannot_work_is_refused_and_leaves_nothing(source, tmp_path, changes, message):
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "part.jsonl").write_text('{"id": 1}\n', encoding="utf-8")
    parts = {name: changes.pop(name) for name in ("column", "dataset") if name in changes}
    if "dataset" in parts:
        parts["dataset"] = str(tmp_path / parts["dataset"])
    with pytest.raises(ValueError, match=message):
        prepared(replace(source, **parts), tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["train-00001.bin", "val-00000.bin", "train-00007.bin"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_shard_of_another_set_is_never_overwritten(source, tmp_path, name, begun):
    folder = tmp_path / "out"
    if begun:  # and a shard is there that shards.json does not name
        prepared(source, folder, tokens=100, val_fraction=0.5)
        content = manifest(folder)
        for number, shard in enumerate(content["shards"]):
            if shard["file"] == name:
                del content["shards"][number:]
                break
        (folder / MANIFEST).write_text(json.dumps(content | {"finished": False}), encoding="utf-8")
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"not ours")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=r"holds \S+.bin, which no shards.json there names: choose another folder"):
        prepared(source, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "train.json", "val.json"])
def test_a_text_of_somebody_is_left_alone(source, tmp_path, name):
    (tmp_path / name).write_bytes(b"not ours")
    with pytest.raises(ValueError, match="holds a prepared text: choose another folder"):
        prepared(source, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_no_stream_of_output_can_end_it(source, whole, tmp_path, monkeypatch):
    """As with ``2>&1 | head``, and on Windows with ``> log.txt``."""
    name = shutil.copytree(source.dataset, tmp_path / "日本")
    reader, writer = os.pipe()
    os.close(reader)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, os.fdopen(writer, "w", encoding="cp1252") as broken:
        for stdout, stderr in ((broken, broken), (io.TextIOWrapper(io.BytesIO(), encoding="cp1252"), None)):
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", stdout)
                patch.setattr(sys, "stderr", stderr)
                folder = prepared(replace(source, dataset=str(name)), tmp_path / f"{stdout is broken}")
            assert np.array_equal(ids_on_disk(folder), ids_on_disk(whole))
        os.dup2(nowhere.fileno(), broken.fileno())  # so that closing it has nothing to complain of


def test_nothing_of_the_users_is_deleted(source, tmp_path):
    (tmp_path / "mine.txt").write_text("kept", encoding="utf-8")
    with pytest.raises(ValueError, match="leaves no tokens to train on"):
        prepared(source, tmp_path, tokens=10**6)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_full_disk_is_noticed_before_it_is_full(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2e6))
    with pytest.raises(OSError, match="the 20 MB do not fit on the disk of .*out: choose another folder"):
        prepared(source, tmp_path / "out", tokens=10**7)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_costs_no_whole_shard(source, tmp_path):
    """A limit to the size of a file stands for it, between those of the first shard and the second."""
    resource, folder = pytest.importorskip("resource"), tmp_path / "pages"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2300, hard))
    try:
        with pytest.raises(OSError, match="train-00001.bin could not be written .*and the same command goes on"):
            prepared(source, folder, shard_tokens=TOKENS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "val-00000.bin"]
    prepared(source, folder, shard_tokens=TOKENS)
    assert contents(folder) == contents(prepared(source, tmp_path / "whole", shard_tokens=TOKENS))


def test_a_folder_keeps_to_one_data_set(source, whole, tmp_path, monkeypatch):
    folder = shutil.copytree(whole, tmp_path / "pages")
    for other, message in (
        (replace(source, dataset="elsewhere"), "prepared with dataset '.*', not 'elsewhere': choose another folder"),
        (replace(source, column="id"), "prepared with column 'text', not 'id'"),
        (replace(source, config="small"), "prepared with config None, not 'small'"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared(other, folder)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: BPETokenizer().encoding)
    with pytest.raises(ValueError, match="prepared with name 'gpt2', not 'r50k_base'"):
        prepared(source, folder, tokenizer="r50k_base")
    assert contents(folder) == contents(whole)


def test_text_and_shards_never_share_a_folder(source, whole, tmp_path):
    (tmp_path / "text.txt").write_text("a text " * 50, encoding="utf-8")
    with pytest.raises(ValueError, match="holds a prepared text: choose another folder"):
        prepared(source, prepare(tmp_path / "text.txt", tmp_path / "text"))
    folder = shutil.copytree(whole, tmp_path / "pages")
    with pytest.raises(ValueError, match="holds a data set in shards: choose another folder"):
        prepare(tmp_path / "text.txt", folder)
    assert contents(folder) == contents(whole)


def test_without_the_library_its_name_is_said(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="streaming needs the datasets library .*: run `pip install datasets`"):
        prepared(source, tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# The hub, which is not reached from here: what is asked of it


def test_a_data_set_of_the_hub_is_pinned_to_its_commit(source, tmp_path, monkeypatch):
    asked, load = [], datasets.load_dataset_builder

    def from_the_hub(name, config, *, revision):
        asked.append((name, config, revision))
        return load(source.dataset)

    class Hub:
        commit = "c0ffee"

        def dataset_info(self, name):
            asked.append(name)
            return SimpleNamespace(sha=self.commit)

    monkeypatch.setattr(datasets, "load_dataset_builder", from_the_hub)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    folder = prepared(FINEWEB_EDU, tmp_path / "out", tokens=800)
    assert manifest(folder)["source"]["revision"] == "c0ffee"
    Hub.commit = "decaf"
    prepared(FINEWEB_EDU, folder)
    call = ("HuggingFaceFW/fineweb-edu", "sample-10BT", "c0ffee")
    assert asked == ["HuggingFaceFW/fineweb-edu", call, call], "the commit that it began with"
    assert manifest(folder)["source"]["revision"] == "c0ffee"


def test_lines_of_a_text_on_the_hub_are_documents_and_that_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("A line of it.\nAnother line.\n" * 9, encoding="utf-8")
    load = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: load(str(tmp_path / "texts")))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, name: SimpleNamespace(sha="c0ffee"))
    folder = prepared(Source("somebody/texts"), tmp_path / "out", tokens=40)
    assert "notice   somebody/texts is of text files: each line is taken for a document" in capsys.readouterr().out
    assert BPETokenizer().decode(ids_on_disk(folder)).startswith("A line of it.<|endoftext|>Another line.<|endof")


def test_a_hub_out_of_reach_is_one_line(tmp_path, monkeypatch):
    class Hub:
        def dataset_info(self, name):
            raise RuntimeError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    with pytest.raises(
        OSError, match=r"'a/b' cannot be opened \(RuntimeError: no network at all\): check name, config and"
    ) as e:
        prepared(Source("a/b"), tmp_path / "out")
    assert "\n" not in str(e.value) and not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# The command line, and training


def test_prepare_from_the_shell(source, tmp_path, monkeypatch, capsys, expected):
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "--hf-dataset", source.dataset, "--tokens", "1.5e3", "--val-fraction", "0.1"]) == 0
    folder = Path("prepared") / Path(source.dataset).name
    assert f"minilooped train --data {folder}" in capsys.readouterr().out
    assert [shard["tokens"] // 100 for shard in manifest(folder)["shards"]] == [1, 13]
    ids = ids_on_disk(folder)
    assert len(ids) >= 1500 and np.array_equal(ids, expected[: len(ids)])


def test_fineweb_edu_by_its_short_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []

    def preparing(*args, **options):
        asked.append((args, options))
        return Path("out")

    monkeypatch.setattr(streaming, "prepare_stream", preparing)
    assert main(["prepare", "fineweb-edu", "--tokens", "1e9"]) == 0
    assert main("prepare fineweb-edu --tokens 2e10 --config sample-100BT --out here".split()) == 0
    assert main("prepare --hf-dataset a/b --column page --tokens 5 --tokenizer r50k_base".split()) == 0
    larger = replace(FINEWEB_EDU, config="sample-100BT")
    assert asked == [
        ((FINEWEB_EDU, 10**9, None), {}),
        ((larger, 2 * 10**10, Path("here")), {}),
        ((Source("a/b", column="page"), 5, None), {"tokenizer": "r50k_base"}),
    ]
    assert FINEWEB_EDU == Source("HuggingFaceFW/fineweb-edu", "sample-10BT", "text")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("prepare", "name one thing to prepare: a text file, fineweb-edu, or a data set with --hf-dataset NAME"),
        ("prepare fineweb-edu --hf-dataset a/b --tokens 5", "name one thing to prepare"),
        ("prepare fineweb-edu", "say how many tokens to take of the data set, as in --tokens 1e9"),
        ("prepare fineweb-edu --tokens inf", "say how many tokens"),
        ("prepare fineweb-edu --tokens nan", "say how many tokens"),
        ("prepare fineweb-edu --tokens -1", "tokens and shard_tokens have to be 1 or more"),
        ("prepare text.txt --tokens 1e9", "--tokens is for data sets, and text.txt is taken for a text file"),
        ("prepare text.txt --column page", "--column is for data sets"),
        ("prepare HuggingFaceFW/fineweb-edu", "or name a data set with --hf-dataset"),
    ],
)
def test_what_prepare_cannot_do_is_one_line(tmp_path, monkeypatch, capsys, argv, line):
    monkeypatch.chdir(tmp_path)
    assert main(argv.split()) == 1
    err = capsys.readouterr().err
    assert err.startswith("minilooped prepare: ") and line in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_on_shards_resumes_bit_for_bit_and_only_on_the_same_shards(source, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "pages")
    config = settings(tmp_path, data=str(folder), max_steps=6, save_every=3)
    straight = train(DENSE, config)
    copy = cut_back(straight.run, 3, tmp_path / "runs" / "copy")
    resumed = train(DENSE, replace(config, name="copy"), resume=True)
    assert fingerprint(copy) == fingerprint(straight.run) and resumed.val_loss == straight.val_loss

    longer = prepared(source, shutil.copytree(whole, tmp_path / "longer"), tokens=TOKENS + 200)
    other = folder / "train-00002.bin"
    change(other)
    edited = manifest(folder)
    edited["shards"][2]["sha256"] = hashlib.sha256(other.read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(edited), encoding="utf-8")
    with pytest.raises(ValueError, match="was trained on other tokens than"):
        train(DENSE, replace(config, max_steps=9), resume=True)
    shutil.rmtree(folder)
    longer.rename(folder)
    with pytest.raises(ValueError, match=r"was trained on \d+ tokens, .* now has \d+"):
        train(DENSE, replace(config, max_steps=9), resume=True)
