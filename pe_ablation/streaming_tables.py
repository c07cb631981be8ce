"""Streaming cells -> tidy rows -> one table: how each policy reads a text without end, arm by arm."""

import functools
import math
import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pe_ablation import atomic, eviction, record, stats, tables
from pe_ablation.record import Run
from pe_ablation.streaming import BANDS, ONSET, Scored, whole_cells
from pe_ablation.train import perplexity

POINT = ["train_length", "encoding", "point", "split", "text", "reset", "tokens"]
CASE = ["window", "policy", "sinks", "evict", "positions", "limit", "absolute"]
POLICIES = ("full", "window", "sink", "recompute", "block_recompute")
NAMES = {"full": "dense"}
STRETCHES = 64
NOTES = (
    "- Nats per token by place in the stream, W the cached tokens: below W, W to 2W, beyond; `onset`: the first "
    f"{ONSET} places at which something is missing. Lower is better.",
    "- `less window`: nats per token from 2W on less those of the plain window on the same targets, and a 95 % "
    f"bootstrap interval over seeds and {STRETCHES} stretches of the stream (or the documents, each its own stream).",
    "- `collapse`: perplexity over that of `recompute`, on the targets past the first eviction that both scored (`n`): "
    "1 is no loss at all.",
    "- `recompute` scores a sample of places past its first window: its bands are not of the tokens of the others'.",
    "- tokens/s is of this machine, one stream at a time, without compilation; MB: cache, and scratch of the program.",
)


def rows(runs: Iterable[tuple[Run, Container[str] | None]]) -> pd.DataFrame:
    """A row per streaming cell: point, seed, policy, nats and bits per byte of each band, collapse, cost.

    Of each run, the cells of these keys, or all that are stored.
    """
    return pd.DataFrame([row for run, keys in runs for row in _of_run(run, keys)])


def _of_run(run: Run, keys: Container[str] | None) -> list[dict[str, Any]]:
    config = run.config
    cells = whole_cells(run)
    scored = functools.cache(lambda key: Scored(**run.arrays({"key": key}, Scored._fields, "streaming")))
    return [
        {
            "train_length": cell["train_length"],
            "encoding": config["arm"],
            "point": config["point"],
            "seed": config["seed"],
            "split": cell["split"],
            "text": cell["settings"]["text"],
            "reset": cell["settings"]["reset"],
            "tokens": cell["settings"]["tokens"],
            "window": cell["window"],
            **_policy(cell["policy"]),
            "status": cell["status"],
            "reason": cell.get("reason", ""),
            "method": cell.get("method", ""),
            **_bands(cell),
            **_collapse(cell, cells, scored),
            **_stretches(cell, scored),
            "tokens_per_second": cell.get("tokens_per_second", math.nan),
            "cache_bytes": cell.get("cache_bytes", math.nan),
            "scratch_bytes": cell.get("scratch_bytes", math.nan),
        }
        for cell in cells
        if keys is None or cell["key"] in keys
    ]


def _policy(described: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": described["name"],
        "sinks": described["sinks"],
        **{name: str(described.get(name, "")) for name in ("evict", "positions", "limit", "absolute")},
    }


def _bands(cell: dict[str, Any]) -> dict[str, Any]:
    bands = cell.get("bands", {})
    return {
        f"{name}_{band}": bands.get(band, {}).get(name, math.nan)
        for band in BANDS
        for name in ("nats", "bits_per_byte", "tokens")
    }


def _collapse(cell: dict[str, Any], cells: list[dict[str, Any]], scored: Callable[[str], Scored]) -> dict[str, Any]:
    """Perplexity past the first eviction over that of `recompute`, on the targets of both."""
    nothing = {"collapse": math.nan, "collapse_targets": 0}
    others = [each for each in cells if each["policy"]["name"] == "recompute" and _comparable(each, cell)]
    if cell["status"] != "ok" or not others:
        return nothing
    most = max(others, key=lambda each: each["settings"]["recompute_targets"])
    own, other = scored(cell["key"]), scored(most["key"])
    _, mine, theirs = np.intersect1d(_places(own), _places(other), assume_unique=True, return_indices=True)
    late = own.place[mine] >= eviction.first_missing(cell["window"], cell["policy"]["evict"])
    if not late.any():
        return nothing
    difference = own.nats[mine[late]].astype(np.float64) - other.nats[theirs[late]].astype(np.float64)
    return {"collapse": perplexity(float(difference.mean())), "collapse_targets": int(late.sum())}


