"""Runs packs of points, each in a process of its own, so that one that dies never takes the rest along.

A pack is a point, unless points that one program can train are put together (`sweep.packs`).

The order is fixed: refuse what can't work, plan every run directory (from then on a run that is absent is known to be
missing), train and score what isn't done, say what became of each. The next launch retries what failed and goes on
with what was stopped. Several launches may share a work directory: a run belongs to the one that claimed it.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pe_ablation import config, mirror, placement, record, stopping, sweep
from pe_ablation.config import DataConfig, EvalConfig, Experiment
from pe_ablation.model import GPTConfig
from pe_ablation.record import HeldError, Run, State
from pe_ablation.stopping import RESUMABLE, Stopped
from pe_ablation.sweep import Pack, Point
from pe_ablation.workers import Workers, describe

STATES: tuple[State, ...] = ("done", "running", "failed", "missing")
COMMAND = (sys.executable, "-m", "pe_ablation", "run", "--point")
INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Plan:
    """A point and the run directories of its seeds."""

    point: Point
    runs: tuple[Run, ...]

    @property
    def open_runs(self) -> list[Run]:
        """Those that lack a result, or an evaluation that their config now asks for."""
        return [run for run in self.runs if not is_complete(run)]


def check(points: Sequence[Point]) -> dict[DataConfig, str]:
    """Refuse, before any directory exists, data that isn't there and evaluations that can't be made.

    Returns the digest of the training tokens for each data config; raises ValueError or FileNotFoundError.
    """
    from pe_ablation import data, estimate, evaluate, start

    tokens: dict[DataConfig, data.TokenFile] = {}
    checked: set[tuple[DataConfig, EvalConfig, int]] = set()
    for point in points:
        experiment = point.experiments[0]
        config.refuse_imported(experiment)
        estimate.refuse_platform(_together(point.experiments).implementation)
        if experiment.eval.split == "test":
            raise config.ConfigError(
                "eval.split: a launch scores 'validation' alone; once nothing is chosen any more, the test split is "
                "opened by: pe-ablation evaluate RUNS --split test"
            )
        if "stream" in experiment.eval.protocols:
            raise config.ConfigError(
                "eval.protocols: 'stream' is not scored by a launch, but of trained runs: pe-ablation evaluate RUNS "
                "--protocols stream"
            )
        if (change := start.check(experiment)) is not None:
            print(f"{experiment.arm}: {change}", flush=True)
        source, train = experiment.data, experiment.train
        if source not in tokens:
            tokens[source] = data.load(source, "train")
        sizes = {"block": source.block, "batch_tokens": train.batch_tokens, "length": train.length}
        data.check_batches(tokens[source], **sizes, bos=source.bos)
        asked = (experiment.data, experiment.eval, experiment.train.length)
        if asked not in checked:
            evaluate.check(experiment)
            checked.add(asked)
    return {source: file.digest for source, file in tokens.items()}


def _together(experiments: Sequence[Experiment]) -> GPTConfig:
    """The model of one program for all of them; ConfigError where it names a kernel that serves one alone."""
    try:
        return experiments[0].gpt(vocab_size=258).together(len(experiments))
    except ValueError as error:
        raise config.ConfigError(f"model.{error}") from None


def plan(points: Sequence[Point], workdir: Path, source: str | None, digests: Mapping[DataConfig, str]) -> list[Plan]:
    """Write the config.json of every run: WORKDIR/<point>/seed_<k>/."""
    return [
        Plan(point, tuple(_plan_run(point, each, workdir, source, digests) for each in point.experiments))
        for point in points
    ]


def _plan_run(
    point: Point, experiment: Experiment, workdir: Path, source: str | None, digests: Mapping[DataConfig, str]
) -> Run:
    path = workdir / point.directory_name / f"seed_{experiment.seed}"
    return Run.plan(path, experiment, source, digests.get(experiment.data))


def dry_run(points: Sequence[Point], workdir: Path | None = None, *, pack: bool = False) -> Iterator[str]:
    """A line per point (seeds, parameters, tokens per run, estimated minutes and memory) and the totals.

    With `pack`, points that train in one program are estimated together, in a line below theirs. Nothing is written; of
    `workdir`, the speed of finished runs is read.
    """
    from pe_ablation import estimate, start

    speed, packs = estimate.Speed(workdir), sweep.packs(points, pack)
    costs = []
    for each in packs:
        costs.append(cost := _cost(each, speed))
        estimated = f"estimated {_minutes(cost.seconds)}, {cost.memory / 1e9:.2f} GB"
        own = "" if each.is_several else f"  {estimated}"
        for point in each.points:
            amounts = f"{cost.parameters:,} parameters  {cost.tokens:,} tokens per run"
            yield f"{point.directory_name}  seeds {point.seeds}  {amounts}{own}"
            if (change := start.check(point.experiments[0])) is not None:
                yield f"  {change}"
        if each.is_several:
            yield f"  packed: {each}; {estimated}"
    uncounted = not all(cost.has_scoring for cost in costs)
    without = "; evaluation not counted: its windows depend on the corpus" if uncounted else ""
    unit, among = ("pack", f" in {len(packs)} packs") if pack else ("point", "")
    yield f"estimated by formula from {speed}, and {estimate.START_SECONDS:.0f} s to start each {unit}{without}"
    runs, tokens = sum(cost.runs for cost in costs), sum(cost.runs * cost.tokens for cost in costs)
    minutes, most = _minutes(sum(cost.seconds for cost in costs)), max((cost.memory for cost in costs), default=0.0)
    yield (
        f"{len(points)} points{among}, {runs} runs, {tokens:,} tokens; estimated {minutes} one after another, "
        f"{most / 1e9:.2f} GB at a time"
    )


@dataclasses.dataclass(frozen=True)
class _Cost:
    """What a pack takes: parameters and tokens of a run, how many runs, seconds of all, bytes at a time."""

    parameters: int
    tokens: int
    runs: int
    seconds: float
    memory: float
    has_scoring: bool


def _cost(pack: Pack, speed: Any) -> _Cost:
    """The estimate for a pack at an `estimate.Speed`."""
    from pe_ablation import data, estimate, model

    experiments = pack.experiments
    first, runs = experiments[0], len(experiments)
    config.refuse_imported(first)
    _together(experiments)
    gpt = first.gpt(data.tokenizer(first.data).vocab_size)
    parameters = model.count_parameters(gpt)
    scoring = [estimate.scoring(each, gpt) for each in experiments]
    work = runs * first.train.steps * estimate.step(first, gpt) + sum(each or 0.0 for each in scoring)
    return _Cost(
        parameters,
        tokens=first.train.steps * first.train.batch_tokens,
        runs=runs,
        seconds=estimate.START_SECONDS + work / speed.of(first, gpt),
        memory=max(estimate.memory(each, gpt, parameters, runs) for each in experiments),
        has_scoring=None not in scoring,
    )


def _minutes(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.1f} minutes" if minutes < 10 else f"{minutes:,.0f} minutes"


def at(points: Sequence[Point], index: int, *, pack: bool = False) -> list[Point]:
    """The point of this index, from 0, alone, or with `pack` those of the pack; ValueError where there is none."""
    found = sweep.packs(points, pack)
    if not 0 <= index < len(found):
        units = "packs" if pack else "points"
        raise ValueError(f"--index {index}: {len(found)} {units} are selected, 0 to {len(found) - 1}")
    return list(found[index].points)


def launch(
    points: Sequence[Point],
    workdir: str | Path,
    source: str | None,
    *,
    workers: int = 1,
    force: bool = False,
    pack: bool = False,
    command: Sequence[str] = COMMAND,
) -> int:
    """Bring every point to its result, up to `workers` of them, or with `pack` of packs, at once.

    0 if all runs are done, 1 if not, 130 after Ctrl-C, RESUMABLE where runs were stopped by SIGTERM or SIGUSR1. With
    `force` what was recorded for these points is set aside, and they are trained again. `command` is what one pack
    is started with; its run directories are appended. Raises ValueError for more workers than the machine has room
    for, HeldError for a run that is to be set aside while it runs, and what `check` and `plan` refuse.
    """
    shares = placement.shares(workers)
    try:
        with stopping.interrupting():
            digests = check(points)
            if force:
                _set_aside(points, Path(workdir))
            packs = sweep.packs(points, pack)
            for each in packs:
                _together(each.experiments)
            planned = [plan(each.points, Path(workdir), source, digests) for each in packs]
    except Stopped:
        return RESUMABLE
    return _Launch(planned, shares, command).run()


def _set_aside(points: Sequence[Point], workdir: Path) -> None:
    """Rename what these points have left; none of it, where one of them is running."""
    paths = [workdir / point.directory_name / f"seed_{each.seed}" for point in points for each in point.experiments]
    runs = [Run(path) for path in paths if path.exists()]
    for run in runs:
        state, reason = run.status()
        if state == "running":
            raise HeldError(f"{run.path}: cannot be replaced while it runs in {reason}")
    for run in runs:
        if (aside := run.set_aside()) is not None:
            print(f"{run.path}: kept as {aside.name}", flush=True)


@dataclasses.dataclass
class _Job:
    """A pack, the directory of its first point, those of its runs that nobody here has started; what was said of it."""

    pack: Pack
    number: str
    path: Path
    runs: list[Run]
    said: set[str] = dataclasses.field(default_factory=set)

    @property
    def title(self) -> str:
        return f"[{self.number}] {self.pack.name}"

    def name(self, run: Run) -> str:
        """'seed_0', in a pack of several points with that of its point before it."""
        return f"{run.path.parent.name}/{run.path.name}" if self.pack.is_several else run.path.name

    def say(self, text: str) -> None:
        """A line about the pack, once."""
        if text not in self.said:
            print(f"{self.title}: {text}", flush=True)
        self.said.add(text)


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """Runs of a pack in a process, and since when."""

    job: _Job
    runs: list[Run]
    began: float = dataclasses.field(default_factory=time.monotonic)


class _Launch:
    """Starts each run at most once; leaves those that others hold, and those that others failed with meanwhile."""

    def __init__(self, packs: Sequence[Sequence[Plan]], shares: Sequence[placement.Share], command: Sequence[str]):
        self.plans, self.command = [each for plans in packs for each in plans], command
        self.workers = Workers(shares)
        self.has_logs = len(shares) > 1
        self.jobs = [
            _Job(
                Pack(tuple(each.point for each in plans)),
                f"{number}/{len(packs)}",
                plans[0].runs[0].path.parent,
                [run for each in plans for run in each.open_runs],
            )
            for number, plans in enumerate(packs, 1)
        ]
        pairs = [pair for each in self.plans for pair in zip(each.runs, each.point.experiments, strict=True)]
        self.experiments = {run.path: experiment for run, experiment in pairs}
        self.attempts = {run.path: _ended(run) for job in self.jobs for run in job.runs}
        self.under_way: dict[subprocess.Popen, _UnderWay] = {}

    def run(self) -> int:
        for job in self.jobs:
            if job.pack.is_several:
                names = ", ".join(each.directory_name for each in job.pack.points)
                job.say(f"packed: {job.pack} ({names}), {len(job.runs)} to do")
            if not job.runs:
                job.say("done before")
        with stopping.heard(self.workers.hear, (*stopping.SIGNALS, signal.SIGINT)):
            while True:
                while self.workers.free and self.workers.asked is None and (chosen := self._next()):
                    self._start(*chosen)
                if not self.under_way:
                    return self._code()
                self._end(self.workers.next_end())

    def _next(self) -> tuple[_Job, list[Run]] | None:
        """The first pack of which something can be started, and what was claimed of it."""
        for job in self.jobs:
            claimed = [run for run in tuple(job.runs) if self._claim(job, run)]
            if claimed:
                return job, claimed
        return None

    def _claim(self, job: _Job, run: Run) -> bool:
        """Claim a run; if that can't be, it is done or failed elsewhere, or held and looked at again later."""
        number = run.attempts()
        state, reason = run.status()
        if state == "running":
            job.say(f"{job.name(run)} is left to {reason}")
            return False
        Run.plan(run.path, self.experiments[run.path], None)  # when all were planned it may have been held
        claimed = False
        if is_complete(run):
            job.say(f"{job.name(run)} was done by another launch")
        elif state == "failed" and run.error() and number != self.attempts[run.path]:
            job.say(f"{job.name(run)} failed in another launch: {reason}")
        elif not (claimed := run.reserve(number + 1)):
            return False
        job.runs.remove(run)
        return claimed

    def _start(self, job: _Job, runs: list[Run]) -> None:
        log = job.path / "log.txt" if self.has_logs else None
        where = f", output in {log}" if log else ""
        print(f"{job.title}: {', '.join(map(job.name, runs))}{where}", flush=True)
        process = self.workers.start([*self.command, *(str(run.path) for run in runs)], log)
        self.under_way[process] = _UnderWay(job, runs)

    def _end(self, process: subprocess.Popen) -> None:
        """However it ended, each of its runs then has a result, an error, or was stopped."""
        ended = self.under_way.pop(process)
        reason, asked = describe(process.returncode), self.workers.asked
        for run in ended.runs:
            try:
                run.close("stopped" if asked else "failed", f"{asked.name}, {reason}" if asked else reason)
            except HeldError as lost:
                print(lost, flush=True)
        states = (f"{ended.job.name(run)} {' '.join(filter(None, run.status()))}" for run in ended.runs)
        print(f"{ended.job.title}: {'; '.join(states)} after {time.monotonic() - ended.began:.0f} s", flush=True)

    def _code(self) -> int:
        left = [run for plan in self.plans for run in plan.open_runs]
        if not left:
            return 0
        if self.workers.asked == signal.SIGINT:
            return INTERRUPTED
        states = Counter(run.status()[0] for run in left)
        if self.workers.asked or states["stopped"]:
            return RESUMABLE
        if states["running"]:
            print(f"{states['running']} runs are left to other launches, which hold them", flush=True)
        return 1


