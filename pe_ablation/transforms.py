"""What is done to a trained model so that it reads past its training length; nothing is trained again.

Three kinds, each for the encodings that it can change: frequencies of a rotation, rows of a learned table, distances
as they are shown (any encoding in which distances alone count); and, for every encoding, the scale of logits. A field
that is None follows the length N that is to be read and the training length L: the factor s is max(1, N/L), `original`
is L. `apply` gives the same parameters (of a table: other ones) in another `GPTConfig`, so that scoring, a cache and
generation all read under it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import jax
import numpy as np
from flax import nnx

from pe_ablation import encodings
from pe_ablation.attention import Distances
from pe_ablation.encodings import Scores, frequencies
from pe_ablation.encodings.absolute import Learned
from pe_ablation.encodings.rotary import RoPE, Rotary
from pe_ablation.model import GPTConfig, Slot, abstract

if TYPE_CHECKING:
    from pe_ablation.trained import Trained

TABLE = "encodings/0/table/value"  # where a learned table is among the parameters
AT_LEAST = {"factor": 1, "original": 1, "length": 1, "limit": 1, "window": 1, "group": 1, "alpha": 0, "beta": 0}
ABOVE = {"base": 1, "magnitude": 0}


class TransformError(ValueError):
    """A transform that cannot be honoured; the message names it, and the field or the encoding."""


@dataclasses.dataclass(frozen=True)
class Transform:
    """One transform; subclasses are a formula, a citation and fields. Raises TransformError by field."""

    name: ClassVar[str]

    def __post_init__(self):
        for field in (each.name for each in dataclasses.fields(self)):
            value = getattr(self, field)
            low, fits = AT_LEAST.get(field), True
            if isinstance(value, int | float):
                fits = value < math.inf and (value >= low if low is not None else value > ABOVE.get(field, -math.inf))
            if not fits:
                least = f"at least {low}" if low is not None else f"above {ABOVE[field]}"
                raise TransformError(f"{self.name}: {field} {value} is out of range; {least}, and finite")

    def __str__(self) -> str:
        """The name and the fields that differ from their defaults, as `yarn:factor=4:ramp=paper`."""
        fields = ((each.name, getattr(self, each.name), each.default) for each in dataclasses.fields(self))
        shown = (f"{name}={str(value).removesuffix('.0')}" for name, value, default in fields if value != default)
        return ":".join([self.name, *shown])

    @property
    def tables(self) -> tuple["Table", ...]:
        """What of it makes rows for a learned table."""
        return ()

    def refuse(self, config: GPTConfig) -> None:
        """TransformError where the decoder's encoding isn't one that this changes."""
        raise NotImplementedError

    def at(self, length: int, train_length: int) -> Self:
        """With every field set, for reading up to `length` tokens. Raises TransformError where there is no way to."""
        raise NotImplementedError

    def config(self, config: GPTConfig) -> GPTConfig:
        """The decoder's config under this transform, whose fields are set; the same where nothing changes."""
        raise NotImplementedError

    def parameters(self, trained: "Trained") -> tuple[Any, Any]:
        """Its parameters, and which of them never trained (see `Trained.unread`)."""
        return trained.params, trained.unread


@dataclasses.dataclass(frozen=True)
class ByFactor(Transform):
    """One that goes by a factor s of the training length L (`original`)."""

    factor: float | None = None
    original: int | None = None

    def at(self, length: int, train_length: int) -> Self:
        original = self.original or train_length
        return dataclasses.replace(self, original=original, factor=self.factor or max(1.0, length / original))


@dataclasses.dataclass(frozen=True)
class ByLength(Transform):
    """One that goes by the length l that is to be read, and the training length L (`original`)."""

    length: int | None = None
    original: int | None = None

    def at(self, length: int, train_length: int) -> Self:
        return dataclasses.replace(self, length=self.length or length, original=self.original or train_length)


