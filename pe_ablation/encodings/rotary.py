"""Rotary encodings: queries and keys turned by their own position, so that products see the difference."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation.encodings.base import About, Encoding, Sizes, angles, geometric

LEAST_SCALE = 32.0  # of XPos, in tokens
LARGEST = 40.0  # log of the largest power in XPos: the product of two is below float32's largest number


def _pairs(sizes: Sizes) -> int:
    if sizes.head_dim % 2:
        raise ValueError(f"model_dim: makes head_dim {sizes.head_dim}, which is odd; a rotation turns pairs of dims")
    return sizes.head_dim // 2


def _frequencies(pairs: int, base: float) -> np.ndarray:
    if not base > 1:
        raise ValueError(f"encoding.options.base: {base} must be above 1")
    return geometric(pairs, base)


class Rotary(Encoding):
    """q_i -> R(i) q_i, k_j -> R(j) k_j: R(p) turns pair k by p * frequencies[k], times magnitude; other dims stay.

    Pairs are (k, k + d/2), or (2k, 2k+1) when `interleaved`; both are the same function up to a fixed permutation of
    the projections' columns.
    """

    def __init__(self, frequencies: np.ndarray, interleaved: bool, magnitude: float = 1.0):
        self.per_token = tuple(frequencies.tolist())
        self.interleaved = interleaved
        self.magnitude = magnitude

    @property
    def frequencies(self) -> np.ndarray:
        """float64 [F] radians per token of each pair."""
        return np.asarray(self.per_token, np.float64)

    def query(self, q: jax.Array, pos: jax.Array) -> jax.Array:
        return self.turned(q, pos)

    def key(self, k: jax.Array, pos: jax.Array) -> jax.Array:
        return self.turned(k, pos)

    def turned(self, x: jax.Array, pos: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
        """x [B,T,H,D] at pos [B or 1,T], pair k times scale [B or 1,T,1,k]."""
        angle = angles(pos, self.frequencies)[:, :, None, :]
        # Behind a barrier, lest XLA takes them anew for every head of every row.
        turns = jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))
        cos, sin = (self.magnitude * scale * each for each in turns)
        dims = 2 * len(self.per_token)
        pairs = x[..., :dims].astype(jnp.float32)
        if self.interleaved:
            first, second = pairs[..., 0::2], pairs[..., 1::2]
        else:
            first, second = jnp.split(pairs, 2, axis=-1)
        pair = [first * cos - second * sin, second * cos + first * sin]
        turned = jnp.stack(pair, -1).reshape(pairs.shape) if self.interleaved else jnp.concatenate(pair, -1)
        return jnp.concatenate([turned.astype(x.dtype), x[..., dims:]], axis=-1)


class RoPE(Rotary):
    """q_i -> R(i) q_i, k_j -> R(j) k_j; R(p) turns pair k of the first fraction*D dims by p * base^(-2k/(fraction*D)).

    The number of rotated dims must be even. `frequencies` are radians per token of each pair, in place of the base's
    (see `frequencies.py`); cos and sin are multiplied by `magnitude`, logits by its square. Angles are products in
    float32: to 0.002 rad at position 131,071 and 0.03 at 1,048,575.
    Source: Su et al. 2021, arXiv:2104.09864.
    """

    about: ClassVar[About] = About(
        formula="l_ij = (R(i) q_i) . (R(j) k_j) / sqrt(D), R(p) turns pair k by p * base^(-2k/D)",
        source="Su et al. 2021, arXiv:2104.09864",
        parameters="0",
        beyond="no: defined everywhere, but slow rotations reach phases unseen in training: fails past about 1.5x",
        cost="one rotation of q and k: 3 D operations a token and head of each; logits untouched, so a plain product",
    )

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
        _pairs(sizes)
        dims = fraction * sizes.head_dim
        if not 0 < fraction <= 1 or dims != int(dims) or int(dims) % 2:
            raise ValueError(
                f"encoding.options.fraction: {fraction} of head_dim {sizes.head_dim} rotates {dims:g} dims; "
                "an even number from 2 to head_dim is needed"
            )
        if frequencies is not None and len(frequencies) != int(dims) // 2:
            raise ValueError(f"encoding.options.frequencies: {len(frequencies)} for {int(dims) // 2} pairs of dims")
        self.base = base
        plain = _frequencies(int(dims) // 2, base)
        super().__init__(plain if frequencies is None else np.asarray(frequencies, np.float64), interleaved, magnitude)


class PRoPE(Rotary):
    """RoPE with the highest floor(p D/2) of its D/2 frequencies, the others 0; `reversed` keeps the lowest instead.

    The frequencies are those of all D dims; p = 0 is no encoding, p = 1 RoPE. `partial` turns as many pairs, but the
    first dims alone and with frequencies of their own, down to the lowest: RoPE's `fraction`.
    Source: Barbero et al. 2024, arXiv:2410.06205.
    """

    about: ClassVar[About] = About(
        formula="RoPE, but R(p) leaves the slowest (1 - p) D/2 pairs as they are",
        source="Barbero et al. 2024, arXiv:2410.06205",
        parameters="0",
        beyond=(
            "no: defined everywhere, but phases unseen in training as with RoPE, save those of the pairs left as they "
            "are"
        ),
        cost="as RoPE; the pairs left as they are could be skipped and are not",
    )

    def __init__(
        self,
        sizes: Sizes,
        rngs: nnx.Rngs,
        *,
        p: float = 0.75,
        reversed: bool = False,
        partial: bool = False,
        base: float = 10_000.0,
        interleaved: bool = False,
    ):
        del rngs
        if not 0 <= p <= 1:
            raise ValueError(f"encoding.options.p: {p} is not a share of the frequencies; from 0 to 1")
        if partial and reversed:
            raise ValueError("encoding.options.partial: True with reversed, which is about the frequencies of all dims")
        pairs = _pairs(sizes)
        kept = int(p * pairs + 1e-9)  # 0.29 * 100 is less than 29
        if partial and kept:
            super().__init__(_frequencies(kept, base), interleaved)
            return
        of_pair = np.arange(pairs)
        turns = of_pair >= pairs - kept if reversed else of_pair < kept
        super().__init__(np.where(turns, _frequencies(pairs, base), 0.0), interleaved)


class XPos(Rotary):
    """RoPE, pair k times zeta_k^((i - j) / scale_base), zeta_k = (2k + 0.4 D) / (1.4 D): a power per query and per key.

    Powers of a position soon leave float32, so positions are counted from the middle of the queries of a tile, which
    must lie within 60 * scale_base of each other; keys may be as far back as they like.
    Source: Sun et al. 2022, arXiv:2212.10554.
    """

    about: ClassVar[About] = About(
        formula="RoPE, pair k times zeta_k^((i-j)/scale_base), zeta_k = (2k + 0.4 D) / (1.4 D)",
        source="Sun et al. 2022, arXiv:2212.10554",
        parameters="0",
        beyond=(
            "no: defined everywhere, but phases unseen in training as with RoPE, weaker where pairs fade; its paper "
            "adds a window at evaluation"
        ),
        cost=(
            "as RoPE and a power a pair; logits are a plain product, but queries and keys are turned anew for every "
            "tile of queries, so that no power overflows"
        ),
    )
    recentred: bool = True

    def __init__(
        self,
        sizes: Sizes,
        rngs: nnx.Rngs,
        *,
        scale_base: float = 512.0,
        base: float = 10_000.0,
        interleaved: bool = False,
    ):
        del rngs
        if not LEAST_SCALE <= scale_base < math.inf:
            raise ValueError(
                f"encoding.options.scale_base: {scale_base} is out of range; finite, and at least {LEAST_SCALE}, below "
                "which powers leave float32 within one tile of queries"
            )
        pairs = _pairs(sizes)
        super().__init__(_frequencies(pairs, base), interleaved)
        zeta = (2 * np.arange(pairs) + 0.4 * sizes.head_dim) / (1.4 * sizes.head_dim)
        self.span = int(60 * scale_base)
        self.rates = tuple((np.log(zeta) / scale_base).tolist())

    def query(self, q: jax.Array, pos: jax.Array) -> jax.Array:
        return self.turned(q, pos, self._power(pos, 1.0))

    def key(self, k: jax.Array, pos: jax.Array) -> jax.Array:
        return self.turned(k, pos, self._power(pos, -1.0))

    def _power(self, pos: jax.Array, sign: float) -> jax.Array:
        """zeta_k^(sign * pos / scale_base), float32 [B or 1,T,1,k]."""
        return jnp.exp(jnp.minimum(sign * angles(pos, np.asarray(self.rates)), LARGEST))[:, :, None, :]
