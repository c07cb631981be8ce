"""Runs points one after another, each in a process of its own, so that one that dies never takes the rest along.

The order is fixed: refuse what can't work, plan every run directory (from then on a run that is absent is known to be
missing), train and score what isn't done, say what became of each. The next launch retries what failed.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_ablation import config, mirror, record
from pe_ablation.config import DataConfig, Experiment
from pe_ablation.record import RecordError, Run, State
from pe_ablation.sweep import Point

STATES: tuple[State, ...] = ("done", "running", "failed", "missing")
COMMAND = (sys.executable, "-m", "pe_ablation", "run", "--point")
# glibc keeps freed arrays instead of returning them to the kernel each step: a sixth more training steps on CPU.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
INTERRUPTED = 130
SECONDS_TO_STOP = 10.0


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
    from pe_ablation import data, evaluate

    digests: dict[DataConfig, str] = {}
    checked: set[tuple[DataConfig, str]] = set()
    for experiment in (point.experiments[0] for point in points):
        if experiment.eval.split == "test":
            raise config.ConfigError(
                "eval.split: a launch scores 'validation' alone; once nothing is chosen any more, the test split is "
                "opened by: pe-ablation evaluate RUNS --split test"
            )
        if experiment.data not in digests:
            digests[experiment.data] = data.load(experiment.data, "train").digest
        if (experiment.data, experiment.eval.split) not in checked:
            data.load(experiment.data, experiment.eval.split)
            checked.add((experiment.data, experiment.eval.split))
        evaluate.check(experiment)
    return digests


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


def dry_run(points: Sequence[Point], workdir: Path | None = None) -> Iterator[str]:
    """A line per point (seeds, parameters, tokens per run, estimated minutes and memory) and the totals.

    Nothing is written; of `workdir`, the speed of finished runs is read.
    """
    from pe_ablation import data, estimate, model

    speed = estimate.Speed(workdir)
    runs = tokens = seconds = most = 0
    unscored = False
    for point in points:
        first, count = point.experiments[0], len(point.experiments)
        gpt = first.gpt(data.tokenizer(first.data).vocab_size)
        parameters = model.count_parameters(gpt)
        each = first.train.steps * first.train.batch_tokens
        scoring = estimate.scoring(first, gpt)
        work = count * (first.train.steps * estimate.step(first, gpt) + (scoring or 0.0))
        own, size = estimate.START_SECONDS + work / speed.of(first, gpt), estimate.memory(first, gpt, parameters, count)
        yield (
            f"{point.directory_name}  seeds {point.seeds}  {parameters:,} parameters  {each:,} tokens per run"
            f"  estimated {_minutes(own)}, {size / 1e9:.2f} GB"
        )
        runs, tokens, seconds, most = runs + count, tokens + count * each, seconds + own, max(most, size)
        unscored |= scoring is None
    without = "; evaluation not counted: its windows depend on the corpus" if unscored else ""
    yield f"estimated by formula from {speed}, and {estimate.START_SECONDS:.0f} s to start each point{without}"
    yield (
        f"{len(points)} points, {runs} runs, {tokens:,} tokens; estimated {_minutes(seconds)} one after another, "
        f"{most / 1e9:.2f} GB at a time"
    )


def _minutes(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.1f} minutes" if minutes < 10 else f"{minutes:,.0f} minutes"


def launch(
    points: Sequence[Point], workdir: str | Path, source: str | None, *, command: Sequence[str] = COMMAND
) -> int:
    """Bring every point to its result; 0 if all runs are done, 1 if not, 130 after Ctrl-C.

    `command` is what one point is started with; its run directories are appended.
    """
    plans = plan(points, Path(workdir), source, check(points))
    try:
        for number, each in enumerate(plans, 1):
            _bring_up(each, f"[{number}/{len(plans)}] {each.point.directory_name}", command)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 1 if any(each.open_runs for each in plans) else 0


def _bring_up(plan: Plan, title: str, command: Sequence[str]) -> None:
    states = [(run, *run.status()) for run in plan.open_runs]
    for run, state, reason in states:
        if state == "running":
            print(f"{title}: {run.path.name} is left to {reason}", flush=True)
    idle = [run for run, state, _ in states if state != "running"]
    if not idle:
        print(f"{title}: {'nothing to start' if states else 'done before'}", flush=True)
        return
    print(f"{title}: {', '.join(run.path.name for run in idle)}", flush=True)
    _run_child(idle, command)


def _run_child(runs: Sequence[Run], command: Sequence[str]) -> None:
    """One point in a process of its own. However it ends, each run then has a result or an error."""
    for run in runs:
        run.forget_error()
    # The child ends with us, even if we are killed: it watches for the end of its input (`child`).
    arguments = [*command, *(str(run.path) for run in runs)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, env={**KEEP_MEMORY, **os.environ}) as child:
        try:
            end = _describe(child.wait())
        except KeyboardInterrupt:
            _stop(child)
            _fail_silent(runs, "interrupted")
            raise
    _fail_silent(runs, end)


def _fail_silent(runs: Sequence[Run], reason: str) -> None:
    """Give a reason to the runs whose process could not: neither done nor failed by their own account."""
    for run in runs:
        if not run.error() and not is_complete(run) and run.status()[0] != "running":
            run.fail(reason)


def _stop(child: subprocess.Popen) -> None:
    """SIGTERM, which it turns into an orderly end; SIGKILL if that takes long or Ctrl-C is pressed again."""
    child.terminate()
    try:
        child.wait(SECONDS_TO_STOP)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


def _describe(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code} and no result"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = ", possibly out of memory" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({name}{hint})"


def is_complete(run: Run) -> bool:
    """Done, and scored as its config asks: new evaluation lengths reopen a run, but never its training."""
    result = run.result()
    return run.status()[0] == "done" and result is not None and result.get("eval") == run.config["experiment"]["eval"]


def run_point(directories: Sequence[str | Path]) -> int:
    """Train the planned seeds of one point in one program, score each, store results; 0 if all are done.

    What a run fails with is in its error.json and on stderr. A seed that fails to be scored doesn't stop the others.
    Raises RecordError if another process holds a run, KeyboardInterrupt after recording it.
    """
    claimed: list[Run] = []
    try:
        for run in map(Run, directories):
            run.start()
            claimed.append(run)
        with mirror.training(claimed):
            results = _train(claimed)
            finished = [_score(run, result) for run, result in zip(tuple(claimed), results, strict=True)]
    except BaseException as error:
        return _fail_all(claimed, error)
    return 0 if all(finished) else 1


def _train(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The summary of each run: that of its result if it has one, else of training it together with the others."""
    from pe_ablation import train

    results: list[Any] = [run.result() for run in runs]
    untrained = [run for run, result in zip(runs, results, strict=True) if result is None]
    if untrained:
        fresh = iter(train.fit_seeds([run.experiment for run in untrained], [run.path for run in untrained]))
        results = [next(fresh) if result is None else result for result in results]
    return results


