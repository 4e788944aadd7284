"""What the tests of plots and explorers share: pictures as arrays, controls by name, how long a move may take."""

import io
import math
import re
import time

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import pytest

from minilooped.course import plots
from minilooped.data import CharTokenizer

LETTERS = CharTokenizer("\n abcdefgh")
SECONDS_PER_MOVE = 2 / 3  # of CPU time: twice what a move may take before a reader feels it


def assert_quick(control, *values) -> None:
    """Each move is within the limit at its best of three: one may pay for a garbage collection of the whole suite."""
    best = dict.fromkeys(values, math.inf)
    for _ in range(3):
        for value in values:
            assert control.value != value, "nothing would move"
            started = time.process_time()
            control.value = value
            best[value] = min(best[value], time.process_time() - started)
        if max(best.values()) < SECONDS_PER_MOVE:
            return
    pytest.fail(f"{best} s are more than {SECONDS_PER_MOVE}")


def printed(capsys) -> str:
    """What was printed since the last call, without the codes by which IPython clears an output outside a kernel."""
    return re.sub(r"\x1b\[2K\r?", "", capsys.readouterr().out).removesuffix("\n")


def png(image) -> np.ndarray:
    return plt.imread(io.BytesIO(image.data), format="png")


def controls_of(box) -> dict[str, ipywidgets.Widget]:
    """Controls by the first word of their description."""
    *controls, _ = box.children
    return {control.description.split()[0]: control for control in controls}


def drawn_by(monkeypatch, name: str) -> list:
    """The arguments of each call of a plot."""
    calls, plot = [], getattr(plots, name)

    def recorded(*arguments, **options):
        calls.append((arguments, options))
        return plot(*arguments, **options)

    monkeypatch.setattr(plots, name, recorded)
    return calls
