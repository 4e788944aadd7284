"""The benchmark of slider moves, benchmarks/sliders.py."""

import inspect
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import IPython.display
import ipywidgets
import pytest

from minilooped.course import plots, widgets

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def sliders():
    return runpy.run_path(str(ROOT / "benchmarks/sliders.py"))


def test_every_widget_is_in_the_benchmark_and_recorded_within_its_bar(sliders):
    functions = inspect.getmembers(widgets, inspect.isfunction)
    of_widgets = {name for name, f in functions if inspect.signature(f).return_annotation is ipywidgets.VBox}
    assert sliders["WIDGETS"].keys() == of_widgets - {"explorer"}
    recorded = json.loads((ROOT / "data/results/sliders.json").read_text(encoding="utf-8"))["rows"]
    assert [row["widget"] for row in recorded] == list(sliders["WIDGETS"]), "run python benchmarks/sliders.py"
    assert all(row["cpu_worst"] <= sliders["BAR"] for row in recorded)


def test_the_benchmark_moves_every_control_over_all_its_values_and_times_the_drawing(sliders, monkeypatch):
    now, drawn, forgotten = 0.0, [], []
    clock = SimpleNamespace(process_time=lambda: now, perf_counter=lambda: 2 * now)
    monkeypatch.setitem(sliders["seconds_per_move"].__globals__, "time", clock)
    monkeypatch.setitem(sliders["seconds_per_move"].__globals__, "forget", lambda: forgotten.append(len(drawn)))

    def draw(n: int, x: float, rule: str):
        nonlocal now
        now += (5 if rule == "sqrt" else 1) + 100 * ((n, x, rule) not in drawn)  # a first drawing is slow
        drawn.append((n, x, rule))
        IPython.display.display(plots.Picture(b"", "nothing"))

    controls = dict(
        n=ipywidgets.IntSlider(min=2, max=6, step=2, value=4),
        x=ipywidgets.FloatSlider(min=0, max=1, step=0.5, value=0),
        rule=ipywidgets.Dropdown(options=("none", "sqrt", "inverse"), value="inverse"),
    )
    seconds = sliders["seconds_per_move"](lambda: widgets.explorer(draw, **controls))
    one_moved = {(n, 0, "inverse") for n in (2, 4, 6)} | {(4, x, "inverse") for x in (0, 0.5, 1)}
    one_moved |= {(4, 0, rule) for rule in ("none", "sqrt", "inverse")}
    from_the_ends = {(n, 1, "inverse") for n in (2, 4, 6)} | {(6, x, "inverse") for x in (0, 0.5, 1)}
    from_the_ends |= {(6, 1, rule) for rule in ("none", "sqrt", "inverse")}
    assert seconds.keys() == one_moved | from_the_ends
    assert all(took == ((5, 10) if rule == "sqrt" else (1, 2)) for (_, _, rule), took in seconds.items())
    assert len(forgotten) == len(set(forgotten)) > len(seconds), "before each move that is timed"


def test_the_benchmark_refuses_a_widget_that_shows_nothing(sliders, monkeypatch):
    monkeypatch.setitem(sliders["seconds_per_move"].__globals__, "forget", lambda: None)
    control = ipywidgets.IntSlider(max=2, description="n")
    with pytest.raises(RuntimeError, match="n: 0 pictures after a move, expected one"):
        sliders["seconds_per_move"](lambda: widgets.explorer(lambda n: None, n=control))
