"""Every encoding against float64 loops over its formula and against printed values; what is refused; the registry."""

import fractions
import functools
import math
import re
import zlib

import encodings_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_instance import IDS, INSTANCES, every_instance
from flax import nnx

from pe_ablation import encodings
from pe_ablation.attention import Mask, attend, centred
from pe_ablation.encodings import Scores, Tokens, bias
from pe_ablation.encodings.base import angles, geometric, softplus_inverse
from pe_ablation.encodings.kernels import phases

pytestmark = pytest.mark.usefixtures("quick_compilation")

H, D, M, L = 2, 8, 16, 16
B, T = 2, 7
FAR = 20_000
LAST = 2**31 - 1
ANGLES = ("sinusoidal", "rope", "transformer_xl", "p_rope", "xpos", "sum")
HOOKS = ("query", "key", "state", "logits", "values")


def acts_inside(name):
    """Whether attention sees an encoding at all; what acts at the input alone is the encoding `none` to it."""
    cls = encodings.find(name)
    return name == "none" or any(getattr(cls, hook) is not getattr(encodings.Encoding, hook) for hook in HOOKS)


INSIDE = [instance for instance, (name, _) in enumerate(INSTANCES) if acts_inside(name)]
every_attention = pytest.mark.parametrize("instance", INSIDE, ids=[IDS[i] for i in INSIDE])


def build(name, sizes=(H, D, M, L), **options):
    heads, head_dim, model_dim, length = sizes
    return encodings.make(
        name,
        num_heads=heads,
        head_dim=head_dim,
        model_dim=model_dim,
        train_length=length,
        rngs=nnx.Rngs(0),
        **options,
    )


@functools.cache
def parts(instance):
    """(graph, parameters) of an instance, its parameters drawn at scale 0.4 so that every term of the formula shows."""
    name, options = INSTANCES[instance]
    graph, abstract = nnx.split(nnx.eval_shape(lambda: build(name, **options)))
    random = np.random.default_rng(zlib.crc32(IDS[instance].encode()))
    return graph, jax.tree.map(lambda p: jnp.asarray(0.4 * random.standard_normal(p.shape), jnp.float32), abstract)


def encoding_of(instance):
    return nnx.merge(*parts(instance))


def formula(instance):
    """The oracle of an instance, with its parameters."""
    name, options = INSTANCES[instance]
    flat = {"/".join(path): np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(parts(instance)[1])}
    return oracle.FORMULAS[name](flat, **options)


def vectors(seed, length=T, batch=B):
    """q, k, v float32 [batch,length,H,D]; |q| |k| is about sqrt(D)."""
    draw = np.random.default_rng(seed).standard_normal
    return [jnp.asarray(scale * draw((batch, length, H, D)), jnp.float32) for scale in (0.6, 0.6, 1.0)]


ORDERED = jnp.asarray([[0, 1, 2, 3, 4, 5, 6], [2, 3, 5, 8, 9, 14, 15]], jnp.int32)


INPUTS = jnp.asarray(np.random.default_rng(23).standard_normal((B, 16, M)), jnp.float32)


def inputs(positions):
    """A layer's input [B,T,M] at positions [B,T]: the nth token of a row, whatever its position, has the nth input."""
    positions = jnp.asarray(positions)
    earlier = (positions[:, None, :] >= 0) & (positions[:, None, :] < positions[:, :, None])
    return jnp.take_along_axis(INPUTS, jnp.sum(earlier, axis=2)[..., None], axis=1)


def tokens(encoding, vec, positions):
    """One side of attention with the state of `inputs`, which an encoding makes in the order of time."""
    order = jnp.argsort(positions, axis=1)
    in_order = jnp.take_along_axis(positions, order, axis=1)
    found = encoding.state(inputs(in_order), in_order, None)
    if found is None:
        return Tokens(vec, positions)
    back = jnp.argsort(order, axis=1)[..., None, None]
    return Tokens(vec, positions, jnp.take_along_axis(found[0], back, axis=1))


@functools.cache
def scored(instance):
    """Jitted scaled logits [B,H,T,S] of x [B,T,H,D] under the hooks, embed included: what attention would mask.

    Of an encoding that is given all keys of a query, 0 for those that the query does not see.
    """
    graph, _ = parts(instance)

    def run(parameters, x, y, query_positions, key_positions):
        encoding = nnx.merge(graph, parameters)
        q = encoding.embed(x.reshape(*x.shape[:2], M), query_positions).reshape(x.shape)
        k = encoding.embed(y.reshape(*y.shape[:2], M), key_positions).reshape(y.shape)
        shown = query_positions, key_positions
        shown = centred(*map(jnp.asarray, shown)) if encoding.recentred else shown
        a = jnp.einsum("bthd,bshd->bhts", encoding.query(q, shown[0]), encoding.key(k, shown[1])) / np.sqrt(D)
        queries, keys = tokens(encoding, q, query_positions), tokens(encoding, k, key_positions)
        if encoding.scores is not Scores.ROW:
            return encoding.logits(a, queries, keys)
        seen = Mask().tile(queries, keys)[:, None]
        return jnp.where(seen, encoding.logits(jnp.where(seen, a, -jnp.inf), queries, keys), 0.0)

    return jax.jit(run)