def _places(scored: Scored) -> np.ndarray:
    """One number for each target's stream and place."""
    return scored.stream.astype(np.int64) << 40 | scored.place.astype(np.int64)


def _stretches(cell: dict[str, Any], scored: Callable[[str], Scored]) -> dict[str, Any]:
    """Sums of nats and numbers of tokens from 2 W on, by stretches of the stream, or by streams where there are some.

    Arrays of equal length for cells of one stream, to be paired; what no table shows.
    """
    if cell["status"] != "ok":
        return {"stretch_nats": None, "stretch_tokens": None}
    found = scored(cell["key"])
    late = found.place >= 2 * cell["window"]
    reset, tokens = cell["settings"]["reset"], cell["settings"]["tokens"]
    which = found.stream if reset else found.place * STRETCHES // tokens
    count = int(found.stream.max()) + 1 if reset else STRETCHES
    sums = [np.bincount(which[late], weights, count) for weights in (found.nats[late], np.ones(late.sum()))]
    return {"stretch_nats": sums[0], "stretch_tokens": sums[1]}


def _comparable(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = ("tokens", "reset", "text")
    same = all(one["settings"][name] == other["settings"][name] for name in names)
    keys = ("step", "split", "window", "status")
    return same and one["policy"]["evict"] == other["policy"]["evict"] and all(one[key] == other[key] for key in keys)


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Means and standard deviations (ddof 1) over seeds, a row per point and policy, in the order of the table."""
    numbers = [name for name in frame.columns if name.startswith(("nats_", "bits_per_byte_")) or name == "collapse"]
    amounts = [name for name in frame.columns if name.startswith("tokens_")] + [
        "collapse_targets",
        "cache_bytes",
        "scratch_bytes",
    ]
    records = []
    groups: Any = frame.groupby([*POINT, *CASE], sort=False, dropna=False)
    parts = dict(iter(groups))
    for keys, group in parts.items():
        record: dict[str, Any] = dict(zip([*POINT, *CASE], keys, strict=True))
        window = tuple({"policy": "window", "sinks": 0}.get(name, record[name]) for name in (*POINT, *CASE))
        record |= _less_window(group, parts.get(window)) if record["policy"] == "sink" else _NO_DIFFERENCE
        states = group.status.unique()
        record |= {"seeds": len(group), "status": states[0] if len(states) == 1 else "mixed"}
        record |= {"reason": group.reason.iloc[0], "method": group.method.iloc[0]}
        record |= {name: group[name].mean() for name in (*numbers, *amounts)}
        record |= {f"{name}_sd": group[name].std(ddof=1) for name in numbers}
        records.append(record)
    found = pd.DataFrame(records)
    order = sorted(found.index, key=lambda at: _presented(found.loc[at]))
    return found.loc[order].reset_index(drop=True)


def _less_window(group: pd.DataFrame, window: pd.DataFrame | None) -> dict[str, float]:
    """Nats per token from 2 W on less those of the plain window, paired over seeds and stretches, and its interval."""
    if window is None or set(group.status) | set(window.status) != {"ok"} or set(group.seed) != set(window.seed):
        return _NO_DIFFERENCE
    used = np.stack(group.stretch_tokens.to_list()).min(axis=0) > 0
    if not used.any():
        return _NO_DIFFERENCE
    found = stats.difference(_sample(group, used), _sample(window, used))
    return dict(zip(_NO_DIFFERENCE, (found.mean, found.low, found.high), strict=True))


_NO_DIFFERENCE = {"less_window": math.nan, "less_window_low": math.nan, "less_window_high": math.nan}


def _sample(group: pd.DataFrame, used: np.ndarray) -> stats.Sample:
    ordered: Any = group.sort_values("seed")
    names = tuple(str(number) for number in np.flatnonzero(used))
    nats, tokens = (np.stack(ordered[name].to_list())[:, used] for name in ("stretch_nats", "stretch_tokens"))
    return stats.Sample(tuple(ordered.seed), names, nats, tokens)


def _presented(row: Any) -> tuple:
    return (
        row.train_length,
        *tables.family(row.encoding),
        row.point,
        row.split,
        row.tokens,
        row.window,
        row.positions,
        row.absolute,
        POLICIES.index(row.policy),
        row.sinks,
    )


def to_markdown(frame: pd.DataFrame) -> str:
    """The table of `rows`, with what its columns are."""
    every: list[Any] = list(summary(frame).itertuples())
    found = [row for row in every if row.status != "n/a"]
    lines = [[_cell(row, name) for name in COLUMNS] for row in found]
    widths = [max(2, *map(len, column)) for column in zip(COLUMNS, *lines, strict=True)]
    text = [_line(COLUMNS, widths), _line(["-" * (width - 1) + ":" for width in widths], widths)]
    text += [_line(line, widths) for line in lines]
    about = {
        f"- {row.encoding} trained at {row.train_length}: {row.tokens:,} tokens of the {row.split} split"
        f"{', each document a stream' if row.reset else ', one stream'}"
        for row in every
    }
    return "\n".join(["**Streams**", "", *text, "", *NOTES, *sorted(about), *_not_read(every)]) + "\n"


def _not_read(rows: list[Any]) -> list[str]:
    """A line per arm and reason for which it was not read under some policies."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.status == "n/a":
            reasons.setdefault((row.encoding, row.reason), []).append(f"{_named(row)} of W {row.window}")
    return [f"- n/a: {arm}, {', '.join(names)}: {reason}" for (arm, reason), names in reasons.items()]


def _line(cells: Any, widths: list[int]) -> str:
    return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


COLUMNS = (
    "encoding", "trained at", "seeds", "W", "policy", "below W", "W to 2W", "beyond", "less window", "onset",
    "collapse", "n", "read", "tokens/s", "MB",
)  # fmt: skip


def _cell(row: Any, column: str) -> str:
    """One cell of the table as text."""
    scored = row.status == "ok"
    match column:
        case "encoding":
            return row.encoding
        case "trained at":
            return str(row.train_length)
        case "seeds":
            return str(row.seeds)
        case "W":
            return str(row.window)
        case "policy":
            return _named(row)
        case "read":
            return row.method if scored else row.status
        case "less window":
            low, high = row.less_window_low, row.less_window_high
            if math.isnan(row.less_window):
                return ""
            return f"{row.less_window:+.3f}" + ("" if math.isnan(low) else f" [{low:+.3f}, {high:+.3f}]")
        case "n":
            return f"{row.collapse_targets:,.0f}" if scored and row.collapse_targets else ""
        case "collapse":
            return _number(row.collapse) if scored else ""
        case "tokens/s":
            return f"{row.tokens_per_second:,.0f}" if scored else ""
        case "MB":
            return f"{row.cache_bytes / 1e6:.1f} + {row.scratch_bytes / 1e6:.1f}" if scored else ""
    band = {"below W": "below_w", "W to 2W": "below_2w", "beyond": "beyond", "onset": "onset"}[column]
    return _number(getattr(row, f"nats_{band}")) if scored else ""


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}" if value < 1000 else f"{value:.3g}"


def _named(row: Any) -> str:
    """The policy in words: what differs from the plain one in brackets."""
    name = str(NAMES.get(row.policy, row.policy))
    if row.policy == "sink":
        name += f" {row.sinks}+{row.window - row.sinks}"
    special = [row.absolute, "" if row.positions == "in_cache" else f"{row.positions} {row.limit}".strip()]
    special += ["evict before"] * (row.evict == "before")
    if row.policy == "full":
        special = []
    marks = ", ".join(filter(None, special))
    return f"{name} ({marks})" if marks else name


def _tidy(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns=["stretch_nats", "stretch_tokens"])


def write(runs_dir: str | os.PathLike[str], out: Path) -> str:
    """Write streaming.csv (a row per run and cell) and streaming.md; "" and nothing where no stream was scored."""
    frame = rows((run, None) for run in record.find(Path(runs_dir)) if run.cells("streaming"))
    if frame.empty:
        return ""
    text = to_markdown(frame)
    atomic.write(out / "streaming.csv", [_tidy(frame).to_csv(index=False, na_rep="NaN").encode()])
    atomic.write(out / "streaming.md", [text.encode()])
    return text
