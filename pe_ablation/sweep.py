"""From a config file to points: its config, its named sweeps, and the experiments they lay over one another.

A config file defines `get_config(arg)`, which returns a ConfigDict, and generators of overlays (dotted path -> value)
beside it: `sweep(arg)`, the default one, and `sweep_NAME(arg)`. They may be written with the algebra below, whose parts
are lists of overlays:

    prod(param("encoding.name", ["rope", "alibi"]), param("seed", range(3)))       six overlays
"""

import dataclasses
import importlib.util
import inspect
import itertools
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_ablation import config
from pe_ablation.config import ConfigError, Experiment

DEFAULT = "default"
Overlay = Mapping[str, Any]


def param(path: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    """An axis: an overlay for each value of one field; ValueError for text, which would be taken letter by letter."""
    if isinstance(values, str):
        raise ValueError(f"param: the values of {path} are the text {values!r}; give a list of them")
    return [{path: value} for value in values]


def prod(*sweeps: Iterable[Overlay]) -> list[dict[str, Any]]:
    """Every combination of the factors' overlays, the last factor fastest.

    Raises ValueError for an empty factor and where two set the same field, or one a group that the other sets into.
    """
    return _product([(f"factor {number} of prod", list(each)) for number, each in enumerate(sweeps, 1)])


def zipit(*sweeps: Iterable[Overlay]) -> list[dict[str, Any]]:
    """The first overlays together, then the second ones, ...; ValueError for unequal lengths and as in `prod`."""
    parts = [(f"part {number} of zipit", list(each)) for number, each in enumerate(sweeps, 1)]
    lengths = [len(overlays) for _, overlays in parts]
    if len(set(lengths)) > 1:
        raise ValueError(f"zipit: parts of unequal lengths {', '.join(map(str, lengths))}")
    _refuse_clashes(parts)
    return [_union(each) for each in zip(*(overlays for _, overlays in parts), strict=True)]


def chain(*sweeps: Iterable[Overlay]) -> list[dict[str, Any]]:
    """One after another."""
    return [dict(overlay) for sweep in sweeps for overlay in sweep]


def _product(factors: Sequence[tuple[str, Sequence[Overlay]]]) -> list[dict[str, Any]]:
    """`prod` of factors that have names."""
    for name, overlays in factors:
        if not overlays:
            raise ValueError(f"{name} is empty")
    _refuse_clashes(factors)
    return [_union(each) for each in itertools.product(*(overlays for _, overlays in factors))]


def _union(overlays: Iterable[Overlay]) -> dict[str, Any]:
    return {path: value for overlay in overlays for path, value in overlay.items()}


def _refuse_clashes(factors: Sequence[tuple[str, Sequence[Overlay]]]) -> None:
    for (name, overlays), (other, others) in itertools.combinations(factors, 2):
        for path, against in itertools.product(_paths(overlays), _paths(others)):
            if path == against:
                raise ValueError(f"{name} and {other} both set {path}")
            if _nested(path, against):
                raise ValueError(f"{name} sets {path}, and {other} sets {against}")


def _paths(overlays: Iterable[Overlay]) -> list[str]:
    """What the overlays set, the name of a model size spelled out."""
    return list(_union(map(config.spelled_out, overlays)))


def _nested(path: str, other: str) -> bool:
    """Whether two dotted paths are the same or one is a group that holds the other."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """A loaded config file: `spec` as given, its ConfigDict, and its sweeps by name, the plain one as `DEFAULT`."""

    spec: str
    path: Path
    arg: str | None
    config: Any
    sweeps: Mapping[str, Callable[[], Iterable[Overlay]]]

    @property
    def name(self) -> str:
        """'extrapolation-quick': the file's stem and the argument."""
        return f"{self.path.stem}-{self.arg}" if self.arg else self.path.stem


@dataclasses.dataclass(frozen=True)
class Point:
    """Experiments that differ by their seed alone; they share a directory, and train in one program."""

    experiments: tuple[Experiment, ...]

    @property
    def arm(self) -> str:
        return self.experiments[0].arm

    @property
    def train_length(self) -> int:
        return self.experiments[0].train.length

    @property
    def seeds(self) -> str:
        """'0,1,2'."""
        return ",".join(str(each.seed) for each in self.experiments)

    @property
    def identity(self) -> str:
        return config.point_identity(self.experiments[0])

    @property
    def directory_name(self) -> str:
        arm = re.sub(r"[^\w.+-]+", "_", self.arm)
        return f"{arm}-L{self.train_length}-{self.identity[:8]}"


@dataclasses.dataclass(frozen=True)
class Pack:
    """Points that train in one program: they differ by their learning rate alone, or by what names and scores them."""

    points: tuple[Point, ...]

    def __str__(self) -> str:
        rates = ", ".join(str(each.experiments[0].train.learning_rate) for each in self.points)
        return f"{len(self.points)} points, {len(self.experiments)} runs in one program, train.learning_rate {rates}"

    @property
    def experiments(self) -> list[Experiment]:
        """Of all points, in their order."""
        return [each for point in self.points for each in point.experiments]

    @property
    def is_several(self) -> bool:
        """Whether there is more than one point in it."""
        return len(self.points) > 1

    @property
    def name(self) -> str:
        """The first point's directory, and how many more there are."""
        more = f" and {len(self.points) - 1} more" if self.is_several else ""
        return f"{self.points[0].directory_name}{more}"


def packs(points: Sequence[Point], together: bool) -> list[Pack]:
    """The points by the program that trains them, first seen first; each on its own unless they are put `together`."""
    groups: dict[Any, list[Point]] = {}
    for number, point in enumerate(points):
        groups.setdefault(config.pack(point.experiments[0]) if together else number, []).append(point)
    return [Pack(tuple(group)) for group in groups.values()]


def load(spec: str) -> ConfigFile:
    """Load `FILE.py[:ARG]`; raises FileNotFoundError, or ConfigError with what the file allows."""
    match = re.fullmatch(r"(.+\.py)(?::(.*))?", spec)
    if match is None:
        raise ConfigError(f"{spec}: not a config file; give FILE.py or FILE.py:ARGUMENT")
    path, arg = Path(match[1]), match[2] or None
    module = _import(path)
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(f"{path}: defines no get_config(arg)")
    return ConfigFile(spec, path, arg, _call(module.get_config, spec, arg), _sweeps(module, spec, arg))


def _import(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such config file")
    name = f"_config_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise _refusal(str(path), error) from error
    return module


def _refusal(spec: str, error: Exception) -> ConfigError:
    """An error of the config file's own code in one line, with the line of the file where it arose."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return ConfigError(f"{spec}: {error}")
    file = spec.partition(".py")[0] + ".py"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = spec if line is None else f"{spec}: line {line}"
    return ConfigError(f"{where}: {type(error).__name__}: {error}")


def _sweeps(module: Any, spec: str, arg: str | None) -> dict[str, Callable[[], Iterable[Overlay]]]:
    """The module's sweep functions, in the order they were written, each bound to the argument."""
    sweeps = {}
    for name, value in vars(module).items():
        match = re.fullmatch(r"sweep(?:_(\w+))?", name)
        if match and inspect.isfunction(value):
            sweeps[match[1] or DEFAULT] = lambda function=value: _call(function, spec, arg)
    return sweeps


def _call(function: Callable[..., Any], spec: str, arg: str | None) -> Any:
    """`function(arg)`, or `function()` where no argument was given; its ValueErrors name the config file."""
    given = () if arg is None else (arg,)
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        problem = "takes no argument" if given else "needs an argument: FILE.py:ARGUMENT"
        raise ConfigError(f"{spec}: {function.__name__} {problem}") from None
    try:
        return function(*given)
    except Exception as error:
        raise _refusal(spec, error) from error


def points(
    config_file: ConfigFile,
    sweep_name: str | None,
    overrides: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]] | None = None,
    keep: Callable[[list[Point]], list[Point]] = list,
) -> list[Point]:
    """The points of a sweep (None: the config alone) that `keep` leaves, first seen first, each experiment once.

    `sweep_name` may be several names with commas between: their product. `axes` replaces all values of a swept field by
    others, `overrides` hold for every point; both come from the command line. Raises ConfigError for an unknown sweep,
    sweeps that set the same field, an override of a swept field, an axis that isn't one (`_replace_axis`), and two
    experiments that train the same thing but differ in what they are called or how they are scored.
    """
    overlays = [{}] if sweep_name is None else _named(config_file, sweep_name)
    for path, values in (axes or {}).items():
        overlays = _replace_axis(overlays, path, values, _title(config_file, sweep_name))
    groups: dict[Any, list[Experiment]] = {}
    for overlay in overlays:
        _refuse_swept(overlay, overrides, _title(config_file, sweep_name))
        experiment = config.read(config_file.config, {**config.spelled_out(overlay), **config.spelled_out(overrides)})
        group = groups.setdefault((config.point_identity(experiment), experiment.start.run), [])
        _refuse_ambiguous(experiment, group)
        if experiment not in group:
            group.append(experiment)
    return [_started(point) for point in keep([Point(tuple(group)) for group in groups.values()])]


