"""What a decoder keeps of an endless text, and at which positions it sees what it kept.

Policies: `full` keeps all; `window` the last W tokens; `sink` the first S and the last R = W - S (StreamingLLM, Xiao et
al. 2024, arXiv:2309.17453); `recompute` reads the last tokens anew for each one; `block_recompute` half of them
whenever the cache is full. W counts cached tokens. Evicting after a token was read, as in the paper, a token sees W
others and itself; evicting before it, W - 1 others.

Position rules: `in_cache` numbers what is kept by age, 0 to W - 1, and the new token W, as in the paper; `original`
keeps each token's place in the text; `capped` too, but shows the sinks no farther away than `limit` (LM-Infinite, Han
et al. 2024, arXiv:2308.16137). Encodings added at the input are in the keys and values of every layer, which no rule
can move: `absolute` names what is done instead.

    saturate      a new token gets the number of cached ones: once full, all new ones the same
    ring          S + (p - S) mod (n - S) of n trained positions: trained vectors, their order broken at each wrap
    layer0_fix    positions in the cache for the first layer's keys and values; those of deeper layers stay

In parallel: where only distances count, reading a text token by token through the cache is one pass with two views of
it. A pair of a query i and a recent key j has the positions (i, j), a pair of i and a sink j (min(i, W), j).
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pe_ablation.attention import PLAIN, View
from pe_ablation.cache import Cache
from pe_ablation.model import GPT

Name = Literal["full", "window", "sink", "recompute", "block_recompute"]
Evict = Literal["after", "before"]
Rule = Literal["in_cache", "original", "capped"]
Absolute = Literal["saturate", "ring", "layer0_fix"]
CACHED = ("full", "window", "sink")


def first_missing(window: int, evict: Evict) -> int:
    """The position of the first token that doesn't see all before it, with `window` cached tokens."""
    return window + (evict == "after")


def as_in_training(train_length: int, evict: Evict) -> int:
    """So many cached tokens that a token sees as many as in training, itself among them."""
    return train_length - (evict == "after")


class EvictionError(ValueError):
    """A policy that cannot be honoured; the message names the field."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """One policy; `slots` is W (of `full`, how many tokens there is room for). Raises EvictionError by field."""

    name: Name
    slots: int
    sinks: int = 0
    evict: Evict = "after"
    positions: Rule = "in_cache"
    limit: int | None = None
    absolute: Absolute | None = None

    def __post_init__(self):
        if self.sinks < 0 or (self.sinks and self.name != "sink"):
            raise EvictionError(f"sinks: {self.sinks} with the cache {self.name!r}; 'sink' has some, others 0")
        if self.name == "full":
            return
        least = self.sinks + (1 if self.evict == "after" else 2)
        if self.slots < least:
            raise EvictionError(
                f"window: {self.slots} cached tokens leave none for recent ones beside {self.sinks} sinks, evicting "
                f"{self.evict} reading; at least {least}"
            )
        if (self.positions == "capped") != (self.limit is not None):
            raise EvictionError(
                f"limit: {self.limit} with positions {self.positions!r}; 'capped' needs one, others none"
            )
        if self.limit is not None and self.limit < self.slots:
            raise EvictionError(f"limit: {self.limit} is nearer than recent tokens are; at least {self.slots}")
        if self.absolute is not None and (self.positions != "in_cache" or self.name not in CACHED):
            raise EvictionError(
                f"absolute: {self.absolute!r} goes with positions 'in_cache' and the cache 'window' or 'sink'"
            )

    @property
    def kept(self) -> int:
        """How many tokens are in the cache when the next one is read."""
        return self.slots - (self.name != "full" and self.evict == "before")

    @property
    def seen(self) -> int:
        """How many tokens a token sees at most, itself among them."""
        return self.kept + 1

    @property
    def recent(self) -> int | None:
        """How many of the kept ones are recent; None: nothing is dropped."""
        return None if self.name == "full" else self.kept - self.sinks

    @property
    def reread(self) -> int:
        """How many tokens `block_recompute` reads anew when there is no more room: half of them."""
        return self.seen // 2

    def describe(self) -> dict[str, Any]:
        """The fields that are set, for records."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def refuse(policy: Policy, model: GPT) -> None:
    """EvictionError where the model cannot be read under the policy."""
    limit = model.max_position
    if policy.name == "full":
        return
    if not model.absolute:
        if policy.absolute is not None:
            raise EvictionError(f"absolute: {policy.absolute!r} is for encodings added at the input, which this isn't")
        return
    if policy.name in CACHED and policy.positions == "in_cache" and policy.absolute is None:
        raise EvictionError(
            "absolute: the encoding is added at the input, so cached keys and values cannot be moved; name what is to "
            "be done instead: saturate, ring or layer0_fix; or the cache recompute or block_recompute, or positions "
            "original"
        )
    if policy.positions == "capped":
        raise EvictionError("positions: 'capped' limits distances, which an encoding added at the input doesn't see")
    if limit is not None and policy.absolute not in ("saturate", "ring") and policy.seen > limit:
        raise EvictionError(
            f"window: {policy.slots} cached tokens, evicting {policy.evict} reading, need {policy.seen} positions; "
            f"the encoding has {limit}"
        )
    if policy.absolute == "ring" and _trained(model) <= policy.sinks:
        raise EvictionError(f"sinks: {policy.sinks} leave none of the encoding's {_trained(model)} positions")


