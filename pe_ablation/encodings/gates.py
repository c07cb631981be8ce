"""Encodings without distances: gates that read the content say how much lies between a query and a key."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from pe_ablation.encodings.base import About, Encoding, Scores, Sizes, Tokens, normal

STEP = 16.0  # of FoX's coarse sums: all its multiples up to 2^28 are float32 numbers


class CoPE(Encoding):
    """l_ij = (q_i . k_j + q_i . e[p_ij]) / sqrt(D), p_ij = sum of sigmoid(q_i . k_t / sqrt(D)) over j <= t <= i.

    The gates count those keys that matter to a query; p is limited to the last of `count` rows (default: training
    length + 1) and e taken linearly between two rows. `gate_scale=False` leaves 1/sqrt(D) out of the gates;
    `after_scale=True` adds q_i . e without it. e starts at 0, shared by all heads and one per layer.
    Source: Golovneva et al. 2024, arXiv:2405.18719.
    """

    about: ClassVar[About] = About(
        formula="l_ij = (q_i . k_j + q_i . e[p_ij]) / sqrt(D), p_ij = sum_(t=j..i) sigmoid(q_i . k_t / sqrt(D))",
        source="Golovneva et al. 2024, arXiv:2405.18719",
        parameters="(count or L + 1) * D per layer",
        beyond="partly: counts end at the last row, which serves all far keys, and trains only if gates add up to it",
        cost=(
            "all keys of a query at once: no blocks of keys, no fused kernel; a sigmoid, a sum and two gathers a "
            "logit, count D multiplications a query and head"
        ),
    )
    scores = Scores.ROW
    per_layer: ClassVar[tuple[str, ...]] = ("table",)

    def __init__(
        self,
        sizes: Sizes,
        rngs: nnx.Rngs,
        *,
        count: int | None = None,
        gate_scale: bool = True,
        after_scale: bool = False,
    ):
        del rngs
        count = sizes.train_length + 1 if count is None else count
        if count < 2:
            raise ValueError(f"encoding.options.count: {count} rows leave nothing to count; at least 2")
        self.count = count
        self.gate_scale = gate_scale
        self.after_scale = after_scale
        self.table = nnx.Param(jnp.zeros((count, sizes.head_dim), jnp.float32))

    def places(self, a: jax.Array, k: Tokens, head_dim: int) -> jax.Array:
        """p [B,H,T,S] of scaled scores, -inf where a key is not seen."""
        gates = jax.nn.sigmoid(a if self.gate_scale else a * head_dim**0.5)
        order = jnp.argsort(k.pos, axis=1)
        ordered = jnp.take_along_axis(gates, order[:, None, None], axis=-1)
        sums = jax.lax.cumsum(ordered, axis=3, reverse=True)
        sums = jnp.take_along_axis(sums, jnp.argsort(order, axis=1)[:, None, None], axis=-1)
        return jnp.minimum(sums, self.count - 1)

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        size = q.vec.shape[-1]
        place = self.places(a, k, size)
        by_row = jnp.einsum("bthd,nd->bhtn", q.vec.astype(jnp.float32), self.table[...])
        low = jnp.floor(place).astype(jnp.int32)
        below, above = (
            jnp.take_along_axis(by_row, row, axis=-1) for row in (low, jnp.minimum(low + 1, self.count - 1))
        )
        between = below + (place - low) * (above - below)
        return a + between * (1.0 if self.after_scale else size**-0.5)


class FoX(Encoding):
    """l_ij + sum of log f_t over j < t <= i, f_t = sigmoid(w_h . x_t + b_h), x_t the block's normalised input.

    A forget gate per token and head. The sums are differences of cumulative ones, kept as a multiple of 16 and a small
    rest, so that a long text costs no precision. w ~ N(0, 0.02); b starts at `bias`: 0 in the authors' code, where half
    is forgotten at every token, 5 in x-transformers. Parameters are one set per layer.
    Source: Lin et al. 2025, arXiv:2503.02130.
    """

    about: ClassVar[About] = About(
        formula="l_ij = q_i . k_j / sqrt(D) + sum_(t=j+1..i) log f_t, f_t = sigmoid(w_h . x_t + b_h)",
        source="Lin et al. 2025, arXiv:2503.02130",
        parameters="M * H + H per layer",
        beyond=(
            "window: defined everywhere; what is forgotten stays so, at any distance, which keeps the context near "
            "its trained length"
        ),
        cost=(
            "M multiplications and a logarithm a token and head, two numbers a token and head kept beside the keys, "
            "and four additions a logit; a fused kernel serves if it takes the cumulative sums of both sides"
        ),
    )
    scores = Scores.CONTENT
    per_layer: ClassVar[tuple[str, ...]] = ("gate", "bias")
    reads_positions: bool = False

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, bias: float = 0.0):
        self.gate = normal(rngs, sizes.model_dim, sizes.num_heads)
        self.bias = nnx.Param(jnp.full(sizes.num_heads, bias, jnp.float32))

    def state(self, x: jax.Array, pos: jax.Array, last: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Cumulative log f [B,T,H,2]: a multiple of STEP, and the rest."""
        x = x.astype(jnp.float32)
        kept = jax.nn.log_sigmoid(jnp.matmul(x, self.gate[...], precision="highest") + self.bias[...])
        kept = jnp.where((pos >= 0)[..., None], kept, 0.0)
        total = jax.lax.associative_scan(_added, jnp.stack([jnp.zeros_like(kept), kept], axis=-1), axis=1)
        total = total if last is None else _added(last[:, None], total)
        return total, total[:, -1]

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        assert q.state is not None and k.state is not None
        queries, keys = jnp.swapaxes(q.state, 1, 2)[:, :, :, None], jnp.swapaxes(k.state, 1, 2)[:, :, None]
        return a + ((queries[..., 0] - keys[..., 0]) + (queries[..., 1] - keys[..., 1]))


def _added(one: jax.Array, other: jax.Array) -> jax.Array:
    """The sum of two numbers that are each a multiple of STEP and a rest [...,2]."""
    coarse, rest = one[..., 0] + other[..., 0], one[..., 1] + other[..., 1]
    moved = jax.lax.stop_gradient(STEP * jnp.round(rest / STEP))
    return jnp.stack([coarse + moved, rest - moved], axis=-1)
