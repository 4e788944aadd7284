"""Data sets that do not fit in memory: streamed, tokenized, and written in shards that training reads from the disk.

    prepared/fineweb-edu/
        shards.json        the source, the tokenizer, and for every shard its tokens, its sha256 and where it ends
        val-00000.bin      the first documents, to validate on
        train-00001.bin    token ids and nothing else
        train-00002.bin
        ...

A document ends with the end-of-text token, a shard with a document. A shard is written in a scratch folder. When it is
whole, ``shards.json`` takes it up, and then it gets its name. So a break costs no more than the shard that was being
written, and the same call goes on behind the last whole one. A file that ``shards.json`` does not name is not ours, and
stays as it is. storage.py reads the folder. Streaming needs the `datasets` library, which is an extra.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from ..files import Report, clear_scratch, flush_to_disk, make_folder, say, scratch, write_atomically, writing
from .sources import FINEWEB_EDU as FINEWEB_EDU
from .sources import Source, open_stream, read
from .storage import FORMAT, MANIFEST, damages, prepared_files, read_manifest, shard_name
from .tokenizers import BPETokenizer, storage_dtype

SHARD_TOKENS = 100_000_000  # 200 MB
BATCH_CHARACTERS = 4_000_000  # tokenized at a time: about a thousand pages of the web
KEPT = "the shards before it are whole, and the same command goes on"


class Document(NamedTuple):
    state: dict[str, Any]  # of the stream, before this document
    text: str
    ids: np.ndarray  # (T,), the end-of-text token last


@dataclass
class Lengths:
    """How many documents were written, and of how many tokens."""

    count: int = 0
    least: int = sys.maxsize
    most: int = 0

    def add(self, length: int) -> None:
        self.count, self.least, self.most = self.count + 1, min(self.least, length), max(self.most, length)


def prepare_stream(
    source: Source,
    tokens: int,
    out_dir: str | Path | None = None,
    tokenizer: str = "gpt2",
    val_fraction: float = 0.001,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """Stream at least `tokens` tokens of a data set into shards, for :func:`.load_corpus`. Returns their folder.

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
    path = Path(source.dataset).resolve()
    folder = Path("prepared") / (path.stem if path.is_file() else path.name) if out_dir is None else Path(out_dir)
    encoder = BPETokenizer(tokenizer)
    if encoder.end is None:
        raise ValueError(f"the tokenizer {tokenizer!r} has no token that ends a document: use 'gpt2'")
    manifest, outdated = start_or_go_on(folder, source, encoder, tokens)
    if total(manifest) >= tokens:
        say(f"notice   {folder} has {total(manifest):,} tokens already")
    else:
        write_shards(folder, manifest, outdated, encoder, max(1, round(val_fraction * tokens)), shard_tokens)
    if len(manifest["shards"]) < 2:
        for shard in manifest["shards"]:  # so that the next call starts afresh
            (folder / shard["file"]).unlink(missing_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        raise ValueError(
            f"{source.dataset} leaves no tokens to train on ({total(manifest):,} of the {tokens:,} "
            "asked for are there, all to validate on): ask for more tokens, or a smaller val_fraction"
        )
    write_manifest(folder, manifest | {"finished": True})
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# The folder


def start_or_go_on(
    folder: Path, source: Source, tokenizer: BPETokenizer, tokens: int
) -> tuple[dict[str, Any], list[str]]:
    """A new manifest, or that of the folder with its shards up to the first damaged one; and the files after that one.

    ``ValueError`` if the folder holds anything else that belongs to prepared data.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "source": asdict(source),
        "tokenizer": tokenizer.spec(),
        "dtype": storage_dtype(tokenizer.vocab_size),
        "tokens": tokens,  # asked for
        "finished": False,
        "shards": [],
    }
    clear_scratch(folder)
    there = prepared_files(folder)
    if there and MANIFEST not in there:
        raise ValueError(f"{folder} holds a prepared text: choose another folder (--out), or delete that one")
    old = read_manifest(folder)[0] if there else manifest
    files = [shard["file"] for shard in old["shards"]]
    shard_like = [path.name for path in folder.glob("*-*.bin") if re.fullmatch(r"(train|val)-\d{5,}\.bin", path.name)]
    if foreign := sorted(set(shard_like) - set(files)):
        raise ValueError(
            f"{folder} holds {foreign[0]}, which no {MANIFEST} there names: choose another folder (--out), or delete "
            "that file"
        )
    asked = asdict(source) | {"revision": old["source"]["revision"]} if there else asdict(source)
    for was, now in ((old["source"], asked), (old["tokenizer"], tokenizer.spec())):
        differ = [f"{name} {was.get(name)!r}, not {now[name]!r}" for name in now if was.get(name) != now[name]]
        if differ:
            raise ValueError(f"{folder} was prepared with {'; '.join(differ)}: choose another folder (--out)")
    harms = damages(folder, old)
    whole = next((number for number, damage in enumerate(harms) if damage), len(files))
    if whole < len(files):
        say(f"notice   {harms[whole]}: it is made again, with what comes after it")
    return manifest | {"source": asked, "shards": old["shards"][:whole]}, files[whole:]


def write_shards(
    folder: Path, manifest: dict[str, Any], outdated: list[str], encoder: BPETokenizer, val_size: int, train_size: int
) -> None:
    """Add shards to a manifest and its folder until there are the tokens asked for, or the data set ends."""
    tokens, shards, lengths = manifest["tokens"], manifest["shards"], Lengths()
    stream, source = open_stream(Source(**manifest["source"]))
    manifest["source"] = asdict(source)
    start = time.perf_counter()
    width = shutil.get_terminal_size().columns
    with ExitStack() as cleanup:
        batches = tokenized(stream, source, encoder, behind=shards[-1]["last"] if shards else None)
        cleanup.enter_context(closing(batches))  # its threads end here, and not whenever Python collects garbage
        first = next(batches, [])
        if first:
            say_what_it_takes(folder, manifest, first, time.perf_counter() - start)
        documents = chain(first, chain.from_iterable(batches))
        bar = tqdm(
            total=tokens, initial=total(manifest), unit=" tokens", unit_scale=True, file=Report(sys.stderr), ncols=width
        )
        cleanup.enter_context(bar)
        while (left := tokens - total(manifest)) > 0:
            size = min(train_size, left) if shards else val_size
            if not add_shard(folder, manifest, outdated, documents, size, lengths, bar):
                break
    if left > 0:
        say(f"notice   {source.dataset} ends here, after {total(manifest):,} tokens")
    if lengths.count:
        say(f"wrote    {lengths.count:,} documents of {lengths.least:,} to {lengths.most:,} tokens")


def add_shard(
    folder: Path,
    manifest: dict[str, Any],
    outdated: list[str],
    documents: Iterator[Document],
    size: int,
    lengths: Lengths,
    bar: tqdm,
) -> bool:
    """Write one shard of at least `size` tokens, and take it up. False if no document is left.

    The manifest comes before the shard gets its name: so every shard in the folder is named there, whatever happens.
    """
    path = folder / shard_name(len(manifest["shards"]))
    make_folder(folder)
    with ExitStack() as cleanup:
        with writing(path, KEPT):
            temporary = cleanup.enter_context(scratch(folder)) / path.name
            # Without a buffer, which would meet a full disk once more when it is closed.
            file = cleanup.enter_context(open(temporary, "wb", buffering=0))
        shard = fill(file, path, manifest["dtype"], documents, size, lengths, bar)
        file.close()
        if shard is None:
            return False
        with writing(path, KEPT):
            flush_to_disk(temporary)
            for name in outdated:
                (folder / name).unlink(missing_ok=True)
            outdated.clear()
            manifest["shards"].append(shard)
            write_manifest(folder, manifest)
            os.replace(temporary, path)
    return True


def fill(
    file: FileIO, path: Path, dtype: str, documents: Iterator[Document], size: int, lengths: Lengths, bar: tqdm
) -> dict[str, Any] | None:
    """Write documents until there are `size` tokens. Returns the shard's entry, or None if no document is left."""
    count, sha256, last = 0, hashlib.sha256(), None
    while count < size and (document := next(documents, None)):
        content = document.ids.astype(dtype).tobytes()
        with writing(path, KEPT):
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
        sha256.update(content)
        lengths.add(len(document.ids))
        bar.update(len(document.ids))
        count, last = count + len(document.ids), document
    if last is None:
        return None
    place = {"state": last.state, "sha256": fingerprint(last.text)}
    return {"file": path.name, "tokens": count, "sha256": sha256.hexdigest(), "last": place}


def say_what_it_takes(folder: Path, manifest: dict[str, Any], first: list[Document], seconds: float) -> None:
    """Print size and time, judged by the first documents. ``OSError`` if they will not fit on the disk."""
    source, tokens, there = Source(**manifest["source"]), manifest["tokens"], total(manifest)
    times = (tokens - there) / sum(len(document.ids) for document in first)
    to_read = times * sum(len(document.text.encode("utf-8", "replace")) for document in first)
    to_write = (tokens - there) * np.dtype(manifest["dtype"]).itemsize
    folder = folder.resolve()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    of = ", ".join(f"{key} {value}" for key, value in asdict(source).items() if value and key != "dataset")
    sizes = [len(document.text) for document in first]
    minutes = max(1, round(times * seconds / 60))
    say(f"source   {source.dataset} ({of})")
    say(f"size     {tokens:,} tokens, {there:,} of them there: about {megabytes(to_read)} of text to read,")
    say(f"         {megabytes(to_write)} to write in {folder}, where {megabytes(free)} are free")
    say(f"time     about {minutes} min, at the pace of the first {len(first):,} documents,")
    say(f"         which have {min(sizes):,} to {max(sizes):,} characters")
    say("         if it is stopped, the same command goes on, and at most one shard is lost")
    if to_write > free:
        raise OSError(f"the {megabytes(to_write)} do not fit on the disk of {folder}: choose another folder (--out)")


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1), KEPT)


