"""Verdicts, intervals and differences as text: the part of table.md that says what is known and what is noise."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from pe_ablation import stats
from pe_ablation.tables import METRICS, POINT, SYMBOLS, Frame, grid, label, number, text_grid
from pe_ablation.verdicts import CANNOT, EXTRAPOLATES, FAILS, STABLE, VERDICTS

UNSURE = "fails?"  # how a cell is shown of which neither failing nor the opposite is sure


def to_markdown(frame: pd.DataFrame) -> str:
    """`verdicts.statistics` of one selection as markdown that also reads in a terminal, with how it was made."""
    shown: Frame = frame[frame.null == "none"]
    cells = list(shown.itertuples(index=False))
    metric, lengths = cells[0].metric, sorted({cell.eval_length for cell in cells})
    beyond = sorted({cell.eval_length for cell in cells if cell.eval_length > cell.train_length})
    parts = []
    if beyond:
        ends = ("horizon", [_horizon_text(point[0]) for point in _points(cells)])
        parts += [f"**Verdicts** past the training length, at a margin of {_percent(cells[0].margin)} of the 1x value"]
        parts += [grid(_pivot(cells, beyond, _verdict_text), ends), "\n".join(_meanings(cells))]
    parts += [f"{METRICS[metric]}: 95 % interval of the mean"]
    parts += [grid(_pivot(cells, lengths, partial(_bounds_text, "", metric)))]
    if beyond:
        parts += ["Difference to the better null: 95 % interval (below 0: the text past the training length helps)"]
        parts += [grid(_pivot(cells, beyond, partial(_bounds_text, "null_", metric)))]
    parts += [*_baseline_part(cells), *_trained_there_part(cells), "\n".join(_notes(cells))]
    return "\n\n".join(parts) + "\n"


def _points(cells: Sequence[Any]) -> list[list[Any]]:
    """The rows of each point, which stand together."""
    return [list(point) for _, point in itertools.groupby(cells, lambda cell: [getattr(cell, name) for name in POINT])]


def _pivot(cells: Sequence[Any], lengths: Sequence[int], text: Callable[[Any], str]) -> pd.DataFrame:
    """Points against evaluation lengths with the text of each row; "" was never planned."""
    index, lines = [], []
    for point in _points(cells):
        index.append((point[0].train_length, _label(point[0]), point[0].seeds))
        texts = {cell.eval_length: text(cell) for cell in point}
        lines.append([texts.get(length, "") for length in lengths])
    names = pd.MultiIndex.from_tuples(index, names=["train_length", "encoding", "seeds"])
    return pd.DataFrame(lines, index=names, columns=pd.Index(lengths, name="eval_length"))


def _label(cell: Any) -> str:
    return label(cell.encoding, cell.variant, cell.transform)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _verdict_text(cell: Any) -> str:
    if cell.eval_length < cell.train_length:
        return "< 1x"
    if cell.eval_length == cell.train_length:
        return "1x" if cell.status == "ok" else _status_text(cell, cell.status)
    if cell.verdict == FAILS and not cell.own_low95 > cell.margin * (cell.mean - cell.own_difference):
        return UNSURE if math.isfinite(cell.own_low95) else FAILS
    return cell.verdict if cell.verdict in VERDICTS else _status_text(cell, cell.verdict)


def _status_text(cell: Any, status: str) -> str:
    """A status as in the table of numbers, with how many of how many seeds are there."""
    text: str = SYMBOLS.get(status, status)
    return f"{text} ({cell.n}/{cell.seeds})" if 0 < cell.n < cell.seeds else text


def _bounds_text(name: str, metric: str, cell: Any) -> str:
    """[low, high] of the interval `name`; the status of an incomplete cell, "" where there is no interval."""
    low, high = getattr(cell, f"{name}low95"), getattr(cell, f"{name}high95")
    if cell.status != "ok":
        return _status_text(cell, cell.status)
    return "" if math.isnan(low) else f"[{number(low, metric)}, {number(high, metric)}]"


def _gap_text(name: str, cell: Any) -> str:
    """Mean and interval of a difference, the mean with its sign; "" where there is none."""
    mean = getattr(cell, f"{name}_difference")
    return "" if math.isnan(mean) else f"{mean:+.3f} {_bounds_text(f'{name}_', cell.metric, cell)}".strip()


def _horizon_text(cell: Any) -> str:
    if pd.isna(cell.horizon):
        return _status_text(cell, cell.horizon_end)
    text = f"{cell.horizon} ({cell.horizon / cell.train_length:.3g}x)"
    return f"≥ {text}" if cell.horizon_end else text


def _baseline_part(cells: Sequence[Any]) -> list[str]:
    compared = [cell for cell in cells if cell.baseline]
    if not compared:
        return []

    def text(cell: Any) -> str:
        if cell.baseline == _label(cell):
            return "baseline"
        return _gap_text("baseline", cell) or ("" if cell.status == "ok" else _status_text(cell, cell.status))

    names = ", ".join(f"`{name}`" for name in dict.fromkeys(cell.baseline for cell in compared))
    title = (
        f"Difference to {names} at the same training and evaluation length: mean and 95 % interval (below 0: better)"
    )
    return [title, grid(_pivot(compared, sorted({cell.eval_length for cell in compared}), text))]


def _trained_there_part(cells: Sequence[Any]) -> list[str]:
    """A row for each cell at whose length the same arm was trained too."""
    there = [cell for cell in cells if not math.isnan(cell.trained_there_difference)]
    if not there:
        return []
    lines = [("train length", "encoding", "at", "less the model trained there", "context gain there")]
    for cell in there:
        gaps = _gap_text("trained_there", cell), _gap_text("gain", cell)
        lines.append((str(cell.train_length), _label(cell), str(cell.eval_length), *gaps))
    title = (
        "Gap to a model of the same arm trained at that length (below 0: better than it), and the context gain: "
        "that model less this one at its own 1x (below 0: there is something to gain)"
    )
    return [title, text_grid(lines, left=(1,))]


def _meanings(cells: Sequence[Any]) -> list[str]:
    """What the verdicts that occur mean."""
    texts = {_verdict_text(cell) for cell in cells}
    margin = _percent(cells[0].margin)
    meanings = {
        EXTRAPOLATES: "better than the better null (the lower mean of `window_mask` and `window_recompute`), the 95 % "
        "interval of the paired difference wholly below 0, by more than float32's rounding.",
        STABLE: f"not shown to be better, but not worse than its own 1x by {margin}, 95 % interval included.",
        FAILS: f"worse than its own 1x by over {margin}, or not a finite number.",
        UNSURE: f"neither of these is shown: the interval of the difference to 1x reaches to both sides of {margin}.",
        CANNOT: "a model of the same arm trained at that length gains nothing, beyond noise, over this one at its 1x, "
        "so that using more context could not show (or there is one seed and one document, and no interval).",
    }
    lines = [f"- {name}: {meaning}" for name, meaning in meanings.items() if name in texts]
    return [
        *lines,
        "- Horizon: the longest evaluated length up to which every one is stable or extrapolates, or is as flat where "
        "that cannot be discriminated; ≥: what comes after it was not evaluated or is not there.",
    ]


def _notes(cells: Sequence[Any]) -> list[str]:
    """How the intervals came about, on how many seeds, and what they can't say."""
    groups: dict[tuple[int, str], set[int]] = {}
    for cell in cells:
        if cell.over:
            groups.setdefault((cell.n, cell.over), set()).add(int(cell.documents))
    problems = [note for note in dict.fromkeys(cell.note for cell in cells) if note]
    return [
        *(f"- n = {n}: {_how(n, over, documents)}" for (n, over), documents in sorted(groups.items())),
        "- Differences are paired over seeds and documents; nothing is corrected for how many there are.",
        *(
            [f"- Not read or not paired, {len(problems)} in all (stats.csv has each): {problems[0]}"]
            if problems
            else []
        ),
    ]


def _how(n: int, over: str, documents: set[int]) -> str:
    count = "-".join(map(str, sorted({min(documents), max(documents)})))
    drawn = {
        "seeds and documents": f"seeds and of the {count} documents (the same draw of documents for all seeds)",
        "documents only": f"the {count} documents only: nothing is said of other seeds",
        "seeds only": "seeds only: nothing is said of other documents",
    }
    made = (
        f"intervals are percentiles of {stats.RESAMPLES:,} bootstrap resamples of {drawn[over]}"
        if over in drawn
        else ""
    )
    narrow = " Over so few seeds they are too narrow." if 1 < n < stats.FEWEST else ""
    test = stats.sign_flip(np.ones(n)).note or "exact, in stats.csv for differences to a named baseline"
    return f"{made or 'one seed and one document, no interval'}.{narrow} Sign-flip test over seeds: {test}."
