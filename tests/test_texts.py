"""Text files into token files: every character in order, a document per file, other data safe, and little memory."""

import io
import json
import os
import shlex
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from disk_events import all_events, disturbed

from minilooped.cli import main
from minilooped.data import BatchStream, embedded, eval_windows, load_corpus, prepare
from minilooped.data.texts import csv_table, json_lines, notice_of_table

END = 50256

# ---------------------------------------------------------------------------------------------------------------------
# A file


@pytest.mark.parametrize("name", ["char", "gpt2"])
def test_prepare_and_load(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    book = tmp_path / "my book.txt"
    book.write_bytes("\ufeffEin Käse,\r\nzwei Käse.\r\n".encode() * 20)
    folder = prepare(book, tokenizer=name, val_fraction=0.25)
    assert folder == Path("prepared/my book")
    corpus = load_corpus(folder)
    text = ("\ufeffEin Käse,\nzwei Käse.\n" * 20).removeprefix("\ufeff")
    assert corpus.name == "my book" and corpus.tokenizer.name == name
    assert corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(corpus.val) == text
    assert len(corpus.tokenizer.decode(corpus.val)) == round(0.25 * len(text))


def test_a_text_of_forty_bytes(tmp_path):
    book = tmp_path / "short.txt"
    book.write_text("To be, or not to be, that is a question.", encoding="utf-8")
    assert book.stat().st_size == 40
    corpus = load_corpus(prepare(book, tmp_path / "out"))
    assert (len(corpus.train), len(corpus.val)) == (36, 4)
    x, y = next(BatchStream(corpus.train, batch_size=2, block_size=8, seed=0))
    assert x.shape == y.shape == (2, 8)
    assert sum(y.numel() for _, y in eval_windows(corpus.val, block_size=8, batch_size=2)) == 3
    with pytest.raises(ValueError, match="block_size . 1 = 65 tokens, but the text has 36: use a smaller block_size"):
        BatchStream(corpus.train, batch_size=2, block_size=64, seed=0)
    with pytest.raises(ValueError, match="short.txt leaves 1 tokens for the validation split.*val_fraction .now 0.02"):
        prepare(book, tmp_path / "out", val_fraction=0.02)


def test_prepare_errors(tmp_path):
    book = tmp_path / "book.txt"
    with pytest.raises(FileNotFoundError, match="no text file at .*book.txt: give the path"):
        prepare(book)
    book.write_bytes("première\nligne\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"book.txt is not UTF-8 text: byte 0xe8 at offset 5 \(line 1\).*save the"):
        prepare(book)
    book.write_bytes(b"one\ntwo\nthr\xff")
    with pytest.raises(ValueError, match=r"byte 0xff at offset 11 \(line 3\)"):
        prepare(book)
    book.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="book.txt leaves 0 tokens for the training split"):
        prepare(book)
    for fraction in (-0.1, 0, 1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="val_fraction is .*between 0 and 1"):
            prepare(book, val_fraction=fraction)
    with pytest.raises(ValueError, match="unknown tokenizer"):
        prepare(book, tokenizer="word")
    assert [file.name for file in tmp_path.iterdir()] == ["book.txt"]


def test_length_and_split_are_said(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("abc" * 400, encoding="utf-8")
    prepare(tmp_path / "book.txt", tmp_path / "out")
    out = capsys.readouterr().out
    assert "1 document of 1,200 characters" in out and "1,080 to train on, 120 to validate on" in out


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
@pytest.mark.parametrize("kind", ["ascii", "japanese"])
def test_a_text_is_prepared_and_loaded_in_a_few_times_its_size(tmp_path, tokenizer, kind):
    """Once it took 21 times the text."""
    play = embedded("shakespeare.txt").read_text(encoding="utf-8")
    text = play * 4 if kind == "ascii" else "".join(chr(0x4E00 + ord(c)) for c in play)
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    size = (tmp_path / "book.txt").stat().st_size  # 4.8 and 3.6 MB
    prepare(tmp_path / "book.txt", tmp_path / "first", tokenizer)  # what is built once
    tracemalloc.start()
    folder = prepare(tmp_path / "book.txt", tmp_path / "out", tokenizer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    load_corpus(folder)
    _, peak_of_loading = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    constant = 2e6 if tokenizer == "char" else 20e6  # what it encodes at a time; the tables of GPT-2's tokenizer
    assert peak < 5 * size + constant and peak_of_loading < size + constant


# ---------------------------------------------------------------------------------------------------------------------
# A folder of texts

BOOKS = {"b/two.txt": "Zwei.\r\n", "a.txt": "\ufeffOne, and long.\n", "empty.txt": "", "c.txt": "Drei" * 9}
IN_ORDER = ["One, and long.\n", "Zwei.\n", "Drei" * 9]


@pytest.fixture
def books(tmp_path) -> Path:
    for name, text in BOOKS.items():
        (tmp_path / "books" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / name).write_bytes(text.encode("utf-8"))
    (tmp_path / "books" / "picture.png").write_bytes(b"\x89PNG")
    return tmp_path / "books"


def test_every_file_of_a_folder_is_a_document(books, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = prepare(books, tokenizer="gpt2")
    assert folder == Path("prepared/books")
    corpus = load_corpus(folder)
    tokenizer = corpus.tokenizer
    ids = np.concatenate([corpus.train, corpus.val])
    assert (ids == END).sum() == 2, "between two documents"
    assert tokenizer.decode(ids) == "<|endoftext|>".join(IN_ORDER)
    assert tokenizer.decode(corpus.val) == ("Drei" * 9)[-round(0.1 * sum(map(len, IN_ORDER))) :]
    out = capsys.readouterr().out
    assert "3 documents of 6 to 36 characters, 57 in all; between two of them: the end token <|endoftext|>" in out


def test_a_tokenizer_without_an_end_token_puts_a_blank_line_between(books, tmp_path, capsys):
    corpus = load_corpus(prepare(books, tmp_path / "out", "char", val_fraction=0.2))
    text = corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(corpus.val)
    assert text == "\n\n".join(IN_ORDER) and corpus.tokenizer.end is None
    assert "between two of them: a blank line" in capsys.readouterr().out


@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
@pytest.mark.parametrize("share", [0.1, 0.37, 0.5, 0.64, 0.75, 0.9])
def test_documents_are_cut_by_characters_wherever_the_cut_falls(books, tmp_path, tokenizer, share):
    """In a document or between two: then nothing stands between the splits."""
    corpus = load_corpus(prepare(books, tmp_path / "out", tokenizer, val_fraction=share))
    between = "\n\n" if tokenizer == "char" else "<|endoftext|>"
    train, val = (corpus.tokenizer.decode(ids) for ids in (corpus.train, corpus.val))
    whole = "".join(IN_ORDER)
    cut = len(whole) - round(share * len(whole))
    parts, ends = ([], []), np.cumsum([0, *map(len, IN_ORDER)])
    for first, last in zip(ends, ends[1:], strict=False):
        for part, low, high in ((parts[0], 0, cut), (parts[1], cut, len(whole))):
            if piece := whole[max(first, low) : min(last, high)]:
                part.append(piece)
    assert (train, val) == (between.join(parts[0]), between.join(parts[1]))


def test_a_folder_that_cannot_be_prepared_is_refused_by_name(books, tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "part.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="tables is a folder without text files .*: use --hf-dataset .*tables for its"):
        prepare(tmp_path / "tables")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="nothing is a folder without text files .*: give a text file, or a folder"):
        prepare(tmp_path / "nothing")
    (tmp_path / "nothing" / "a.txt").touch()
    with pytest.raises(ValueError, match="all text files in .*nothing are empty"):
        prepare(tmp_path / "nothing")
    (books / "c.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="c.txt is not UTF-8 text"):
        prepare(books, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Onto what is there


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_same_text_again_is_there_already(books, tmp_path, capsys):
    folder = prepare(books, tmp_path / "out", "gpt2")
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    capsys.readouterr()
    prepare(books, tmp_path / "out", "gpt2")
    assert "out has just these tokens already: nothing was written" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times


def test_another_text_is_refused_and_the_old_one_stays(books, tmp_path):
    folder = prepare(books, tmp_path / "out")
    before = contents(folder)
    with (books / "a.txt").open("a", encoding="utf-8") as file:
        file.write("And more.")
    changes = [dict(), dict(tokenizer="gpt2"), dict(val_fraction=0.5)]
    for change in changes:
        with pytest.raises(ValueError, match=r"out holds other data .*: choose another folder \(--out\), or delete"):
            prepare(books, folder, **change)
        assert contents(folder) == before


@pytest.mark.parametrize("what", ["kill", "error", "full disk"])
def test_old_or_new_and_never_a_mix_whatever_happens(tmp_path, what):
    """The old text is deleted as the message says; then the new one is prepared, and disturbed at every event."""
    old, new, out = tmp_path / "old.txt", tmp_path / "new.txt", tmp_path / "out"
    old.write_text("abc" * 30, encoding="utf-8")
    new.write_text("cba" * 30, encoding="utf-8")  # the same characters, and as many
    whole = contents(prepare(new, tmp_path / "whole"))
    count = all_events(out, lambda: prepare(new, out))
    assert count > 20
    seen = set()
    for number in range(count):
        for path in sorted(out.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        with disturbed(out, number, what):
            prepare(new, out)
        if not out.exists() or not (left := contents(out)):
            continue
        with pytest.raises(ValueError, match="holds other data"):
            prepare(old, out)
        assert contents(out) == left, "what is there of the one is not mixed with the other"
        try:
            load_corpus(out)
        except (FileNotFoundError, ValueError):
            seen.add("refused")
            prepare(new, out)
        else:
            seen.add("whole")
        assert contents(out) == whole
    assert "refused" in seen


def test_a_disk_that_is_full_leaves_what_is_there_and_can_be_finished(books, tmp_path):
    """A limit to the size of a file stands for it, from one that takes the headers alone to one that takes all."""
    resource = pytest.importorskip("resource")
    (books / "c.txt").write_text("Drei" * 999, encoding="utf-8")
    old = contents(prepare(books, tmp_path / "old"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 100, 1000, 5000):
        out = tmp_path / str(size)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            for folder in (out, tmp_path / "old"):
                with disturbed(tmp_path, 10**9, "error") as told:
                    prepare(books, folder)
                if folder == out:
                    assert "could not be written (File too large)" in str(told.error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert contents(tmp_path / "old") == old
        with pytest.raises((FileNotFoundError, ValueError)):
            load_corpus(out)
        prepare(books, out)
        assert contents(out) == old


# ---------------------------------------------------------------------------------------------------------------------
# Tables given as texts

CHATS = "".join(json.dumps({"id": i, "text": f"Chat {i}:\nhow are you? " * 5}) + "\n" for i in range(60))
CSV = "id,text\n" + "".join(f'{i},"Chat {i}:\nhow are you, {i}? Well."\n' for i in range(60))


@pytest.mark.parametrize(("name", "content"), [("chats.jsonl", CHATS), ("chats.csv", CSV), ("chats.txt", CHATS)])
def test_a_table_gets_one_notice_with_a_command_that_works(tmp_path, monkeypatch, capsys, name, content):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content, encoding="utf-8")
    assert main(["prepare", name]) == 0
    out = capsys.readouterr().out
    assert load_corpus("prepared/chats").tokenizer.decode(load_corpus("prepared/chats").val) in content, "it goes on"
    (notice,) = [line for line in out.splitlines() if line.startswith("notice")]
    assert f"{name} looks like " in notice and "its syntax will be learned" in notice
    if "rename it to chats.jsonl, and use" in notice:
        Path(name).rename("chats.jsonl")
    command = shlex.split(notice.partition("`minilooped ")[2].partition("`")[0])
    assert main([*command, "--out", "chats"]) == 0
    out = capsys.readouterr().out
    assert "documents of" in out and "notice   chats" in out
    corpus = load_corpus("chats")
    text = corpus.tokenizer.decode(np.concatenate([corpus.val, *corpus.train.shards]))
    documents = text.removesuffix("<|endoftext|>").split("<|endoftext|>")
    assert len(documents) == 60 and all(document.startswith(f"Chat {i}:\nhow") for i, document in enumerate(documents))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{not json}\n{nor this}\n",
        "[1, 2]\n[3, 4]\n",
        "Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you.\n",
        "One, two,\nbuckle my shoe;\nthree, four,\nknock at the door;\nfive, six,\npick up sticks;\n",
        "a,b\n",
        "First Citizen:\nBefore we proceed, hear me.\n\nAll:\nSpeak, speak.\n" * 20,
        "def f(a,b):\n    return a,b\n" * 20,
    ],
)
def test_prose_and_code_are_no_tables(tmp_path, text):
    assert notice_of_table(tmp_path / "text.txt", text) is None


def test_the_embedded_text_is_no_table():
    assert notice_of_table(embedded("shakespeare.txt"), embedded("shakespeare.txt").read_text(encoding="utf-8")) is None


def test_columns_are_found():
    assert json_lines(CHATS) == ("JSON lines", ["id", "text"])
    assert csv_table(CSV)[1] == csv_table(CSV * 999)[1] == ["id", "text"]
    assert csv_table("a;b;c\n1;2;3\n4;5;6\n")[1] == ["a", "b", "c"]
    notice = notice_of_table(Path("x.tsv"), "who\twhat\nI\tam\nyou\tare\n")
    assert "--column COLUMN" in notice and notice.endswith("where COLUMN is one of 'who', 'what'")
    assert "looks like JSON," in notice_of_table(Path("x.json"), '[\n {"text": 1}]')


# ---------------------------------------------------------------------------------------------------------------------
# What is printed


def test_no_stream_of_output_can_end_it(tmp_path, monkeypatch):
    """As on Windows with ``> log.txt``, and after ``| head``."""
    monkeypatch.chdir(tmp_path)
    Path("日本.txt").write_text("日本語" * 40, encoding="utf-8")
    Path("日本").mkdir()
    Path("日本/本.txt").write_text('{"日": "本"}\n' * 40, encoding="utf-8")
    for source in ("日本.txt", "日本"):
        windows = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
        monkeypatch.setattr(sys, "stdout", windows)
        assert main(["prepare", source, "--out", f"{source}-out"]) == 0
        windows.flush()
        assert "120 characters" in windows.buffer.getvalue().decode("cp1252") or source == "日本"
        load_corpus(f"{source}-out")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        prepare("日本.txt", "broken")
        monkeypatch.undo()
        load_corpus(tmp_path / "broken")
        with open(os.devnull, "w", encoding="utf-8") as nowhere:  # so that closing it has nothing to complain of
            os.dup2(nowhere.fileno(), broken.fileno())
