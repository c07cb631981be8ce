"""Streaming cells -> tidy rows -> one table: how each policy reads a text without end, arm by arm."""

import math
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from pe_ablation import atomic, record, tables
from pe_ablation.eviction import Policy
from pe_ablation.record import Run
from pe_ablation.streaming import BANDS, ONSET, Scored
from pe_ablation.train import perplexity

POINT = ["train_length", "encoding", "point", "split", "text", "reset", "tokens"]
CASE = ["window", "policy", "sinks", "evict", "positions", "limit", "absolute"]
POLICIES = ("full", "window", "sink", "recompute", "block_recompute")
NAMES = {"full": "dense"}
NOTES = (
    "- Nats per token by place in the stream, W the cached tokens: below W, W to 2W, beyond; `onset`: the first "
    f"{ONSET} places at which something is missing. Lower is better.",
    "- `collapse`: perplexity over that of `recompute`, on the targets past the first eviction that both scored (`n`): "
    "1 is no loss at all.",
    "- tokens/s is of this machine, one stream at a time, without compilation; MB: cache, and scratch of the program.",
)


def rows(runs: Iterable[tuple[Run, Container[str] | None]]) -> pd.DataFrame:
    """A row per streaming cell: point, seed, policy, nats and bits per byte of each band, collapse, cost.

    Of each run, the cells of these keys, or all that are stored.
    """
    return pd.DataFrame([row for run, keys in runs for row in _of_run(run, keys)])


def _of_run(run: Run, keys: Container[str] | None) -> list[dict[str, Any]]:
    config = run.config
    cells = run.cells("streaming")
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
            **_collapse(run, cell, cells),
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


def _collapse(run: Run, cell: dict[str, Any], cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Perplexity past the first eviction over that of `recompute`, on the targets of both."""
    nothing = {"collapse": math.nan, "collapse_targets": 0}
    others = [each for each in cells if each["policy"]["name"] == "recompute" and _comparable(each, cell)]
    if cell["status"] != "ok" or not others:
        return nothing
    most = max(others, key=lambda each: each["settings"]["recompute_targets"])
    own, other = (Scored(**run.arrays(each, Scored._fields, "streaming")) for each in (cell, most))
    policy = Policy(**cell["policy"])
    first = cell["window"] + (policy.evict == "after")
    known = dict(zip(zip(own.stream.tolist(), own.place.tolist(), strict=True), own.nats.tolist(), strict=True))
    theirs = zip(other.stream.tolist(), other.place.tolist(), other.nats.tolist(), strict=True)
    differences = [known[at, place] - nats for at, place, nats in theirs if place >= first and (at, place) in known]
    if not differences:
        return nothing
    return {"collapse": perplexity(math.fsum(differences) / len(differences)), "collapse_targets": len(differences)}


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
    for keys, group in groups:
        record = dict(zip([*POINT, *CASE], keys, strict=True))
        states = group.status.unique()
        record |= {"seeds": len(group), "status": states[0] if len(states) == 1 else "mixed"}
        record |= {"reason": group.reason.iloc[0], "method": group.method.iloc[0]}
        record |= {name: group[name].mean() for name in (*numbers, *amounts)}
        record |= {f"{name}_sd": group[name].std(ddof=1) for name in numbers}
        records.append(record)
    found = pd.DataFrame(records)
    order = sorted(found.index, key=lambda at: _presented(found.loc[at]))
    return found.loc[order].reset_index(drop=True)


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
    found: list[Any] = list(summary(frame).itertuples())
    lines = [[_cell(row, name) for name in COLUMNS] for row in found]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *lines, strict=True)]
    text = [_line(COLUMNS, widths), _line(["-" * (width - 1) + ":" for width in widths], widths)]
    text += [_line(line, widths) for line in lines]
    reasons = {f"- {row.encoding}, {_named(row)}: {row.reason}" for row in found if row.status == "n/a"}
    about = {
        f"- {row.encoding} trained at {row.train_length}: {row.tokens:,} tokens of the {row.split} split"
        f"{', each document a stream' if row.reset else ', one stream'}"
        for row in found
    }
    return "\n".join(["**Streams**", "", *text, "", *NOTES, *sorted(about), *sorted(reasons)]) + "\n"


def _line(cells: Any, widths: list[int]) -> str:
    return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


COLUMNS = (
    "encoding", "trained at", "seeds", "W", "policy", "below W", "W to 2W", "beyond", "onset", "collapse", "n", "read",
    "tokens/s", "MB",
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


def write(runs_dir: str | Path, out: Path) -> str:
    """Write streaming.csv (a row per run and cell) and streaming.md; "" and nothing where no stream was scored."""
    frame = rows((run, None) for run in record.find(runs_dir) if run.cells("streaming"))
    if frame.empty:
        return ""
    text = to_markdown(frame)
    atomic.write(out / "streaming.csv", [frame.to_csv(index=False, na_rep="NaN").encode()])
    atomic.write(out / "streaming.md", [text.encode()])
    return text
