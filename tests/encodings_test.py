"""Every encoding against float64 loops over its formula, against printed values, and its interface's promises."""

import functools
import re
import zlib

import encodings_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pe_ablation import attention, encodings
from pe_ablation.attention import Mask, attend
from pe_ablation.encodings import Scores, Tokens, bias
from pe_ablation.encodings.base import angles, geometric

pytestmark = pytest.mark.usefixtures("quick_compilation")

H, D, M, L = 2, 8, 16, 16
B, T = 2, 7
FAR = 20_000
LAST = 2**31 - 1
INSTANCES = encodings.instances()
IDS = [name + "".join(f"-{key}={value}" for key, value in options.items()) for name, options in INSTANCES]
ANGLES = ("sinusoidal", "rope", "transformer_xl")
every_instance = pytest.mark.parametrize("instance", range(len(INSTANCES)), ids=IDS)
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
    flat = {path[0]: np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(parts(instance)[1])}
    return oracle.FORMULAS[name](flat, **options)


def vectors(seed, length=T, batch=B):
    """q, k, v float32 [batch,length,H,D]; |q| |k| is about sqrt(D)."""
    draw = np.random.default_rng(seed).standard_normal
    return [jnp.asarray(scale * draw((batch, length, H, D)), jnp.float32) for scale in (0.6, 0.6, 1.0)]


ORDERED = jnp.asarray([[0, 1, 2, 3, 4, 5, 6], [2, 3, 5, 8, 9, 14, 15]], jnp.int32)
PADDED = jnp.asarray([[0, 1, 2, 3, 4, 5, 6], [-1, -1, 0, 1, 2, 3, 4]], jnp.int32)


@functools.cache
def attended(instance, implementation="dense"):
    """Jitted (output, gradients of parameters, q, k and v against a fixed cotangent) of `attend`."""
    graph, _ = parts(instance)

    def run(parameters, q, k, v, query_positions, key_positions, window, cotangent):
        def forward(parameters, q, k, v):
            encoding = nnx.merge(graph, parameters)
            queries, keys = Tokens(q, query_positions), Tokens(k, key_positions)
            return attend(encoding, queries, keys, v, mask=Mask(window=window), implementation=implementation)

        out, pull = jax.vjp(forward, parameters, q, k, v)
        return out, pull(cotangent)

    return jax.jit(run)


def attend_all(instance, q, k, v, query_positions, key_positions, *, window=LAST, implementation="dense", rows=None):
    """`attended` under a random cotangent, zero on the rows that `rows` leaves out."""
    cotangent = jnp.asarray(np.random.default_rng(9).standard_normal((B, T, H, D)), v.dtype)
    cotangent = jnp.pad(cotangent, [(0, 0), (q.shape[1] - T, 0), (0, 0), (0, 0)])
    if rows is not None:
        cotangent = jnp.where(rows[..., None, None], cotangent, 0)
    instance = instance if instance in INSIDE else 0
    run, (_, parameters) = attended(instance, implementation), parts(instance)
    return run(parameters, q, k, v, query_positions, key_positions, jnp.int32(window), cotangent)


@functools.cache
def scored(instance):
    """Jitted scaled logits [B,H,T,S] of x [B,T,H,D] under the hooks, embed included: what attention would mask."""
    graph, _ = parts(instance)

    def run(parameters, x, y, query_positions, key_positions):
        encoding = nnx.merge(graph, parameters)
        q = encoding.embed(x.reshape(*x.shape[:2], M), query_positions).reshape(x.shape)
        k = encoding.embed(y.reshape(*y.shape[:2], M), key_positions).reshape(y.shape)
        query, key = encoding.query(q, query_positions), encoding.key(k, key_positions)
        a = jnp.einsum("bthd,bshd->bhts", query, key) / np.sqrt(D)
        return encoding.logits(a, Tokens(q, query_positions), Tokens(k, key_positions))

    return jax.jit(run)


def tolerance(instance, position):
    """Absolute: float32 rounding for biases; for angles, whose rounding grows with the position, 1e-7 of it more."""
    return 1e-5 + (1e-7 * position if INSTANCES[instance][0] in ANGLES else 0.0)


def close(actual, expected, rtol=1e-5, atol=1e-5):
    """Two trees agree, leaf by leaf; `atol` is relative to the largest entry of a leaf, or 1."""
    ours, theirs = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        b = np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=rtol, atol=atol * max(1.0, np.abs(b).max()))


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
    expected = oracle.logits(rule, q, k, positions, positions)
    actual = np.asarray(scored(instance)(parts(instance)[1], x, y, positions, positions))
    seen = np.isfinite(expected)
    # vectors that an encoding adds to carry its rounding in proportion to their length
    size = max(1.0, np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max() / np.sqrt(D))
    atol = size * tolerance(instance, positions.max())
    np.testing.assert_allclose(actual[seen], expected[seen], rtol=1e-5, atol=atol)


