"""The W&B mirror: shows what run records say. It never writes to a record, and no fault of it or of wandb stops a run.

One wandb run per run, its id the training identity: job type `train`, history `train/*` over `train/step` and
`extrap/*` over `extrap/length` (bits per byte also as `extrap/by_ratio/*` over `extrap/ratio`). `evaluate` scores other
targets, so that is a run of its own, IDENTITY-eval-DIGEST of job type `eval`; a `report` run shows a folder of runs.

Every session tells the whole record again and takes the place of what was mirrored before, so that each step is there
once, however often a run was killed. Rows are told once a checkpoint at or past them is committed. wandb itself lives
in another process (`mirror_process`), fed from a thread by the generators of messages below.
"""

import contextlib
import csv
import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pe_ablation import config, record
from pe_ablation.config import Experiment
from pe_ablation.mirror_process import SAID
from pe_ablation.record import Run
from pe_ablation.sweep import Point

PROCESS = Path(__file__).with_name("mirror_process.py")
NOT_OURS = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME", "WANDB_JOB_TYPE")  # of an outer wandb run
SECONDS_BETWEEN_LOOKS = 2.0
SECONDS_TO_END = 60.0
SECONDS_WHEN_STOPPED = 5.0  # less than the launcher gives a child that it stops
SHORT = {"bits_per_byte": "bpb"}
METRICS = (
    ("train/step", {"summary": "none"}),
    ("train/*", {"step_metric": "train/step"}),
    ("extrap/length", {"summary": "none"}),
    ("extrap/ratio", {"summary": "none"}),
    ("extrap/*", {"step_metric": "extrap/length", "summary": "none"}),
)
BY_RATIO = {"step_metric": "extrap/ratio", "summary": "none"}
TAG_LENGTH = 64
FEW = 8
Message = dict[str, Any]


@contextlib.contextmanager
def training(runs: Sequence[Run]) -> Iterator[None]:
    """Mirror these runs, which this process trains and scores, while the block runs and to their end."""
    mirrored = [run for run in runs if not _is_disabled(run.experiment)]
    stop = threading.Event()
    process = _Process(_follow(mirrored, stop)) if mirrored else None
    seconds = SECONDS_WHEN_STOPPED
    try:
        yield
        seconds = SECONDS_TO_END
    finally:
        stop.set()
        if process is not None:
            process.end(seconds)


def evaluated(scored: Sequence[tuple[Run, Experiment, Any]]) -> None:
    """Mirror what `evaluate` scored: runs, each with the experiment whose `eval` fields were asked for, and rows."""
    shown = [each for each in scored if not _is_disabled(each[1])]
    if shown:
        _Process(message for each in shown for message in _evaluation(*each)).end(SECONDS_TO_END)


def reported(runs_dir: str | Path, out_dir: str | Path) -> list[str]:
    """Mirror a report: its tables, figures and tidy rows, under the wandb settings of the first run in `runs_dir`.

    Returns the command that uploads it, if it is kept offline.
    """
    runs = _readable(runs_dir)
    if not runs or _is_disabled(runs[0].experiment):
        return []
    begin = _begin_report(runs)
    _Process(_report(begin, Path(out_dir))).end(SECONDS_TO_END)
    return _commands(_offline(_root_of(runs[0]), {begin["id"]}))


def tagged(points: Iterable[Point], names: Iterable[str]) -> list[Point]:
    """The points with the sweep's names as the first of their W&B tags; WANDB_TAGS counts where the config has none."""
    environment = tuple(filter(None, os.environ.get("WANDB_TAGS", "").split(",")))

    def tag(experiment: Experiment) -> Experiment:
        tags = (*names, *(experiment.wandb.tags or environment))
        wandb = dataclasses.replace(experiment.wandb, tags=tuple(dict.fromkeys(tags)))
        return dataclasses.replace(experiment, wandb=wandb)

    names = tuple(names)
    return [Point(tuple(map(tag, point.experiments))) for point in points]


