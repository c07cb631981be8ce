"""Ways to do the same thing, taking turns; how long a program compiles; the machine that it was on."""

import datetime
import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from pe_ablation import cores

ROUNDS = 5
PACKAGES = ("jax", "jaxlib", "flax")


class Way(NamedTuple):
    """One way: its name, how much a call does (tokens, operations), and the call, which waits for its result."""

    name: str
    amount: float
    call: Callable[[], Any]


def taken_in_turns(ways: Sequence[Way], rounds: int) -> dict[str, list[float]]:
    """How much each way does a second in each round; a call of each goes before, uncounted."""
    for way in ways:
        way.call()
    rates: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            began = time.perf_counter()
            way.call()
            rates[way.name].append(way.amount / (time.perf_counter() - began))
    return rates


def compiled(make: Callable[[], Any]) -> tuple[Any, float]:
    """What `make` compiles, and the seconds: tracing, lowering and XLA, nothing of it taken from memory or from disk.

    Programs that are held stay as they are; what only jax remembers is forgotten.
    """
    settings: Any = jax.config
    kept = settings.jax_enable_compilation_cache
    jax.clear_caches()
    settings.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax asks once whether programs are kept
    try:
        began = time.perf_counter()
        return make(), time.perf_counter() - began
    finally:
        settings.update("jax_enable_compilation_cache", kept)
        compilation_cache.reset_cache()


def machine(others: Sequence[str] = ()) -> dict[str, Any]:
    """What the numbers are of; `others` are packages that took part, where they are installed."""
    model = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": model[0] if model else platform.processor(),
        "cores": cores.count(),
        "devices": [each.device_kind for each in jax.devices()],
        "python": platform.python_version(),
        **_versions([*PACKAGES, *others]),
        "date": datetime.date.today().isoformat(),
    }


def _versions(names: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
