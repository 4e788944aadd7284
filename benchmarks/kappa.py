"""How far the visits of a loop agree once it has learned something, for chapter 6: python benchmarks/kappa.py

The protocol was written down, and committed, before the runs. It first had 60 steps; they became 40, for time, before
any run. kappa_8 of seed 1 was known then.

Model. As in benchmarks/deeploop.py: a character-level language model on the embedded plays, K = 2 blocks, width 64, a
head of its own, the embedding normed. R = 2, 4, 8, 16 rounds.
Training. 40 steps of 8 windows at the learning rate 0.008 for every rule and R. 6 steps of warm-up, flat, the last 20
steps down in a line to a tenth. bfloat16 products, float32 weights, one thread. Seeds 1, 2, 3.
Measured, before training and after 10, 20 and 40 steps: `probes.kappa` on the first four windows of the validation
split, in float32.

Questions. What is gamma in kappa_R ~ R^gamma before training, and what after it? Is p >= (1 + gamma) / 4 then still
DeepLoop's 1/2, DeepNorm's 1/4, or between them? gamma is the slope of log kappa on log R, seed by seed, reported with
its interval over seeds (`toy.fit_exponent`): by Student's t; two standard errors before the runs and for a while after
them. About three minutes of one core; what was run already is not run again.
"""

from dataclasses import asdict, replace
from itertools import product

import torch

from minilooped.model import LoopedConfig
from minilooped.science import probes
from minilooped.science.records import RESULTS, record
from minilooped.science.sweep import LanguageModel, Trial
from minilooped.train import TrainConfig

RULES, R_ALL, SEEDS, LR = ("none", "factored", "deepnorm", "deeploop"), (2, 4, 8, 16), (1, 2, 3), 8e-3
MEASURED_AT = (0, 10, 20, 40)  # steps
TASK = LanguageModel(
    LoopedConfig(block_size=64, n_head=4, n_embd=64, init_std=64**-0.5, l_ref=2, embed_norm=True, tie_embeddings=False),
    TrainConfig(
        max_steps=40,
        batch_size=8,
        schedule="wsd",
        warmup_steps=6,
        decay_steps=20,
        weight_decay=0.1,
        dtype="bfloat16",
        threads=1,
    ),
)


def measure(rule: str, R: int, seed: int) -> dict[str, list[float]]:
    text = TASK.windows[0][0][:4]  # (4, T)
    config = replace(TASK.model, rule=rule, n_layer=2, n_loop=R, vocab_size=TASK.corpus.tokenizer.vocab_size)
    found = [probes.kappa(probes.fresh(config, seed, (1, 1))[0], text)]
    for step, (model, _) in enumerate(TASK.training(Trial(rule, 2, R, LR, seed)), start=1):
        if step in MEASURED_AT:
            found.append(probes.kappa(model, text))
    return dict(kappa=found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    settings = dict(model=asdict(TASK.model), train=asdict(TASK.train), lr=LR, steps=MEASURED_AT)
    runs = [dict(rule=rule, R=R, seed=seed) for seed, rule, R in product(SEEDS, RULES, R_ALL)]
    record(RESULTS / "kappa.json", settings, runs, measure)
