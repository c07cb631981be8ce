"""Operations of a block whose gradients are written out, because what is derived from them is slow on a CPU.

Each is what its formula says, and so is its gradient; chosen are the layout of products and what is kept until the
gradient is taken. A product of A^T and B, both as they lie in memory, takes two to five times as long as one of A and B
where A is the larger: the gradient is then the transpose of B^T A, so that the small result is what is turned around.
What is cheaply made again is not kept; a barrier stops the compiler from keeping it after all. Reverse mode alone.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

EPSILON = 1e-5  # of the variance in a layer norm
FEW = 8  # rows of a batch
GELU_SCALE, GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715


class _Letters(NamedTuple):
    """Of a product of a and b: its own, those of a's gradient from its gradient and b, and of b's, turned, from a."""

    value: str
    of_first: str
    of_second: str


SCORES = _Letters("bhtd,bhsd->bhts", "bhts,bhsd->bhtd", "bhtd,bhts->bhds")
WEIGHTED = _Letters("bhts,bhsd->bhtd", "bhtd,bhsd->bhts", "bhts,bhtd->bhds")


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """float32 products [B,H,T,S] of queries [B,H,T,D] and keys [B,H,S,D]."""
    return _heads(SCORES, q, k)


def weighted(w: jax.Array, v: jax.Array) -> jax.Array:
    """float32 sums [B,H,T,D] of values [B,H,S,D] under weights [B,H,T,S]."""
    return _heads(WEIGHTED, w, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _heads(letters, a, b):
    return _einsum(letters.value, a, b)


def _heads_forward(letters, a, b):
    return _heads(letters, a, b), (a, b)


def _heads_backward(letters, kept, gradient):
    a, b = kept
    of_b = _einsum(letters.of_second, a, gradient).swapaxes(2, 3)
    return _einsum(letters.of_first, gradient, b).astype(a.dtype), of_b.astype(b.dtype)


_heads.defvjp(_heads_forward, _heads_backward)


def _einsum(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(letters, a, b, preferred_element_type=jnp.float32)


def product(x: jax.Array, kernel: jax.Array, precision: Any = None) -> jax.Array:
    """x [N,K] times kernel [K,F] -> [N,F]; the precision is jax's."""
    return _product(x, kernel, precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, kernel, precision):
    return jnp.dot(x, kernel, precision=precision)


def _product_forward(x, kernel, precision):
    return _product(x, kernel, precision), (x, kernel)


def _product_backward(precision, kept, gradient):
    x, kernel = kept
    dot = functools.partial(jnp.dot, precision=precision)
    inputs, outputs = kernel.shape
    of_kernel = dot(x.T, gradient) if inputs <= outputs else jax.lax.optimization_barrier(dot(gradient.T, x)).T
    return dot(gradient, kernel.T), of_kernel


_product.defvjp(_product_forward, _product_backward)


def dot_general(x: jax.Array, kernel: jax.Array, dimensions: Any, precision: Any = None, **_: Any) -> jax.Array:
    """`product`, as `nnx.Linear` asks for it."""
    if x.ndim != 2 or kernel.ndim != 2 or dimensions != (((1,), (0,)), ((), ())):
        raise ValueError(f"a product of two matrices is needed, not {dimensions} of {x.shape} and {kernel.shape}")
    return product(x, kernel, precision)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2, any shape (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return x * _gate(x)


def _gate(x):
    return 0.5 + 0.5 * jnp.tanh(GELU_SCALE * x * (1.0 + GELU_CUBE * x * x))


def _gelu_forward(x):
    return gelu(x), x


def _gelu_backward(x, gradient):
    x = jax.lax.optimization_barrier(x)
    gate = _gate(x)
    slope = 2.0 * GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x)
    return (gradient * (gate + x * gate * (1.0 - gate) * slope),)


gelu.defvjp(_gelu_forward, _gelu_backward)


