"""The one interface: an encoding is a set of hooks, and here every hook is the identity (NoPE).

Letters in shapes: B batch, T queries, S keys, H heads, D head dim, M model dim. Positions are int32; a negative one is
an empty slot. Hooks are pure and finite for every pair of positions, future and empty ones included. They know neither
the sequence length, nor a cache, nor whether the model trains or decodes.

Subclasses override what they need. Options are the keyword-only parameters of `__init__`, annotated, with defaults.
With `recentred`, attention takes one number per tile from the positions that `query` and `key` are shown. `per_layer`
names the parameters that are one per layer in the paper, as paths with slashes: a name stands for all below it.
`nested` names the options that are encodings themselves, each with its own options in NAME_options.
"""

import enum
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

INIT_STDDEV = 0.02  # GPT-2's, for every learned table and projection


class Scores(enum.Enum):
    """What `Encoding.logits` may do, which decides the attention kernels that can serve it."""

    NONE = "leaves the logits alone"
    BIAS = "adds a function of the two positions"
    CONTENT = "reads the scores, the projected vectors or the state"
    ROW = "orders all keys of a query"


class Tokens(NamedTuple):
    """One side of attention.

    vec [B,T,H,D] as projected, pos int32 [B or 1,T], state float32 [B,T,H,F] or None, segment int32 [B,T] or None.
    """

    vec: jax.Array
    pos: jax.Array
    state: jax.Array | None = None
    segment: jax.Array | None = None


class Sizes(NamedTuple):
    """What every encoding may size itself by; `train_length` in tokens."""

    num_heads: int
    head_dim: int
    model_dim: int
    train_length: int


class About(NamedTuple):
    """The card of an encoding.

    `parameters` is an expression in H, D, M, L (training length) and the options. `beyond` says whether it reads past
    its training length (yes, window: flat but without using far keys, partly, no, n/a), a colon, and why. `cost` is
    what it adds to attention, in operations and memory, and whether a plain product or a fused kernel is left.
    """

    formula: str
    source: str
    parameters: str
    beyond: str
    cost: str = ""


class Encoding(nnx.Module):
    """No positional encoding: the causal mask is the only order information.

    Source: Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466.
    """

    about: ClassVar[About] = About(
        formula="l_ij = q_i . k_j / sqrt(D)",
        source="Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466",
        parameters="0",
        beyond=(
            "no: defined everywhere, but what layers count of positions drifts as the keys of a query grow in number; "
            "holds for a little past the training length"
        ),
        cost="nothing: logits are the plain product of queries and keys, which any fused kernel computes",
    )
    scores: Scores = Scores.NONE
    shift_invariant: bool = True
    max_position: int | None = None
    per_layer: tuple[str, ...] = ()
    recentred: bool = False
    span: int | None = None  # of the positions of a tile's queries, at most, where they are recentred
    nested: ClassVar[tuple[str, ...]] = ()

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        del sizes, rngs

    @property
    def reads_positions(self) -> bool:
        """Whether any hook reads positions, beyond which slots are empty and what came before."""
        return type(self) is not Encoding

    def overrides(self, hook: str) -> bool:
        """Whether a hook (`embed`, `query`, ...) is another than the identity."""
        return getattr(type(self), hook) is not getattr(Encoding, hook)

    def embed(self, x: jax.Array, pos: jax.Array) -> jax.Array:
        """x [B,T,M], pos [B or 1,T] -> [B,T,M]; once, at the input. Empty slots get nothing added."""
        del pos
        return x

    def query(self, q: jax.Array, pos: jax.Array) -> jax.Array:
        """q [B,T,H,D], pos [B or 1,T] -> [B,T,H,D'], D' that of `key`."""
        del pos
        return q

    def key(self, k: jax.Array, pos: jax.Array) -> jax.Array:
        """k [B,S,H,D], pos [B or 1,S] -> [B,S,H,D']."""
        del pos
        return k

    def state(self, x: jax.Array, pos: jax.Array, last: jax.Array | None) -> tuple[jax.Array, jax.Array] | None:
        """What later tokens need of x [B,T,M] beside keys and values: float32 [B,T,H,F] and the carry [B,H,F].

        x is the block's normalised input, tokens in time order; `last` is the carry of what came before, if anything.
        """
        del x, pos, last
        return None

    def logits(self, a: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        """Scaled float32 scores a [B,H,T,S] -> [B,H,T,S]; called on tiles, with vec as projected."""
        del q, k
        return a

    def decline(self) -> np.ndarray | None:
        """float64 [H] m, without parameters, where `logits` is a - m_h (i - j) for all j <= i; None: something else.

        What declares it is served by fused kernels that take no bias.
        """
        return None

    def values(self, w: jax.Array, q: Tokens, k: Tokens) -> jax.Array | None:
        """Unnormalised weights w [B,H,T,S] -> [B,T,H,D] to add to the weighted values, linear in w; None: nothing."""
        del w, q, k
        return None


def distance(q: Tokens, k: Tokens) -> jax.Array:
    """int32 [B or 1,T,S]: query position minus key position, future keys clamped to 0."""
    return jnp.maximum(q.pos[:, :, None] - k.pos[:, None, :], 0)


def normal(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    """A float32 parameter drawn from N(0, 0.02)."""
    return nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), shape, jnp.float32))


def softplus_inverse(value: jax.Array | np.ndarray | float) -> jax.Array:
    """float32: what softplus takes to `value` > 0, the raw value of a parameter that stays positive."""
    value = jnp.asarray(value, jnp.float32)
    return value + jnp.log(-jnp.expm1(-value))


def angles(pos: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """float32 [..., F] radians: pos int32 [...] times float32 frequencies [F]."""
    return pos.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)


def geometric(count: int, base: float) -> np.ndarray:
    """float64 [count]: base^(-k/count), k = 0..count-1 (Vaswani et al. 2017; Su et al. 2021)."""
    return base ** (-np.arange(count) / count)
