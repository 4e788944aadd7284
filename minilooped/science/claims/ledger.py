"""The ledger of all claims: choose, measure, print, record."""

import json
import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ...files import make_folder, write_atomically
from ..provenance import RESULTS
from .claim import CLAIMS, Claim, Measured, Tier, Verdict, verdict

Results = dict[str, Mapping[str, Measured]]  # by the claim's id
PAPERS = {
    "P1": "On the Residual Scaling of Looped Transformers, arXiv 2606.18524",
    "P2": "DeepLoop, arXiv 2607.13491",
    "P3": "LOOM, Looping Beyond Twice, arXiv 2610.01153",
    "R": "Related rules",
}


def select(ids: Sequence[str] = (), tier: Tier | None = None) -> list[Claim]:
    """The claims of these ids that are of this tier. No ids: all; no tier: any, or without ids the seconds.

    Raises ValueError for an id that is not in the ledger, and where nothing is left.
    """
    unknown = [id for id in ids if id not in CLAIMS]
    if unknown:
        raise ValueError(f"no claim {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    if not ids and tier is None:
        tier = "seconds"
    chosen = [claim for claim in CLAIMS.values() if (not ids or claim.id in ids) and tier in (None, claim.tier)]
    if not chosen:
        raise ValueError(f"none of {', '.join(ids)} is of the tier {tier}: leave --tier out")
    return chosen


def lines(claim: Claim, measured: Mapping[str, Measured] | None, width: int = 100) -> list[str]:
    """A claim as it is printed: id, verdict and statement, then each quantity, its value and its band."""
    statement = textwrap.shorten(claim.statement, max(20, width - 49), placeholder=" ...")
    found = [f"{claim.id:19}  {verdict(claim, measured):25}  {statement}"]
    for name, value in (measured or {}).items():
        band = claim.band[name]
        found.append(f"    {name:42} {value.beside(band.edges):24} band {band}")
    return found


def summary(results: Mapping[str, Mapping[str, Measured] | None]) -> str:
    """How many claims there are of each verdict."""
    counts = Counter(verdict(CLAIMS[id], measured) for id, measured in results.items())
    return ", ".join(f"{name}: {counts[name]}" for name in get_args(Verdict) if counts[name])


def report(claims: Sequence[Claim]) -> Results:
    """Measure the claims one after the other, and print each as it is done. What has no measure yet is printed too."""
    width = shutil.get_terminal_size((100, 24)).columns
    results: dict[str, Mapping[str, Measured] | None] = {}
    for claim in claims:
        try:
            results[claim.id] = None if claim.measure is None else claim.measure()
        except FileNotFoundError as error:
            if RESULTS.is_dir():
                raise
            raise FileNotFoundError(
                f"{claim.id} is read from recorded results, which come with a checkout of the repository and not with "
                "an installed package: clone it, and give the command there"
            ) from error
        print(*lines(claim, results[claim.id], width), sep="\n", flush=True)
    print(f"\n{len(claims)} of {len(CLAIMS)} claims; {summary(results)}.")
    return {id: measured for id, measured in results.items() if measured is not None}


# claims.json: for each measured claim, by its id, {"measured": {quantity: [value, low, high]}, "provenance": {...}}
Ledger = dict[str, dict[str, Any]]


def load(folder: Path) -> Ledger:
    """What `record` wrote into the folder; without a file, nothing. Claims that have changed since are left out."""
    path = folder / "claims.json"
    if not path.exists():
        return {}
    try:
        stored = dict(json.loads(path.read_text(encoding="utf-8")).items())
        return {
            id: dict(
                measured={name: Measured(*numbers) for name, numbers in stored[id]["measured"].items()},
                provenance=stored[id]["provenance"],
            )
            for id, claim in CLAIMS.items()
            if id in stored and stored[id]["measured"].keys() == claim.band.keys()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a record of claims ({error!r}): restore it, or move it away") from error


def record(folder: Path, results: Results, source: dict[str, Any]) -> None:
    """Write the results into the folder: claims.json, and claims.md made from it. Of other claims they keep what is
    known. source: the `provenance` of the results. Raises ValueError, and leaves the folder as it is, for a file there
    that is no such record.
    """
    ledger = load(folder)
    for id, measured in results.items():
        rounded = {name: Measured(*(float(f"{x:.6g}") for x in value)) for name, value in measured.items()}
        ledger[id] = dict(measured=rounded, provenance=source)
    ledger = {id: ledger[id] for id in CLAIMS if id in ledger}
    make_folder(folder)
    for name, text in (("claims.json", json.dumps(ledger, indent=1) + "\n"), ("claims.md", page(ledger))):
        write_atomically(folder / name, text)


def page(ledger: Ledger) -> str:
    """The ledger as Markdown, one table per paper, and the runs that it comes from."""
    runs: list[dict[str, Any]] = []
    for entry in ledger.values():
        if entry["provenance"] not in runs:
            runs.append(entry["provenance"])
    results = {id: ledger[id]["measured"] if id in ledger else None for id in CLAIMS}
    text = [
        "# What the papers claim, and what this code measures",
        "",
        "Made by `minilooped claims --out`, not by hand. Each claim stands in `minilooped/science/claims/`, below the "
        "function that measures it, with the "
        "band in which it has to lie; the verdict follows from the two. An interval over seeds, of a mean or of a "
        "slope, is that of 95 % by Student's t. It holds here if all of it lies in the band. It is not visible at this "
        "scale if it reaches into the band only in part, or to where it would be without any effect. Otherwise it is "
        "contradicted here. "
        "A published number that needs a GPU is quoted, not reproduced; second-hand means that it is known here from "
        "an account of the paper and not from its text.",
        "",
        f"{len(CLAIMS)} claims; {summary(results)}.",
        "",
    ]
    for prefix, title in PAPERS.items():
        text += [
            f"## {prefix}. {title}",
            "",
            "| claim | statement | published | measured here | verdict | tier |",
            "|---|---|---|---|---|---|",
        ]
        for claim in CLAIMS.values():
            if claim.id.partition("-")[0] == prefix:
                measured = results[claim.id]
                scale = [f"On: {claim.scale}."] if measured else []
                values = [
                    f"{name}: **{value.beside(claim.band[name].edges)}**, band {claim.band[name]}"
                    for name, value in (measured or {}).items()
                ]
                run = f", run {runs.index(ledger[claim.id]['provenance']) + 1}" if measured else ""
                statement = "<br>".join([claim.statement, *([f"*{claim.note}*"] if claim.note else [])])
                cells = [
                    claim.id,
                    statement,
                    f"{claim.published}<br>({claim.source})",
                    "<br>".join(values + scale),
                    verdict(claim, measured),
                    claim.tier + run,
                ]
                text.append(f"| {' | '.join(cells)} |")
        text.append("")
    text += ["## Runs", ""]
    for number, about in enumerate(runs, 1):
        facts = ", ".join(f"{name} {value}" for name, value in about.items() if name != "made_by" and value is not None)
        text.append(f"{number}. `{about['made_by']}`: {facts}")
    return "\n".join(text) + "\n"
