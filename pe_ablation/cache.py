"""What a decoder keeps of the tokens before: keys as projected, values, states; where each token stands, in slots.

A slot is a function of the position, so nothing is moved or concatenated: p itself in a cache that keeps all; with S
sinks and R recent tokens p < S ? p : S + (p - S) mod R (Xiao et al. 2024, arXiv:2309.17453). Positions decide who sees
whom. Letters: B batch, T new tokens, C slots, H heads, D head dim, F state, G groups of layers.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pe_ablation.encodings.base import Tokens


class Layer(NamedTuple):
    """What one layer keeps: keys and values [B,C,H,D], an encoding's states float32 [B,C,H,F] and carry [B,H,F]."""

    keys: jax.Array
    values: jax.Array
    states: jax.Array | None
    carry: jax.Array | None


class Past(NamedTuple):
    """One layer's share of the cache, with what all layers have: slots' positions [B,C], where new tokens go.

    source [B,C]: which of the T new tokens a slot takes, -1 for none.
    """

    layer: Layer
    pos: jax.Array
    source: jax.Array

    def followed_by(self, keys: Tokens, values: jax.Array) -> tuple[Tokens, jax.Array]:
        """The cached tokens and new ones behind them [B,C+T], keys and values in the new ones' dtype."""
        pos = jnp.concatenate([self.pos, jnp.broadcast_to(keys.pos, keys.vec.shape[:2])], axis=1)
        state = None if keys.state is None or self.layer.states is None else _joined(self.layer.states, keys.state)
        return Tokens(_joined(self.layer.keys, keys.vec), pos, state), _joined(self.layer.values, values)

    def written(self, keys: Tokens, values: jax.Array, carry: jax.Array | None) -> Layer:
        """The layer once the new tokens are in their slots."""
        return Layer(
            _taken(self.layer.keys, keys.vec, self.source),
            _taken(self.layer.values, values, self.source),
            None
            if keys.state is None or self.layer.states is None
            else _taken(self.layer.states, keys.state, self.source),
            carry,
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "tokens", "pos", "next"],
    meta_fields=["sinks", "recent"],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of a decoder, rows of any age.

    layers: one `Layer` a slot of the pattern, stacked [G, ...]; tokens and pos int32 [B,C], pos -1 for an empty slot;
    next int32 [B]: one past the last position of a row. `recent` None: nothing is ever dropped.
    """

    layers: tuple[Layer, ...]
    tokens: jax.Array
    pos: jax.Array
    next: jax.Array
    sinks: int = 0
    recent: int | None = None

    @classmethod
    def empty(cls, layers: tuple[Layer, ...], batch: int, slots: int, sinks: int, recent: int | None) -> "Cache":
        """Raises ValueError where slots, sinks and recent tokens don't add up."""
        if slots < 1 or sinks < 0 or (recent is not None and (recent < 1 or sinks + recent != slots)):
            raise ValueError(
                f"cache: {slots} slots for {sinks} sinks and {recent} recent tokens; sinks + recent, all >= 1"
            )
        empty = jnp.full((batch, slots), -1, jnp.int32)
        return cls(layers, jnp.zeros_like(empty), empty, jnp.zeros(batch, jnp.int32), sinks, recent)

    @property
    def size(self) -> int:
        """How many tokens a row can hold."""
        return self.pos.shape[1]

    @property
    def bytes(self) -> int:
        """Of all arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def slot(self, pos: jax.Array) -> jax.Array:
        """The slot of each position."""
        if self.recent is None:
            return pos
        return jnp.where(pos < self.sinks, pos, self.sinks + (pos - self.sinks) % self.recent)

    def fits(self, pos: jax.Array) -> jax.Array:
        """bool [B,T]: which positions have a slot."""
        return jnp.ones_like(pos, bool) if self.recent is not None else pos < self.size

    def refuse_overflow(self, pos: Any) -> None:
        """ValueError for a concrete position past the end of a cache that drops nothing; traced ones pass."""
        if self.recent is not None or isinstance(pos, Tracer) or not np.size(pos):
            return
        if (last := int(np.asarray(pos).max())) >= self.size:
            raise ValueError(
                f"position {last} is past the end of a cache of {self.size} tokens; give it more, or let it drop some "
                "(a window, or sinks and a window)"
            )

    def followed_by(self, tokens: jax.Array, pos: jax.Array, layers: tuple[Layer, ...]) -> "Cache":
        """The cache with the new tokens written; `layers` have them already."""
        source = self.source(pos)
        return dataclasses.replace(
            self,
            layers=layers,
            tokens=_taken(self.tokens, tokens, source),
            pos=_taken(self.pos, pos, source),
            next=jnp.maximum(self.next, jnp.max(pos, axis=1, initial=-1) + 1),
        )

    def source(self, pos: jax.Array) -> jax.Array:
        """int32 [B,C]: which of new tokens at [B,T] each slot takes, of several the last by position; -1: none."""
        goes = (self.slot(pos)[:, :, None] == jnp.arange(self.size)) & (pos >= 0)[:, :, None]  # [B,T,C]
        best = jnp.argmax(jnp.where(goes, pos[:, :, None], -1), axis=1)
        return jnp.where(jnp.any(goes, axis=1), best, -1).astype(jnp.int32)


def _joined(old: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.concatenate([old.astype(new.dtype), new], axis=1)


def _taken(old: jax.Array, new: jax.Array, source: jax.Array) -> jax.Array:
    """old [B,C,...] with the new tokens [B,T,...] that slots take (see `Past.source`)."""
    index = source.reshape(*source.shape, *[1] * (old.ndim - 2))
    found = new if new.shape[1] == 1 else jnp.take_along_axis(new, jnp.maximum(index, 0), axis=1)
    return jnp.where(index >= 0, found.astype(old.dtype), old)
