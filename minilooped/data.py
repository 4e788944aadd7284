"""Text -> tokens -> batches.

A :class:`Corpus` is a training and a validation split of one text as token ids, with the tokenizer that made them. The
embedded one (nine plays by Shakespeare) is tokenized in memory; :func:`prepare` turns any text file into token files;
data sets that do not fit in memory are made by shards.py and read here. :class:`BatchStream` draws random windows to
train on, :func:`eval_windows` walks over a whole split once. :func:`p_hop` and :func:`permutations` draw tasks that
need depth.
Nothing here touches the network, unless a tiktoken encoding other than GPT-2's is asked for.
"""

import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .files import make_folder, refuse_links, write_atomically, writing

EMBEDDED_SHA256 = {
    "shakespeare.txt": "6aacfa576971da2edcb10579bb6ae7f2b7507c963dfb9a4a402b98813fe43fc4",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def embedded(name: str) -> Path:
    """Path of an embedded file: ``"shakespeare.txt"`` or ``"vocab.bpe"``."""
    package = Path(__file__).parent
    # An installed wheel carries the files inside the package, a checkout keeps them in data/.
    for folder in (package / "embedded", package.parent / "data"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"the embedded file {name!r} is missing: install minilooped again")


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


class Tokenizer(ABC):
    """Text to ids and back. Tokenizers with equal hashes give the same ids for every text."""

    name: str  # "char", or the name of a tiktoken encoding
    vocab_size: int
    hash: str  # sha256 (hex) of all that defines the ids

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Text -> int64 ids, shape (T,)."""

    def decode(self, ids: Sequence[int] | np.ndarray | Tensor) -> str:
        """Ids, shape (T,) -> text. ``ValueError`` for an id outside the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        check_ids(ids, self.vocab_size)
        return self._decode(ids.tolist())

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    @property
    def opening(self) -> str:
        """What a text without a prompt goes on from: a line break, or the first character known."""
        return "\n"

    def spec(self) -> dict[str, Any]:
        """All that :func:`tokenizer_from_spec` needs to rebuild this tokenizer; can be written as JSON."""
        return {"name": self.name, "hash": self.hash}


class CharTokenizer(Tokenizer):
    """One id per character: its place in the sorted set of the characters of a text."""

    name = "char"

    def __init__(self, text: str) -> None:
        self.chars = "".join(sorted(set(text)))
        self.vocab_size = len(self.chars)
        self.hash = hashlib.sha256(_code_points(self.chars).tobytes()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Text -> int64 ids, shape (T,). ``ValueError`` for a character that is not in the vocabulary."""
        vocabulary, codes = _code_points(self.chars), _code_points(text)
        ids = np.searchsorted(vocabulary, codes)
        known = np.isin(codes, vocabulary)
        if not known.all():
            position = int(np.argmin(known))
            raise ValueError(
                f"the character {text[position]!r} at position {position} is not one of the {self.vocab_size} that "
                "this tokenizer knows: take it out, or use 'gpt2' or a tokenizer made from a text that has it"
            )
        return ids

    def _decode(self, ids: list[int]) -> str:
        return "".join(self.chars[i] for i in ids)

    @property
    def opening(self) -> str:
        return "\n" if "\n" in self.chars else self.chars[0]

    def spec(self) -> dict[str, Any]:
        return super().spec() | {"chars": self.chars}


class BPETokenizer(Tokenizer):
    """A tiktoken encoding. GPT-2's is built from the embedded merges; any other one is downloaded once by tiktoken.

    The text of a special token, such as ``<|endoftext|>``, is ordinary text.
    """

    def __init__(self, name: str = "gpt2") -> None:
        self.name = name
        self.encoding = _gpt2_encoding() if name == "gpt2" else _downloaded_encoding(name)
        self.vocab_size = self.encoding.n_vocab

    @cached_property
    def hash(self) -> str:
        digest = hashlib.sha256(self.name.encode("utf-8"))
        for token in range(self.vocab_size):
            try:
                content = self.encoding.decode_single_token_bytes(token)
            except KeyError:  # some encodings leave ids unused
                content = b""
            digest.update(len(content).to_bytes(4, "little") + content)
        return digest.hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.encoding.encode_ordinary(text), dtype=np.int64)

    def _decode(self, ids: list[int]) -> str:
        try:
            return self.encoding.decode(ids)
        except KeyError as error:  # one of the unused ids
            raise ValueError(f"the tokenizer {self.name!r} has no token for one of these ids ({error})") from error


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def _gpt2_encoding():
    """GPT-2's byte-pair encoding, from its list of merges alone: the 256 bytes come first, then one token per merge."""
    import tiktoken

    content = embedded("vocab.bpe").read_bytes()
    if hashlib.sha256(content).hexdigest() != EMBEDDED_SHA256["vocab.bpe"]:
        raise ValueError(f"{embedded('vocab.bpe')} is damaged (wrong sha256): install minilooped again")
    # The file spells each byte as one visible character: printable bytes as themselves, the others from chr(256) on.
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    tokens = [bytes([byte]) for byte in visible + hidden]
    _version, *merges = content.decode("utf-8").splitlines()
    tokens += [bytes(byte_of[char] for char in merge.replace(" ", "")) for merge in merges]
    return tiktoken.Encoding(
        "gpt2",
        # Where merges may not cross: contractions; runs of letters, digits, or other signs, each with the space before;
        # white space, whose last character is left to the word that follows.
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={"<|endoftext|>": len(tokens)},
    )


def _downloaded_encoding(name: str):
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        others = ", ".join(sorted(set(tiktoken.list_encoding_names()) - {"gpt2"}))
        raise ValueError(
            f"unknown tokenizer {name!r}: choose 'char', 'gpt2', or one that is downloaded once ({others})"
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # what requests raises is an OSError too
        raise ConnectionError(
            f"the tokenizer {name!r} has to be downloaded and that failed ({type(error).__name__}): go online once, "
            "set TIKTOKEN_CACHE_DIR to a folder that already holds it, or use 'gpt2' or 'char', which need no network"
        ) from error


def make_tokenizer(name: str, text: str) -> Tokenizer:
    """``"char"``: the characters of `text`; ``"gpt2"``, or another tiktoken encoding: the same for every text."""
    return CharTokenizer(text) if name == "char" else BPETokenizer(name)


def tokenizer_from_spec(spec: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose :meth:`Tokenizer.spec` this is. ``ValueError`` if it can't be rebuilt exactly."""
    tokenizer = make_tokenizer(spec["name"], spec.get("chars", ""))
    if tokenizer.hash != spec["hash"]:
        raise ValueError(
            f"the tokenizer {spec['name']!r} that was recorded here can't be rebuilt (hash {spec['hash'][:8]}, rebuilt "
            f"{tokenizer.hash[:8]}): the record was edited, or another version of the tokenizer made it"
        )
    return tokenizer


def check_same_tokenizer(checkpoint: Tokenizer, data: Tokenizer) -> None:
    """``ValueError`` unless a model trained with the one tokenizer can read what the other one wrote."""
    if checkpoint.hash != data.hash:
        a, b = (f"{t.name!r} ({t.vocab_size} tokens, hash {t.hash[:8]})" for t in (checkpoint, data))
        raise ValueError(
            f"the checkpoint was trained with the tokenizer {a}, the data was made with {b}: "
            "use the data that it was trained on, or train a new model"
        )


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """``ValueError`` if an id is not in ``[0, vocab_size)``."""
    if ids.size and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"token id {wrong} is outside the vocabulary of {vocab_size}: another tokenizer made these ids"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Token files: NAME.bin holds the ids and nothing else, NAME.json says how to read them.

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


# ---------------------------------------------------------------------------------------------------------------------
# Corpora


@dataclass(frozen=True)
class Corpus:
    """A text, split by position: ids of the first part to train on, shape (T,), and of the last to validate on."""

    name: str
    train: np.ndarray | ShardedTokens
    val: np.ndarray
    tokenizer: Tokenizer


def load_corpus(data: str | Path = "shakespeare", tokenizer: str | None = None) -> Corpus:
    """The embedded text (``"shakespeare"``), or a folder that :func:`prepare` or shards.py made.

    `tokenizer` None is ``"char"`` for the embedded text, and for a folder the one that it was prepared with.
    """
    if str(data) == "shakespeare":
        text = embedded("shakespeare.txt").read_text(encoding="utf-8")
        return Corpus("shakespeare", *_tokenize_splits(text, tokenizer or "char", val_fraction=0.1))
    folder = Path(data)
    if folder.is_file():
        raise ValueError(f"{folder} is a file, not prepared data: run `minilooped prepare {folder}` and use its folder")
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no data at {folder}: use 'shakespeare', which is built in, or a folder made by `minilooped prepare FILE`"
        )
    refuse_links(folder)
    if (folder / MANIFEST).is_file():
        train, val, own = read_shards(folder)
    else:
        (train, own), (val, own_of_val) = (read_tokens(folder / f"{split}.bin") for split in ("train", "val"))
        if own.hash != own_of_val.hash:
            raise ValueError(
                f"{folder}: train.bin and val.bin differ in tokenizer: run `minilooped prepare FILE` again"
            )
    if tokenizer not in (None, own.name):
        raise ValueError(
            f"{folder} was prepared with the tokenizer {own.name!r}, not {tokenizer!r}: leave the tokenizer out, or "
            f"run `minilooped prepare FILE` again with {tokenizer!r}"
        )
    return Corpus(folder.resolve().name, train, val, own)


def prepare(
    text_file: str | Path, out_dir: str | Path | None = None, tokenizer: str = "char", val_fraction: float = 0.1
) -> Path:
    """Tokenize a UTF-8 text file into ``train.bin`` and ``val.bin``, for :func:`load_corpus`. Returns their folder.

    `out_dir` None is ``prepared/NAME`` in the working directory, for a text file ``NAME.txt``. The last `val_fraction`
    of the characters is for validation. A byte-order mark is dropped, and Windows line ends become ``\\n``.
    """
    text_file = Path(text_file)
    if not text_file.is_file():
        raise FileNotFoundError(
            f"no text file at {text_file}: give the path of a UTF-8 text file, or name a data set with --hf-dataset"
        )
    content = text_file.read_bytes()
    try:
        text = content.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{text_file} is not UTF-8 text: byte 0x{content[error.start]:02x} at offset {error.start} (line {line}) "
            "does not fit; save the file as UTF-8"
        ) from error
    out_dir = Path("prepared") / text_file.stem if out_dir is None else Path(out_dir)
    if (out_dir / MANIFEST).is_file():
        raise ValueError(f"{out_dir} holds a data set in shards: choose another folder (--out), or delete that one")
    train, val, tokenizer_used = _tokenize_splits(text, tokenizer, val_fraction, name=str(text_file))
    write_tokens(out_dir / "train.bin", train, tokenizer_used)
    write_tokens(out_dir / "val.bin", val, tokenizer_used)
    return out_dir


def _tokenize_splits(
    text: str, tokenizer_name: str, val_fraction: float, name: str = "the text"
) -> tuple[np.ndarray, np.ndarray, Tokenizer]:
    """The text is cut before it is tokenized, so that every tokenizer is judged on the same characters."""
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}, but has to lie between 0 and 1, both left out")
    tokenizer = make_tokenizer(tokenizer_name, text)
    cut = len(text) - round(val_fraction * len(text))
    splits = {"training": tokenizer.encode(text[:cut]), "validation": tokenizer.encode(text[cut:])}
    for split, ids in splits.items():
        if len(ids) < 2:  # one to read, one to predict
            raise ValueError(
                f"{name} leaves {len(ids)} tokens for the {split} split, which needs 2 or more: "
                f"use a longer text or another val_fraction (now {val_fraction})"
            )
    train, val = (ids.astype(storage_dtype(tokenizer.vocab_size)) for ids in splits.values())
    return train, val, tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class BatchStream:
    """An endless stream of random windows: ``x, y = next(stream)``, both int64 of shape (B, T), y one token ahead.

    The stream draws from its own generator, so its batches depend on `seed` alone, and a stream that loads another's
    :meth:`state_dict` goes on exactly where that one stood. With several processes, `batch_size` is still that of the
    whole batch: each rank takes every `world_size`-th row, so that together they see the batch of a single process.
    """

    def __init__(
        self,
        tokens: np.ndarray | ShardedTokens,
        batch_size: int,
        block_size: int,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or block_size < 1:
            raise ValueError(f"batch_size and block_size have to be 1 or more, not {batch_size} and {block_size}")
        if batch_size % world_size or not 0 <= rank < world_size:
            raise ValueError(f"batch_size {batch_size} can't be shared equally by {world_size} processes (rank {rank})")
        if len(tokens) < block_size + 1:
            raise ValueError(
                f"one window takes block_size + 1 = {block_size + 1} tokens, but the text has {len(tokens)}: "
                "use a smaller block_size or a longer text"
            )
        self.tokens, self.batch_size, self.block_size = tokens, batch_size, block_size
        self.rank, self.world_size = rank, world_size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        n_starts = len(self.tokens) - self.block_size
        starts = torch.randint(n_starts, (self.batch_size,), generator=self.generator)
        return _windows(self.tokens, starts.numpy()[self.rank :: self.world_size], self.block_size)

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"].cpu())


def eval_windows(
    tokens: np.ndarray | ShardedTokens, block_size: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk over a whole split in order: (x, y) pairs, int64 of shape (B, T), in which each target occurs exactly once.

    The targets are all tokens but the first. What does not fill a window comes last, as a batch of shape (1, t) with
    t < T, so weight each batch's mean loss by its number of targets, ``y.numel()``.
    """
    if len(tokens) < 2:
        raise ValueError(f"the split has {len(tokens)} tokens, but an evaluation needs 2 or more: use a longer text")
    n_windows, rest = divmod(len(tokens) - 1, block_size)
    starts = np.arange(n_windows) * block_size
    for first in range(0, n_windows, batch_size):
        yield _windows(tokens, starts[first : first + batch_size], block_size)
    if rest:
        yield _windows(tokens, np.array([n_windows * block_size]), rest)


def _windows(tokens: np.ndarray | ShardedTokens, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (B, T): T = `length` tokens from each of the B starts, and the same one token later."""
    rows = tokens[starts[:, None] + np.arange(length + 1)]  # (B, T+1)
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# Tasks that take several steps to solve (chapter 11). Nothing to load: every batch is drawn anew.


class Task(NamedTuple):
    """A batch of a task: targets stand where they are to be said, not one token ahead as in a text."""

    x: Tensor  # (B, T) int64
    y: Tensor  # (B, T) int64, -100 where nothing is scored


def p_hop(
    batch: int, length: int, hops: Sequence[int] = (1,), *, letters: int = 4, generator: torch.Generator | None = None
) -> tuple[Task, Tensor]:
    """p-hop induction: jump back p times through a random text, and say the letter where you land.

    A jump from a position goes to the one after the latest earlier occurrence of its letter. Row by row p is drawn from
    `hops`. x: p as the token `letters` + p, then `length` - 1 letters 0, 1, ...; y: at every letter the one p jumps
    away, where there are that many. Returns the batch and each row's p, (B,). Tokens go up to `letters` + max(hops).

    No letter follows itself: of letters drawn freely the last two are equal once in `letters` times, such a jump lands
    where it began, and saying the current letter would pass for an answer. The task is one of arXiv 2502.17416; p in
    front and a score at every letter are ours. Raises ValueError for fewer than 3 letters, which leave nothing to draw,
    a window without room for a jump, or a p below 1.
    """
    if letters < 3 or length < 3 or not hops or min(hops) < 1:
        raise ValueError(f"p-hop needs letters >= 3, length >= 3 and hops >= 1, not {letters}, {length}, {tuple(hops)}")
    steps = torch.randint(1, letters, (batch, length - 1), generator=generator)  # from letter to letter, never 0
    first = torch.randint(letters, (batch, 1), generator=generator)
    text = (first + steps.cumsum(1) - steps[:, :1]) % letters  # (B, T - 1)
    p = torch.as_tensor(hops)[torch.randint(len(hops), (batch,), generator=generator)]  # (B,)

    here = torch.arange(length - 1)
    before = here[1:] <= here[:, None]  # (T - 1, T - 2): position j can be jumped to from t if j <= t, and ...
    same = text[:, :, None] == text[:, None, :-1]  # ... if the letter before it is the one at t; (B, T - 1, T - 2)
    jump = torch.where(before & same, here[1:], 0).amax(2)  # the latest such j, (B, T - 1); 0: there is none
    at = here.expand_as(text)
    for done in range(max(hops)):  # from 0 every jump leads to 0
        at = torch.where((done < p)[:, None], jump.gather(1, at), at)
    said = torch.where(at > 0, text.gather(1, at), -100)
    x = torch.cat(((letters + p)[:, None], text), dim=1)
    return Task(x, torch.cat((torch.full_like(x[:, :1], -100), said), dim=1)), p


def permutations(batch: int, length: int, *, n: int = 5, generator: torch.Generator | None = None) -> Task:
    """The word problem of S_n: what the first 1, 2, ..., T of a sequence of permutations make when done in turn.

    Tokens are the n! permutations of n things, in lexicographic order. x: (B, T) drawn evenly; y: at position t the
    product of the first t + 1, the earliest done first. S5 is the smallest symmetric group that is not solvable.
    Raises ValueError unless 2 <= n <= 6.
    """
    if not 2 <= n <= 6:
        raise ValueError(f"n={n} must be from 2 to 6: the vocabulary has n! tokens, and their products n! squared")
    product = _products(n)
    x = torch.randint(len(product), (batch, length), generator=generator)
    y = x.clone()
    for t in range(1, length):
        y[:, t] = product[y[:, t - 1], x[:, t]]
    return Task(x, y)


@cache
def _products(n: int) -> Tensor:
    """(n!, n!): the number of "first i, then j", with permutations numbered in lexicographic order."""
    everything = torch.tensor(list(itertools.permutations(range(n))))  # (n!, n); thing k goes to place [i, k]
    weight = n ** torch.arange(n - 1, -1, -1)
    product = everything[:, everything]  # [j, i, k] = j(i(k)), (n!, n!, n)
    return torch.searchsorted(everything @ weight, (product @ weight).mT.contiguous())


def baselines(task: Task) -> dict[str, float]:
    """What two answers that need no thought would score: the commonest target, and the token just read.

    Shares of the scored positions, to be named beside every accuracy.
    """
    scored = task.y != -100
    answers = task.y[scored]
    return {
        "commonest": (answers.bincount().max() / len(answers)).item(),
        "repeat": (answers == task.x[scored]).double().mean().item(),
    }
