"""Causal attention over positions: one signature, implementations that agree, and no encoding named anywhere.

Masks and biases are descriptions that become tiles where a tile is computed. Positions decide who sees whom, never the
order of slots. Letters: B batch, T queries, S keys, H heads, D head dim.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pe_ablation import fused, gradients
from pe_ablation.encodings.base import Encoding, Scores, Tokens, distance

IMPLEMENTATIONS = ("auto", "dense", "blockwise", *fused.PLATFORMS)
STRIPES = 4  # of ordered queries in `blockwise`: 5/8 of the scores are left; more stripes compile longer
BLOCK = 128  # queries per tile of `blockwise`
DENSE_LIMIT = 2**21  # B*H*T*S scores past which `auto` takes `blockwise`: past the caches, dense is the slower one


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["window", "sinks", "recent"],
    meta_fields=["causal", "segments", "ordered"],
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """Who sees whom, by position. Window w sees w keys, the query itself among them; None sees all.

    `window` may be a traced int32, so that two windows share one compiled program; `causal=False` is for `none` alone;
    `segments=True` keeps a query to the keys of its own segment. With `recent` a query sees the key positions below
    `sinks`, the `recent` before its own, and itself (Xiao et al. 2024, arXiv:2309.17453). `ordered=True` promises that
    queries and keys are the same tokens, at positions 0, 1, 2, ... in the order of slots: blockwise then leaves out
    most of what no query sees, and a fused kernel may serve.
    """

    causal: bool = True
    window: int | jax.Array | None = None
    segments: bool = False
    ordered: bool = False
    sinks: int | jax.Array = 0
    recent: int | jax.Array | None = None

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
        if self.recent is not None:
            seen &= (distance(q, k) <= self.recent) | (key < self.sinks)
        if self.segments:
            if q.segment is None or k.segment is None:
                raise ValueError("Mask(segments=True) needs Tokens.segment on both sides")
            seen &= q.segment[:, :, None] == k.segment[:, None, :]
        return seen


Positions = Callable[[jax.Array], jax.Array]  # int32 [B or 1,T] -> the same shape


class View(NamedTuple):
    """Other positions for some pairs of a query and a key than their own, such as a cache's.

    query, key: int32 positions [B or 1,T] -> positions as the encoding is shown them. `when`: (query positions
    [B or 1,T,1], key positions [B or 1,1,S]) -> bool, the pairs that the view is for, by their own positions. All of
    its keys lie in the first `slots` key slots (None: anywhere), so that scores of others are not computed.
    """

    query: Positions
    key: Positions
    when: Callable[[jax.Array, jax.Array], jax.Array]
    slots: int | None = None


PLAIN = View(lambda pos: pos, lambda pos: pos, lambda query, key: (query >= 0) & (key >= 0))


class LogitScale(NamedTuple):
    """Logits times max(at_least, factor ln n), n being how many keys a query sees: softmax over more keys is flatter.

    factor: float32 [H], or one for all heads. 1 / ln L is log-n scaling (Chiang and Cholak 2022, arXiv:2202.12172), a
    learned one SSMax (Nakanishi 2025, arXiv:2501.19399).
    """

    factor: jax.Array | float
    at_least: float = 0.0

    def of(self, seen: jax.Array) -> jax.Array:
        """float32 [B or 1,H or 1,T,1] of bool [B or 1,1,T,S]."""
        count = jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1).astype(jnp.float32)
        factor = jnp.reshape(jnp.asarray(self.factor, jnp.float32), (-1, 1, 1))
        return jnp.maximum(self.at_least, factor * jnp.log(count))


@dataclasses.dataclass(frozen=True)
class Distances:
    """How far away keys are shown: exactly nearer than `window`, else at it or, with a `group`, in steps of it.

    A distance i - j >= w is shown as w (clipped), or as floor(i/G) - floor(j/G) + w - floor(w/G). The mask sees
    distances as they are.
    """

    window: int
    group: int | None = None

    def views(self) -> tuple[View, View]:
        """For `attend`."""
        window, group = self.window, self.group

        def far(query, key):
            return query - key >= window

        if group is None:
            return PLAIN, View(lambda pos: jnp.full_like(pos, window), jnp.zeros_like, far)
        return PLAIN, View(lambda pos: pos // group + (window - window // group), lambda pos: pos // group, far)


def followed_by(first: Sequence[View], then: Sequence[View]) -> tuple[View, ...]:
    """Views that show what `then` makes of the positions that `first` shows."""
    if not first or not then:
        return tuple(first or then)
    return tuple(_shown_twice(one, other) for one in first for other in then)


def _shown_twice(one: View, other: View) -> View:
    def when(query, key):
        shown = one.query(query[:, :, 0])[:, :, None], one.key(key[:, 0])[:, None]
        return one.when(query, key) & other.when(*shown)

    return View(lambda pos: other.query(one.query(pos)), lambda pos: other.key(one.key(pos)), when, one.slots)


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
    views: Sequence[View] = (),
    scale: LogitScale | None = None,
    dropout: Dropout | None = None,
    implementation: str = "auto",
    vmapped: bool = False,
) -> jax.Array:
    """Softmax attention of q over k and values v [B,S,H,D] -> [B,T,H,D], in v's dtype.

    Positions may be [T] or [B or 1,T]. Logits, softmax and sums are float32. A row that sees nothing gives 0; what an
    empty slot (negative position) holds reaches no output and no gradient. The first of `views` holds for all pairs,
    a later one for those it is for; none: positions as they are. The mask sees positions as they are, always. Blockwise
    is linear in memory, forwards and backwards; `auto` takes what `chosen` says. The two drop different weights.
    `cudnn` and `splash` are the kernels of `fused`, for what they serve. `vmapped`: several such calls are one program.
    Raises ValueError for an unknown implementation, for a kernel that the backend or this call doesn't have, for a
    non-causal mask with an encoding that adds order, and for several views of an encoding that orders all keys of a
    query.
    """
    mask = Mask() if mask is None else mask
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r} is not allowed; allowed: {', '.join(IMPLEMENTATIONS)}")
    if not mask.causal and type(encoding) is not Encoding:
        raise ValueError(f"Mask(causal=False) is defined for the encoding `none` alone, not {type(encoding).__name__}")
    if len(views) > 1 and encoding.scores is Scores.ROW:
        raise ValueError(f"views: {type(encoding).__name__} orders all keys of a query, so it takes one view at most")
    q, k = _clean(q), _clean(k)
    v = _blank(v, k.pos)
    views = views or (PLAIN,)
    query, key = (_unchanged, _unchanged) if encoding.recentred else (encoding.query, encoding.key)
    queries = [_shown(query, q, None, view.query) for view in views]
    keys = [_shown(key, k, view.slots, view.key) for view in views]
    batch, length, heads, _ = q.vec.shape
    tile = functools.partial(_tile, encoding, mask, scale, [view.when for view in views])
    fused.refuse_backend(implementation)
    kernel, call = fused.kernel(), None
    if kernel is not None:
        given = {"scaled": scale is not None, "dropout": 0.0 if dropout is None else dropout.rate, "vmapped": vmapped}
        call = call_of(encoding, q.vec, k.vec.shape[1], mask, views, **given)
    taken = chosen(implementation, batch, heads, length, k.vec.shape[1], kernel, call)
    if taken == "dense":
        return tile((keys, k, v), queries, q, dropout)
    if call is not None and taken == kernel:
        sides = queries[0].of(q), keys[0].of(k)
        return fused.attend(taken, call, queries[0].projected, keys[0].projected, v, sides)
    return _blockwise(tile, (keys, k, v), queries, q, dropout, mask.causal and mask.ordered)


def chosen(
    implementation: str,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    kernel: str | None = None,
    call: fused.Call | None = None,
) -> str:
    """What `implementation` resolves to: `auto` is the fused `kernel`, where there is one and it serves the call.

    Else `auto` is dense up to DENSE_LIMIT scores, and blockwise past that and where stripes are full. Raises ValueError
    for a kernel by name that lacks something for the call.
    """
    if call is not None and implementation in fused.PLATFORMS:
        fused.refuse(implementation, call)
    if implementation != "auto":
        return implementation
    if call is not None and kernel is not None and fused.lacks(kernel, call) is None:
        return kernel
    few = batch * heads * queries * keys <= DENSE_LIMIT and queries < STRIPES * BLOCK
    return "dense" if few else "blockwise"


def call_of(
    encoding: Encoding,
    q: jax.Array | jax.ShapeDtypeStruct,
    keys: int,
    mask: Mask,
    views: Sequence[View] = (PLAIN,),
    *,
    scaled: bool = False,
    dropout: float = 0.0,
    vmapped: bool = False,
) -> fused.Call:
    """What a fused kernel is asked for, of a call with these queries [B,T,H,D] and number of keys.

    scaled: with a `LogitScale`. dropout: the rate.
    """
    length, heads, head_dim = q.shape[1:]
    moved = views[0].query is not PLAIN.query
    places = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return fused.Call(
        encoding,
        q.dtype,
        heads,
        head_dim,
        length,
        window=mask.window if isinstance(mask.window, int) else None,
        moved=moved,
        rows=jax.eval_shape(views[0].query, places).shape[0] if moved else 1,
        vmapped=vmapped,
        unserved=_unserved(length, keys, mask, views, scaled, dropout),
    )


def _unserved(queries, keys, mask, views, scaled, dropout):
    """What is asked here that no fused kernel does."""
    if not (mask.causal and mask.ordered and queries == keys):
        return "serves tokens that attend to themselves, causally and in order: neither a cache nor given positions"
    unserved = {
        "knows no segments, given Mask(segments=True)": mask.segments,
        "knows no sinks, given Mask(recent=...)": mask.recent is not None,
        "takes a window that is known before it is compiled": not isinstance(mask.window, int | None),
        f"takes one view of positions, given {len(views)}": len(views) > 1,
        "scales no logits by the number of keys, given a logit scale": scaled,
        f"drops no weights, given dropout_attention {dropout}": dropout > 0,
    }
    return next((reason for reason, given in unserved.items() if given), None)


class _Shown(NamedTuple):
    """What one view makes of a side of attention: the encoding's projection, and the positions it was shown.

    Of an encoding that is recentred, the projection is still to come.
    """

    projected: jax.Array
    pos: jax.Array

    def of(self, tokens: Tokens) -> Tokens:
        """The tokens at these positions."""
        slots = self.pos.shape[1]
        return jax.tree.map(lambda x: x[:, :slots], tokens)._replace(pos=self.pos)


def _unchanged(vec: jax.Array, pos: jax.Array) -> jax.Array:
    del pos
    return vec


def _shown(project: Callable[..., jax.Array], tokens: Tokens, slots: int | None, moved: Positions) -> _Shown:
    vec, pos = tokens.vec[:, :slots], tokens.pos[:, :slots]
    pos = jnp.where(pos >= 0, moved(pos), pos)
    return _Shown(project(vec, pos), pos)


def _clean(tokens: Tokens) -> Tokens:
    pos = tokens.pos[None] if tokens.pos.ndim == 1 else tokens.pos
    state = None if tokens.state is None else _blank(tokens.state, pos)
    return tokens._replace(vec=_blank(tokens.vec, pos), pos=pos, state=state)


def _blank(x: jax.Array, pos: jax.Array) -> jax.Array:
    """x [B,T,H,...] with the empty slots zeroed."""
    return jnp.where((pos >= 0)[:, :, None, None], x, jnp.zeros((), x.dtype))


def _tile(encoding, mask, scale, whens, keys, queries, q, dropout):
    """Attention of some queries over some keys, both as each view shows them and as they are: [B,T,H,D]."""
    keys, k, v = keys
    views = list(zip(whens, queries, keys, strict=True))
    seen = mask.tile(q, k)[:, None]
    logits = _scores(encoding, *views[0][1:], q, k, seen)
    for when, query, key in views[1:]:
        own = key.pos.shape[1]
        here = when(q.pos[:, :, None], k.pos[:, None, :own])[:, None]
        moved = jnp.where(here, _scores(encoding, query, key, q, k, seen[..., :own]), logits[..., :own])
        logits = jnp.concatenate([moved, logits[..., own:]], axis=-1)
    if scale is not None:
        logits = jnp.where(seen, logits, 0.0) * scale.of(seen)
    logits = jnp.where(seen, logits, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1)
    if dropout is not None:
        keep = jax.random.bernoulli(dropout.key, 1.0 - dropout.rate, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout.rate), 0.0)
    out = gradients.weighted(weights.astype(v.dtype), v.swapaxes(1, 2)).swapaxes(1, 2)
    out = sum(_values(encoding, views, weights, q, k), out)
    return (out / jnp.where(total > 0, total, 1.0).swapaxes(1, 2)[..., None]).astype(v.dtype)


def _scores(encoding, query, key, q, k, seen):
    """float32 logits [B,H,T,S] of the keys that one view is shown."""
    vectors = query.projected, key.projected
    if encoding.recentred:
        if encoding.span is not None and query.pos.shape[1] > encoding.span:
            raise ValueError(
                f"{query.pos.shape[1]} queries in a tile, where this encoding serves positions {encoding.span} apart; "
                "implementation 'blockwise' has smaller tiles"
            )
        about = centred(query.pos, key.pos)
        vectors = encoding.query(vectors[0], about[0]), encoding.key(vectors[1], about[1])
    scores = gradients.scores(*(each.swapaxes(1, 2) for each in vectors)) * q.vec.shape[-1] ** -0.5
    if encoding.scores is Scores.ROW:
        scores = jnp.where(seen, scores, -jnp.inf)
    return encoding.logits(scores, query.of(q), key.of(k))


def centred(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions int32 [B or 1,T] and [B or 1,S] less the middle of the queries', so that powers of them stay in range.

    Keys later than the last query, which none sees, are put beside it, empty slots in the middle.
    """
    last = jnp.max(query, axis=1, keepdims=True)
    first = jnp.min(jnp.where(query >= 0, query, last), axis=1, keepdims=True)
    middle = first + (last - first) // 2
    moved = (jnp.where(pos >= 0, jnp.minimum(pos, last), middle) - middle for pos in (query, key))
    return next(moved), next(moved)


