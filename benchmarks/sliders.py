"""From a slider's move to the finished picture, for every widget: python benchmarks/sliders.py

Each control is moved up and down over all of its values, once with the other controls where the widget opens, once with
them at their last value. A move is timed until the picture is a PNG in the output, computation included; what the
browser takes to show it comes on top. All of it three times: of the moves that end at the same position the fastest
counts, since a busy machine slows single ones. One torch thread, as in the chapters. Writes data/results/sliders.json;
with names of widgets behind the command these are measured anew, and the rows of the others stay.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any
from unittest.mock import patch

import ipywidgets
import torch

from minilooped.course import widgets
from minilooped.data import CharTokenizer
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.science import ablation, probes, sweep
from minilooped.science.provenance import provenance
from minilooped.science.records import RESULTS, keep, read
from minilooped.tools import plan

OUT = RESULTS / "sliders.json"
BAR = 0.35  # seconds of CPU time that the slowest move may take
ROUNDS = 3

DIAL = [probes.Dial(n_loop, 2 + 1 / n_loop, "To be, or not to be\n" * 6) for n_loop in range(1, 9)]
SWEPT = sweep.grid(("none", "sqrt", "inverse"), (2,), (1, 2, 4, 8), [2.0**-k for k in range(5, 12)], (0, 1, 2))
SMALL = LoopedConfig(vocab_size=64, block_size=32, n_layer=1, n_head=4, n_embd=64)
LETTERS = CharTokenizer("".join(map(chr, range(32, 96))))
ROUTED = replace(SMALL, n_layer=2, n_loop=6, n_expert=8)
TEXTS = ("TO BE, OR NOT TO BE", "THE PLAY IS THE THING")


def costs() -> list[probes.Cost]:
    shapes = [dict(n_layer=n_layer, n_loop=n_loop) for n_layer in (1, 2, 3, 4) for n_loop in (1, 2, 3, 4, 6, 8, 12)]
    return [probes.cost(replace(SMALL, **shape)) for shape in shapes]


# Every widget, as a chapter would open it.
WIDGETS: dict[str, Callable[[], ipywidgets.VBox]] = {
    "loop_dial": lambda: widgets.loop_dial(DIAL, trained=4),
    "cost_explorer": lambda: widgets.cost_explorer(costs()),
    "norm_growth": widgets.norm_growth,
    "gram_heatmap": widgets.gram_heatmap,
    "lr_sweep_browser": lambda: widgets.lr_sweep_browser({trial: 2 + 100 * abs(trial.lr - 2**-8) for trial in SWEPT}),
    "rule_explorer": widgets.rule_explorer,
    "multiplier_explorer": widgets.multiplier_explorer,
    "router_map": lambda: widgets.router_map(
        {router: LoopedGPT(replace(ROUTED, router=router)) for router in ("shared", "per_loop")}, LETTERS, TEXTS[0]
    ),
    "loom_switchboard": lambda: widgets.loom_switchboard([]),
    "segment_cutter": widgets.segment_cutter,
    "loop_lens": lambda: widgets.loop_lens(
        {way: 2 + torch.rand(3, 12) for way in ("fixed", "drawn")},
        {"mine": LoopedGPT(replace(SMALL, n_loop=4))},
        LETTERS,
        TEXTS[1],
    ),
    "planner": lambda: widgets.planner(plan.load_counts(OUT.with_name("memory.json"))),
    "visit_explorer": lambda: widgets.visit_explorer({"64 loops": probes.first_steps(replace(SMALL, n_loop=64))}),
}


def settings(control: ipywidgets.Widget) -> tuple[str, Sequence[Any]]:
    """The trait that a move sets, and its values from first to last."""
    if isinstance(control, ipywidgets.Checkbox):
        return "value", (False, True)
    if isinstance(control, ipywidgets.Text):
        return "value", TEXTS
    if hasattr(control, "options"):
        return "index", range(len(control.options))
    n_steps = round((control.max - control.min) / control.step)
    return "value", [control.min + i * control.step for i in range(n_steps + 1)]


def forget() -> None:
    """Empty the switchboard's memory, but for the two curves that it always shows: a first visit is what counts."""
    widgets.loom._variance.cache_clear()
    for parts in (("expert norm",), tuple(ablation.PARTS)):
        widgets.loom._variance(parts)


