"""Encodings whose score depends on the query's content as well as on the distance."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from pe_ablation.encodings.base import (
    About,
    Encoding,
    Scores,
    Sizes,
    Tokens,
    angles,
    distance,
    geometric,
    normal,
)
from pe_ablation.gradients import binned, pick


class TransformerXL(Encoding):
    """l_ij = [(q_i + u) . k_j + (q_i + v) . (W_R R_{i-j})] / sqrt(D), R_d = [sin(d theta), cos(d theta)].

    u, v [H,D] are shared by all layers, W_R [M,H,D] is one per layer, as in the paper's code. `clamp` limits the
    distance. Without it the second product is split by the angle sum into a query and a key that are M wider, so it
    needs no array of distances. Needs an even model dim.
    Source: Dai et al. 2019, arXiv:1901.02860, section 3.3.
    """

    about: ClassVar[About] = About(
        formula="l_ij = [(q_i + u) . k_j + (q_i + v) . (W_R R_(i-j))] / sqrt(D)",
        source="Dai et al. 2019, arXiv:1901.02860",
        parameters="2 * H * D (shared) + M * H * D per layer",
        beyond=(
            "partly: sinusoids of unseen distances are bounded, but what W_R makes of them is untrained; with a "
            "clamped distance none is unseen"
        ),
        cost=(
            "M D multiplications a token and head for W_R, then queries and keys D + M wide instead of D, in a plain "
            "product; with clamp D wide, and (clamp + 1) D multiplications a query and head and a gather a logit"
        ),
    )
    per_layer: ClassVar[tuple[str, ...]] = ("projection",)

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, clamp: int | None = None):
        if sizes.model_dim % 2:
            raise ValueError(f"model_dim: {sizes.model_dim} is odd; a sinusoid needs an even number of channels")
        if clamp is not None and clamp < 1:
            raise ValueError(f"encoding.options.clamp: {clamp} is not a distance; at least 1")
        self.clamp = clamp
        self.scores = Scores.NONE if clamp is None else Scores.CONTENT
        self.u = normal(rngs, sizes.num_heads, sizes.head_dim)
        self.v = normal(rngs, sizes.num_heads, sizes.head_dim)
        self.projection = normal(rngs, sizes.model_dim, sizes.num_heads, sizes.head_dim)

    def query(self, q: jax.Array, pos: jax.Array) -> jax.Array:
        content = q + self.u[...].astype(q.dtype)
        if self.clamp is not None:
            return content
        cos, sin = self._phases(pos)
        weight = jnp.einsum("bthd,mhd->bthm", q.astype(jnp.float32) + self.v[...], self.projection[...])
        of_sin, of_cos = jnp.split(weight, 2, axis=-1)
        position = jnp.concatenate([of_sin * sin + of_cos * cos, of_cos * sin - of_sin * cos], axis=-1)
        return jnp.concatenate([content, position.astype(q.dtype)], axis=-1)

    def key(self, k: jax.Array, pos: jax.Array) -> jax.Array:
        if self.clamp is not None:
            return k
        phases = jnp.concatenate(self._phases(pos), axis=-1).astype(k.dtype)
        return jnp.concatenate([k, jnp.broadcast_to(phases, (*k.shape[:-1], phases.shape[-1]))], axis=-1)

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        if self.clamp is None:
            return a
        cos, sin = self._phases(jnp.arange(self.clamp + 1)[None])
        table = jnp.einsum("cm,mhd->chd", jnp.concatenate([sin, cos], -1)[0, :, 0], self.projection[...])
        by_distance = jnp.einsum("bthd,chd->bhtc", q.vec.astype(jnp.float32) + self.v[...], table)
        index = jnp.minimum(distance(q, k), self.clamp)[:, None]
        return a + jnp.take_along_axis(by_distance, index, axis=-1) * q.vec.shape[-1] ** -0.5

    def _phases(self, pos: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin of the position's angles, float32 [B or 1,T,1,M/2] each."""
        angle = angles(pos, geometric(self.projection.shape[0] // 2, 10_000.0))[:, :, None, :]
        return jnp.cos(angle), jnp.sin(angle)


class Shaw(Encoding):
    """l_ij = q_i . (k_j + a^K_c) / sqrt(D), o_i = sum_j w_ij (v_j + a^V_c), c = min(i - j, clip).

    A learned vector per distance up to `clip`, clip + 1 of them, since all keys are behind; `values=False` leaves out
    a^V. Tables are shared by all heads and one per layer (the paper's base model has one per head, too).
    Source: Shaw et al. 2018, arXiv:1803.02155, section 3.
    """

    about: ClassVar[About] = About(
        formula="l_ij = q_i . (k_j + a^K_c) / sqrt(D), o_i = sum_j w_ij (v_j + a^V_c), c = min(i - j, clip)",
        source="Shaw et al. 2018, arXiv:1803.02155",
        parameters="(clip + 1) * D * (1 + values) per layer",
        beyond=(
            "partly: the last vector serves all far distances, and was trained if clip < L, but ever more keys share it"
        ),
        cost=(
            "(clip + 1) D multiplications a query and head and a gather a logit; for a^V a one-hot product, clip + 1 "
            "multiplications a weight, and then no fused kernel, which keeps no weights"
        ),
    )
    scores = Scores.CONTENT
    per_layer: ClassVar[tuple[str, ...]] = ("keys", "vectors")

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, clip: int = 16, values: bool = True):
        if clip < 1:
            raise ValueError(f"encoding.options.clip: {clip} is not a distance; at least 1")
        self.clip = clip
        self.keys = normal(rngs, clip + 1, sizes.head_dim)
        self.vectors = normal(rngs, clip + 1, sizes.head_dim) if values else None

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        by_distance = jnp.einsum("bthd,cd->bhtc", q.vec.astype(jnp.float32), self.keys[...])
        return a + pick(by_distance, self._index(q, k)) * q.vec.shape[-1] ** -0.5

    def values(self, w: jax.Array, q: Tokens, k: Tokens) -> jax.Array | None:
        if self.vectors is None:
            return None
        return jnp.einsum("bhtc,cd->bthd", binned(w, self._index(q, k), self.clip + 1), self.vectors[...])

    def _index(self, q: Tokens, k: Tokens) -> jax.Array:
        return jnp.minimum(distance(q, k), self.clip)
