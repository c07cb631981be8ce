"""Perplexity of a text without end, read under a policy that keeps a bounded part of it (see `eviction`).

The text is a split's documents one after another, as they are stored: one stream, or each document its own. Four kinds
of reading stand side by side (Xiao et al. 2024, arXiv:2309.17453, Figure 1): `dense` keeps all; `window` the last W
tokens; `recompute` reads the last ones anew for each token; `sink` keeps the first S and the last W - S. A token is
scored at the place of the token before it, in bands of that place: below W, below 2 W, beyond; and in the 32 places
from the first on at which something is missing. Special tokens are read and not scored. W counts cached tokens.

Where a policy can be read in parallel, pieces of up to R tokens go through the cache at once, exactly as one by one,
in memory that does not depend on the length of the text. Letters: T tokens of a piece, V vocabulary.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation import data, eviction, stopping, trained
from pe_ablation.config import ConfigError, Experiment, StreamConfig
from pe_ablation.eviction import EvictionError, Policy
from pe_ablation.model import GPT, GPTConfig, abstract
from pe_ablation.record import RecordError, Run
from pe_ablation.train import window_nats
from pe_ablation.trained import Trained

_log = logging.getLogger(__name__)
ONSET = 32  # places from the first eviction on, as in the tables of the literature
CHUNK = 4096  # tokens that one call of a program reads, at most
PIECE = 128  # of them, so many at once where more are allowed: a longer piece reads more keys that nobody sees
BANDS = ("below_w", "below_2w", "beyond", "onset")


class Scored(NamedTuple):
    """One target each: which stream, the place of the token before it, nats (float32), bytes, all [n]."""

    stream: np.ndarray
    place: np.ndarray
    nats: np.ndarray
    bytes: np.ndarray


class Reading(NamedTuple):
    """How a policy reads, and at what cost: seconds and tokens without compilation, bytes of cache and scratch."""

    scored: Scored
    method: str
    seconds: float
    tokens: int
    cache_bytes: int
    scratch_bytes: int


def window(stream: StreamConfig, train_length: int) -> int:
    """W: as set, or so many cached tokens that a token sees as many as in training."""
    return stream.window or eviction.as_in_training(train_length, stream.evict)


def policies(stream: StreamConfig, experiment: Experiment, absolute: bool) -> list[Policy]:
    """What a run is read under, in the order of the table; ConfigError by field.

    `absolute`: whether its encoding is added at the input, which is what `stream.absolute` is about.
    """
    slots = window(stream, experiment.train.length)
    how: dict[str, Any] = {"evict": stream.evict}
    moved = how | {
        "positions": stream.positions,
        "limit": stream.limit,
        "absolute": stream.absolute if absolute else None,
    }
    try:
        found = [Policy("full", stream.dense_tokens)] if "dense" in stream.baselines else []
        found += [Policy("sink" if sinks else "window", slots, sinks, **moved) for sinks in stream.sinks]
        found += [Policy(name, slots, **how) for name in ("recompute", "block_recompute") if name in stream.baselines]
    except EvictionError as error:
        raise ConfigError(f"stream.{error}") from None
    return found


def score(run: Run, experiment: Experiment) -> list[dict[str, Any]]:
    """Read the run's split under every policy that `experiment.stream` asks for; cells that are stored stay.

    Returns the cells asked for. One whose policy the model cannot be read under has the status "n/a" and says why.
    Raises NotTrained, ConfigError for a stream that is longer than the split and for fields that make no sense,
    StreamError for NaN.
    """
    loaded = trained.load(run)
    loaded.experiment.positions.refuse_decoding()
    reader = _Reader(loaded, experiment)
    stored = {cell["key"]: cell for cell in whole_cells(run)}
    found = []
    for policy in policies(experiment.stream, experiment, reader.trained.abstract.absolute):
        key = reader.key(policy)
        if key not in stored:
            stopping.check(f"trained; {len(stored)} streaming cells scored")
            cell, arrays = reader.cell(policy)
            run.save_cell(cell, arrays, "streaming")
            stored[key] = cell
        found.append(stored[key])
    return found


def whole_cells(run: Run) -> list[dict[str, Any]]:
    """The stored streaming cells whose scored tokens can be read; others are named and count as not there."""
    found = []
    for cell in run.cells("streaming"):
        try:
            if cell["status"] == "ok":
                run.arrays(cell, ("stream",), "streaming")
            found.append(cell)
        except RecordError as error:
            _log.warning("%s; left out", error)
    return found


def check(experiment: Experiment) -> None:
    """ConfigError for what cannot be asked of any run."""
    policies(experiment.stream, experiment, absolute=True)
    _streams(experiment, data.load(experiment.data, experiment.eval.split))


class StreamError(ValueError):
    """A run whose stream cannot be scored; the message names it."""


def _streams(experiment: Experiment, tokens: data.TokenFile) -> list[slice]:
    """Where in the split each stream lies."""
    stream, size = experiment.stream, len(tokens.stored)
    count = size if stream.tokens is None else stream.tokens
    if count > size:
        raise ConfigError(
            f"stream.tokens: {count}, but the {experiment.eval.split} split has {size}; ask for fewer, None takes all"
        )
    if not stream.reset:
        return [slice(0, count)]
    ends = [int(each) for each in tokens.starts[1:] if each < count]
    return [slice(*pair) for pair in zip([0, *ends], [*ends, count], strict=True) if pair[1] - pair[0] > 1]


class _Reader:
    """One run and one stream."""

    def __init__(self, loaded: Trained, experiment: Experiment):
        self.trained, self.stream, self.split = loaded, experiment.stream, experiment.eval.split
        self.batch_tokens = experiment.eval.batch_tokens
        self.file = data.load(experiment.data, self.split)
        self.slices = _streams(experiment, self.file)
        self.sizes = np.asarray(loaded.tokenizer.bytes_per_token)
        bos = loaded.tokenizer.bos if experiment.data.bos == "window" else None
        self.first = None if bos is None else np.int32(bos)
        self.window = window(self.stream, experiment.train.length)

    def settings(self, policy: Policy) -> dict[str, Any]:
        """What decides which targets a cell scores, and how."""
        own = {"tokens": sum(each.stop - each.start for each in self.slices), "reset": self.stream.reset}
        if policy.name == "recompute":
            own["recompute_targets"] = self.stream.recompute_targets
        return own | {"text": self.file.digest[:16]}

    def key(self, policy: Policy) -> str:
        about = {**policy.describe(), **self.settings(policy), "window": self.window}
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
        name = f"{policy.name}-S{policy.sinks}-W{policy.slots}"
        return f"step{self.trained.step}-{self.split}-{name}-{digest}"

    def cell(self, policy: Policy) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        about = {
            "key": self.key(policy),
            "step": self.trained.step,
            "split": self.split,
            "train_length": self.trained.experiment.train.length,
            "window": self.window,
            "policy": policy.describe(),
            "settings": self.settings(policy),
        }
        if not self.trained.alive:
            return about | {"status": "diverged"}, {}
        try:
            reading = self._read(policy)
        except EvictionError as error:
            return about | {"status": "n/a", "reason": str(error)}, {}
        if np.isnan(reading.scored.nats).any():
            raise StreamError(f"{self.trained.run.path}: NaN in the stream under {policy.name}")
        numbers = {name: getattr(reading, name) for name in ("method", "seconds", "cache_bytes", "scratch_bytes")}
        rate = {"tokens_per_second": reading.tokens / reading.seconds, "read": reading.tokens}
        bands = {name: sums(reading.scored, where) for name, where in self._bands(policy, reading.scored).items()}
        return about | {"status": "ok", "bands": bands} | numbers | rate, reading.scored._asdict()

    def _bands(self, policy: Policy, scored: Scored) -> dict[str, np.ndarray]:
        """bool [n] for each of BANDS."""
        first = eviction.first_missing(self.window, policy.evict)
        place = scored.place
        edges = (place < self.window, (place >= self.window) & (place < 2 * self.window), place >= 2 * self.window)
        return dict(zip(BANDS, (*edges, (place >= first) & (place < first + ONSET)), strict=True))

    def _read(self, policy: Policy) -> Reading:
        model = self.trained.abstract
        eviction.refuse(policy, model)
        if policy.name not in eviction.CACHED:
            return self._read_windows(policy)
        limit = model.max_position if policy.name == "full" else None
        most = policy.slots if policy.name == "full" else None
        slices = [_shortened(each, min(filter(None, (most, limit)), default=None)) for each in self.slices]
        if policy.name == "full":
            policy = dataclasses.replace(policy, slots=max(each.stop - each.start for each in slices))
        return self._read_cached(policy, slices)

    def _read_cached(self, policy: Policy, slices: list[slice]) -> Reading:
        """Chunk after chunk through the cache."""
        piece, chunk = pieces(policy, self.trained.abstract, max(each.stop - each.start for each in slices))
        compiled = program(self.trained.config, policy, piece, chunk)
        empty = eviction.cache(policy, self.trained.model, 1)
        parts, read, began = [], 0, time.monotonic()
        for number, each in enumerate(slices):
            cache, pending = jax.tree.map(jnp.array, empty), None
            for tokens, targets, positions in chunks(self.file.stored[each], chunk, self.first):
                nats, cache = compiled(self.trained.params, tokens, targets, positions, cache)
                if pending is not None:
                    parts.append(self._scored(number, *pending))
                pending = (targets, positions, nats)
                read += int((positions >= 0).sum())
            parts += [] if pending is None else [self._scored(number, *pending)]
        seconds = time.monotonic() - began
        return Reading(
            _joined(parts),
            "in parallel" if piece > 1 else "token by token",
            seconds,
            read,
            empty.bytes,
            _scratch(compiled),
        )

    def _scored(self, stream: int, targets: Any, positions: np.ndarray, nats: Any) -> Scored:
        size = self.sizes[targets[0]]
        kept = (positions[0] >= 0) & (size > 0)
        place = positions[0][kept].astype(np.int64)
        return Scored(np.full(kept.sum(), stream), place, np.asarray(nats)[0][kept], size[kept])

    def _read_windows(self, policy: Policy) -> Reading:
        """Fresh contexts of `seen` tokens: one for each target, or for half as many as it holds."""
        seen = policy.seen
        rows = [row for number, each in enumerate(self.slices) for row in self._windows(policy, number, each)]
        batch = max(1, min(self.batch_tokens // seen, len(rows)))
        compiled = program_of_windows(self.trained.config, batch, seen)
        parts, began = [], time.monotonic()
        for begin in range(0, len(rows), batch):
            part = rows[begin : begin + batch]
            tokens, targets = np.zeros((2, batch, seen), np.int32)
            for row, (number, start, _, stop) in enumerate(part):
                ids = self.file.stored[self.slices[number].start + start :][: stop - start + 1].astype(np.int32)
                tokens[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
                if self.first is not None:
                    tokens[row, 0] = self.first
            nats = np.asarray(compiled(self.trained.params, tokens, targets))
            for row, (number, start, first, stop) in enumerate(part):
                place = np.arange(seen) + start
                places = np.where((place >= first) & (place < stop), place, -1)[None]
                parts.append(self._scored(number, targets[row : row + 1], places, nats[row : row + 1]))
        seconds = time.monotonic() - began
        scored = _joined(parts)
        return Reading(scored, "fresh contexts", seconds, len(scored.place), 0, _scratch(compiled))

    def _windows(self, policy: Policy, number: int, where: slice) -> Iterator[tuple[int, int, int, int]]:
        """(stream, start of the context, places scored: from, to) of each context."""
        seen, last = policy.seen, where.stop - where.start - 1
        yield number, 0, 0, min(seen, last)
        if policy.name == "block_recompute":
            again = policy.reread
            for start in range(seen - again, last - again, seen - again):
                yield number, start, start + again, min(start + seen, last)
            return
        for place in _sample(seen, last, self.stream.recompute_targets):
            yield number, place - seen + 1, place, place + 1


def chunks(
    ids: np.ndarray, size: int, first: np.int32 | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """tokens, targets and positions int32 [1,size] of a stream, -1 past its end; `first` for its first token."""
    place = np.arange(size)
    for start in range(0, len(ids) - 1, size):
        own = ids[start : start + size + 1].astype(np.int32)
        count = len(own) - 1
        tokens, targets = np.zeros((2, 1, size), np.int32)
        tokens[0, :count], targets[0, :count] = own[:-1], own[1:]
        if first is not None and start == 0:
            tokens[0, 0] = first
        yield tokens, targets, np.where(place < count, start + place, -1)[None].astype(np.int32)


def _sample(first: int, last: int, count: int) -> list[int]:
    """The places from `first` on that are scored one by one: the onset, then evenly to the end."""
    onset = range(first, min(first + ONSET, last))
    rest = np.arange(first + ONSET, last)
    if len(rest) > count - ONSET:
        rest = rest[np.linspace(0, len(rest) - 1, max(count - ONSET, 1)).round().astype(int)]
    return [*onset, *rest.tolist()]


def _shortened(where: slice, most: int | None) -> slice:
    """The same start, and no more than `most` tokens that are read (the last one is a target alone)."""
    return where if most is None else slice(where.start, min(where.stop, where.start + most + 1))


def _joined(parts: Sequence[Scored]) -> Scored:
    return Scored(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def sums(scored: Scored, where: np.ndarray) -> dict[str, Any]:
    """Nats per token, bits per byte and what they are of, over the targets `where`; NaN for none."""
    nats, size = float(scored.nats[where].sum(dtype=np.float64)), int(scored.bytes[where].sum())
    tokens = int(where.sum())
    return {
        "nats": nats / tokens if tokens else math.nan,
        "bits_per_byte": nats / math.log(2) / size if size else math.nan,
        "tokens": tokens,
        "bytes": size,
    }


def _scratch(program: Any) -> int:
    """Bytes that a compiled program needs beside what it is given, where that is known."""
    found = program.memory_analysis()
    return 0 if found is None else found.temp_size_in_bytes


def pieces(policy: Policy, model: GPT, longest: int) -> tuple[int, int]:
    """(tokens read at once, tokens of one call): a multiple of it, no more than there are."""
    most = eviction.piece(policy, model)
    piece = min(longest, PIECE * 4) if most is None else most if most <= PIECE else max(PIECE, most // 4)
    return piece, piece * max(1, min(CHUNK, longest) // piece)


@functools.lru_cache(maxsize=32)
def program(config: GPTConfig, policy: Policy, piece: int, chunk: int) -> Any:
    """params, tokens, targets and positions [1,chunk], cache -> nats [1,chunk], cache: `piece` tokens at a time."""
    graph, params = nnx.split(abstract(config))

    def read(params, tokens, targets, positions, cache):
        model = nnx.merge(graph, params)

        def advance(cache, part):
            inputs, wanted, places = part
            logits, cache = eviction.advance(policy, model, inputs, places, cache)
            return cache, window_nats(logits, wanted)

        parts = [jnp.moveaxis(each.reshape(1, -1, piece), 1, 0) for each in (tokens, targets, positions)]
        cache, nats = jax.lax.scan(advance, cache, tuple(parts))
        return jnp.moveaxis(nats, 0, 1).reshape(1, chunk), cache

    ids = jax.ShapeDtypeStruct((1, chunk), jnp.int32)
    cache = jax.eval_shape(lambda params: eviction.cache(policy, nnx.merge(graph, params), 1), params)
    return jax.jit(read, donate_argnums=4).lower(params, ids, ids, ids, cache).compile()


@functools.lru_cache(maxsize=32)
def program_of_windows(config: GPTConfig, batch: int, length: int) -> Any:
    """params, tokens and targets [batch,length] -> nats [batch,length]."""
    graph, params = nnx.split(abstract(config))
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    read = jax.jit(lambda params, tokens, targets: window_nats(nnx.merge(graph, params)(tokens), targets))
    return read.lower(params, ids, ids).compile()
