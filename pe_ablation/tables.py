"""Tidy rows -> seed statistics -> tables. A cell is a number only if every planned seed has it.

Kept apart from `report`, which reads run directories, so that anything with the columns of `report.rows` can be tabled.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pe_ablation import stats

Frame = Any  # a DataFrame; to the type checker, pandas' selections of rows may be a Series or an array too
# The order of presentation, that of the registry; an arm called NAME_suffix stands beside NAME, any other follows by
# name.
ORDER = (
    "none", "sinusoidal", "learned", "rope", "alibi", "t5", "transformer_xl", "p_rope", "xpos", "shaw", "cope", "fox",
    "kerple_log", "kerple_power", "fire", "sandwich", "sum", "dape",
)  # fmt: skip
METRICS = {
    "bits_per_byte": "Bits per byte", "nats": "Nats per token", "perplexity": "Perplexity per token",
    "word_perplexity": "Perplexity per word",
}  # fmt: skip
NULLS = ("none", "window_mask", "window_recompute")
POINT = ["train_length", "encoding", "variant", "point", "data_digest", "transform"]
SYMBOLS = {"missing": "-"}
DAGGER = "†"
UNTRAINED = (
    f"{DAGGER}: the number depends on entries of the encoding's parameters that no training gradient reached "
    "(buckets of distances past the training length), so on their initial values"
)
TRANSFORMED = (
    "`+ NAME`: the same models under this transform, for evaluation alone; a factor that isn't named is the evaluation "
    "length over the training length, at least 1. So is their null `window_mask`; verdicts hold them against the 1x of "
    "the models as they were trained, and a fresh context is read by these, where they were scored"
)
MEANINGS = {
    "n/a": "n/a: the encoding has no position for this length",
    "OOM": "OOM: out of memory",
    "diverged": "diverged: training or scoring left the finite numbers",
    "failed": "failed: the run ended with an error",
    "missing": "-: planned and not there",
}
NULL_TITLES = {
    "window_mask": "Null `window_mask`: the same models, every query limited to the last train-length keys",
    "window_recompute": "Null `window_recompute`: the same models, a fresh context of train-length tokens",
}


STATUSES = ("ok", *MEANINGS)


class Selection(NamedTuple):
    """What one table may hold: one protocol, one split, one set of protocol settings (canonical JSON)."""

    protocol: str
    split: str
    settings: str


def selections(rows: pd.DataFrame) -> list[Selection]:
    """All selections in `rows`, the one to show first in front: `targets`, then the one with most scored cells."""
    frame: Frame = rows
    found = []
    for (protocol, split), part in frame.groupby(["protocol", "split"]):
        for settings, count in (part.key != "").groupby(part.settings).sum().items():
            found.append((protocol != "targets", -count, Selection(str(protocol), str(split), str(settings))))
    return [selection for *_, selection in sorted(found)]


def select(
    rows: pd.DataFrame, *, protocol: str, split: str | None = None, settings: str | None = None
) -> tuple[Selection, Frame]:
    """The rows of one selection.

    Raises ValueError if the protocol is absent, or if several splits or settings are there and none is named: numbers
    over different targets never share a table.
    """
    fits = [
        each
        for each in selections(rows)
        if each.protocol == protocol and split in (None, each.split) and settings in (None, each.settings)
    ]
    if not fits:
        present = "; ".join(" / ".join(each) for each in selections(rows)) or "nothing"
        raise ValueError(
            f"no rows of protocol {protocol!r}, split {split!r}, settings {settings!r}; present: {present}"
        )
    if len(fits) > 1:
        choices = "; ".join(f"split={each.split!r}, settings={each.settings!r}" for each in fits)
        raise ValueError(f"protocol {protocol!r} was scored in more than one way; choose one of: {choices}")
    chosen = fits[0]
    keep = (rows.protocol == chosen.protocol) & (rows.split == chosen.split)
    return chosen, rows[keep & (rows.settings == chosen.settings)]


def summary(
    rows: pd.DataFrame,
    *,
    protocol: str = "targets",
    metric: str = "bits_per_byte",
    null: str = "none",
    split: str | None = None,
    settings: str | None = None,
) -> pd.DataFrame:
    """Statistics over seeds, a row per (point, evaluation length).

    Columns: those of a point; label; eval_length; seeds (planned), n (scored); mean, sd (ddof 1; NaN for one seed),
    low, high; status ("ok" only if n == seeds) and counts {status: seeds}; untrained (any seed's cell is). Numbers of
    incomplete cells are NaN. Runs that differ in anything but the seed are different points and never pooled.
    """
    _known("metric", metric, METRICS)
    _known("null", null, NULLS)
    _, part = select(rows, protocol=protocol, split=split, settings=settings)
    records = []
    for point, group in part.groupby(POINT, sort=False):
        seeds = group.seed.unique()
        common = dict(zip(POINT, point, strict=True))
        for length, cell in group[group.null == null].groupby("eval_length"):
            records.append(common | {"eval_length": length} | _over_seeds(cell, seeds, metric))
    statistics = ["seeds", "n", "mean", "sd", "low", "high", "status", "counts", "untrained"]
    frame = pd.DataFrame(records).reindex(columns=[*POINT, "label", "eval_length", *statistics])
    names = zip(frame.encoding, frame.variant, frame["transform"], strict=True)
    frame["label"] = [label(*each) for each in names]
    cells: list[Any] = list(frame.itertuples())
    order = sorted(cells, key=lambda row: (*presentation(row), row.transform, row.eval_length))
    return frame.loc[[row.Index for row in order]].reset_index(drop=True)


def table(
    rows: pd.DataFrame,
    *,
    protocol: str = "targets",
    metric: str = "bits_per_byte",
    null: str = "none",
    split: str | None = None,
    settings: str | None = None,
) -> pd.DataFrame:
    """Training length x encoding (index, with the number of seeds) against evaluation length (columns): text cells.

    A cell is "mean ± sd" over all planned seeds ("mean" for one), with a dagger where it is `untrained`, or its status
    with how many of how many seeds are there: "- (2/3)". "" was never planned. No numbers of different protocols,
    splits or settings meet in one table.
    """
    frame: Frame = summary(rows, protocol=protocol, metric=metric, null=null, split=split, settings=settings)
    lengths = sorted(frame.eval_length.unique())
    index, cells = [], []
    for _, group in frame.groupby(POINT, sort=False):
        first = group.iloc[0]
        index.append((first.train_length, first.label, first.seeds))
        by_length = {row.eval_length: _cell(row, metric) for row in group.itertuples()}
        cells.append([by_length.get(length, "") for length in lengths])
    names = pd.MultiIndex.from_tuples(index, names=["train_length", "encoding", "seeds"]) if index else None
    return pd.DataFrame(cells, index=names, columns=pd.Index(lengths, name="eval_length"))


def tables(rows: pd.DataFrame, *, metric: str = "bits_per_byte", **selection: Any) -> pd.DataFrame:
    """The tables of all nulls that are there, one below the other, with the null as first index level."""
    _, part = select(rows, **selection)
    present = [null for null in NULLS if (part.null == null).any()]
    parts = {null: table(rows, metric=metric, null=null, **selection) for null in present}
    return pd.concat(parts, names=["null"]).fillna("")


def to_markdown(
    rows: pd.DataFrame,
    *,
    protocol: str = "targets",
    metric: str = "bits_per_byte",
    split: str | None = None,
    settings: str | None = None,
) -> str:
    """The table, the table under the masked null, and what was scored, as markdown that also reads in a terminal."""
    chosen, part = select(rows, protocol=protocol, split=split, settings=settings)
    choice: dict[str, Any] = {"metric": metric, **chosen._asdict()}
    lines = [f"**{METRICS[metric]}**, protocol `{chosen.protocol}`, split `{chosen.split}` (lower is better)", ""]
    lines += [grid(table(rows, **choice)), ""]
    if (part.null == "window_mask").any():
        lines += [NULL_TITLES["window_mask"], "", grid(table(rows, null="window_mask", **choice)), ""]
    if (part.null == "window_recompute").any():
        lines += [f"{NULL_TITLES['window_recompute']}: at every length, the row's value at its training length.", ""]
    return "\n".join(lines + notes(part, chosen)) + "\n"


def grid(frame: pd.DataFrame, last: tuple[str, Sequence[str]] | None = None) -> str:
    """A `table` as an aligned markdown grid; lengths also as multiples where there is one training length.

    `last` is a further column: its header and a text per row.
    """
    trained = frame.index.get_level_values("train_length")
    once = len(set(trained)) == 1
    header = ["train length", "encoding", "seeds"]
    header += [f"{length} ({length / trained[0]:.3g}x)" if once else str(length) for length in frame.columns]
    body = [
        [str(part) for part in (*index, *cells)] for index, cells in zip(frame.index, frame.to_numpy(), strict=True)
    ]
    lines = [header, *body]
    if last is not None:
        lines = [[*line, text] for line, text in zip(lines, (last[0], *last[1]), strict=True)]
    return text_grid(lines, left=(1,))


def text_grid(lines: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Rows of text (the first is the header) as a markdown grid; columns in `left` are aligned left."""
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(lines[0]))]
    rule = ["-" * width if at in left else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    padded = [
        [
            text.ljust(width) if at in left else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in (lines[0], rule, *lines[1:])
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)


def notes(part: Frame, chosen: Selection) -> list[str]:
    """What stands under a table: what was scored, how much of it, which seeds, what the marks mean."""
    several = part.groupby(POINT).seed.nunique().max() > 1
    seeds = ", ".join(map(str, sorted(part.seed.unique())))
    spread = (
        f"Seeds {seeds}: mean ± sample standard deviation"
        if several
        else f"One seed each ({seeds}): no spread is shown"
    )
    lines = [f"- Scored: {describe(chosen)}", *_amounts(part), f"- {spread}.", *_unequal(part)]
    incomplete = (part.status != "ok").any()
    marks = [meaning for status, meaning in MEANINGS.items() if (part.status == status).any()]
    marks += [UNTRAINED] if (part.untrained == "True").any() else []
    marks += [TRANSFORMED] if (part["transform"] != "").any() else []
    marks += ["(k/n): only k of n seeds are there, and no mean is taken"] if several and incomplete else []
    return [*lines, f"- {'; '.join(marks)}."] if marks else lines


def applicable(rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows without those of transforms that are not for their encoding, n/a at every length; which these are."""
    nowhere: Frame = rows.groupby(POINT)["status"].transform(lambda each: (each == "n/a").all()) & (
        rows["transform"] != ""
    )
    if not nowhere.any() or nowhere.all():
        return rows, ""
    left: dict[str, list[str]] = {}
    for encoding, transform in dict.fromkeys(zip(rows.encoding[nowhere], rows["transform"][nowhere], strict=True)):
        left.setdefault(encoding, []).append(transform)
    named = "; ".join(f"{encoding}: {', '.join(sorted(each))}" for encoding, each in left.items())
    kept: Frame = rows[~nowhere]
    return kept.reset_index(
        drop=True
    ), f"- n/a at every length, not of the transform's kind, and without a row: {named}.\n"


def _unequal(part: Frame) -> list[str]:
    """A warning where rows differ in more than encoding and training length."""
    text = differing(part.differs.unique())
    return [f"- Not on equal terms: rows also differ in {text}."] if text else []


def differing(differs: Iterable[str]) -> str:
    """'seed (0, 1); model.remat (False, True)': the fields of the column `differs` with several values; or ""."""
    found: dict[str, dict[str, None]] = {}
    for each in differs:
        for field, value in json.loads(each).items():
            found.setdefault(field, {})[str(value)] = None
    return "; ".join(f"{field} ({', '.join(values)})" for field, values in found.items() if len(values) > 1)


def describe(chosen: Selection) -> str:
    """The protocol in a sentence, with its numbers where the cells recorded them."""
    known = json.loads(chosen.settings)
    last = f"{known['last_k']} " if "last_k" in known else ""
    spacing = f", {known['spacing']} tokens apart" if "spacing" in known else ""
    stride = f" by {known['stride']} tokens" if "stride" in known else ""
    sentences = {
        "targets": f"the last {last}target tokens of windows that end at the same places{spacing}: "
        "every length scores the same tokens.",
        "blocks": "every target of non-overlapping windows; early targets have little context, so longer windows gain.",
        "sliding": f"windows that move{stride}; each scores only the targets that the one before did not.",
    }
    cap = f" At most {known['max_windows']} windows." if known.get("max_windows") else ""
    return sentences.get(chosen.protocol, f"protocol {chosen.protocol}.") + cap


def _amounts(part: Frame) -> list[str]:
    scored = part[(part.status == "ok") & (part.null == "none")]
    amounts = {length: (span(group.tokens), span(group.documents)) for length, group in scored.groupby("eval_length")}
    if not amounts:
        return []
    if len(set(amounts.values())) == 1:
        tokens, documents = next(iter(amounts.values()))
        return [f"- In every column, per seed: {tokens} tokens in {documents} documents."]
    each = "; ".join(f"{length}: {tokens} in {documents}" for length, (tokens, documents) in amounts.items())
    return [f"- Tokens in documents per column and seed: {each}."]


def span(values: Frame, form: Callable[[float], str] = "{:,.0f}".format, absent: str = "-") -> str:
    """One number as text, or the lowest and the highest where their texts differ; `absent` where there is none."""
    known = values.dropna().astype(float)
    return "-".join(dict.fromkeys([form(known.min()), form(known.max())])) if len(known) else absent


def points(part: Frame) -> list[Frame]:
    """The rows of each point, in the order of presentation."""
    groups = (group for _, group in part.groupby(POINT, sort=False))
    return sorted(groups, key=lambda each: (*presentation(each.iloc[0]), each["transform"].iloc[0]))


def _over_seeds(cell: Frame, seeds: np.ndarray, metric: str) -> dict[str, Any]:
    """Seed statistics of one cell; a seed of the point without a row is missing."""
    counts = cell.status.value_counts().to_dict()
    if absent := len(seeds) - len(cell):
        counts["missing"] = counts.get("missing", 0) + absent
    n = counts.get("ok", 0)
    untrained = bool((cell.untrained == "True").any())
    found: dict[str, Any] = {"seeds": len(seeds), "n": n, "counts": counts, "untrained": untrained}
    if n < len(seeds):
        worst = next(status for status in reversed(MEANINGS) if status in counts)
        return found | dict.fromkeys(("mean", "sd", "low", "high"), math.nan) | {"status": worst}
    values = cell[metric].to_numpy(np.float64)
    _, mean, sd = stats.moments(values)
    low, high = float(values.min()), float(values.max())
    return found | {"mean": mean, "sd": sd, "low": low, "high": high, "status": "ok"}


def _cell(row: Any, metric: str) -> str:
    if row.status == "ok":
        spread = f" ± {number(row.sd, metric)}" if row.n > 1 and math.isfinite(row.sd) else ""
        return number(row.mean, metric) + spread + (DAGGER if row.untrained else "")
    text = ", ".join(SYMBOLS.get(status, status) for status in MEANINGS if status in row.counts)
    whole = row.counts.get(row.status) == row.seeds
    return text if whole else f"{text} ({row.n}/{row.seeds})"


def number(value: float, metric: str) -> str:
    """A metric's value as text: three decimals, perplexities two (exponent from a million on), inf and NaN by name."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if metric.endswith("perplexity"):
        return f"{value:.2f}" if value < 1e6 else f"{value:.2e}"
    return f"{value:.3f}"


def label(encoding: str, variant: str, transform: str = "") -> str:
    """An arm's name, with the fields in which it differs from its namesakes, and what it was scored under."""
    named = f"{encoding} ({variant})" if variant else encoding
    return f"{named} + {transform}" if transform else named


def presentation(row: Any) -> tuple:
    """Sort key: training length, family in `ORDER`, name, variant, point."""
    return (row.train_length, *family(row.encoding), row.variant, row.point)


def family(arm: str) -> tuple[int, str]:
    """Sort key of an arm: its place in `ORDER`, or after all of them, and its name."""
    name = named_after(arm)
    return len(ORDER) if name is None else ORDER.index(name), arm


def named_after(arm: str) -> str | None:
    """The longest NAME in `ORDER` of which an arm called NAME or NAME_suffix is a kind, or None."""
    return max((name for name in ORDER if arm == name or arm.startswith(f"{name}_")), key=len, default=None)


def _known(what: str, given: str, allowed: Any) -> None:
    if given not in allowed:
        raise ValueError(f"{what}: {given!r} is not known; allowed: {', '.join(allowed)}")
