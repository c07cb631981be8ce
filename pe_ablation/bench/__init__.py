"""Speed as ratios of one run: ways to do the same thing take turns, so that noise of the machine hits all of them."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pe_ablation import atomic, config, report
from pe_ablation.bench import decoding, evaluation, streaming, training
from pe_ablation.bench.asked import BenchError, Request
from pe_ablation.bench.turns import machine

__all__ = ["PARTS", "BenchError", "Part", "Request", "check", "write"]


class Part(NamedTuple):
    """What is measured at a time: `measure` gives what is stored, `table` the Markdown lines of it.

    fields: of a `Request`, those that it goes by. packages: of peers that take part.
    """

    measure: Callable[[Request, Callable[[str], None]], dict[str, Any]]
    table: Callable[[dict[str, Any]], Iterator[str]]
    fields: tuple[str, ...]
    packages: tuple[str, ...] = ()


SHAPES = ("size", "length", "batch", "encodings", "rounds")
PARTS = {
    "training": Part(training.measure, training.table, SHAPES, ("torch", "transformers", "x-transformers")),
    "evaluation": Part(evaluation.measure, evaluation.table, ("size", "lengths", "encodings", "rounds")),
    "decoding": Part(decoding.measure, decoding.table, SHAPES, ("torch", "transformers")),
    "streaming": Part(streaming.measure, streaming.table, ("tokens", "rounds")),
}


def check(parts: Sequence[str], fields: Collection[str]) -> tuple[str, ...]:
    """The parts to measure, all if none is named; BenchError for one there isn't, or a field that none of them has."""
    for part in parts:
        if part not in PARTS:
            raise BenchError(f"PART: no part {part!r}{config.near(part, PARTS)}; allowed: {', '.join(PARTS)}")
    chosen = tuple(part for part in PARTS if part in parts or not parts)
    for field in fields:
        if not any(field in PARTS[part].fields for part in chosen):
            those = ", ".join(name for name, part in PARTS.items() if field in part.fields)
            raise BenchError(f"{field}: goes with {those}; measured: {', '.join(chosen)}")
    return chosen


def write(
    out: str | Path,
    parts: Sequence[str] = (),
    asked: Request | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[str]:
    """Measure each part, write PART.json and PART.md to `out` as soon as it is done, give the lines of its table.

    `say` hears how far it is. What a part raises is raised: parts before it have been written.
    """
    chosen = check(parts, ())
    folder = report.folder(out, "measurements")
    for name in chosen:
        part = PARTS[name]
        found = part.measure(asked or Request(), say)
        own = machine(part.packages)
        lines = [*part.table(found), ", ".join(f"{key} {value}" for key, value in own.items())]
        atomic.write(folder / f"{name}.json", [json.dumps({"machine": own, **found}, indent=1).encode()])
        atomic.write(folder / f"{name}.md", ["\n".join([*lines, ""]).encode()])
        yield from lines
