"""Does one learning rate serve every depth, and what do the loops gain? python benchmarks/transfer.py {losses,rates}

Each study's protocol stands here, and was committed, before its runs. A study that was stopped goes on where it was.

All studies. A character-level language model on the embedded plays, of the default preset's shape: width 128, 4 heads,
windows of 64 characters, SwiGLU, RMS norm of queries and keys, init_std = width^(-1/2), 2 blocks unless a study says
otherwise. Steps of 12 windows, 30 of warm-up, then down in a line to 0. AdamW (0.9, 0.95), weight decay 0.1, clipping
at 1, and the factors that a rule puts on the learning rate. bfloat16 products, float32 weights, one thread.
Loss. Cross-entropy in nats per character over the whole validation split.
Seeds set weights and batches: arms with one seed see the same batches, and are compared seed by seed. Intervals are
those of 95 % by Student's t.

losses. Which loss does each rule reach, each at its own learning rate?
    Arms      `none`, `sqrt` and `inverse` at N = 8 and 4, and N = 1, where the three are one model. Tied embeddings and
              no embedding norm, so that R_0 = 0.09. 1,500 steps.
    Rate      Of each arm its own: seed 0, factors of √2 from 0.004, downhill until both neighbours are worse.
    Seeds     1 to 5 are counted.
    Questions At N = 8 and at N = 4, how far does `inverse` end below `sqrt` (published: 0.025 nats at 12 layers in 8
              loops) and below `none`? How far does each rule at 8 loops end below one loop? Of the trained models of
              `inverse` and `none`: the mean cosine between the increments of loops 1 to N - 1, and the mean cosine of
              the last loop's increment with these (published at N = 8: mostly 0.3 to 0.6; near 0 or negative); the
              norm of the stream behind the last loop at N = 8 over that at N = 1 (published: about equal). Both are
              taken on the first 12 windows of the validation split.
    Expected  A pilot of one seed and 800 steps had `sqrt` less `inverse` 0.022 and `none` less `inverse` 0.031 at
              N = 8. Seeds differed by 0.004: five of them would show 0.007.

rates. Does the best learning rate stay over loops?
    Arms      `none`, `sqrt` and `inverse` at N = 1, 8 and 32: one block, with an embedding norm, so that R_0 = 1, and
              an untied head. 800 steps.
    Rate      0.004 to 0.016 by factors of √2.
    Seeds     1 to 3.
    Questions What does it cost a model of 8 or 32 loops to keep the best learning rate of one loop, or of 8? How many
              octaves does the best one move? (Published, of 12 blocks in up to 8 loops: it falls under `sqrt`, and
              stays under `inverse`.)
    Expected  A pilot of one seed at 0.002, 0.004 and 0.008: 1.930, 1.875, 1.870 at one loop; at 32 loops 1.873, 1.861,
              1.862 for `none` and 1.914, 1.858, 1.838 for `inverse`. So the best one of `none` falls by about 0.2
              octaves, and that of `inverse` rises. Either would cost less than 0.01 nats, and three seeds would show
              about as much. A drift that costs more is what these runs can find or exclude.
"""

import math
from dataclasses import asdict, replace
from typing import Any

import torch
import tyro

from minilooped.presets import SHAKESPEARE
from minilooped.science import probes
from minilooped.science.records import RESULTS, record, runs
from minilooped.science.sweep import LanguageModel, Trial, grid, sweep, tuned
from minilooped.train import TrainConfig, evaluate

LRS = [float(f"{1e-3 * 2 ** (k / 2):.3g}") for k in range(11)]  # 0.001 to 0.032 by factors of √2


def training(steps: int, **changes: Any) -> TrainConfig:
    shared = dict(optimizer="adamw", weight_decay=0.1, dtype="bfloat16", warmup_steps=30)
    return replace(SHAKESPEARE.train, max_steps=steps, decay_steps=steps - 30, **shared | changes)


# -- losses ------------------------------------------------------------------------------------------------------------

LOSSES = LanguageModel(SHAKESPEARE.model, training(1500), eval_every_nth=1)
ARMS = [("none", 1), *((rule, N) for N in (8, 4) for rule in ("inverse", "none", "sqrt"))]


def trained(rule: str, n_loop: int, lr: float, seed: int) -> dict[str, Any]:
    """The validation loss of a run, and what its trained model's loops add to the stream."""
    try:
        model = LOSSES.trained(Trial(rule, LOSSES.model.n_layer, n_loop, lr, seed))
        seen = probes.visits(model, LOSSES.windows[0][0])
    except FloatingPointError:
        return dict(val_loss=math.inf, start=None, stream=None, loop_cosines=None)
    return dict(
        val_loss=round(evaluate(model, LOSSES.windows), 5),
        start=round(seen.start, 4),
        stream=[round(norm, 4) for norm in seen.stream[:, -1].tolist()],  # RMS behind each loop, (N,)
        loop_cosines=[[round(cosine, 3) for cosine in row] for row in seen.loop_cosines.tolist()],  # (N, N)
    )


def loss_of(rule: str, n_loop: int, lr: float, seed: int) -> float:
    """Of a run that is made now, if it is not recorded yet."""
    path, run = RESULTS / "transfer_losses.json", dict(rule=rule, n_loop=n_loop, lr=lr, seed=seed)
    settings = dict(model=asdict(LOSSES.model), training=asdict(LOSSES.train))
    record(path, settings, [run], trained, made_by="python benchmarks/transfer.py losses")
    return runs(path, "val_loss", **run)["val_loss"].item()


def losses() -> None:
    for arms in (ARMS[:4], ARMS[4:]):  # one loop and eight first
        rates = [tuned(lambda lr, arm=arm: loss_of(*arm, lr, seed=0), LRS, 4e-3) for arm in arms]
        for seed in range(1, 6):
            for arm, rate in zip(arms, rates, strict=True):
                loss_of(*arm, rate, seed)


# -- rates -------------------------------------------------------------------------------------------------------------

ONE_BLOCK = replace(SHAKESPEARE.model, n_layer=1, embed_norm=True, tie_embeddings=False)


def rates() -> None:
    task = LanguageModel(ONE_BLOCK, training(800), eval_every_nth=1)
    trials = grid(["none", "inverse", "sqrt"], [1], [1, 8, 32], LRS[4:9], (1, 2, 3))
    sweep(trials, task, RESULTS / "transfer_rates.csv", made_by="python benchmarks/transfer.py rates")


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.extras.subcommand_cli_from_dict({study.__name__: study for study in (losses, rates)})
