"""What is known and what is noise: means, intervals, paired differences and tests over seeds and documents.

A measurement is a ratio of sums, nats over bytes (or tokens), known for every seed and document. Its interval is a
bootstrap over both at once: a resample draws seeds with replacement and documents with replacement. All seeds are
scored on the same documents, so that documents are crossed with seeds, not nested in them: a resample takes one draw
of documents for all its seeds (Owen 2007, "The pigeonhole bootstrap", Annals of Applied Statistics 1, 386-411, who
shows its variance to be slightly too large, never too small, for many seeds and documents). Differences resample
both cells alike, which keeps what they share, the hardness of a document and the luck of a seed, out of the interval.

With few seeds the interval is too narrow: a bootstrap over n seeds has (n - 1)/n of their variance and knows nothing
of Student's t. Where seeds make most of the noise a 95 % interval over 3 of them covers about 75 % of the time.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
FEWEST = 6  # seeds of a sign-flip test: the smallest two-sided p, 2 / 2^n, is .0625 at 5 and .03125 at 6
ROUNDING = 1e-12  # of the largest difference: less spread than this is that of float64 sums
MOST = 24  # seeds whose sign patterns are counted one by one
_SEEDS, _DOCUMENTS = 1, 2  # first halves of the Philox keys; the second is the number of units


class UnpairedError(ValueError):
    """Two cells without the same seeds or documents; the message has both lists."""


class Moments(NamedTuple):
    """Over seeds: their number, mean and sample standard deviation (ddof 1; NaN for one seed or a non-finite one)."""

    n: int
    mean: float
    sd: float


class Interval(NamedTuple):
    """A mean over seeds and its 95 % interval; `over` says what was resampled.

    low and high are NaN where a value isn't finite and where there is one seed and one document: nothing varies there.
    """

    mean: float
    low: float
    high: float
    over: str


class Difference(NamedTuple):
    """The mean over seeds of one cell less another, its 95 % interval, and the difference of each seed, float64 [S]."""

    mean: float
    low: float
    high: float
    by_seed: np.ndarray


class Outcome(NamedTuple):
    """A statistic and its two-sided p; NaN where there is none, and then `note` says why."""

    statistic: float
    p: float
    note: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One cell: sums `top` (nats) over sums `bottom` (bytes or tokens), float64 [S seeds, D documents].

    Documents without a scored target are left out by the caller. Raises ValueError for other shapes and for a bottom
    that isn't positive.
    """

    seeds: tuple[int, ...]
    documents: tuple[str, ...]
    top: np.ndarray
    bottom: np.ndarray
    resamples: int = RESAMPLES

    def __post_init__(self):
        expected = (len(self.seeds), len(self.documents))
        for name, array in (("top", self.top), ("bottom", self.bottom)):
            if array.shape != expected or 0 in expected:
                raise ValueError(f"{name}: shape {array.shape}; expected {expected}: seeds, documents, one at least")
        if not (self.bottom > 0).all():
            raise ValueError("bottom: a document without a scored target; leave such documents out")
        if self.resamples < 1:
            raise ValueError(f"resamples: {self.resamples}; at least 1")

    @property
    def values(self) -> np.ndarray:
        """The ratio of each seed, float64 [S]."""
        return self.top.sum(axis=1) / self.bottom.sum(axis=1)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.top).all())

    @functools.cached_property
    def replicates(self) -> np.ndarray:
        """The ratio of each seed in every resample of the documents, float64 [resamples, S]; NaN if not finite."""
        if not self.finite:
            return np.full((self.resamples, len(self.seeds)), math.nan)
        drawn = _draws(_DOCUMENTS, len(self.documents), self.resamples)
        return _weighted(drawn, self.top.T) / _weighted(drawn, self.bottom.T)


