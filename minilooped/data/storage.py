"""Token files: how ids lie on the disk, and how they are read back.

A text is two files, train.bin and val.bin. NAME.bin holds the ids and nothing else, NAME.json says how to read them. A
data set that does not fit in memory is a folder of shards, which streaming.py makes and describes.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..files import make_folder, write_atomically, writing
from .tokenizers import Tokenizer, check_ids, tokenizer_from_spec

FORMAT = 1


def storage_dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 2**16 else "<u4"


def write_tokens(path: str | Path, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """Write ids, shape (T,), to `path` (``NAME.bin``) and their header to ``NAME.json``.

    Ids take two bytes where the vocabulary allows it, else four. A crash never leaves a file that looks whole.
    """
    path = Path(path)
    if len(ids) == 0:
        raise ValueError(f"there are no tokens to write to {path}: the split is empty")
    check_ids(ids, tokenizer.vocab_size)
    dtype = storage_dtype(tokenizer.vocab_size)
    header = {
        "format": FORMAT,
        "dtype": dtype,
        "count": len(ids),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.spec(),
    }
    make_folder(path.parent)
    # The old header goes first and the new one comes last, so that a header never stands beside another file's ids.
    with writing(path.with_suffix(".json")):
        path.with_suffix(".json").unlink(missing_ok=True)
    write_atomically(path, ids.astype(dtype).tobytes())
    write_atomically(path.with_suffix(".json"), json.dumps(header, indent=1))


def read_tokens(path: str | Path) -> tuple[np.ndarray, Tokenizer]:
    """Open what :func:`write_tokens` wrote: ids, shape (T,), as a read-only memory map, and their tokenizer.

    ``FileNotFoundError`` or ``ValueError`` if a file is missing, cut short, or not what its header says.
    """
    path = Path(path)
    again = "make it again with `minilooped prepare FILE`"
    for file in (path, path.with_suffix(".json")):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: {again}")
    try:
        header = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}, but this version reads format {FORMAT}")
        tokenizer = tokenizer_from_spec(header["tokenizer"])
        dtype, count = np.dtype(storage_dtype(tokenizer.vocab_size)), header["count"]
        if (header["vocab_size"], header["dtype"]) != (tokenizer.vocab_size, dtype.str):
            raise ValueError("its vocabulary is not its tokenizer's")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.with_suffix('.json')} is not a header that can be read ({error}): {again}") from error
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, but {count} tokens of {dtype.itemsize} were written: {again}"
        )
    ids = np.memmap(path, dtype=dtype, mode="r")
    try:
        check_ids(ids, tokenizer.vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {again}") from error
    return ids, tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Sharded token files, for data that does not fit in memory: shards.py makes such a folder and describes what is in it.

MANIFEST = "shards.json"
REDO = "run the `minilooped prepare` that made it once more: it redoes what is damaged and goes on"


class ShardedTokens:
    """Several arrays of token ids, in order, as one sequence of shape (T,).

    Takes a slice, or an integer array of any shape, whose shape the ids then have. `sha256` stands for the content.
    """

    def __init__(self, shards: Sequence[np.ndarray], sha256: str) -> None:
        self.shards, self.sha256 = shards, sha256
        self.dtype = shards[0].dtype
        self.ends = np.cumsum([len(shard) for shard in shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        index = np.arange(*index.indices(len(self))) if isinstance(index, slice) else np.asarray(index)
        if index.size and not 0 <= index.min() <= index.max() < len(self):
            raise IndexError(f"positions {index.min()} to {index.max()} of {len(self)} tokens")
        ids, of_shard = np.empty(index.shape, self.dtype), np.searchsorted(self.ends, index, side="right")
        for number in np.unique(of_shard):
            here, shard = of_shard == number, self.shards[number]
            ids[here] = shard[index[here] - (self.ends[number] - len(shard))]
        return ids


def read_manifest(folder: Path) -> tuple[dict[str, Any], Tokenizer]:
    """What a folder of shards says of itself, and its tokenizer. ``ValueError`` if that is not what shards.py wrote."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, but this version reads format {FORMAT}")
        tokenizer = tokenizer_from_spec(manifest["tokenizer"])
        if manifest["dtype"] != storage_dtype(tokenizer.vocab_size):
            raise ValueError("its dtype is not its tokenizer's")
        parts = [(manifest, {"tokens", "finished"}), (manifest["source"], {"dataset", "config", "column", "revision"})]
        parts += [(shard, {"file", "tokens", "sha256", "last"}) for shard in manifest["shards"]]
        for part, needed in parts:
            if missing := needed - part.keys():
                raise ValueError(f"{', '.join(sorted(missing))} missing")
        for shard in manifest["shards"]:
            if not re.fullmatch(r"(train|val)-\d+\.bin", shard["file"]):  # it could lead anywhere
                raise ValueError(f"{shard['file']!r} is not the name of a shard")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): prepare the data again, in another folder") from error
    return manifest, tokenizer


def damages(folder: Path, manifest: dict[str, Any]) -> list[str | None]:
    """For every shard what is wrong with it, or None. Reads all of them."""

    def damage(shard: dict[str, Any]) -> str | None:
        path, size = folder / shard["file"], shard["tokens"] * np.dtype(manifest["dtype"]).itemsize
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, but {size} were written"
        with open(path, "rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == shard["sha256"]
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


def digest(tokens: np.ndarray | ShardedTokens) -> str:
    """sha256 (hex) that tells token sequences, shape (T,), apart: of their number, their first and their last MiB."""
    if isinstance(tokens, ShardedTokens):  # has been read and hashed already
        return tokens.sha256
    # Of these only: files of many GB, which stay on the disk, would take minutes at every start.
    part = 2**20 // tokens.itemsize
    ends = tokens[:part].tobytes() + tokens[-part:].tobytes()
    return hashlib.sha256(len(tokens).to_bytes(8, "little") + ends).hexdigest()
