"""Encodings that use hooks which no registered one uses yet: values, states, all keys of a query."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation.encodings import Encoding, Scores, distance


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


class Shaw(Encoding):
    """A learned vector per clipped distance, added to keys and to values."""

    scores = Scores.CONTENT

    def __init__(self, sizes, rngs, *, clip: int = 3):
        self.clip = clip
        self.keys = nnx.Param(draw(30, clip + 1, sizes.head_dim))
        self.vectors = nnx.Param(draw(31, clip + 1, sizes.head_dim))

    def _rows(self, table, q, k):
        return table[...][jnp.minimum(distance(q, k), self.clip)]

    def logits(self, a, q, k):
        return a + jnp.einsum("bthd,btsd->bhts", q.vec, self._rows(self.keys, q, k)) / np.sqrt(q.vec.shape[-1])

    def values(self, w, q, k):
        return jnp.einsum("bhts,btsd->bthd", w, self._rows(self.vectors, q, k))


class Fox(Encoding):
    """A forget gate per token and head; the log of a path's gates is a difference of their cumulative sums."""

    scores = Scores.CONTENT

    def __init__(self, sizes, rngs):
        self.gate = nnx.Param(draw(32, sizes.model_dim, sizes.num_heads))

    def state(self, x, pos, last):
        forget = jax.nn.log_sigmoid(x.astype(jnp.float32) @ self.gate[...])
        total = jnp.cumsum(jnp.where((pos >= 0)[..., None], forget, 0.0), axis=1)[..., None]
        total = total if last is None else total + last[:, None]
        return total, total[:, -1]

    def logits(self, a, q, k):
        return a + jnp.swapaxes(q.state, 1, 2) - jnp.transpose(k.state, (0, 2, 3, 1))


class Cope(Encoding):
    """Positions counted by gates: all keys of a query are needed, in the order of their positions."""

    scores = Scores.ROW

    def __init__(self, sizes, rngs, *, count: int = 4):
        self.count = count
        self.table = nnx.Param(draw(33, sizes.head_dim, count))

    def logits(self, a, q, k):
        gates = jax.nn.sigmoid(a)
        later = (k.pos[:, None, :] >= k.pos[:, :, None]).astype(jnp.float32)  # [B,S key,S at or after it]
        place = jnp.minimum(jnp.einsum("bhts,bjs->bhtj", gates, later), self.count - 1)
        by_place = jnp.einsum("bthd,dn->bhtn", q.vec, self.table[...])
        low = jnp.floor(place).astype(jnp.int32)
        below, above = (
            jnp.take_along_axis(by_place, jnp.minimum(each, self.count - 1), axis=-1) for each in (low, low + 1)
        )
        return a + below + (place - low) * (above - below)
