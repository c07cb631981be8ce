"""Masks, rows that see nothing, hooks that only test encodings use, dropout, and memory linear in the length."""

import functools

import encodings_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pe_ablation import attention, encodings
from pe_ablation.attention import Dropout, Mask, attend, chosen
from pe_ablation.encodings import Encoding, Sizes, Tokens
from pe_ablation.model import GPT, Block, GPTConfig, abstract

pytestmark = pytest.mark.usefixtures("quick_compilation")

H, D, M = 2, 4, 8
NONE = Encoding(Sizes(H, D, M, 16), nnx.Rngs(0))
both = pytest.mark.parametrize("implementation", ["dense", "blockwise"])


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def build(name, **options):
    return encodings.make(name, num_heads=H, head_dim=D, model_dim=M, train_length=16, rngs=nnx.Rngs(0), **options)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 3)


def means(query_positions, key_positions, mask=None, implementation="dense", segments=(None, None)):
    """Output with zero queries and keys and value j + 1 at slot j: the mean of what each query sees, [B,T]."""
    q, k = (jnp.zeros((1, np.shape(p)[-1], 1, 1)) for p in (query_positions, key_positions))
    v = jnp.arange(1.0, k.shape[1] + 1).reshape(1, -1, 1, 1)
    queries = Tokens(q, jnp.asarray(query_positions), segment=segments[0])
    keys = Tokens(k, jnp.asarray(key_positions), segment=segments[1])
    run = jax.jit(lambda *tokens: attend(NONE, *tokens, mask=mask, implementation=implementation))
    return np.asarray(run(queries, keys, v)[0, :, 0, 0])


# Who sees whom


@both
def test_queries_are_aligned_by_position_not_by_corner(implementation):
    keys = np.arange(5)
    np.testing.assert_allclose(means([4], keys, implementation=implementation), [3.0], rtol=1e-6)
    np.testing.assert_allclose(means([3, 4], keys, implementation=implementation), [2.5, 3.0], rtol=1e-6)
    np.testing.assert_allclose(means([[3, 4]], [keys], implementation=implementation), [2.5, 3.0], rtol=1e-6)


@both
@pytest.mark.parametrize(
    "window, expected", [(1, [1, 2, 3, 4, 5]), (2, [1, 1.5, 2.5, 3.5, 4.5]), (9, [1, 1.5, 2, 2.5, 3])]
)
def test_a_window_of_w_sees_w_keys_the_query_among_them(window, expected, implementation):
    keys = np.arange(5)
    np.testing.assert_allclose(means(keys, keys, Mask(window=window), implementation), expected, rtol=1e-6)
    traced = jax.jit(lambda w: attend_means(w, implementation))(window)
    np.testing.assert_allclose(traced, expected, rtol=1e-6)


def attend_means(window, implementation):
    position = jnp.arange(5)
    zero = jnp.zeros((1, 5, 1, 1))
    v = jnp.arange(1.0, 6.0).reshape(1, 5, 1, 1)
    mask = Mask(window=window)
    tokens = Tokens(zero, position)
    return attend(NONE, tokens, tokens, v, mask=mask, implementation=implementation)[0, :, 0, 0]


def test_windows_of_one_program_compile_once():
    run = jax.jit(lambda mask: attend_means(mask.window, "dense"))
    for window in (1, 3, 2**31 - 1):
        run(Mask(window=jnp.int32(window)))
    assert run._cache_size() == 1


def test_the_smaller_window_holds():
    assert Mask().narrowed(None) == Mask()
    assert int(Mask().narrowed(3).window) == 3
    assert [int(Mask(window=w).narrowed(3).window) for w in (2, 5)] == [2, 3]
    assert int(Mask(window=2, segments=True).narrowed(None).window) == 2
    assert Mask(segments=True).narrowed(3).segments


@both
def test_segments_keep_documents_apart(implementation):
    position, segment = np.arange(5), jnp.asarray([[0, 0, 1, 1, 1]])
    mask = Mask(segments=True)
    found = means(position, position, mask, implementation, segments=(segment, segment))
    np.testing.assert_allclose(found, [1, 1.5, 3, 3.5, 4], rtol=1e-6)
    found = means(position, position, Mask(segments=True, window=2), implementation, segments=(segment, segment))
    np.testing.assert_allclose(found, [1, 1.5, 3, 3.5, 4.5], rtol=1e-6)
    with pytest.raises(ValueError, match="segment"):
        means(position, position, mask, implementation)


