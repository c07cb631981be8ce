"""Encodings that add a kernel of the distance to the logits: KERPLE's two, FIRE's learned one, Sandwich's fixed one."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation.encodings.base import About, Encoding, Scores, Sizes, Tokens, distance, softplus_inverse
from pe_ablation.gradients import plus, plus_of_distances, product

EXACT = jax.lax.Precision.HIGHEST  # of products that make a bias: float32 on every device
LEAST = 0.01  # below which KERPLE's code lets no parameter fall
SHIFT = 1e-6  # in FIRE's denominator, as in public code


def _uniform(rngs: nnx.Rngs, high: float, *shape: int) -> jax.Array:
    """float32, U(0, high) but at least LEAST."""
    return jnp.maximum(jax.random.uniform(rngs.params(), shape, jnp.float32, maxval=high), LEAST)


class KerpleLog(Encoding):
    """l_ij - r1 ln(1 + r2 (i - j)), r1, r2 > 0 learned per head, shared by all layers.

    Both are softplus of a parameter; at the start r1 ~ U(0, 2) and r2 ~ U(0, 1), not below .01, as in the paper's code
    (which clamps them to that at every step).
    Source: Chi et al. 2022, arXiv:2205.09921.
    """

    about: ClassVar[About] = About(
        formula="l_ij = q_i . k_j / sqrt(D) - r1_h ln(1 + r2_h (i - j))",
        source="Chi et al. 2022, arXiv:2205.09921",
        parameters="2 * H",
        beyond=(
            "yes: defined everywhere; the bias grows ever more slowly, so far keys stay in reach and no distance is "
            "far from those seen"
        ),
        cost=(
            "a logarithm, two multiplications and two additions a logit, no table; a fused kernel serves if it takes "
            "a bias"
        ),
    )
    scores = Scores.BIAS

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.scale = nnx.Param(softplus_inverse(_uniform(rngs, 2.0, sizes.num_heads)))
        self.rate = nnx.Param(softplus_inverse(_uniform(rngs, 1.0, sizes.num_heads)))

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        scale, rate = (jax.nn.softplus(raw[...]) for raw in (self.scale, self.rate))
        return plus_of_distances(_log, a, (scale, rate), q.pos, k.pos)


def _log(parameters, distances):
    scale, rate = (jnp.expand_dims(each, range(1, 1 + distances.ndim)) for each in parameters)
    return -scale * jnp.log1p(rate * distances.astype(jnp.float32))


class KerplePower(Encoding):
    """l_ij - r1 (i - j)^r2, r1 > 0 and 0 < r2 <= 2 learned per head, shared by all layers.

    r1 is softplus of a parameter, r2 twice the sigmoid of one; at the start r1 ~ U(0, 1) and r2 ~ U(0, 2), not below
    .01, as in the paper's code (which clamps them). With r2 = 1 it is ALiBi with slopes r1.
    Source: Chi et al. 2022, arXiv:2205.09921.
    """

    about: ClassVar[About] = About(
        formula="l_ij = q_i . k_j / sqrt(D) - r1_h (i - j)^r2_h",
        source="Chi et al. 2022, arXiv:2205.09921",
        parameters="2 * H",
        beyond="window: defined everywhere; stays flat like ALiBi where powers are large, since far keys fade out",
        cost=(
            "a logarithm a pair of a query and a key, an exponential, two multiplications and an addition a logit, no "
            "table; a fused kernel serves if it takes a bias"
        ),
    )
    scores = Scores.BIAS

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.scale = nnx.Param(softplus_inverse(_uniform(rngs, 1.0, sizes.num_heads)))
        self.power = nnx.Param(jax.scipy.special.logit(_uniform(rngs, 2.0, sizes.num_heads) / 2))

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        scale, power = jax.nn.softplus(self.scale[...]), 2 * jax.nn.sigmoid(self.power[...])
        return plus_of_distances(_power, a, (scale, power), q.pos, k.pos)


def _power(parameters, distances):
    scale, power = (jnp.expand_dims(each, range(1, 1 + distances.ndim)) for each in parameters)
    log = jnp.log(jnp.maximum(distances, 1).astype(jnp.float32))  # of no 0, whose gradient would be NaN
    return jnp.where(distances > 0, -scale * jnp.exp(power * log), 0.0)


class Fire(Encoding):
    """l_ij + f(psi(i - j) / psi(max(i, L)))_h, psi(x) = ln(1 + c x), f an MLP from 1 number to H, shared by all layers.

    c > 0 and L > 0 are learned (softplus) and start at .1 and `threshold` tokens. f has `hidden_layers` (1, or 2) of
    `width` ReLUs; its last layer has no bias, which would move a whole row. First biases start at or above 0, other
    than in public code, so that each unit is on where distances are small and trains. The query's own position enters.
    Source: Li et al. 2024, arXiv:2310.04418.
    """

    about: ClassVar[About] = About(
        formula="l_ij = q_i . k_j / sqrt(D) + f(psi(i - j) / psi(max(i, L)))_h, psi(x) = ln(1 + c x)",
        source="Li et al. 2024, arXiv:2310.04418",
        parameters="2 + 2 * width + (hidden_layers - 1) * (width + 1) * width + width * H",
        beyond=(
            "yes: defined everywhere; distances are scaled to the query's position, so all stay in [0, 1] as in "
            "training"
        ),
        cost=(
            "two logarithms and an MLP of width (H + 1) multiplications a pair of a query and a key, width^2 more "
            "with two layers, and width numbers a pair in memory where a tile is computed; a fused kernel needs the "
            "finished bias"
        ),
    )
    scores = Scores.BIAS
    shift_invariant = False

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, hidden_layers: int = 1, width: int = 32, threshold: int = 512):
        if hidden_layers not in (1, 2):
            raise ValueError(f"encoding.options.hidden_layers: {hidden_layers} is not allowed; allowed: 1, 2")
        for name, value in {"width": width, "threshold": threshold}.items():
            if value < 1:
                raise ValueError(f"encoding.options.{name}: {value} is too small; at least 1")
        self.threshold = threshold
        self.rate = nnx.Param(softplus_inverse(np.full(1, 0.1)))
        self.reach = nnx.Param(softplus_inverse(np.ones(1)))
        self.inner = nnx.Param(linear(rngs, 1, width))
        self.inner_bias = nnx.Param(jnp.abs(linear(rngs, 1, width)))
        self.middle = nnx.Param(linear(rngs, width, width, width)) if hidden_layers == 2 else None
        self.middle_bias = nnx.Param(linear(rngs, width, width)) if hidden_layers == 2 else None
        self.outer = nnx.Param(linear(rngs, width, width, sizes.num_heads))

    def share(self, q: Tokens, k: Tokens) -> jax.Array:
        """float32 [B or 1,T,S]: the scaled distance psi(i - j) / psi(max(i, L))."""
        rate, reach = jax.nn.softplus(self.rate[...]), self.threshold * jax.nn.softplus(self.reach[...])
        most = jnp.log1p(rate * jnp.maximum(q.pos.astype(jnp.float32), reach))[:, :, None]
        return jnp.log1p(rate * distance(q, k).astype(jnp.float32)) / (most + SHIFT)

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        share = self.share(q, k)
        pairs = jnp.stack([share, jnp.ones_like(share)], axis=-1).reshape(-1, 2)
        hidden = jax.nn.relu(product(pairs, jnp.stack([self.inner[...], self.inner_bias[...]]), EXACT))
        if self.middle is not None and self.middle_bias is not None:
            hidden = jax.nn.relu(product(hidden, self.middle[...], EXACT) + self.middle_bias[...])
        bias = product(hidden, self.outer[...], EXACT)
        return plus(a, jnp.moveaxis(bias.reshape(*share.shape, -1), -1, 1))


class Sandwich(Encoding):
    """l_ij + [sum_k cos((i - j) 10000^(-2k/dbar)) - dbar/2] / (8h/H), k = 1..dbar/2, h = 1..H; nothing is learned.

    The sum is the product of two sinusoids of dbar channels, so no array of distances is needed; it is 0 at distance 0.
    `first=0` sums k = 0..dbar/2-1, the sinusoid's own frequencies. The scale per head is that of public code (NeMo).
    Source: Chi et al. 2023, arXiv:2212.10356.
    """

    about: ClassVar[About] = About(
        formula="l_ij = q_i . k_j / sqrt(D) + [sum_k cos((i - j) 10000^(-2k/dbar)) - dbar/2] H / (8h)",
        source="Chi et al. 2023, arXiv:2212.10356",
        parameters="0",
        beyond=(
            "yes: defined everywhere; falls about as a logarithm of the distance, so near keys count most and far "
            "ones level off"
        ),
        cost=(
            "dbar multiplications a pair of a query and a key for all heads, a multiplication and an addition a "
            "logit; a fused kernel serves if it takes a bias"
        ),
    )
    scores = Scores.BIAS

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, dbar: int = 128, first: int = 1):
        del rngs
        if dbar < 2 or dbar % 2:
            raise ValueError(f"encoding.options.dbar: {dbar} must be even and at least 2")
        if first not in (0, 1):
            raise ValueError(f"encoding.options.first: {first} is not allowed; allowed: 0, 1")
        self.dbar = dbar
        self.first = first
        self.scale = tuple(sizes.num_heads / (8.0 * head) for head in range(1, sizes.num_heads + 1))

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        frequencies = 10_000.0 ** (-2.0 * (self.first + np.arange(self.dbar // 2)) / self.dbar)
        query, key = (jnp.concatenate(phases(each.pos, frequencies), axis=-1) for each in (q, k))
        alike = jnp.matmul(query, key.swapaxes(1, 2), precision=EXACT) - self.dbar / 2
        return plus(a, jnp.asarray(self.scale, jnp.float32)[:, None, None] * alike[:, None])


def phases(pos: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin of pos times frequencies, float32 [..., F] for int32 [...] and float64 [F], as exact far as near.

    A frequency is a number of 2^-32 turns; its whole part times the position overflows int32 as an angle does a turn.
    """
    turns = frequencies / (2 * math.pi) * 2.0**32
    whole = np.round(turns)
    signed = jnp.asarray((whole + 2.0**31) % 2.0**32 - 2.0**31, jnp.int32)
    pos = jnp.asarray(pos, jnp.int32)[..., None]
    rest = pos.astype(jnp.float32) * jnp.asarray(turns - whole, jnp.float32)
    angle = ((pos * signed).astype(jnp.float32) + rest) * (2 * math.pi / 2.0**32)
    return jnp.cos(angle), jnp.sin(angle)


def linear(rngs: nnx.Rngs, inputs: int, *shape: int) -> jax.Array:
    """float32, U(-1, 1) / sqrt(inputs): how layers of `inputs` numbers start in the code of FIRE and DAPE, torch's."""
    return jax.random.uniform(rngs.params(), shape, jnp.float32, minval=-1.0) * inputs**-0.5
