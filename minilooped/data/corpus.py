"""A text as a training and a validation split of token ids, and the batches that are drawn from them.

A :class:`Corpus` is a training and a validation split of one text as token ids, with the tokenizer that made them.
:func:`load_corpus` opens what texts.py or streaming.py prepared, or tokenizes the embedded text (nine plays by
Shakespeare). :class:`BatchStream` draws random windows to train on. :func:`eval_windows` walks over a whole split once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..files import refuse_links
from .storage import MANIFEST, Tokens, prepared_files, read_shards, read_splits
from .texts import tokenize_splits
from .tokenizers import Tokenizer, embedded

# ---------------------------------------------------------------------------------------------------------------------
# Corpora


@dataclass(frozen=True)
class Corpus:
    """A text, split by position: ids of the first part to train on, shape (T,), and of the last to validate on."""

    name: str
    train: Tokens
    val: np.ndarray
    tokenizer: Tokenizer


def load_corpus(data: str | Path = "shakespeare", tokenizer: str | None = None) -> Corpus:
    """The embedded text (``"shakespeare"``), or a folder that ``minilooped prepare`` made.

    `tokenizer` None is ``"char"`` for the embedded text, and for a folder the one that it was prepared with.
    ``FileNotFoundError`` or ``ValueError`` if there is no prepared data, or it is damaged or unfinished.
    """
    if str(data) == "shakespeare":
        text = embedded("shakespeare.txt").read_text(encoding="utf-8")
        return Corpus("shakespeare", *tokenize_splits([text], tokenizer or "char", val_fraction=0.1))
    folder = Path(data)
    if folder.is_file():
        ours = folder.name in prepared_files(folder.parent)
        advice = f"use its folder, {folder.parent}" if ours else f"run `minilooped prepare {folder}` and use its folder"
        raise ValueError(f"{folder} is a file, not prepared data: {advice}")
    use = "use 'shakespeare', which is built in, or a folder made by `minilooped prepare FILE`"
    if not folder.is_dir():
        raise FileNotFoundError(f"no data at {folder}: {use}")
    if not (files := prepared_files(folder)):
        raise FileNotFoundError(f"no prepared data in {folder}, which has neither train.bin nor {MANIFEST}: {use}")
    refuse_links(folder, files)  # of these alone: the folder may be large
    train: Tokens
    train, val, own = read_shards(folder) if MANIFEST in files else read_splits(folder)
    if tokenizer not in (None, own.name):
        raise ValueError(
            f"{folder} was prepared with the tokenizer {own.name!r}, not {tokenizer!r}: leave the tokenizer out, or "
            f"prepare the text with {tokenizer!r} in another folder"
        )
    return Corpus(folder.resolve().name, train, val, own)


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class BatchStream:
    """An endless stream of random windows: ``x, y = next(stream)``, both int64 of shape (B, T), y one token ahead.

    The stream draws from its own generator, so its batches depend on `seed` alone, and a stream that loads another's
    :meth:`state_dict` goes on exactly where that one stood. With several processes, `batch_size` is still that of the
    whole batch: each rank takes every `world_size`-th row, so that together they see the batch of a single process.
    """

    def __init__(
        self, tokens: Tokens, batch_size: int, block_size: int, seed: int, *, rank: int = 0, world_size: int = 1
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


def eval_windows(tokens: Tokens, block_size: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
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


def _windows(tokens: Tokens, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (B, T): T = `length` tokens from each of the B starts, and the same one token later."""
    rows = np.empty((len(starts), length + 1), tokens.dtype)  # (B, T + 1)
    for row, start in zip(rows, starts.tolist(), strict=True):
        row[:] = tokens[
            start : start + length + 1
        ]  # a slice for each: an index for every token takes ten times as long
    return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))