def tolerance(instance, position):
    """Absolute: float32 rounding for biases; for angles, whose rounding grows with the position, 1e-7 of it more."""
    return 1e-5 + (1e-7 * position if INSTANCES[instance][0] in ANGLES else 0.0)


def finite(tree):
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))


# Formulas


def positions_past(instance, far):
    """[B,T] positions up to `far`, or to the last that the encoding has."""
    last = encoding_of(instance).max_position
    top = far if last is None else min(far, last - 1)
    spread = np.asarray([[0, 0.01, 0.1, 0.33, 0.6, 0.999, 1.0], [0.002, 0.05, 0.2, 0.25, 0.5, 0.8, 0.95]])
    return np.asarray(spread * top, np.int32)


@every_instance
@pytest.mark.parametrize("far", [None, FAR], ids=["near", "far"])
def test_logits_equal_the_formula(instance, far):
    positions = np.asarray(ORDERED) if far is None else positions_past(instance, far)
    x, y, _ = vectors(1)
    rule = formula(instance)
    embedded = [
        np.asarray([[rule.embed(row.reshape(M), p) for row, p in zip(*each, strict=True)] for each in pairs])
        for pairs in (list(zip(np.asarray(z, np.float64), positions, strict=True)) for z in (x, y))
    ]
    q, k = (each.reshape(B, T, H, D) for each in embedded)
    expected = oracle.logits(rule, q, k, positions, positions, x=np.asarray(inputs(positions), np.float64))
    actual = np.asarray(scored(instance)(parts(instance)[1], x, y, positions, positions))
    seen = np.isfinite(expected)
    # vectors that an encoding adds to carry its rounding in proportion to their length
    size = max(1.0, np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max() / np.sqrt(D))
    atol = size * tolerance(instance, positions.max())
    np.testing.assert_allclose(actual[seen], expected[seen], rtol=1e-5, atol=atol)


@every_attention
def test_attention_equals_the_formula(instance):
    graph, parameters = parts(instance)
    q, k, v = vectors(2)

    @jax.jit
    def run(parameters):
        encoding = nnx.merge(graph, parameters)
        return attend(encoding, tokens(encoding, q, ORDERED), tokens(encoding, k, ORDERED), v)

    q64, k64, v64, x = (np.asarray(each, np.float64) for each in (q, k, v, inputs(ORDERED)))
    expected = oracle.attention(formula(instance), q64, k64, v64, ORDERED, ORDERED, x=x)
    np.testing.assert_allclose(run(parameters), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 12])
def test_alibi_of_any_head_count_equals_the_formula(heads):
    positions = np.asarray([[0, 3, 127, 4000, FAR]], np.int32)
    zero = np.zeros((1, 5, heads, 2), np.float32)
    actual = build("alibi", sizes=(heads, 2, 2 * heads, L)).logits(
        jnp.zeros((1, heads, 5, 5)), Tokens(zero, positions), Tokens(zero, positions)
    )
    expected = oracle.logits(oracle.alibi({}, heads), zero.astype(float), zero.astype(float), positions, positions)
    seen = np.isfinite(expected)
    np.testing.assert_allclose(np.asarray(actual)[seen], expected[seen], rtol=1e-5)


# Printed values

EIGHT = [2.0**-n for n in range(1, 9)]
SIXTEEN = [0.70710678, 0.5, 0.35355339, 0.25, *(2.0 ** (-n / 2) for n in range(5, 17))]
SLOPES = {
    1: [0.00390625],
    2: [0.0625, 0.00390625],
    3: [0.0625, 0.00390625, 0.25],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: EIGHT,
    10: [*EIGHT, 0.70710678, 0.35355339],
    12: [*EIGHT, 0.70710678, 0.35355339, 0.1767767, 0.08838835],
    16: SIXTEEN,
    20: [*SIXTEEN, 0.84089642, 0.59460356, 0.42044821, 0.29730178],
}


@pytest.mark.parametrize("heads", SLOPES)
def test_alibi_slopes_are_the_published_ones(heads):
    np.testing.assert_allclose(build("alibi", sizes=(heads, 2, 2 * heads, L)).slopes, SLOPES[heads], atol=5e-9)


NEAREST = [0.0323, 0.0533, 0.0878, 0.1447, 0.2387, 0.3935]


def test_alibi_in_bf16_tells_near_keys_apart_at_4096():
    """Zero queries and keys, one-hot values: the output is the weights of the last keys of the last row, slope 0.5."""
    length, heads = 4096, 8
    encoding = build("alibi", sizes=(heads, D, heads * D, L))
    zero = jnp.zeros((1, length, heads, D), jnp.bfloat16)
    v = zero.at[0, length - D :].set(jnp.eye(D, dtype=jnp.bfloat16)[:, None])
    position = jnp.arange(length)
    last = Tokens(zero[:, -1:], position[-1:])
    weights = np.asarray(attend(encoding, last, Tokens(zero, position), v)[0, 0, 0, -6:], np.float64)
    np.testing.assert_allclose(weights, NEAREST, rtol=0.02)


