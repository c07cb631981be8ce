"""The registry: name -> class. `make` builds one; a user's own class is named as `FILE.py:CLASS`."""

import functools
import hashlib
import importlib.util
import inspect
import math
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

from flax import nnx

from pe_ablation.encodings.absolute import Learned, Sinusoidal
from pe_ablation.encodings.base import About, Encoding, Scores, Sizes, Tokens, distance
from pe_ablation.encodings.bias import T5, ALiBi
from pe_ablation.encodings.combined import Dape, Sum
from pe_ablation.encodings.content import Shaw, TransformerXL
from pe_ablation.encodings.gates import CoPE, FoX
from pe_ablation.encodings.kernels import Fire, KerpleLog, KerplePower, Sandwich
from pe_ablation.encodings.rotary import PRoPE, RoPE, XPos

__all__ = [
    "REGISTRY",
    "About",
    "Encoding",
    "Scores",
    "Sizes",
    "Tokens",
    "distance",
    "find",
    "instances",
    "make",
    "names",
    "nested",
    "option_defaults",
    "option_types",
    "resolved_options",
    "source_digest",
]

REGISTRY: dict[str, type[Encoding]] = {
    "none": Encoding,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rope": RoPE,
    "alibi": ALiBi,
    "t5": T5,
    "transformer_xl": TransformerXL,
    "p_rope": PRoPE,
    "xpos": XPos,
    "shaw": Shaw,
    "cope": CoPE,
    "fox": FoX,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "fire": Fire,
    "sandwich": Sandwich,
    "sum": Sum,
    "dape": Dape,
}


def names() -> tuple[str, ...]:
    """The registered encodings, in the order of the registry."""
    return tuple(REGISTRY)


def instances() -> tuple[tuple[str, dict[str, Any]], ...]:
    """(name, options) of every encoding and variant that the conformance tests cover."""
    return (
        *((name, {}) for name in REGISTRY),
        ("sinusoidal", {"scale": 0.1, "interleaved": False}),
        ("learned", {"rows": 4096}),
        ("rope", {"base": 500.0, "fraction": 0.5}),
        ("rope", {"interleaved": True}),
        ("alibi", {"learned": True}),
        ("alibi", {"learned": True, "heads": 1}),
        ("rope", {"fraction": 0.5, "magnitude": 1.25}),
        ("t5", {"num_buckets": 8, "max_distance": 12}),
        ("fire", {"hidden_layers": 2, "width": 5, "threshold": 4}),
        ("sandwich", {"dbar": 16, "first": 0}),
        ("sum", {"first": "sinusoidal", "second": "t5", "second_options": {"num_buckets": 8, "max_distance": 12}}),
        ("sum", {"first": "alibi", "second": "transformer_xl"}),
        ("dape", {"base": "kerple_log", "width": 3}),
        ("transformer_xl", {"clamp": 5}),
        ("p_rope", {"p": 0.5, "reversed": True, "interleaved": True}),
        ("p_rope", {"p": 0.5, "partial": True}),
        ("xpos", {"scale_base": 1024.0, "interleaved": True}),
        ("shaw", {"clip": 3, "values": False}),
        ("cope", {"count": 4, "gate_scale": False, "after_scale": True}),
        ("fox", {"bias": 5.0}),
    )


def find(name: str) -> type[Encoding]:
    """The class of a registered name or of `FILE.py:CLASS`; ValueError lists the names."""
    if name in REGISTRY:
        return REGISTRY[name]
    file, colon, class_name = name.rpartition(":")
    if not (colon and file.endswith(".py")):
        raise ValueError(f"unknown encoding {name!r}; allowed: {', '.join(REGISTRY)}, or FILE.py:CLASS")
    found = getattr(_module(str(pathlib.Path(file).resolve())), class_name, None)
    if not (isinstance(found, type) and issubclass(found, Encoding)):
        raise ValueError(f"{file} defines no Encoding called {class_name!r}")
    return found


@functools.cache
def _module(file: str) -> Any:
    if not pathlib.Path(file).is_file():
        raise ValueError(f"no such encoding file: {file}")
    spec = importlib.util.spec_from_file_location(f"encoding_{pathlib.Path(file).stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_digest(name: str, options: Mapping[str, Any] | None = None) -> str:
    """Empty for a registered encoding; for `FILE.py:CLASS` the sha256 of the file.

    Of encodings that the options name: the sha256 of all their digests, if any is not empty.
    """
    find(name)
    own = "" if name in REGISTRY else hashlib.sha256(pathlib.Path(name.rpartition(":")[0]).read_bytes()).hexdigest()
    parts = [source_digest(*each) for each in nested(name, options or {}).values()]
    return hashlib.sha256(" ".join([own, *parts]).encode()).hexdigest() if any(parts) else own


def nested(name: str, options: Mapping[str, Any]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Of an encoding made of others: option -> (the name it gives, the options of that one)."""
    asked = {**option_defaults(name), **options}
    return {option: (asked[option], asked.get(f"{option}_options") or {}) for option in find(name).nested}


def option_types(name: str) -> dict[str, Any]:
    """Option name -> annotation: the keyword-only parameters of the class."""
    cls = find(name)
    hints = typing.get_type_hints(cls.__init__)
    return {option: hints.get(option, Any) for option in _options(cls)}


def option_defaults(name: str) -> dict[str, Any]:
    """Option name -> default; ValueError for a class that has one without."""
    defaults = {option: parameter.default for option, parameter in _options(find(name)).items()}
    for option, default in defaults.items():
        if default is inspect.Parameter.empty:
            raise ValueError(f"encoding.options.{option}: {name} gives it no default, which every option needs")
    return defaults


def resolved_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from the class's defaults, those of encodings that they name as well."""
    defaults = option_defaults(name)
    changed = {option: value for option, value in options.items() if value != defaults.get(option)}
    for option, each in nested(name, options).items():
        changed[f"{option}_options"] = resolved_options(*each)
        if not changed[f"{option}_options"]:
            del changed[f"{option}_options"]
    return changed


def _options(cls: type[Encoding]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(cls.__init__).parameters
    return {name: each for name, each in parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY}


def make(
    name: str, *, num_heads: int, head_dim: int, model_dim: int, train_length: int, rngs: nnx.Rngs, **options: Any
) -> Encoding:
    """One encoding; ValueError for an unknown name or option and for sizes that it cannot serve."""
    option_defaults(name)  # which every option has
    allowed = option_types(name)
    for option, value in options.items():
        if option not in allowed:
            raise ValueError(
                f"encoding.options.{option}: {name} has no such option; allowed: {', '.join(allowed) or 'none'}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"encoding.options.{option}: {value} is not a finite number")
    return find(name)(Sizes(num_heads, head_dim, model_dim, train_length), rngs, **options)