def sync_commands(runs_dir: str | Path) -> list[str]:
    """The `wandb sync` lines that upload what is kept offline of the runs in `runs_dir` and was not uploaded."""
    runs = _readable(runs_dir)
    identities = {run.identity for run in runs}
    return _commands(path for root in dict.fromkeys(map(_root_of, runs)) for path in _offline(root, identities))


def horizon(rows: Any) -> int | None:
    """The extrapolation horizon of one run: the longest scored length up to which it holds its own 1x.

    Rule: on protocol `targets` without null and transform, bits per byte at every scored length from the training
    length on stay within 1 % above those at the training length; the first length that doesn't (or has no number: n/a,
    OOM) ends it. None where the training length itself has no number.
    """
    rows = rows[(rows.protocol == "targets") & (rows.null == "none") & (rows["transform"] == "")]
    rows = rows[rows.eval_length >= rows.train_length]
    reached = None
    bound = math.nan
    for row in rows.sort_values("eval_length").itertuples():
        if row.eval_length == row.train_length:
            bound = 1.01 * row.bits_per_byte
        if row.status != "ok" or not row.bits_per_byte <= bound:
            break
        reached = int(row.eval_length)
    return reached


class _Process:
    """The process that talks to wandb, and the daemon thread that feeds it: a wandb that hangs keeps only those."""

    def __init__(self, messages: Iterable[Message]):
        environment = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
        command = [sys.executable, "-P", str(PROCESS)]
        self.fault: str | None = None
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**environment, "WANDB_SILENT": "true"},
            start_new_session=True,  # Ctrl-C is for us; and no terminal, so nothing to ask
        )
        self.thread = threading.Thread(target=self._feed, args=(messages,), daemon=True)
        self.thread.start()

    def _feed(self, messages: Iterable[Message]) -> None:
        assert self.child.stdin is not None
        try:
            with self.child.stdin as pipe:
                for message in messages:
                    pipe.write(json.dumps(message).encode() + b"\n")
                    pipe.flush()
        except BrokenPipeError:
            pass  # it ended, and said why or left its exit code
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}".splitlines()[0]

    def end(self, seconds: float) -> None:
        """Wait for the last message to be obeyed, so long at most; say in a line what went wrong, if it didn't."""
        until = time.monotonic() + seconds
        self.thread.join(seconds)
        try:
            code = self.child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.child.kill()
            code, self.fault = self.child.wait(), f"not done after {seconds:g} s"
        if code not in (0, SAID) and self.fault is None:
            self.fault = f"its process ended with code {code}"
        if self.fault is not None and code != SAID:
            consequence = "run records are not affected, and their next start mirrors them whole"
            print(f"wandb: mirrored in part only ({self.fault}); {consequence}", file=sys.stderr, flush=True)


def _follow(runs: Sequence[Run], stop: threading.Event) -> Iterator[Message]:
    """All that is committed of these runs, then what becomes so until `stop`, then how they ended."""
    told: dict[Run, float] = dict.fromkeys(runs, 0)

    def news() -> Iterator[Message]:
        for run, step in zip(runs, _committed(runs), strict=True):
            if step > told[run]:
                yield from _steps(run, told[run], step)
                told[run] = step

    for run in runs:
        yield _begin(run, run.experiment, run.identity, "train")
    yield from news()
    yield from ({"do": "replace", "id": run.identity} for run in runs)
    while not stop.wait(SECONDS_BETWEEN_LOOKS):
        yield from news()
    yield from news()
    for run in runs:
        rows = _planned_rows(run)
        yield from _extrapolation(run.identity, rows)
        yield {"do": "summary", "id": run.identity, "values": _trained(run, told[run]) | _scores(rows)}
        yield {"do": "finish", "id": run.identity, "code": 0 if run.status()[0] == "done" else 1}


def _evaluation(run: Run, asked: Experiment, rows: Any) -> Iterator[Message]:
    fields = {name: value for name, value in config.to_dict(asked.eval).items() if name != "batch_tokens"}
    if fields["transforms"] == ["none"]:
        del fields["transforms"]  # ids are older than the field
    id = f"{run.identity}-eval-{_digest(fields)}"
    yield _begin(run, asked, id, "eval")
    yield from _extrapolation(id, rows)
    yield {"do": "summary", "id": id, "values": _scores(rows)}
    yield {"do": "replace", "id": id}
    yield {"do": "finish", "id": id, "code": 0}