@every_attention
def test_attention_equals_the_formula(instance):
    q, k, v = vectors(2)
    expected = oracle.attention(
        oracle.logits(formula(instance), *(np.asarray(x, np.float64) for x in (q, k)), ORDERED, ORDERED),
        np.asarray(v, np.float64),
    )
    close(attend_all(instance, q, k, v, ORDERED, ORDERED)[0], expected)


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


def test_alibi_in_bf16_tells_near_keys_apart_at_4096():
    """Zero queries and keys, one-hot values: the output is the weights of the last keys of the last row, slope 0.5."""
    length, heads = 4096, 8
    encoding = build("alibi", sizes=(heads, D, heads * D, L))
    zero = jnp.zeros((1, length, heads, D), jnp.bfloat16)
    v = zero.at[0, length - D :].set(jnp.eye(D, dtype=jnp.bfloat16)[:, None])
    position = jnp.arange(length)
    last = Tokens(zero[:, -1:], position[-1:])
    weights = np.asarray(attend(encoding, last, Tokens(zero, position), v)[0, 0, 0, -6:], np.float64)
    np.testing.assert_allclose(weights, [0.0323, 0.0533, 0.0878, 0.1447, 0.2387, 0.3935], rtol=0.02)


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


def test_sinusoid_at_position_three_of_eight_channels():
    sin, cos = [0.14112, 0.29552, 0.029996, 0.003000], [-0.989992, 0.955336, 0.999550, 0.999996]
    zero, position = jnp.zeros((1, 1, 8)), jnp.asarray([[3]])
    sizes = (2, 4, 8, L)
    concatenated = build("sinusoidal", sizes=sizes, interleaved=False).embed(zero, position)
    np.testing.assert_allclose(concatenated[0, 0], sin + cos, atol=5e-6)
    interleaved = build("sinusoidal", sizes=sizes).embed(zero, position)
    np.testing.assert_allclose(interleaved[0, 0], np.stack([sin, cos], -1).ravel(), atol=5e-6)


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


# Promises of the interface


def shapes_of(instance):
    return {path[0]: leaf.shape for path, leaf in nnx.to_flat_state(parts(instance)[1])}


COUNTS = {
    "none": lambda options: 0,
    "sinusoidal": lambda options: 0,
    "learned": lambda options: options.get("rows", L) * M,
    "rope": lambda options: 0,
    "alibi": lambda options: 0,
    "t5": lambda options: options.get("num_buckets", 32) * H,
    "transformer_xl": lambda options: 2 * H * D + M * H * D,
}


@every_instance
def test_parameters_are_as_many_as_stated(instance):
    name, options = INSTANCES[instance]
    count = sum(np.prod(shape) for shape in shapes_of(instance).values())
    assert count == COUNTS[name](options)
    stated = re.sub(r"\(shared\)|per layer", "", encodings.find(name).about.parameters)
    defaults = {"rows": None, "num_buckets": 32}
    assert count == eval(stated, {"__builtins__": {}}, {"H": H, "D": D, "M": M, "L": L} | defaults | options)


def test_every_registered_encoding_is_covered_and_has_a_card():
    assert encodings.names() == ("none", "sinusoidal", "learned", "rope", "alibi", "t5", "transformer_xl")
    assert {name for name, _ in INSTANCES} == set(encodings.names())
    for name in encodings.names():
        cls = encodings.find(name)
        assert "about" in vars(cls) and all(cls.about)
        assert set(cls.per_layer) <= set().union(*(shapes_of(i) for i, (n, _) in enumerate(INSTANCES) if n == name))


@every_instance
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hooks_keep_dtypes_and_embed_nothing_into_empty_slots(instance, dtype):
    q, k, _ = (x.astype(dtype) for x in vectors(7))
    encoding = encoding_of(instance)
    assert encoding.query(q, ORDERED).dtype == encoding.key(k, ORDERED).dtype == dtype
    assert encoding.query(q, ORDERED).shape == encoding.key(k, ORDERED).shape
    x = q.reshape(B, T, M)
    embedded = encoding.embed(x, PADDED)
    assert embedded.shape == x.shape and embedded.dtype == dtype
    np.testing.assert_array_equal(np.asarray(embedded[1, :2], np.float32), np.asarray(x[1, :2], np.float32))
    scores = jnp.zeros((B, H, T, T))
    assert encoding.logits(scores, Tokens(q, ORDERED), Tokens(k, ORDERED)).dtype == jnp.float32
    assert encoding.values(scores, Tokens(q, ORDERED), Tokens(k, ORDERED)) is None
    assert encoding.state(x, ORDERED, None) is None


