"""What p-RoPE leaves out of RoPE, xPos's powers to the printed digits, and xPos far from the start."""

import functools
import itertools

import encodings_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pe_ablation import attention, encodings, eviction
from pe_ablation.attention import attend, centred
from pe_ablation.encodings import Tokens
from pe_ablation.encodings.base import geometric
from pe_ablation.eviction import Policy

pytestmark = pytest.mark.usefixtures("quick_compilation")

H, D = 2, 8
LAST = 2**31 - 1


def build(name, head_dim=D, **options):
    return encodings.make(
        name, num_heads=H, head_dim=head_dim, model_dim=H * head_dim, train_length=16, rngs=nnx.Rngs(0), **options
    )


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


# p-RoPE


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_p_of_0_is_no_encoding_and_p_of_1_is_rope(reverse, interleaved):
    x, pos = draw(0, 1, 7, H, D), jnp.asarray([[0, 1, 2, 5, 300, 4000, 20_000]])
    nothing, all_of_it = (build("p_rope", p=p, reversed=reverse, interleaved=interleaved) for p in (0.0, 1.0))
    rope = build("rope", interleaved=interleaved)
    np.testing.assert_array_equal(nothing.query(x, pos), x)
    np.testing.assert_array_equal(all_of_it.query(x, pos), rope.query(x, pos))
    np.testing.assert_array_equal(all_of_it.key(x, pos), rope.key(x, pos))


def test_the_frequencies_that_are_kept_are_those_of_all_dims():
    rope = geometric(32, 1e4)
    assert build("p_rope", 64).per_token == (*rope[:24], *[0.0] * 8)
    assert build("p_rope", 64, reversed=True).per_token == (*[0.0] * 8, *rope[8:])
    assert build("p_rope", 64, p=0.25).per_token == (*rope[:8], *[0.0] * 24)
    partly = build("p_rope", 64, p=0.25, partial=True)
    assert partly.per_token == build("rope", 64, fraction=0.25).per_token and len(partly.per_token) == 8
    assert build("p_rope", 64, p=0.0, partial=True).per_token == (0.0,) * 32
    kept = np.asarray(build("p_rope", 64, p=0.5).frequencies)
    np.testing.assert_allclose(kept[[0, 1, 15]], [1.0, 0.749894209, 0.013335214], atol=5e-10)
    assert (kept[16:] == 0).all()  # RoPE of the first half of the dims would have 1e-4 ** (15 / 16) at 15


def test_a_share_that_is_no_whole_number_of_frequencies_is_rounded_down():
    def kept(p, head_dim):
        return np.count_nonzero(build("p_rope", head_dim, p=p).frequencies)

    assert [kept(0.75, 4), kept(0.3, 20), kept(0.99, 20), kept(0.29, 200)] == [1, 3, 9, 29]


# xPos

ZETA = {0: 0.2857143, 1: 0.3080357, 15: 0.6205357, 31: 0.9776786}


@pytest.mark.parametrize("interleaved", [False, True])
def test_powers_are_the_published_ones(interleaved):
    """The length that a unit vector of each pair has at a position: rotations keep it, powers do not."""
    encoding = build("xpos", 64, interleaved=interleaved)

    def lengths(hook, position):
        unit = jnp.eye(64)[:: 2 if interleaved else 1][:32, None, None]
        return np.linalg.norm(hook(unit, jnp.full((32, 1), position)), axis=-1)[:, 0, 0]

    found = lengths(encoding.query, 512)
    np.testing.assert_allclose(found[list(ZETA)], list(ZETA.values()), atol=5e-8)
    np.testing.assert_allclose(lengths(encoding.key, -512), found, rtol=1e-6)
    np.testing.assert_allclose(lengths(encoding.query, 512) * lengths(encoding.key, 512), 1.0, rtol=1e-6)
    assert lengths(encoding.query, 1)[0] == pytest.approx(0.99755619, abs=5e-8)


def test_positions_are_counted_from_the_middle_of_the_queries():
    """Keys past the last query are put beside it, empty slots in the middle; a row of empty slots is harmless."""
    query = jnp.asarray([[10, -1, 20, 15], [-1, -1, -(2**31), -1], [LAST, LAST - 2, 0, -1]])
    key = jnp.asarray([[0, 12, -1, 30], [5, -1, LAST, 0], [LAST, 0, -(2**31), 7]])
    moved = centred(query, key)
    assert np.asarray(moved[0])[0].tolist() == [-5, 0, 5, 0] and np.asarray(moved[1])[0].tolist() == [-15, -3, 0, 5]
    assert np.asarray(moved[0])[1].tolist() == [0] * 4 and np.abs(moved[1][1]).max() <= 1
    half = LAST // 2
    assert np.asarray(moved[0])[2].tolist() == [half + 1, half - 1, -half, 0]
    assert np.asarray(moved[1])[2].tolist() == [half + 1, -half, 0, 7 - half]


def test_hooks_of_any_position_are_finite():
    encoding, x = build("xpos"), jnp.ones((1, 5, H, D))
    pos = jnp.asarray([[-(2**31), -100_000, 0, 100_000, LAST]])
    for hook in (encoding.query, encoding.key):
        out, pull = jax.vjp(lambda x, hook=hook: hook(x, pos), x)
        assert bool(jnp.isfinite(out).all()) and bool(jnp.isfinite(pull(out)[0]).all())


@functools.cache
def attended(implementation, block):
    """Jitted (output, gradients of q, k, v against a fixed cotangent) of xPos."""
    encoding = build("xpos")

    def run(q, k, v, query_positions, key_positions):
        def forward(q, k, v):
            sides = Tokens(q, query_positions), Tokens(k, key_positions)
            return attend(encoding, *sides, v, implementation=implementation)

        out, pull = jax.vjp(forward, q, k, v)
        return out, pull(draw(9, *out.shape))

    return jax.jit(run)


