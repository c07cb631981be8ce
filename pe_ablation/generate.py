"""Text from a trained model: a batch of prompts is read at once, then goes on a token at a time.

Under a policy with a cache (see `eviction`) a step reads one token; `recompute` reads the last tokens anew at each
step, `block_recompute` half of them whenever there is no more room. Letters: B batch, T tokens, V vocabulary.
"""

import codecs
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation import config, eviction, repetition, transforms
from pe_ablation.cache import Cache
from pe_ablation.eviction import Policy
from pe_ablation.memory import memory_limit
from pe_ablation.model import DTYPES, GPT, GPTConfig, abstract, refuse_positions
from pe_ablation.trained import Trained
from pe_ablation.transforms import Transform

PIECE = 512  # tokens of a prompt that are read at once where nothing else limits them
MOST = 2**31  # tokens are counted in int32
SHORTEST = 16  # prompts are padded to this or a greater power of two: a program for each such length


class GenerationError(ValueError):
    """A continuation that cannot be given; the message names what was asked."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: logits / temperature, the `top_k` most likely, of these the fewest that hold
    `top_p` of the probability (Holtzman et al. 2020, arXiv:1904.09751). Temperature 0 and top_p 0 take the most likely.

    Raises GenerationError for values outside their range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise GenerationError(f"temperature: {self.temperature} is out of range; at least 0, and finite")
        if self.top_k is not None and self.top_k < 1:
            raise GenerationError(f"top_k: {self.top_k} leaves no token; at least 1")
        if not 0 <= self.top_p <= 1:
            raise GenerationError(f"top_p: {self.top_p} is not in [0, 1]")
        if not 0 <= self.seed < 2**32:
            raise GenerationError(f"seed: {self.seed} is out of range; 0 to 2^32 - 1")


@dataclasses.dataclass(frozen=True)
class Request:
    """What `pe-ablation generate` can be told: `Sampling` and a `Policy` by its fields, the cache's name among them.

    window None: so many cached tokens that a token sees as many as in training; sinks None: 4 with `sink`, else 0.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    cache: eviction.Name = "full"
    window: int | None = None
    sinks: int | None = None
    evict: eviction.Evict = "after"
    positions: eviction.Rule = "in_cache"
    limit: int | None = None
    absolute: eviction.Absolute | None = None
    cache_dtype: Literal["float32", "bfloat16"] = "float32"
    transform: str = "none"

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    def policy(self, train_length: int) -> Policy | None:
        """None: all is kept. Raises GenerationError for fields that go with another cache."""
        if self.cache == "full":
            defaults = Request()
            for name in ("window", "sinks", "evict", "positions", "limit", "absolute"):
                if getattr(self, name) != getattr(defaults, name):
                    raise GenerationError(f"{name}: {getattr(self, name)!r} goes with another cache than 'full'")
            return None
        window = eviction.as_in_training(train_length, self.evict) if self.window is None else self.window
        sinks = (4 if self.cache == "sink" else 0) if self.sinks is None else self.sinks
        return Policy(self.cache, window, sinks, self.evict, self.positions, self.limit, self.absolute)


class Continuation(NamedTuple):
    """What follows one prompt: ids without EOS, their bytes, and why it ended.

    evicted: the index in `ids` of the first token that was drawn without sight of all before it, negative where the
    prompt was too long already; None where each saw all.
    """

    prompt: np.ndarray
    ids: np.ndarray
    content: bytes
    ended: Literal["eos", "length"]
    evicted: int | None


class Generated(NamedTuple):
    """Continuations in the order of their prompts; seconds to read these and for the steps, both without compiling."""

    continuations: list[Continuation]
    read_seconds: float
    step_seconds: float
    tokens_per_second: float


