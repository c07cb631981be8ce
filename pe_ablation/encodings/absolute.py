"""Encodings added to the input: the sinusoid and a learned table."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from pe_ablation.encodings.base import About, Encoding, Sizes, angles, geometric, normal


class Sinusoidal(Encoding):
    """x_p + scale * PE(p), PE(p)[2k] = sin(p theta_k), PE(p)[2k+1] = cos(p theta_k), theta_k = 10000^(-2k/M).

    `interleaved=False` puts all sines before all cosines. Needs an even model dim.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    about: ClassVar[About] = About(
        formula="x_p + scale * [sin(p theta_k), cos(p theta_k)], theta_k = 10000^(-2k/M)",
        source="Vaswani et al. 2017, arXiv:1706.03762",
        parameters="0",
        beyond=(
            "no: defined everywhere, but later positions have phases unseen in training, which every layer reads: "
            "fails soon"
        ),
        cost="one addition a channel and token, once, at the input; logits untouched",
    )
    shift_invariant = False

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, scale: float = 1.0, interleaved: bool = True):
        del rngs
        if sizes.model_dim % 2:
            raise ValueError(f"model_dim: {sizes.model_dim} is odd; a sinusoid needs an even number of channels")
        self.scale = scale
        self.interleaved = interleaved
        self.model_dim = sizes.model_dim

    def embed(self, x: jax.Array, pos: jax.Array) -> jax.Array:
        angle = angles(pos, geometric(self.model_dim // 2, 10_000.0))
        pair = [jnp.sin(angle), jnp.cos(angle)]
        table = jnp.stack(pair, -1).reshape(*pos.shape, -1) if self.interleaved else jnp.concatenate(pair, -1)
        table = jnp.where(pos[..., None] >= 0, self.scale * table, 0.0)
        return (x.astype(jnp.float32) + table).astype(x.dtype)


class Learned(Encoding):
    """x_p + E[p], E [rows, M] ~ N(0, 0.02); rows = the training length unless set.

    A position past the table has no value: NaN inside a trace, refused on the host before one.
    Source: Gehring et al. 2017, arXiv:1705.03122; Radford et al. 2019 (GPT-2).
    """

    about: ClassVar[About] = About(
        formula="x_p + E[p]",
        source="Gehring et al. 2017, arXiv:1705.03122; Radford et al. 2019 (GPT-2)",
        parameters="(rows or L) * M",
        beyond="n/a: undefined past the table, which has no row there; rows past the training length stay untrained",
        cost="one row looked up and added a token, once, at the input; logits untouched",
    )
    shift_invariant = False

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, rows: int | None = None):
        rows = sizes.train_length if rows is None else rows
        if rows < sizes.train_length:
            raise ValueError(f"encoding.options.rows: {rows} is below the training length {sizes.train_length}")
        self.max_position = rows
        self.table = normal(rngs, rows, sizes.model_dim)

    def embed(self, x: jax.Array, pos: jax.Array) -> jax.Array:
        rows = self.table[...]
        found = rows[jnp.clip(pos, 0, rows.shape[0] - 1)]
        found = jnp.where(pos[..., None] < rows.shape[0], found, jnp.nan)
        found = jnp.where(pos[..., None] >= 0, found, 0.0)
        return (x.astype(jnp.float32) + found).astype(x.dtype)