@dataclasses.dataclass(frozen=True)
class Together(Transform):
    """Several, one after the other: `A+B` reads under B a model that reads under A."""

    parts: tuple[Transform, ...]

    def __post_init__(self):
        names = [each.name for each in self.parts]
        if twice := [name for at, name in enumerate(names) if name in names[:at]]:
            raise TransformError(f"{'+'.join(names)}: {twice[0]} twice; each once")

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))

    def refuse(self, config: GPTConfig) -> None:
        for each in self.parts:
            each.refuse(config)

    @property
    def tables(self) -> tuple["Table", ...]:
        return tuple(table for each in self.parts for table in each.tables)

    def at(self, length: int, train_length: int) -> Self:
        return dataclasses.replace(self, parts=tuple(each.at(length, train_length) for each in self.parts))

    def config(self, config: GPTConfig) -> GPTConfig:
        for each in self.parts:
            config = each.config(config)
        return config

    def parameters(self, trained: "Trained") -> tuple[Any, Any]:
        own = self.tables
        if len(own) > 1:
            raise TransformError(f"{self}: {own[0].name} and {own[1].name} both make rows; one of them")
        return own[0].parameters(trained) if own else super().parameters(trained)


# Frequencies


@dataclasses.dataclass(frozen=True)
class Rotation(Transform):
    """Other frequencies for rotations."""

    def schedule(self, rope: RoPE) -> tuple[np.ndarray, float]:
        """Frequencies float64 [F] for those of `rope`, and what cos and sin are multiplied by."""
        raise NotImplementedError

    def refuse(self, config: GPTConfig) -> None:
        if not any(map(_rotates, config.distinct)):
            raise TransformError(f"{self.name}: changes the frequencies of rope, which {_named(config)} is not")

    def config(self, config: GPTConfig) -> GPTConfig:
        return _with_options(config, lambda slot: self._options(config, slot) if _rotates(slot) else {})

    def _options(self, config: GPTConfig, slot: Slot) -> dict[str, Any]:
        rope = config.abstract_encoding(slot)
        assert isinstance(rope, RoPE)
        theta, magnitude = self.schedule(rope)
        if np.array_equal(theta, rope.frequencies) and magnitude == 1:
            return {}
        return {"frequencies": tuple(theta.tolist()), "magnitude": rope.magnitude * magnitude}


@dataclasses.dataclass(frozen=True)
class Scaled(ByFactor, Rotation):
    """Frequencies scaled by a factor s."""


@dataclasses.dataclass(frozen=True)
class PI(Scaled):
    """Position interpolation: theta / s. Chen et al. 2023, arXiv:2306.15595."""

    name = "pi"

    def schedule(self, rope: RoPE) -> tuple[np.ndarray, float]:
        return frequencies.interpolated(rope.frequencies, _set(self.factor)), 1.0


@dataclasses.dataclass(frozen=True)
class NTK(Scaled):
    """NTK-aware scaling: base b s^(D/(D-2)). bloc97 2023; Peng et al. 2024, arXiv:2309.00071, section 3.1."""

    name = "ntk"

    def schedule(self, rope: RoPE) -> tuple[np.ndarray, float]:
        return _ntk(self, rope, _set(self.factor)), 1.0


@dataclasses.dataclass(frozen=True)
class DynamicNTK(ByLength, Rotation):
    """NTK-aware scaling by f l/L - (f - 1) past L. emozilla 2023; the length l is one for all that is read together."""

    name = "dynamic_ntk"
    factor: float = 1.0

    def schedule(self, rope: RoPE) -> tuple[np.ndarray, float]:
        factor = frequencies.dynamic_factor(_set(self.length), _set(self.original), self.factor)
        return _ntk(self, rope, factor), 1.0


@dataclasses.dataclass(frozen=True)
class NTKByParts(Scaled):
    """theta / s for pairs that turn less than alpha times in L (`original`), theta for more than beta, a ramp between.

    ramp: of the pair's index, as the released code has it, or of its rotations, as the paper says.
    Peng et al. 2024, arXiv:2309.00071, section 3.2.
    """

    name = "ntk_by_parts"
    ramp: Literal["code", "paper"] = "code"
    alpha: float = 1.0
    beta: float = 32.0

    def __post_init__(self):
        super().__post_init__()
        _refuse_no_ramp(self.name, self.alpha, self.beta)
        if self.ramp == "code" and self.alpha == 0:
            raise TransformError(f"{self.name}: alpha 0 with ramp 'code', where no pair turns that seldom; above 0")

    def schedule(self, rope: RoPE) -> tuple[np.ndarray, float]:
        theta, original = rope.frequencies, _set(self.original)
        if self.ramp == "paper":
            kept = frequencies.ramp_of_rotations(theta, original, self.alpha, self.beta)
        else:
            kept = frequencies.ramp_of_index(len(theta), rope.base, original, self.alpha, self.beta)
        return frequencies.by_parts(theta, _set(self.factor), kept), 1.0