class Text:
    """Bytes as text, as they come: a character appears once all its bytes are there; invalid bytes as U+FFFD."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, content: bytes) -> str:
        return self._decoder.decode(content)


def text(content: bytes) -> str:
    """All whole characters of `content`; one that is cut off at the end is left out."""
    return Text()(content)


def shown(
    trained: Trained, prompts: Sequence[bytes], asked: Request, *, stream: bool = False, stats: bool = False
) -> Iterator[str]:
    """What `pe-ablation generate` prints: prompts with their continuations, tokens per second and, if asked, `stats`.

    With `stream` the text of the one prompt is printed as it comes.
    """
    whole = Text()

    def on_bytes(row: int, content: bytes) -> None:
        print(whole(content), end="", flush=True)

    if stream:
        print(whole(prompts[0]), end="", flush=True)
    found = generate(
        trained,
        prompts,
        max_new_tokens=asked.max_new_tokens,
        sampling=asked.sampling(),
        policy=asked.policy(trained.experiment.train.length),
        dtype=DTYPES[asked.cache_dtype],
        transform=config.transform(asked.transform, "transform"),
        on_bytes=on_bytes if stream else None,
    )
    for number, (prompt, each) in enumerate(zip(prompts, found.continuations, strict=True), 1):
        if len(prompts) > 1:
            yield f"== {number}"
        yield "" if stream else text(prompt + each.content)
    yield ""
    counts = ", ".join(f"{len(each.ids)} ({each.ended})" for each in found.continuations)
    yield (
        f"{len(found.continuations)} prompts; new tokens: {counts}; {found.tokens_per_second:,.0f} tokens/s; "
        f"prompts read in {found.read_seconds:.3f} s; compilation not counted"
    )
    if stats:
        yield from statistics(found.continuations)


def statistics(continuations: Sequence[Continuation]) -> Iterator[str]:
    """Lines: the measures of `repetition` over all continuations, and each one's loop beside its first eviction."""
    measures = repetition.summary([each.ids for each in continuations])
    yield "  ".join(f"{name} {value:.3f}" for name, value in measures.items())
    for number, each in enumerate(continuations, 1):
        loop = repetition.find_loop(each.ids)
        evicted = "nothing evicted" if each.evicted is None else f"first eviction at token {each.evicted}"
        if loop is None:
            yield f"{number}: no loop; {evicted}"
            continue
        after = repetition.after_eviction(loop, [] if each.evicted is None else [each.evicted])
        since = "" if after is None else f", {after} tokens after it"
        yield f"{number}: loop of period {loop.period} from token {loop.onset}; {evicted}{since}"


