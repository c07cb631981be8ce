"""Two folders of runs held against each other: in what their configs differ, and paired differences of every cell.

Points are matched by arm and training length, their cells by evaluation length; seeds and documents are paired by
number and name, so what both sides share (a hard document, a lucky seed) is not in the interval.
"""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pe_ablation import atomic, record, report, stats, verdicts
from pe_ablation.tables import (
    METRICS,
    Frame,
    Selection,
    describe,
    differing,
    label,
    points,
    select,
    selections,
    span,
    text_grid,
)
from pe_ablation.verdicts import RATIOS

COLUMNS: dict[Any, Any] = {
    "train_length": "int64", "arm": "str", "eval_length": "int64", "protocol": "str", "split": "str", "metric": "str",
    "status": "str", "seeds": "str", "n": "int64", "documents": "Int64", "first": "float64", "second": "float64",
    "difference": "float64", "low95": "float64", "high95": "float64", "over": "str", "unpaired_seeds": "str",
}  # fmt: skip
NAMED = 5  # documents, at most, in a message


class Side(NamedTuple):
    """A folder of runs, and its points of one selection by (training length, arm)."""

    root: Path
    points: dict[tuple[int, str], Frame]

    def fields(self, key: tuple[int, str]) -> dict[str, Any]:
        """What makes the point, by dotted path, and the data that it was trained on."""
        config = record.Run(self.root / self.points[key].run.iloc[0]).config
        return report.fields(config["experiment"]) | {"data digest": config["data_digest"], "point": config["point"]}


def write(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    protocol: str | None = None,
    metric: str = "bits_per_byte",
    split: str = "validation",
    field: str | None = None,
    seed: int | None = None,
) -> str:
    """Write compare.csv (COLUMNS) and compare.md, whose text is returned; `field` and `seed` as in `report.write`.

    Raises ValueError if nothing was scored alike in both, no point is in both, or matched cells scored other documents.
    """
    if metric not in RATIOS:
        raise ValueError(f"metric: {metric!r} has no sums to compare by; allowed: {', '.join(RATIOS)}")
    frames = [report.asked(each, split, protocol, field, seed)[0] for each in (first, second)]
    chosen = _common(frames, (first, second))
    sides = [_side(Path(root), frame, chosen) for root, frame in zip((first, second), frames, strict=True)]
    keys = [key for key in sides[0].points if key in sides[1].points]
    if not keys:
        raise ValueError("no arm and training length is in both: " + " | ".join(map(_arms, sides)))
    found = differences(sides[0], sides[1], keys, chosen, metric)
    text = _to_markdown(sides, keys, found, chosen, metric)
    out = report.folder(out_dir)
    atomic.write(out / "compare.csv", [report.to_csv(found)])
    atomic.write(out / "compare.md", [text.encode()])
    return text


def _common(frames: Sequence[pd.DataFrame], names: Sequence[Any]) -> Selection:
    """What both were scored by; the first of the first side's that the second has."""
    ways = [selections(frame) for frame in frames]
    common = [each for each in ways[0] if each in ways[1]]
    if not common:
        texts = [
            f"{name}: {'; '.join(' / '.join(each) for each in own)}" for name, own in zip(names, ways, strict=True)
        ]
        raise ValueError(f"not scored alike, so no targets in common. {' | '.join(texts)}")
    return common[0]


def _side(root: Path, frame: pd.DataFrame, chosen: Selection) -> Side:
    part: Frame = select(frame, **chosen._asdict())[1]
    part = part[part.null == "none"]
    return Side(root, {(int(each.train_length.iloc[0]), _arm(each)): each for each in points(part)})


def _arm(group: Frame) -> str:
    return label(*(group[name].iloc[0] for name in ("encoding", "variant", "transform")))


def _arms(side: Side) -> str:
    return f"{side.root}: " + ", ".join(f"{arm} at {length}" for length, arm in side.points)


def differences(
    first: Side, second: Side, keys: Sequence[tuple[int, str]], chosen: Selection, metric: str
) -> pd.DataFrame:
    """A row of COLUMNS per matched point and evaluation length: the second side less the first.

    Over the seeds that both have, all of which must be scored: else `status` says what isn't, and numbers are NaN.
    """
    records = []
    for key in keys:
        pair = first.points[key], second.points[key]
        about = {"train_length": key[0], "arm": key[1], "protocol": chosen.protocol, "split": chosen.split}
        alone = sorted(set(pair[0].seed) ^ set(pair[1].seed))
        about |= {"metric": metric, "unpaired_seeds": " ".join(map(str, alone))}
        for length in sorted(set(pair[0].eval_length) & set(pair[1].eval_length)):
            cells = [side[side.eval_length == length].set_index("seed").sort_index() for side in pair]
            where = f"{key[1]} at training length {key[0]}, evaluation length {length}"
            records.append(about | {"eval_length": length} | _cell(cells, (first.root, second.root), metric, where))
    return pd.DataFrame(records).reindex(columns=list(COLUMNS)).astype(COLUMNS)


def _cell(cells: Sequence[Frame], roots: Sequence[Path], metric: str, where: str) -> dict[str, Any]:
    seeds = tuple(map(int, cells[0].index.intersection(cells[1].index)))
    common: dict[str, Any] = {"seeds": " ".join(map(str, seeds)), "n": len(seeds), "over": ""}
    status = [_status(each.loc[list(seeds)]) if seeds else "no seed in common" for each in cells]
    if status != ["ok", "ok"]:
        return common | {"status": status[0] if status[0] == status[1] else f"{status[0]} | {status[1]}"}
    one, other = (_sample(each, seeds, root, metric) for each, root in zip(cells, roots, strict=True))
    _refuse_other_documents(one, other, roots, where)
    found = stats.difference(other, one)
    return common | {
        "status": "ok",
        "documents": len(one.documents),
        "first": float(one.values.mean()),
        "second": float(other.values.mean()),
        "difference": found.mean,
        "low95": found.low,
        "high95": found.high,
        "over": stats.over(one),
    }