def _report(begin: Message, out: Path) -> Iterator[Message]:
    tables = {}
    for path in sorted(out.glob("table*.csv")):
        columns, *data = csv.reader(path.read_text().splitlines())
        tables[f"report/{path.stem}"] = {"columns": columns, "data": data}
    images = {f"report/{path.stem}": str(path) for path in sorted(out.glob("*.png"))}
    id = begin["id"]
    yield begin
    yield {"do": "report", "id": id, "tables": tables, "images": images, "rows": str(out / "rows.csv")}
    yield {"do": "replace", "id": id}
    yield {"do": "finish", "id": id, "code": 0}


def _begin_report(runs: Sequence[Run]) -> Message:
    """The first message of a report; its id is of the sweep's config file and the runs that are in it."""
    sources = sorted({str(run.config["source"]) for run in runs})
    identities = sorted(run.identity for run in runs)
    begin = _begin(runs[0], runs[0].experiment, f"report-{_digest([sources, identities])}", "report")
    begin["about"] |= {
        "name": "report " + ", ".join(sources),
        "config": {"sources": sources, "runs": identities},
        "point": "reports",
        "own_tags": [],
        "metrics": (),
    }
    return begin


def _begin(run: Run, experiment: Experiment, id: str, job_type: str) -> Message:
    """The first message of a wandb run; what is None or empty is left to WANDB_* variables, then to a default."""
    about, wandb = run.config, experiment.wandb
    shown = {name: value for name, value in config.to_dict(experiment).items() if name != "wandb"}
    recorded = {name: about[name] for name in ("identity", "point", "arm", "source", "data_digest")}
    suffix = "" if job_type == "train" else f" {job_type}"
    return {
        "do": "begin",
        "id": id,
        "about": {
            **{name: getattr(wandb, name) for name in ("project", "entity", "group", "mode")},
            "tags": [tag[-TAG_LENGTH:] for tag in wandb.tags],
            "own_tags": [experiment.encoding.name[-TAG_LENGTH:]],
            "point": run.path.absolute().parent.name if _is_planned(run.path.absolute()) else about["point"],
            "name": f"{experiment.arm} L{experiment.train.length} seed {experiment.seed}{suffix}",
            "job_type": job_type,
            "config": shown | recorded,
            "dir": str(_root_of(run)),
            "metrics": METRICS,
        },
    }


def _committed(runs: Sequence[Run]) -> list[float]:
    """For each run the step up to which its rows stand; the seeds in training resume at a step that all have."""
    from pe_ablation import checkpoint

    open_runs = {run for run in runs if run.result() is None}
    shared = min((checkpoint.last_step(run.path / "checkpoints") or 0 for run in open_runs), default=0)
    return [shared if run in open_runs else math.inf for run in runs]


def _steps(run: Run, after: float, until: float) -> Iterator[Message]:
    """The rows of both logs with after < step <= until."""
    timing = {row["step"]: row for row in run.rows("timing")}
    for row in run.rows("metrics"):
        step = row["step"]
        if after < step <= until:
            values = {**timing.get(step, {}), **row}
            shown = {f"train/{SHORT.get(name, name)}": value for name, value in values.items() if name != "diverged"}
            yield {"do": "log", "id": run.identity, "row": shown, "step": step}


def _trained(run: Run, until: float) -> dict[str, Any]:
    """Scalars to sort by: status, diverged, parameters, and the best logged bits per byte that is a number."""
    rows = [row for row in run.rows("metrics") if row["step"] <= until]
    result = run.result() or {}
    found = {name: result[name] for name in ("status", "steps", "tokens", "parameters") if name in result}
    found["diverged"] = result.get("status") == "diverged" or any(row["diverged"] for row in rows)
    finite = [(row["bits_per_byte"], row["step"]) for row in rows if math.isfinite(row["bits_per_byte"])]
    if finite:
        found["train/best_bpb"], found["train/best_step"] = min(finite)
    return found


