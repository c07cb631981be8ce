"""Which points, and which of their seeds, a command is about: `--only KEY=VALUE` or `--only GLOB`.

KEY is the dotted path of a field, `arm` or `train_length`. VALUE is of the field's type, or a glob where the field
holds text; several with commas between (`config.from_flags`) match if one of them does. A GLOB alone is matched against
directory names.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from pe_ablation import config, encodings
from pe_ablation.config import ConfigError, Experiment
from pe_ablation.sweep import Point

ALIASES = {"arm": "label", "train_length": "train.length"}  # a key and the field whose type its values have
OPTIONS = "encoding.options."
SHOWN = 8  # how many names a refusal lists


def select(points: Sequence[Point], conditions: Iterable[str]) -> list[Point]:
    """The points that meet all conditions, each with the seeds that do, in their order.

    Raises ConfigError for an unknown field, a value that isn't of its type, and a condition that nothing meets.
    """
    for condition in conditions:
        key, equals, text = condition.partition("=")
        if equals:
            kept = [each for point in points if (each := _with_seeds(point, key, text)) is not None]
        else:
            kept = [point for point in points if fnmatch.fnmatchcase(point.directory_name, condition)]
        if not kept:
            raise ConfigError(f"--only {condition}: matches nothing; there are {_there_are(points, key, equals)}")
        points = kept
    return list(points)


def _with_seeds(point: Point, key: str, text: str) -> Point | None:
    kept = tuple(each for each in point.experiments if _matches(each, key, text))
    return dataclasses.replace(point, experiments=kept) if kept else None


def _matches(experiment: Experiment, key: str, text: str) -> bool:
    path = ALIASES.get(key, key)
    hint = _type(experiment, path)
    if hint is None:
        return False
    value, wanted = _value(experiment, key), config.from_flags(path, text)
    if isinstance(value, str):
        return any(fnmatch.fnmatchcase(value, each) for each in wanted)
    return any(value == config.convert(hint, each, path) for each in wanted)


def _type(experiment: Experiment, path: str) -> Any:
    """The field's type; None for an option that the experiment's encoding hasn't got."""
    if path.startswith(OPTIONS):
        return encodings.option_types(experiment.encoding.name).get(path.removeprefix(OPTIONS))
    hint = config.type_of(path)
    if dataclasses.is_dataclass(hint):
        fields = ", ".join(f"{path}.{field.name}" for field in dataclasses.fields(hint))
        raise ConfigError(f"--only {path}: a group; name one of its fields: {fields}")
    return hint


def _value(experiment: Experiment, key: str) -> Any:
    """What the experiment has for a key; an option that isn't set has its default."""
    if key == "arm":
        return experiment.arm
    path = ALIASES.get(key, key)
    if path.startswith(OPTIONS):
        name = path.removeprefix(OPTIONS)
        defaults = encodings.option_defaults(experiment.encoding.name)
        return experiment.encoding.options.get(name, defaults[name])
    at: Any = experiment
    for name in path.split("."):
        at = getattr(at, name)
    return at


def _there_are(points: Sequence[Point], key: str, equals: str) -> str:
    """The first few of what the condition could have named."""
    if equals:
        experiments = [each for point in points for each in point.experiments]
        known = [each for each in experiments if _type(each, ALIASES.get(key, key)) is not None]
        names = list(dict.fromkeys(str(_value(each, key)) for each in known))
    else:
        names = [point.directory_name for point in points]
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else f"no points with {key}"
