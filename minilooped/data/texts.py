"""Text files into token files: what ``minilooped prepare FILE`` and ``minilooped prepare FOLDER`` do.

The text is read whole, and takes a small multiple of its size in memory. streaming.py is for data that is too large.
"""

import csv
import json
import re
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from ..files import say
from .sources import TABLES
from .storage import write_splits
from .tokenizers import Tokenizer, make_tokenizer, storage_dtype

BETWEEN = "\n\n"  # two documents, where the tokenizer has no id that ends one


def prepare(
    source: str | Path, out_dir: str | Path | None = None, tokenizer: str = "char", val_fraction: float = 0.1
) -> Path:
    """Tokenize a UTF-8 text file, or a folder of them, for :func:`.load_corpus`. Returns the folder with the tokens.

    In a folder, also in those below it, every ``.txt`` file is a document, in the order of their names. Between two
    documents stands the tokenizer's end token, or a blank line if it has none. The last `val_fraction` of the
    characters is for validation. A byte-order mark is dropped, and Windows line ends become ``\\n``.

    `out_dir` None is ``prepared/NAME`` in the working directory, for ``NAME.txt`` or a folder ``NAME``. Other data that
    lies there is left alone: ``ValueError``. Text that is not UTF-8 or too short is a ``ValueError`` too, and a disk
    that is full an ``OSError``. After a break, the same call finishes what is missing.
    """
    source = Path(source)
    texts = read_texts(source)
    name = source.stem if source.is_file() else source.resolve().name
    folder = Path("prepared") / name if out_dir is None else Path(out_dir)
    train, val, used = tokenize_splits(texts, tokenizer, val_fraction, name=str(source))
    say(f"text     {describe(texts, used)}")
    say(f"tokens   {len(train):,} to train on, {len(val):,} to validate on")
    if not write_splits(folder, {"train": train, "val": val}, used):
        say(f"notice   {folder} has just these tokens already: nothing was written")
    return folder


def describe(texts: Sequence[str], tokenizer: Tokenizer) -> str:
    """How many documents there are, of what length, and what stands between them."""
    sizes = [len(text) for text in texts]
    if len(texts) == 1:
        return f"1 document of {sizes[0]:,} characters"
    between = "a blank line" if tokenizer.end is None else f"the end token {tokenizer.decode([tokenizer.end])}"
    lengths = f"{min(sizes):,} to {max(sizes):,} characters, {sum(sizes):,} in all"
    return f"{len(texts):,} documents of {lengths}; between two of them: {between}"


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def read_texts(source: Path) -> list[str]:
    """The text of a file, or of every ``.txt`` file in a folder that has any. A notice if one looks like a table."""
    if not source.is_dir():
        files = [source]
    elif not (files := sorted(path for path in source.rglob("*.txt") if path.is_file())):
        tables = any(path.suffix.lower() in TABLES for path in source.iterdir())
        advice = f"use --hf-dataset {source} for its tables" if tables else "give a text file, or a folder with some"
        raise ValueError(f"{source} is a folder without text files (.txt): {advice}")
    texts, noticed = [], False
    for file in files:
        text = read_text(file)
        if text or not source.is_dir():
            texts.append(text)
        if not noticed and (notice := notice_of_table(file, text)):
            say(f"notice   {notice}")
            noticed = True
    if not texts:
        raise ValueError(f"all text files in {source} are empty: give one with text")
    return texts


def read_text(file: Path) -> str:
    """The text of a UTF-8 file, without a byte-order mark, its line ends ``\\n``."""
    if not file.is_file():
        raise FileNotFoundError(
            f"no text file at {file}: give the path of a UTF-8 text file or of a folder with some, or name a data set "
            "with --hf-dataset"
        )
    content = file.read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file} is not UTF-8 text: byte 0x{content[error.start]:02x} at offset {error.start} (line {line}) "
            "does not fit; save the file as UTF-8"
        ) from error