def _ended(run: Run) -> int:
    """How many attempts at a run have come to an end; one that is under way elsewhere hasn't."""
    return run.attempts() - (run.status()[0] == "running")


def is_complete(run: Run) -> bool:
    """Done, and scored as its config asks: new evaluation lengths reopen a run, but never its training."""
    result = run.result()
    if run.status()[0] != "done" or result is None or "eval" not in result:
        return False
    return {**config.to_dict(config.EvalConfig()), **result["eval"]} == run.config["experiment"]["eval"]


def run_pack(directories: Sequence[str | Path], *, again: bool = True) -> int:
    """Train the planned runs of one pack, score each, store results; 0 if all are done, RESUMABLE if stopped.

    Runs that another process holds are left to it. What a run fails with is in its error.json and on stderr; a run
    that fails to be scored doesn't stop the others. Raises HeldError if all are held elsewhere, KeyboardInterrupt
    after recording it. `again`: a second SIGTERM or SIGUSR1 kills.
    """
    with stopping.noted(again=again):
        claimed: list[Run] = []
        try:
            held = _claim_all([Run(each) for each in directories], claimed)
            with mirror.training(claimed):
                done = [_bring_up(group) for group in _groups(claimed)]
        except Stopped as stopped:
            print(f"stopped: {stopped}", file=sys.stderr)
            _end_all(claimed, "stopped", str(stopped))
            return RESUMABLE
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            _end_all(claimed, "failed", "interrupted" if interrupted else traceback.format_exc())
            raise
        return 0 if all(done) and not held else 1


