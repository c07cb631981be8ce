"""What one run is: frozen dataclasses, read strictly from a config file's ConfigDict.

A config file's `get_config(arg)` returns a ConfigDict; overrides (command line, sweep) are laid over it by dotted path;
`read` turns the result into an `Experiment` or raises `ConfigError` with the field's path, what was given and what is
allowed. Past this file nothing sees a ConfigDict.
"""

import ast
import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ml_collections.config_dict import RequiredValueError

from pe_ablation import encodings, fused, positions, transforms
from pe_ablation.model import SIZES, GPTConfig, max_position
from pe_ablation.transforms import Transform, TransformError

IDENTITY_FORMAT = 1
OUTSIDE_IDENTITY = (
    "eval", "stream", "label", "wandb", "data.cache_dir", "data.tfds.data_dir", "train.log_every",
    "train.checkpoint_every", "model.implementation", "start.run",
)  # fmt: skip


class ConfigError(ValueError):
    """A config that cannot be honoured; the message names the field's path."""


@dataclasses.dataclass(frozen=True)
class EncodingConfig:
    """Which encoding (a registered name or `FILE.py:CLASS`) and its options, checked against the class."""

    name: str = "none"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The decoder's shape; see `model.GPTConfig`. `embed_scale` multiplies token embeddings at the input.

    The name of a size (`model.SIZES`) in place of the group sets the size's fields and leaves the others.
    `implementation`, of attention: a kernel by name (`fused`: cudnn, splash) is for training, which it serves or is
    refused for; what reads the trained model takes `auto` then. The others hold for both.
    """

    num_layers: int = 2
    num_heads: int = 4
    model_dim: int = 64
    mlp_dim: int | None = None
    pattern: tuple | None = None
    sharing: Literal["paper", "all", "none"] = "paper"
    embed_scale: Literal["1", "sqrt_d"] = "1"
    logit_scale: Literal["none", "log_n", "log_n_beyond", "learned"] = "none"
    dropout_embed: float = 0.0
    dropout_attention: float = 0.0
    dropout_residual: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    implementation: Literal["auto", "dense", "blockwise", "cudnn", "splash"] = "auto"


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """A user's own text (`data.source = "text"`).

    Either a folder, glob or file per split (`train`, `validation`, `test`), a document a file; or one `file` for all.
    `separator` splits every file into documents (a documents-only `file` is dealt by index: mod 10 == 4 validation,
    == 9 test); `train_bytes`, ... are the (start, stop) byte ranges of `file`, one document each.
    `field` says that files are JSON lines, an object a line: a document is the text under that name.
    """

    train: str | None = None
    validation: str | None = None
    test: str | None = None
    file: str | None = None
    separator: str | None = None
    field: str | None = None
    train_bytes: tuple[int, ...] | None = None
    validation_bytes: tuple[int, ...] | None = None
    test_bytes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class TfdsConfig:
    """A dataset prepared by tensorflow-datasets as array_record (`data.source = "tfds"`), an example a document.

    `name` is NAME[/CONFIG][:VERSION], by default the newest version there is in `data_dir` (else the environment's
    TFDS_DATA_DIR, else ~/tensorflow_datasets); `text_field` the feature with the text. Splits are tfds' own
    expressions, such as `train[:99%]`; None: the dataset has none.
    """

    name: str | None = None
    text_field: str = "text"
    data_dir: str | None = None
    train: str | None = "train"
    validation: str | None = "validation"
    test: str | None = "test"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer and how training tokens are blocked.

    `block` is the longest training length of the sweep, in tokens: shuffled blocks are cut into windows, so that every
    training length sees the same tokens in the same order. `train_bytes` keeps a prefix of the training documents.
    `vocab_size` is that of `tokenizer = "bpe"`, BOS and EOS included; the other tokenizers have their own.
    `bos`: no BOS at all, one before each document, or one in place of each window's first input token. Without one
    `tokenizer = "gpt2"` has the 50,257 ids of the released models, else one more.
    """

    source: Literal["sotu", "text", "tfds"] = "sotu"
    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    tfds: TfdsConfig = dataclasses.field(default_factory=TfdsConfig)
    tokenizer: Literal["byte", "bpe", "gpt2"] = "byte"
    vocab_size: int = 4096
    bos: Literal["none", "document", "window"] = "document"
    block: int = 64
    train_bytes: int | None = None
    cache_dir: str | None = None