def draw(logits: jax.Array, key: jax.Array, temperature: Any, top_k: Any, top_p: Any) -> jax.Array:
    """int32 [B] ids from float32 logits [B,V] (see `Sampling`); of equally likely ids the smaller counts as more so."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    rank = jnp.arange(logits.shape[-1])
    ranked = jnp.take_along_axis(logits, order, axis=-1) / jnp.where(temperature > 0, temperature, 1.0)
    ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = (before < top_p) | (top_p >= 1) | (rank == 0)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(logits.shape[0]))
    noise = jax.vmap(lambda each: jax.random.gumbel(each, logits.shape[-1:]))(keys)
    chosen = jnp.argmax(jnp.where(kept, ranked + noise, -jnp.inf), axis=-1)
    chosen = jnp.where(temperature > 0, chosen, 0)
    return jnp.take_along_axis(order, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)


def generate(
    trained: Trained,
    prompts: Sequence[bytes],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    policy: Policy | None = None,
    dtype: Any = jnp.float32,
    transform: Transform | None = None,
    on_bytes: Callable[[int, bytes], None] | None = None,
) -> Generated:
    """Continue every prompt by up to `max_new_tokens` tokens, until EOS.

    `policy` decides what is kept (default: all); a cache holds keys and values in `dtype`. `on_bytes(row, bytes)` is
    called with each token. A `transform` is applied for the tokens of the longest prompt with its new ones, or what the
    policy shows of them, and stays the same from the first token to the last. A prompt starts with BOS where training
    texts do; an empty one without BOS with EOS, the separator. A row's draws depend on the seed, its place in the batch
    and the step alone. Raises GenerationError for a diverged model, no prompt, more tokens than the model has positions
    for, and logits that are NaN; EvictionError for a policy that the model cannot be read under, TransformError for a
    transform.
    """
    if not trained.alive:
        raise GenerationError(f"{trained.run.path}: diverged; there is nothing to generate from")
    trained.experiment.positions.refuse_decoding()
    if not prompts:
        raise GenerationError("prompts: none; at least one, which may be empty")
    if not 0 <= max_new_tokens < MOST:
        raise GenerationError(f"max_new_tokens: {max_new_tokens} is out of range; 0 to {MOST - 1}")
    ids = [_started(trained, prompt) for prompt in prompts]
    longest = max(map(len, ids)) + max_new_tokens
    policy = policy or Policy("full", _bucket(longest))
    if transform is not None:
        seen = longest if policy.name == "full" or policy.positions != "in_cache" else min(longest, policy.seen)
        trained = transforms.apply(transform, trained, seen)
    eviction.refuse(policy, trained.abstract)
    if policy.name == "full":
        _refuse_room(trained, policy, longest)
    _refuse_memory(trained, policy, len(prompts), dtype)
    loop = _Loop(trained, policy, sampling or Sampling(), dtype, on_bytes or (lambda row, content: None))
    return loop.run(ids, max_new_tokens)


def _started(trained: Trained, prompt: bytes) -> np.ndarray:
    """The ids of a prompt, at least one."""
    tokenizer = trained.tokenizer
    found = tokenizer.encode(prompt)
    if tokenizer.bos is not None and trained.experiment.data.bos != "none":
        return np.concatenate([[tokenizer.bos], found]).astype(np.int32)
    return found if len(found) else np.array([tokenizer.eos], np.int32)


def _refuse_room(trained: Trained, policy: Policy, longest: int) -> None:
    if longest > policy.slots:
        raise GenerationError(
            f"max_new_tokens: {longest} tokens with the longest prompt; the cache holds {policy.slots}"
        )
    try:
        refuse_positions(np.array([longest - 2]), trained.abstract.max_position)  # the last token is not read
    except ValueError as error:
        raise GenerationError(
            f"max_new_tokens: {longest} tokens with the longest prompt ({error}); ask for fewer, or for another cache "
            "(window, sink, recompute, block_recompute)"
        ) from None


def _refuse_memory(trained: Trained, policy: Policy, batch: int, dtype: Any) -> None:
    """Keys and values of what is kept, before and after a step, have room on the device."""
    size = 4 * trained.config.num_layers * batch * policy.seen * trained.config.model_dim * jnp.dtype(dtype).itemsize
    if policy.slots >= MOST or size > (free := memory_limit()):
        room = "" if policy.slots >= MOST else f"; {size:,} bytes, {free:,} are free"
        raise GenerationError(
            f"window: {policy.slots} tokens to be kept are too many{room}; fewer prompts or tokens, or a smaller window"
        )


def _bucket(length: int) -> int:
    return max(SHORTEST, 1 << (length - 1).bit_length())


class _State(NamedTuple):
    """What goes from step to step: logits [B,V] to draw from, what was read before, which rows have ended."""

    logits: jax.Array
    past: Any
    done: jax.Array


class _Loop:
    """The programs and the loop for one model and policy."""

    def __init__(
        self, trained: Trained, policy: Policy, sampling: Sampling, dtype: Any, on_bytes: Callable[[int, bytes], None]
    ):
        self.trained, self.policy, self.tokenizer, self.on_bytes = trained, policy, trained.tokenizer, on_bytes
        top_k = trained.config.vocab_size if sampling.top_k is None else min(sampling.top_k, trained.config.vocab_size)
        self.how = (np.float32(sampling.temperature), np.int32(top_k), np.float32(sampling.top_p))
        self.key = jax.random.key(sampling.seed)
        bos = -1 if self.tokenizer.bos is None else self.tokenizer.bos
        self.read, self.step = programs(trained.config, policy, dtype, bos, self.tokenizer.eos)

    def run(self, prompts: list[np.ndarray], count: int) -> Generated:
        if not count:
            return Generated([self._continuation(ids, [], False) for ids in prompts], 0.0, 0.0, 0.0)
        state, read_seconds = self._read(prompts)
        drawn, done, seconds = self._steps(state, count)
        continuations = []
        for ids, row, ended in zip(prompts, np.stack(drawn, axis=1), done, strict=True):
            end = int(np.argmax(row == self.tokenizer.eos)) if ended else count
            continuations.append(self._continuation(ids, row[:end], ended))
        timed = sum(len(each.ids) for each in continuations) * max(len(drawn) - 1, 0) / len(drawn)
        return Generated(continuations, read_seconds, seconds, timed / seconds if seconds else 0.0)

    def _read(self, prompts: list[np.ndarray]) -> tuple[_State, float]:
        """The state after the prompts, and the seconds that took once it was compiled."""
        arrays = _padded([_kept(self.policy, ids) for ids in prompts], self._length(max(map(len, prompts))))
        program = self.read.lower(self.trained.params, *arrays).compile()
        began = time.monotonic()
        state = jax.block_until_ready(program(self.trained.params, *arrays))
        return state, time.monotonic() - began

    def _length(self, longest: int) -> int:
        """How long prompts are padded to be: few lengths, since each is a program."""
        if self.policy.name == "recompute":
            return self.policy.seen
        if self.policy.name == "block_recompute":
            return min(_bucket(longest), self.policy.seen)
        piece = eviction.piece(self.policy, self.trained.abstract)
        if piece is None:
            return _bucket(longest)
        return piece * (1 << (math.ceil(longest / piece) - 1).bit_length())

    def _steps(self, state: _State, count: int) -> tuple[list[np.ndarray], np.ndarray, float]:
        """The ids drawn at each step [B], which rows met EOS, and the seconds of all steps but the first."""
        drawn: list[np.ndarray] = []
        waiting = None
        began = time.monotonic()
        for number in range(count):
            tokens, bad, state = self.step(self.trained.params, state, self.key, np.int32(number), *self.how)
            if waiting is not None:
                drawn.append(self._shown(*waiting))
                if number == 1:
                    began = time.monotonic()
                if (drawn[-1] == self.tokenizer.eos).all():
                    waiting = None
                    break
            waiting = (tokens, bad)
        if waiting is not None:
            drawn.append(self._shown(*waiting))
        done = (np.stack(drawn) == self.tokenizer.eos).any(axis=0)
        return drawn, done, time.monotonic() - began if len(drawn) > 1 else 0.0

    def _shown(self, tokens: jax.Array, bad: jax.Array) -> np.ndarray:
        if np.asarray(bad).any():
            raise GenerationError(f"{self.trained.run.path}: the model's logits are NaN")
        ids = np.asarray(tokens)
        for row, each in enumerate(ids):
            if each != self.tokenizer.eos:
                self.on_bytes(row, self.tokenizer.decode(ids[row : row + 1]))
        return ids

    def _continuation(self, prompt: np.ndarray, ids: Any, ended: bool) -> Continuation:
        ids = np.asarray(ids, np.int32)
        first = eviction.first_evicted(self.policy)
        evicted = None if first is None or first > len(prompt) + len(ids) - 2 else first - len(prompt) + 1
        content = self.tokenizer.decode(ids)
        return Continuation(prompt, ids, content, "eos" if ended else "length", evicted)


def _kept(policy: Policy, ids: np.ndarray) -> np.ndarray:
    """What of a prompt is read at all, where no cache decides that."""
    if policy.name == "recompute":
        return ids[-policy.seen :]
    if policy.name == "block_recompute" and len(ids) > policy.seen:
        stride = policy.seen - policy.reread
        return ids[stride * math.ceil((len(ids) - policy.seen) / stride) :]
    return ids


def _padded(rows: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions int32 [B,length], rows padded on the left (position -1)."""
    tokens = np.stack([np.pad(ids, (length - len(ids), 0)) for ids in rows]).astype(np.int32)
    positions = np.stack([np.arange(length) - (length - len(ids)) for ids in rows])
    return tokens, np.maximum(positions, -1).astype(np.int32)