def _claim_all(runs: Sequence[Run], claimed: list[Run]) -> list[HeldError]:
    """Add to `claimed` the runs that nobody else holds; returns the refusals of the others, raises if all refuse."""
    held = []
    for run in runs:
        try:
            run.start()
            claimed.append(run)
        except HeldError as error:
            held.append(error)
    if held and not claimed:
        raise held[0]
    for each in held:
        print(f"{each}; left to it", file=sys.stderr)
    return held


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that go through one program: trained ones; others by a checkpoint's step that they share, or by having none.

    Runs broken off while they were being saved have one in common. One that was added later, or that trained on its own
    meanwhile, has not, and would send the others back to their beginning.
    """
    from pe_ablation import checkpoint

    trained = [run for run in runs if run.result() is not None]
    untrained = [run for run in runs if run not in trained]
    groups: list[tuple[set[int], list[Run]]] = []
    for run in untrained:
        steps = set(checkpoint.steps(run.path / "checkpoints"))
        for common, group in groups:
            if common & steps or not common | steps:
                common &= steps
                group.append(run)
                break
        else:
            groups.append((steps, [run]))
    return [group for group in (trained, *(group for _, group in groups)) if group]


def _bring_up(runs: Sequence[Run]) -> bool:
    """Train and score runs together; whether all are done. An error of training is recorded for each of them."""
    try:
        results = _train(runs)
    except Exception:
        traceback.print_exc()
        _end_all(runs, "failed", traceback.format_exc())
        return False
    return all([_score(run, result) for run, result in zip(runs, results, strict=True)])


def _train(runs: Sequence[Run]) -> list[Any]:
    """The summary of each run: that of its result if they have one, else of training them together."""
    from pe_ablation import train

    results = [run.result() for run in runs]
    if None in results:
        return train.fit_pack([run.experiment for run in runs], [run.path for run in runs])
    return results


def _score(run: Run, result: Mapping[str, Any]) -> bool:
    """Evaluate a trained run and store its result, or why that failed."""
    from pe_ablation import evaluate

    try:
        evaluate.evaluate_run(run.path)
        run.finish({**result, "eval": config.to_dict(run.experiment.eval)})
    except Exception:
        traceback.print_exc()
        _end_all([run], "failed", traceback.format_exc())
        return False
    return True


def _end_all(runs: Sequence[Run], state: Literal["failed", "stopped"], reason: str) -> None:
    """End the attempts that have no end yet; one that was lost to another process is that one's."""
    for run in runs:
        with contextlib.suppress(HeldError):
            run.close(state, reason)


def child(directories: Sequence[str | Path], parent: int = 0) -> int:
    """`run_pack` for a launcher, which alone stops us: by SIGTERM, by SIGKILL, or by ending itself.

    `parent` is the descriptor of a pipe that the launcher holds open while it lives. A terminal sends Ctrl-C to both,
    a scheduler its signals: the launcher passes on what it makes of them, and being asked twice changes nothing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return run_pack(directories, again=False)


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def status(runs_dir: str | Path) -> Iterator[str]:
    """A line per run (state, directory, reason) and the counts."""
    counts: Counter[str] = Counter()
    for run in record.find(runs_dir):
        state, reason = run.status()
        counts[state] += 1
        name = run.path.relative_to(runs_dir) if run.path != Path(runs_dir) else run.path
        yield f"{state:<8} {name}  {reason}".rstrip()
    stopped = ("stopped",) if counts["stopped"] else ()
    yield f"{counts.total()} runs: " + ", ".join(f"{counts[state]} {state}" for state in (*STATES, *stopped))