def test_what_positions_in_bf16_would_do():
    """The faults that tests of far positions in bf16 look for: 769 of 4,096 are left, eight keys weigh the same."""
    rounded = np.arange(4096).astype(jnp.bfloat16)
    assert len(np.unique(rounded)) == 769 and (float(rounded[257]), float(rounded[2501])) == (256, 2496)
    near = np.arange(256, 264).astype(jnp.bfloat16)
    assert near.astype(int).tolist() == [256, 256, 258, 260, 260, 260, 262, 264]
    bias = (rounded * np.asarray(0.5, jnp.bfloat16)).astype(np.float64)
    weights = np.exp(bias - bias.max()) / np.exp(bias - bias.max()).sum()
    np.testing.assert_allclose(weights[-8:], 0.1249, atol=5e-5)
    for position, phase, cosine in (
        (511, 0.223, 0.169),
        (2047, 0.894, 0.333),
        (4095, 1.789, 0.594),
        (16383, 7.16, 1.96),
    ):
        theta = geometric(32, 1e4)
        off = position * (theta.astype(jnp.bfloat16).astype(np.float64) - theta)
        assert np.abs(off).argmax() == 7 and np.abs(off).max() == pytest.approx(phase, abs=5e-3)
        assert np.abs(np.cos(position * theta + off) - np.cos(position * theta)).max() == pytest.approx(
            cosine, abs=5e-3
        )


BUCKETS = {0: 0, 1: 1, 15: 15, 16: 16, 18: 16, 19: 17, 24: 19, 31: 21, 64: 26, 100: 30, 112: 30}
BUCKETS |= {113: 31, 127: 31, 128: 31, 16384: 31}
FIRSTS = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_t5_buckets_are_the_published_ones():
    found = build("t5").bucket(jnp.asarray(list(BUCKETS)))
    assert dict(zip(BUCKETS, found.tolist(), strict=True)) == BUCKETS
    assert bias.t5_bucket_starts(32, 128).tolist() == [*range(16), *FIRSTS]


@pytest.mark.parametrize("buckets, distance", [(32, 128), (8, 12), (16, 64), (32, 17), (2, 5), (64, 1000)])
def test_t5_buckets_equal_the_formula_for_every_distance(buckets, distance):
    found = build("t5", num_buckets=buckets, max_distance=distance).bucket(jnp.arange(FAR))
    assert found.tolist() == [oracle.t5_bucket(each, buckets, distance) for each in range(FAR)]


def test_t5_every_bucket_gets_a_gradient_at_256():
    position = jnp.arange(256)
    draw = np.random.default_rng(3).standard_normal
    graph, parameters = nnx.split(build("t5"))
    x = jnp.asarray(draw((1, 256, H, D)), jnp.float32)

    def loss(parameters):
        encoding = nnx.merge(graph, parameters)
        return jnp.sum(jnp.sin(attend(encoding, Tokens(x, position), Tokens(x, position), x)))

    gradient = np.asarray(jax.jit(jax.grad(loss))(parameters)["table"][...])
    assert gradient.shape == (32, H)
    assert (np.abs(gradient).min(axis=1) > 1e-6).all()


def biases(encoding, distances, heads):
    """float32 [heads, distances]: what is added at these distances from the query."""
    query, keys = max(distances), [[max(distances) - each for each in distances]]
    zero = np.zeros((1, len(distances), heads, 2), np.float32)
    q, k = Tokens(zero[:, :1], jnp.asarray([[query]])), Tokens(zero, jnp.asarray(keys))
    return encoding.logits(jnp.zeros((1, heads, 1, len(distances))), q, k)[0, :, 0]


def holding(encoding, **values):
    """The encoding with these parameters, each filled with one value or given whole."""
    for name, value in values.items():
        parameter = getattr(encoding, name)
        parameter[...] = jnp.broadcast_to(jnp.asarray(value, jnp.float32), parameter.shape)
    return encoding


FEW = [0, 1, 2, 8, 64, 512]


@pytest.mark.parametrize(
    "scale, rate, distances, expected",
    [
        (1.0, 1.0, FEW, [0, -0.693147, -1.098612, -2.197225, -4.174387, -6.240276]),
        (0.5, 0.1, FEW, [0, -0.047655, -0.091161, -0.293893, -1.000740, -1.977541]),
        (1.0, 1.0, [0, 1, 3, 127], [0, -0.693147, -1.386294, -4.852030]),
    ],
)
def test_kerple_log_at_printed_values(scale, rate, distances, expected):
    found = holding(build("kerple_log"), scale=softplus_inverse(scale), rate=softplus_inverse(rate))
    np.testing.assert_allclose(biases(found, distances, H), [expected] * H, atol=1.1e-6)


def test_kerple_power_at_printed_values():
    found = holding(build("kerple_power"), scale=softplus_inverse(0.5), power=np.log(0.5 / 1.5))
    expected = [0, -0.5, -0.707107, -1.414214, -4, -11.313708]
    np.testing.assert_allclose(biases(found, FEW, H), [expected] * H, rtol=5e-7, atol=5e-7)


def test_kerple_power_of_one_is_alibi():
    alibi = build("alibi", sizes=(6, D, 6 * D, L))
    found = holding(build("kerple_power", sizes=(6, D, 6 * D, L)), scale=softplus_inverse(alibi.slopes), power=0.0)
    distances = [0, 1, 2, 5, 100, 4097, FAR]
    np.testing.assert_allclose(biases(found, distances, 6), biases(alibi, distances, 6), rtol=5e-6)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