def _started(point: Point) -> Point:
    """The point with what `start` means for it."""
    if point.experiments[0].start.run is None:
        return point
    from pe_ablation import start  # and with it all that reads checkpoints

    return Point(tuple(map(start.resolved, point.experiments)))


def listing(packs: Sequence[Pack]) -> Iterable[str]:
    """A line per point: the index of its pack from 0, its directory's name, its seeds."""
    for index, pack in enumerate(packs):
        for point in pack.points:
            yield f"{index}  {point.directory_name}  seeds {point.seeds}"


def default_sweep(config_file: ConfigFile) -> str | None:
    """The sweep to use where none was named: the plain one, or None for a file without sweeps."""
    if config_file.sweeps and DEFAULT not in config_file.sweeps:
        raise ConfigError(f"{config_file.spec}: no default sweep; name one of: {', '.join(config_file.sweeps)}")
    return DEFAULT if config_file.sweeps else None


def _title(config_file: ConfigFile, sweep_name: str | None) -> str:
    if sweep_name is None:
        return f"{config_file.spec} without a sweep"
    return f"the sweep {sweep_name!r} of {config_file.spec}"


def _named(config_file: ConfigFile, names: str) -> list[dict[str, Any]]:
    """The overlays of one sweep, or of the product of several."""
    factors = [(f"sweep {name!r}", _overlays(config_file, name)) for name in names.split(",")]
    try:
        return _product(factors)
    except ValueError as error:
        raise ConfigError(f"{config_file.spec}: {error}; --sweep A,B is their product") from None


