"""Corpora and batches: windows of the right tokens, exact resume, exact coverage, and every message."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minilooped import data
from minilooped.data import BatchStream, CharTokenizer, eval_windows
from minilooped.data.storage import ShardedTokens, write_splits, write_tokens

# ---------------------------------------------------------------------------------------------------------------------
# Corpora


@pytest.mark.parametrize("name", ["char", "gpt2"])
def test_embedded_corpus_is_cut_by_position(name):
    shakespeare = data.embedded("shakespeare.txt").read_text(encoding="utf-8")
    corpus = data.load_corpus(tokenizer=name)
    assert corpus.name == "shakespeare" and corpus.tokenizer.name == name
    train, val = corpus.tokenizer.decode(corpus.train), corpus.tokenizer.decode(corpus.val)
    assert train + val == shakespeare
    assert len(val) == round(0.1 * len(shakespeare))


def test_load_corpus_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no data at .*nowhere: use 'shakespeare'.*minilooped prepare FILE"):
        data.load_corpus(tmp_path / "nowhere")
    book = tmp_path / "book.txt"
    book.write_text("abc" * 20, encoding="utf-8")
    with pytest.raises(ValueError, match="is a file, not prepared data: run `minilooped prepare .*book.txt`"):
        data.load_corpus(book)
    folder = data.prepare(book, tmp_path / "out")
    with pytest.raises(ValueError, match="train.bin is a file, not prepared data: use its folder, .*out$"):
        data.load_corpus(folder / "train.bin")
    with pytest.raises(ValueError, match="prepared with the tokenizer 'char', not 'gpt2': leave .*in another folder"):
        data.load_corpus(folder, tokenizer="gpt2")
    for name in ("val.bin", "val.json"):
        (folder / name).unlink()
    other = CharTokenizer("abcd")
    write_tokens(folder / "val.bin", other.encode("abcd"), other)
    with pytest.raises(ValueError, match="train.bin and val.bin differ"):
        data.load_corpus(folder)
    (folder / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match="val.bin is missing.*minilooped prepare FILE"):
        data.load_corpus(folder)


def test_a_wrong_folder_is_refused_for_what_it_is_and_not_searched(tmp_path, monkeypatch):
    """A home folder, say: large, and full of links."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "link").symlink_to("/etc")
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(FileNotFoundError, match="no prepared data in .*, which has neither train.bin nor shards.json"):
        data.load_corpus(tmp_path)
    ids = CharTokenizer("ab").encode("abab")
    write_splits(tmp_path, {"train": ids, "val": ids}, CharTokenizer("ab"))
    monkeypatch.setattr(Path, "rglob", None)
    assert len(data.load_corpus(tmp_path).train) == 4, "links that are no part of the data do no harm"


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path):
    """In a stranger's folder it could show any file of this machine."""
    (tmp_path / "text.txt").write_text("a text " * 50, encoding="utf-8")
    folder = data.prepare(tmp_path / "text.txt", tmp_path / "tokens")
    for name in ("train.bin", "train.json", "val.bin", "val.json"):
        (folder / name).rename(tmp_path / "secret")
        (folder / name).symlink_to("../secret")
        with pytest.raises(ValueError, match=f"{name} is a link that leads out of .*: put the file itself there"):
            data.load_corpus(folder)
        (folder / name).unlink()
        (tmp_path / "secret").rename(folder / "inside")
        (folder / name).symlink_to("inside")
        (tmp_path / "alias").symlink_to(folder)
        data.load_corpus(tmp_path / "alias")  # a link that the user made, and one that stays inside
        (tmp_path / "alias").unlink()
        (folder / name).unlink()
        (folder / "inside").rename(folder / name)


# ---------------------------------------------------------------------------------------------------------------------
# Batches

TOKENS = np.arange(1000, dtype=np.uint16)  # each token is its own position


def test_batches_are_windows_and_targets_are_one_ahead():
    x, y = next(BatchStream(TOKENS, batch_size=5, block_size=7, seed=0))
    assert x.shape == y.shape == (5, 7) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(7))


def test_every_window_can_be_drawn():
    stream = BatchStream(TOKENS[:10], batch_size=64, block_size=7, seed=0)
    assert {row[0].item() for row in next(stream)[0]} == {0, 1, 2}


