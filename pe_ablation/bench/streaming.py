"""Ways to read a text without end."""

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation import eviction, streaming
from pe_ablation.bench.asked import Request
from pe_ablation.bench.tables import spread
from pe_ablation.bench.tables import table as markdown
from pe_ablation.bench.turns import ROUNDS, Way, taken_in_turns
from pe_ablation.cache import Cache
from pe_ablation.eviction import Policy
from pe_ablation.model import GPT, SIZES, GPTConfig, count_parameters

CASES = (("nano", "rope", 255, 4), ("nano", "rope", 1023, 4), ("micro", "alibi", 255, 4))


def measure(asked: Request, say: Callable[[str], None]) -> dict[str, Any]:
    """{streams: what `streams` finds of each case}."""
    found = []
    for size, encoding, window, sinks in CASES:
        say(f"streaming: {encoding}, {size}, W = {window}")
        found.append(streams(size, encoding, asked.tokens, window, sinks, asked.rounds or ROUNDS))
    return {"streams": found}


def streams(size: str, encoding: str, tokens: int, window: int, sinks: int, rounds: int) -> dict[str, Any]:
    """Reading `tokens` under a sink cache: in parallel, one by one in a loop on the device, a call for each token, and
    `recompute`, a fresh context for each.

    The slow ways read a part of the text, once the cache is full: their cost a token is the same all along.
    """
    policy = Policy("sink", window, sinks)
    shape: Any = SIZES[size]
    config = GPTConfig(vocab_size=258, train_length=window + 1, encoding=encoding, **shape)
    model = GPT(config, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    ids = np.random.default_rng(0).integers(0, 256, tokens + 1024).astype(np.int32)
    piece, chunk = streaming.pieces(policy, model, tokens)
    whole = streaming.program(config, policy, piece, chunk)

    def read(count: int) -> Cache:
        cache = eviction.cache(policy, model, 1)
        for given, wanted, places in streaming.chunks(ids[: count + 1], chunk):
            nats, cache = whole(params, given, wanted, places, cache)
        jax.block_until_ready(nats)
        return cache

    full = read(max(chunk, window + 1))
    rows = max(1, 4096 // policy.seen)
    ways = [
        Way("in parallel", tokens, lambda: read(tokens)),
        _on_device(policy, config, params, ids, full),
        _a_call_each(policy, model, ids, full),
        _recompute(config, params, ids, rows, policy.seen),
    ]
    rates = taken_in_turns(ways, rounds)
    about = {"tokens": tokens, "window": window, "sinks": sinks, "size": size, "encoding": encoding, "piece": piece}
    about |= {"parameters": count_parameters(config), "contexts_at_once": rows}
    return about | {"tokens_per_second": rates}


def _on_device(policy: Policy, config: GPTConfig, params: Any, ids: np.ndarray, full: Cache) -> Way:
    one_by_one, start = streaming.program(config, policy, 1, 512), int(full.next[0])

    def call() -> None:
        places = np.arange(start, start + 512, dtype=np.int32)[None]
        given, wanted = ids[None, start : start + 512], ids[None, start + 1 : start + 513]
        jax.block_until_ready(one_by_one(params, given, wanted, places, jax.tree.map(jnp.array, full))[0])

    return Way("token by token, a loop on the device", 512, call)


def _a_call_each(policy: Policy, model: GPT, ids: np.ndarray, full: Cache) -> Way:
    graph, params = nnx.split(model)
    start = int(full.next[0])

    @functools.partial(jax.jit, donate_argnums=3)
    def step(params, token, position, cache):
        return eviction.advance(policy, nnx.merge(graph, params), token, position, cache)

    def call() -> None:
        cache, logits = jax.tree.map(jnp.array, full), None
        for at in range(start, start + 256):
            logits, cache = step(params, ids[None, at : at + 1], np.array([[at]], np.int32), cache)
        jax.block_until_ready(logits)

    return Way("token by token, a call each", 256, call)


def _recompute(config: GPTConfig, params: Any, ids: np.ndarray, rows: int, seen: int) -> Way:
    fresh = streaming.program_of_windows(config, rows, seen)
    contexts = np.stack([ids[row : row + seen] for row in range(rows)])
    return Way("recompute", rows, lambda: jax.block_until_ready(fresh(params, contexts, contexts)))


def table(found: dict[str, Any]) -> Iterator[str]:
    """Medians, their range, and how much faster the first way is, by the medians of one run."""
    for each in found["streams"]:
        rates = each["tokens_per_second"]
        first = statistics.median(next(iter(rates.values())))
        yield (
            f"{each['encoding']}, {each['size']} ({each['parameters']:,} parameters), {each['tokens']:,} tokens, W = "
            f"{each['window']}, S = {each['sinks']}, float32"
        )
        yield ""
        rows = [(name, *spread(own), f"{first / statistics.median(own):.1f}x") for name, own in rates.items()]
        yield from markdown(("way", "tokens/s (median)", "range", "in parallel is faster by"), rows)