def test_kerple_without_its_scale_is_none(name):
    np.testing.assert_allclose(biases(holding(build(name), scale=-40.0), [0, 1, 100, FAR], H), 0.0, atol=1e-9)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
@pytest.mark.parametrize("raw", [-40.0, -20.0, -5.0, 5.0, 20.0])
def test_kerple_stays_a_kernel_wherever_its_parameters_go(name, raw):
    """Never increasing with the distance, finite, and no parameter without a gradient, however far it has gone."""
    encoding = build(name)
    second = "rate" if name == "kerple_log" else "power"
    graph, parameters = nnx.split(holding(encoding, scale=raw, **{second: raw}))
    scale, other = (np.asarray(getattr(encoding, each)[...]) for each in ("scale", second))
    assert (jax.nn.softplus(scale) > 0).all() and (
        (jax.nn.softplus if second == "rate" else jax.nn.sigmoid)(other) > 0
    ).all()
    distances = [0, 1, 2, 3, 100, 16384, FAR]
    found = biases(encoding, distances, H)
    assert finite(found) and (np.diff(found, axis=1) <= 0).all() and float(found[:, -1].max()) < 0
    gradient = jax.grad(lambda parameters: biases(nnx.merge(graph, parameters), distances, H).sum())(parameters)
    assert finite(gradient)
    if raw < 20:
        assert all((np.asarray(leaf) != 0).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name, highs", [("kerple_log", (2.0, 1.0)), ("kerple_power", (1.0, 2.0))])
def test_kerple_starts_uniform(name, highs):
    encoding = build(name, sizes=(4000, 2, 8000, L))
    scale = np.asarray(jax.nn.softplus(encoding.scale[...]))
    second = jax.nn.softplus(encoding.rate[...]) if name == "kerple_log" else 2 * jax.nn.sigmoid(encoding.power[...])
    for values, high in zip((scale, np.asarray(second)), highs, strict=True):
        assert 0.01 - 1e-6 <= values.min() <= 0.02 and 0.99 * high < values.max() <= high
        assert values.mean() == pytest.approx(high / 2, rel=0.05) and np.std(values) == pytest.approx(
            high / 12**0.5, rel=0.05
        )


def test_learned_alibi_starts_as_alibi():
    for heads in (2, 6, 12):
        sizes = (heads, 2, 2 * heads, L)
        plain, learned = build("alibi", sizes=sizes), build("alibi", sizes=sizes, learned=True)
        np.testing.assert_allclose(biases(learned, FEW, heads), biases(plain, FEW, heads), rtol=1e-6)


def test_alibi_on_some_heads_leaves_the_others_alone():
    sizes = (5, 2, 10, L)
    some, two = biases(build("alibi", sizes=sizes, heads=2), FEW, 5), biases(build("alibi", sizes=(2, 2, 4, L)), FEW, 2)
    np.testing.assert_array_equal(some[:2], two)
    np.testing.assert_array_equal(some[2:], 0.0)


SHARES = {(1, 0): 0.024098, (10, 5): 0.102517, (511, 0): 0.999515, (511, 510): 0.024098, (1023, 0): 1.0}
SHARES |= {(1023, 1022): 0.020551, (1023, 511): 0.852823, (0, 0): 0.0}


def test_fire_scales_distances_as_printed():
    encoding = build("fire")
    pairs = jnp.asarray(list(SHARES))
    tokens = [Tokens(jnp.zeros((len(SHARES), 1, H, D)), pairs[:, side, None]) for side in (0, 1)]
    np.testing.assert_allclose(encoding.share(*tokens)[:, 0, 0], list(SHARES.values()), atol=8e-7)
    for (i, j), share in SHARES.items():
        assert oracle.fire_share(i, j, 0.1, 512) == pytest.approx(share, abs=5.1e-7)


SUMS = {0: [64, 62.0937, 57.3819, 45.7205, 30.5201, 14.0432], 1: [64, 62.5534, 58.7980, 46.8660, 31.1282, 16.0387]}


@pytest.mark.parametrize("first", SUMS)
def test_sandwich_sums_are_the_printed_ones(first):
    found = biases(build("sandwich", sizes=(8, 2, 16, L), first=first), FEW, 8)
    np.testing.assert_allclose(found[0] + 64, SUMS[first], atol=6e-5)
    np.testing.assert_allclose(found, found[0] / np.arange(1, 9)[:, None], rtol=1e-5, atol=1e-5)


def test_sandwich_in_nemos_form():
    found = biases(build("sandwich", sizes=(8, 2, 16, L)), FEW, 8)[0]
    expected = [0, -1.44662, -5.20199, -17.13399, -32.87182, -47.96132]
    np.testing.assert_allclose(found, expected, rtol=5e-6, atol=1e-5)  # a sum of 64 ones and less, in float32


@pytest.mark.parametrize("distance", [1, 512, FAR])
def test_sandwich_is_as_exact_far_as_near(distance):
    encoding = build("sandwich", sizes=(1, 2, 2, L))
    expected = 1 / 8 * (oracle.sandwich_sum(distance) - 64)
    zero = jnp.zeros((1, 1, 1, 2))
    for i in (distance, FAR + distance, 2**28 + distance, LAST):
        tokens = (Tokens(zero, jnp.asarray([[at]])) for at in (i, i - distance))
        assert float(encoding.logits(jnp.zeros((1, 1, 1, 1)), *tokens)[0, 0, 0, 0]) == pytest.approx(expected, abs=3e-6)


def test_phases_are_those_of_exact_products():
    positions, frequencies = [0, 1, 257, FAR, 2**30, LAST, -3], geometric(64, 1e4)
    cos, sin = phases(jnp.asarray(positions), frequencies)
    turns = [[fractions.Fraction(p) * fractions.Fraction(f / (2 * np.pi)) % 1 for f in frequencies] for p in positions]
    angle = 2 * np.pi * np.asarray(turns, np.float64)
    np.testing.assert_allclose(cos, np.cos(angle), atol=6e-7)
    np.testing.assert_allclose(sin, np.sin(angle), atol=6e-7)


# Encodings made of others


@pytest.mark.parametrize("name", ["alibi", "rope", "transformer_xl", "kerple_log"])
@pytest.mark.parametrize("which", ["first", "second"])
def test_a_sum_with_none_is_the_other(name, which):
    """`second` is built from the same keys as alone, since `none` draws nothing."""
    x, y, _ = vectors(22)
    alone, both = build(name), build("sum", **{"first": "none", "second": "none", which: name})
    assert (both.scores, both.shift_invariant, both.max_position) == (alone.scores, True, None)
    assert both.per_layer == tuple(f"{which}/{each}" for each in alone.per_layer)
    for hook, vec in (("query", x), ("key", y)):
        np.testing.assert_array_equal(getattr(both, hook)(vec, ORDERED), getattr(alone, hook)(vec, ORDERED))
    a = jnp.ones((B, H, T, T))
    q, k = Tokens(x, ORDERED), Tokens(y, ORDERED)
    np.testing.assert_array_equal(both.logits(a, q, k), alone.logits(a, q, k))


def test_a_sum_is_the_stronger_and_the_more_limited_of_two():
    mixed = build("sum", first="learned", second="dape")
    assert (mixed.scores, mixed.shift_invariant, mixed.max_position) == (Scores.CONTENT, False, L)
    assert mixed.overrides("embed") and not mixed.overrides("query")
    both = build("sum", first="learned", second="learned", first_options={"rows": 99}, second_options={"rows": 30})
    assert both.max_position == 30 and both.scores is Scores.NONE
    inner = build("sum", first="sum", second="alibi", first_options={"first": "t5", "second": "transformer_xl"})
    assert inner.per_layer == ("first/second/projection",)
    x, position = jnp.zeros((1, 1, M)), jnp.asarray([[3]])
    rows = both.first.table[...][3] + both.second.table[...][3]
    np.testing.assert_allclose(both.embed(x, position)[0, 0], rows, rtol=1e-6)


def test_a_sum_gives_each_its_own_state_and_adds_values():
    """Two forget gates with different weights, the state of the second past that of the first; then a value term."""
    both = build("sum", first="fox", second="fox")
    holding(both.second, gate=-0.5 * both.first.gate[...])
    q, k, _ = vectors(23)
    x = q.reshape(B, T, M)
    width = both.first.state(x, ORDERED, None)[0].shape[-1]
    shares = slice(0, width), slice(width, 2 * width)
    state, carry = both.state(x, ORDERED, jnp.ones((B, H, 2 * width)))
    assert state.shape[-1] == 2 * width
    for share, part in zip(shares, (both.first, both.second), strict=True):
        own, last = part.state(x, ORDERED, jnp.ones((B, H, width)))
        np.testing.assert_array_equal(state[..., share], own)
        np.testing.assert_array_equal(carry[..., share], last)
    a = jnp.zeros((B, H, T, T))
    tokens = [Tokens(vec, ORDERED, state) for vec in (q, k)]
    expected = sum(
        part.logits(a, *(each._replace(state=state[..., share]) for each in tokens))
        for share, part in zip(shares, (both.first, both.second), strict=True)
    )
    np.testing.assert_allclose(both.logits(a, *tokens), expected, rtol=1e-5, atol=1e-6)
    mixed = build("sum", first="shaw", second="fox")
    assert both.values(a, *tokens) is None
    np.testing.assert_array_equal(mixed.values(a + 1, *tokens), mixed.first.values(a + 1, *tokens))
    twice = build("sum", first="shaw", second="shaw")
    expected = twice.first.values(a + 1, *tokens) + twice.second.values(a + 1, *tokens)
    np.testing.assert_allclose(twice.values(a + 1, *tokens), expected, rtol=1e-6)
    assert mixed.state(x, ORDERED, None)[0].shape == (B, T, H, width) and twice.state(x, ORDERED, None) is None


@pytest.mark.parametrize("base", ["alibi", "kerple_log", "fire"])
def test_dape_with_a_silent_mlp_is_its_base(base):
    q, k, _ = vectors(24)
    encoding = holding(build("dape", base=base), outer=0.0)
    a = jnp.asarray(np.random.default_rng(25).standard_normal((B, H, T, T)), jnp.float32)
    found = encoding.logits(a, Tokens(q, ORDERED), Tokens(k, ORDERED))
    np.testing.assert_allclose(found, encoding.base.logits(a, Tokens(q, ORDERED), Tokens(k, ORDERED)), rtol=1e-6)
    assert encoding.shift_invariant == (base != "fire")


def test_dape_leaves_keys_masked_beforehand_masked():
    q, k, _ = vectors(26)
    a = jnp.zeros((B, H, T, T)).at[:, :, 2:, 1].set(-jnp.inf)

    def total(a):
        out = build("dape").logits(a, Tokens(q, ORDERED), Tokens(k, ORDERED))
        return jnp.sum(jnp.where(jnp.isneginf(a), 0.0, out)), out

    gradient, out = jax.grad(total, has_aux=True)(a)
    np.testing.assert_array_equal(jnp.isneginf(out), jnp.isneginf(a))
    assert finite(gradient) and not bool(jnp.isnan(out).any())


def test_sinusoid_at_position_three_of_eight_channels():
    sin, cos = [0.14112, 0.29552, 0.029996, 0.003000], [-0.989992, 0.955336, 0.999550, 0.999996]
    zero, position = jnp.zeros((1, 1, 8)), jnp.asarray([[3]])
    sizes = (2, 4, 8, L)
    concatenated = build("sinusoidal", sizes=sizes, interleaved=False).embed(zero, position)
    np.testing.assert_allclose(concatenated[0, 0], sin + cos, atol=5e-6)
    interleaved = build("sinusoidal", sizes=sizes).embed(zero, position)
    np.testing.assert_allclose(interleaved[0, 0], np.stack([sin, cos], -1).ravel(), atol=5e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_sinusoid_further_on_is_a_fixed_linear_map_of_one_here(interleaved):
    """PE(p + k) = R(k) PE(p), R(k) turns each pair by k theta, whatever p is (Vaswani et al. 2017, section 3.5)."""
    channels = 64
    theta = 10_000.0 ** (-np.arange(0, channels, 2) / channels)
    sin, cos = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, 32), slice(32, None))
    module = build("sinusoidal", sizes=(2, 32, channels, L), interleaved=interleaved)

    def moved(rows, k):
        out = np.empty_like(rows)
        out[..., sin] = np.cos(k * theta) * rows[..., sin] + np.sin(k * theta) * rows[..., cos]
        out[..., cos] = np.cos(k * theta) * rows[..., cos] - np.sin(k * theta) * rows[..., sin]
        return out

    def float32(positions):
        zero = jnp.zeros((1, len(positions), channels))
        return np.asarray(module.embed(zero, jnp.asarray(positions)[None])[0], np.float64)

    def float64(positions):
        return np.stack([oracle.sinusoid(p, channels, interleaved) for p in positions])

    here = np.asarray([0, 1, 17, 512, 4096, 9000])
    for k in (1, 7, 100, 1000):
        np.testing.assert_allclose(float64(here + k), moved(float64(here), k), atol=1e-5)
        np.testing.assert_allclose(float32(here + k), moved(float32(here), k), atol=2e-3)


