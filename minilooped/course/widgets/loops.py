"""The loop dial, and what a model would say after every loop."""

from collections.abc import Mapping, Sequence

import ipywidgets
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ...data import Tokenizer
from ...model import LoopedGPT
from ...science import probes
from ...science.probes import Dial
from .. import plots
from .controls import explorer


def loop_dial(dial: Sequence[Dial], trained: int) -> ipywidgets.VBox:
    """Turn the loop count of a trained model: the loss curve and a sample at each position.

    dial: what `probes.loop_dial` returned; trained: the loop count of training.
    """
    positions = {d.n_loop: d for d in dial}

    def draw(n_loop: int):
        ax = plots.loss_by_loops(list(positions), [d.loss for d in dial], trained, at=n_loop)
        plots.show(ax, f"Validation loss over the loop count; at {n_loop} loops {positions[n_loop].loss:.3f}.")
        print(positions[n_loop].text.strip())

    slider = ipywidgets.SelectionSlider(options=list(positions), value=trained, description="loops")
    return explorer(draw, height="540px", n_loop=slider)


READ = 20  # letters of a text, as many as a move has time for


@plots.in_style
def draw_loops(
    curves: Mapping[str, Tensor],
    models: Mapping[str, LoopedGPT],
    tokenizer: Tokenizer,
    curve: str,
    model: str,
    n_loop: int,
    text: str,
) -> None:
    """Left a recorded dial, turned to `n_loop`; right what one of the models says after each of so many loops.

    curves: (seeds, loops), the loss read out after each, by name. models: by name. The title has the loss, and how much
    it lies above the lowest. A text that is too long for the figure is cut; its last letter is only asked for.
    """
    means = {name: torch.as_tensor(values).mean(0) for name, values in curves.items()}
    losses, network = means[curve].tolist(), models[model]
    ids = torch.as_tensor(tokenizer.encode(text[: min(READ, network.config.block_size) + 1]))
    lens = probes.logit_lens(network, ids[:-1], ids[1:], n_loop)
    letters = [tokenizer.decode([token]) for token in ids.tolist()]
    said = [[tokenizer.decode([token]) for token in row] for row in lens.token.tolist()]
    best, here = losses.index(min(losses)), losses[n_loop - 1]
    title = (
        f"{curve}, read out after loop {n_loop}: {here:.3f} nats, {here - losses[best]:.3f} above loop {best + 1}\n"
        f"{model}, the text above: {(lens.rank[-1] == 1).float().mean():.0%} right"
    )
    dial, table = Figure(figsize=(11, 4.6)).subplots(1, 2, width_ratios=(2, 5))
    dial.plot(range(1, len(losses) + 1), losses, color=plots.LINE, marker="o", markersize=4)
    dial.plot([n_loop], [here], marker="s", markersize=11, color=plots.MARKED)
    dial.set(xlabel="loops at test time", ylabel="validation loss, nats", xticks=range(1, len(losses) + 1))
    every = torch.cat(list(means.values()))
    dial.set_ylim(every.min().item() - 0.03, every.max().item() + 0.03)  # one scale for every position
    plots.lens_table(said, lens.right.numpy(), letters[:-1], letters[1:], trained=network.config.n_loop, ax=table)
    dial.figure.suptitle(title, fontsize=11)
    plots.show(dial, f"Loss over the loops, and the likeliest letter after each loop. {title}.".replace("\n", "; "))


def loop_lens(
    curves: Mapping[str, Tensor],
    models: Mapping[str, LoopedGPT],
    tokenizer: Tokenizer,
    text: str = "To be, or not to be, that",
) -> ipywidgets.VBox:
    """Turn the loop count of recorded dials and of models at hand: `draw_loops`."""

    def draw(curve: str, model: str, n_loop: int, text: str):
        draw_loops(curves, models, tokenizer, curve, model, n_loop, text)

    n_loop = next(iter(models.values())).config.n_loop
    last = min(torch.as_tensor(values).shape[-1] for values in curves.values())
    return explorer(
        draw,
        height="500px",
        curve=ipywidgets.Dropdown(options=list(curves), description="recorded dial"),
        model=ipywidgets.Dropdown(options=list(models), description="your model"),
        n_loop=ipywidgets.IntSlider(min=1, max=last, value=n_loop, description="loops"),
        text=ipywidgets.Text(value=text, description="text"),
    )
