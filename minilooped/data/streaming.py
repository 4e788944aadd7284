"""Data sets that do not fit in memory: streamed, tokenized, and written in shards that training reads from the disk.

    prepared/fineweb-edu/
        shards.json        the source, the tokenizer, and for every shard its tokens, its sha256 and where it ends
        val-00000.bin      the first documents, to validate on
        train-00001.bin    token ids and nothing else
        train-00002.bin
        ...

A document ends with the end-of-text token, a shard with a document. A shard is written under another name and renamed
when it is whole; then ``shards.json`` takes it up. So a break costs no more than the shard that was being written, and
the same call goes on behind the last whole one. data.py reads the folder. Streaming needs the `datasets` library, which
is an extra.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from ..files import in_a_line, make_folder, write_atomically, writing
from . import BPETokenizer
from .storage import FORMAT, MANIFEST, damages, read_manifest, storage_dtype

SHARD_TOKENS = 100_000_000  # 200 MB
BATCH_CHARACTERS = 4_000_000  # tokenized at a time: about a thousand pages of the web


@dataclass(frozen=True)
class Source:
    """A data set that `datasets` can stream: one of the Hugging Face hub, or a folder of parquet or JSON files."""

    dataset: str  # name on the hub, or path of the folder
    config: str | None = None  # which part of it, where it has several
    column: str = "text"
    revision: str | None = None  # commit on the hub; None: the newest


FINEWEB_EDU = Source("HuggingFaceFW/fineweb-edu", "sample-10BT")


class Document(NamedTuple):
    state: dict[str, Any]  # of the stream, before this document
    text: str
    ids: np.ndarray  # (T,), the end-of-text token last


def prepare_stream(
    source: Source,
    tokens: int,
    out_dir: str | Path | None = None,
    tokenizer: str = "gpt2",
    val_fraction: float = 0.001,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """Stream at least `tokens` tokens of a data set into shards, for :func:`.data.load_corpus`. Returns their folder.

    Says first how much this is and how long it will take. Goes on where an earlier call stopped, also with a larger
    number of `tokens`; the validation shard, the first ``val_fraction * tokens``, then stays as it is. A data set that
    ends early gives fewer tokens. `out_dir` None is ``prepared/NAME`` in the working directory.

    ``ValueError`` for arguments that cannot work, for a folder that holds other data, and without the `datasets`
    library; ``OSError`` if the data set cannot be read or the disk is too small.
    """
    if tokenizer == "char":
        raise ValueError("the tokenizer 'char' is made from the whole text, which a stream does not show: use 'gpt2'")
    if tokens < 1 or shard_tokens < 1:
        raise ValueError(f"tokens and shard_tokens have to be 1 or more, not {tokens} and {shard_tokens}")
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}, but has to lie between 0 and 1, both left out")
    folder = Path("prepared") / Path(source.dataset).resolve().name if out_dir is None else Path(out_dir)
    encoder = BPETokenizer(tokenizer)
    manifest = start_or_go_on(folder, source, encoder, tokens)
    shards = manifest["shards"]

    if total(manifest) >= tokens:
        print(f"notice   {folder} has {total(manifest):,} tokens already")
    else:
        stream, source = open_stream(Source(**manifest["source"]))
        manifest["source"] = asdict(source)
        start = time.perf_counter()
        batches = tokenized(stream, source, encoder, behind=shards[-1]["last"] if shards else None)
        first = next(batches, [])
        if first:
            say_what_it_takes(folder, manifest, first, time.perf_counter() - start)
        documents = chain(first, chain.from_iterable(batches))
        with tqdm(total=tokens, initial=total(manifest), unit=" tokens", unit_scale=True) as bar:
            while (left := tokens - total(manifest)) > 0:
                split, size = ("train", min(shard_tokens, left)) if shards else ("val", round(val_fraction * tokens))
                path = folder / f"{split}-{len(shards):05}.bin"
                shard = write_shard(path, manifest["dtype"], documents, max(1, size), bar)
                if shard is None:
                    bar.write(f"notice   {source.dataset} ends here, after {total(manifest):,} tokens")
                    break
                shards.append(shard)
                write_manifest(folder, manifest)

    if len(shards) < 2:
        for name in (MANIFEST, *(shard["file"] for shard in shards)):  # so that the next call starts afresh
            (folder / name).unlink(missing_ok=True)
        raise ValueError(
            f"{source.dataset} leaves no tokens to train on ({total(manifest):,} of the {tokens:,} "
            "asked for are there, all to validate on): ask for more tokens, or a smaller val_fraction"
        )
    write_manifest(folder, manifest | {"finished": True})
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# The folder


def start_or_go_on(folder: Path, source: Source, tokenizer: BPETokenizer, tokens: int) -> dict[str, Any]:
    """A new manifest, or that of the folder, with its shards up to the first damaged one."""
    if (folder / "train.json").exists():
        raise ValueError(f"{folder} holds a prepared text: choose another folder (--out), or delete that one")
    manifest = {
        "format": FORMAT,
        "source": asdict(source),
        "tokenizer": tokenizer.spec(),
        "dtype": storage_dtype(tokenizer.vocab_size),
        "tokens": tokens,  # asked for
        "finished": False,
        "shards": [],
    }
    if not (folder / MANIFEST).is_file():
        return manifest
    old, _ = read_manifest(folder)
    asked = asdict(source) | {"revision": old["source"]["revision"]}  # goes on with the one it began with
    for was, now in ((old["source"], asked), (old["tokenizer"], manifest["tokenizer"])):
        differ = [f"{name} {was[name]!r}, not {now[name]!r}" for name in now if was[name] != now[name]]
        if differ:
            raise ValueError(f"{folder} was prepared with {'; '.join(differ)}: choose another folder (--out)")
    whole = []
    for shard, damage in zip(old["shards"], damages(folder, old), strict=True):
        if damage:
            print(f"notice   {damage}: it is made again, with what comes after it")
            break
        whole.append(shard)
    return manifest | {"source": asked, "shards": whole}


def say_what_it_takes(folder: Path, manifest: dict[str, Any], first: list[Document], seconds: float):
    """Print size and time, judged by the first documents. ``OSError`` if they will not fit on the disk."""
    source, tokens, there = Source(**manifest["source"]), manifest["tokens"], total(manifest)
    times = (tokens - there) / sum(len(document.ids) for document in first)
    to_read = times * sum(len(document.text.encode("utf-8", "replace")) for document in first)
    to_write = (tokens - there) * np.dtype(manifest["dtype"]).itemsize
    folder = folder.resolve()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    of = ", ".join(f"{key} {value}" for key, value in asdict(source).items() if value and key != "dataset")
    print(f"source   {source.dataset} ({of})")
    print(f"size     {tokens:,} tokens, {there:,} of them there: about {megabytes(to_read)} of text to read,")
    print(f"         {megabytes(to_write)} to write in {folder}, where {megabytes(free)} are free")
    print(
        f"time     about {max(1, round(times * seconds / 60))} min, at the pace of the first {len(first):,} documents"
    )
    print("         if it is stopped, the same command goes on, and at most one shard is lost")
    if to_write > free:
        raise OSError(f"the {megabytes(to_write)} do not fit on the disk of {folder}: choose another folder (--out)")


def write_shard(path: Path, dtype: str, documents: Iterator[Document], size: int, bar: tqdm) -> dict[str, Any] | None:
    """Write documents until there are `size` tokens, and return the shard's entry; None if no document is left."""
    count, sha256, last = 0, hashlib.sha256(), None
    make_folder(path.parent)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:  # a buffer would meet a full disk once more when it is closed
            while count < size and (document := next(documents, None)):
                content = document.ids.astype(dtype).tobytes()
                with writing(path, "the shards before it are whole, and the same command goes on"):
                    left = memoryview(content)
                    while left:
                        left = left[file.write(left) :]
                sha256.update(content)
                bar.update(len(document.ids))
                count, last = count + len(document.ids), document
        if last is None:
            return None
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    place = {"state": last.state, "sha256": fingerprint(last.text)}
    return {"file": path.name, "tokens": count, "sha256": sha256.hexdigest(), "last": place}