def seconds_per_move(open_widget: Callable[[], ipywidgets.VBox]) -> dict[tuple, tuple[float, float]]:
    """CPU and wall seconds of the fastest move to each position, a tuple of the controls' values."""
    pictures, fastest = [], {}
    show = patch("IPython.display.display", lambda picture: pictures.append(picture._repr_mimebundle_()))
    with show, redirect_stdout(StringIO()):
        *controls, _ = open_widget().children
        traits, values = zip(*map(settings, controls), strict=True)
        opening = [getattr(control, trait) for control, trait in zip(controls, traits, strict=True)]
        for start in (opening, [each[-1] for each in values]) * ROUNDS:
            for moved, trait, path in zip(controls, traits, values, strict=True):
                for control, name, value in zip(controls, traits, start, strict=True):
                    setattr(control, name, value)
                for value in (*path, *reversed(path)):
                    if value == getattr(moved, trait):
                        continue  # no move
                    pictures.clear()
                    forget()
                    cpu, wall = time.process_time(), time.perf_counter()
                    setattr(moved, trait, value)
                    took = time.process_time() - cpu, time.perf_counter() - wall
                    if len(pictures) != 1:
                        raise RuntimeError(f"{moved.description}: {len(pictures)} pictures after a move, expected one")
                    position = tuple(control.value for control in controls)
                    fastest[position] = tuple(map(min, took, fastest.get(position, took)))
    return fastest


def measured(name: str) -> dict[str, Any]:
    """The row of a widget, printed too."""
    fastest = seconds_per_move(WIDGETS[name])
    cpu, wall = zip(*fastest.values(), strict=True)
    row = dict(
        widget=name,
        positions=len(fastest),
        cpu_median=round(statistics.median(cpu), 4),
        cpu_worst=round(max(cpu), 4),
        wall_median=round(statistics.median(wall), 4),
        wall_worst=round(max(wall), 4),
        slowest=max(fastest, key=lambda position: fastest[position][0]),
        commit=provenance("")["commit"],
    )
    print(
        f"{name:16}{row['positions']:10}{row['cpu_median']:12.3f}{row['cpu_worst']:8.3f}"
        f"{row['wall_median']:13.3f}{row['wall_worst']:8.3f}  at {row['slowest']}",
        flush=True,
    )
    return row


def main(names: Sequence[str]) -> None:
    """Measure the widgets of these names, or all; the rows of the others stay as they were recorded."""
    if unknown := [name for name in names if name not in WIDGETS]:
        raise SystemExit(f"no widget {', '.join(unknown)}: there are {', '.join(WIDGETS)}")
    torch.set_num_threads(1)

    def measure() -> dict[str, Any]:
        rows = {row["widget"]: row for row in read(OUT)["rows"]} if names and OUT.exists() else {}
        rows |= {name: measured(name) for name in names or WIDGETS}
        return dict(bar=BAR, rows=[rows[name] for name in WIDGETS if name in rows])

    print(f"{'seconds a move':16}{'positions':>10}{'CPU median':>12}{'worst':>8}{'wall median':>13}{'worst':>8}")
    found = keep(OUT, measure, made_by=" ".join(["python benchmarks/sliders.py", *names]))
    slow = [row["widget"] for row in found["rows"] if row["cpu_worst"] > BAR]
    print(f"within {BAR} s of CPU time: {'all but ' + ', '.join(slow) if slow else 'all'}")


if __name__ == "__main__":
    main(sys.argv[1:])
