"""Recorded results: one way to keep them, and one way to read them.

    record(path, settings, runs, measure)  # adds runs to a file, each as soon as it is made
    keep(path, measure)                    # a file of what is measured in one go
    read(path)                             # what either of them wrote
    runs(path, arm="loom", n_loop=9)       # the runs with these settings, as a pandas table

A recorded file is a JSON object. Its "provenance" says where the numbers come from. A file of runs also has "settings",
which all runs share, and "runs", a list of objects.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from ..files import check, locked, make_folder, read_json, write_atomically
from .provenance import RESULTS as RESULTS
from .provenance import provenance

# ----------------------------------------------------------------------------------------------------------------------
# Read


def existing(path: str | Path) -> Path:
    """The path of a recorded file. ``FileNotFoundError``, which says where one would come from, if there is none."""
    path = Path(path)
    if path.is_file():
        return path
    if path.is_relative_to(RESULTS) and not RESULTS.is_dir():
        raise FileNotFoundError(
            f"no recorded results at {path}: they come with the repository, not with an installed package. Clone it, "
            "and install minilooped from the clone"
        )
    raise FileNotFoundError(f"no recorded results at {path}: is the path right?")


WAY_OUT = "restore the file, or move it away"


def read(path: str | Path) -> dict[str, Any]:
    """The object in a recorded JSON file.

    ``FileNotFoundError`` if there is no such file, ``ValueError`` that names the file if it holds no JSON object.
    """
    return read_json(existing(path), {}, WAY_OUT)


def _read_runs(path: str | Path, *columns: str) -> dict[str, Any]:
    """`read` of a file that `record` wrote. ``ValueError`` that names file and run where a run lacks a column."""
    content = read_json(existing(path), {"settings": dict, "runs": [dict]}, WAY_OUT)
    for number, run in enumerate(content["runs"]):
        if missing := [column for column in columns if column not in run]:
            raise ValueError(f"{path}: runs[{number}] has no {', '.join(missing)}: {WAY_OUT}")
    return content


def runs(path: str | Path, *columns: str, **chosen: Any) -> pd.DataFrame:
    """The recorded runs whose settings are `chosen`, a row each, in the order of the recording.

    columns: what every run must have besides. Raises as `read` does, and ``ValueError`` that names file and run where
    one lacks a column or a chosen setting.
    """
    found = _read_runs(path, *columns, *chosen)["runs"]
    table = pd.DataFrame(found, columns=None if found else [*columns, *chosen])
    for name, value in chosen.items():
        table = table[table[name].isna() if value is None else table[name] == value]
    return table


def gpu_results(folder: str | Path) -> dict[str, dict[str, Any]] | None:
    """What `python benchmarks/gpu.py` left in a folder, by step: its provenance, settings and runs.

    None where nothing has been recorded. A step may be there in part. What the runs of a step hold stands in the
    script's docstring.
    """
    return {path.stem: _read_runs(path) for path in sorted(Path(folder).glob("*.json"))} or None


# ----------------------------------------------------------------------------------------------------------------------
# Keep


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a recorded JSON file, whole or not at all: an entry of the object on a line, of a list of objects too."""

    def laid_out(value: Any) -> str:
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        return json.dumps(value)

    entries = (f"{json.dumps(name)}: {laid_out(value)}" for name, value in content.items())
    write_atomically(path, "{" + ",\n".join(entries) + "}\n")


def only_user(path: Path, wait: float = 0) -> AbstractContextManager[None]:
    """``ValueError`` if another process writes this file and does not finish within `wait` seconds: two that add to one
    file would do the same work, and each would overwrite what the other wrote."""
    lock = path.with_name(f".{path.name}.lock")
    return locked(lock, f"another process adds to {path}: wait for it, or give another file", wait)


def source(path: Path, made_by: str) -> dict[str, Any]:
    """The provenance of what is about to be measured for a file, and a notice if nobody could check out its code."""
    found = provenance(made_by)
    if str(found["commit"]).endswith("+"):
        print(
            f"notice   {path} will name {found['commit']} as its commit: code that git tracks has changed since. To "
            "record results that others can repeat, stop, commit, and start again",
            file=sys.stderr,
        )
    return found