def test_a_sinusoid_starts_with_sines_of_zero():
    zero, start = jnp.zeros((1, 1, 8)), jnp.asarray([[0]])
    for interleaved, expected in ((True, [0, 1] * 4), (False, [0] * 4 + [1] * 4)):
        found = build("sinusoidal", sizes=(2, 4, 8, L), interleaved=interleaved).embed(zero, start)
        np.testing.assert_array_equal(found[0, 0], expected)


def test_rope_frequencies_of_64_dims():
    """The second half of a pair's turned unit vector is the sine of the angle: at position 1, of theta."""
    turned = build("rope", sizes=(1, 64, 64, L)).query(jnp.eye(64)[None, :, None], jnp.ones((1, 64), jnp.int32))[
        0, :, 0
    ]
    theta = np.asarray([np.arctan2(turned[k, k + 32], turned[k, k]) for k in range(32)])
    expected = {0: 1.0, 1: 0.749894209, 15: 0.013335214, 16: 0.01, 31: 1.33352e-4}
    np.testing.assert_allclose(theta[list(expected)], list(expected.values()), rtol=3e-6)
    np.testing.assert_allclose(geometric(32, 1e4)[[1, 15]], [0.749894209, 0.013335214], atol=5e-10)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_in_bf16_rounds_only_its_result(interleaved):
    positions = np.asarray([[511, 2047, 4095, 16383]], np.int32)
    encoding = build("rope", sizes=(1, 64, 64, L), interleaved=interleaved)
    first = np.zeros((1, 4, 1, 64))
    first[..., (slice(0, None, 2) if interleaved else slice(0, 32))] = 1.0
    turned = np.asarray(encoding.key(jnp.asarray(first, jnp.bfloat16), positions)[0, :, 0], np.float64)
    expected = [oracle.rotated(first[0, 0, 0], p, interleaved=interleaved) for p in positions[0]]
    assert np.abs(turned - expected).max() <= 0.004


