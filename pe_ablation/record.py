"""The run directory: what one seed of one point was asked to do, did, and scored. It is the primary record.

    config.json      written when the run is planned: identity, experiment, source, digest of the training tokens
    attempts/        who trained it when, a file per attempt; the last one, while it is young, is running (lease.py)
    metrics.jsonl    one row per logged step: numbers that a rerun reproduces
    timing.jsonl     clock and throughput of the same steps
    evaluation/      one cell per KEY.json (numbers) and KEY.npz (sums per document and position)
    streaming/       likewise, of texts without end: KEY.npz has every scored token
    checkpoints/     orbax's; nothing here touches it
    result.json      written last: the run is done
    error.json       why the last attempt failed

Every file but the two logs is replaced atomically; the logs lose at most a torn last line. All JSON is strict. A
process that claimed a run and lost it to another one writes nothing more.
"""

import datetime
import io
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pe_ablation import atomic, config, lease
from pe_ablation.config import Experiment

FORMAT = 1
SET_ASIDE = ".replaced-"  # in the name of a run directory that was replaced by a new one, with a number behind it
State = Literal["done", "running", "failed", "missing", "stopped"]
Kind = Literal["metrics", "timing"]
Cells = Literal["evaluation", "streaming"]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RecordError(ValueError):
    """A run directory that cannot be used as asked; the message names its path."""


class HeldError(RecordError):
    """A run that another process has claimed."""


def dumps(value: Any, *, indent: int | None = None) -> str:
    """`value` as strict JSON, keys in order; numpy and jax scalars and arrays become numbers and lists.

    Non-finite floats become the strings "NaN", "Infinity" and "-Infinity", which `loads` turns back into floats.
    Raises RecordError for types without a JSON form and for text that would come back as a float.
    """
    return json.dumps(_encoded(value), allow_nan=False, indent=indent)


def loads(text: str | bytes) -> Any:
    """The inverse of `dumps`; raises ValueError for torn text and the bare NaN that Python's reader would accept."""
    return _decoded(json.loads(text, parse_constant=_refuse_constant))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"not strict JSON: bare {name}")


def _encoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_key(key): _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    if hasattr(value, "tolist"):
        return _encoded(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str) and value in _NON_FINITE:
        raise RecordError(f"the text {value!r} cannot be recorded: it would be read back as a number")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RecordError(f"{type(value).__name__} has no JSON form: {value!r}")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise RecordError(f"JSON keys are text, got {key!r}")
    return key


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _write_json(path: Path, value: Any) -> None:
    atomic.write(path, [(dumps(value, indent=1) + "\n").encode()])


