"""From a config file to points: its config, its named sweeps, and the experiments they lay over one another.

A config file defines `get_config(arg)`, which returns a ConfigDict, and generators of overlays (dotted path -> value)
beside it: `sweep(arg)`, the default one, and `sweep_NAME(arg)`.
"""

import dataclasses
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pe_ablation import config
from pe_ablation.config import ConfigError, Experiment

DEFAULT = "default"
Overlay = Mapping[str, Any]


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
    """Experiments that differ by their seed alone; they train in one program."""

    experiments: tuple[Experiment, ...]

    @property
    def arm(self) -> str:
        return self.experiments[0].arm

    @property
    def train_length(self) -> int:
        return self.experiments[0].train.length

    @property
    def identity(self) -> str:
        return config.point_identity(self.experiments[0])

    @property
    def directory_name(self) -> str:
        arm = re.sub(r"[^\w.+-]+", "_", self.arm)
        return f"{arm}-L{self.train_length}-{self.identity[:8]}"


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
    return ConfigError(f"{spec}: line {line}: {type(error).__name__}: {error}")


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


def points(config_file: ConfigFile, sweep_name: str | None, overrides: Mapping[str, Any]) -> list[Point]:
    """The points of a sweep (None: the config alone), first seen first, each experiment once.

    `overrides` come from the command line and hold for every point. Raises ConfigError for an unknown sweep, an
    override of a swept field, and two experiments that train the same thing but differ in what they are called or how
    they are scored.
    """
    overlays = [{}] if sweep_name is None else _overlays(config_file, sweep_name)
    groups: dict[str, list[Experiment]] = {}
    for overlay in overlays:
        _refuse_swept(overlay, overrides, config_file, sweep_name)
        experiment = config.read(config_file.config, {**overlay, **overrides})
        group = groups.setdefault(config.point_identity(experiment), [])
        _refuse_ambiguous(experiment, group)
        if experiment not in group:
            group.append(experiment)
    return [Point(tuple(group)) for group in groups.values()]


def default_sweep(config_file: ConfigFile) -> str | None:
    """The sweep to use where none was named: the plain one, or None for a file without sweeps."""
    if config_file.sweeps and DEFAULT not in config_file.sweeps:
        raise ConfigError(f"{config_file.spec}: no default sweep; name one of: {', '.join(config_file.sweeps)}")
    return DEFAULT if config_file.sweeps else None


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
    except ValueError as error:
        raise ConfigError(f"{config_file.spec}: sweep {name!r}: {error}") from error
    if not overlays:
        raise ConfigError(f"{config_file.spec}: sweep {name!r} is empty")
    for overlay in overlays:
        if not isinstance(overlay, Mapping):
            raise ConfigError(f"{config_file.spec}: sweep {name!r} yields {overlay!r}, not {{dotted path: value}}")
    return overlays


def _refuse_swept(overlay: Overlay, overrides: Mapping[str, Any], config_file: ConfigFile, name: str | None) -> None:
    for override in overrides:
        for path in overlay:
            if f"{override}.".startswith(f"{path}.") or f"{path}.".startswith(f"{override}."):
                raise ConfigError(
                    f"{override}: can't be overridden, the sweep {name!r} of {config_file.spec} sets {path}"
                )


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
