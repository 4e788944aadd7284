"""The ledger of all claims: choose, measure, print, record."""

import math
import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ...files import Need, check, make_folder, write_atomically
from ..records import only_user, read, source, write
from .claim import CLAIMS, Claim, Kind, Measured, Tier, Verdict, at_most, verdict
from .registration import registered

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
    statement = textwrap.shorten(claim.statement, max(20, width - 57), placeholder=" ...")
    found = [f"{claim.id:19}  {worded(claim, measured):33}  {statement}"]
    for name, value in (measured or {}).items():
        band = claim.band[name]
        found.append(f"    {name:42} {value.beside(band.edges):24} band {band}")
    return found


def worded(claim: Claim, measured: Mapping[str, Measured] | None) -> str:
    """The verdict as it is printed: of an effect that is absent here, with how much of it there may be at most."""
    said = verdict(claim, measured)
    return f"{said} ({at_most(claim, measured)})" if said == "absent here" and measured else said


BEST_FIRST: tuple[Verdict, ...] = (
    "holds",
    "inconclusive",
    "absent here",
    "contradicted",
    "needs a GPU",
    "not yet measured",
)


def counts(results: Mapping[str, Mapping[str, Measured] | None]) -> dict[Kind, Counter[Verdict]]:
    """How many claims there are of each kind and verdict."""
    found: dict[Kind, Counter[Verdict]] = {kind: Counter() for kind in get_args(Kind)}
    for id, measured in results.items():
        found[CLAIMS[id].kind][verdict(CLAIMS[id], measured)] += 1
    return found


def summary(results: Mapping[str, Mapping[str, Measured] | None]) -> str:
    """How many claims there are of each verdict, whatever their kind."""
    total = sum(counts(results).values(), Counter())
    return ", ".join(f"{name}: {total[name]}" for name in BEST_FIRST if total[name])


def report(claims: Sequence[Claim], out: Path | None = None, made_by: str = "minilooped claims") -> Results:
    """Measure the claims one after the other, and print each as it is done. What has no measure yet is printed too.

    out: a folder whose record takes each result as it comes: see `record`. made_by: the command, for the provenance.
    A claim whose recorded runs are not there is left out, and the others are measured. At the end FileNotFoundError
    says where the runs would come from.
    """
    about = None
    if out is not None:
        load(out)  # a file that cannot be kept is refused before the work, not after it
        about = source(out / "claims.json", made_by)  # of the code that measures, not of later edits
    width = shutil.get_terminal_size((100, 24)).columns
    results: dict[str, Mapping[str, Measured] | None] = {}
    absent: FileNotFoundError | None = None
    for claim in claims:
        try:
            measured = None if claim.measure is None else claim.measure()
        except FileNotFoundError as error:
            measured, absent = None, error
        results[claim.id] = measured
        print(*lines(claim, measured, width), sep="\n", flush=True)
        if out is not None and about is not None and measured is not None:
            record(out, {claim.id: measured}, about)
    print(f"\n{len(claims)} of {len(CLAIMS)} claims; {summary(results)}.")
    if absent is not None:
        raise absent
    return {id: measured for id, measured in results.items() if measured is not None}


# What claims.json holds: by the id of a claim, {"measured": {quantity: [value, low, high]}, "provenance": {...},
# "registered": the commits of its band and of the recorded files that it read, at the time}
Ledger = dict[str, dict[str, Any]]


def intervals(value: Any) -> bool:
    """an object of lists of three numbers each"""

    def number(x: Any) -> bool:  # Infinity and NaN too: a run may diverge
        return type(x) is float or type(x) is int and abs(x) < 1e300

    return isinstance(value, dict) and all(
        isinstance(each, list) and len(each) == 3 and all(map(number, each)) for each in value.values()
    )


def commits(value: Any) -> bool:
    """an object of texts"""
    return isinstance(value, dict) and all(isinstance(commit, str) for commit in value.values())


ENTRY: dict[str, Need] = {"measured": intervals, "provenance": {"made_by": str}, "registered": commits}


def load(folder: Path) -> Ledger:
    """What `record` wrote into the folder; without a file, nothing. Claims that have changed since are left out.

    Raises ValueError that names the file, the claim and the field, if it is no such record.
    """
    path = folder / "claims.json"
    if not path.exists():
        return {}
    stored = read(path)
    ledger: Ledger = {}
    for id, claim in CLAIMS.items():
        if id not in stored:
            continue
        entry = stored[id]
        if isinstance(entry, dict):
            entry = {"registered": {}} | entry  # a record of an earlier version has none
        try:
            check(entry, ENTRY, id)
        except ValueError as error:
            raise ValueError(f"{path} is not a record of claims ({error}): restore it, or move it away") from error
        measured = {name: Measured(*map(float, numbers)) for name, numbers in entry["measured"].items()}
        if measured.keys() == claim.band.keys():
            ledger[id] = entry | dict(measured=measured)
    return ledger