def close(found, wanted, atol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol), found, wanted)


SPREADS = {
    "near": [99_990, 99_991, 99_992, 99_995, 99_998, 99_999, 100_000],
    "far": [80_000, 80_001, 80_100, 84_000, 99_000, 99_999, 100_000],
    "start": [0, 1, 2, 512, 1000, 10_000, 20_000],
}


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("spread", SPREADS)
def test_far_from_the_start_equals_the_formula(spread, implementation, monkeypatch):
    """Positions to 100,000, distances to 20,000: outputs, and gradients that do not know where the text began."""
    monkeypatch.setattr(attention, "BLOCK", 3)
    q, k, v = (draw(seed, 1, 7, H, D) for seed in range(3))
    positions = np.asarray([SPREADS[spread]])
    out, gradients = attended(implementation, 3)(q, k, v, positions, positions)
    q64, k64, v64 = (np.asarray(each, np.float64) for each in (q, k, v))
    expected = oracle.attention(oracle.xpos({}), q64, k64, v64, positions, positions)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-3)  # angles of 20,000 in float32
    if spread == "near":
        close(out, expected, 1e-5)
    moved = positions - positions.min()
    close((out, gradients), attended(implementation, 3)(q, k, v, moved, moved), 1e-5)
    assert all(bool(jnp.isfinite(each).all()) for each in gradients)
    one = attend(build("xpos"), Tokens(q[:, -1:], positions[:, -1:]), Tokens(k, positions), v)
    close(one, out[:, -1:], 2e-3)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_keys_that_no_query_sees_change_nothing_wherever_they_are(implementation, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 3)
    q, k, v = (draw(seed, 2, 7, H, D) for seed in range(3))
    query = np.asarray([[3, 4, 5, 6, 7, 8, 9], [-1, -1, 500, 501, 502, 503, 504]])
    near = np.asarray([[2, 3, 4, 5, 10, -1, 11], [-1, 498, 499, 500, -1, 505, 506]])
    far = np.asarray([[2, 3, 4, 5, LAST, -1, 100_000], [-1, 498, 499, 500, -1, 30_000, LAST]])
    run = attended(implementation, 3)
    out, gradients = run(q, k, v, query, far)
    close((out, gradients), run(q, k, v, query, near), 1e-5)
    unseen = jnp.asarray([[4, 5, 6], [0, 4, 5]])
    for gradient in gradients[1:]:
        np.testing.assert_array_equal(jnp.take_along_axis(gradient, unseen[..., None, None], axis=1), 0.0)


def test_keys_out_of_reach_fade_to_nothing_of_the_fast_pairs():
    """A key 100,000 tokens back: zeta to the 195th of each pair is 0 in float32, not a NaN, and its logit 0."""
    q, k = jnp.ones((1, 1, H, D)), jnp.ones((1, 2, H, D))
    v = jnp.zeros((1, 2, H, D)).at[:, 1].set(1.0)
    positions = jnp.asarray([[0, 100_000]])
    out = attend(build("xpos"), Tokens(q, positions[:, 1:]), Tokens(k, positions), v)
    zeta = [oracle.zeta(n, D) ** (100_000 / 512) for n in range(D // 2)]
    assert max(zeta) < 1e-9
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-np.sqrt(D))), rtol=1e-5)


def test_each_view_has_its_own_middle():
    """Sinks seen from near and recent keys at a million: both views of streaming, one masked pass, against loops."""
    far, length, sinks, recent = 1_000_000, 7, 2, 3
    q, k, v = (draw(seed, 1, length, H, D) for seed in range(3))
    index = np.asarray([[0, 1, *range(far, far + 5)]])
    policy = Policy("sink", sinks + recent, sinks)
    model = type("Model", (), {"row": False})()
    views = [view._replace(slots=None) for view in eviction.views(policy, model, length, jnp.zeros(1, jnp.int32))]
    mask = attention.Mask(sinks=sinks, recent=recent)
    out = attend(build("xpos"), Tokens(q[:, 2:], index[:, 2:]), Tokens(k, index), v, mask=mask, views=views)
    formula, q64, k64, v64 = oracle.xpos({}), *(np.asarray(each, np.float64) for each in (q, k, v))
    for t, h in itertools.product(range(2, length), range(H)):
        i = index[0, t]
        seen = [s for s, j in enumerate(index[0]) if j <= i and (j < sinks or i - j <= recent)]
        pairs = [(min(i, sinks + recent), index[0, s]) if s < sinks else (i, index[0, s]) for s in seen]
        scores = [formula.logit(q64[0, t, h], k64[0, s, h], *pair, h) for s, pair in zip(seen, pairs, strict=True)]
        np.testing.assert_allclose(out[0, t - 2, h], oracle.softmax(np.asarray(scores)) @ v64[0, seen, h], atol=2e-5)


def test_xpos_refuses_a_tile_in_which_its_powers_leave_float32():
    encoding = build("xpos", 8, scale_base=32.0)
    assert encoding.span == 60 * 32
    position = jnp.arange(encoding.span + 1)
    zero = jnp.zeros((1, len(position), 1, 8))
    with pytest.raises(ValueError, match=r"1921 queries in a tile, where this encoding serves positions 1920 apart"):
        jax.eval_shape(
            lambda: attend(encoding, Tokens(zero, position), Tokens(zero, position), zero, implementation="dense")
        )
    out = jax.eval_shape(lambda: attend(encoding, Tokens(zero, position), Tokens(zero, position), zero))
    assert out.shape == zero.shape, "auto takes smaller tiles"
