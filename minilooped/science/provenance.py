"""Where a recorded result comes from: the part of a result file that lets a reader judge the numbers, and redo them.

provenance("python benchmarks/growth.py")      # facts about the code and the machine
record(path, settings, runs, measure)          # a file of runs that grows, and goes on where it was
gpu_results("data/results/gpu")                # what benchmarks/gpu.py recorded, or None
"""

import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..files import write_atomically

RESULTS = Path(__file__).parents[2] / "data" / "results"  # of a checkout; an installed wheel has none


def provenance(made_by: str) -> dict[str, str | int | None]:
    """Facts about this run: the command, the day, the code and the machine.

    made_by: the command that makes the result, as a reader would type it. The commit is None outside a git checkout,
    and ends in "+" where files that git tracks differ from it. gpu, cuda and driver are None where torch sees no GPU.
    """
    gpu = torch.cuda.is_available()
    return dict(
        made_by=made_by,
        date=date.today().isoformat(),
        commit=_commit(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cpu=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        gpu=torch.cuda.get_device_name() if gpu else None,
        cuda=torch.version.cuda if gpu else None,
        driver=_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        threads=torch.get_num_threads(),
    )


@cache
def _commit() -> str | None:
    """That of the code as this process found it: the results that it then writes into the checkout do not count.

    None where git does not know this file: an installed package may lie in somebody else's repository.
    """
    if _first_line("git", "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _first_line("git", "describe", "--always", "--exclude=*", "--dirty=+")


def _first_line(*command: str) -> str | None:
    """What a program says, run where this code lies; None where it is not there, or fails."""
    try:
        said = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip().partition("\n")[0]


OFF = (None, False, "fixed")  # how switches say that they change nothing


def differences(stored: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str:
    """Names and values of the settings in `now` that `stored` has otherwise; "" where they agree.

    What came after the recording agrees if it is a switch that is off, or settings of their own, as those of a new arm.
    """
    found = []
    for name, value in now.items():
        before = stored.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            found.append(differences(before, value, f"{prefix}{name}."))
        elif before != value and not (name not in stored and (value in OFF or isinstance(value, dict))):
            found.append(f"{prefix}{name} was {before!r} and is now {value!r}")
    return "; ".join(filter(None, found))


def _grown(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings, and beside them those in `now` that are new."""
    both = {name: _grown(stored[name], value) for name, value in now.items() if isinstance(stored.get(name), dict)}
    return {**now, **stored, **both}


def record(
    path: Path,
    settings: dict[str, Any],
    runs: Sequence[dict[str, Any]],
    measure: Callable[..., dict[str, Any]],
    *,
    made_by: str | None = None,
    until: float | None = None,
) -> bool:
    """Add `measure(**run)` to each run and write them to `path` as they come; those that are there are not made again.

    made_by: the command, for the provenance; None: python benchmarks/NAME.py for a file NAME.json. until: the time by
    `time.monotonic` from which on no further run is begun. Returns whether all runs are there. Runs that are added
    later, by other code or on another machine, have their provenance under "extended". Arms may be added to the
    settings at any time. A kill loses one run at most. Raises ValueError for a file of other settings, and leaves it as
    it was.
    """
    settings = json.loads(json.dumps(settings))
    stored: dict[str, Any] = dict(settings=settings, runs=[])
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
    if differing := differences(stored["settings"], settings):
        raise ValueError(f"{path} was recorded with other settings ({differing}): move it away first")
    missing = [run for run in runs if not any(run.items() <= row.items() for row in stored["runs"])]
    if not missing:
        return True
    stored["settings"] = _grown(stored["settings"], settings)
    now = provenance(made_by or f"python benchmarks/{path.stem}.py")
    known = [stored.setdefault("provenance", now), *stored.get("extended", [])]
    if not any(now | dict(date=earlier["date"]) == earlier for earlier in known):
        stored.setdefault("extended", []).append(now)
    for run in tqdm(missing, desc=path.stem, unit="run"):
        if until is not None and time.monotonic() >= until:
            return False
        stored["runs"].append(run | measure(**run))
        names = [name for name in ("provenance", "extended", "settings") if name in stored]
        head = "".join(f'"{name}": {json.dumps(stored[name])},\n' for name in names)
        rows = ",\n".join(json.dumps(row) for row in stored["runs"])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f'{{{head}"runs": [\n{rows}\n]}}\n')
    return True


def gpu_results(folder: str | Path) -> dict[str, dict[str, Any]] | None:
    """What `python benchmarks/gpu.py` left in a folder, by step: its provenance, settings and runs.

    None where nothing has been recorded. A step may be there in part. What the runs of a step hold stands in the
    script's docstring.
    """
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))}
    return found or None
