"""Looped (weight-tied) transformers to build, break and measure.

The model is one file, :mod:`minilooped.model`. Its public names are served from here on first use, so that
``import minilooped`` (and with it ``minilooped --help``) does not wait for torch.
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