@dataclasses.dataclass(frozen=True)
class YaRN(NTKByParts):
    """NTK-by-parts, and cos and sin times 0.1 ln s + 1 (or `magnitude`). Peng et al. 2024, arXiv:2309.00071."""

    name = "yarn"
    magnitude: float | None = None

    def schedule(self, rope: RoPE) -> tuple[np.ndarray, float]:
        magnitude = frequencies.yarn_magnitude(_set(self.factor)) if self.magnitude is None else self.magnitude
        return super().schedule(rope)[0], magnitude


@dataclasses.dataclass(frozen=True)
class Llama3(Scaled):
    """theta / s for wavelengths above L / alpha, theta below L / beta, between them linear in 1 / wavelength.

    alpha and beta are the low and high frequency factors of Llama 3. Dubey et al. 2024, arXiv:2407.21783.
    """

    name = "llama3"
    alpha: float = 1.0
    beta: float = 4.0

    def __post_init__(self):
        super().__post_init__()
        _refuse_no_ramp(self.name, self.alpha, self.beta)

    def schedule(self, rope: RoPE) -> tuple[np.ndarray, float]:
        kept = frequencies.ramp_of_rotations(rope.frequencies, _set(self.original), self.alpha, self.beta)
        return frequencies.by_parts(rope.frequencies, _set(self.factor), kept), 1.0


@dataclasses.dataclass(frozen=True)
class Base(Rotation):
    """Another base for the frequencies, which has to be named, as 500,000. Xiong et al. 2023, arXiv:2309.16039."""

    name = "base"
    base: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.base is None:
            raise TransformError("base: needs the new one, as base:base=500000")

    def at(self, length: int, train_length: int) -> Self:
        return self

    def schedule(self, rope: RoPE) -> tuple[np.ndarray, float]:
        pairs = len(rope.frequencies)
        return _set(self.base) ** (-np.arange(pairs) / pairs), 1.0


def _refuse_no_ramp(name: str, alpha: float, beta: float) -> None:
    if not alpha < beta:
        raise TransformError(f"{name}: alpha {alpha} is not below beta {beta}")


def _ntk(transform: Transform, rope: RoPE, factor: float) -> np.ndarray:
    if len(rope.frequencies) < 2:
        raise TransformError(f"{transform.name}: needs two rotated pairs of dims at least; there is one")
    return frequencies.ntk(rope.frequencies, factor)


# Distances


@dataclasses.dataclass(frozen=True)
class Shown(Transform):
    """Other distances for far keys, from `window` on, exact ones for nearer keys."""

    def distances(self) -> Distances | None:
        """None where all are exact."""
        raise NotImplementedError

    def refuse(self, config: GPTConfig) -> None:
        for slot in config.distinct:
            encoding = config.abstract_encoding(slot)
            if encoding.overrides("embed") or not encoding.shift_invariant:
                why = "does not depend on distances alone"
            elif encoding.scores is Scores.ROW:
                why = "orders all keys of a query together"
            else:
                continue
            raise TransformError(f"{self.name}: changes the distances that an encoding is shown; {slot.name} {why}")
        if not any(config.abstract_encoding(slot).reads_positions for slot in config.distinct):
            raise TransformError(
                f"{self.name}: changes the distances that an encoding is shown; {_named(config)} sees no distance"
            )

    def config(self, config: GPTConfig) -> GPTConfig:
        return dataclasses.replace(config, distances=self.distances())


