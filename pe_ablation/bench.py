"""Speed as ratios of one run: ways to do the same thing take turns, so that noise of the machine hits all of them."""

import datetime
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation import atomic, eviction, streaming
from pe_ablation.cache import Cache
from pe_ablation.eviction import Policy
from pe_ablation.model import GPT, SIZES, GPTConfig, count_parameters

ROUNDS = 5
FEWEST = 1024  # tokens of a text
CASES = (("nano", "rope", 255, 4), ("nano", "rope", 1023, 4), ("micro", "alibi", 255, 4))


class Way(NamedTuple):
    """One way: its name, how many tokens a call reads, and the call, which waits for its result."""

    name: str
    tokens: int
    call: Callable[[], Any]


def machine() -> dict[str, Any]:
    """What the numbers are of."""
    model = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": model[0] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": [each.device_kind for each in jax.devices()],
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def taken_in_turns(ways: list[Way], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each way in each round; a call of each goes before, uncounted."""
    for way in ways:
        way.call()
    rates: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            began = time.perf_counter()
            way.call()
            rates[way.name].append(way.tokens / (time.perf_counter() - began))
    return rates


def streams(size: str, encoding: str, tokens: int, window: int, sinks: int) -> dict[str, Any]:
    """Reading `tokens` under a sink cache: in parallel, one by one in a loop on the device, a call for each token, and
    `recompute`, a fresh context for each.

    The slow ways read a part of the text, once the cache is full: their cost a token is the same all along.
    """
    policy = Policy("sink", window, sinks)
    shape: Any = SIZES[size]
    config = GPTConfig(vocab_size=258, train_length=window + 1, encoding=encoding, **shape)
    model = GPT(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    ids = np.random.default_rng(0).integers(0, 256, tokens + 1024).astype(np.int32)
    piece, chunk = streaming.pieces(policy, model, tokens)
    whole = streaming.program(config, policy, piece, chunk)
    one_by_one = streaming.program(config, policy, 1, 512)
    seen = policy.seen
    rows = max(1, 4096 // seen)
    fresh = streaming.program_of_windows(config, rows, seen)

    @functools.partial(jax.jit, donate_argnums=3)
    def step(params, token, position, cache):
        return eviction.advance(policy, nnx.merge(graph, params), token, position, cache)

    def read(program: Any, size: int, count: int) -> Cache:
        cache = eviction.cache(policy, model, 1)
        for given, wanted, places in streaming.chunks(ids[: count + 1], size):
            nats, cache = program(params, given, wanted, places, cache)
        jax.block_until_ready(nats)
        return cache

    full = read(whole, chunk, max(chunk, window + 1))
    start = int(full.next[0])

    def each(count: int) -> None:
        cache, logits = jax.tree.map(jnp.array, full), None
        for at in range(start, start + count):
            logits, cache = step(params, ids[None, at : at + 1], np.array([[at]], np.int32), cache)
        jax.block_until_ready(logits)

    def on_device() -> None:
        places = np.arange(start, start + 512, dtype=np.int32)[None]
        given, wanted = ids[None, start : start + 512], ids[None, start + 1 : start + 513]
        jax.block_until_ready(one_by_one(params, given, wanted, places, jax.tree.map(jnp.array, full))[0])

    contexts = np.stack([ids[row : row + seen] for row in range(rows)])
    ways = [
        Way("in parallel", tokens, lambda: read(whole, chunk, tokens)),
        Way("token by token, a loop on the device", 512, on_device),
        Way("token by token, a call each", 256, lambda: each(256)),
        Way("recompute", rows, lambda: jax.block_until_ready(fresh(params, contexts, contexts))),
    ]
    rates = taken_in_turns(ways, ROUNDS)
    about = {"tokens": tokens, "window": window, "sinks": sinks, "size": size, "encoding": encoding, "piece": piece}
    about |= {"parameters": count_parameters(config), "contexts_at_once": rows}
    return about | {"tokens_per_second": rates}


def table(found: dict[str, Any]) -> Iterator[str]:
    """Lines: medians, their range, and how much faster the first way is, by the medians of one run."""
    rates = found["tokens_per_second"]
    first = statistics.median(next(iter(rates.values())))
    yield (
        f"{found['encoding']}, {found['size']} ({found['parameters']:,} parameters), {found['tokens']:,} tokens, W = "
        f"{found['window']}, S = {found['sinks']}, float32"
    )
    yield ""
    yield "| way | tokens/s (median) | range | in parallel is faster by |"
    yield "| :-- | ---: | ---: | ---: |"
    for name, own in rates.items():
        middle = statistics.median(own)
        yield f"| {name} | {middle:,.0f} | {min(own):,.0f} to {max(own):,.0f} | {first / middle:.1f}x |"
    yield ""


def write(
    out: str | Path, *, tokens: int = 100_000, cases: Sequence[tuple[str, str, int, int]] = CASES
) -> Iterator[str]:
    """Measure every (size, encoding, window, sinks), write streaming.json and streaming.md to `out`, say the lines."""
    if tokens < FEWEST:
        raise ValueError(f"tokens: {tokens} is too short a text to measure; at least {FEWEST}")
    found, lines = [], []
    for size, encoding, window, sinks in cases:
        found.append(streams(size, encoding, tokens, window, sinks))
        for line in table(found[-1]):
            lines.append(line)
            yield line
    own = machine()
    lines.append(", ".join(f"{name} {value}" for name, value in own.items()))
    yield lines[-1]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write(folder / "streaming.json", [json.dumps({"machine": own, "streams": found}, indent=1).encode()])
    atomic.write(folder / "streaming.md", ["\n".join([*lines, ""]).encode()])