def record(folder: Path, results: Results, about: dict[str, Any]) -> None:
    """Add the results to the record in the folder, claims.json, and write the page claims.md from it.

    about: the `provenance` of the results. The record keeps what it knows of other claims. Raises ValueError, and
    leaves the folder as it is, for a file there that is no such record.
    """
    make_folder(folder)
    path = folder / "claims.json"
    with only_user(path, wait=60):  # another process that measures other claims
        ledger = load(folder)
        for id, measured in results.items():
            rounded = {name: Measured(*(float(f"{x:.6g}") for x in value)) for name, value in measured.items()}
            ledger[id] = dict(measured=rounded, provenance=about, registered=registered(CLAIMS[id]))
        ledger = {id: ledger[id] for id in CLAIMS if id in ledger}
        write(path, ledger)
        write_atomically(folder / "claims.md", page(ledger))


INTRODUCTION = """\
# What the papers claim, and what this code measures

Made by `minilooped claims --out`, not by hand. Each claim stands in `minilooped/science/claims/`, below the function \
that measures it, with the band in which it has to lie. The verdict follows from the two. An interval over seeds, of a \
mean or of a slope, is that of 95 % by Student's t; "±" is half of it, the smallest effect that these seeds would have \
shown.

- **holds**: the interval lies in the band.
- **inconclusive**: the interval lies partly in the band. More seeds could decide.
- **absent here**: the interval reaches to where there is no effect, and excludes the effect that is claimed. What it \
leaves room for stands in brackets.
- **contradicted**: the interval lies elsewhere.
- **needs a GPU**: quoted, not reproduced.

Kinds, from what only a mistake in the code can make fail to what only a training can show: an *identity* of formulas, \
a *law of sums* in random matrices, a model untrained or in its *first steps*, a *training*. The last column has the \
commit that completed a claim's band, and the commits of the recorded runs. *Second-hand* means that a statement is \
known here from an account of the paper and not from its text.
"""


def page(ledger: Ledger) -> str:
    """The ledger as Markdown: the counts, one table per paper, and the runs that it comes from."""
    runs: list[dict[str, Any]] = []  # the different provenances, in the order in which the page names them
    for entry in ledger.values():
        if entry["provenance"] not in runs:
            runs.append(entry["provenance"])
    results = {id: ledger[id]["measured"] if id in ledger else None for id in CLAIMS}
    text = [INTRODUCTION, *_count_table(results), ""]
    for prefix, title in PAPERS.items():
        text += [f"## {prefix}. {title}", ""]
        text += ["| claim | statement | published | measured here | verdict | run, band, recorded |"]
        text += ["|---|---|---|---|---|---|"]
        for id, claim in CLAIMS.items():
            if id.partition("-")[0] == prefix:
                number = runs.index(ledger[id]["provenance"]) + 1 if id in ledger else None
                text.append(f"| {' | '.join(_cells(claim, ledger.get(id), number))} |")
        text.append("")
    text += ["## Runs", ""]
    for number, about in enumerate(runs, 1):
        facts = ", ".join(f"{name} {value}" for name, value in about.items() if name != "made_by" and value is not None)
        text.append(f"{number}. `{about['made_by']}`: {facts}")
    return "\n".join(text) + "\n"


def _count_table(results: Mapping[str, Mapping[str, Measured] | None]) -> list[str]:
    """The lines of a table of counts, a row for each kind, a column for each verdict that occurs."""
    found = counts(results)
    total = sum(found.values(), Counter())
    columns = [name for name in BEST_FIRST if total[name]]
    rows = [(kind, found[kind]) for kind in found] + [("all", total)]
    return [
        f"| kind | {' | '.join(columns)} | claims |",
        "|---" * (len(columns) + 2) + "|",
        *(f"| {kind} | {' | '.join(str(n[name]) for name in columns)} | {n.total()} |" for kind, n in rows),
    ]


def _cells(claim: Claim, entry: Mapping[str, Any] | None, run: int | None) -> list[str]:
    """A claim as a row of the page. entry: of the ledger; run: the number of the run that measured it."""
    measured = entry and entry["measured"]
    values = [_quantity(claim, name, value) for name, value in (measured or {}).items()]
    where = [f"{claim.tier}, run {run}"] if entry else [claim.tier]
    where += [f"{name} {commit}" for name, commit in (entry or {}).get("registered", {}).items()]
    return [
        f"{claim.id}<br>{claim.kind}",
        "<br>".join([claim.statement, *([f"*{claim.note}*"] if claim.note else [])]),
        f"{claim.published}<br>({claim.source})",
        "<br>".join([*values, f"On: {claim.scale}."] if measured else []),
        worded(claim, measured),
        "<br>".join(where),
    ]


def _quantity(claim: Claim, name: str, value: Measured) -> str:
    """A quantity of the page: its interval and band, the published value if it has one, and what would have shown."""
    band = claim.band[name]
    said = f"{name}: **{value.beside(band.edges)}**, band {band}"
    if value.low < value.high < math.inf:
        said += f", ±{(value.high - value.low) / 2:.2g}"
    if name in claim.expected:
        expected = claim.expected[name]
        said += f"; published {expected:g} lies {'inside' if value.low <= expected <= value.high else 'outside'}"
    return said