@functools.lru_cache(maxsize=16)
def programs(config: GPTConfig, policy: Policy, dtype: Any, bos: int, eos: int) -> tuple[Any, Any]:
    """(read: params, tokens, positions -> state; step: params, state, key, number, ... -> tokens, NaN?, state)."""
    graph = nnx.graphdef(abstract(config))
    first, follow = _READERS[policy.name]

    def read(params, tokens, positions):
        logits, past = first(policy, nnx.merge(graph, params), tokens, positions, dtype)
        return _State(logits, past, jnp.zeros(tokens.shape[0], bool))

    def step(params, state, key, number, temperature, top_k, top_p):
        logits = state.logits if bos < 0 else state.logits.at[:, bos].set(-jnp.inf)
        bad = jnp.isnan(logits).any(axis=-1) & ~state.done
        tokens = draw(logits, jax.random.fold_in(key, number), temperature, top_k, top_p)
        tokens = jnp.where(state.done, eos, tokens)
        done = state.done | (tokens == eos)
        logits, past = follow(policy, nnx.merge(graph, params), tokens, done, state.past)
        return tokens, bad, _State(logits, past, done)

    return jax.jit(read), jax.jit(step, donate_argnums=1)


def _read_cached(
    policy: Policy, model: GPT, tokens: jax.Array, positions: jax.Array, dtype: Any
) -> tuple[jax.Array, Cache]:
    """Through the cache, in pieces that it allows."""
    batch, length = tokens.shape
    cache = eviction.cache(policy, model, batch, dtype)
    piece = eviction.piece(policy, model) or min(length, PIECE)

    def advance(cache, part):
        ids, places = part
        logits, cache = eviction.advance(policy, model, ids, places, cache)
        return cache, logits[:, -1]

    parts = [jnp.moveaxis(each.reshape(batch, -1, piece), 1, 0) for each in (tokens, positions)]
    cache, last = jax.lax.scan(advance, cache, tuple(parts))
    return last[-1], cache


