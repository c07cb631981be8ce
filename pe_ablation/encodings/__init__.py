"""The registry: name -> class. `make` builds one; a user's own class is named as `FILE.py:CLASS`."""

import functools
import hashlib
import importlib.util
import inspect
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

from flax import nnx

from pe_ablation.encodings.absolute import Learned, Sinusoidal
from pe_ablation.encodings.base import About, Encoding, Scores, Sizes, Tokens, distance
from pe_ablation.encodings.bias import T5, ALiBi
from pe_ablation.encodings.content import TransformerXL
from pe_ablation.encodings.rotary import RoPE

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
        ("rope", {"fraction": 0.5, "magnitude": 1.25}),
        ("t5", {"num_buckets": 8, "max_distance": 12}),
        ("transformer_xl", {"clamp": 5}),
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


def source_digest(name: str) -> str:
    """Empty for a registered encoding; for `FILE.py:CLASS` the sha256 of the file."""
    if name in REGISTRY:
        return ""
    find(name)
    return hashlib.sha256(pathlib.Path(name.rpartition(":")[0]).read_bytes()).hexdigest()


def option_types(name: str) -> dict[str, Any]:
    """Option name -> annotation: the keyword-only parameters of the class."""
    cls = find(name)
    hints = typing.get_type_hints(cls.__init__)
    return {option: hints.get(option, Any) for option in _options(cls)}


def option_defaults(name: str) -> dict[str, Any]:
    """Option name -> default."""
    return {option: parameter.default for option, parameter in _options(find(name)).items()}


def resolved_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from the class's defaults."""
    defaults = option_defaults(name)
    return {option: value for option, value in options.items() if value != defaults.get(option)}


def _options(cls: type[Encoding]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(cls.__init__).parameters
    return {name: each for name, each in parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY}


def make(
    name: str, *, num_heads: int, head_dim: int, model_dim: int, train_length: int, rngs: nnx.Rngs, **options: Any
) -> Encoding:
    """One encoding; ValueError for an unknown name or option and for sizes that it cannot serve."""
    allowed = option_types(name)
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"encoding.options.{option}: {name} has no such option; allowed: {', '.join(allowed) or 'none'}"
            )
    return find(name)(Sizes(num_heads, head_dim, model_dim, train_length), rngs, **options)
