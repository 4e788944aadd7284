"""Do loops catch up with layers if they train longer? python benchmarks/p_hop_long.py

One arm that p_hop.py lacks, added after its first seed: there 2 x 3 ended between 2 x 1 and 6 x 1, its curve still
rising. All as in p_hop.py, with the steps of its arm `2 x 1, long`:

    2 x 3, long    two blocks in three loops, 1800 steps instead of 600

Seeds 1 and 2; seed 3 was added when they had been seen. About four minutes of one core; a run that was stopped goes on
where it was.
"""

from dataclasses import asdict, replace

import torch
from p_hop import ARMS, LOOPED, TRAIN, measure

from minilooped.science.records import RESULTS, record

ARM = "2 x 3, long"
ARMS[ARM] = LOOPED, replace(TRAIN, max_steps=1800, decay_steps=600)

if __name__ == "__main__":
    torch.set_num_threads(1)
    model, train = map(asdict, ARMS[ARM])
    runs = [dict(arm=ARM, seed=seed) for seed in (1, 2, 3)]
    record(RESULTS / "p_hop_long.json", dict(model=model, train=train), runs, measure)
