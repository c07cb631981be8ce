"""Which positions a window's tokens are shown at, apart from what an encoding makes of them.

    contiguous     0, 1, 2, ... in every window
    randomized     T of 0..maximum-1 drawn without replacement and sorted, anew for each batch (Ruoss et al. 2023,
                   arXiv:2305.16843); `evaluation` says which are taken there
    interpolated   floor(i * maximum / T) in a window of T tokens, in training and evaluation: a grid over 0..maximum-1
                   that is the coarser the shorter the window (the idea of Chen et al. 2023, arXiv:2306.15595, with
                   whole positions)
    documents      from 0 in each document of a packed training window, and no token sees another document's

Attention masks and windows count tokens, whatever positions the tokens are shown at.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pe_ablation.attention import PLAIN, View


class Placed(NamedTuple):
    """Where T tokens in order are shown, int32 [B or 1,T], and of which documents they are, int32 [B,T] or None."""

    positions: jax.Array
    segments: jax.Array | None = None

    def view(self) -> View:
        """What attention is told: the token at place p stands at positions[p]."""

        def moved(place: jax.Array) -> jax.Array:
            batch, length = max(place.shape[0], self.positions.shape[0]), self.positions.shape[1]
            rows = jnp.broadcast_to(self.positions, (batch, length))
            places = jnp.broadcast_to(jnp.clip(place, 0, length - 1), (batch, place.shape[1]))
            return jnp.take_along_axis(rows, places, axis=1)

        return PLAIN._replace(query=moved, key=moved)


def randomized(key: jax.Array, length: int, maximum: int) -> Placed:
    """`length` different positions below `maximum`, ascending."""
    drawn = jax.random.choice(key, maximum, (length,), replace=False)
    return Placed(jnp.sort(drawn).astype(jnp.int32)[None])


def drawn_once(length: int, maximum: int) -> Placed:
    """As `randomized`, by the length alone: every evaluation of a length draws the same."""
    generator = np.random.Generator(np.random.Philox(key=[length, maximum]))
    return Placed(jnp.asarray(np.sort(generator.choice(maximum, length, replace=False)), jnp.int32)[None])


def spread(length: int, maximum: int) -> Placed:
    """floor(i * maximum / length) for i = 0..length-1; length <= maximum."""
    return Placed(jnp.asarray(np.arange(length) * maximum // length, jnp.int32)[None])


def documents(tokens: jax.Array, begins: jax.Array) -> Placed:
    """tokens [B,T], where documents begin in them, bool [B,T]: positions in, and numbers of, documents, from 0 each."""
    place = jnp.arange(tokens.shape[1])
    start = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    return Placed((place - start).astype(jnp.int32), jnp.cumsum(begins, axis=1).astype(jnp.int32))
