"""A text as a training and a validation split of token ids, and the batches that are drawn from them.

A :class:`Corpus` is a training and a validation split of one text as token ids, with the tokenizer that made them. The
embedded one (nine plays by Shakespeare) is tokenized in memory; :func:`prepare` turns any text file into token files;
data sets that do not fit in memory are made by streaming.py. :class:`BatchStream` draws random windows to train on,
:func:`eval_windows` walks over a whole split once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..files import refuse_links
from .storage import MANIFEST, ShardedTokens, read_shards, read_tokens, storage_dtype, write_tokens
from .tokenizers import Tokenizer, embedded, make_tokenizer

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