def total(manifest: dict[str, Any]) -> int:
    return sum(shard["tokens"] for shard in manifest["shards"])


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


# ---------------------------------------------------------------------------------------------------------------------
# The tokens


def tokenized(
    stream: Any, source: Source, tokenizer: BPETokenizer, behind: dict[str, Any] | None
) -> Generator[list[Document], None, None]:
    """Batches of documents, from the start or from behind a place where a shard ended."""
    changed = (
        f"{source.dataset} is not what it was when the last shard was written: prepare it again, with another folder "
        "(--out)"
    )
    if behind is not None:
        try:
            stream.load_state_dict(behind["state"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(changed) from error
    documents = read(stream, source)
    if behind is not None:
        # The last document once more, to see that this is the place before anything is written behind it.
        _, text = next(documents, (None, ""))
        if fingerprint(text) != behind["sha256"]:
            raise ValueError(changed)
    end = [] if tokenizer.end is None else [tokenizer.end]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # tiktoken works without Python's lock
        while True:
            batch, characters = [], 0
            while characters < BATCH_CHARACTERS and (document := next(documents, None)):
                batch.append(document)
                characters += len(document[1])
            if not batch:
                return
            ids = pool.map(tokenizer.pack, [text for _, text in batch])
            yield [
                Document(state, text, np.append(i, end).astype(i.dtype))
                for (state, text), i in zip(batch, ids, strict=True)
            ]