@both
def test_rows_that_see_nothing_give_zero(implementation):
    np.testing.assert_array_equal(means([-1, -1, 2], [3, 4, -1, -1], implementation=implementation), [0, 0, 0])
    np.testing.assert_allclose(means([-1, 3, 2], [3, -1, 1], implementation=implementation), [0, 2, 3])


@both
def test_without_a_causal_mask_none_is_permutation_equivariant(implementation):
    q, k, v = (draw(seed, 1, 5, H, D) for seed in range(3))
    order = np.asarray([3, 1, 4, 0, 2])
    position = jnp.arange(5)
    run = jax.jit(functools.partial(attend, NONE, mask=Mask(causal=False), implementation=implementation))
    out = run(Tokens(q, position), Tokens(k, position), v)
    moved = run(Tokens(q[:, order], position), Tokens(k[:, order], position), v[:, order])
    np.testing.assert_allclose(moved, out[:, order], atol=1e-6)
    causal = attend(NONE, Tokens(q, position), Tokens(k, position), v)
    assert float(jnp.abs(causal - out).max()) > 0.1


def test_what_attention_lacks_is_refused_by_name():
    tokens = Tokens(jnp.zeros((1, 2, H, D)), jnp.arange(2))
    with pytest.raises(ValueError, match="implementation: 'flash' is not allowed; allowed: auto, dense, blockwise"):
        attend(NONE, tokens, tokens, tokens.vec, implementation="flash")
    with pytest.raises(ValueError, match=r"causal=False.*ALiBi"):
        attend(build("alibi"), tokens, tokens, tokens.vec, mask=Mask(causal=False))


def test_auto_takes_blockwise_past_the_limits(monkeypatch):
    monkeypatch.undo()
    assert chosen("auto", 8, 4, 256, 256) == "dense" and chosen("auto", 8, 8, 256, 256) == "blockwise"
    assert chosen("auto", 1, 1, 511, 511) == "dense" and chosen("auto", 1, 1, 512, 512) == "blockwise"
    assert chosen("dense", 9, 9, 4096, 4096) == "dense" and chosen("blockwise", 1, 1, 1, 1) == "blockwise"


STRIPED = [("rope", length) for length in (2, 3, 11, 13, 40)]
STRIPED += [(name, length) for name in ("none", "t5", "transformer_xl", "xpos", "cope") for length in (11, 40)]


@pytest.mark.parametrize("name, length", STRIPED)
def test_ordered_stripes_equal_dense_in_values_and_gradients(name, length):
    """Blocks of 3: one stripe, stripes of one block, stripes of unequal numbers of blocks, a torn last block."""
    encoding = build(name)
    weight, pos = draw(7, 1, length, H, D), jnp.arange(length)

    def loss(q, k, v, implementation):
        mask = Mask(window=jnp.int32(9), ordered=implementation == "blockwise")
        out = attend(encoding, Tokens(q, pos), Tokens(k, pos), v, mask=mask, implementation=implementation)
        return jnp.sum(weight * out)

    parts = [draw(seed, 1, length, H, D) for seed in range(3)]
    dense, blockwise = (
        jax.jit(jax.value_and_grad(functools.partial(loss, implementation=each), argnums=(0, 1, 2)))(*parts)
        for each in ("dense", "blockwise")
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), blockwise, dense)


def test_ordered_stripes_leave_out_scores_that_no_query_sees(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)

    def scores(ordered):
        tokens, run = jax.ShapeDtypeStruct((1, 64, H, D), jnp.float32), functools.partial(Tokens, pos=jnp.arange(64))
        mask = Mask(ordered=ordered)
        program = jax.jit(lambda x: attend(NONE, run(x), run(x), x, mask=mask, implementation="blockwise"))
        return program.lower(tokens).compile().cost_analysis()["transcendentals"]

    assert scores(True) <= 0.65 * 4 * scores(False)  # the plain loop's body is counted once, for one of its 4 blocks


