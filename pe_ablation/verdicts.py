"""Tidy rows and the sums in run records -> intervals, paired differences, and a verdict for every cell.

A cell past the training length is judged by two paired differences and a third where it can be had:

- to the better null, the one of lower mean among `window_mask` and `window_recompute` (those that were scored);
- to its own 1x, the same models at their training length, with a margin (a share of the 1x value);
- the context gain at that length: a model of the same arm trained there, at its own 1x, less this one's 1x (on
  `targets` this one with a fresh train-length context). If its interval isn't wholly below 0, more context helps
  nobody measurably, and there is nothing that using it could show.

In this order:

1. a cell that is incomplete, or whose 1x or null is, has no verdict: it carries the status of what is not there;
2. a number that isn't finite fails;
3. without an interval (one seed and one document) it is "cannot discriminate";
4. where there is no context gain, a cell clearly worse than 1x (the whole interval past the margin) fails, and any
   other is "cannot discriminate", one that beats the nulls and a flat one too: where nothing can be gained, flat is
   not a failure to use context;
5. "extrapolates": the whole interval of the difference to the better null is below 0, by more than float32's rounding;
6. "stable": the whole interval of the difference to 1x is below the margin;
7. "fails": neither was shown.

Where no model of the arm was trained at a length its gain is unknown and 4 is skipped. The horizon of a point is the
longest evaluated length up to which all, 1x on, hold: extrapolate or lie within the margin, whatever 4 says of them.
"""

import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pe_ablation import record, stats
from pe_ablation.stats import Difference, Sample
from pe_ablation.tables import NULLS, POINT, Frame, label, select, summary

_log = logging.getLogger(__name__)
EXTRAPOLATES, STABLE, FAILS, CANNOT = VERDICTS = "extrapolates", "stable", "fails", "cannot discriminate"
MARGIN = 0.01  # of the 1x value
ROUNDING = 1e-5  # of the 1x value: float32 sums of the same in another order differ by less
RATIOS = {"bits_per_byte": ("bytes", 1 / math.log(2)), "nats": ("tokens", 1.0)}  # metric -> nats over what, times what
LONGEST = "longest evaluated"
_DIFFERENCES = ("null", "own", "baseline", "trained_there", "gain")
COLUMNS: dict[Any, Any] = {
    "train_length": "int64", "encoding": "str", "variant": "str", "transform": "str", "point": "str",
    "data_digest": "str", "eval_length": "int64", "protocol": "str", "split": "str", "settings": "str", "null": "str",
    "metric": "str", "seeds": "int64", "n": "int64", "documents": "Int64", "status": "str", "mean": "float64",
    "sd": "float64", "low95": "float64", "high95": "float64", "over": "str", "better_null": "str",
    **{f"{name}_{part}": "float64" for name in _DIFFERENCES for part in ("difference", "low95", "high95")},
    "baseline": "str", "baseline_t": "float64", "baseline_t_p": "float64", "baseline_sign_flip_p": "float64",
    "baseline_sign_flip": "str", "margin": "float64", "verdict": "str", "holds": "str", "horizon": "Int64",
    "horizon_end": "str", "note": "str",
}  # fmt: skip
_TEXTS = [name for name, kind in COLUMNS.items() if kind == "str"]


def verdict(own: Difference, null: Difference, gain: Difference | None, margin: float, rounding: float = 0.0) -> str:
    """Steps 3 to 7 of the module's rules: differences to 1x and to the better null, the context gain (None: unknown).

    `margin` and `rounding`, which is no difference yet, are in units of the metric.
    """
    if math.isnan(own.low) or math.isnan(null.low):
        return CANNOT
    if gain is not None and not gain.high < 0:
        return FAILS if own.low > margin else CANNOT
    if null.high < -rounding:
        return EXTRAPOLATES
    return STABLE if own.high < margin else FAILS


class Step(NamedTuple):
    """A cell on the way to the horizon; `holds` as the module says, None where that is not known."""

    length: int
    verdict: str
    holds: bool | None


def horizon(train_length: int, steps: Sequence[Step]) -> tuple[int, str]:
    """(longest length up to which all hold, what ended it), of the steps past the training length in order.

    What ended it is "longest evaluated" where nothing did, "" where a cell fails or has no position, and otherwise why
    the next one isn't known: there the horizon may lie further.
    """
    reached = train_length
    for step in steps:
        if not step.holds:
            closed = step.holds is False or step.verdict == "n/a"
            return reached, "" if closed else f"{step.verdict} at {step.length}"
        reached = step.length
    return reached, LONGEST