@every_attention
def test_jit_equals_eager(instance):
    q, k, v = vectors(8)
    eager = attend(encoding_of(instance), Tokens(q, ORDERED), Tokens(k, ORDERED), v, implementation="dense")
    close(attend_all(instance, q, k, v, ORDERED, ORDERED)[0], eager, rtol=2e-6, atol=2e-6)


@every_attention
def test_blockwise_equals_dense_in_values_and_gradients(instance, monkeypatch):
    """7 queries in blocks of 3; padded keys and a window too."""
    monkeypatch.setattr(attention, "BLOCK", 3)
    q, k, v = vectors(10)
    for positions, window in ((ORDERED, LAST), (PADDED, 3)):
        dense = attend_all(instance, q, k, v, positions, positions, window=window)
        blockwise = attend_all(instance, q, k, v, positions, positions, window=window, implementation="blockwise")
        close(blockwise, dense)
        assert all(float(jnp.abs(gradient).max()) > 1e-3 for gradient in jax.tree.leaves(dense[1]))


@every_attention
def test_what_empty_slots_hold_reaches_nothing(instance):
    """NaN in the vectors of empty slots: outputs and gradients are those of zeros there, and finite."""
    q, k, v = vectors(11)
    empty = (PADDED < 0)[..., None, None]
    clean = attend_all(instance, *(jnp.where(empty, 0.0, x) for x in (q, k, v)), PADDED, PADDED)
    poisoned = attend_all(instance, *(jnp.where(empty, jnp.nan, x) for x in (q, k, v)), PADDED, PADDED)
    assert finite(poisoned)
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)
    for gradient in poisoned[1][1:]:
        np.testing.assert_array_equal(jnp.where(empty, gradient, 0.0), 0.0)


@every_attention
def test_the_order_of_keys_is_that_of_positions(instance):
    q, k, v = vectors(12)
    shuffled = np.asarray([3, 0, 6, 2, 5, 1, 4])
    out, gradients = attend_all(instance, q, k, v, ORDERED, ORDERED)
    again, theirs = attend_all(instance, q, k[:, shuffled], v[:, shuffled], ORDERED, ORDERED[:, shuffled])
    close(again, out)
    close(theirs[0], gradients[0])
    close(theirs[2], gradients[2][:, shuffled])


@every_attention
def test_one_query_equals_the_last_row(instance):
    q, k, v = vectors(13)
    full, _ = attend_all(instance, q, k, v, ORDERED, ORDERED)
    one = attend(encoding_of(instance), Tokens(q[:, -1:], ORDERED[:, -1:]), Tokens(k, ORDERED), v)
    assert one.shape == (B, 1, H, D)
    close(one, full[:, -1:])


@every_instance
def test_shift_invariance_is_as_claimed(instance):
    """Shifted positions change no seen logit where that is claimed; where it is not, a shift by 8 shows."""
    x, y, _ = vectors(14)
    _, parameters = parts(instance)
    run = scored(instance)
    seen = np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, H, T, T))
    position = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    base = np.asarray(run(parameters, x, y, position, position))[seen]
    if not encoding_of(instance).shift_invariant:
        shifted = np.asarray(run(parameters, x, y, position + 8, position + 8))[seen]
        assert np.abs(shifted - base).max() > 1e-2
        return
    for offset in (1, 8, 300, 4097, FAR):
        shifted = np.asarray(run(parameters, x, y, position + offset, position + offset))[seen]
        np.testing.assert_allclose(shifted, base, rtol=1e-5, atol=2 * tolerance(instance, offset))


@every_instance
def test_distance_matters_unless_there_is_no_encoding(instance):
    x, y, _ = vectors(15)
    _, parameters = parts(instance)
    position = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    near = scored(instance)(parameters, x, y, position + 7, position + 7)
    far = scored(instance)(parameters, x, y, position + 8, position + 7)
    moved = float(jnp.abs(far - near).max())
    assert moved == 0.0 if INSTANCES[instance][0] == "none" else moved > 1e-3


ROUGH = [instance for instance in INSIDE if INSTANCES[instance] in ((INSTANCES[instance][0], {}), INSTANCES[-1])]


