"""Shaw, CoPE and FoX: what each is without its own parameters, hand-made values, and long texts in float32."""

import encodings_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pe_ablation import encodings
from pe_ablation.attention import attend
from pe_ablation.encodings import Tokens
from pe_ablation.gradients import binned, pick

pytestmark = pytest.mark.usefixtures("quick_compilation")

H, D, M, L = 2, 8, 16, 16


def build(name, **options):
    return encodings.make(name, num_heads=H, head_dim=D, model_dim=M, train_length=L, rngs=nnx.Rngs(0), **options)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def attended(encoding, length=7):
    q, k, v, x = (draw(seed, 1, length, H, D) for seed in range(4))
    pos = jnp.arange(length)[None]
    state = (encoding.state(x.reshape(1, length, M), pos, None) or (None,))[0]
    return attend(encoding, Tokens(q, pos, state), Tokens(k, pos, state), v)


# Identities


def test_shaw_with_tables_of_zeros_is_no_encoding():
    encoding = build("shaw")
    assert float(jnp.abs(attended(encoding) - attended(build("none"))).max()) > 1e-3
    encoding.keys[...], encoding.vectors[...] = jnp.zeros((17, D)), jnp.zeros((17, D))
    np.testing.assert_array_equal(attended(encoding), attended(build("none")))


def test_fox_with_a_huge_bias_is_no_encoding():
    assert float(jnp.abs(attended(build("fox")) - attended(build("none"))).max()) > 1e-3
    np.testing.assert_allclose(attended(build("fox", bias=80.0)), attended(build("none")), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"count": 3, "gate_scale": False, "after_scale": True}])
def test_cope_starts_as_no_encoding(options):
    encoding = build("cope", **options)
    np.testing.assert_array_equal(encoding.table[...], 0.0)
    np.testing.assert_allclose(attended(encoding), attended(build("none")), atol=1e-6)
    assert build("cope").table.shape == (L + 1, D)


@pytest.mark.parametrize("name", ["shaw", "cope"])
def test_values_or_their_absence(name):
    tokens = Tokens(draw(0, 1, 3, H, D), jnp.arange(3)[None])
    weights = jnp.ones((1, H, 3, 3))
    without = build("shaw", values=False) if name == "shaw" else build("cope")
    assert without.values(weights, tokens, tokens) is None
    assert build("shaw").values(weights, tokens, tokens).shape == (1, 3, H, D)


# Shaw


def test_shaw_by_hand():
    """a^K_c = c on the first channel, a^V_c = c on the second, of queries and keys of ones: 1 + c / sqrt(D), 2 + c."""
    encoding = build("shaw", clip=2)
    rows = jnp.arange(3.0)[:, None]
    encoding.keys[...], encoding.vectors[...] = rows * jnp.eye(D)[0], rows * jnp.eye(D)[1]
    tokens = Tokens(jnp.ones((1, 5, H, D)), jnp.arange(5)[None])
    found = encoding.logits(jnp.ones((1, H, 5, 5)), tokens, tokens)[0, 0]
    c = np.minimum(np.maximum(np.arange(5)[:, None] - np.arange(5), 0), 2)
    np.testing.assert_allclose(found, 1 + c / np.sqrt(D), rtol=1e-6)
    weights = draw(1, 1, H, 5, 5)
    added = np.asarray(encoding.values(weights, tokens, tokens))
    np.testing.assert_allclose(added[0, :, :, 1], (np.asarray(weights[0]) * c).sum(-1).T, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.delete(added, 1, axis=-1), 0.0)


@pytest.mark.parametrize("batch", [1, 3])
def test_pick_and_binned_are_each_others_transpose(batch):
    index = jnp.asarray(np.random.default_rng(0).integers(0, 4, (batch, 5, 6)), jnp.int32)
    rows, w = draw(0, 3, H, 5, 4), draw(1, 3, H, 5, 6)
    found, pull = jax.jit(lambda rows: jax.vjp(lambda rows: pick(rows, index), rows))(rows)
    np.testing.assert_array_equal(found, jnp.take_along_axis(rows, jnp.broadcast_to(index[:, None], w.shape), axis=-1))
    np.testing.assert_allclose(pull(w)[0], binned(w, index, 4), rtol=1e-6)
    np.testing.assert_allclose(jnp.vdot(found, w), jnp.vdot(rows, binned(w, index, 4)), rtol=1e-4)


# CoPE


def places(encoding, scores, positions):
    tokens = Tokens(jnp.zeros((1, scores.shape[3], H, D)), jnp.asarray(positions))
    return np.asarray(encoding.places(scores, tokens, D))


SEEN = np.tril(np.ones((5, 5), bool))


def test_gates_of_one_count_the_distance_and_one():
    scores = jnp.where(SEEN, 100.0, -jnp.inf)[None, None].repeat(H, 1)
    expected = np.arange(5)[:, None] - np.arange(5) + 1
    found = places(build("cope"), scores, [range(5)])
    np.testing.assert_array_equal(found[0, 0][SEEN], expected[SEEN])
    order = [3, 0, 4, 2, 1]
    moved = places(build("cope"), scores[..., order], [order])
    np.testing.assert_array_equal(moved, found[..., order])
    np.testing.assert_array_equal(places(build("cope", count=3), scores, [range(5)]), np.minimum(found, 2))