def statistics(
    rows: pd.DataFrame,
    runs_dir: str | os.PathLike[str],
    *,
    protocol: str = "targets",
    metric: str = "bits_per_byte",
    split: str | None = None,
    settings: str | None = None,
    baseline: str | None = None,
    margin: float = MARGIN,
) -> pd.DataFrame:
    """A row per point, null and evaluation length with the columns of COLUMNS; `runs_dir` is where `rows` come from.

    `mean` and `sd` are those of `tables.summary`; `low95` to `high95` is the bootstrap interval, resampled `over`.
    Differences are this cell less: the better null, its own 1x, the baseline arm at the same lengths, the model trained
    at that length; `gain` is the context gain. NaN where either cell is incomplete, "" where a text doesn't apply.
    `holds` is "yes", "no" or "" (not known). `note` says what could not be read or paired; such cells have no numbers.

    Raises ValueError for a metric that is no ratio of sums, a margin that isn't a positive number, and a baseline that
    is no arm of the rows, or several.
    """
    if metric not in RATIOS:
        raise ValueError(f"metric: {metric!r} has no sums to resample; allowed: {', '.join(RATIOS)}")
    if not 0 < margin < math.inf:
        raise ValueError(f"margin: {margin}; expected a positive share of the 1x value, as 0.01")
    chosen, _ = select(rows, protocol=protocol, split=split, settings=settings)
    choice: dict[str, Any] = {"metric": metric, **chosen._asdict()}
    points = _points(rows, Path(runs_dir), choice)
    _check_baseline(rows, points, baseline)
    if lost := list(dict.fromkeys(cell.note for point in points for cell in point.cells.values() if cell.note)):
        _log.warning("%d cells have no statistics; the first: %s", len(lost), lost[0])
    records = []
    for point in points:
        judged = [_judge(point, null, length, points, baseline, margin) for null, length in point.cells]
        steps = [
            Step(cell["eval_length"], cell["verdict"], {"yes": True, "no": False}.get(cell["holds"]))
            for cell in judged
            if cell["null"] == "none" and cell["eval_length"] > point.train_length
        ]
        own = point.status("none", point.train_length)
        reached = horizon(point.train_length, steps) if own == "ok" else (None, own)
        common = choice | {"margin": margin} | dict(zip(("horizon", "horizon_end"), reached, strict=True))
        records += [common | cell for cell in judged]
    frame = pd.DataFrame(records).reindex(columns=list(COLUMNS))
    frame[_TEXTS] = frame[_TEXTS].astype(object).fillna("")
    return frame.astype(COLUMNS)


@dataclass(frozen=True)
class _Cell:
    """A row of `tables.summary`, and the sums behind it where all seeds have them; `note` says why not."""

    row: dict[str, Any]
    sample: Sample | None
    note: str = ""


@dataclass(frozen=True)
class _Point:
    """An arm at one training length: `cells[null, evaluation length]`.

    Of one under a transform, `plain` is that of the same models as they were trained, where they were scored: its 1x is
    what the transform must not lose, and a fresh context is read without it.
    """

    about: dict[str, Any]
    cells: dict[tuple[str, int], _Cell]
    plain: "_Point | None" = None

    @property
    def own(self) -> _Cell | None:
        """What it is at its training length."""
        return (self.plain or self).cells.get(("none", self.train_length))

    def cell(self, null: str, length: int) -> _Cell | None:
        found = self.cells.get((null, length))
        return self.own if found is not None and null == "window_recompute" and self.plain is not None else found

    @property
    def train_length(self) -> int:
        return self.about["train_length"]

    @property
    def label(self) -> str:
        return label(self.about["encoding"], self.about["variant"], self.about["transform"])

    def status(self, null: str, length: int) -> str:
        """ "ok" only for a cell that has its sums."""
        cell = self.cell(null, length)
        if cell is None or (cell.row["status"] == "ok" and cell.sample is None):
            return "missing"
        return cell.row["status"]

    def sample(self, null: str, length: int) -> Sample | None:
        cell = self.cell(null, length)
        return cell.sample if cell else None


