"""Encodings that add a function of the two positions to the logits."""

import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation.encodings.base import (
    About,
    Encoding,
    Scores,
    Sizes,
    Tokens,
    distance,
    normal,
    softplus_inverse,
)
from pe_ablation.gradients import lookup, plus, plus_of_distances


def alibi_slopes(num_heads: int) -> np.ndarray:
    """float64 [H]: 2^(-8h/H), h = 1..H, where H is a power of two.

    Else the slopes of the power of two below, then the 1st, 3rd, 5th, ... of twice that power: the recipe of the
    paper's code. Source: Press et al. 2022, arXiv:2108.12409.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * power + 1, 2) / power)
    return np.concatenate([slopes, between[: num_heads - power]])


class ALiBi(Encoding):
    """l_ij - m_h (i - j), fixed slopes m_h, the same in every layer; not divided by sqrt(D).

    With `heads` = n the first n heads have the slopes of n heads, the others no bias (NoPE). `learned` slopes are
    softplus of a parameter per head that starts at the fixed slope; the paper keeps them fixed.
    Source: Press et al. 2022, arXiv:2108.12409.
    """

    about: ClassVar[About] = About(
        formula="l_ij = q_i . k_j / sqrt(D) - m_h (i - j)",
        source="Press et al. 2022, arXiv:2108.12409",
        parameters="learned * (heads or H)",
        beyond=(
            "window: defined everywhere; stays flat, since far keys fade out, and for the same reason they are not used"
        ),
        cost="a multiplication and an addition a logit, no table; a fused kernel serves if it takes a slope a head",
    )
    scores = Scores.BIAS

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, learned: bool = False, heads: int | None = None):
        del rngs
        biased = sizes.num_heads if heads is None else heads
        if not 1 <= biased <= sizes.num_heads:
            raise ValueError(f"encoding.options.heads: {heads} of {sizes.num_heads} heads; at least 1, at most all")
        self.slopes = tuple(alibi_slopes(biased).tolist())
        self.plain_heads = sizes.num_heads - biased
        self.raw = nnx.Param(softplus_inverse(alibi_slopes(biased))) if learned else None

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        slopes = jnp.asarray(self.slopes, jnp.float32) if self.raw is None else jax.nn.softplus(self.raw[...])
        slopes = jnp.pad(slopes, (0, self.plain_heads))[:, None, None]
        return plus(a, -slopes * distance(q, k)[:, None].astype(jnp.float32))

    def decline(self) -> np.ndarray | None:
        return np.pad(self.slopes, (0, self.plain_heads)) if self.raw is None else None


def t5_bucket_starts(num_buckets: int, max_distance: int) -> np.ndarray:
    """int [num_buckets]: the first distance of each causal bucket.

    The first half of the buckets hold one distance each; bucket h + n of the second half starts where
    floor(ln(d/h) / ln(max_distance/h) * h) reaches n, h = num_buckets // 2.
    Source: Raffel et al. 2020, arXiv:1910.10683.
    """
    exact = num_buckets // 2
    far = np.arange(exact, max_distance + 1)
    bucket = exact + np.floor(np.log(far / exact) / math.log(max_distance / exact) * (num_buckets - exact) + 1e-9)
    bucket = np.minimum(bucket, num_buckets - 1)
    return np.concatenate([np.arange(exact), exact + np.searchsorted(bucket, np.arange(exact, num_buckets))])


class T5(Encoding):
    """l_ij + E[bucket(i - j), h]: one learned scalar per bucket of distances and head; all buckets look back.

    Logits keep their 1/sqrt(D), as in GPT-2 (T5 itself has none). One table is shared by all layers.
    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    about: ClassVar[About] = About(
        formula="l_ij = q_i . k_j / sqrt(D) + E[bucket(i - j), h]",
        source="Raffel et al. 2020, arXiv:1910.10683",
        parameters="num_buckets * H",
        beyond=(
            "partly: the last bucket serves all far distances, so none is new if it was trained, but ever more keys "
            "share it: degrades slowly"
        ),
        cost=(
            "a gather and an addition a logit; a fused kernel serves if it takes a bias. Backwards a one-hot product, "
            "num_buckets multiplications a logit"
        ),
    )
    scores = Scores.BIAS

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, num_buckets: int = 32, max_distance: int = 128):
        if num_buckets < 2 or num_buckets % 2:
            raise ValueError(f"encoding.options.num_buckets: {num_buckets} must be even and at least 2")
        if max_distance <= num_buckets // 2:
            raise ValueError(
                f"encoding.options.max_distance: {max_distance} must exceed half the buckets ({num_buckets // 2})"
            )
        self.starts = tuple(t5_bucket_starts(num_buckets, max_distance).tolist())
        self.table = normal(rngs, num_buckets, sizes.num_heads)

    def bucket(self, distances: jax.Array) -> jax.Array:
        """int32 bucket of each int32 distance >= 0."""
        return _bucket(self.starts, distances)

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        return plus_of_distances(functools.partial(_bucketed, self.starts), a, self.table[...], q.pos, k.pos)


def _bucket(starts, distances):
    nearest = np.searchsorted(starts, np.arange(starts[-1] + 1), side="right") - 1
    return jnp.asarray(nearest, jnp.int32)[jnp.minimum(distances, starts[-1])]


def _bucketed(starts, table, distances):
    return lookup(table, _bucket(starts, distances))
