"""Run records -> tidy rows -> table, curves and what was expected. Nothing is trained or evaluated here.

rows = report.rows("runs")              # a row per run and planned cell
report.table(rows, protocol="targets")  # training length x encoding against evaluation length
report.curves(rows, "curves.png")
"""

import io
import itertools
import json
import logging
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import pandas as pd

from pe_ablation import atomic, cost, record, selection, streaming_tables, verdict_tables, verdicts
from pe_ablation import config as configuration
from pe_ablation.claims import expected
from pe_ablation.figure import curves, positions, save
from pe_ablation.latex import to_latex
from pe_ablation.selection import choose
from pe_ablation.tables import METRICS, STATUSES, applicable, select, selections, summary, table, tables, to_markdown

__all__ = [
    "COLUMNS", "curves", "expected", "positions", "read_csv", "rows", "select", "selections", "summary", "table",
    "tables", "to_markdown", "write",
]  # fmt: skip

_log = logging.getLogger(__name__)
NUMBERS = ("nats", "perplexity", "bits_per_byte", "word_perplexity")
AMOUNTS = ("tokens", "bytes", "words", "documents")
COLUMNS: dict[Any, Any] = {
    "point": "str", "encoding": "str", "variant": "str", "transform": "str", "train_length": "int64",
    "eval_length": "int64", "ratio": "float64", "seed": "int64", "protocol": "str", "null": "str", "split": "str",
    **dict.fromkeys(NUMBERS, "float64"), **dict.fromkeys(AMOUNTS, "Int64"), "status": "str", "untrained": "str",
    "parameters": "Int64", "seconds_per_step": "float64", "tokens_per_second": "float64", "program_seeds": "Int64",
    "train_memory_bytes": "Int64", "memory_bytes": "Int64", "data": "str", "data_digest": "str",
    "differs": "str", "settings": "str", "key": "str", "run": "str",
}  # fmt: skip


def rows(runs_dir: str | os.PathLike[str]) -> pd.DataFrame:
    """Every run below `runs_dir` (or itself a run) against every cell it has or should have: see COLUMNS.

    Planned cells are those of the run's own `eval` fields; cells stored in addition are rows too. `nats` is a mean per
    scored token, `perplexity` its exponential, both in natural units; `word_perplexity` is per word that begins in a
    scored token (cells stored before words were counted have none). `status`: ok | n/a | OOM | diverged | failed |
    missing; only stored cells have numbers, the others NaN. `untrained`: "True" where the numbers depend on an entry of
    the encoding's parameters that no training gradient reached, "False", or "" where that isn't known. Of a run's
    training program: `seconds_per_step` and `tokens_per_second` (see `_speed`) and `program_seeds`, the number of runs
    that it trained at once: seeds of a point, or a pack. `train_memory_bytes` and `memory_bytes`: what the programs of
    training and of the cell take (see `memory.program_bytes`). `settings` is the protocol's own fields as JSON, `run`
    the directory relative to `runs_dir`. `window_recompute` is the model's own cell at its training length under the
    same settings, so it is derived, not stored. `transform` is what the model was scored under (see `transforms`), ""
    as it was trained.
    `variant` names the fields in which arms of one name differ, `differs` has as JSON the fields, other than encoding
    and training length, in which the runs differ at all.

    Raises ValueError for a folder that is absent or holds no run, and for two records of one point and seed.
    """
    root = Path(runs_dir)
    described = _described(_find(root))
    configs = _with_digests([each.config for each in described])
    _check_distinct([each.run for each in described], configs)
    records = []
    for each, config, variant, differs in zip(described, configs, _variants(configs), _differing(configs), strict=True):
        where = each.run.path.relative_to(root).as_posix()
        common = _about(config) | {"variant": variant, "differs": differs, "run": where}
        records += [common | cell for cell in _cells(each.run, config, each.readable)]
    frame = pd.DataFrame(records).reindex(columns=list(COLUMNS)).astype(COLUMNS)
    frame["ratio"] = frame.eval_length / frame.train_length
    return frame.sort_values(["train_length", "encoding", "variant", "seed"], kind="stable", ignore_index=True)