def test_rope_in_bf16_keeps_neighbours_past_256_apart():
    ones = jnp.ones((1, 8, 1, 64), jnp.bfloat16)
    turned = build("rope", sizes=(1, 64, 64, L)).query(ones, jnp.arange(256, 264)[None])
    assert len(np.unique(np.asarray(turned[0, :, 0], np.float32), axis=0)) == 8


@pytest.mark.parametrize("position, radians", [(131_071, 0.0017), (1_048_575, 0.026)])
def test_the_rounding_of_far_angles_is_known(position, radians):
    theta = geometric(32, 1e4)
    off = np.abs(np.asarray(angles(jnp.asarray([position]), theta), np.float64)[0] - position * theta)
    assert 0.1 * radians < off.max() <= 1.05 * radians


def test_rope_keeps_lengths_and_position_zero():
    q, _, _ = vectors(5)
    for options in ({}, {"interleaved": True}, {"fraction": 0.5}):
        encoding = build("rope", **options)
        turned = encoding.query(q, ORDERED * 1000)
        np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(q, axis=-1), rtol=1e-5)
        np.testing.assert_array_equal(turned[0, 0], q[0, 0])


def test_rope_variants_are_one_function_up_to_a_permutation():
    q, _, _ = vectors(6)
    apart = np.arange(D).reshape(2, D // 2).T.ravel()  # column of `half-split` that lands on each interleaved column
    half, interleaved = build("rope"), build("rope", interleaved=True)
    np.testing.assert_allclose(half.query(q, ORDERED)[..., apart], interleaved.query(q[..., apart], ORDERED), atol=1e-6)


# The interface


def test_every_registered_encoding_is_covered_and_has_a_card():
    assert encodings.names() == (
        "none", "sinusoidal", "learned", "rope", "alibi", "t5", "transformer_xl", "p_rope", "xpos", "shaw", "cope",
        "fox", "kerple_log", "kerple_power", "fire", "sandwich", "sum", "dape",
    )  # fmt: skip
    assert {name for name, _ in INSTANCES} == set(encodings.names())
    for name in encodings.names():
        cls = encodings.find(name)
        assert "about" in vars(cls) and all(cls.about)


@every_instance
def test_distance_matters_unless_tokens_alone_do(instance):
    x, y, _ = vectors(15)
    _, parameters = parts(instance)
    position = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    near = scored(instance)(parameters, x, y, position + 7, position + 7)
    far = scored(instance)(parameters, x, y, position + 8, position + 7)
    moved = float(jnp.abs(far - near).max())
    assert moved == 0.0 if INSTANCES[instance][0] in ("none", "fox") else moved > 1e-3


def test_angles_are_float32_of_exact_positions():
    """257 and its neighbours are apart, which bf16 positions are not."""
    found = angles(jnp.arange(255, 260), geometric(4, 1e4))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.arange(255, 260)[:, None] * geometric(4, 1e4), rtol=1e-6)


