"""Operations with gradients of their own: values against numpy, gradients against jax's of the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from pe_ablation import gradients

PLAIN = {
    "scores": lambda q, k: jnp.einsum("bhtd,bhsd->bhts", q, k),
    "weighted": lambda w, v: jnp.einsum("bhts,bhsd->bhtd", w, v),
    "product": lambda x, kernel: x @ kernel,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "layer_norm": lambda x, scale, bias: (
        (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias
    ),
    "plus": lambda a, bias: a + bias,
    "lookup": lambda table, index: jnp.moveaxis(table[index], -1, 0),
    "pick": lambda rows, index: jnp.take_along_axis(rows, index[:, None], axis=-1),
}
INDEX = np.random.default_rng(1).integers(0, 5, (3, 7, 6)).astype(np.int32)
CASES = [
    ("scores", [(2, 3, 7, 4), (2, 3, 6, 4)]),
    ("weighted", [(2, 3, 7, 6), (2, 3, 6, 4)]),
    ("product", [(9, 3), (3, 8)]),
    ("product", [(9, 8), (8, 3)]),
    ("gelu", [(5, 7)]),
    ("layer_norm", [(2, 5, 7), (7,), (7,)]),
    ("plus", [(3, 2, 7, 6), (1, 2, 7, 6)]),
    ("plus", [(1, 2, 7, 6), (3, 2, 7, 6)]),
    ("plus", [(3, 2, 7, 6), (3, 2, 7, 6)]),
    ("plus", [(gradients.FEW + 1, 2, 3, 4), (1, 2, 3, 4)]),
    ("lookup", [(5, 2), INDEX]),
    ("lookup", [(5, 2), INDEX[:1]]),
    ("pick", [(3, 2, 7, 5), INDEX]),
]


def arrays(shapes):
    generator = np.random.default_rng(0)
    drawn = (each if isinstance(each, np.ndarray) else generator.standard_normal(each) for each in shapes)
    return [jnp.asarray(each, jnp.int32 if each.dtype.kind == "i" else jnp.float32) for each in drawn]


@pytest.mark.parametrize(("name", "shapes"), CASES)
def test_value_and_gradient_are_those_of_the_formula(name, shapes):
    given = arrays(shapes)
    floats = [number for number, each in enumerate(given) if each.dtype == jnp.float32]
    out = PLAIN[name](*given)
    weights = jnp.asarray(np.random.default_rng(2).standard_normal(out.shape), jnp.float32)

    def both(function):
        value = lambda *given: jnp.sum(weights * function(*given))  # noqa: E731
        return function(*given), jax.grad(value, argnums=tuple(floats))(*given)

    found, expected = jax.jit(lambda: both(getattr(gradients, name)))(), both(PLAIN[name])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for mine, derived in zip(found[1], expected[1], strict=True):
        assert mine.shape == derived.shape
        np.testing.assert_allclose(mine, derived, rtol=1e-4, atol=1e-5)


def weigh(parameters, distances):
    slope, table = parameters
    bent = slope[(slice(None), *distances.ndim * (None,))] * jnp.log1p(distances.astype(jnp.float32))
    return bent + gradients.lookup(table, jnp.minimum(distances, 3))


POSITIONS = {
    "the same": ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    "one query": ([9], [5, 6, 7, 8, 9]),
    "two queries of a later block": ([6, 7], [0, 1, 2, 3, 4, 5, 6, 7]),
    "keys to come": ([2, 3, 4], [3, 4, 5, 6]),
    "a gap": ([0, 1, 3], [0, 1, 2, 3]),
    "backwards": ([3, 2, 1], [0, 1, 2]),
    "empty slots": ([4, 5, -1], [-1, -1, 4, 5]),
    "two rows": ([[1, 2], [5, 6]], [[0, 1, 2], [4, 5, 6]]),
}


@pytest.mark.parametrize("query, key", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("batch", [1, 2, gradients.FEW + 1])
def test_a_function_of_distances_is_that_of_all_pairs(query, key, batch):
    """Values and gradients, whichever way the positions allow."""
    query, key = (jnp.atleast_2d(jnp.asarray(each, jnp.int32)) for each in (query, key))
    generator = np.random.default_rng(0)
    parameters = tuple(jnp.asarray(generator.standard_normal(shape), jnp.float32) for shape in ((3,), (4, 3)))
    rows = query.shape[0]
    batch = batch if rows == 1 else batch if batch in (1, rows) else rows
    scores = jnp.asarray(generator.standard_normal((batch, 3, query.shape[1], key.shape[1])), jnp.float32)
    weights = generator.standard_normal((max(rows, batch), *scores.shape[1:])).astype(np.float32)
    distance = np.maximum(np.asarray(query)[:, :, None] - np.asarray(key)[:, None], 0)

    def plain(scores, parameters):
        slope, table = parameters
        heads = [
            each * jnp.log1p(distance) + table[:, head][np.minimum(distance, 3)] for head, each in enumerate(slope)
        ]
        return scores + jnp.stack(heads, 1)

    def ours(scores, parameters):
        return gradients.plus_of_distances(weigh, scores, parameters, query, key)

    def both(way):
        value = lambda *given: jnp.sum(weights * way(*given))  # noqa: E731
        return way(scores, parameters), jax.grad(value, argnums=(0, 1))(scores, parameters)

    found, expected = jax.jit(lambda: both(ours))(), both(plain)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_gelu_stays_near_the_normal_distribution_it_stands_for():
    x = np.linspace(-6, 6, 101)
    np.testing.assert_allclose(gradients.gelu(jnp.asarray(x, jnp.float32)), x * norm.cdf(x), atol=5e-4)
    far = jnp.asarray([-1e4, 1e4], jnp.float32)
    assert jax.vmap(jax.grad(gradients.gelu))(far).tolist() == [0.0, 1.0]


def test_a_layer_norm_of_equal_numbers_is_its_bias_and_has_finite_gradients():
    x, scale, bias = jnp.full((2, 8), 3.0), jnp.ones(8), jnp.arange(8.0)
    assert np.array_equal(gradients.layer_norm(x, scale, bias), np.tile(np.arange(8.0), (2, 1)))
    found = jax.grad(lambda x: jnp.sum(gradients.layer_norm(x, scale, bias) ** 2))(x)
    assert np.all(np.isfinite(found))


def test_a_layer_norm_far_from_zero_keeps_its_digits():
    """Where the mean of squares less the squared mean would have none left."""
    x = np.random.default_rng(0).standard_normal((3, 16)) + 1000.0
    x = x.astype(np.float32)
    exact = x.astype(np.float64)
    expected = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(gradients.layer_norm(jnp.asarray(x), jnp.ones(16), jnp.zeros(16)), expected, atol=2e-4)


@pytest.mark.parametrize("name", ["scores", "weighted"])
def test_products_of_bfloat16_are_float32_and_their_gradients_bfloat16(name):
    given = [each.astype(jnp.bfloat16) for each in arrays([(1, 2, 4, 4), (1, 2, 4, 4)])]
    function = getattr(gradients, name)
    assert function(*given).dtype == jnp.float32
    for each in jax.grad(lambda *given: jnp.sum(function(*given)), argnums=(0, 1))(*given):
        assert each.dtype == jnp.bfloat16


def test_a_product_of_anything_but_matrices_is_refused():
    with pytest.raises(ValueError, match=r"a product of two matrices is needed, not .* of \(2, 3, 4\) and \(4, 5\)"):
        gradients.dot_general(jnp.ones((2, 3, 4)), jnp.ones((4, 5)), (((2,), (0,)), ((), ())))