@dataclasses.dataclass(frozen=True)
class PositionsConfig:
    """Which positions a window's tokens are shown at (see `positions`); those of `randomized` and `interpolated` are
    below `maximum`. `evaluation` of `randomized`: an even grid over all of them, one draw for each length, or 0, 1, 2,
    ..., of which long windows in training see few.
    """

    name: Literal["contiguous", "randomized", "interpolated", "documents"] = "contiguous"
    maximum: int | None = None
    evaluation: Literal["spread", "random", "contiguous"] = "spread"

    @property
    def asked(self) -> dict[str, bool]:
        """What training asks of attention: see `GPTConfig.call`."""
        return {"moved": self.name in ("randomized", "interpolated"), "segments": self.name == "documents"}

    def placed(self, length: int) -> positions.Placed | None:
        """Where an evaluation shows windows of `length` tokens; None: at 0, 1, 2, ..."""
        if self.maximum is None or (self.name == "randomized" and self.evaluation == "contiguous"):
            return None
        if self.name == "randomized" and self.evaluation == "random":
            return positions.drawn_once(length, self.maximum)
        return positions.spread(length, self.maximum)

    def refuse_decoding(self) -> None:
        """ConfigError where positions depend on how long the text will have been."""
        if self.name == "interpolated" or (self.name == "randomized" and self.evaluation != "contiguous"):
            raise ConfigError(
                f"positions.evaluation: {self.evaluation!r} with positions.name {self.name!r} depends on a text's "
                "whole length, which is not known a token at a time; allowed: 'randomized' with 'contiguous'"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """AdamW with linear warm-up and cosine decay to `final_fraction` of the peak; lengths and batches in tokens."""

    length: int = 64
    steps: int = 1000
    batch_tokens: int = 4096
    accumulation: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    log_every: int = 10
    checkpoint_every: int = 500


@dataclasses.dataclass(frozen=True)
class StartConfig:
    """Whose weights training starts with (see `start`): a finished run, or a point, of which each seed takes its own.

    The encoding may be another one. `transform`: what the weights are read under from then on, for the encoding that
    they were trained with, as in `eval.transforms`; a factor that isn't named is `train.length` over theirs.
    `identity` says which weights these were; it is filled in when a launch reads the config.
    """

    run: str | None = None
    transform: str = "none"
    identity: str | None = None


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Where and how a trained model is scored (see `evaluate`); `last_k`, `spacing` and `stride` are in tokens.

    `max_documents` and, for `targets`, `max_windows` spread a smaller sample evenly over the split; None takes all.
    `transforms`: what the model is scored under: `none`, as it was trained, or a name of `transforms` with fields, as
    `yarn:factor=4:ramp=paper`.
    """

    lengths: tuple[int, ...] = (64, 128, 256)
    protocols: tuple[Literal["blocks", "targets", "sliding", "stream"], ...] = ("targets",)
    nulls: tuple[Literal["window_mask", "window_recompute"], ...] = ("window_mask", "window_recompute")
    split: Literal["validation", "test"] = "validation"
    last_k: int = 32
    spacing: int = 256
    stride: int = 64
    max_windows: int | None = None
    max_documents: int | None = None
    batch_tokens: int = 4096
    transforms: tuple[str, ...] = ("none",)

    @property
    def windowed(self) -> tuple[str, ...]:
        """The protocols that score windows of the evaluation lengths: all but `stream`."""
        return tuple(each for each in self.protocols if each != "stream")

    def settings(self, protocol: str, train_length: int) -> dict[str, Any]:
        """What, beside split, length and null, decides which targets a cell of `protocol` scores, in which context."""
        own = {"blocks": (), "targets": ("last_k", "spacing", "max_windows"), "sliding": ("stride",)}[protocol]
        shared = {"longest": self.longest(train_length)}
        return shared | {name: getattr(self, name) for name in ("max_documents", *own)}

    def batch(self, length: int) -> int:
        """How many windows of `length` tokens are scored at a time."""
        return max(1, self.batch_tokens // length)

    def longest(self, train_length: int) -> int:
        """The longest length that is scored; the training length always is."""
        return max(*self.lengths, train_length)


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """What `eval.protocols = ("stream",)` reads as one text without end (see `streaming`).

    `window`: how many cached tokens, W (None: so many that a token sees as many as in training). `sinks`: S of each
    sink cache, W - S tokens being recent; 0 is the plain window. `tokens`: of the split, from its start (None: all);
    `reset`: each document is a stream of its own. `baselines`: what stands beside them; `dense` reads the first
    `dense_tokens` only, `recompute` scores `recompute_targets` past the first window: the 32 of the onset, then evenly
    spread. `evict`, `positions`, `limit`: see `eviction`; `absolute`: what is done with an encoding that is added at
    the input, the others have no need of it.
    """

    window: int | None = None
    sinks: tuple[int, ...] = (0, 1, 2, 4)
    tokens: int | None = 16384
    reset: bool = False
    baselines: tuple[Literal["dense", "recompute", "block_recompute"], ...] = ("dense", "recompute")
    dense_tokens: int = 8192
    recompute_targets: int = 512
    evict: Literal["after", "before"] = "after"
    positions: Literal["in_cache", "original", "capped"] = "in_cache"
    limit: int | None = None
    absolute: Literal["saturate", "ring", "layer0_fix"] | None = None


@dataclasses.dataclass(frozen=True)
class WandbConfig:
    """How runs are mirrored to W&B (see `mirror`). What is None or empty is taken from WANDB_PROJECT, WANDB_ENTITY,
    WANDB_RUN_GROUP, WANDB_TAGS and WANDB_MODE; then: project pe-ablation, the point as group, and online where an API
    key is configured, else offline.
    """

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] | None = None


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One run. A point is an Experiment without its seed; `label` names the arm in tables (default: the encoding).

    `imported`: sha256 (hex) of weights that were read from elsewhere (see `huggingface`) instead of trained.
    """

    encoding: EncodingConfig = dataclasses.field(default_factory=EncodingConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    positions: PositionsConfig = dataclasses.field(default_factory=PositionsConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    start: StartConfig = dataclasses.field(default_factory=StartConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    stream: StreamConfig = dataclasses.field(default_factory=StreamConfig)
    seed: int = 0
    label: str = ""
    wandb: WandbConfig = dataclasses.field(default_factory=WandbConfig)
    imported: str | None = None

    @property
    def arm(self) -> str:
        return self.label or self.encoding.name

    def gpt(self, vocab_size: int) -> GPTConfig:
        """The decoder's config for a tokenizer of `vocab_size`."""
        shape = dataclasses.asdict(self.model)
        shape["embed_scale"] = self.model.model_dim**0.5 if self.model.embed_scale == "sqrt_d" else 1.0
        shape["pattern"] = self.model.pattern
        return GPTConfig(
            vocab_size=vocab_size,
            train_length=self.train.length,
            encoding=self.encoding.name,
            encoding_options=self.encoding.options,
            **shape,
        )


_REQUIRED = object()


class _Text(str):
    """A value typed on the command line, not yet converted to its field's type."""


def read(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Lay `overrides` (dotted path -> typed value, or `from_flag` text) over a config and check everything.

    A group is laid before the fields in it, and options are checked after all overrides, whatever their order. Raises
    ConfigError for unknown fields (with a near match), wrong types, values out of range, and options that the encoding
    does not have.
    """
    tree = _plain(config)
    if not isinstance(tree, dict):
        raise ConfigError(f"config: expected a group of fields, got {tree!r}")
    if isinstance(tree.get("model"), str):
        tree["model"] = _size(tree["model"])
    for path, value in sorted(spelled_out(overrides or {}).items(), key=lambda item: item[0].count(".")):
        _overlay(tree, path, value)
    experiment = build(Experiment, tree, "")
    return _checked(experiment)


def spelled_out(overlay: Mapping[str, Any]) -> dict[str, Any]:
    """An overlay with the fields of a model size in place of its name; those given beside it win, whatever the order.

    {"model": "nano", "model.num_layers": 3} is nano with 3 layers. Raises ConfigError for an unknown size.
    """
    if not isinstance(overlay.get("model"), str):
        return dict(overlay)
    fields = {f"model.{name}": value for name, value in _size(overlay["model"]).items()}
    return {**fields, **{path: value for path, value in overlay.items() if path != "model"}}


def from_flag(text: str) -> str:
    """Mark a command-line value, so that `read` converts it by its field's type (1e-4 is a float, None is None)."""
    return _Text(text)


def from_flags(path: str, text: str) -> list[str]:
    """Several values of the field `path` from the command line, each as `from_flag` marks it.

    They are separated by ';' where there is one, else by ','. A field that is itself a list needs a ';': "64,128;256"
    is two lists, "64,128;" one. Raises ConfigError for an unknown field, an empty value, and a list without a ';'.
    """
    if ";" not in text and _is_list(type_of(path)):
        raise ConfigError(f"{path}: {text!r} is ambiguous for a list; separate lists by ';', end a single one in ';'")
    items = [item.strip() for item in text.removesuffix(";").split(";" if ";" in text else ",")]
    if not all(items):
        raise ConfigError(f"{path}: an empty value in {text!r}; separate values by one ',' or, for lists, one ';'")
    return [from_flag(item) for item in items]


def type_of(path: str) -> Any:
    """The annotation of the field at a dotted path, Any for an encoding's option; ConfigError for an unknown one."""
    at: Any = Experiment
    names = path.split(".")
    for depth, name in enumerate(names):
        parent = ".".join(names[:depth])
        if parent == "encoding.options":
            return Any
        if not dataclasses.is_dataclass(at):
            raise ConfigError(f"{path}: {parent} is a value, not a group of fields")
        _known(at, name, parent)
        at = _hints(at)[name]
    return at


def _is_list(hint: Any) -> bool:
    """Whether text of this type may hold commas of its own."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(map(_is_list, typing.get_args(hint)))
    return bool({hint, typing.get_origin(hint)} & {tuple, Mapping})


def evaluation(recorded: Mapping[str, Any]) -> EvalConfig:
    """The `eval` fields of an experiment as `to_dict` gave it; of the rest, an encoding's code may be gone by now."""
    return build(EvalConfig, recorded["eval"], "eval")


def transform(text: str, path: str = "eval.transforms") -> Transform | None:
    """The transform that `NAME[:FIELD=VALUE]...` names, or several with + between; None: `none`.

    ConfigError for what isn't known or doesn't fit.
    """
    if text == "none":
        return None
    parts = tuple(_transform(each, path) for each in text.split("+"))
    try:
        return parts[0] if len(parts) == 1 else transforms.Together(parts)
    except TransformError as error:
        raise ConfigError(f"{path}: {error}") from None


def _transform(text: str, path: str) -> Transform:
    name, *fields = text.split(":")
    if name not in transforms.REGISTRY:
        allowed = ", ".join(("none", *transforms.REGISTRY))
        raise ConfigError(f"{path}: no transform {name!r}{near(name, transforms.REGISTRY)}; allowed: {allowed}")
    given: dict[str, Any] = {}
    for field in fields:
        key, equals, value = field.partition("=")
        if not equals or key in given:
            raise ConfigError(f"{path}: {text!r}: expected each of FIELD=VALUE once, got {field!r}")
        given[key] = from_flag(value)
    try:
        return build(transforms.REGISTRY[name], given, f"{path}: {name}")
    except TransformError as error:
        raise ConfigError(f"{path}: {error}") from None


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON types (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=dict))


def completed(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment as `to_dict` gave it once, with the defaults of the fields that are newer than that."""

    def fill(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        both = {name: (tree[name], defaults[name]) for name in tree if isinstance(defaults.get(name), dict)}
        return {**defaults, **tree, **{name: fill(*pair) for name, pair in both.items()}}

    return fill(recorded, to_dict(Experiment()))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested groups by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat |= leaves(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def in_identity(path: str) -> bool:
    """Whether the field at a dotted path is, or may be, part of the training identity."""
    return not any(f"{path}.".startswith(f"{each}.") for each in OUTSIDE_IDENTITY)


def training_identity(experiment: Experiment) -> str:
    """12 hex digits over what influences the trained numbers and differs from defaults.

    Evaluation, label, logging, checkpoint interval, cache folder and attention implementation are not in it
    (`OUTSIDE_IDENTITY`).
    """
    tree = to_dict(experiment)
    defaults = to_dict(Experiment())
    for path in OUTSIDE_IDENTITY:
        *parents, leaf = path.split(".")
        for each in (tree, defaults):
            for parent in parents:
                each = each[parent]
            each.pop(leaf)
    changed = _difference(tree, defaults)
    if (experiment.data.tokenizer, experiment.data.bos) == ("gpt2", "none"):
        changed["data.ids"] = 50257  # 50,258 before, an embedding of another size
    changed["encoding.options"] = encodings.resolved_options(experiment.encoding.name, experiment.encoding.options)
    changed["encoding.source"] = encodings.source_digest(experiment.encoding.name, experiment.encoding.options)
    text = json.dumps({"format": IDENTITY_FORMAT, **changed}, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def refuse_imported(experiment: Experiment) -> None:
    """ConfigError for what is to be trained, but whose weights were imported."""
    if experiment.imported is not None:
        raise ConfigError(
            f"imported: {experiment.imported}: weights that were read from elsewhere, so there is nothing to train; "
            "allowed: None. What import-gpt2 wrote is scored by: pe-ablation evaluate RUNDIR"
        )


def point_identity(experiment: Experiment) -> str:
    """The training identity without the seed: what runs of one point share."""
    return training_identity(dataclasses.replace(experiment, seed=0))


def pack(experiment: Experiment) -> str:
    """What runs share that one program trains, as JSON: all but seed, learning rate, and what names or scores them."""
    plain = Experiment()
    alike = {name: getattr(plain, name) for name in ("seed", "label", "eval", "stream", "wandb")}
    train = dataclasses.replace(experiment.train, learning_rate=plain.train.learning_rate)
    return json.dumps(to_dict(dataclasses.replace(experiment, train=train, **alike)), sort_keys=True)


def _difference(tree: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict) and path != "encoding.options":
            changed |= _difference(value, default, f"{path}.")
        elif value != default and path != "encoding.options":
            changed[path] = value
    return changed


def _plain(value: Any) -> Any:
    """ConfigDicts and mappings as fresh dicts, the rest as it is."""
    if isinstance(value, Mapping) or hasattr(value, "to_dict"):
        return {key: _plain(_item(value, key)) for key in value}
    return value


def _item(group: Any, key: str) -> Any:
    """A group's value; a ConfigDict's required placeholder that nobody has filled stands for itself."""
    try:
        return group[key]
    except RequiredValueError:
        return _REQUIRED


def _overlay(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    cls: Any = Experiment
    at = tree
    for depth, name in enumerate(parents):
        _known(cls, name, ".".join(parents[:depth]))
        cls = _hints(cls).get(name) if dataclasses.is_dataclass(cls) else None
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise ConfigError(f"{path}: {'.'.join(parents[: depth + 1])} is a value, not a group of fields")
    _known(cls, leaf, ".".join(parents))
    at[leaf] = _plain(value)


def _size(name: str) -> dict[str, Any]:
    """The fields of `model` that a size sets."""
    if name not in SIZES:
        raise ConfigError(f"model: no size {name!r}{near(name, SIZES)}; allowed: {', '.join(SIZES)}")
    return dict(SIZES[name])


def _known(cls: Any, name: str, path: str) -> None:
    if not dataclasses.is_dataclass(cls):
        return
    names = [field.name for field in dataclasses.fields(cls)]
    if name not in names:
        full = f"{path}.{name}" if path else name
        raise ConfigError(f"{full or 'config'}: no such field{near(name, names)}; allowed: {', '.join(names)}")


def near(name: str, names: typing.Iterable[str]) -> str:
    """' (did you mean X?)' for the closest of `names`, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(cls: Any, tree: Any, path: str = "") -> Any:
    """A dataclass of converted values from plain ones or `from_flag` text; ConfigError with the path of a wrong one."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{path or 'config'}: expected a group of fields, got {tree!r}")
    for name in tree:
        _known(cls, name, path)
    hints = _hints(cls)
    values = {}
    for name, value in tree.items():
        full = f"{path}.{name}" if path else name
        make = build if dataclasses.is_dataclass(hints[name]) else convert
        values[name] = make(hints[name], value, full)
    return cls(**values)


def convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as the type that `hint` annotates, or ConfigError; text from a flag is parsed, nothing else is."""
    if value is _REQUIRED:
        raise ConfigError(f"{path}: required, and not set; set it: --config.{path}=VALUE")
    if isinstance(value, _Text):
        value = _parse(hint, str(value), path)
    return _check_type(hint, value, path)


def _check_type(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        options = [arg for arg in args if arg is not type(None)]
        if len(options) == 1:
            return _check_type(options[0], value, path)
    elif origin is Literal:
        if value in args and type(value) in {type(arg) for arg in args}:
            return value
        allowed = ", ".join(map(repr, args))
        raise ConfigError(f"{path}: {value!r} is not allowed{near(str(value), map(str, args))}; allowed: {allowed}")
    elif origin is tuple and isinstance(value, list | tuple):
        inner = args[0] if args else Any
        return tuple(_check_type(inner, item, f"{path}[{index}]") for index, item in enumerate(value))
    elif hint is tuple and isinstance(value, list | tuple):
        return _frozen(value)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint is Any or type(value) is hint or (isinstance(origin, type) and isinstance(value, origin)):
        return value
    raise ConfigError(f"{path}: expected {_type_name(hint)}, got {value!r} ({type(value).__name__})")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _type_name(hint: Any) -> str:
    """A type in a user's words: int, a list of int, a group of options."""
    if typing.get_origin(hint) is tuple:
        return f"a list of {_type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is Mapping:
        return "a group of options"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _parse(hint: Any, text: str, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if text in ("None", "null") and type(None) in args:
            return None
        return _parse(next(arg for arg in args if arg is not type(None)), text, path)
    if hint is str:
        return text
    if origin is Literal:
        return next((arg for arg in args if str(arg) == text), text)
    if hint is bool:
        known = {"true": True, "1": True, "false": False, "0": False}
        return known.get(text.lower(), text)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ConfigError(f"{path}: expected {hint.__name__}, got {text!r}") from None
    if origin is tuple and args[0] is not Any:
        items = [item.strip() for item in text.strip("()[] ").split(",") if item.strip()]
        return tuple(_parse(args[0], item.strip("'\""), path) for item in items)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ConfigError(f"{path}: expected {_type_name(hint)}, got {text!r}") from None


def _checked(experiment: Experiment) -> Experiment:
    """Ranges and relations between fields; returns the experiment with its encoding options converted."""
    options = _options(experiment.encoding.name, experiment.encoding.options, "encoding.name", "encoding.options")
    experiment = dataclasses.replace(experiment, encoding=EncodingConfig(experiment.encoding.name, options))
    spelled = tuple(str(transform(each) or "none") for each in experiment.eval.transforms)
    experiment = dataclasses.replace(experiment, eval=dataclasses.replace(experiment.eval, transforms=spelled))
    _check_ranges(experiment)
    _check_relations(experiment)
    _check_start(experiment)
    try:
        gpt = experiment.gpt(vocab_size=258)
        if gpt.implementation in fused.PLATFORMS:
            for slot in gpt.slots:
                call = gpt.call(slot, experiment.train.length, **experiment.positions.asked)
                fused.refuse(gpt.implementation, call)
    except ValueError as error:
        place = "" if str(error).startswith("encoding.") else "model."
        raise ConfigError(f"{place}{error}") from None
    _check_positions(experiment)
    return experiment


def _check_start(experiment: Experiment) -> None:
    start = experiment.start
    for name in ("transform", "identity"):
        if start.run is None and getattr(start, name) != getattr(StartConfig, name):
            raise ConfigError(f"start.{name}: {getattr(start, name)!r} goes with start.run, which names no run")
    transform(start.transform, "start.transform")


def _check_positions(experiment: Experiment) -> None:
    """The highest position that is drawn exists, and windows fit below it."""
    chosen, train = experiment.positions, experiment.train
    drawn = chosen.name in ("randomized", "interpolated")
    if drawn != (chosen.maximum is not None):
        raise ConfigError(
            f"positions.maximum: {chosen.maximum} with positions.name {chosen.name!r}; randomized and interpolated "
            "need one, others have none"
        )
    if chosen.name != "randomized" and chosen.evaluation != PositionsConfig.evaluation:
        raise ConfigError(f"positions.evaluation: {chosen.evaluation!r} goes with positions.name 'randomized' alone")
    if chosen.maximum is None:
        return
    longest = experiment.eval.longest(train.length) if chosen.placed(train.length) else train.length
    if chosen.maximum < longest:
        raise ConfigError(f"positions.maximum: {chosen.maximum} is below the longest window of {longest} tokens")
    gpt = experiment.gpt(vocab_size=258)
    spans = [span for slot in gpt.distinct if (span := gpt.abstract_encoding(slot).span) is not None]
    if spans and chosen.maximum > min(spans):
        raise ConfigError(
            f"positions.maximum: {chosen.maximum}, but the encoding serves queries up to {min(spans)} positions apart"
        )
    limit = max_position(gpt)
    if limit is not None and chosen.maximum > limit:
        raise ConfigError(
            f"positions.maximum: {chosen.maximum}, but {experiment.encoding.name} has {limit} positions; set "
            f"encoding.options.rows to {chosen.maximum}, or a lower maximum"
        )


def _options(name: str, given: Mapping[str, Any], named_by: str, path: str) -> dict[str, Any]:
    """The options of an encoding as the types that its class says, those of encodings that they name as well."""
    try:
        hints = encodings.option_types(name)
    except ValueError as error:
        raise ConfigError(f"{named_by}: {error}") from None
    options = {}
    for option, value in given.items():
        if option not in hints:
            problem = f"{name} has no such option{near(option, hints)}"
            raise ConfigError(f"{path}.{option}: {problem}; allowed: {', '.join(hints) or 'none'}")
        options[option] = convert(hints[option], value, f"{path}.{option}")
    for option, (inner, own) in encodings.nested(name, options).items():
        if own:
            options[f"{option}_options"] = _options(inner, own, f"{path}.{option}", f"{path}.{option}_options")
    return options


def _check_ranges(experiment: Experiment) -> None:
    train, data, evaluation = experiment.train, experiment.data, experiment.eval
    at_least = {
        "train.length": (train.length, 1), "train.steps": (train.steps, 1),
        "train.batch_tokens": (train.batch_tokens, 1),
        "train.accumulation": (train.accumulation, 1), "train.warmup_steps": (train.warmup_steps, 0),
        "train.log_every": (train.log_every, 1), "train.checkpoint_every": (train.checkpoint_every, 1),
        "train.learning_rate": (train.learning_rate, 0.0), "train.weight_decay": (train.weight_decay, 0.0),
        "train.clip_norm": (train.clip_norm, 0.0), "train.epsilon": (train.epsilon, 0.0),
        "data.block": (data.block, 1), "data.vocab_size": (data.vocab_size, 258), "eval.last_k": (evaluation.last_k, 1),
        "eval.spacing": (evaluation.spacing, 1), "eval.stride": (evaluation.stride, 1),
        "eval.batch_tokens": (evaluation.batch_tokens, 1), "seed": (experiment.seed, 0),
    }  # fmt: skip
    stream = experiment.stream
    at_least |= {
        "stream.dense_tokens": (stream.dense_tokens, 1), "stream.recompute_targets": (stream.recompute_targets, 33),
        **{f"stream.sinks[{index}]": (each, 0) for index, each in enumerate(stream.sinks)},
    }  # fmt: skip
    optional = {
        "stream.window": stream.window,
        "stream.tokens": stream.tokens,
        "stream.limit": stream.limit,
        "data.train_bytes": data.train_bytes,
        "eval.max_windows": evaluation.max_windows,
        "eval.max_documents": evaluation.max_documents,
    }
    at_least |= {path: (value, 1) for path, value in optional.items() if value is not None}
    if stream.tokens is not None:
        at_least["stream.tokens"] = (stream.tokens, 2)
    for path, (value, low) in at_least.items():
        if not low <= value < math.inf:
            raise ConfigError(f"{path}: {value} is out of range; at least {low}, and finite")
    if train.learning_rate == 0:
        raise ConfigError("train.learning_rate: 0.0 trains nothing; above 0")
    if train.clip_norm == 0:
        raise ConfigError("train.clip_norm: 0.0 leaves no gradient; the largest norm that is left alone, above 0")
    for path, value in _counts(experiment):
        if value >= 2**31:
            raise ConfigError(f"{path}: {value} is out of range; below 2^31")
    if experiment.seed >= 2**32:
        raise ConfigError(f"seed: {experiment.seed} is out of range; below 2^32")
    below_one = {"train.beta1": train.beta1, "train.beta2": train.beta2}
    for path, value in below_one.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{path}: {value} is not in [0, 1)")
    if not 0 <= train.final_fraction <= 1:
        raise ConfigError(f"train.final_fraction: {train.final_fraction} is not in [0, 1]")


def _counts(experiment: Experiment) -> Iterator[tuple[str, int]]:
    """(path, value) of what is counted in int32 on the way: layers, dims, tokens, steps; bytes of a corpus aren't."""
    yield "data.block", experiment.data.block
    for group in ("model", "train", "eval", "stream"):
        values = getattr(experiment, group)
        for name in (field.name for field in dataclasses.fields(values)):
            each = getattr(values, name)
            if isinstance(each, int):
                yield f"{group}.{name}", each
    for index, length in enumerate(experiment.eval.lengths):
        yield f"eval.lengths[{index}]", length


def _check_relations(experiment: Experiment) -> None:
    train, data, evaluation = experiment.train, experiment.data, experiment.eval
    if data.block % train.length:
        raise ConfigError(f"data.block: {data.block} is not a multiple of train.length = {train.length}")
    if train.batch_tokens % (data.block * train.accumulation):
        raise ConfigError(
            f"train.batch_tokens: {train.batch_tokens} is not a multiple of data.block x train.accumulation = "
            f"{data.block} x {train.accumulation}"
        )
    if train.warmup_steps >= train.steps:
        raise ConfigError(f"train.warmup_steps: {train.warmup_steps} is not below train.steps = {train.steps}")
    for name in ("lengths", "protocols", "transforms"):
        if not getattr(evaluation, name):
            raise ConfigError(f"eval.{name}: empty; name at least one")
    for path, given in {
        **{f"eval.{name}": getattr(evaluation, name) for name in ("lengths", "protocols", "nulls", "transforms")},
        **{f"stream.{name}": getattr(experiment.stream, name) for name in ("sinks", "baselines")},
    }.items():
        twice = [each for index, each in enumerate(given) if each in given[:index]]
        if twice:
            raise ConfigError(f"{path}: {twice[0]!r} twice in {given}; each once")
    if "stream" in evaluation.protocols and evaluation.transforms != ("none",):
        raise ConfigError(f"eval.transforms: {evaluation.transforms}, but a stream is read without; score it apart")
    for index, length in enumerate(evaluation.lengths):
        if length < 1:
            raise ConfigError(f"eval.lengths[{index}]: {length} is not a length; at least 1")
    shortest = min((*evaluation.lengths, train.length))
    if "targets" in evaluation.protocols and evaluation.last_k > shortest:
        raise ConfigError(f"eval.last_k: {evaluation.last_k} exceeds the shortest evaluation length {shortest}")
    if "targets" in evaluation.protocols and evaluation.last_k > evaluation.spacing:
        raise ConfigError(
            f"eval.last_k: {evaluation.last_k} exceeds eval.spacing = {evaluation.spacing}: targets overlap"
        )
    if "sliding" in evaluation.protocols and evaluation.stride > shortest:
        raise ConfigError(f"eval.stride: {evaluation.stride} exceeds the shortest evaluation length {shortest}")
