"""What training would hold, at every position of the planner: python benchmarks/memory.py

`plan.memory` of GPT-2-sized presets, each with every setting of the planner in `widgets.PLANNED`, at one loop and
two, with `recompute_loops` at three too; `plan.at_loops` has every further number of loops from these. No GPU, no data
and little memory are needed; it takes about three minutes of CPU time, and goes on where it was stopped.
"""

from dataclasses import asdict, replace
from itertools import product

import torch

from minilooped.course.widgets import PLANNED
from minilooped.presets import PRESETS
from minilooped.science.records import RESULTS, record
from minilooped.tools.plan import memory


def measure(preset: str, n_loop: int, **setting: int | bool | None) -> dict[str, int]:
    model, training = PRESETS[preset]
    training = replace(training, batch_size=setting.pop("batch_size"))
    return asdict(memory(replace(model, n_loop=n_loop, **setting), training))


def main() -> None:
    torch.set_num_threads(1)
    runs = [dict(zip((*PLANNED, "n_loop"), setting, strict=True)) for setting in product(*PLANNED.values(), (1, 2, 3))]
    runs = [run for run in runs if run["n_loop"] < 3 or run["recompute_loops"]]
    settings = {
        preset: {name: asdict(part) for name, part in PRESETS[preset]._asdict().items()} for preset in PLANNED["preset"]
    }
    record(RESULTS / "memory.json", settings, runs, measure)


if __name__ == "__main__":
    main()