def notice_of_table(file: Path, text: str) -> str | None:
    """A line for a file whose syntax would be learned with its text, with the command that takes the text alone."""
    kind, columns = json_lines(text) or csv_table(text) or (TABLES.get(file.suffix.lower()), [])
    if kind is None:
        return None
    column = "text" if "text" in columns or not columns else "COLUMN"
    choice = "" if column == "text" else f", where COLUMN is one of {', '.join(map(repr, columns[:10]))}"
    named = file if file.suffix.lower() in TABLES else file.with_suffix(".jsonl" if kind == "JSON lines" else ".csv")
    rename = "" if named == file else f"rename it to {named.name}, and "
    # There are hardly more tokens than characters, and about a quarter as many in English. The command ends with them.
    options = f"--column {column} --tokens {len(text):.0e} --val-fraction 0.02"
    return (
        f"{file} looks like {kind}, and its syntax will be learned like any text. To learn one column of it instead, "
        f"{rename}use `minilooped prepare --hf-dataset {shlex.quote(str(named))} {options}`{choice}"
    )


def json_lines(text: str) -> tuple[str, list[str]] | None:
    """The kind and the columns of a text whose first lines are JSON objects."""
    if not text[:100].lstrip().startswith("{"):
        return None
    lines = [match.group() for match in islice(re.finditer(r"\S.*", text), 20)]
    try:
        rows = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return None
    return ("JSON lines", list(rows[0])) if all(isinstance(row, dict) for row in rows) else None


def csv_table(text: str) -> tuple[str, list[str]] | None:
    """The kind and the columns of a text that starts with a table: rows of one width, and names above them.

    Prose has a space after its commas, and not as many of them in every line.
    """
    head = text[: 2**16]
    for delimiter in ",;\t":
        try:
            rows = [row for row in csv.reader(head.splitlines(True), delimiter=delimiter, strict=True) if row]
        except csv.Error:
            continue
        rows = rows[:-1] if len(head) < len(text) else rows  # the last row may be cut
        columns = rows[0] if rows else []
        of_one_width = len(columns) > 1 and len(rows) > 2 and all(len(row) == len(columns) for row in rows)
        tidy = all(columns) and len(set(columns)) == len(columns)
        if of_one_width and tidy and not any(cell.startswith(" ") for row in rows for cell in row):
            return "a table (CSV)", columns
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizing


def tokenize_splits(
    texts: Sequence[str], tokenizer_name: str, val_fraction: float, name: str = "the text"
) -> tuple[np.ndarray, np.ndarray, Tokenizer]:
    """Ids to train on and to validate on, shape (T,) each, in their storage type, and the tokenizer that made them.

    The text is cut before it is tokenized, so that every tokenizer is judged on the same characters.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}, but has to lie between 0 and 1, both left out")
    characters = set(BETWEEN if len(texts) > 1 else "").union(*texts)
    tokenizer = make_tokenizer(tokenizer_name, "".join(characters))
    total = sum(map(len, texts))
    parts = _cut(texts, total - round(val_fraction * total))
    train, val = (_join(part, tokenizer) for part in parts)
    for split, ids in (("training", train), ("validation", val)):
        if len(ids) < 2:  # one to read, one to predict
            raise ValueError(
                f"{name} leaves {len(ids)} tokens for the {split} split, which needs 2 or more: "
                f"use a longer text or another val_fraction (now {val_fraction})"
            )
    return train, val, tokenizer


def _cut(texts: Sequence[str], at: int) -> tuple[list[str], list[str]]:
    """The first `at` characters of some texts, and the others."""
    first, others = [], []
    for text in texts:
        if at > 0:
            first.append(text[:at])
        if len(text) > at:
            others.append(text[max(at, 0) :])
        at -= len(text)
    return first, others


def _join(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """The ids of documents, shape (T,), with what stands between two of them."""
    dtype, end = storage_dtype(tokenizer.vocab_size), tokenizer.end
    pieces: list[np.ndarray] = []
    for text in texts:
        if pieces:
            pieces.append(tokenizer.pack(BETWEEN) if end is None else np.array([end], dtype))
        pieces.append(tokenizer.pack(text))
    return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, dtype), *pieces])