@dataclasses.dataclass(frozen=True)
class Clip(Shown):
    """Distances of `limit` and more are shown as `limit` (None: L - 1, the farthest in training).

    Han et al. 2024 (LM-Infinite), arXiv:2308.16137, section 4, without its mask, which `cache=sink` has.
    """

    name = "clip"
    limit: int | None = None

    def at(self, length: int, train_length: int) -> Self:
        return dataclasses.replace(self, limit=self.limit or max(1, train_length - 1))

    def distances(self) -> Distances | None:
        return Distances(_set(self.limit))


@dataclasses.dataclass(frozen=True)
class ReRoPE(Shown):
    """Rotations by the distance up to `window` w (None: L / 2), by w for all beyond. Su 2023, "ReRoPE"."""

    name = "rerope"
    window: int | None = None

    def refuse(self, config: GPTConfig) -> None:
        super().refuse(config)
        if not any(issubclass(encodings.find(slot.name), Rotary) for slot in config.distinct):
            raise TransformError(
                f"{self.name}: limits the distances of a rotation; {_named(config)} has none, try clip"
            )

    def at(self, length: int, train_length: int) -> Self:
        return dataclasses.replace(self, window=self.window or max(1, train_length // 2))

    def distances(self) -> Distances | None:
        return Distances(_set(self.window))


@dataclasses.dataclass(frozen=True)
class SelfExtend(Shown):
    """Distances from `window` w on as floor(i/G) - floor(j/G) + w - floor(w/G), groups of G positions.

    w None: L / 2. G None: the smallest group that shows no distance past those of training at the length to be read.
    Jin et al. 2024, arXiv:2401.01325.
    """

    name = "self_extend"
    window: int | None = None
    group: int | None = None

    def at(self, length: int, train_length: int) -> Self:
        window = self.window or max(1, train_length // 2)
        if self.group is None and window >= train_length:
            raise TransformError(
                f"{self.name}: window {window} leaves none of {train_length} trained distances to group"
            )
        ends = lambda group: (length - 1) // group + window - window // group  # noqa: E731
        group = self.group or next(each for each in range(1, length + 1) if ends(each) < train_length)
        return dataclasses.replace(self, window=window, group=group)

    def distances(self) -> Distances | None:
        return None if self.group == 1 else Distances(_set(self.window), self.group)


# Logits


@dataclasses.dataclass(frozen=True)
class LogN(Transform):
    """Logits times ln n / ln L for a query that sees n keys, where that is above 1; `beyond=false`: everywhere.

    It takes from a failure past L what is dilution of the softmax, and leaves what is position. Su 2021, "Entropy
    invariance of attention"; Chiang and Cholak 2022, arXiv:2202.12172.
    """

    name = "log_n"
    beyond: bool = True

    def refuse(self, config: GPTConfig) -> None:
        if config.logit_scale != "none":
            raise TransformError(f"{self.name}: scales logits, which model.logit_scale {config.logit_scale!r} does")

    def at(self, length: int, train_length: int) -> Self:
        return self

    def config(self, config: GPTConfig) -> GPTConfig:
        return dataclasses.replace(config, logit_scale="log_n_beyond" if self.beyond else "log_n")


# Tables


@dataclasses.dataclass(frozen=True)
class Table(Transform):
    """More rows for a learned table, made of its first `original`, those that were trained."""

    @property
    def tables(self) -> tuple["Table", ...]:
        return (self,)

    def rows(self, trained: int) -> int:
        """How many rows are needed, at least `trained`."""
        raise NotImplementedError

    def made_of(self, rows: int) -> np.ndarray:
        """float64 [rows]: at which place among the trained rows each new one is, between two for a fraction."""
        raise NotImplementedError

    def refuse(self, config: GPTConfig) -> None:
        if not issubclass(encodings.find(config.distinct[0].name), Learned):
            raise TransformError(f"{self.name}: makes rows for a learned table; {_named(config)} has none")

    def config(self, config: GPTConfig) -> GPTConfig:
        rows = self.rows(config.train_length)
        if np.array_equal(self.made_of(rows), np.arange(rows)):
            return config
        return _with_options(config, lambda slot: {"rows": rows})

    def parameters(self, trained: "Trained") -> tuple[Any, Any]:
        model = trained.model
        learned = model.encodings[0]
        assert isinstance(learned, Learned)
        old, places = np.asarray(learned.table[...]), self.made_of(self.rows(trained.config.train_length))
        if int(places.max()) >= len(old):
            raise TransformError(f"{self.name}: reads row {int(places.max())} of a table of {len(old)} rows")
        learned.table = nnx.Param(jax.numpy.asarray(_between(old, places), old.dtype))
        unread = trained.unread
        if unread is not None:
            moved = {name: _between(where, places) > 0 for name, where in unread.items() if name == TABLE}
            unread = {name: where for name, where in moved.items() if where.any()}
        return nnx.split(model)[1], unread


@dataclasses.dataclass(frozen=True)
class Interpolate(ByFactor, Table):
    """Row p is that at p / s, linear between two; past the last trained row, that one. As `pi`, for a table."""

    name = "interpolate"

    def rows(self, trained: int) -> int:
        return max(trained, int(_set(self.original) * _set(self.factor) + 1e-9))

    def made_of(self, rows: int) -> np.ndarray:
        return np.minimum(np.arange(rows) / _set(self.factor), _set(self.original) - 1)


@dataclasses.dataclass(frozen=True)
class Repeated(ByLength, Table):
    """Rows past the trained ones repeat some of these, up to `length`."""

    def rows(self, trained: int) -> int:
        return max(trained, _set(self.length))


@dataclasses.dataclass(frozen=True)
class Clamp(Repeated):
    """Positions past the last trained row are that row."""

    name = "clamp"

    def made_of(self, rows: int) -> np.ndarray:
        return np.minimum(np.arange(rows), _set(self.original) - 1).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Wrap(Repeated):
    """Position p is row p mod L."""

    name = "wrap"

    def made_of(self, rows: int) -> np.ndarray:
        return (np.arange(rows) % _set(self.original)).astype(np.float64)


def _between(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """float64 [P,M] of rows [R,M] at places [P], linear between two."""
    low = np.floor(places).astype(int)
    share = (places - low)[:, None]
    return (1 - share) * rows[low] + share * rows[np.minimum(low + 1, len(rows) - 1)]


REGISTRY: dict[str, type[Transform]] = {
    each.name: each
    for each in (
        PI, NTK, DynamicNTK, NTKByParts, YaRN, Llama3, Base, Clip, ReRoPE, SelfExtend, LogN, Interpolate, Clamp, Wrap,
    )
}  # fmt: skip


def apply(transform: Transform, trained: "Trained", length: int) -> "Trained":
    """A trained model under a transform, to read up to `length` tokens; itself where that changes nothing.

    Raises TransformError for an encoding that isn't of the transform's kind, and where `length` cannot be served.
    """
    transform.refuse(trained.config)
    ready = transform.at(length, trained.experiment.train.length)
    config = ready.config(trained.config)
    if config == trained.config:
        return trained
    params, unread = ready.parameters(trained)
    without_values = abstract(config)
    return dataclasses.replace(
        trained,
        config=config,
        abstract=without_values,
        graph=nnx.graphdef(without_values),
        params=params,
        unread=unread,
    )


def _set(value: Any) -> Any:
    """A field that `at` has set."""
    assert value is not None
    return value


def _rotates(slot: Slot) -> bool:
    """Whether it is a rotation that can be given other frequencies."""
    options = {"frequencies", "magnitude"}
    return issubclass(encodings.find(slot.name), RoPE) and options <= encodings.option_types(slot.name).keys()


def _named(config: GPTConfig) -> str:
    return ", ".join(dict.fromkeys(slot.name for slot in config.distinct))


def _with_options(config: GPTConfig, change: Callable[[Slot], Mapping[str, Any]]) -> GPTConfig:
    """The config with these options laid over those of each encoding of the pattern."""
    if config.pattern is None:
        [own] = config.distinct
        return dataclasses.replace(config, encoding_options={**config.encoding_options, **change(own)})
    pattern = tuple(
        ({"name": slot.name, "options": {**dict(slot.options), **change(slot)}}, slot.window) for slot in config.slots
    )
    return dataclasses.replace(config, pattern=pattern)
