"""What loss to expect, and after how many steps: python benchmarks/expected_loss.py

Three seeds: 1337, which `minilooped train` takes when none is given, 1 and 2.

The two presets for a laptop are trained as they are. A run here makes the steps of `minilooped train --preset NAME
--seed SEED`. Recorded is the validation loss over every eighth window, in float32, before the training and after some
of its steps, and the training's CPU time. One thread; matrix products in bfloat16 where the CPU has it, as the trainer
does it.

Of the presets for a GPU this can say the loss before the first step only, on 512 tokens of the embedded plays: an
untrained model is about as unsure of any text.

About sixteen minutes of CPU time; a run that was stopped goes on where it was.
"""

import time
from dataclasses import asdict, replace

import torch

from minilooped.model import LoopedGPT
from minilooped.presets import PRESETS
from minilooped.science.records import RESULTS, record
from minilooped.science.sweep import LanguageModel, Trial
from minilooped.train import evaluate

SEEDS, STEPS = (1337, 1, 2), (50, 100, 250, 500, 800, 1500, 2200)
LAPTOP = ("shakespeare", "shakespeare-moe")
FIRST_BATCH_ONLY = 10**9  # of the windows, so many apart


def task_of(preset: str) -> LanguageModel:
    model, training = PRESETS[preset]
    training = replace(training, device="auto")  # as recorded
    if preset in LAPTOP:
        return LanguageModel(model, training, 8)
    return LanguageModel(replace(model, block_size=128), replace(training, batch_size=4), FIRST_BATCH_ONLY)


def measure(preset: str, seed: int) -> dict[str, dict[int, float] | float]:
    task, seconds = task_of(preset), 0.0
    model = task.model
    torch.manual_seed(seed)
    untrained = LoopedGPT(replace(model, vocab_size=task.corpus.tokenizer.vocab_size))
    losses = {0: round(evaluate(untrained, task.windows), 4)}
    if preset not in LAPTOP:
        return dict(losses=losses, cpu_seconds=seconds)
    trial = Trial(model.rule, model.n_layer, model.n_loop, task.train.lr, seed)
    began = time.process_time()
    for step, (trained, _) in enumerate(task.training(trial), start=1):
        if step in STEPS:
            seconds += time.process_time() - began
            losses[step] = round(evaluate(trained, task.windows), 4)
            began = time.process_time()
    return dict(losses=losses, cpu_seconds=round(seconds, 1))


def main() -> None:
    torch.set_num_threads(1)
    presets = [name for name in PRESETS if name not in LAPTOP] + list(LAPTOP)
    runs = [dict(preset=preset, seed=seed) for seed in SEEDS for preset in presets]
    record(RESULTS / "expected_loss.json", {name: asdict(task_of(name)) for name in presets}, runs, measure)


if __name__ == "__main__":
    main()