def _follow_cached(policy: Policy, model: GPT, tokens: jax.Array, done: jax.Array, cache: Cache):
    positions = jnp.where(done, -1, cache.next)[:, None]
    logits, cache = eviction.advance(policy, model, tokens[:, None], positions, cache)
    return logits[:, 0], cache


def _read_context(policy: Policy, model: GPT, tokens: jax.Array, positions: jax.Array, dtype: Any):
    """No cache: the last tokens [B,T] themselves, and how many of them there are."""
    return model(tokens, positions)[:, -1], (tokens, jnp.max(positions, axis=1) + 1)


def _follow_context(policy: Policy, model: GPT, tokens: jax.Array, done: jax.Array, past: Any):
    context, count = past
    length = context.shape[1]
    context = jnp.concatenate([context[:, 1:], tokens[:, None]], axis=1)
    count = jnp.minimum(count + 1, length)
    positions = jnp.maximum(jnp.arange(length) - (length - count)[:, None], -1)
    return model(context, positions)[:, -1], (context, count)


def _read_block(policy: Policy, model: GPT, tokens: jax.Array, positions: jax.Array, dtype: Any):
    logits, cache = model.decode(tokens, positions, model.cache(tokens.shape[0], policy.seen, dtype=dtype))
    return logits[:, -1], cache


def _follow_block(policy: Policy, model: GPT, tokens: jax.Array, done: jax.Array, cache: Cache):
    """A row without room reads the last half of its tokens anew first."""
    full = (cache.next >= policy.seen) & ~done

    def reread(cache):
        kept = policy.reread
        empty = model.cache(cache.pos.shape[0], policy.seen, dtype=cache.layers[0].keys.dtype)
        positions = jnp.where(full[:, None], jnp.arange(kept), -1)
        _, again = model.decode(cache.tokens[:, policy.seen - kept :], positions, empty)
        layers = jax.tree.map(lambda new, old: _rows(full, new, old, 1), again.layers, cache.layers)
        rest = {name: _rows(full, getattr(again, name), getattr(cache, name), 0) for name in ("tokens", "pos", "next")}
        return dataclasses.replace(cache, layers=layers, **rest)

    cache = jax.lax.cond(jnp.any(full), reread, lambda cache: cache, cache)
    return _follow_cached(Policy("full", policy.seen), model, tokens, done, cache)


def _rows(which: jax.Array, new: jax.Array, old: jax.Array, axis: int) -> jax.Array:
    """`new` in these rows of the batch, `old` in the others."""
    return jnp.where(which.reshape([-1 if each == axis else 1 for each in range(new.ndim)]), new, old)


_READERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **dict.fromkeys(eviction.CACHED, (_read_cached, _follow_cached)),
    "recompute": (_read_context, _follow_context),
    "block_recompute": (_read_block, _follow_block),
}