def write(
    runs_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    protocol: str | None = None,
    metric: str = "bits_per_byte",
    split: str = "validation",
    field: str | None = None,
    seed: int | None = None,
    baseline: str | None = None,
    margin: float = verdicts.MARGIN,
) -> str:
    """Write rows.csv, stats.csv, table.md, table.csv, table.tex and curves (png, svg), and positions for `blocks`.

    One split; all protocols, or one. A further protocol or settings has a section of its own in table.md and files of
    its own (table_2.csv, curves_2.png, positions_2.png, ...), in the order of `selections`. With `field` the rows are
    those of the values that `selection.choose` takes (on `seed`, if given), and grid.csv and grid.md hold its grid.
    Streams that were scored are in streaming.csv and streaming.md, and in table.md. Intervals, differences to the arm
    `baseline`, if named, and verdicts at a `margin` are as `verdicts.statistics` says, in bits per byte where `metric`
    is no ratio of sums. Returns the text of table.md. Files are replaced whole; raises ValueError as
    `rows` and `verdicts.statistics` do, and for rows that are not there.
    """
    configuration.convert(Literal[tuple(METRICS)], metric, "metric")
    everything, choice = asked(runs_dir, split, protocol, field, seed)
    frame, left_out = applicable(everything)
    chosen = [each._asdict() for each in selections(frame)]
    how = {"metric": metric if metric in verdicts.RATIOS else "bits_per_byte", "baseline": baseline, "margin": margin}
    judged = [verdicts.statistics(frame, runs_dir, **each, **how) for each in chosen]
    out = folder(out_dir)
    atomic.write(out / "rows.csv", [to_csv(everything)])
    atomic.write(out / "stats.csv", [to_csv(pd.concat(judged))])
    sections = []
    for at, (which, found) in enumerate(zip(chosen, judged, strict=True), start=1):
        suffix = "" if at == 1 else f"_{at}"
        sections += [to_markdown(frame, metric=metric, **which), verdict_tables.to_markdown(found)]
        atomic.write(out / f"table{suffix}.csv", [tables(frame, metric=metric, **which).to_csv().encode()])
        atomic.write(out / f"table{suffix}.tex", [to_latex(frame, metric=metric, **which).encode()])
        _picture(out / f"curves{suffix}", partial(curves, frame, **which))
        if which["protocol"] == "blocks" and (select(frame, **which)[1].status == "ok").any():
            _picture(out / f"positions{suffix}", partial(positions, frame, runs_dir, **which))
    sections[0] += left_out
    if choice is not None:
        sections[0] += selection.note(choice)
        atomic.write(out / "grid.csv", [to_csv(choice.grid)])
        atomic.write(out / "grid.md", [selection.to_markdown(choice).encode()])
    sections.append(cost.to_markdown(frame, **chosen[0]))
    if streams := streaming_tables.write(runs_dir, out):
        sections.append(streams)
    text = "\n".join([*sections, expected(frame)])
    atomic.write(out / "table.md", [text.encode()])
    return text


def asked(
    runs_dir: str | os.PathLike[str], split: str, protocol: str | None, field: str | None, seed: int | None
) -> tuple[pd.DataFrame, selection.Choice | None]:
    """`rows` as `shown`; with `field`, those that `selection.choose` leaves (on `seed`, if given), and the choice."""
    frame, choice = rows(runs_dir), None
    if field is not None:
        choice = choose(frame, field, None if seed is None else [seed])
        frame = choice.rows
    return shown(frame, split, protocol), choice


def shown(frame: Any, split: str, protocol: str | None) -> pd.DataFrame:
    """The rows of one split, and of one protocol if it is named; ValueError for what isn't known or isn't there."""
    allowed = get_type_hints(configuration.EvalConfig)
    configuration.convert(allowed["split"], split, "split")
    if protocol is not None:
        configuration.convert(get_args(allowed["protocols"])[0], protocol, "protocol")
    kept = frame[(frame.split == split) & (frame.protocol.isin([protocol]) if protocol else True)]
    if kept.empty:
        present = "; ".join(dict.fromkeys(f"{each.protocol} / {each.split}" for each in selections(frame))) or "nothing"
        way = "" if protocol else f"; score it first: pe-ablation evaluate RUNS --split {split}"
        raise ValueError(f"no rows of split {split!r}, protocol {protocol or 'any'!r}; present: {present}{way}")
    return kept.reset_index(drop=True)


def folder(path: str | os.PathLike[str], what: str = "a report", flag: str = "--out") -> Path:
    """A folder that can be written to, made if it isn't there; ValueError, naming `flag`, where it can't be."""
    out = Path(path)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"{out}: cannot write {what} here ({error.strerror}); name another folder: {flag}") from error
    return out


def to_csv(frame: pd.DataFrame) -> bytes:
    return frame.to_csv(index=False, na_rep="NaN").encode()