def _script(path: Path) -> str:
    """The command that makes a file, unless it says another."""
    return f"python benchmarks/{path.stem}.py"


def keep(
    path: Path, measure: Callable[[], dict[str, Any]], *, made_by: str | None = None, **about: Any
) -> dict[str, Any]:
    """Write what `measure()` returns to a file, under its provenance, and return it.

    made_by: the command, for the provenance; None: python benchmarks/NAME.py for a file NAME.json. about: more facts
    for the provenance. Raises ValueError, before anything is measured, while another process writes the file.
    """
    make_folder(path.parent)
    with only_user(path):
        made = source(path, made_by or _script(path)) | about
        found = measure()
        write(path, dict(provenance=made) | found)
    return found


def record(
    path: Path,
    settings: dict[str, Any],
    runs: Sequence[dict[str, Any]],
    measure: Callable[..., dict[str, Any]],
    *,
    made_by: str | None = None,
    until: float | None = None,
) -> bool:
    """Add `measure(**run)` to each run, and write it to the file before the next one; runs that are there are kept.

    made_by: as in `keep`. until: the time by `time.monotonic` from which on no further run is begun. Returns whether
    all runs are there. Runs that are added later, by other code or on another machine, have their provenance under
    "extended". Arms may be added to the settings at any time. A kill loses one run at most. Raises ValueError, and
    leaves the file as it is, if it holds other settings or no runs, and while another process adds to it.
    """
    settings = json.loads(json.dumps(settings))
    make_folder(path.parent)
    with only_user(path):
        stored: dict[str, Any] = _read_runs(path) if path.exists() else dict(settings=settings, runs=[])
        if differing := differences(stored["settings"], settings):
            raise ValueError(f"{path} was recorded with other settings ({differing}): move it away first")
        missing = [run for run in runs if not any(run.items() <= row.items() for row in stored["runs"])]
        if not missing:
            return True
        now = source(path, made_by or _script(path))
        stored = dict(provenance=now) | stored | dict(settings=_grown(stored["settings"], settings))
        if not any(now | dict(date=earlier["date"]) == earlier for earlier in _sources(path, stored)):
            stored["extended"] = [*stored.get("extended", []), now]
        for run in tqdm(missing, desc=path.stem, unit="run"):
            if until is not None and time.monotonic() >= until:
                return False
            stored["runs"].append(run | measure(**run))
            names = ("provenance", "extended", "settings", "runs")
            write(path, {name: stored[name] for name in names if name in stored})
    return True


def _sources(path: Path, stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The provenances in the content of a file. ``ValueError`` that names file and field where one is none."""
    found = {"extended": []} | dict(stored)
    try:
        check(found, {"provenance": {"date": str}, "extended": [{"date": str}]})
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {WAY_OUT}") from error
    return [found["provenance"], *found["extended"]]


OFF = (None, False, "fixed")  # the values at which a setting changes nothing
ELSEWHERE = ("device",)  # what the provenance says: runs of one file may be made on different machines


def differences(stored: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str:
    """The settings of `now` that are stored otherwise, with both values; "" where they agree.

    A setting that did not exist at the time of the recording agrees if it is off. So does a new group of settings, as
    that of a new arm. The device is not compared: a run names its machine in its provenance.
    """
    found = []
    for name, value in now.items():
        before = stored.get(name)
        if name in ELSEWHERE:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            found.append(differences(before, value, f"{prefix}{name}."))
        elif before != value and not (name not in stored and (value in OFF or isinstance(value, dict))):
            found.append(f"{prefix}{name} was {before!r} and is now {value!r}")
    return "; ".join(filter(None, found))


def _grown(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings, and beside them those in `now` that are new."""
    both = {name: _grown(stored[name], value) for name, value in now.items() if isinstance(stored.get(name), dict)}
    return {**now, **stored, **both}
