"""Looped (weight-tied) transformers to build, break and measure.

The model is one file, :mod:`minilooped.model`. Its public names are served from here on first use, so that
``import minilooped`` (and with it ``minilooped --help``) does not wait for torch.

From the ground upwards. A room imports what stands before it in this list, and nothing after it:

    files                  written whole or not at all
    model                  the whole model, torch and the standard library alone
    modeling_minilooped    its wrapper for transformers, which an export takes along
    data                   text, tokens, batches
    engine                 what a training stands on: checkpoints, machine, processes, signals, log
    train                  the trainer
    presets                recipes by name
    tools                  what a run will take; to and from other programs
    science                theory, sweeps, probes, and the ledger of the papers' claims
    course                 plots, widgets, and the exercises' checkers
    cli                    the command line
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import RULES, LoopedConfig, LoopedGPT

__all__ = ["RULES", "LoopedConfig", "LoopedGPT", "__version__"]

__version__ = "0.1.0"

# Modules that stood in this folder before it had rooms. Older notebooks and scripts import them by these names.
MOVED = {
    **{name: f"engine.{name}" for name in ("checkpoint",)},
    **{name: f"tools.{name}" for name in ("plan", "export", "harness")},
    **{name: f"science.{name}" for name in ("toy", "stats", "provenance", "sweep", "ablation", "probes", "claims")},
    **{name: f"course.{name}" for name in ("plots", "checks", "widgets")},
    "shards": "data.streaming",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(".model", __name__), name)
    if name in MOVED:
        return import_module(f".{MOVED[name]}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Moved(MetaPathFinder, Loader):
    """Answers ``import minilooped.sweep`` with the module in its room: the same object under both names."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return spec_from_loader(fullname, self) if package == __name__ and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.module = import_module(f".{MOVED[spec.name.partition('.')[2]]}", __name__)
        self.own = self.module.__spec__  # the import system is about to put the old name's here
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own


sys.meta_path.append(_Moved())