def _points(rows: pd.DataFrame, root: Path, choice: dict[str, Any]) -> list[_Point]:
    """All points of a selection, in the order of presentation."""
    selection = {name: choice[name] for name in ("protocol", "split", "settings")}
    part: Frame = select(rows, **selection)[1]
    scored = dict(list(part[part.status == "ok"].groupby([*POINT, "null", "eval_length"])))
    read = functools.cache(partial(sums, root, choice["metric"]))
    points: dict[tuple, _Point] = {}
    for null in NULLS:
        frame: Frame = summary(rows, null=null, **choice)
        for row in frame.to_dict("records"):
            key = tuple(row[name] for name in POINT)
            point = points.setdefault(key, _Point(dict(zip(POINT, key, strict=True)), {}))
            cell = _Cell(row, None)
            if row["status"] == "ok":
                cell = _with_sums(row, scored[(*key, null, row["eval_length"])], read, choice["metric"])
            point.cells[null, row["eval_length"]] = cell
    at = POINT.index("transform")
    plain = {key: points.get((*key[:at], "", *key[at + 1 :])) for key in points if key[at]}
    each = [replace(point, plain=plain.get(key)) for key, point in points.items()]
    return sorted(each, key=lambda point: point.train_length)


def _with_sums(row: dict[str, Any], group: Frame, read: Callable[[str, str], Any], metric: str) -> _Cell:
    """A complete cell with the sums of its seeds; without, and with a note, where they can't be read or differ."""
    group = group.sort_values("seed")
    try:
        found = sample(tuple(map(int, group.seed)), [read(*each) for each in zip(group.run, group.key, strict=True)])
        if not np.allclose(found.values, group[metric].to_numpy(np.float64), rtol=1e-9, atol=0, equal_nan=True):
            raise record.RecordError(f"{group.run.iloc[0]}: the sums of {group.key.iloc[0]} do not give its numbers")
    except (record.RecordError, stats.UnpairedError) as error:
        return _Cell(row, None, str(error))
    return _Cell(row, found)


def sample(seeds: tuple[int, ...], found: Sequence[tuple[tuple[str, ...], np.ndarray, np.ndarray]]) -> Sample:
    """One cell of several seeds from their `sums`; raises UnpairedError where these scored other documents."""
    names, tops, bottoms = zip(*found, strict=True)
    for each in names:
        if each != names[0]:
            texts = ", ".join(names[0]), ", ".join(each)
            raise stats.UnpairedError(f"seeds {seeds} scored different documents: {texts[0]} against {texts[1]}")
    return Sample(seeds, names[0], np.stack(tops), np.stack(bottoms))


def sums(root: Path, metric: str, run: str, key: str) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Names [D] and sums [D] of the metric above and below the line, of a stored cell's documents that were scored."""
    amount, scale = RATIOS[metric]
    arrays = record.Run(root / run).arrays({"key": key}, ("names", "nats", amount))
    top, bottom = arrays["nats"].sum(axis=1) * scale, arrays[amount].sum(axis=1)
    scored = bottom > 0
    return tuple(map(str, arrays["names"][scored])), top[scored], bottom[scored]


def _check_baseline(rows: Frame, points: Sequence[_Point], baseline: str | None) -> None:
    if baseline is None:
        return
    arms = [label(*each) for each in dict.fromkeys(zip(rows.encoding, rows.variant, rows["transform"], strict=True))]
    if baseline not in arms and baseline not in set(rows.encoding):
        raise ValueError(f"baseline: {baseline!r} is no arm of these runs; there are: {', '.join(arms)}")
    for point in points:
        peers = _baselines(point, points, baseline)
        if len(peers) > 1:
            names = ", ".join(repr(peer.label) for peer in peers)
            raise ValueError(
                f"baseline: {baseline!r} is several arms at training length {point.train_length}; name one of: {names}"
            )


def _baselines(point: _Point, points: Sequence[_Point], baseline: str) -> list[_Point]:
    """The points called `baseline` that were trained as long on the same data: by label, or else by encoding."""
    like = [each for each in points if each.train_length == point.train_length and _same_data(each, point)]
    named = [each for each in like if each.label == baseline]
    return named or _nearest([each for each in _plain(like) if each.about["encoding"] == baseline], point)


def _trained_at(point: _Point, length: int, points: Sequence[_Point]) -> _Point | None:
    """The same arm trained at `length` on the same data; None where there is none, or no telling which."""
    named = [each for each in _plain(points) if each.train_length == length and _same_data(each, point)]
    peers = _nearest([each for each in named if each.about["encoding"] == point.about["encoding"]], point)
    return peers[0] if len(peers) == 1 and length != point.train_length else None


def _plain(points: Sequence[_Point]) -> list[_Point]:
    """Those of models as they were trained, under no transform."""
    return [each for each in points if not each.about["transform"]]


def _nearest(peers: list[_Point], point: _Point) -> list[_Point]:
    """Among several, those that differ from their namesakes in the same fields and values as `point`."""
    alike = [each for each in peers if each.about["variant"] == point.about["variant"]]
    return alike if len(peers) > 1 and alike else peers