def _status(cells: Frame) -> str:
    return ", ".join(dict.fromkeys(status for status in cells.status if status != "ok")) or "ok"


def _sample(cells: Frame, seeds: tuple[int, ...], root: Path, metric: str) -> stats.Sample:
    """The sums [seeds, documents] of one side's cell; raises ValueError where its own seeds scored other documents."""
    found = [verdicts.sums(root, metric, cells.run[seed], cells.key[seed]) for seed in seeds]
    try:
        return verdicts.sample(seeds, found)
    except stats.UnpairedError as error:
        raise stats.UnpairedError(f"{root}: {error}") from None


def _refuse_other_documents(one: stats.Sample, other: stats.Sample, roots: Sequence[Path], where: str) -> None:
    """The same names, and as much of each: a name alone doesn't say that its text is the same."""
    if one.documents != other.documents:
        alone = [
            f"{root} {_listed([name for name in own.documents if name not in against.documents])}"
            for root, own, against in zip(roots, (one, other), (other, one), strict=True)
        ]
        raise ValueError(f"{where}: other documents were scored. Alone or in another order: {'; '.join(alone)}")
    unequal = np.flatnonzero((one.bottom != other.bottom).any(axis=0))
    if len(unequal):
        name, counts = one.documents[unequal[0]], (one.bottom[0, unequal[0]], other.bottom[0, unequal[0]])
        texts = [f"{count:,.0f} in {root}" for count, root in zip(counts, roots, strict=True)]
        raise ValueError(f"{where}: {name} was scored over other amounts: {', '.join(texts)}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"({len(names)}) {', '.join(names[:NAMED])}{more}"


def _to_markdown(
    sides: Sequence[Side], keys: Sequence[tuple[int, str]], found: Frame, chosen: Selection, metric: str
) -> str:
    names = [str(side.root) for side in sides]
    lines = [
        f"**{METRICS[metric]}: {names[1]} less {names[0]}**, protocol `{chosen.protocol}`, split `{chosen.split}` "
        "(below 0: the second is better)",
        "",
        text_grid(_grid(found), left=(1,)),
        "",
        f"- Scored: {describe(chosen)}",
        f"- Mean over seeds of the paired difference, and its {stats.LEVEL:.0%} interval by bootstrap over "
        f"{' or '.join(dict.fromkeys(each for each in found.over if each)) or 'nothing'}; n is the number of paired "
        f"seeds, on {span(found.documents, '{:.0f}'.format, 'no')} paired documents.",
    ]
    lines += [f"- {text}." for text in _unpaired(sides, keys, found)]
    lines += ["", "Configs", "", *_diff(sides, keys), *itertools.chain(*map(_within, sides))]
    return "\n".join(lines) + "\n"


def _grid(found: Frame) -> list[list[str]]:
    lengths = sorted(found.eval_length.unique())
    lines = [["train length", "encoding", "n", *map(str, lengths)]]
    for (train_length, arm), group in found.groupby(["train_length", "arm"], sort=False):
        cells = {row.eval_length: _text(row) for row in group.itertuples()}
        counts = "/".join(map(str, dict.fromkeys(group.n)))
        lines.append([str(train_length), str(arm), counts, *(cells.get(length, "") for length in lengths)])
    return lines


def _text(row: Any) -> str:
    if row.status != "ok":
        return row.status
    ends = f" [{row.low95:+.3f}, {row.high95:+.3f}]" if math.isfinite(row.low95) else ""
    return f"{row.difference:+.3f}{ends}"


def _unpaired(sides: Sequence[Side], keys: Sequence[tuple[int, str]], found: Frame) -> list[str]:
    """What is in one folder alone."""
    texts = []
    for side in sides:
        alone = [f"{arm} at {length}" for length, arm in side.points if (length, arm) not in keys]
        texts += [f"Only in {side.root}: {', '.join(alone)}"] if alone else []
    for (seeds, arm, length), _ in found.groupby(["unpaired_seeds", "arm", "train_length"], sort=False):
        texts += [f"Seeds of one folder alone, left out: {seeds} ({arm} at {length})"] if seeds else []
    return texts


def _diff(sides: Sequence[Side], keys: Sequence[tuple[int, str]]) -> list[str]:
    """A table of the fields in which matched points differ, with both values and where."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for key in keys:
        one, other = (side.fields(key) for side in sides)
        changed = [name for name in {**one, **other} if name != "point" and one.get(name) != other.get(name)]
        changed += ["point"] if not changed and one["point"] != other["point"] else []  # the encoding's code
        for name in changed:
            values = (_shown(one, name), _shown(other, name))
            where.setdefault((name, *values), []).append(f"{key[1]} at {key[0]}")
    if not where:
        return ["No field differs between matched points: the same experiments twice."]
    lines = [("field", str(sides[0].root), str(sides[1].root), "in")]
    lines += [(*each, "all" if len(found) == len(keys) else ", ".join(found)) for each, found in where.items()]
    return [text_grid(lines, left=(0, 1, 2, 3))]


def _shown(fields: Mapping[str, Any], name: str) -> str:
    """A value as text; a field that one side doesn't have (another encoding's option) is "-"."""
    return str(fields[name])[:60] if name in fields else "-"


def _within(side: Side) -> list[str]:
    """The fields, other than encoding and training length, in which one folder's points differ among themselves."""
    text = differing(each for group in side.points.values() for each in group.differs)
    return ["", f"Within {side.root}, points also differ in: {text}."] if text else []
