"""What a process needs for a batch, over the loops: python benchmarks/segment_memory.py

The protocol was written down before the runs.

Model. Chapter 9's: every part of LOOM, 1 block, width 64, 8 experts of which a token visits 2, windows of 64 tokens.
Untrained, random tokens, batches of 36 windows: four of the chapter's, so that what is held is large beside what
a process takes anyway.
Ways. Ordinary backprop; 3 loops in a segment; a checkpoint at every loop; both. H = 3, 6, 9, 12.

Recorded are the most bytes that autograd holds, by count, without the one loop that a checkpoint runs again; and the
most resident memory that the batch adds to a fresh process (`peak_memory`: VmHWM of Linux). Each pair in three
processes, for the spread. float32, one thread, on a machine with an AMD EPYC. About five minutes; a run that was
stopped goes on where it was.
"""

from dataclasses import asdict, replace

import torch
from segments import MODEL

from minilooped.science import probes
from minilooped.science.records import RESULTS, record

CONFIG, WINDOWS, SEGMENT = replace(MODEL, vocab_size=65), 36, 3
# By way: the loops in a segment, and whether each loop is run again.
WAYS = {
    "ordinary backprop": (None, False),
    "segments": (SEGMENT, False),
    "checkpoints": (None, True),
    "segments and checkpoints": (SEGMENT, True),
}


def measure(way: str, n_loop: int, repeat: int) -> dict[str, int | None]:
    segment, checkpoints = WAYS[way]
    config = replace(CONFIG, n_loop=n_loop, segment=segment, recompute_loops=checkpoints)
    model, tokens = probes.fresh(config, 0, (WINDOWS, config.block_size + 1))
    held = probes.batch_bytes(model.eval(), tokens[:, :-1], tokens[:, 1:])
    return dict(held=held, peak=probes.peak_memory(config, WINDOWS))


def main() -> None:
    torch.set_num_threads(1)
    runs = [dict(way=way, n_loop=n, repeat=repeat) for repeat in (1, 2, 3) for n in (3, 6, 9, 12) for way in WAYS]
    settings = dict(model=asdict(CONFIG), windows=WINDOWS, ways=WAYS)
    record(RESULTS / "segment_memory.json", settings, runs, measure)


if __name__ == "__main__":
    main()