def _read_json(path: Path) -> dict[str, Any] | None:
    """A whole JSON object, or None where there is none: no file, a torn one, something else."""
    try:
        value = loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class Run:
    """One seed's directory at `path`, planned or not; nothing is read or written before it is asked for."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @classmethod
    def plan(
        cls, path: str | Path, experiment: Experiment, source: str | None, data_digest: str | None = None
    ) -> "Run":
        """Create the directory and its config.json, or accept one of the same identity.

        `source` is the config file and argument it came from. Fields outside the identity (evaluation, logging, ...)
        are brought up to date, unless the run is running. Raises RecordError for a directory of another identity, with
        both identities and the differing fields, for one trained on other data, and for a folder that isn't writable.
        """
        run = cls(path)
        asked = _description(experiment, source, data_digest)
        recorded = run._recorded() if (run.path / "config.json").exists() else None
        if recorded is not None:
            _refuse_other(run.path, recorded, asked)
            asked |= {name: recorded[name] for name in ("source", "data_digest") if asked[name] is None}
            if recorded == asked or run.status()[0] == "running":
                return run
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            _write_json(run.path / "config.json", asked)
        except OSError as error:
            raise RecordError(f"{run.path}: cannot write a run directory here ({error.strerror})") from error
        return run

    @property
    def config(self) -> dict[str, Any]:
        """config.json as it stands; raises RecordError where no run was planned."""
        return self._recorded()

    @property
    def experiment(self) -> Experiment:
        return config.read(self.config["experiment"])

    @property
    def identity(self) -> str:
        return self.config["identity"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    def _recorded(self) -> dict[str, Any]:
        found = _read_json(self.path / "config.json")
        if found is None:
            raise RecordError(
                f"{self.path}: not a run directory (no readable config.json); if it was one, move it away to train anew"
            )
        if found.get("format") != FORMAT:
            raise RecordError(f"{self.path}: run record of format {found.get('format')!r}; this version reads {FORMAT}")
        return found | {"experiment": config.completed(found["experiment"])}

    def status(self) -> tuple[State, str]:
        """(state, reason), the reason empty where there is nothing to say.

        running: a live process holds it. failed: the last attempt left an error, or ended without a result.
        done: result.json is there, whole. missing: planned or not even that, and never started. stopped: somebody asked
        the last attempt to stop, and the next one goes on from its checkpoint.
        """
        if (self.path / "config.json").exists() and _read_json(self.path / "config.json") is None:
            return "failed", "config.json is unreadable"
        attempt = lease.last(self._attempts)
        if attempt is not None and attempt.alive:
            return "running", attempt.whose
        if (self.path / "error.json").exists():
            return "failed", _last_line(self.error())
        if attempt is not None and attempt.end is not None and attempt.end["state"] == "stopped":
            return "stopped", attempt.end["reason"]
        if (result := self.result()) is not None:
            return "done", "diverged" if result.get("status") == "diverged" else ""
        if (self.path / "result.json").exists():
            return "failed", "result.json is truncated"
        if attempt is not None and attempt.end is None:
            return "failed", f"{attempt.whose} ended without a result"
        return "missing", ""

    def result(self) -> dict[str, Any] | None:
        """What `finish` stored; None where it is missing or truncated."""
        return _read_json(self.path / "result.json")

    def error(self) -> str:
        """The whole text of the last failure; empty where the last attempt didn't fail."""
        path = self.path / "error.json"
        found = _read_json(path)
        return found["error"] if found else "error.json is truncated" if path.exists() else ""

    @property
    def _attempts(self) -> Path:
        return self.path / "attempts"

    def attempts(self) -> int:
        """How many times it was begun."""
        attempt = lease.last(self._attempts)
        return attempt.number if attempt else 0

    def reserve(self, number: int) -> bool:
        """Begin attempt `number` for a process that this one starts next; False if another process was quicker."""
        self._recorded()
        return lease.reserve(self._attempts, number)

    def start(self) -> None:
        """Claim the run for this process, unless its launcher did, and forget an old error.

        Raises HeldError naming the process, if another live one holds it. Starting twice in one process is allowed.
        """
        self._recorded()
        try:
            lease.take(self._attempts)
        except lease.Held as holder:
            raise HeldError(f"{self.path}: already running in {holder}") from None
        (self.path / "error.json").unlink(missing_ok=True)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Store `result`: the run is done."""
        self.check_held()
        _write_json(self.path / "result.json", result)
        (self.path / "error.json").unlink(missing_ok=True)
        lease.release(self._attempts, "done")

    def fail(self, error: str) -> None:
        """Store why this attempt failed (a whole traceback, usually); checkpoints and rows stay for the next one."""
        self.check_held()
        _write_json(self.path / "error.json", {"error": error, "time": _now()})
        lease.release(self._attempts, "failed")

    def stop(self, reason: str) -> None:
        """Say that this attempt was asked to stop, which is no failure, and how far it got."""
        self.check_held()
        (self.path / "error.json").unlink(missing_ok=True)  # of an attempt before this one
        lease.release(self._attempts, "stopped", reason)

    def close(self, state: Literal["failed", "stopped"], reason: str) -> None:
        """`fail` or `stop` an attempt of this process, or of one that it started, unless that has an end already."""
        if lease.is_open(self._attempts):
            self.fail(reason) if state == "failed" else self.stop(reason)
        lease.forget(self._attempts)

    def set_aside(self) -> Path | None:
        """Rename the directory, so that it is no run any more but kept; None if there was nothing in it but a plan.

        Raises HeldError where another process holds it.
        """
        if not any(each.name != "config.json" for each in self.path.iterdir()):
            return None
        if not lease.reserve(self._attempts, self.attempts() + 1):
            raise HeldError(f"{self.path}: another process has just claimed it")
        names = (f"{self.path.name}{SET_ASIDE}{number}" for number in itertools.count(1))
        aside = next(path for name in names if not (path := self.path.with_name(name)).exists())
        self.path.rename(aside)
        lease.moved(self._attempts, aside / self._attempts.name)
        lease.release(aside / self._attempts.name, "replaced")
        return aside

    def check_held(self, *, look: bool = True) -> None:
        """HeldError if this process claimed the run and lost it since; to be asked before anything is written.

        Without `look`, only what the heartbeat noticed counts, and the file system is left alone.
        """
        mine = lease.held(self._attempts)
        if mine is None:
            return
        if look:
            mine.look()
        if mine.lost:
            other = lease.last(self._attempts)
            raise HeldError(
                f"{self.path}: taken over by {other.whose if other else 'nobody: it was moved away'}, because this "
                f"process gave no sign of life for {lease.STALE:.0f} s; it stops here and has written nothing since"
            )

    def append(self, kind: Kind, rows: list[dict[str, Any]]) -> None:
        """Add rows to a log, one line each, and flush them; a torn line left by a killed process is removed first."""
        self.check_held()
        text = "".join(dumps(row) + "\n" for row in rows).encode()
        with self._log(kind).open("a+b") as file:
            _drop_torn_line(file)
            file.write(text)
            file.flush()

    def rows(self, kind: Kind) -> list[dict[str, Any]]:
        """The rows of a log in order; a torn last line is dropped, a broken one elsewhere raises RecordError."""
        path = self._log(kind)
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(loads(line))
            except ValueError as error:
                raise RecordError(f"{path}:{number}: not a row ({error})") from error
        return rows

    def truncate(self, kind: Kind, step: int) -> None:
        """Keep the rows with row["step"] <= step: what a resume from the checkpoint of `step` continues."""
        self.check_held()
        if self._log(kind).exists():
            kept = [row for row in self.rows(kind) if row["step"] <= step]
            atomic.write(self._log(kind), ["".join(dumps(row) + "\n" for row in kept).encode()])

    def _log(self, kind: Kind) -> Path:
        if kind not in ("metrics", "timing"):
            raise ValueError(f"no log called {kind!r}; allowed: 'metrics', 'timing'")
        return self.path / f"{kind}.jsonl"

    def save_cell(self, cell: Mapping[str, Any], arrays: Mapping[str, Any], folder: Cells = "evaluation") -> None:
        """Store one cell under cell["key"]: its numbers, and its arrays, such as [documents, positions] of sums.

        The numbers are written last, so that a cell that is there has its arrays.
        """
        path = self._cell(cell["key"], folder)
        self.check_held()
        buffer = io.BytesIO()
        named: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
        np.savez_compressed(buffer, **named)
        try:
            path.parent.mkdir(exist_ok=True)
            atomic.write(path.with_name(path.name + ".npz"), [buffer.getvalue()])
            _write_json(path.with_name(path.name + ".json"), cell)
        except OSError as error:
            raise RecordError(f"{path}: cannot write a cell here ({error.strerror})") from error

    def cells(self, folder: Cells = "evaluation") -> list[dict[str, Any]]:
        """All stored cells, by key; a truncated one counts as not there and is evaluated again."""
        found = (_read_json(path) for path in sorted((self.path / folder).glob("[!.]*.json")))
        return [cell for cell in found if cell is not None]

    def arrays(
        self, cell: Mapping[str, Any], names: Sequence[str] | None = None, folder: Cells = "evaluation"
    ) -> dict[str, np.ndarray]:
        """The arrays of a stored cell, or those called `names`; raises RecordError where they are missing or broken."""
        path = self._cell(cell["key"], folder)
        path = path.with_name(path.name + ".npz")
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:  # numpy leaves a torn one open
                return {name: stored[name] for name in (stored.files if names is None else names)}
        except Exception as error:  # numpy and zipfile raise half a dozen types for a broken archive
            raise RecordError(f"{path}: no readable arrays ({error})") from error

    def _cell(self, key: str, folder: Cells) -> Path:
        if not re.fullmatch(r"[\w@=+-][\w@=+.-]*", key):
            raise RecordError(f"cell key {key!r} is not a file name; allowed: letters, digits and _ @ = + . -")
        return self.path / folder / key


def find(runs_dir: str | Path) -> list[Run]:
    """The runs at or below a work directory, a point or a single run, by point and seed.

    A directory whose config.json cannot be read is among them: its status is failed. What was set aside isn't.
    Raises FileNotFoundError where there is no folder and RecordError where it holds no run.
    """
    root = Path(runs_dir)
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder of runs")
    found = {path.parent for depth in ("", "*/", "*/*/") for path in root.glob(f"{depth}config.json")}
    found = {path for path in found if path == root or SET_ASIDE not in path.name}
    if not found:
        raise RecordError(f"{root}: no run directory in it (no config.json)")
    return sorted(map(Run, found), key=lambda run: (run.path.parent, len(run.path.name), run.path))


def _description(experiment: Experiment, source: str | None, data_digest: str | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "identity": config.training_identity(experiment),
        "point": config.point_identity(experiment),
        "seed": experiment.seed,
        "arm": experiment.arm,
        "source": source,
        "data_digest": data_digest,
        "experiment": config.to_dict(experiment),
    }


def _refuse_other(path: Path, recorded: dict[str, Any], asked: dict[str, Any]) -> None:
    if recorded["identity"] != asked["identity"]:
        fields = _differing_fields(recorded["experiment"], asked["experiment"])
        raise RecordError(
            f"{path}: holds a run of identity {recorded['identity']}, not {asked['identity']}; "
            + (f"differing (recorded, asked): {fields}" if fields else "the encoding's code has changed since")
        )
    digests = recorded["data_digest"], asked["data_digest"]
    if None not in digests and digests[0] != digests[1]:
        raise RecordError(f"{path}: trained on tokens of digest {digests[0]}, but data now gives {digests[1]}")


def _differing_fields(recorded: dict[str, Any], asked: dict[str, Any]) -> str:
    """'model.num_layers (2, 3); seed (0, 1)': the leaves that differ, of those that the identity is about."""
    old, new = config.leaves(recorded), config.leaves(asked)
    paths = [path for path in {**old, **new} if config.in_identity(path)]
    changed = [path for path in paths if old.get(path) != new.get(path)]
    return "; ".join(f"{path} ({old.get(path)!r}, {new.get(path)!r})" for path in changed)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _drop_torn_line(file: Any) -> None:
    """Cut an open log back to its last newline; rows end in one, so that what follows it was torn."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return
    file.seek(size - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