def test_distance_is_int32_and_never_negative():
    position = jnp.asarray([[-(2**31), -1, 0, 1, 300, 2**30, LAST]])
    tokens = Tokens(jnp.zeros((1, 7, H, D), jnp.bfloat16), position)
    found = encodings.distance(tokens, tokens)
    assert found.dtype == jnp.int32 and int(found.min()) == 0
    assert int(found[0, 6, 2]) == LAST and int(found[0, 2, 6]) == 0


# Refusals and the registry

REFUSED = [
    ("sinusoidal", (2, 3, 7, L), {}, ["model_dim", "7"]),
    ("transformer_xl", (1, 7, 7, L), {}, ["model_dim", "7"]),
    ("transformer_xl", (H, D, M, L), {"clamp": 0}, ["encoding.options.clamp", "0"]),
    ("rope", (2, 7, 14, L), {}, ["model_dim", "head_dim 7", "odd"]),
    ("rope", (H, D, M, L), {"fraction": 0.3}, ["encoding.options.fraction", "0.3"]),
    ("rope", (H, D, M, L), {"fraction": 1.5}, ["encoding.options.fraction", "1.5"]),
    ("rope", (H, D, M, L), {"fraction": 0.0}, ["encoding.options.fraction", "0.0"]),
    ("rope", (H, D, M, L), {"base": 1.0}, ["encoding.options.base", "1.0"]),
    ("learned", (H, D, M, L), {"rows": 15}, ["encoding.options.rows", "15", "16"]),
    ("t5", (H, D, M, L), {"num_buckets": 7}, ["encoding.options.num_buckets", "7"]),
    ("t5", (H, D, M, L), {"num_buckets": 0}, ["encoding.options.num_buckets", "0"]),
    ("t5", (H, D, M, L), {"max_distance": 16}, ["encoding.options.max_distance", "16"]),
    ("p_rope", (2, 7, 14, L), {}, ["model_dim", "head_dim 7", "odd"]),
    ("p_rope", (H, D, M, L), {"p": 1.5}, ["encoding.options.p", "1.5"]),
    ("p_rope", (H, D, M, L), {"base": 0.5}, ["encoding.options.base", "0.5"]),
    ("p_rope", (H, D, M, L), {"partial": True, "reversed": True}, ["encoding.options.partial", "reversed"]),
    ("xpos", (2, 7, 14, L), {}, ["model_dim", "head_dim 7", "odd"]),
    ("xpos", (H, D, M, L), {"scale_base": 0.0}, ["encoding.options.scale_base", "0.0"]),
    ("xpos", (H, D, M, L), {"scale_base": 31.0}, ["encoding.options.scale_base", "31.0", "at least 32.0"]),
    ("xpos", (H, D, M, L), {"scale_base": math.inf}, ["encoding.options.scale_base", "inf"]),
    ("fox", (H, D, M, L), {"bias": math.nan}, ["encoding.options.bias: nan is not a finite number"]),
    ("sum", (H, D, M, L), {"second_options": {"learned": math.inf}}, ["encoding.options.second_options.learned: inf"]),
    ("shaw", (H, D, M, L), {"clip": 0}, ["encoding.options.clip", "0"]),
    ("cope", (H, D, M, L), {"count": 1}, ["encoding.options.count", "1"]),
    ("none", (H, D, M, L), {"slopes": 3}, ["encoding.options.slopes", "none has no such option", "allowed: none"]),
    ("alibi", (H, D, M, L), {"slopes": 3}, ["encoding.options.slopes", "alibi", "learned, heads"]),
    ("alibi", (H, D, M, L), {"heads": 0}, ["encoding.options.heads", "0 of 2"]),
    ("alibi", (H, D, M, L), {"heads": 3}, ["encoding.options.heads", "3 of 2"]),
    ("fire", (H, D, M, L), {"hidden_layers": 3}, ["encoding.options.hidden_layers", "3", "1, 2"]),
    ("fire", (H, D, M, L), {"width": 0}, ["encoding.options.width", "0"]),
    ("fire", (H, D, M, L), {"threshold": 0}, ["encoding.options.threshold", "0"]),
    ("sandwich", (H, D, M, L), {"dbar": 7}, ["encoding.options.dbar", "7"]),
    ("sandwich", (H, D, M, L), {"first": 2}, ["encoding.options.first", "2", "0, 1"]),
    ("sum", (H, D, M, L), {"second": "transformer_xl"}, ["encoding.options.second", "rope", "transformer_xl"]),
    ("sum", (H, D, M, L), {"first": "ropes"}, ["encoding.options.first:", "ropes", "rope, alibi"]),
    ("sum", (H, D, M, L), {"first_options": {"bas": 2.0}}, ["encoding.options.first_options.bas", "base, fraction"]),
    ("sum", (H, D, M, L), {"first_options": {"fraction": 0.3}}, ["encoding.options.first_options.fraction", "0.3"]),
    ("dape", (H, D, M, L), {"base": "none"}, ["encoding.options.base", "none", "alibi, t5"]),
    ("dape", (H, D, M, L), {"base": "rope"}, ["encoding.options.base", "rope"]),
    ("dape", (H, D, M, L), {"base": "dape"}, ["encoding.options.base", "dape"]),
    ("dape", (H, D, M, L), {"base": "sum"}, ["encoding.options.base", "sum"]),
    ("dape", (H, D, M, L), {"base": "t5", "base_options": {"num_buckets": 7}}, ["options.base_options.num_buckets"]),
    ("dape", (H, D, M, L), {"width": 0}, ["encoding.options.width", "0"]),
    ("rope", (H, D, M, L), {"bas": 3.0}, ["encoding.options.bas", "base, fraction, interleaved"]),
    ("ropes", (H, D, M, L), {}, ["ropes", "rope, alibi, t5, transformer_xl"]),
    ("nowhere.py:Mine", (H, D, M, L), {}, ["nowhere.py"]),
]


