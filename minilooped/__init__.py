"""Looped (weight-tied) transformers to build, break and measure.

The model is one file, :mod:`minilooped.model`. Its public names are served from here on first use, so that
``import minilooped`` (and with it ``minilooped --help``) does not wait for torch.

From the ground upwards, each built on what stands before it:

    model                  the whole model, torch and the standard library alone
    modeling_minilooped    its wrapper for transformers, which an export takes along
    stats                  a mean over seeds, and the interval around it
    toy                    the papers' residual recursion with nothing around it
    files                  written whole or not at all
    provenance             where a recorded result comes from, and how it is recorded
    data                   text, tokens, batches
    shards                 data sets that do not fit in memory
    checkpoint             what a run keeps on disk
    ablation               LOOM's parts, one by one
    plots                  arrays in, matplotlib Axes out
    train                  the trainer
    presets                recipes by name
    plan                   what a run will take, before it takes it
    export                 to and from Hugging Face's transformers
    harness                to lm-evaluation-harness
    sweep                  grids of short runs, and the best learning rate
    probes                 what a model does, loop by loop
    claims                 what the papers state, and what comes out here
    checks                 the exercises' checkers
    widgets                sliders over probes and plots
    cli                    the command line
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import RULES, LoopedConfig, LoopedGPT

__all__ = ["RULES", "LoopedConfig", "LoopedGPT", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(".model", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