def _same_data(one: _Point, other: _Point) -> bool:
    return one.about["data_digest"] == other.about["data_digest"]


def _judge(
    point: _Point, null: str, length: int, points: Sequence[_Point], baseline: str | None, margin: float
) -> dict[str, Any]:
    """One row of `statistics`, without its selection and horizon."""
    cell = point.cells[null, length]
    names = ("eval_length", "seeds", "n", "status", "mean", "sd")
    found = point.about | {name: cell.row[name] for name in names} | {"null": null, "note": cell.note}
    if cell.sample is not None:
        _, low, high, over = stats.interval(cell.sample)
        found |= {"low95": low, "high95": high, "over": over, "documents": len(cell.sample.documents)}
    if null != "none":
        return found
    compared = _Comparisons(cell.note)
    found |= _against_itself(point, length, _trained_at(point, length, points), margin, compared)
    if baseline is not None:
        found |= _against_baseline(point, length, _baselines(point, points, baseline), compared)
    return found | compared.columns | {"note": "; ".join(dict.fromkeys(filter(None, compared.notes)))}


class _Comparisons:
    """The paired differences of one cell as columns, and notes on those that can't be had."""

    def __init__(self, note: str):
        self.columns: dict[str, float] = {}
        self.notes = [note]

    def add(self, name: str, one: Sample | None, other: Sample | None) -> Difference | None:
        """`one` less `other`; None where one is not there, or they aren't paired or finite."""
        if one is None or other is None or not (one.finite and other.finite):
            return None
        try:
            found = stats.difference(one, other)
        except stats.UnpairedError as error:
            self.notes.append(f"{name}: {error}")
            return None
        ends = {"difference": found.mean, "low95": found.low, "high95": found.high}
        self.columns |= {f"{name}_{part}": value for part, value in ends.items()}
        return found


def _against_itself(
    point: _Point, length: int, there: _Point | None, margin: float, compared: _Comparisons
) -> dict[str, Any]:
    """Differences to 1x, to the model trained at `length` and to the better null, and the verdict they give."""
    train = point.train_length
    cell, own = point.sample("none", length), point.own.sample if point.own else None
    trained_there = there.sample("none", length) if there else None
    compared.add("trained_there", cell, trained_there)
    to_own = compared.add("own", cell, own) if length != train else None
    if length <= train:
        return {}
    gain = compared.add("gain", trained_there, own)
    nulls = [name for name in NULLS[1:] if (name, length) in point.cells]
    needed = [("none", length), ("none", train), *((name, length) for name in nulls or NULLS[1:])]
    if lacking := [status for each in needed if (status := point.status(*each)) != "ok"]:
        return {"verdict": lacking[0], "holds": ""}
    better = min(nulls, key=lambda name: _mean(point.sample(name, length)))
    to_null = compared.add("null", cell, point.sample(better, length))
    if not (math.isfinite(_mean(cell)) and math.isfinite(_mean(own))):
        return {"better_null": better, "verdict": FAILS, "holds": "no"}
    if to_own is None or to_null is None:  # the note has the documents that differ
        return {"better_null": better, "verdict": "missing", "holds": ""}
    allowed = margin * _mean(own)
    said = verdict(to_own, to_null, gain, allowed, ROUNDING * _mean(own))
    holds = "" if math.isnan(to_own.low) else "yes" if said == EXTRAPOLATES or to_own.high < allowed else "no"
    return {"better_null": better, "verdict": said, "holds": holds}


def _mean(sample: Sample | None) -> float:
    """Over seeds; what isn't there or isn't finite counts as infinite."""
    return float(sample.values.mean()) if sample is not None and sample.finite else math.inf


def _against_baseline(
    point: _Point, length: int, baselines: Sequence[_Point], compared: _Comparisons
) -> dict[str, Any]:
    """The difference to the baseline at the same lengths, and the tests of it over seeds; nothing for itself."""
    if not baselines:
        return {}
    [baseline] = baselines
    found = {"baseline": baseline.label}
    if baseline is point:
        return found
    gap = compared.add("baseline", point.sample("none", length), baseline.sample("none", length))
    if gap is None:
        return found
    student, flipped = stats.paired_t(gap.by_seed), stats.sign_flip(gap.by_seed)
    tests = {"t": student.statistic, "t_p": student.p, "sign_flip_p": flipped.p, "sign_flip": flipped.note or "exact"}
    return found | {f"baseline_{name}": value for name, value in tests.items()}