@pytest.mark.parametrize("name, sizes, options, words", REFUSED)
def test_what_cannot_be_built_is_refused_by_name(name, sizes, options, words):
    with pytest.raises(ValueError) as refusal:
        build(name, sizes=sizes, **options)
    assert all(word in str(refusal.value) for word in words)


OWN = """
from pe_ablation.encodings import Encoding, Scores
class Flat(Encoding):
    scores = Scores.BIAS
    def __init__(self, sizes, rngs, *, amount: float = 1.0):
        self.amount = amount
    def logits(self, a, q, k):
        return a + self.amount
class Other: pass
"""


def test_an_encoding_of_ones_own_is_named_by_its_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    name = f"{file}:Flat"
    assert float(build(name, amount=2.5).logits(jnp.zeros(()), None, None)) == 2.5
    assert encodings.option_types(name) == {"amount": float}
    assert encodings.resolved_options(name, {"amount": 1.0}) == {}
    assert encodings.resolved_options(name, {"amount": 2.0}) == {"amount": 2.0}
    assert re.fullmatch("[0-9a-f]{64}", encodings.source_digest(name)) and encodings.source_digest("rope") == ""
    file.write_text(OWN.replace("amount: float = 1.0", "amount"))
    encodings._module.cache_clear()
    for ask in (encodings.option_defaults, build):
        with pytest.raises(ValueError, match=r"encoding\.options\.amount: .*Flat gives it no default"):
            ask(name)
    for missing in ("Other", "Absent"):
        with pytest.raises(ValueError, match=missing):
            encodings.find(f"{file}:{missing}")


def test_option_types_are_those_of_the_class():
    assert encodings.option_types("rope") == {
        "base": float,
        "fraction": float,
        "interleaved": bool,
        "frequencies": tuple[float, ...] | None,
        "magnitude": float,
    }
    assert encodings.option_types("none") == {}
