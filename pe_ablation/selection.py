"""A hyper-parameter chosen per arm and training length, on other seeds than those that the table shows.

The best value is the one with the lowest bits per byte on the validation split at the training length itself: longer
lengths, the test split and the table's seeds have no part in it.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pe_ablation.config import near
from pe_ablation.tables import MEANINGS, Frame, label, presentation, text_grid

SHORT = {"lr": "train.learning_rate"}
SPLIT = "validation"
GRID: dict[Any, Any] = {
    "arm": "str", "train_length": "int64", "value": "object", "seeds": "str", "bits_per_byte": "float64",
    "status": "str", "chosen": "bool", "edge": "str", "protocol": "str", "point": "str",
}  # fmt: skip
EDGES = {
    "low": "the lowest value of the grid",
    "high": "the highest value of the grid",
    "only": "the only value that was scored",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """`field` chosen on `seeds`.

    `grid` has a row per arm, training length and value: `bits_per_byte` (mean over the seeds; NaN unless `status` is
    "ok", which needs all of them), `chosen`, and for a chosen value `edge`: "" | low | high (nothing worse was seen
    beyond it) | only. `rows` are those of the chosen values and the other seeds, their `variant` without the field.
    """

    field: str
    seeds: tuple[int, ...]
    grid: pd.DataFrame
    rows: pd.DataFrame

    @property
    def points(self) -> tuple[str, ...]:
        """The identities of the chosen points."""
        return tuple(self.grid.point[self.grid.chosen])


def field_path(name: str) -> str:
    """The dotted path of a field, which may be given short: lr."""
    return SHORT.get(name, name)


def choose(rows: pd.DataFrame, field: str = "train.learning_rate", seeds: Sequence[int] | None = None) -> Choice:
    """Choose the best value of `field` for each arm and training length of `rows` (see `report.rows`).

    Arms that differ in another field are chosen for apart. Compared are cells of `targets` where there are any, else
    of the first protocol by name, all under the same settings. `seeds` default to those trained at every value of
    every grid. Raises ValueError if the runs do not differ in the field, if no seed is left for the table, and for a
    seed that isn't there.
    """
    frame: Frame = rows.assign(value=[_value(each, field, rows.differs) for each in rows.differs])
    frame["variant"] = [_bare(row.variant, field, row.value) for row in frame.itertuples()]
    groups = [group for _, group in frame.groupby(["encoding", "train_length", "variant"], sort=False)]
    groups.sort(key=lambda group: presentation(group.iloc[0]))
    seeds = _seeds(groups, field) if seeds is None else _present(frame, seeds)
    lines = [line for group in groups for line in _grid(group, seeds)]
    grid = pd.DataFrame(lines, columns=list(GRID), dtype=object).astype(GRID)  # a value of None stays one
    kept = frame[frame.point.isin(grid.point[grid.chosen]) & ~frame.seed.isin(seeds)]
    kept = kept.assign(differs=[_without(each, field) for each in kept.differs])
    return Choice(field, tuple(seeds), grid, kept[list(rows.columns)].reset_index(drop=True))


def _value(differs: str, field: str, everywhere: Any) -> str:
    """The field's value in one run, as JSON."""
    fields = json.loads(differs)
    if field not in fields:
        names = sorted({name for each in everywhere.unique() for name in json.loads(each)})
        raise ValueError(
            f"select: the runs do not differ in {field}{near(field, names)}; "
            f"they differ in: {', '.join(names) or 'encoding and training length alone'}"
        )
    return json.dumps(fields[field])


def _without(differs: str, field: str) -> str:
    return json.dumps({name: each for name, each in json.loads(differs).items() if name != field}, sort_keys=True)


def _bare(variant: str, field: str, value: str) -> str:
    """A variant "a=1, field=value, b=2" without the field."""
    own = re.escape(f"{field.removeprefix('train.')}={json.loads(value)}")
    return re.sub(rf"(^|, ){own}(?=, |$)", "", variant).removeprefix(", ")


def _seeds(groups: list[Frame], field: str) -> list[int]:
    """The seeds of the grid: those at every value of every arm that has several."""
    grids = [group for group in groups if group.value.nunique() > 1]
    everywhere = [set.intersection(*(set(part.seed) for _, part in group.groupby("value"))) for group in grids]
    found = sorted(set.intersection(*everywhere)) if everywhere else []
    others = sorted({int(seed) for group in groups for seed in group.seed} - set(found))
    if not found or not others:
        every = f"every seed ({', '.join(map(str, found))}) was trained at every value of {field}: none is left to show"
        problem = every if found else f"no seed was trained at every value of {field}"
        raise ValueError(f"{problem}; name the seed to choose by, which the table then leaves out: --select_seed K")
    return [int(seed) for seed in found]


def _present(frame: Frame, seeds: Sequence[int]) -> list[int]:
    known = sorted(map(int, frame.seed.unique()))
    if absent := [seed for seed in seeds if seed not in known]:
        raise ValueError(f"select_seed: no run has seed {absent[0]}; there are: {', '.join(map(str, known))}")
    return list(seeds)