def test_a_model_with_given_positions_promises_no_order(monkeypatch):
    seen = []
    monkeypatch.setattr(
        attention, "_blockwise", lambda tile, keys, queries, q, dropout, ordered: seen.append(ordered) or q.vec
    )
    model = GPT(
        GPTConfig(
            vocab_size=8,
            num_layers=1,
            num_heads=H,
            model_dim=M,
            train_length=4,
            encoding="none",
            implementation="blockwise",
        ),
        rngs=nnx.Rngs(0),
    )
    ids = jnp.zeros((1, 4), jnp.int32)
    model(ids)
    model(ids, jnp.array([3, 1, 0, 2]))
    model(ids, mask=Mask(causal=False))
    assert seen == [True, False, False]


# Dropout


@both
def test_dropout_acts_on_weights_and_keeps_their_mean(implementation):
    """Zero scores, values of one, 12 queries that see 12 keys: an output is (kept keys) / ((1 - rate) 12), of mean 1.

    All rows differ, those of different blocks too: each weight has a bit of its own.
    """
    rate, length, heads = 0.25, 12, 64
    zero, ones = jnp.zeros((1, length, heads, 1)), jnp.ones((1, length, heads, 1))
    queries, keys = Tokens(zero, jnp.full(length, length - 1)), Tokens(zero, jnp.arange(length))

    @jax.jit
    def run(key):
        return attend(NONE, queries, keys, ones, dropout=Dropout(rate, key), implementation=implementation)

    out = np.asarray(run(jax.random.key(0))[0, :, :, 0])
    kept = out * (1 - rate) * length
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)
    assert out.mean() == pytest.approx(1.0, abs=0.025)  # 4 deviations
    assert kept.std() == pytest.approx(np.sqrt(length * rate * (1 - rate)), rel=0.15)
    assert len({tuple(row) for row in np.round(kept)}) == length
    np.testing.assert_array_equal(out, run(jax.random.key(0))[0, :, :, 0])
    assert np.abs(out - run(jax.random.key(1))[0, :, :, 0]).max() > 0.1


# Values, rows and states


SHUFFLED = np.asarray([[4, 0, 2, -1, 1, 3, 6], [7, 3, 9, 8, 5, 6, -1]])
QUERIES = np.asarray([[0, 1, 2, 3, 4, -1, 6], [-1, 3, 5, 6, 7, 8, 9]])


