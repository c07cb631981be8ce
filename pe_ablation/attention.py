"""Causal attention over positions: one signature, implementations that agree, and no encoding named anywhere.

Masks and biases are descriptions that become tiles where a tile is computed. Positions decide who sees whom, never the
order of slots. Letters: B batch, T queries, S keys, H heads, D head dim.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pe_ablation.encodings.base import Encoding, Scores, Tokens, distance

IMPLEMENTATIONS = ("auto", "dense", "blockwise")
STRIPES = 4  # of ordered queries in `blockwise`: 5/8 of the scores are left; more stripes compile longer
BLOCK = 128  # queries per tile of `blockwise`
DENSE_LIMIT = 2**21  # B*H*T*S scores past which `auto` takes `blockwise`: past the caches, dense is the slower one


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["window"], meta_fields=["causal", "segments", "ordered"]
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """Who sees whom, by position. Window w sees w keys, the query itself among them; None sees all.

    `window` may be a traced int32, so that two windows share one compiled program; `causal=False` is for `none` alone;
    `segments=True` keeps a query to the keys of its own segment. `ordered=True` promises that slots are in the order of
    their positions, the same for queries and keys: blockwise then leaves out most of what no query sees.
    """

    causal: bool = True
    window: int | jax.Array | None = None
    segments: bool = False
    ordered: bool = False

    def narrowed(self, window: int | None) -> "Mask":
        """The same mask with the smaller of the two windows."""
        if window is None:
            return self
        combined = window if self.window is None else jnp.minimum(self.window, window)
        return dataclasses.replace(self, window=combined)

    def tile(self, q: Tokens, k: Tokens) -> jax.Array:
        """bool [B or 1,T,S]: which keys each query sees. Empty slots see nothing and are not seen."""
        query, key = q.pos[:, :, None], k.pos[:, None, :]
        seen = (query >= 0) & (key >= 0)
        if self.causal:
            seen &= key <= query
        if self.window is not None:
            seen &= distance(q, k) < self.window
        if self.segments:
            if q.segment is None or k.segment is None:
                raise ValueError("Mask(segments=True) needs Tokens.segment on both sides")
            seen &= q.segment[:, :, None] == k.segment[:, None, :]
        return seen


class Dropout(NamedTuple):
    """Attention dropout: the rate in [0, 1) and a key."""

    rate: float
    key: jax.Array


def attend(
    encoding: Encoding,
    q: Tokens,
    k: Tokens,
    v: jax.Array,
    *,
    mask: Mask | None = None,
    dropout: Dropout | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Softmax attention of q over k and values v [B,S,H,D] -> [B,T,H,D], in v's dtype.

    Positions may be [T] or [B or 1,T]. Logits, softmax and sums are float32. A row that sees nothing gives 0; what an
    empty slot (negative position) holds reaches no output and no gradient. Blockwise is linear in memory, forwards and
    backwards; `auto` takes what `chosen` says. The two drop different weights.
    Raises ValueError for an unknown implementation and for a non-causal mask with an encoding that adds order.
    """
    mask = Mask() if mask is None else mask
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r} is not allowed; allowed: {', '.join(IMPLEMENTATIONS)}")
    if not mask.causal and type(encoding) is not Encoding:
        raise ValueError(f"Mask(causal=False) is defined for the encoding `none` alone, not {type(encoding).__name__}")
    q, k = _clean(q), _clean(k)
    v = _blank(v, k.pos)
    query, key = encoding.query(q.vec, q.pos), encoding.key(k.vec, k.pos)
    batch, length, heads, _ = q.vec.shape
    tile = functools.partial(_tile, encoding, mask)
    if chosen(implementation, batch, heads, length, k.vec.shape[1]) == "dense":
        return tile((key, k, v), query, q, dropout)
    return _blockwise(tile, (key, k, v), query, q, dropout, mask.causal and mask.ordered)


def chosen(implementation: str, batch: int, heads: int, queries: int, keys: int) -> str:
    """What `implementation` resolves to: `auto` is dense up to DENSE_LIMIT scores, and where stripes aren't full."""
    if implementation != "auto":
        return implementation
    few = batch * heads * queries * keys <= DENSE_LIMIT and queries < STRIPES * BLOCK
    return "dense" if few else "blockwise"


def _clean(tokens: Tokens) -> Tokens:
    pos = tokens.pos[None] if tokens.pos.ndim == 1 else tokens.pos
    state = None if tokens.state is None else _blank(tokens.state, pos)
    return tokens._replace(vec=_blank(tokens.vec, pos), pos=pos, state=state)


def _blank(x: jax.Array, pos: jax.Array) -> jax.Array:
    """x [B,T,H,...] with the empty slots zeroed."""
    return jnp.where((pos >= 0)[:, :, None, None], x, jnp.zeros((), x.dtype))


def _tile(encoding, mask, keys, query, q, dropout):
    """Attention of some queries over some keys (projected, as they are, and their values): [B,T,H,D]."""
    key, k, v = keys
    scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32) * q.vec.shape[-1] ** -0.5
    seen = mask.tile(q, k)[:, None]
    if encoding.scores is Scores.ROW:
        scores = jnp.where(seen, scores, -jnp.inf)
    logits = jnp.where(seen, encoding.logits(scores, q, k), -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1)
    if dropout is not None:
        keep = jax.random.bernoulli(dropout.key, 1.0 - dropout.rate, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout.rate), 0.0)
    out = jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    extra = encoding.values(weights, q, k)
    out = out if extra is None else out + extra
    return (out / jnp.where(total > 0, total, 1.0).swapaxes(1, 2)[..., None]).astype(v.dtype)


def _blockwise(tile, keys, query, q, dropout, ordered):
    """`tile` over blocks of queries, each recomputed backwards, so that one block's scores live at a time.

    Ordered queries go in up to STRIPES stripes of blocks, each over no more keys than its last query may see.
    """
    batch, length = query.shape[:2]
    blocks = -(-length // BLOCK)

    @jax.checkpoint
    def block(keys, index, query, q):
        own = None if dropout is None else dropout._replace(key=jax.random.fold_in(dropout.key, index))
        return tile(keys, query, q, own)

    def split(x, fill=0):
        """[B,T,...] -> [blocks,B,BLOCK,...]."""
        x = jnp.pad(x, [(0, 0), (0, blocks * BLOCK - length)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], blocks, BLOCK, *x.shape[2:]), 1, 0)

    def stripe(begin, end):
        seen = jax.tree.map(lambda x: x[:, : end * BLOCK], keys) if ordered else keys
        return jax.lax.map(lambda each: block(seen, *each), jax.tree.map(lambda x: x[begin:end], parts))

    parts = jnp.arange(blocks), split(query), jax.tree.map(split, q)._replace(pos=split(q.pos, fill=-1))
    stripes = min(blocks, STRIPES) if ordered else 1
    ends = [blocks * number // stripes for number in range(stripes + 1)]
    out = jnp.concatenate([stripe(begin, end) for begin, end in itertools.pairwise(ends)])
    return jnp.moveaxis(out, 0, 1).reshape(batch, blocks * BLOCK, *out.shape[3:])[:, :length]
