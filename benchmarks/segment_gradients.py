"""What a cut drops of the gradient, over training and over loops: python benchmarks/segment_gradients.py

The protocol was written down, and committed, before the runs.

Model and training are those of `ordinary` in segments.py: 1 block, ordinary backprop, AdamW, 100 batches of 9 windows;
the learning rate is 1e-2 for every model. H = 3, 6, 9, 12; seeds 1, 2, 3. After 1, 20, 40, 60, 80 and 100 steps, over
the first 18 windows of the validation text: the cosine with the gradient of ordinary backprop, and the ratio of the
norms, by part of the model, as `gradient_agreement` measures them. K = 3; at the end K = 1 and K = H too.

float32, one thread. About four minutes; a run that was stopped goes on where it was.
"""

from typing import Any

import torch
from segments import task

from minilooped.science.probes import gradient_agreement
from minilooped.science.records import RESULTS, record
from minilooped.science.sweep import Trial

STEPS, LR = (1, 20, 40, 60, 80, 100), 1e-2


def measure(n_loop: int, seed: int) -> dict[str, Any]:
    learner = task("ordinary", 100)
    windows = [torch.cat(part) for part in zip(*learner.windows[:2], strict=True)]  # (18, T) each
    found = []
    for step, (model, _) in enumerate(learner.training(Trial("loom", 1, n_loop, LR, seed)), start=1):
        for K in (3, *{1, n_loop} - {3}) if step == STEPS[-1] else (3,) if step in STEPS else ():
            ways = gradient_agreement(model, *windows, K)
            rounded = {
                way: {part: [round(value, 4) for value in pair] for part, pair in parts.items()}
                for way, parts in ways.items()
            }
            found.append(dict(step=step, K=K, ways=rounded))
    return dict(found=found)


def main() -> None:
    torch.set_num_threads(1)
    runs = [dict(n_loop=n, seed=seed) for seed in (1, 2, 3) for n in (3, 6, 9, 12)]
    settings = dict(lr=LR, steps=STEPS, parts="cosine, and the norm over that of ordinary backprop")
    record(RESULTS / "segment_gradients.json", settings, runs, measure)


if __name__ == "__main__":
    main()