@pytest.mark.parametrize("gate_scale", [True, False])
def test_gates_are_those_of_the_formula(gate_scale):
    scores = np.where(SEEN, np.random.default_rng(0).standard_normal((H, 5, 5)), -np.inf)
    found = places(build("cope", gate_scale=gate_scale), jnp.asarray(scores[None], jnp.float32), [range(5)])
    for h, t in np.ndindex(H, 5):
        seen = scores[h, t, : t + 1] * (1 if gate_scale else np.sqrt(D))
        np.testing.assert_allclose(found[0, h, t, : t + 1], oracle.cope_places(seen), rtol=1e-5)


@pytest.mark.parametrize("after_scale", [False, True])
def test_rows_are_taken_linearly(after_scale):
    """q . e[n] = n^2 on whole places, gates of a half: places .5 1 1.5 2 2.5 have .5 1 2.5 4 4, with the last row 2."""
    encoding = build("cope", count=3, after_scale=after_scale)
    encoding.table[...] = jnp.asarray([0.0, 1.0, 4.0])[:, None] * jnp.eye(D)[0]
    tokens = Tokens(jnp.broadcast_to(jnp.eye(D)[0], (1, 5, H, D)), jnp.arange(5)[None])
    scores = jnp.where(SEEN, 0.0, -jnp.inf)[None, None].repeat(H, 1)
    found = encoding.logits(scores, tokens, tokens)[0, 0, -1, ::-1]
    np.testing.assert_allclose(found * (1 if after_scale else np.sqrt(D)), [0.5, 1.0, 2.5, 4.0, 4.0], rtol=1e-6)


# FoX


def forgotten(encoding, x, pieces=1):
    """Cumulative states [1,T,H,2] of x [1,T,M], made in so many pieces."""
    run = jax.jit(lambda x, last: encoding.state(x, jnp.zeros(x.shape[:2], jnp.int32), last))
    found, last = [], None
    for piece in jnp.split(x, pieces, axis=1):
        state, last = run(piece, last)
        found.append(state)
    return jnp.concatenate(found, axis=1)


def between(encoding, state, later, earlier):
    """What lies between tokens: [H, pairs]."""
    zero = jnp.zeros((1, len(later), H, D))
    q, k = (Tokens(zero, jnp.zeros((1, len(each)), jnp.int32), state[:, each]) for each in (later, earlier))
    return np.diagonal(encoding.logits(jnp.zeros((1, H, len(later), len(later))), q, k)[0], axis1=1, axis2=2)


@pytest.mark.parametrize("bias, each", [(0.0, -0.6931472), (5.0, -0.0067153485), (-2.0, -2.126928)])
def test_every_token_forgets_what_its_gate_says(bias, each):
    encoding = build("fox", bias=bias)
    state = forgotten(encoding, jnp.zeros((1, 40, M)))
    later, earlier = np.asarray([39, 39, 20, 5]), np.asarray([0, 38, 20, 2])
    np.testing.assert_allclose(
        between(encoding, state, later, earlier)[0], (later - earlier) * each, rtol=1e-6, atol=2e-6
    )


def test_empty_slots_forget_nothing():
    encoding, x = build("fox"), draw(0, 1, 5, M)
    padded = jnp.pad(x, [(0, 0), (2, 3), (0, 0)], constant_values=jnp.nan)
    pos = jnp.asarray([[-1, -1, 0, 1, 2, 3, 4, -1, -1, -1]])
    state, carry = encoding.state(padded, pos, None)
    plain, last = encoding.state(x, jnp.arange(5)[None], None)
    np.testing.assert_allclose(state[:, 2:7], plain, rtol=1e-6)
    np.testing.assert_allclose(carry, last, rtol=1e-6)


@pytest.mark.parametrize("pieces", [1, 40])
def test_a_long_text_costs_no_precision(pieces):
    """20,000 tokens that forget e^-16,000 in all: what lies between two near the end is right to 1e-5."""
    encoding, x = build("fox"), draw(0, 1, 20_000, M)
    encoding.gate[...], encoding.bias[...] = 0.2 * draw(1, M, H), jnp.asarray([0.0, -0.5])
    gates = np.asarray(x[0], np.float64) @ np.asarray(encoding.gate[...], np.float64) + np.asarray(encoding.bias[...])
    total = np.cumsum(-np.log1p(np.exp(-gates)), axis=0)
    assert total[-1].max() < -14_000
    state = forgotten(encoding, x, pieces)
    later = np.asarray([19_999, 19_999, 19_990, 19_500, 12_001, 19_999])
    earlier = np.asarray([19_998, 19_980, 19_989, 19_480, 12_000, 0])
    found, wanted = between(encoding, state, later, earlier), (total[later] - total[earlier]).T
    np.testing.assert_allclose(found[:, :5], wanted[:, :5], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert float(jnp.abs(state[..., 1]).max()) < 16 and bool((state[..., 0] % 16 == 0).all())


def test_fox_starts_at_its_bias():
    encoding = build("fox", bias=5.0)
    np.testing.assert_array_equal(encoding.bias[...], 5.0)
    assert 0.01 < float(encoding.gate[...].std()) < 0.03
