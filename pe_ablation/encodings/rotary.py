"""Rotary encodings: queries and keys turned by their own position, so that products see the difference."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation.encodings.base import About, Encoding, Sizes, angles, geometric


class RoPE(Encoding):
    """q_i -> R(i) q_i, k_j -> R(j) k_j; R(p) turns pair k of the first fraction*D dims by p * base^(-2k/(fraction*D)).

    Pairs are (k, k + d/2), or (2k, 2k+1) when `interleaved`; both are the same function up to a fixed permutation of
    the projections' columns. The number of rotated dims must be even. `frequencies` are radians per token of each pair,
    in place of the base's (see `frequencies.py`); cos and sin are multiplied by `magnitude`, logits by its square.
    Source: Su et al. 2021, arXiv:2104.09864.
    """

    about: ClassVar[About] = About(
        formula="l_ij = (R(i) q_i) . (R(j) k_j) / sqrt(D), R(p) turns pair k by p * base^(-2k/D)",
        source="Su et al. 2021, arXiv:2104.09864",
        parameters="0",
        beyond="defined everywhere, but slow rotations reach phases unseen in training: fails past about 1.5x",
    )

    given: tuple[float, ...] | None = None
    magnitude: float = 1.0

    def __init__(
        self,
        sizes: Sizes,
        rngs: nnx.Rngs,
        *,
        base: float = 10_000.0,
        fraction: float = 1.0,
        interleaved: bool = False,
        frequencies: tuple[float, ...] | None = None,
        magnitude: float = 1.0,
    ):
        del rngs
        if sizes.head_dim % 2:
            raise ValueError(
                f"model_dim: makes head_dim {sizes.head_dim}, which is odd; a rotation turns pairs of dims"
            )
        dims = fraction * sizes.head_dim
        if not 0 < fraction <= 1 or dims != int(dims) or int(dims) % 2:
            raise ValueError(
                f"encoding.options.fraction: {fraction} of head_dim {sizes.head_dim} rotates {dims:g} dims; "
                "an even number from 2 to head_dim is needed"
            )
        if not base > 1:
            raise ValueError(f"encoding.options.base: {base} must be above 1")
        if frequencies is not None and len(frequencies) != int(dims) // 2:
            raise ValueError(f"encoding.options.frequencies: {len(frequencies)} for {int(dims) // 2} pairs of dims")
        self.base = base
        self.dims = int(dims)
        self.interleaved = interleaved
        self.given = frequencies
        self.magnitude = magnitude

    @property
    def frequencies(self) -> np.ndarray:
        """float64 [F] radians per token of each pair."""
        return geometric(self.dims // 2, self.base) if self.given is None else np.asarray(self.given, np.float64)

    def query(self, q: jax.Array, pos: jax.Array) -> jax.Array:
        return self._rotate(q, pos)

    def key(self, k: jax.Array, pos: jax.Array) -> jax.Array:
        return self._rotate(k, pos)

    def _rotate(self, x: jax.Array, pos: jax.Array) -> jax.Array:
        angle = angles(pos, self.frequencies)[:, :, None, :]
        cos, sin = self.magnitude * jnp.cos(angle), self.magnitude * jnp.sin(angle)
        turned = x[..., : self.dims].astype(jnp.float32)
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = jnp.split(turned, 2, axis=-1)
        pair = [first * cos - second * sin, second * cos + first * sin]
        turned = jnp.stack(pair, -1).reshape(turned.shape) if self.interleaved else jnp.concatenate(pair, -1)
        return jnp.concatenate([turned.astype(x.dtype), x[..., self.dims :]], axis=-1)