def in_parallel(policy: Policy, model: GPT) -> bool:
    """Whether many tokens can be read at once: the same numbers as token by token."""
    if policy.name in CACHED and policy.absolute != "layer0_fix":
        moved = policy.positions == "in_cache" and policy.name != "full" and policy.absolute is None
        return not moved or (model.shift_invariant and not model.row)
    return False


def cache(policy: Policy, model: GPT, batch: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache for `batch` rows under a policy that has one."""
    if policy.name not in CACHED:
        raise EvictionError(f"cache: {policy.name!r} keeps none")
    return model.cache(batch, policy.kept, sinks=policy.sinks, recent=policy.recent, dtype=dtype)


def advance(
    policy: Policy, model: GPT, tokens: jax.Array, positions: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """The next tokens int32 [B,T] of each row, at positions [B,T] (-1: none) -> logits float32 [B,T,V], the cache.

    T is 1, or at most `policy.recent` where the policy can be read in parallel. Raises EvictionError for more.
    """
    length = tokens.shape[1]
    most = piece(policy, model)
    if most is not None and length > most:
        raise EvictionError(f"tokens: {length} at once; at most {most} under this policy")
    if policy.absolute == "layer0_fix":
        cache = _with_first_layer_moved(policy, model, cache)
    return model.decode(
        tokens,
        positions,
        cache,
        views=views(policy, model, length, cache.next),
        embed_positions=embedded(policy, model, positions),
    )


def piece(policy: Policy, model: GPT) -> int | None:
    """How many tokens may be read at once; None: any number."""
    return policy.recent if in_parallel(policy, model) else 1


def views(policy: Policy, model: GPT, length: int, after: jax.Array) -> tuple[View, ...]:
    """How `length` tokens that follow `after` [B] others see the cache and each other.

    With all cached ones in a numbering of their own, one token needs one view; several take two.
    """
    kept, sinks = policy.kept, policy.sinks
    if policy.name == "full" or policy.positions == "original" or model.row:
        return ()
    if policy.positions == "capped":
        limit = policy.limit or 0
        far = View(
            lambda pos: jnp.full_like(pos, limit),
            jnp.zeros_like,
            lambda query, key: (key < sinks) & (query - key > limit),
            sinks,
        )
        return (PLAIN, far) if sinks else ()
    if length == 1:
        key = functools.partial(_numbered, policy, after)
        return (PLAIN._replace(query=lambda pos: jnp.minimum(pos, kept), key=key),)
    gone = _gone(policy, after)

    def shifted(pos):
        return jnp.maximum(pos - gone, 0)

    recent = PLAIN._replace(query=shifted, key=shifted)
    first = View(lambda pos: jnp.minimum(pos, kept), lambda pos: pos, lambda query, key: key < sinks, sinks)
    return (recent, first) if sinks else (recent,)


def _gone(policy: Policy, after: jax.Array) -> jax.Array:
    """int32 [B,1]: how many of the tokens before are no longer kept."""
    return jnp.maximum(after - policy.kept, 0)[:, None]


def _numbered(policy: Policy, after: jax.Array, pos: jax.Array) -> jax.Array:
    """Kept tokens' positions in the cache, by age; theirs in the text are `pos` [B,C]."""
    return jnp.where(pos < policy.sinks, pos, pos - _gone(policy, after))


def embedded(policy: Policy, model: GPT, positions: jax.Array) -> jax.Array | None:
    """The positions that an encoding added at the input is shown; None: those in the text."""
    if policy.absolute is None:
        return None
    if policy.absolute == "ring":
        return jnp.where(
            positions < policy.sinks,
            positions,
            policy.sinks + (positions - policy.sinks) % (_trained(model) - policy.sinks),
        )
    last = policy.kept if policy.absolute == "layer0_fix" else min(policy.kept, _trained(model) - 1)
    return jnp.minimum(positions, last)


def first_evicted(policy: Policy) -> int | None:
    """The position of the first token that doesn't see all before it; None: each does."""
    return None if policy.name == "full" else first_missing(policy.slots, policy.evict)


def _trained(model: GPT) -> int:
    """How many positions the encoding has, or has seen in training."""
    return model.max_position or model.config.train_length


def _with_first_layer_moved(policy: Policy, model: GPT, cache: Cache) -> Cache:
    """The cache with the first layer's keys and values of its tokens where these are in the cache."""
    keys, values = model.first_layer(model.embed(cache.tokens, _numbered(policy, cache.next, cache.pos)))
    first, *rest = cache.layers
    first = first._replace(
        keys=first.keys.at[0].set(keys.astype(first.keys.dtype)),
        values=first.values.at[0].set(values.astype(first.values.dtype)),
    )
    return dataclasses.replace(cache, layers=(first, *rest))
