"""What a claim is, how a verdict follows from a measurement and a band, and what measurements are made of."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import pandas as pd
import torch
from torch import Tensor

from ...model import LoopedConfig
from .. import toy
from ..records import runs
from ..stats import interval

Tier = Literal["seconds", "minutes", "gpu"]
# What a claim speaks of, from what cannot fail, unless by a mistake in the code, to what only a training can show.
Kind = Literal["identity", "law of sums", "first steps", "training"]
# From the worst to the best, then those without a measurement.
Verdict = Literal["contradicted", "absent here", "inconclusive", "holds", "not yet measured", "needs a GPU"]


class Measured(NamedTuple):
    """A number and the interval that its uncertainty spans; a number without any is its own interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.beside(())

    def beside(self, edges: Iterable[float]) -> str:
        """As text, with as many digits as it takes to see on which side of 0 and of each edge the interval ends lie."""
        if self.low == self.high:
            return f"{self.value:.0f}" if 1000 <= abs(self.value) < 1e6 else f"{self.value:.4g}"
        marks = [0.0, *(edge for edge in edges if math.isfinite(edge))]
        digits = 2 if abs(self.value) < 100 else 0
        while digits < 8 and any(round(x, digits) == round(m, digits) for x in self for m in marks if x != m):
            digits += 1
        value, low, high = (f"{round(x, digits) + 0.0:.{digits}f}" for x in self)  # no "-0.00"
        return f"{value} ({low} to {high})"


class Band(NamedTuple):
    """Where a quantity has to lie for its claim to hold, and, if it can, where it lies if there is no effect to see."""

    low: float = -math.inf
    high: float = math.inf
    null: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.low == self.high:
            return f"exactly {self.low:g}"
        if self.low == -math.inf:
            return f"at most {self.high:g}"
        if self.high == math.inf:
            return f"at least {self.low:g}"
        if f"{self.low:g}" == f"{self.high:g}":  # told apart by rounding alone
            return f"{self.low:g} ± {(self.high - self.low) / 2:.0e}"
        return f"{self.low:g} to {self.high:g}"

    @property
    def edges(self) -> tuple[float, ...]:
        """All numbers at which the verdict changes."""
        return self.low, self.high, *(self.null or ())


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, in our words, and how it is tested here."""

    id: str  # the paper, then a letter or a name; "-model": the statement of the same letter on a real model
    kind: Kind
    statement: str
    source: str  # section, theorem, figure or table of the paper
    published: str  # the value that the paper gives
    tier: Tier  # what the measurement takes: seconds or minutes of one CPU thread, or a GPU
    scale: str = ""  # what it is measured on here
    band: Mapping[str, Band] = field(default_factory=dict)  # for each quantity by its name; fix it before you measure
    measure: Callable[[], Mapping[str, Measured]] | None = None  # returns a value for each of them; None: not yet
    expected: Mapping[str, float] = field(default_factory=dict)  # the published values of quantities that have one
    recorded: tuple[Path, ...] = ()  # the files that it is read from, where it is not measured anew
    note: str = ""  # what the reader should know about the difference between there and here
    line: tuple[str, int] = ("", 0)  # where it is entered: the file, and the first line of the call


def judged(value: Measured, band: Band, expected: float | None = None) -> Verdict:
    """What the interval of one quantity says.

    | the interval                                                                    | verdict      |
    |---|---|
    | lies in the band                                                                | holds        |
    | lies partly in the band                                                         | inconclusive |
    | the same, but has 0, where the band ends, and what is expected lies beyond it    | absent here  |
    | lies outside the band, and reaches into `null`, where it is without any effect  | absent here  |
    | anything else: outside band and null, or NaN                                    | contradicted |

    The third row is for a band that begins at 0, a claim about a sign: an interval such as -0.01 to 0.02 does not know
    the sign, but excludes an effect of 0.3. expected: the published value.
    """
    _, low, high = value
    if band.low <= low and high <= band.high:
        return "holds"
    if low <= band.high and band.low <= high:
        sign_unknown = 0 in (band.low, band.high) and low <= 0 <= high
        excluded = expected is not None and not low <= expected <= high and band.low <= expected <= band.high
        return "absent here" if sign_unknown and excluded else "inconclusive"
    if band.null and low <= band.null[1] and band.null[0] <= high:
        return "absent here"
    return "contradicted"  # NaN too


def verdict(claim: Claim, measured: Mapping[str, Measured] | None) -> Verdict:
    """What the measurement says about the claim: the worst of its quantities decides, as `judged`."""
    if measured is None:
        return "needs a GPU" if claim.tier == "gpu" else "not yet measured"
    found = {judged(measured[name], band, claim.expected.get(name)) for name, band in claim.band.items()}
    return next(verdict for verdict in get_args(Verdict) if verdict in found)


def at_most(claim: Claim, measured: Mapping[str, Measured]) -> str:
    """Of a claim whose effect is absent here: how much of it the intervals leave room for, "at most 0.02"."""
    for name, band in claim.band.items():
        value = measured[name]
        if judged(value, band, claim.expected.get(name)) == "absent here":
            above = band.high == math.inf or value.value < band.low  # the band lies above the interval
            words, end = ("at most", value.high) if above else ("at least", value.low)
            return f"{words} {end:.3g}" if abs(end) < 100 else f"{words} {end:.0f}"
    return ""


def exactly(value: float | Tensor) -> Measured:
    """A number without uncertainty."""
    return Measured(float(value), float(value), float(value))


def over_seeds(values: Tensor) -> Measured:
    """Mean of the values (S,) and its 95 % interval by Student's t: `stats.interval`."""
    mean, half = interval(values)
    return Measured(mean, mean - half, mean + half)