def test_batches_depend_on_the_seed_alone():
    def first(seed):
        return next(BatchStream(TOKENS, batch_size=4, block_size=8, seed=seed))[0]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(first(3), first(3)) and not torch.equal(first(3), first(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_stream_resumes_exactly(tmp_path):
    straight = BatchStream(TOKENS, batch_size=4, block_size=8, seed=1)
    for _ in range(5):
        next(straight)
    torch.save(straight.state_dict(), tmp_path / "stream.pt")
    resumed = BatchStream(TOKENS, batch_size=4, block_size=8, seed=2)
    resumed.load_state_dict(torch.load(tmp_path / "stream.pt", weights_only=True))
    for (x, y), (x_again, y_again), _ in zip(straight, resumed, range(5), strict=False):
        assert torch.equal(x, x_again) and torch.equal(y, y_again)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_together_see_the_batch_of_one_process(world_size):
    one = BatchStream(TOKENS, batch_size=6, block_size=8, seed=0)
    ranks = [BatchStream(TOKENS, 6, 8, 0, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(3):
        x, y = next(one)
        for rank, stream in enumerate(ranks):
            x_rank, y_rank = next(stream)
            assert torch.equal(x_rank, x[rank::world_size]) and torch.equal(y_rank, y[rank::world_size])


@pytest.mark.parametrize("block_size", [1, 7, 31, 200])
def test_windows_are_the_same_over_the_borders_of_shards(block_size):
    parts = np.split(TOKENS, [1, 2, 40, 41, 333, 700])
    sharded = ShardedTokens(parts, "hash")
    streams = [BatchStream(tokens, batch_size=16, block_size=block_size, seed=3) for tokens in (sharded, TOKENS)]
    walks = [eval_windows(tokens, block_size, batch_size=3) for tokens in (sharded, TOKENS)]
    for pairs in (zip(*streams, range(20), strict=False), zip(*walks, strict=True)):
        for (x, y), (x_one, y_one), *_ in pairs:
            assert torch.equal(x, x_one) and torch.equal(y, y_one)


def by_fancy_index(parts: list[np.ndarray], starts: np.ndarray, length: int) -> np.ndarray:
    """Windows, (B, length), from arrays in a row, each of its tokens by its own index: as it was done once."""
    index, ends = starts[:, None] + np.arange(length), np.cumsum([len(part) for part in parts])
    ids, of_part = np.empty(index.shape, parts[0].dtype), np.searchsorted(ends, index, side="right")
    for number in np.unique(of_part):
        here = of_part == number
        ids[here] = parts[number][index[here] - (ends[number] - len(parts[number]))]
    return ids


def test_a_large_step_from_shards_takes_a_fraction_of_the_time_that_indices_take():
    """480 windows of 1,025 tokens from ten shards. A ratio, since machines differ; it is about 15."""
    parts = [np.arange(10**6, dtype="<u2") for _ in range(10)]
    stream = BatchStream(ShardedTokens(parts, "hash"), batch_size=480, block_size=1024, seed=0)
    starts = torch.randint(10**7 - 1024, (480,), generator=torch.Generator().manual_seed(0)).numpy()
    rows = by_fancy_index(parts, starts, 1025)
    x, y = next(stream)
    assert np.array_equal(x.numpy(), rows[:, :-1]) and np.array_equal(y.numpy(), rows[:, 1:])

    def seconds(work) -> float:
        times = []
        for _ in range(5):
            begun = time.process_time()
            work()
            times.append(time.process_time() - begun)
        return min(times)

    assert seconds(lambda: next(stream)) < seconds(lambda: by_fancy_index(parts, starts, 1025)) / 3


def test_stream_errors():
    with pytest.raises(ValueError, match="block_size . 1 = 1001 tokens, but the text has 1000"):
        BatchStream(TOKENS, batch_size=1, block_size=1000, seed=0)
    assert next(BatchStream(TOKENS, batch_size=1, block_size=999, seed=0))[1][0, -1] == 999
    for sizes in ((0, 8), (4, 0)):
        with pytest.raises(ValueError, match="batch_size and block_size have to be 1 or more"):
            BatchStream(TOKENS, *sizes, seed=0)
    for rank, world_size in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"batch_size 4 can't be shared equally by {world_size} processes"):
            BatchStream(TOKENS, 4, 8, 0, rank=rank, world_size=world_size)


@given(count=st.integers(2, 200), block_size=st.integers(1, 40), batch_size=st.integers(1, 9))
def test_evaluation_meets_every_target_once_and_in_order(count, block_size, batch_size):
    batches = list(eval_windows(TOKENS[:count], block_size, batch_size))
    assert torch.cat([x.flatten() for x, _ in batches]).tolist() == list(range(count - 1))
    assert torch.cat([y.flatten() for _, y in batches]).tolist() == list(range(1, count))
    assert all(x.shape[0] <= batch_size and x.shape[1] <= block_size for x, _ in batches)
    assert all(x.shape[1] == block_size for x, _ in batches[:-1])


def test_evaluation_needs_a_target():
    with pytest.raises(ValueError, match="the split has 1 tokens, but an evaluation needs 2 or more"):
        next(eval_windows(TOKENS[:1], block_size=8, batch_size=2))