def _grid(group: Frame, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The lines of one arm and training length, values ascending."""
    first = group.iloc[0]
    own = group[group.seed.isin(seeds)]
    at_length = own[(own.split == SPLIT) & (own.null == "none") & (own.eval_length == own.train_length)]
    at_length = at_length[at_length["transform"] == ""]
    protocol, settings = _measure(at_length)
    at_length = at_length[(at_length.protocol == protocol) & (at_length.settings == settings)]
    lines = []
    for value in sorted(group.value.unique(), key=_order):
        cells = at_length[at_length.value == value]
        status = _status(cells, own[own.value == value], seeds)
        mean = float(cells.bits_per_byte.to_numpy(np.float64).mean()) if status == "ok" else math.nan
        lines.append(
            {
                "arm": label(first.encoding, first.variant),
                "train_length": int(first.train_length),
                "value": json.loads(value),
                "seeds": " ".join(map(str, seeds)),
                "bits_per_byte": mean,
                "status": status,
                "chosen": False,
                "edge": "",
                "protocol": protocol,
                "point": group.point[group.value == value].iloc[0],
            }
        )
    scored = [at for at, line in enumerate(lines) if math.isfinite(line["bits_per_byte"])]
    if scored:
        best = min(scored, key=lambda at: lines[at]["bits_per_byte"])
        lines[best] |= {"chosen": True, "edge": _edge(lines, best)}
    return lines


def _measure(cells: Frame) -> tuple[str, str]:
    """(protocol, settings) to compare by: `targets` first, then what was scored for most."""
    scored = cells[cells.status == "ok"]
    counts = (scored if len(scored) else cells).groupby(["protocol", "settings"]).size()
    ranked = sorted(
        (protocol != "targets", protocol, -count, settings) for (protocol, settings), count in counts.items()
    )
    return (ranked[0][1], ranked[0][3]) if ranked else ("", "")


def _status(cells: Frame, runs: Frame, seeds: Sequence[int]) -> str:
    """ok if every seed has its cell; else the worst status, that of the run where it has no such cell."""
    absent = [seed for seed in seeds if seed not in set(cells.seed)]
    found = [*cells.status]
    for seed in absent:
        known = set(runs.status[runs.seed == seed]) & {"diverged", "failed"}
        found.append(known.pop() if known else "missing")
    bad = [status for status in reversed(MEANINGS) if status in found]
    return bad[0] if bad else "ok"


def _edge(lines: list[dict[str, Any]], best: int) -> str:
    """Where nothing beyond the best value is known to be worse: neither a number nor a divergence."""
    known = [at for at, line in enumerate(lines) if line["status"] in ("ok", "diverged")]
    sides = [side for side, at in (("low", known[0]), ("high", known[-1])) if at == best]
    return "only" if len(sides) > 1 else "".join(sides)


def _order(text: str) -> tuple:
    """Numbers by size, everything else by its text after them."""
    value = json.loads(text)
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return (not numeric, value if numeric else 0, text)


def to_markdown(choice: Choice) -> str:
    """The grid as a table, and what is to be said of the choice."""
    frame: Frame = choice.grid
    lines = [("train length", "arm", choice.field, "bits per byte", "chosen")]
    for row in frame.itertuples():
        shown = f"{row.bits_per_byte:.4f}" if row.status == "ok" else row.status
        lines.append((str(row.train_length), row.arm, f"{row.value}", shown, _mark(row)))
    protocols = " or ".join(f"`{each}`" for each in frame.protocol.unique() if each)
    rule = (
        f"{choice.field}, chosen for each arm and training length: the lowest bits per byte at the training length, "
        f"split `{SPLIT}`, protocol {protocols}, from {_named(choice.seeds)}, which no table shows."
    )
    return "\n".join([rule, "", text_grid(lines, left=(1, 4)), "", *(f"- {each}." for each in warnings(choice))]) + "\n"


def _named(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _mark(row: Any) -> str:
    return f"chosen ({row.edge} edge)" if row.edge in ("low", "high") else "chosen" if row.chosen else ""


def warnings(choice: Choice) -> Iterator[str]:
    """What a reader must know of the choice: values at an edge of the grid, arms without a choice."""
    for group in _by_arm(choice):
        chosen: Frame = group[group.chosen]
        name = f"{group.arm.iloc[0]} at {group.train_length.iloc[0]} tokens"
        if chosen.empty:
            yield f"{name}: {_named(choice.seeds)} scored no value, so none is chosen and the arm is not in the table"
        elif edge := chosen.edge.iloc[0]:
            yield f"{name}: {chosen.value.iloc[0]} is {EDGES[edge]}; a better one may lie beyond"


def note(choice: Choice) -> str:
    """The lines under a table of chosen rows."""
    chosen = [group[group.chosen].iloc[0] for group in _by_arm(choice) if group.chosen.any()]
    values = {length: [] for length in dict.fromkeys(row.train_length for row in chosen)}
    for row in chosen:
        values[row.train_length].append(f"{row.arm} {row.value}")
    told = "; ".join(f"trained at {length}: {', '.join(each)}" for length, each in values.items())
    shown = set(choice.rows.point)
    lines = [
        f"{choice.field} was chosen for each row, at its training length, on split `{SPLIT}`, from "
        f"{_named(choice.seeds)}, not shown here (see grid.md). {told}",
        *warnings(choice),
        *(
            f"{row.arm} at {row.train_length} tokens: no other seed has a run at {row.value}, so it is not in the table"
            for row in chosen
            if row.point not in shown
        ),
    ]
    return "".join(f"- {line}.\n" for line in lines)


def _by_arm(choice: Choice) -> list[Frame]:
    frame: Frame = choice.grid
    return [group for _, group in frame.groupby(["train_length", "arm"], sort=False)]
