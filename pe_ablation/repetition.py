"""How much generated token sequences repeat themselves: rep-n, distinct-n, diversity, and loops that never end.

A sequence is the continuation alone, int [T], without its prompt and cut before any padding: a padded tail is a loop
of period 1. Several sequences are a list of them, of any lengths, or int [B,T]. Every number is a share, not percent.

All T - n + 1 n-grams of a sequence count. An often copied implementation stops one short (`while end < len(tokens)`):
its rep-2 of "a b a b a b" is .50, where 5 bigrams, 2 of them unique, make .60.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

REPEATS = 3  # copies of a cycle at the end of a sequence that make a loop
LONGEST = 512  # tokens in the longest cycle looked for


class Loop(NamedTuple):
    """A sequence is periodic from index `onset` to its end: seq[i] == seq[i + period] for all i >= onset.

    `onset` is the first token of the first cycle. That cycle may still be ordinary text; the first token that repeats
    one before it is onset + period.
    """

    onset: int
    period: int


def rep_n(sequence: ArrayLike, n: int) -> float:
    """1 - unique n-grams / n-grams of one sequence int [T]: 0 where none comes twice; NaN for T < n.

    seq-rep-n of Welleck et al. 2020, "Neural text generation with unlikelihood training", arXiv:1908.04319. A pure
    loop of period p has 1 - p / (T - n + 1) where the p n-grams of its cycle differ, and more where some are alike.
    Raises ValueError for n < 1 and for what isn't a one-dimensional array of integers.
    """
    return 1 - _unique_share(_ngrams(sequence, n))


def mean_rep_n(sequences: Sequence[ArrayLike], n: int) -> float:
    """The mean of `rep_n` over the sequences that have an n-gram, each with equal weight; NaN if none has."""
    return _mean([rep_n(each, n) for each in sequences])


def distinct_n(sequences: Sequence[ArrayLike], n: int) -> float:
    """Unique n-grams / n-grams, pooled over all sequences; none spans two of them. NaN if there is no n-gram.

    Li et al. 2016, "A diversity-promoting objective function for neural conversation models", arXiv:1510.03055. It
    falls as the pool grows: compare only pools of the same number and length of sequences.
    """
    grams = [_ngrams(each, n) for each in sequences]
    return _unique_share(np.concatenate(grams)) if grams else math.nan


def diversity(sequences: Sequence[ArrayLike]) -> float:
    """The product over n = 2, 3, 4 of 1 - rep-n, per sequence, then its mean: 1 where nothing repeats.

    Su et al. 2022, "A contrastive framework for neural text generation" (SimCTG), arXiv:2202.06417. A product of
    means, or of rep-n from counts pooled over sequences, would be another number. Sequences of fewer than 4 tokens are
    skipped; NaN if all are.
    """
    return _mean([math.prod(1 - rep_n(each, n) for n in (2, 3, 4)) for each in sequences])


def find_loop(sequence: ArrayLike, repeats: int = REPEATS, longest: int = LONGEST) -> Loop | None:
    """The loop that a sequence int [T] ends in, or None.

    Its period is the smallest p <= min(longest, T // repeats) with which the last repeats * p tokens are periodic; its
    onset is as far back as that period holds, inside a cycle too. The smallest period wins even where a longer one
    reaches further back: "x a a a x a a a x a a a" ends in a loop of period 1, onset 9. More `repeats` tell such runs,
    and a text's last "...", from loops. 100,000 tokens take milliseconds, with longest = T up to a second. Raises
    ValueError for repeats < 3 and longest < 1.
    """
    tokens = _tokens(sequence)
    if repeats < 3 or longest < 1:
        raise ValueError(f"repeats {repeats}, longest {longest}: at least 3 and 1")
    largest = min(longest, len(tokens) // repeats)
    if not largest:
        return None
    backwards = tokens[::-1]
    for period in np.flatnonzero(backwards[1 : largest + 1] == backwards[0]) + 1:  # only these can match at the end
        if np.array_equal(backwards[period : repeats * period], backwards[: (repeats - 1) * period]):
            broken = np.flatnonzero(tokens[period:] != tokens[:-period])
            return Loop(int(broken[-1]) + 1 if len(broken) else 0, int(period))
    return None


def after_eviction(loop: Loop | None, evictions: ArrayLike) -> int | None:
    """How many tokens after the first eviction the loop's first cycle began; 0 is the very step of the eviction.

    `evictions` are the indices, in the continuation, of the steps at which the cache dropped a token, int [E], or the
    first of them alone (negative while the prompt was read). Only the first counts: from then on the model no longer
    sees all of the text. None where there is no loop, no eviction, or the loop began before: that one cannot come from
    eviction. A number says that the order fits, not that eviction was the cause.
    """
    steps = np.atleast_1d(np.asarray(evictions))
    if loop is None or not steps.size or loop.onset < steps.min():
        return None
    return loop.onset - int(steps.min())


def summary(sequences: Sequence[ArrayLike]) -> dict[str, float]:
    """rep_1 .. rep_4 (means), distinct_1 .. distinct_4, diversity, and `loops`, the share that end in a loop.

    Sequences too short for a loop count in `loops` as having none; without any sequence everything is NaN.
    """
    found = {f"rep_{n}": mean_rep_n(sequences, n) for n in range(1, 5)}
    found |= {f"distinct_{n}": distinct_n(sequences, n) for n in range(1, 5)}
    loops = _mean([float(find_loop(each) is not None) for each in sequences])
    return found | {"diversity": diversity(sequences), "loops": loops}


def _tokens(sequence: ArrayLike) -> np.ndarray:
    tokens = np.asarray(sequence)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise ValueError(f"a sequence is integers [T]; given {tokens.dtype} {list(tokens.shape)}")
    return tokens.astype(np.int64)  # an empty list is float64


def _ngrams(sequence: ArrayLike, n: int) -> np.ndarray:
    """All n-grams, int [max(T - n + 1, 0), n]."""
    tokens = _tokens(sequence)
    if n < 1:
        raise ValueError(f"n: {n}; at least 1")
    if len(tokens) < n:
        return np.empty((0, n), np.int64)
    return np.lib.stride_tricks.sliding_window_view(tokens, n)


def _unique_share(grams: np.ndarray) -> float:
    """Unique rows / rows of [G,n]; NaN for G = 0."""
    return len(np.unique(grams, axis=0)) / len(grams) if len(grams) else math.nan


def _mean(values: Sequence[float]) -> float:
    """The mean of those that aren't NaN; NaN, without np.nanmean's warning, if none is left."""
    known = [each for each in values if not math.isnan(each)]
    return math.fsum(known) / len(known) if known else math.nan