def _overlays(config_file: ConfigFile, name: str) -> list[Overlay]:
    if name not in config_file.sweeps:
        allowed = ", ".join(config_file.sweeps) or "none"
        raise ConfigError(
            f"{config_file.spec}: no sweep {name!r}{config.near(name, config_file.sweeps)}; allowed: {allowed}"
        )
    try:
        overlays = list(config_file.sweeps[name]())
    except ConfigError:
        raise
    except Exception as error:
        raise _refusal(f"{config_file.spec}: sweep {name!r}", error) from error
    if not overlays:
        raise ConfigError(f"{config_file.spec}: sweep {name!r} is empty")
    for overlay in overlays:
        if not isinstance(overlay, Mapping) or not all(isinstance(path, str) for path in overlay):
            raise ConfigError(f"{config_file.spec}: sweep {name!r} yields {overlay!r}, not {{dotted path: value}}")
    return overlays


def _replace_axis(overlays: Sequence[Overlay], path: str, values: Sequence[Any], title: str) -> list[dict[str, Any]]:
    """The overlays with `values` for those that they had for the field `path`; what doesn't set it stays.

    What is left of the overlays without the field, once each, is combined with every value. Raises ConfigError for a
    field that isn't swept, one that is set as a part of its group, and one that is tied to others (`zipit`): then what
    is left doesn't occur with every value, and the new ones would have no partner.
    """
    config.type_of(path)
    _refuse_unswept(overlays, path, title)
    rests: dict[tuple[bool, str], dict[str, Any]] = {}
    found: dict[tuple[bool, str], set[str]] = {}
    for overlay in overlays:
        rest = {name: value for name, value in overlay.items() if name != path}
        key = (path in overlay, _key(rest))
        rests.setdefault(key, rest)
        found.setdefault(key, set()).add(_key(overlay.get(path)))
    if len({frozenset(seen) for (swept, _), seen in found.items() if swept}) > 1:
        raise ConfigError(
            f"{path}: {title} ties its values to those of other fields (not every combination occurs): they can't be "
            "replaced alone; change the sweep"
        )
    return [
        {**rest, **own}
        for (swept, _), rest in rests.items()
        for own in ([{path: value} for value in values] if swept else [{}])
    ]


def _refuse_unswept(overlays: Sequence[Overlay], path: str, title: str) -> None:
    fields = _union(overlays)
    for field in fields:
        if path.startswith(f"{field}."):
            raise ConfigError(f"{path}: {title} sets {field} as a whole, of which no part can be replaced")
        if field.startswith(f"{path}."):
            raise ConfigError(f"{path}: {title} sets {field}, not its group; replace that: --sweep.{field}=")
    if path not in fields:
        swept = ", ".join(fields) or "nothing"
        raise ConfigError(f"{path}: not swept, {title} sets {swept}; for all points alike: --config.{path}=")


def _key(value: Any) -> str:
    """Text that equal values share, whatever the order of their names."""
    return json.dumps(value, sort_keys=True, default=repr)


def _refuse_swept(overlay: Overlay, overrides: Mapping[str, Any], title: str) -> None:
    for override, path in itertools.product(config.spelled_out(overrides), config.spelled_out(overlay)):
        if _nested(override, path):
            axis = path if path in overlay else "model"
            way = "" if isinstance(overlay[axis], Mapping) else f"; its values are replaced by --sweep.{axis}="
            raise ConfigError(f"{override}: can't be overridden, {title} sets {axis}{way}")


def _refuse_ambiguous(experiment: Experiment, group: list[Experiment]) -> None:
    """One directory per point: experiments that share it must agree on everything but the seed."""
    if not group:
        return
    first, other = (config.to_dict(dataclasses.replace(each, seed=0)) for each in (group[0], experiment))
    if first != other:
        fields = [name for name in first if first[name] != other[name]]
        raise ConfigError(
            f"{', '.join(fields)}: two points of the sweep ({group[0].arm}, {experiment.arm}; training length "
            f"{experiment.train.length}) train the same thing and differ only there"
        )