@jax.custom_vjp
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """float32 (x - mean) / sqrt(variance + EPSILON) * scale + bias over the last axis of x [...,M]; scale, bias [M].

    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    mean, inverse = _moments(x)
    return (x - mean) * inverse * scale + bias


def _moments(x):
    """The mean [...,1], and one over the standard deviation."""
    x = x.astype(jnp.float32)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return mean, jax.lax.rsqrt(jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True) + EPSILON)


def _layer_norm_forward(x, scale, bias):
    mean, inverse = _moments(x)
    return (x - mean) * inverse * scale + bias, (x, mean, inverse, scale)


def _layer_norm_backward(kept, gradient):
    x, mean, inverse, scale = kept
    normed = (jax.lax.optimization_barrier(x) - mean) * inverse
    scaled = gradient * scale
    tokens = tuple(range(x.ndim - 1))
    along = jnp.mean(scaled * normed, axis=-1, keepdims=True)
    of_x = inverse * (scaled - jnp.mean(scaled, axis=-1, keepdims=True) - normed * along)
    return of_x.astype(x.dtype), jnp.sum(gradient * normed, axis=tokens), jnp.sum(gradient, axis=tokens)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@jax.custom_vjp
def plus(a: jax.Array, bias: jax.Array) -> jax.Array:
    """Scores plus a bias, [B,H,T,S] or [1,H,T,S] both.

    The gradient adds rows of a small batch one by one: on several cores a reduction over a leading axis is slow.
    """
    return a + bias


def _plus_forward(a, bias):
    return a + bias, (a.shape[0], bias.shape[0])


def _plus_backward(batches, gradient):
    return tuple(_summed(gradient, rows) for rows in batches)


def _summed(gradient, rows):
    if gradient.shape[0] == rows:
        return gradient
    if gradient.shape[0] > FEW:
        return jnp.sum(gradient, axis=0, keepdims=True)
    return functools.reduce(jnp.add, jnp.split(gradient, gradient.shape[0]))


plus.defvjp(_plus_forward, _plus_backward)


@jax.custom_vjp
def lookup(table: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of a small table [K,H] at int32 [...] in 0..K-1 -> [H,...].

    A gather forwards; backwards a product with one-hot rows, since a scatter-add of many rows is serial.
    """
    return table.T.at[:, index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _lookup_forward(table, index):
    return lookup(table, index), (index, table.shape[0])


def _lookup_backward(kept, gradient):
    index, rows = kept
    one_hot = (jnp.arange(rows)[:, None] == index.reshape(1, -1)).astype(gradient.dtype)
    return (gradient.reshape(gradient.shape[0], -1) @ one_hot.T).T, None


lookup.defvjp(_lookup_forward, _lookup_backward)

OfDistance = Callable[[Any, jax.Array], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def plus_of_distances(
    function: OfDistance, a: jax.Array, parameters: Any, query: jax.Array, key: jax.Array
) -> jax.Array:
    """Scores a [B or 1,H,T,S] plus a function of the distances of positions int32 [B or 1,T] and [B or 1,S].

    `function(parameters, distances int32 [...])` -> [H,...]; what comes after a query is at distance 0. Where positions
    go up by one on both sides, there are but T + S - 1 distances, and each query's are a slice of them. The sum is made
    in here, so that the bias itself is never in memory.
    """
    pairs = lambda a, parameters: a + _of_pairs(function, query, key, parameters)  # noqa: E731
    if not _alike(query, key):
        return pairs(a, parameters)
    found = function(parameters, _all_distances(query, key))  # out here, or it is computed again for every pair
    slices = lambda a, parameters, found: a + _slices(found, query.shape[1], key.shape[1])  # noqa: E731
    either = (slices, lambda a, parameters, found: pairs(a, parameters))
    return jax.lax.cond(_stepped(query, key), *either, a, parameters, found)


def _alike(query, key):
    """Whether all rows of a batch stand at the same positions."""
    return query.shape[0] == key.shape[0] == 1


def _stepped(query, key):
    return jnp.all(jnp.diff(query) == 1) & jnp.all(jnp.diff(key) == 1)


def _all_distances(query, key):
    """int32 [T+S-1], of the last query and the first key first."""
    return jnp.maximum(query[0, -1] - key[0, 0] - jnp.arange(query.shape[1] + key.shape[1] - 1), 0)


def _of_pairs(function, query, key, parameters):
    return jnp.moveaxis(function(parameters, jnp.maximum(query[:, :, None] - key[:, None, :], 0)), 0, 1)


def _slices(found, queries, keys):
    cut = lambda start: jax.lax.dynamic_slice(found, (0, start), (found.shape[0], keys))  # noqa: E731
    return jax.vmap(cut, out_axes=1)(jnp.arange(queries)[::-1])[None]


def _plus_of_distances_forward(function, a, parameters, query, key):
    return plus_of_distances(function, a, parameters, query, key), (a.shape[0], parameters, query, key)


def _plus_of_distances_backward(function, kept, gradient):
    rows, parameters, query, key = kept
    of_a, of_bias = (_summed(gradient, count) for count in (rows, max(query.shape[0], key.shape[0])))
    way = functools.partial(_back_pairs, function, query, key)
    if _alike(query, key):
        pairs, slices = way, functools.partial(_back_slices, function, query, key)
        way = functools.partial(jax.lax.cond, _stepped(query, key), slices, pairs)
    return of_a, *way(parameters, of_bias), None, None


def _back_pairs(function, query, key, parameters, gradient):
    return jax.vjp(functools.partial(_of_pairs, function, query, key), parameters)[1](gradient)


def _back_slices(function, query, key, parameters, gradient):
    """Sums along diagonals: with rows one shorter than all distances are, each row comes one to the left."""
    queries, keys = query.shape[1], key.shape[1]
    rows = jnp.pad(gradient[0], ((0, 0), (0, 0), (0, queries - 2))) if queries > 1 else gradient[0]
    flat = jax.lax.optimization_barrier(rows).reshape(rows.shape[0], -1)
    if queries > 1:
        flat = jnp.pad(flat, ((0, 0), (queries - 1, 1)))
    rows = jax.lax.optimization_barrier(flat).reshape(-1, queries, queries + keys - 1)
    ones = jnp.ones((rows.shape[0], 1, queries))
    summed = jnp.matmul(ones, rows, precision=jax.lax.Precision.HIGHEST)[:, 0]
    return jax.vjp(lambda parameters: function(parameters, _all_distances(query, key)), parameters)[1](summed)


plus_of_distances.defvjp(_plus_of_distances_forward, _plus_of_distances_backward)


@jax.custom_vjp
def pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    """One of K numbers per query for each key: rows [B,H,T,K], index int32 [B or 1,T,S] -> [B,H,T,S].

    Its transpose is `binned`, for the reason that `lookup` has.
    """
    return jnp.take_along_axis(rows, index[:, None], axis=-1)


def binned(w: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Sums of w [B,H,T,S] over the keys of each index, int32 [B or 1,T,S] in 0..count-1 -> [B,H,T,count]."""
    return jnp.einsum("bhts,btsk->bhtk", w, jax.nn.one_hot(index, count, dtype=w.dtype))


def _pick_forward(rows, index):
    return pick(rows, index), (index, rows.shape[-1])


def _pick_backward(residuals, gradient):
    return binned(gradient, *residuals), None


pick.defvjp(_pick_forward, _pick_backward)
