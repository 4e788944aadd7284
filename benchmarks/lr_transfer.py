"""The learning-rate sweeps of chapter 5: python benchmarks/lr_transfer.py {language_model,many_loops,regression}

The protocol of the language model was written down, and committed, before the sweep was run. Nothing in it was changed
to suit a result.

Model. A character-level language model on the embedded plays: width 64, 4 heads, windows of 64 characters, SwiGLU, tied
embeddings, init_std = width^(-1/2), no embedding norm (so R_0 = 1/8).
Training. 150 steps of 32 windows. AdamW (0.9, 0.95), weight decay 0.1, clipping at 1. 15 steps of warm-up, flat, the
last 50 steps down in a line to a tenth. bfloat16 products, float32 weights, one thread.
Loss. Cross-entropy in nats per character over every fourth window of the validation split, in float32.
Grid. Learning rates 2, 4, 8, ..., 64 thousandths; the range was chosen with another seed at N = 1 and 8, so that the
optimum lies inside. Seeds 1, 2, 3.

1. Loops: rules `inverse`, `sqrt` and `none`, L = 2, N = 1, 2, 4, 8. At N = 1 the three are one model.
   Question: does the best learning rate at N = 8 differ from that at N = 1? By Theorem 2 of arXiv 2606.18524 the change
   of the output is of order lr * eps * N: the same for every N under `inverse`, growing under the other two.
2. Layers: `factored` with l_ref = 2, N = 2, L = 2, 4, 8, with and without its factor (L/l_ref)^(-1/2) on learning rate
   and Adam's epsilon. Question: does the factor keep the best learning rate where it was at L = 2?

Reported are the best losses, and the shift of the best learning rate in octaves: of the curve that is the mean over
seeds, and the least and the most of the three seeds. A shift of less than half an octave is below what a grid of
factors of two can tell from none. About an hour; a sweep that was stopped goes on where it was.

Many loops: the same model and training, with one block and R_0 = 1 (`embed_norm`), as in the toy. Rules
`inverse`, `sqrt` and `none`, N = 1, 8, 32, learning rates 4, 8, ..., 64 thousandths, seeds 1, 2, 3, reported as above.
Loop counts and learning rates were chosen after a look at seed 9, N = 1 and 32, `none` and `inverse`; after that
nothing was changed. Forty minutes. Afterwards, since 1/N had kept the learning rate and not the loss, `inverse` with
four in the place of one, 4/N: N = 8 and 32, learning rates 4 to 32 thousandths, seeds 2, 3, 4. The four was chosen by a
look at seed 1, at no other constant.

The regression is `sweep.Regression` with one block, N = 1, 2, 4, 8, 16, the same three rules and learning rates, and
four seeds: a few minutes. Its decaying learning rate was chosen after a look at constant ones, whose last losses are
mostly noise: there the best learning rate of every rule jumps by an octave or two from seed to seed.
"""

from dataclasses import replace

import torch
import tyro

from minilooped.model import RULES, LoopedConfig
from minilooped.science.records import RESULTS
from minilooped.science.sweep import LanguageModel, Regression, grid, sweep
from minilooped.train import TrainConfig

LRS, SEEDS = [2e-3 * 2**k for k in range(6)], (1, 2, 3)
WITHOUT_LR_FACTOR, FOUR_OVER_N = "factored, one learning rate", "inverse, lambda = 4"
TASK = LanguageModel(
    LoopedConfig(block_size=64, n_head=4, n_embd=64, init_std=64**-0.5, l_ref=2),
    TrainConfig(
        max_steps=150,
        batch_size=32,
        schedule="wsd",
        warmup_steps=15,
        decay_steps=50,
        weight_decay=0.1,
        dtype="bfloat16",
        threads=1,
    ),
)

RULES[FOUR_OVER_N] = lambda c: replace(RULES["inverse"](c), branch=4 / c.n_loop)
RULES[WITHOUT_LR_FACTOR] = lambda c: replace(RULES["factored"](c), lr_factor=1.0, eps_factor=1.0)


def language_model() -> None:
    trials = grid(["inverse", "sqrt", "none"], [2], [1, 2, 4, 8], LRS, SEEDS)
    trials += grid(["factored", WITHOUT_LR_FACTOR], [2, 4, 8], [2], LRS, SEEDS)
    sweep(trials, TASK, RESULTS / "lr_transfer.csv", made_by="python benchmarks/lr_transfer.py language_model")


def many_loops() -> None:
    trials = grid(["inverse", "sqrt", "none"], [1], [1, 32, 8], LRS[1:], SEEDS)
    trials += grid([FOUR_OVER_N], [1], [8, 32], LRS[1:5], (2, 3, 4))
    task = replace(TASK, model=replace(TASK.model, embed_norm=True))
    sweep(trials, task, RESULTS / "lr_transfer_many.csv", made_by="python benchmarks/lr_transfer.py many_loops")


def regression() -> None:
    trials = grid(["inverse", "sqrt", "none"], [1], [1, 2, 4, 8, 16], LRS, (1, 2, 3, 4))
    made_by = "python benchmarks/lr_transfer.py regression"
    sweep(trials, Regression(), RESULTS / "lr_transfer_regression.csv", made_by=made_by)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sweeps = (language_model, many_loops, regression)
    tyro.extras.subcommand_cli_from_dict({sweep.__name__: sweep for sweep in sweeps})
