"""Token files: how ids lie on the disk, and how they are read back.

A text is four files: train.bin and val.bin hold ids and nothing else, train.json and val.json say how to read them and
have the sha256 of what is in them. A data set that does not fit in memory is a folder of shards with one header,
shards.json. streaming.py writes such a folder and describes what is in it.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ..files import Need, at_least, clear_scratch, make_folder, one_of, read_json, replacing, write_atomically
from .tokenizers import SPEC, Tokenizer, check_ids, storage_dtype, tokenizer_from_spec

FORMAT = 1

MANIFEST = "shards.json"


def prepared_files(folder: Path) -> list[str]:
    """The names of the files in a folder that belong to prepared data; none if the folder holds no such data."""
    if os.path.lexists(folder / MANIFEST):
        return [MANIFEST, *(path.name for path in folder.glob("*-*.bin"))]
    names = ("train.bin", "train.json", "val.bin", "val.json")
    return [name for name in names if os.path.lexists(folder / name)]


# ----------------------------------------------------------------------------------------------------------------------
# A text

HEADER: dict[str, Need] = {
    "format": one_of(FORMAT),
    "dtype": str,
    "count": at_least(1),
    "vocab_size": at_least(1),
    "tokenizer": SPEC,
    "sha256": str | None,  # older versions wrote none
}
AGAIN = "make it again with `minilooped prepare FILE`"


class TokenFile(np.memmap):
    """Ids that stay on the disk, shape (T,), read-only, with the sha256 of all of them where it is known.

    A part of it, or what is computed from it, has none.
    """

    sha256: str | None = None


def write_splits(folder: Path, splits: dict[str, np.ndarray], tokenizer: Tokenizer) -> bool:
    """Write ids, shape (T,) each, as the text of a folder. Returns False if just this text is there already.

    `splits` has a ``"train"`` and a ``"val"``. What an interrupted call left is finished. ``ValueError`` if the folder
    holds other data, which stays as it is. ``OSError`` if the disk is full.
    """
    headers = {folder / f"{name}.bin": _header(ids, tokenizer) for name, ids in splits.items()}
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder} holds a data set in shards: choose another folder (--out), or delete that one")
    clear_scratch(folder)
    missing = [path for path, header in headers.items() if not _is_there(path, header)]
    for path, ids in zip(headers, splits.values(), strict=True):
        if path in missing:
            _write(path, ids, headers[path])
    return bool(missing)


def write_tokens(path: str | Path, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """Write ids, shape (T,), to `path` (``NAME.bin``) and their header to ``NAME.json``.

    ``ValueError`` for ids that the tokenizer does not have, and if the files are there and hold others. ``OSError`` if
    the disk is full.
    """
    path, header = Path(path), _header(ids, tokenizer)
    if not _is_there(path, header):
        _write(path, ids, header)


def _header(ids: np.ndarray, tokenizer: Tokenizer) -> dict[str, Any]:
    if len(ids) == 0:
        raise ValueError("there are no tokens to write: the split is empty")
    check_ids(ids, tokenizer.vocab_size)
    dtype = storage_dtype(tokenizer.vocab_size)
    return {
        "format": FORMAT,
        "dtype": dtype,
        "count": len(ids),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.spec(),
        "sha256": _sha256(ids.astype(dtype, copy=False)),
    }


def _write(path: Path, ids: np.ndarray, header: dict[str, Any]) -> None:
    """Write the header first: whenever there are ids of ours, a header beside them then says which."""
    kept = "what is there is whole, and the same command finishes it"
    make_folder(path.parent)
    write_atomically(path.with_suffix(".json"), json.dumps(header, indent=1), kept)
    with replacing(path, kept) as temporary:
        temporary.write_bytes(np.ascontiguousarray(ids, header["dtype"]).data)


def _is_there(path: Path, header: dict[str, Any]) -> bool:
    """Whether ids are there already, with their header, and whole. ``ValueError`` if anything else is there."""
    head = path.with_suffix(".json")
    files = [file.name for file in (path, head) if os.path.lexists(file)]
    if not files:
        return False
    try:
        old, tokenizer = _read_header(head)
    except (FileNotFoundError, ValueError):
        other = f"{head.name} is not one of ours" if head.name in files else f"{path.name} has no header of ours"
    else:
        content = _sha256_of_file(path) if path.is_file() else None
        recorded = old.get("sha256") or content or header["sha256"]
        if tokenizer.hash != header["tokenizer"]["hash"]:
            other = f"made with another tokenizer, {tokenizer.name!r} of {tokenizer.vocab_size} tokens"
        elif old["count"] != header["count"]:
            other = f"{old['count']:,} tokens in {path.name}, not {header['count']:,}"
        elif recorded != header["sha256"]:
            other = f"other tokens in {path.name}"
        else:
            return content == header["sha256"]
    files = list(dict.fromkeys([*files, *prepared_files(path.parent)]))
    raise ValueError(
        f"{path.parent} holds other data ({other}): choose another folder (--out), or delete {', '.join(files)} there"
    )


def _read_header(path: Path) -> tuple[dict[str, Any], Tokenizer]:
    """A header and its tokenizer. ``FileNotFoundError`` or ``ValueError`` if it is missing or not what we write."""
    header = read_json(path, HEADER, AGAIN)
    try:
        tokenizer = tokenizer_from_spec(header["tokenizer"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {AGAIN}") from error
    for field, right in (("vocab_size", tokenizer.vocab_size), ("dtype", storage_dtype(tokenizer.vocab_size))):
        if header[field] != right:
            raise ValueError(f"{path}: {field} is {header[field]!r}, but its tokenizer needs {right!r}: {AGAIN}")
    return header, tokenizer


def read_tokens(path: str | Path) -> tuple[TokenFile, Tokenizer]:
    """Open what :func:`write_tokens` wrote: ids, shape (T,), and their tokenizer. Every byte is read once.

    ``FileNotFoundError`` or ``ValueError`` if a file is missing, cut short, changed, or not what its header says.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {AGAIN}")
    header, tokenizer = _read_header(path.with_suffix(".json"))
    dtype, count, size = np.dtype(header["dtype"]), header["count"], path.stat().st_size
    if size != count * dtype.itemsize:
        raise ValueError(f"{path} has {size} bytes, but {count} tokens of {dtype.itemsize} were written: {AGAIN}")
    ids = np.memmap(path, dtype=dtype, mode="r").view(TokenFile)
    try:
        check_ids(ids, tokenizer.vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {AGAIN}") from error
    if header.get("sha256") not in (None, _sha256(ids)):
        raise ValueError(f"{path} is not what was written: its sha256 differs: {AGAIN}")
    ids.sha256 = header.get("sha256")
    return ids, tokenizer


def read_splits(folder: Path) -> tuple[TokenFile, TokenFile, Tokenizer]:
    """Open the text of a folder: ids to train on, ids to validate on, shape (T,) each, and their tokenizer.

    Raises what :func:`read_tokens` does, and ``ValueError`` if the two have different tokenizers.
    """
    (train, own), (val, own_of_val) = (read_tokens(folder / f"{split}.bin") for split in ("train", "val"))
    if own.hash != own_of_val.hash:
        raise ValueError(f"{folder}: train.bin and val.bin differ in tokenizer: {AGAIN}")
    return train, val, own


# ----------------------------------------------------------------------------------------------------------------------
# A data set in shards

REDO = "run the `minilooped prepare` that made it once more: it redoes what is damaged and goes on"
ELSEWHERE = "prepare the data again, in another folder"
MANIFEST_FIELDS: dict[str, Need] = {
    "format": one_of(FORMAT),
    "source": {"dataset": str, "config": str | None, "column": str, "revision": str | None},
    "tokenizer": SPEC,
    "dtype": str,
    "tokens": at_least(1),
    "finished": bool,
    "shards": [{"file": str, "tokens": at_least(1), "sha256": str, "last": {"state": dict, "sha256": str}}],
}


class ShardedTokens:
    """Several arrays of token ids, in order, as one sequence of shape (T,). It takes slices of step 1.

    `sha256` stands for the content.
    """

    def __init__(self, shards: Sequence[np.ndarray], sha256: str) -> None:
        self.shards, self.sha256 = shards, sha256
        self.dtype = shards[0].dtype
        self.ends = list(accumulate(map(len, shards)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of step {step}: tokens in shards are read in steps of 1")
        number = min(bisect_right(self.ends, start), len(self.shards) - 1)
        parts = []
        while True:
            shard, end = self.shards[number], self.ends[number]
            first = end - len(shard)  # the position of the shard's first token in the sequence
            parts.append(shard[max(start - first, 0) : max(stop - first, 0)])
            number += 1
            if stop <= end:
                return parts[0] if len(parts) == 1 else np.concatenate(parts)


def shard_name(number: int) -> str:
    """The file of a shard. The first shard is the one to validate on."""
    return f"{'train' if number else 'val'}-{number:05}.bin"


def read_manifest(folder: Path) -> tuple[dict[str, Any], Tokenizer]:
    """The content of shards.json and its tokenizer. ``ValueError`` if it is not what streaming.py writes."""
    path = folder / MANIFEST
    manifest = read_json(path, MANIFEST_FIELDS, ELSEWHERE)
    try:
        tokenizer = tokenizer_from_spec(manifest["tokenizer"])
        if manifest["dtype"] != storage_dtype(tokenizer.vocab_size):
            raise ValueError(f"dtype is {manifest['dtype']!r}, which is not its tokenizer's")
        for number, shard in enumerate(manifest["shards"]):
            if shard["file"] != shard_name(number):  # another name could lead anywhere
                raise ValueError(f"shards[{number}].file is {shard['file']!r}, but has to be {shard_name(number)!r}")
        if manifest["finished"] and len(manifest["shards"]) < 2:
            raise ValueError("shards has less than two entries, but one is to validate on and the others to train on")
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {ELSEWHERE}") from error
    return manifest, tokenizer


def damages(folder: Path, manifest: dict[str, Any]) -> list[str | None]:
    """For every shard what is wrong with it, or None. Reads all of them."""

    def damage(shard: dict[str, Any]) -> str | None:
        path, size = folder / shard["file"], shard["tokens"] * np.dtype(manifest["dtype"]).itemsize
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, but {size} were written"
        same = _sha256_of_file(path) == shard["sha256"]
        return None if same else f"{path} is not what was written: its sha256 differs"

    with ThreadPoolExecutor() as pool:  # hashing leaves Python's lock alone
        return list(pool.map(damage, manifest["shards"]))


def read_shards(folder: Path) -> tuple[ShardedTokens, np.ndarray, Tokenizer]:
    """Open a folder of shards: ids to train on and to validate on, as read-only memory maps, and their tokenizer.

    ``ValueError`` if the folder is not finished, or a shard is missing, cut short or changed. To know, every byte is
    read once; hardly any of it stays in memory.
    """
    manifest, tokenizer = read_manifest(folder)
    if not manifest["finished"]:
        there = sum(shard["tokens"] for shard in manifest["shards"])
        raise ValueError(f"{folder} has {there:,} of the {manifest['tokens']:,} tokens that were asked for: {REDO}")
    for damage in damages(folder, manifest):
        if damage:
            raise ValueError(f"{damage}: {REDO}")
    val, *train = (np.memmap(folder / shard["file"], manifest["dtype"], mode="r") for shard in manifest["shards"])
    hashes = "".join(shard["sha256"] for shard in manifest["shards"][1:])
    return ShardedTokens(train, hashlib.sha256(hashes.encode("utf-8")).hexdigest()), val, tokenizer


# ----------------------------------------------------------------------------------------------------------------------
# Which data is it

Tokens = np.ndarray | ShardedTokens


def digest(tokens: Tokens) -> str:
    """sha256 (hex) that tells token sequences, shape (T,), apart: of all their content, wherever it lies."""
    if isinstance(tokens, ShardedTokens | TokenFile) and tokens.sha256:  # has been read and hashed already
        return tokens.sha256
    assert isinstance(tokens, np.ndarray)
    return _sha256(tokens)


def same_tokens(tokens: Tokens, recorded: str) -> bool:
    """Whether `recorded` is the digest of just these tokens.

    Older runs recorded another one, of the number of tokens and their first and last MiB. That one is recognised too.
    """
    if recorded == digest(tokens):
        return True
    if isinstance(tokens, ShardedTokens):
        return False
    part = 2**20 // tokens.itemsize
    ends = len(tokens).to_bytes(8, "little") + tokens[:part].tobytes() + tokens[-part:].tobytes()
    return recorded == hashlib.sha256(ends).hexdigest()


def _sha256(ids: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(ids).data).hexdigest()


def _sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