def read_csv(path: str | os.PathLike[str]) -> pd.DataFrame:
    """`rows` as `write` stored them, equal to the last bit; "n/a" and "none" stay text.

    Columns that are younger than the file are there, without values.
    """
    floats = [name for name, kind in COLUMNS.items() if kind == "float64"]
    counts = [name for name, kind in COLUMNS.items() if kind == "Int64"]
    frame = pd.read_csv(
        path,
        dtype={name: kind for name, kind in COLUMNS.items() if name not in floats},
        converters={name: float for name in floats},  # pandas' own reader may be off by the last bit
        keep_default_na=False,
        na_values={name: ["NaN"] for name in counts},
    )
    if "transform" not in frame:
        frame["transform"] = ""
    return frame.reindex(columns=list(COLUMNS)).astype(COLUMNS)


def transform_column(text: str) -> str:
    """An entry of `eval.transforms` as it stands in cells and rows: "" for `none`."""
    return "" if text == "none" else text


def _find(root: Path) -> list[record.Run]:
    try:
        return record.find(root)
    except (FileNotFoundError, record.RecordError) as error:
        raise ValueError(
            f"{error}; expected a folder that launch or run wrote: POINT/seed_K/ with config.json and evaluation/"
        ) from error


class _Described(NamedTuple):
    """A run and what its config.json says or, where that can't be read, what that of another seed says of it."""

    run: record.Run
    config: dict[str, Any]
    readable: bool = True


def _described(runs: list[record.Run]) -> list[_Described]:
    """The runs: one whose config.json is broken counts as a failed seed of its point, where that is known."""
    found, broken = [], []
    for run in runs:
        try:
            found.append(_Described(run, run.config))
        except record.RecordError as error:
            broken.append((run, error))
    if not found:
        raise ValueError(f"{runs[0].path.parent}: no run whose config.json can be read")
    for run, error in broken:
        other = next((each.config for each in found if each.run.path.parent == run.path.parent), None)
        number = run.path.name.removeprefix("seed_")
        if other is None or not number.isdigit():
            _log.warning("%s; left out", error)
            continue
        _log.warning("%s; counted as failed", error)
        experiment = {**other["experiment"], "seed": int(number)}
        found.append(_Described(run, {**other, "seed": int(number), "experiment": experiment}, readable=False))
    return found


def _differing(configs: list[dict[str, Any]]) -> list[str]:
    """For every run, the fields beside encoding and training length in which any two runs differ, as JSON."""
    flat = [fields(config["experiment"]) for config in configs]
    names = [name for name in flat[0] if not name.startswith("encoding.") and name != "train.length"]
    names = [name for name in names if any(each.get(name) != flat[0][name] for each in flat)]
    return [json.dumps({name: each.get(name) for name in names}, sort_keys=True) for each in flat]


def _about(config: Mapping[str, Any]) -> dict[str, Any]:
    experiment = config["experiment"]
    return {
        "point": config["point"],
        "encoding": config["arm"],
        "seed": config["seed"],
        "train_length": experiment["train"]["length"],
        "data": f"{experiment['data']['source']}/{experiment['data']['tokenizer']}",
        "data_digest": config["data_digest"],
    }