@pytest.mark.parametrize("name, options", [("shaw", {"clip": 3}), ("cope", {"count": 4}), ("xpos", {})])
def test_value_and_row_hooks_equal_loops_dense_and_blockwise(name, options):
    """Keys in any order, some of them empty; the gradients of both implementations agree and are finite."""
    graph, parameters = nnx.split(build(name, **options))
    parameters = jax.tree.map(lambda p: draw(p.size, *p.shape), parameters)
    flat = {path[0]: np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(parameters)}
    q, k, v, cotangent = (draw(seed, 2, 7, H, D) for seed in range(40, 44))

    def run(implementation, parameters, q, k, v):
        queries, keys = Tokens(q, jnp.asarray(QUERIES)), Tokens(k, jnp.asarray(SHUFFLED))
        out = attend(nnx.merge(graph, parameters), queries, keys, v, implementation=implementation)
        return jnp.sum(out * cotangent), out

    results = {}
    for implementation in ("dense", "blockwise"):
        forward = jax.value_and_grad(functools.partial(run, implementation), argnums=(0, 1, 2, 3), has_aux=True)
        (_, out), gradients = jax.jit(forward)(parameters, q, k, v)
        results[implementation] = gradients
        float64 = (np.asarray(x, np.float64) for x in (q, k, v))
        expected = oracle.attention(oracle.FORMULAS[name](flat, **options), *float64, QUERIES, SHUFFLED)
        np.testing.assert_allclose(out, expected, atol=1e-5)
    for ours, theirs in zip(*(jax.tree.leaves(each) for each in results.values()), strict=True):
        assert np.isfinite(ours).all() and np.abs(ours).max() > 1e-3
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@both
def test_the_state_hook_reaches_logits_through_the_model(implementation):
    """Zero queries and keys, so that forget gates alone weigh the keys; the second sequence is padded on the left."""
    config = GPTConfig(11, 1, H, M, 16, "fox", implementation=implementation)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Block(config, jax.random.key(0))))
    block = nnx.merge(graph, jax.tree.map(lambda p: jnp.zeros(p.shape), abstract))
    block.attention_norm.scale[...] = jnp.ones(M)
    block.qkv.kernel[...] = (0.5 * draw(34, M, 3 * M)).at[:, : 2 * M].set(0.0)
    block.attention_out.kernel[...] = draw(36, M, M)
    encoding = build("fox")
    encoding.gate[...], encoding.bias[...] = draw(32, M, H), draw(37, H)
    x = draw(35, 2, 5, M)
    position = jnp.asarray([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])
    found = jax.jit(lambda x: block(x, position, encoding, Mask(), None)[0] - x)(x)

    normed = np.asarray(x, np.float64)
    normed = (normed - normed.mean(-1, keepdims=True)) / np.sqrt(normed.var(-1, keepdims=True) + 1e-5)
    gates = 1 / (1 + np.exp(-normed @ np.asarray(encoding.gate[...], np.float64) - np.asarray(encoding.bias[...])))
    v = (normed @ np.asarray(block.qkv.kernel[:, 2 * M :], np.float64)).reshape(2, 5, H, D)
    out = np.zeros((2, 5, H, D))
    for b, t, h in np.ndindex(2, 5, H):
        seen = [s for s in range(t + 1) if position[b, s] >= 0]
        weights = np.asarray([np.prod(gates[b, s + 1 : t + 1, h]) for s in seen])
        if seen:
            out[b, t, h] = weights / weights.sum() @ v[b, seen, h]
    expected = out.reshape(2, 5, M) @ np.asarray(block.attention_out.kernel[...], np.float64)
    np.testing.assert_allclose(found, expected, atol=1e-5)


# Memory


@functools.cache
def temporary_bytes(name, implementation, length, backward):
    """Bytes that the compiled attention of `length` tokens over themselves keeps beside arguments and results."""
    encoding = build(name)
    graph, parameters = nnx.split(encoding)

    def loss(parameters, x):
        tokens = Tokens(x, jnp.arange(length))
        return attend(nnx.merge(graph, parameters), tokens, tokens, x, implementation=implementation).sum()

    run = jax.grad(loss, argnums=(0, 1)) if backward else loss
    compiled = jax.jit(run).lower(parameters, jax.ShapeDtypeStruct((1, length, H, D), jnp.float32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


LINEAR = [(name, True) for name in ("none", "alibi", "t5", "rope", "transformer_xl", "xpos", "shaw", "cope")]
LINEAR += [("none", False), ("transformer_xl", False)]


@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize("name, backward", LINEAR)
def test_blockwise_memory_is_linear_in_the_length(name, backward, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)
    short, long = (temporary_bytes(name, "blockwise", length, backward) for length in (512, 1024))
    assert long / short < 2.2
    assert long < 1024 * 1024 * H * 4 / 2  # half of one score matrix


@pytest.mark.usefixtures("usual_compilation")
def test_dense_memory_is_not():
    short, long = (temporary_bytes("none", "dense", length, True) for length in (512, 1024))
    assert long / short > 3.5


@pytest.mark.usefixtures("usual_compilation")
def test_a_bias_of_distances_is_never_in_memory_whole():
    """Reading 16,384 tokens with 12 heads: the bias alone would be 12 GiB, a tile of it for 128 queries 96 MiB."""

    def program(name):
        config = GPTConfig(258, 2, 12, 96, 128, name)
        graph, parameters = nnx.split(abstract(config))
        read = jax.jit(lambda parameters, tokens: jnp.max(nnx.merge(graph, parameters)(tokens), axis=-1))
        compiled = read.lower(parameters, jax.ShapeDtypeStruct((1, 16_384), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    plain = program("none")
    for name in ("alibi", "t5", "kerple_log"):
        assert program(name) < 1.1 * plain, name