def by_seed(path: Path, **chosen: Any) -> pd.DataFrame:
    """The recorded runs with these settings, a row for each seed. Seed 0 only chose learning rates, and is left out."""
    found = runs(path, "seed", **chosen)
    found = found[found["seed"] > 0].set_index("seed")
    if not found.index.is_unique:
        raise ValueError(f"{path} has several runs of one seed with {chosen}: choose between them")
    return found


def paired(first: pd.Series, second: pd.Series) -> Measured:
    """The first less the second, two values by seed, over the seeds that both have."""
    first, second = first.align(second, join="inner")
    return over_seeds(torch.tensor((first - second).to_numpy(float)))


def slope(x: Sequence[float], values: Tensor) -> Measured:
    """Exponent of values (S, K) as a power of the K numbers x, and its 95 % interval over seeds: `toy.fit_exponent`."""
    fit = toy.fit_exponent(x, values)
    return Measured(fit.slope, fit.low, fit.high)


DEPTHS = (8, 16, 32, 64)
FLAT, ROOT, LINEAR = Band(-0.1, 0.1), Band(0.4, 0.6, null=(-0.1, 0.1)), Band(0.9, 1.1, null=(-0.1, 0.1))
SMALL = LoopedConfig(vocab_size=64, block_size=32, n_layer=1, n_head=4, n_embd=64, init_std=1 / 8, embed_norm=True)
MODEL = replace(SMALL, block_size=64, n_embd=128, init_std=128**-0.5)


def shaped(rule: str, n_layer: int, n_loop: int, base: LoopedConfig = MODEL) -> LoopedConfig:
    return replace(base, rule=rule, n_layer=n_layer, n_loop=n_loop)


EXACT, ONE, NOTHING = Band(0, 1e-12), Band(1, 1), Band(0, 0)
SMALL_MODEL = "untrained model, d = 64, 8 seeds"


CLAIMS: dict[str, Claim] = {}  # by id, in the order of the page


def claim(
    id: str,
    statement: str,
    *,
    kind: Kind,
    source: str,
    published: str,
    tier: Tier,
    scale: str = "",
    band: Mapping[str, Band] | None = None,
    measure: Callable[[], Mapping[str, Measured]] | None = None,
    expected: Mapping[str, float] | None = None,
    recorded: Sequence[Path] = (),
    note: str = "",
) -> None:
    """Enter a `Claim` into the ledger. The call stands below the function that measures it."""
    caller = sys._getframe(1)
    CLAIMS[id] = Claim(
        id,
        kind,
        statement,
        source,
        published,
        tier,
        scale,
        band or {},
        measure,
        expected or {},
        tuple(recorded),
        note,
        line=(caller.f_code.co_filename, caller.f_lineno),
    )