def _values(encoding, views, weights, q, k):
    """What the encoding adds to the weighted values, a view at a time: the last that a pair is for has its weight."""
    left = weights
    for when, query, key in reversed(views[1:]):
        own = key.pos.shape[1]
        here = when(q.pos[:, :, None], k.pos[:, None, :own])[:, None]
        share = encoding.values(jnp.where(here, left[..., :own], 0.0), query.of(q), key.of(k))
        left = jnp.concatenate([jnp.where(here, 0.0, left[..., :own]), left[..., own:]], axis=-1)
        if share is not None:
            yield share
    _, query, key = views[0]
    share = encoding.values(left, query.of(q), key.of(k))
    if share is not None:
        yield share


def _blockwise(tile, keys, queries, q, dropout, ordered):
    """`tile` over blocks of queries, each recomputed backwards, so that one block's scores live at a time.

    Ordered queries go in up to STRIPES stripes of blocks, each over no more keys than its last query may see.
    """
    batch, length = q.vec.shape[:2]
    blocks = -(-length // BLOCK)

    @jax.checkpoint
    def block(keys, index, queries, q):
        own = None if dropout is None else dropout._replace(key=jax.random.fold_in(dropout.key, index))
        return tile(keys, queries, q, own)

    def split(x, fill=0):
        """[B,T,...] -> [blocks,B,BLOCK,...]."""
        x = jnp.pad(x, [(0, 0), (0, blocks * BLOCK - length)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], blocks, BLOCK, *x.shape[2:]), 1, 0)

    def stripe(begin, end):
        seen = jax.tree.map(lambda x: x[:, : end * BLOCK], keys) if ordered else keys
        return jax.lax.map(lambda each: block(seen, *each), jax.tree.map(lambda x: x[begin:end], parts))

    parts = (
        jnp.arange(blocks),
        [_Shown(split(each.projected), split(each.pos, fill=-1)) for each in queries],
        jax.tree.map(split, q)._replace(pos=split(q.pos, fill=-1)),
    )
    stripes = min(blocks, STRIPES) if ordered else 1
    ends = [blocks * number // stripes for number in range(stripes + 1)]
    out = jnp.concatenate([stripe(begin, end) for begin, end in itertools.pairwise(ends)])
    return jnp.moveaxis(out, 0, 1).reshape(batch, blocks * BLOCK, *out.shape[3:])[:, :length]
