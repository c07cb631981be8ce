"""`launch --select`: train a swept field's grid on a seed of its own, choose, train the sweep at the chosen values.

The grid is scored at its training length alone, and the values are chosen as `report --select` chooses them.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pe_ablation import config, launch
from pe_ablation.config import ConfigError, EvalConfig, Experiment
from pe_ablation.record import RecordError, Run
from pe_ablation.sweep import Point

SEED = 100  # of the grid, unless one is named: fixed, so that more seeds of the sweep leave the grid as it is


def launch_selected(
    points: Sequence[Point],
    workdir: str | Path,
    source: str | None,
    *,
    field: str,
    seed: int | None = None,
    **options: Any,
) -> int:
    """Launch the grid of `field`, then those of `points` that have the best value; the exit code of `launch.launch`.

    Arms whose grid has no number are reported and left out, which is a 1. `options` go to both launches. Raises
    ConfigError for points without a grid of the field and for a seed that the sweep trains.
    """
    from pe_ablation import report, selection

    workdir = Path(workdir)
    grid = [_as_recorded(point, workdir) for point in grid_points(points, field, seed)]
    code = launch.launch(grid, workdir, source, **options)
    if code not in (0, 1):
        return code
    rows: Any = report.rows(workdir)
    own = rows[rows.point.isin([point.identity for point in grid])].reset_index(drop=True)
    choice = selection.choose(own, field, [grid[0].experiments[0].seed])
    print(f"\n{selection.to_markdown(choice)}", flush=True)
    chosen = [point for point in points if point.identity in choice.points]
    if not chosen:
        return 1
    incomplete = len(chosen) < len(_grids(points, field))
    return max(launch.launch(chosen, workdir, source, **options), code, int(incomplete))


def dry_run(
    points: Sequence[Point],
    workdir: Path | None = None,
    *,
    field: str,
    seed: int | None = None,
    pack: bool = False,
) -> Iterator[str]:
    """What the grid would train, and how much follows."""
    yield from launch.dry_run(grid_points(points, field, seed), workdir, pack=pack)
    grids = _grids(points, field)
    runs = sum(max(len(point.experiments) for point in grid) for grid in grids)
    yield f"then the best {field} of each: {len(grids)} points, {runs} runs"


def grid_points(points: Sequence[Point], field: str, seed: int | None = None) -> list[Point]:
    """Every point with the grid's seed alone, scored at its training length under one protocol."""
    _grids(points, field)
    seed = SEED if seed is None else seed
    taken = sorted({each.seed for point in points for each in point.experiments})
    if seed in taken:
        raise ConfigError(
            f"select_seed: {seed} is one of the sweep's seeds ({', '.join(map(str, taken))}); "
            "what a value is chosen by can't be in the table: name another"
        )
    return [Point((_for_grid(point.experiments[0], seed),)) for point in points]


def _for_grid(experiment: Experiment, seed: int) -> Experiment:
    plan = experiment.eval
    protocol = "targets" if "targets" in plan.protocols else min(plan.protocols)
    alone = dataclasses.replace(plan, lengths=(experiment.train.length,), protocols=(protocol,), nulls=())
    return dataclasses.replace(experiment, seed=seed, eval=alone)


def _grids(points: Sequence[Point], field: str) -> list[list[Point]]:
    """The points by what they have in common beside the field; ConfigError where one is left with a single value."""
    from pe_ablation import report

    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        fields = report.fields(config.to_dict(point.experiments[0]))
        if field not in fields:
            raise ConfigError(f"select: no such field: {field}{config.near(field, fields)}")
        del fields[field]
        groups.setdefault((point.arm, json.dumps(fields, sort_keys=True)), []).append(point)
    for group in groups.values():
        if len(group) < 2:
            raise ConfigError(
                f"select: {group[0].arm} at {group[0].train_length} tokens has a single value of {field}; "
                f"sweep it: --sweep.{field}=VALUE,VALUE,..."
            )
    return list(groups.values())


def _as_recorded(point: Point, workdir: Path) -> Point:
    """The point with the evaluation that its record asks for, where that has the number to choose by."""
    [experiment] = point.experiments
    try:
        recorded = Run(workdir / point.directory_name / f"seed_{experiment.seed}").experiment.eval
    except (RecordError, ConfigError):  # none yet, or one that the launch refuses with its reason
        return point
    same = _measure(recorded, experiment) == _measure(experiment.eval, experiment)
    return Point((dataclasses.replace(experiment, eval=recorded),)) if same else point


def _measure(plan: EvalConfig, experiment: Experiment) -> tuple[Any, ...]:
    """What decides the number to choose by, or why `plan` doesn't give it."""
    protocol = experiment.eval.protocols[0]
    if protocol not in plan.protocols:
        return (None,)
    return plan.split, protocol, plan.settings(protocol, experiment.train.length)
