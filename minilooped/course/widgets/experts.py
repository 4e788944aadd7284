"""Which experts a sentence meets."""

from collections.abc import Mapping

import ipywidgets
import torch

from ...data import Tokenizer
from ...model import LoopedGPT
from ...science import probes
from .. import plots
from .controls import explorer

SHOWN = 24  # characters of a sentence, as many as a figure has room for


def draw_router_map(
    models: Mapping[str, LoopedGPT], tokenizer: Tokenizer, model: str, text: str, layer: int = 1
) -> None:
    """Which experts each token of a text meets at each loop, in one layer (counted from 1) of one of the models.

    The title says how many of its experts a token keeps from one loop to the next, and how many it meets in all, with
    chance levels. A text that is too long for the figure is cut.
    """
    config = models[model].config
    idx = torch.as_tensor(tokenizer.encode(text[: min(SHOWN, config.block_size)]))[None]  # (1, T)
    choices, _ = probes.routing(models[model], idx)  # (N, L, 1, T, k)
    E, k = config.n_expert, config.top_k
    overlap = probes.expert_overlap(choices, E)[..., layer - 1]  # (N, N)
    chosen = choices[:, layer - 1, 0]  # (N, T, k)
    met = [len(of_token.unique()) for of_token in chosen.unbind(1)]  # T numbers
    title = (
        f"{model}, layer {layer}: {overlap.diagonal(1).mean():.0%} kept from loop to loop (chance {k / E:.0%}); "
        f"{sum(met) / len(met):.1f} different ones met ({k} to {E}, chance "
        f"{probes.distinct_by_chance(E, k, config.n_loop):.1f})"
    )
    ax = plots.router_map([tokenizer.decode([token]) for token in idx[0].tolist()], chosen.numpy(), E, title=title)
    plots.show(ax, f"Experts of each character of {text!r} in each loop. {title}.")


def router_map(
    models: Mapping[str, LoopedGPT], tokenizer: Tokenizer, text: str = "To be, or not to be"
) -> ipywidgets.VBox:
    """Type a sentence, and see which experts each token meets at each loop: `draw_router_map`.

    models: by name, as many layers in each.
    """
    n_layer = next(iter(models.values())).config.n_layer

    def draw(model: str, text: str, layer: int):
        draw_router_map(models, tokenizer, model, text, layer)

    return explorer(
        draw,
        height="440px",
        model=ipywidgets.Dropdown(options=list(models), description="model"),
        text=ipywidgets.Text(value=text, description="text"),
        layer=ipywidgets.IntSlider(min=1, max=n_layer, description="layer"),
    )