def moments(values: np.ndarray) -> Moments:
    """n, mean and sample standard deviation of the values of n >= 1 seeds [n]."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 and np.isfinite(values).all() else math.nan
    return Moments(len(values), float(np.mean(values)), sd)


def interval(sample: Sample) -> Interval:
    """A cell's mean over seeds with its bootstrap interval."""
    low, high = _bounds(sample.replicates, len(sample.documents))
    return Interval(float(sample.values.mean()), low, high, over(sample))


def difference(one: Sample, other: Sample) -> Difference:
    """`one` less `other`, paired over seeds and documents; raises UnpairedError unless they are the same in both."""
    for what in ("seeds", "documents"):
        pair = getattr(one, what), getattr(other, what)
        if pair[0] != pair[1]:
            texts = [", ".join(map(str, each)) for each in pair]
            raise UnpairedError(f"not the same {what}, so nothing to pair: {texts[0]} against {texts[1]}")
    if not (one.finite and other.finite):
        gap = np.full(len(one.seeds), math.nan)
        return Difference(math.nan, math.nan, math.nan, gap)
    gap = one.values - other.values
    return Difference(float(gap.mean()), *_bounds(one.replicates - other.replicates, len(one.documents)), gap)


def over(sample: Sample) -> str:
    """What the bootstrap of a cell resamples: a single seed, or a single document, says nothing of others."""
    several = [what for what in ("seeds", "documents") if len(getattr(sample, what)) > 1]
    return f"{several[0]} only" if len(several) == 1 else " and ".join(several) or "nothing"


def paired_t(differences: np.ndarray) -> Outcome:
    """Student's paired t over seeds, two-sided, from their differences [n].

    As in Chi et al. 2022 (KERPLE), at alpha .05. No p for one seed, or where all differences are the same number.
    """
    from scipy.special import stdtr

    n, mean, sd = moments(differences)
    if not sd > ROUNDING * np.max(np.abs(differences)):
        return Outcome(math.nan, math.nan, f"no spread over seeds at n = {n}")
    t = mean / (sd / math.sqrt(n))
    return Outcome(t, float(2 * stdtr(n - 1, -abs(t))))


def sign_flip(differences: np.ndarray) -> Outcome:
    """The exact test that flips the sign of every seed's difference [n]: the share of all 2^n means as far from 0.

    Two-sided. Below 6 seeds even the smallest p, 2 / 2^n, is above .05, and none is given.
    """
    n, mean = len(differences), float(np.mean(differences))
    if n < FEWEST:
        return Outcome(mean, math.nan, f"cannot reach .05 at n = {n}")
    if n > MOST or not math.isfinite(mean):
        return Outcome(mean, math.nan, f"not enumerated: n = {n}, mean {mean}; at most {MOST} finite differences")
    sums = differences[:1]  # the first sign is kept: the other half are the same distances from 0
    for each in differences[1:]:
        sums = np.concatenate([sums + each, sums - each])
    rounding = 1e-12 * np.abs(differences).sum()
    return Outcome(mean, float(np.mean(np.abs(sums) >= abs(mean) * n - rounding)))


def _bounds(replicates: np.ndarray, documents: int) -> tuple[float, float]:
    """Percentiles of the mean over resampled seeds of replicates [resamples, S]."""
    resamples, seeds = replicates.shape
    if seeds == documents == 1 or not np.isfinite(replicates).all():
        return math.nan, math.nan
    means = (_draws(_SEEDS, seeds, resamples) * replicates).sum(axis=1) / seeds
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@functools.lru_cache(maxsize=32)
def _draws(kind: int, units: int, resamples: int) -> np.ndarray:
    """How often each unit is drawn, uint16 [resamples, units]: the same ones in every process and comparison."""
    generator = np.random.Generator(np.random.Philox(key=[kind, units]))
    return generator.multinomial(units, np.full(units, 1 / units), size=resamples).astype(np.uint16)


def _weighted(drawn: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """uint16 [resamples, D] times [D, S], in pieces: as float64 all draws of many documents would take much memory."""
    rows = max(1, 2**22 // drawn.shape[1])
    return np.concatenate([drawn[at : at + rows] @ sums for at in range(0, len(drawn), rows)])