def _with_digests(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A run that never read its data gets its point's digest, if there is only one: it counts as missing there."""
    known: dict[str, set[str]] = {}
    for config in configs:
        known.setdefault(config["point"], set()).update(filter(None, [config["data_digest"]]))
    only = {point: next(iter(digests)) for point, digests in known.items() if len(digests) == 1}
    return [config | {"data_digest": config["data_digest"] or only.get(config["point"], "")} for config in configs]


def _check_distinct(runs: list[record.Run], configs: list[dict[str, Any]]) -> None:
    seen: dict[tuple, record.Run] = {}
    for run, config in zip(runs, configs, strict=True):
        key = (config["point"], config["arm"], config["seed"], config["data_digest"])
        if key in seen:
            raise ValueError(
                f"{seen[key].path} and {run.path} both hold seed {config['seed']} of point {config['point']} "
                f"({config['arm']}): counted twice they would look like agreement; report on a folder with one of them"
            )
        seen[key] = run


def _variants(configs: list[dict[str, Any]]) -> list[str]:
    """For every run, "field=value, ..." where arms of the same name and training length differ; "" where none do."""
    flat = [fields(config["experiment"]) | {"data digest": config["data_digest"][:8]} for config in configs]
    names = [(config["arm"], config["experiment"]["train"]["length"]) for config in configs]
    variants = []
    for own, name in zip(flat, names, strict=True):
        peers = [other for other, theirs in zip(flat, names, strict=True) if theirs == name]
        differing = [field for field in own if any(peer.get(field) != own[field] for peer in peers)]
        variants.append(", ".join(f"{field.removeprefix('train.')}={own[field]}" for field in differing))
    labels = list(zip(names, variants, strict=True))
    points: dict[tuple, set[str]] = {}
    for config, each in zip(configs, labels, strict=True):
        points.setdefault(each, set()).add(config["point"])
    return [  # points whose fields are the same: the encoding's code differs
        ", ".join(filter(None, [each[1], config["point"] if len(points[each]) > 1 else ""]))
        for config, each in zip(configs, labels, strict=True)
    ]


def fields(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that make a point, by dotted path: neither the seed nor what changes no trained number."""
    leaves = configuration.leaves(tree)
    return {path: leaves[path] for path in leaves if path != "seed" and configuration.in_identity(path)}


def _cells(run: record.Run, config: Mapping[str, Any], readable: bool) -> Iterator[dict[str, Any]]:
    """A run's stored cells, what it should have besides, and the derived null, each as part of a row."""
    train, plan = config["experiment"]["train"]["length"], configuration.evaluation(config["experiment"])
    stored: dict[tuple[str, str, str, str], dict[tuple[str, int], Any]] = {}
    for protocol, transform in itertools.product(plan.windowed, map(transform_column, plan.transforms)):
        stored[protocol, plan.split, _canonical(plan.settings(protocol, train)), transform] = {}
    planned = set(stored)
    for cell in run.cells() if readable else ():  # whose they are isn't known
        group = (cell["protocol"], cell["split"], _canonical(cell["settings"]), cell.get("transform", ""))
        stored.setdefault(group, {})[cell["null"], cell["length"]] = cell
    result = run.result() or {}
    absent = _absent_status(run, result)
    about = {"parameters": result.get("parameters"), "train_memory_bytes": result.get("memory_bytes")}
    about |= _speed(_timing(run))
    for group, here in stored.items():
        common = dict(zip(("protocol", "split", "settings", "transform"), group, strict=True)) | about
        keys = {*here, *(_planned(plan, train) if group in planned else ())}
        lengths = {length for null, length in keys if null == "none" and length > train}
        keys |= {("window_recompute", length) for length in lengths}
        for null, length in sorted(keys, key=lambda key: (key[0] != "none", *key)):
            source = ("none", train) if null == "window_recompute" else (null, length)
            numbers = _numbers(here.get(source), absent)
            yield common | numbers | {"null": null, "eval_length": length}


def _planned(plan: configuration.EvalConfig, train: int) -> Iterator[tuple[str, int]]:
    """(null, length) of every cell that a run's config asks for."""
    for length in plan.lengths:
        yield "none", length
        if length > train and "window_mask" in plan.nulls:
            yield "window_mask", length


def _canonical(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, allow_nan=False)


def _numbers(cell: Mapping[str, Any] | None, absent: str) -> dict[str, Any]:
    if cell is None:
        return {"status": absent, "key": "", "untrained": ""}
    if cell["status"] not in STATUSES:
        raise ValueError(f"cell {cell['key']}: status {cell['status']!r} is not known; allowed: {', '.join(STATUSES)}")
    untrained = str(cell["untrained"]) if "untrained" in cell else ""
    return {name: cell.get(name) for name in ("status", "key", "memory_bytes", *NUMBERS, *AMOUNTS)} | {
        "untrained": untrained
    }


def _timing(run: record.Run) -> list[dict[str, Any]]:
    """The rows of timing.jsonl; a broken log costs the run its speed, not its numbers."""
    try:
        return run.rows("timing")
    except record.RecordError as error:
        _log.warning("%s; its speed is left out", error)
        return []


def _speed(timing: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the logged intervals of a training program; the first, which has the compilation in it, is left out.

    A step is one of the program's, so it trains all the runs that share it, and their tokens count. NaN where only one
    interval was logged.
    """
    steps = [row["step"] - before["step"] for before, row in itertools.pairwise(timing)]
    later = timing[1:]
    seconds = [row["seconds"] / count for row, count in zip(later, steps, strict=True)]
    return {
        "seconds_per_step": statistics.median(seconds) if later else math.nan,
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in later) if later else math.nan,
        "program_seeds": timing[-1].get("seeds") if timing else None,
    }


def _absent_status(run: record.Run, result: Mapping[str, Any]) -> str:
    """Why a cell that should be there is not."""
    if result.get("status") == "diverged":
        return "diverged"
    return "failed" if run.status()[0] == "failed" else "missing"


def _picture(stem: Path, draw: Callable[..., Any]) -> None:
    """Draw once, keep as STEM.png and STEM.svg."""
    png, svg = io.BytesIO(), io.BytesIO()
    save(draw(path=png), svg, "svg")
    atomic.write(stem.with_name(f"{stem.name}.png"), [png.getvalue()])
    atomic.write(stem.with_name(f"{stem.name}.svg"), [svg.getvalue()])