@pytest.mark.parametrize(
    "instance, dtype", [*((i, "float32") for i in INSIDE), *((i, "bfloat16") for i in ROUGH)], ids=str
)
def test_left_padding_changes_no_value_and_no_gradient(instance, dtype):
    """A row behind two empty slots, whose queries see nothing, against the same row without them."""
    tokens = [x.astype(dtype) for x in vectors(16)]
    padded = [jnp.pad(x, [(0, 0), (2, 0), (0, 0), (0, 0)], constant_values=3.0) for x in tokens]
    alone = jnp.broadcast_to(jnp.arange(T), (B, T))
    positions = jnp.stack([jnp.arange(T + 2), jnp.pad(jnp.arange(T), (2, 0), constant_values=-1)])
    second = jnp.asarray([[False], [True]])
    exact = 1e-5 if dtype == "float32" else 2e-2  # bf16 against float32 of the same numbers: 8 bits
    for window in (LAST, 3):
        out, gradients = attend_all(instance, *padded, positions, positions, window=window, rows=second)
        single = [x.astype(jnp.float32) for x in tokens]
        expected, theirs = attend_all(instance, *single, alone, alone, window=window, rows=second)
        assert out.shape == (B, T + 2, H, D) and [x.dtype for x in (out, *gradients[1:])] == [jnp.dtype(dtype)] * 4
        assert finite((out, gradients))
        np.testing.assert_array_equal(np.asarray(out[1, :2], np.float32), 0.0)
        close(out[1, 2:], expected[1], rtol=exact, atol=exact)
        close([g[1, 2:] for g in gradients[1:]], [g[1] for g in theirs[1:]], rtol=exact, atol=exact)
        close(gradients[0], theirs[0], rtol=exact, atol=exact)


@every_instance
def test_finite_at_64_times_the_training_length(instance):
    encoding = encoding_of(instance)
    if encoding.max_position is not None:
        past = encoding.embed(jnp.zeros((1, 2, M)), jnp.asarray([[encoding.max_position - 1, encoding.max_position]]))
        assert finite(past[0, 0]) and bool(jnp.isnan(past[0, 1]).all())
        return
    q, k, v = vectors(17)
    positions = ORDERED + 64 * L - T
    assert finite(attend_all(instance, q, k, v, positions, positions))
    assert finite(encoding.embed(q.reshape(B, T, M), positions))


EXTREMES = np.asarray([[-(2**31), -1, 0, 1, 300, 2**30, LAST]] * B, np.int32)


@every_instance
def test_hooks_are_finite_for_every_pair_of_positions(instance):
    x, y, _ = vectors(18)
    _, parameters = parts(instance)
    last = encoding_of(instance).max_position
    positions = EXTREMES if last is None else np.minimum(EXTREMES, last - 1)

    def total(parameters, x, y):
        out = scored(instance)(parameters, x, y, positions, positions)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(parameters, x, y)
    assert finite(out) and finite(gradients)


@every_instance
def test_scores_is_what_logits_does(instance):
    encoding = encoding_of(instance)
    q, k, _ = vectors(19)
    other_q, other_k, _ = vectors(20)
    a, b = (jnp.asarray(np.random.default_rng(s).standard_normal((B, H, T, T)), jnp.float32) for s in (21, 22))
    out = encoding.logits(a, Tokens(q, ORDERED), Tokens(k, ORDERED))
    assert out.shape == a.shape
    if encoding.scores is Scores.NONE:
        assert out is a
    elif encoding.scores is Scores.BIAS:
        np.testing.assert_array_equal(out, encoding.logits(a, Tokens(other_q, ORDERED), Tokens(other_k, ORDERED)))
        np.testing.assert_allclose(
            out - a, encoding.logits(b, Tokens(q, ORDERED), Tokens(k, ORDERED)) - b, rtol=1e-5, atol=1e-6
        )
        assert float(jnp.abs(out - a).max()) > 1e-3
    else:
        assert encoding.scores is Scores.CONTENT
        changed = encoding.logits(a, Tokens(other_q, ORDERED), Tokens(k, ORDERED))
        assert float(jnp.abs(out - changed).max()) > 1e-3


def test_angles_are_float32_of_exact_positions():
    """257 and its neighbours are apart, which bf16 positions are not."""
    found = angles(jnp.arange(255, 260), geometric(4, 1e4))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.arange(255, 260)[:, None] * geometric(4, 1e4), rtol=1e-6)


def test_distance_is_int32_and_never_negative():
    tokens = Tokens(jnp.zeros((B, T, H, D)), jnp.asarray(EXTREMES))
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
    ("alibi", (H, D, M, L), {"slopes": 3}, ["encoding.options.slopes", "alibi", "none"]),
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