def _score(run: Run, result: Mapping[str, Any]) -> bool:
    """Evaluate a trained run and store its result, or why that failed."""
    from pe_ablation import evaluate

    try:
        evaluate.evaluate_run(run.path)
    except Exception:
        traceback.print_exc()
        run.fail(traceback.format_exc())
        return False
    run.finish({**result, "eval": config.to_dict(run.experiment.eval)})
    return True


def _fail_all(claimed: Sequence[Run], error: BaseException) -> int:
    """Record the exception being handled in every claimed run that has no end yet; interruptions and refusals go on."""
    interrupted = isinstance(error, KeyboardInterrupt)
    for run in claimed:
        if run.status()[0] == "running":
            run.fail("interrupted" if interrupted else traceback.format_exc())
    if interrupted or isinstance(error, RecordError):
        raise error
    traceback.print_exc()
    return 1


def child(directories: Sequence[str | Path], parent: int = 0) -> int:
    """`run_point` for a launcher, which alone stops us: by SIGTERM, or by ending itself.

    `parent` is the descriptor of a pipe that the launcher holds open while it lives. A terminal sends Ctrl-C to both;
    the launcher passes it on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return run_point(directories)


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
    yield f"{counts.total()} runs: " + ", ".join(f"{counts[state]} {state}" for state in STATES)