def write_manifest(folder: Path, manifest: dict[str, Any]):
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))


def total(manifest: dict[str, Any]) -> int:
    return sum(shard["tokens"] for shard in manifest["shards"])


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


# ---------------------------------------------------------------------------------------------------------------------
# The stream


def open_stream(source: Source) -> tuple[Any, Source]:
    """The data set, to be read in order from the hub or the disk, and the source with the revision that this is."""
    try:
        from datasets import load_dataset
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ValueError(f"streaming needs the datasets library ({error}): run `pip install datasets`") from error

    try:
        if source.revision is None and not Path(source.dataset).exists():
            source = replace(source, revision=HfApi().dataset_info(source.dataset).sha)
        stream = load_dataset(source.dataset, source.config, split="train", streaming=True, revision=source.revision)
        return stream, source
    except Exception as error:  # of the hub, the network or a file format: they share no base class
        raise OSError(
            f"the data set {source.dataset!r} cannot be opened ({in_a_line(error)}): check name, config and "
            "network, or name a folder of parquet or JSON files"
        ) from error


def read(stream: Any, source: Source) -> Iterator[tuple[dict[str, Any], str]]:
    """The state of the stream before a document, and its text, for every row that has one."""
    rows = iter(stream)
    while True:
        try:
            state = stream.state_dict()
            row = next(rows, None)
        except Exception as error:  # as in open_stream
            raise OSError(
                f"reading {source.dataset} failed ({in_a_line(error)}): the same command goes on from the last shard"
            ) from error
        if row is None:
            return
        if source.column not in row:
            raise ValueError(f"{source.dataset} has no column {source.column!r}: choose one of {', '.join(row)}")
        text = row[source.column]
        if not isinstance(text, str | None):
            raise ValueError(
                f"the column {source.column!r} of {source.dataset} holds {type(text).__name__}, not text: choose one "
                f"of {', '.join(row)}"
            )
        if text:
            yield state, text


def tokenized(
    stream: Any, source: Source, tokenizer: BPETokenizer, behind: dict[str, Any] | None
) -> Iterator[list[Document]]:
    """Batches of documents, from the start or from behind a place where a shard ended."""
    if behind is not None:
        stream.load_state_dict(behind["state"])
    documents = read(stream, source)
    if behind is not None:
        # The last document once more, to see that this is the place before anything is written behind it.
        _, text = next(documents, (None, ""))
        if fingerprint(text) != behind["sha256"]:
            raise ValueError(
                f"{source.dataset} is not what it was when the last shard was written: prepare it again, with another "
                "folder (--out)"
            )
    end = tokenizer.encoding.eot_token
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # tiktoken works without Python's lock
        while True:
            batch, characters = [], 0
            while characters < BATCH_CHARACTERS and (document := next(documents, None)):
                batch.append(document)
                characters += len(document[1])
            if not batch:
                return
            ids = pool.map(tokenizer.encode, [text for _, text in batch])
            yield [Document(state, text, np.append(i, end)) for (state, text), i in zip(batch, ids, strict=True)]
