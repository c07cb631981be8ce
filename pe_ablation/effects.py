"""What an encoding does, as numbers: what it adds to the input and to a logit, by its own hooks, as it is initialised.

Letters in shapes: P positions, S keys, N draws, H heads, D head dim, M model dim.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation import encodings
from pe_ablation.encodings import Encoding, Scores, Sizes, Tokens
from pe_ablation.encodings.base import INIT_STDDEV

SIZES = Sizes(num_heads=4, head_dim=16, model_dim=64, train_length=128)
TIMES = 4  # how many training lengths far
DRAWS = 128
SEED = 0


class OnLogits(NamedTuple):
    """What is added to q . k / sqrt(D) of the query at position `query` and each key at or before it.

    `distances` int [S] from 0; `alike` float32 [H,S] where every vector of queries, keys and inputs is (1, ..., 1);
    `drawn` [N,H,S] where all are drawn from N(0, 1), or once of zeros where content plays no part. `redrawn`: the
    encoding adds nothing as it is initialised, so its parameters are drawn from N(0, 0.02).
    """

    query: int
    distances: np.ndarray
    alike: np.ndarray
    drawn: np.ndarray
    redrawn: bool


def build(name: str, options: Mapping[str, Any] | None = None) -> Encoding:
    """The encoding at `SIZES`, initialised from `SEED`; ValueError as `encodings.make` raises it."""
    return encodings.make(name, **SIZES._asdict(), rngs=nnx.Rngs(SEED), **(options or {}))


def reads_content(encoding: Encoding) -> bool:
    """Whether what is added to a logit depends on more than the two positions."""
    return _projects(encoding) or encoding.scores in (Scores.CONTENT, Scores.ROW)


def on_input(encoding: Encoding) -> np.ndarray:
    """float32 [P,M]: what is added to the input at positions 0 to `TIMES` training lengths, or all there are."""
    count = _last(encoding) + 1
    x = jnp.zeros((1, count, SIZES.model_dim))
    return np.asarray(encoding.embed(x, jnp.arange(count)[None])[0])


def on_logits(encoding: Encoding) -> OnLogits:
    """What is added to the logits of a query `TIMES` training lengths from the first key, or at the last position."""
    redrawn, last = False, _last(encoding)
    vectors = _random(last + 1) if reads_content(encoding) else _alike(last + 1, 0.0)
    drawn = _added(encoding, *vectors)
    if not drawn.any() and jax.tree.leaves(nnx.state(encoding, nnx.Param)):
        encoding, redrawn = _redrawn(encoding), True
        drawn = _added(encoding, *vectors)
    alike = _added(encoding, *_alike(last + 1, 1.0))[0]
    nearest_first = slice(None, None, -1)
    return OnLogits(last, np.arange(last + 1), alike[:, nearest_first], drawn[..., nearest_first], redrawn)


def _added(encoding: Encoding, q: jax.Array, k: jax.Array, x: jax.Array) -> np.ndarray:
    """float32 [N,H,S]: logits of the last token less q . k / sqrt(D), for q, k [N,S,H,D] and inputs x [N,S,M]."""
    graph, state = nnx.split(encoding)
    program = jax.jit(lambda state, *vectors: _less_plain(nnx.merge(graph, state), *vectors))
    return np.asarray(program(state, q, k, x))


def _less_plain(encoding: Encoding, q: jax.Array, k: jax.Array, x: jax.Array) -> jax.Array:
    pos = jnp.arange(q.shape[1])[None]
    found = encoding.state(x, pos, None)
    state = None if found is None else found[0]
    query = Tokens(q[:, -1:], pos[:, -1:], None if state is None else state[:, -1:])
    plain = _products(query.vec, k)
    scores = plain
    if _projects(encoding):
        scores = _products(encoding.query(query.vec, query.pos), encoding.key(k, pos))
    return (encoding.logits(scores, query, Tokens(k, pos, state)) - plain)[:, :, 0]


def _products(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("nthd,nshd->nhts", q, k, precision="highest") * SIZES.head_dim**-0.5


def _projects(encoding: Encoding) -> bool:
    return encoding.overrides("query") or encoding.overrides("key")


def _last(encoding: Encoding) -> int:
    farthest = TIMES * SIZES.train_length
    return farthest if encoding.max_position is None else min(farthest, encoding.max_position - 1)


def _shapes(draws: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Of q and k, [N,S,H,D], and of x, [N,S,M]."""
    heads = (draws, length, SIZES.num_heads, SIZES.head_dim)
    return heads, heads, (draws, length, SIZES.model_dim)


def _alike(length: int, value: float) -> list[jax.Array]:
    return [jnp.full(shape, value) for shape in _shapes(1, length)]


def _random(length: int) -> list[jax.Array]:
    """All from N(0, 1)."""
    generator = np.random.default_rng(SEED)
    return [jnp.asarray(generator.standard_normal(shape, np.float32)) for shape in _shapes(DRAWS, length)]


def _redrawn(encoding: Encoding) -> Encoding:
    """A copy whose parameters are all drawn from N(0, 0.02)."""
    graph, parameters, rest = nnx.split(encoding, nnx.Param, ...)
    generator = np.random.default_rng(SEED)
    drawn = jax.tree.map(lambda p: jnp.asarray(INIT_STDDEV * generator.standard_normal(p.shape), p.dtype), parameters)
    return nnx.merge(graph, drawn, rest)