def _planned_rows(run: Run) -> Any:
    """The tidy rows of the cells that the run's own config asks for."""
    from pe_ablation import evaluate

    return evaluate.asked_rows(run, run.experiment)


def _extrapolation(id: str, rows: Any) -> Iterator[Message]:
    """A history row per evaluation length with every protocol and null; a diverged cell is NaN, others are left out."""
    by_ratio = dict.fromkeys(_name(row, "by_ratio/", "bits_per_byte") for row in _shown(rows).itertuples())
    for name in by_ratio:  # by name: of two patterns that fit a metric, wandb takes either
        yield {"do": "define", "id": id, "metric": name, "options": BY_RATIO}
    for length, group in _shown(rows).groupby("eval_length"):
        values: dict[str, Any] = {"extrap/length": int(length), "extrap/ratio": float(group.ratio.iloc[0])}
        for row in group.itertuples():
            values |= {_name(row, "", metric): value for metric, value in _numbers(row).items()}
            values[_name(row, "by_ratio/", "bits_per_byte")] = float(row.bits_per_byte)
        yield {"do": "log", "id": id, "row": values}


def _scores(rows: Any) -> dict[str, Any]:
    """Scalars to sort by: `extrap/PROTOCOL[/TRANSFORM][/NULL]/bpb@LENGTH`, and the horizon."""
    shown = [(_name(row, "", "bits_per_byte"), row) for row in _shown(rows).itertuples()]
    scores: dict[str, Any] = {f"{name}@{row.eval_length}": float(row.bits_per_byte) for name, row in shown}
    reached = horizon(rows)
    return scores if reached is None else {**scores, "extrap/horizon": reached}


def _shown(rows: Any) -> Any:
    return rows[rows.status.isin(["ok", "diverged"])]


def _name(row: Any, axis: str, metric: str) -> str:
    how = "".join(f"{each}/" for each in (row.transform, row.null) if each not in ("", "none"))
    return f"extrap/{axis}{row.protocol}/{how}{SHORT.get(metric, metric)}"


def _numbers(row: Any) -> dict[str, float]:
    from pe_ablation import report

    return {metric: float(getattr(row, metric)) for metric in report.NUMBERS}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _is_disabled(experiment: Experiment) -> bool:
    """Whether nothing is to be mirrored, so that no process is even started."""
    return (experiment.wandb.mode or os.environ.get("WANDB_MODE")) == "disabled"


def _readable(runs_dir: str | Path) -> list[Run]:
    """The runs whose config.json says what they are."""
    runs = []
    for run in record.find(runs_dir):
        with contextlib.suppress(record.RecordError):
            run.config  # noqa: B018
            runs.append(run)
    return runs


def _is_planned(run_dir: Path) -> bool:
    """Whether it is WORKDIR/POINT/seed_K, as a launch lays runs out."""
    return re.fullmatch(r"seed_\d+", run_dir.name) is not None


def _root_of(run: Run) -> Path:
    path = run.path.absolute()
    workdir = path.parents[1] if _is_planned(path) else path
    return _root(workdir if run.path.is_absolute() else Path(os.path.relpath(workdir)))


def _root(workdir: Path) -> Path:
    """Where wandb makes its folder `wandb`: WANDB_DIR, or the work directory."""
    return Path(os.environ.get("WANDB_DIR") or workdir)


def _offline(root: Path, owners: set[str]) -> list[Path]:
    """The offline runs below `root` whose id is, or starts with, one of `owners`, without those that were uploaded."""
    found = sorted((root / "wandb").glob("offline-run-*-*"))
    ours = [path for path in found if any(f"{_id(path)}-".startswith(f"{owner}-") for owner in owners)]
    return [path for path in ours if not any(path.glob("*.wandb.synced"))]


def _id(offline_run: Path) -> str:
    """Of 'offline-run-20250131_235959-ID'."""
    return offline_run.name.split("-", 3)[3]


def _commands(paths: Iterable[Path]) -> list[str]:
    """A line each for a few, one line for many."""
    quoted = [shlex.quote(str(path)) for path in paths]
    return [f"wandb sync {path}" for path in quoted] if len(quoted) <= FEW else [f"wandb sync {' '.join(quoted)}"]
