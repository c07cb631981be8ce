"""Logits scaled by how many keys a query sees, against float64 loops, for encodings of every kind."""

import functools
import math

import encodings_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import by_path, forward, ids, perturbed, tiny

from pe_ablation import attention, encodings
from pe_ablation.attention import LogitScale, Mask, attend
from pe_ablation.encodings import Tokens
from pe_ablation.model import LOGIT_SCALES, GPTConfig

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")

H, D, M, T = 2, 4, 8, 9


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 3)


def made(name):
    return encodings.make(name, num_heads=H, head_dim=D, model_dim=M, train_length=16, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("name", ["none", "rope", "alibi", "transformer_xl"])
@pytest.mark.parametrize("window, at_least", [(None, 0.0), (4, 0.0), (None, 1.0)])
def test_all_logits_of_a_query_are_scaled_by_the_keys_it_sees(name, implementation, window, at_least):
    encoding, factor = made(name), np.array([0.4, 0.9])
    q, k, v = (draw(seed, 1, T, H, D) for seed in range(3))
    position = jnp.arange(T)
    run = functools.partial(attend, encoding, mask=Mask(window=window), implementation=implementation)
    scale = LogitScale(jnp.asarray(factor, jnp.float32), at_least)
    found = jax.jit(functools.partial(run, scale=scale))(Tokens(q, position), Tokens(k, position), v)
    flat = {path[0]: np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(nnx.state(encoding))}
    where = np.arange(T)[None]
    logits = oracle.logits(
        oracle.FORMULAS[name](flat), *(np.asarray(x, np.float64) for x in (q, k)), where, where, window
    )
    for h, t in np.ndindex(H, T):
        count = t + 1 if window is None else min(t + 1, window)
        logits[0, h, t] *= max(at_least, factor[h] * math.log(count)) or 1e-300
    weights = np.array([[oracle.softmax(row) for row in logits[0, h]] for h in range(H)])
    np.testing.assert_allclose(found[0], np.einsum("hts,shd->thd", weights, np.asarray(v[0], np.float64)), atol=1e-5)


def test_a_query_that_sees_one_key_keeps_it():
    q = Tokens(draw(0, 1, 1, H, D), jnp.asarray([5]))
    out = attend(made("alibi"), q, Tokens(q.vec, q.pos), q.vec, scale=LogitScale(2.0))
    np.testing.assert_allclose(out, q.vec, rtol=1e-6)


@pytest.mark.parametrize("scale", ["log_n", "log_n_beyond", "learned"])
def test_decoding_a_token_at_a_time_scales_alike(scale):
    """A cache's empty slots are no keys, and neither are those of padding."""
    config = tiny(encoding="t5", logit_scale=scale, train_length=4)
    graph, parameters = perturbed(config)
    tokens = ids(config, 2, 12)
    step = jax.jit(lambda parameters, *rest: nnx.merge(graph, parameters).decode(*rest))
    cache, found = nnx.merge(graph, parameters).cache(2, 16), []
    for t in range(12):
        logits, cache = step(parameters, tokens[:, t : t + 1], jnp.full((2, 1), t), cache)
        found.append(logits)
    expected = forward(graph)(parameters, tokens)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), expected, rtol=1e-4, atol=1e-4)
    padded = jnp.stack([tokens[0], jnp.roll(tokens[0], 3)])
    places = jnp.asarray([range(12), [-1] * 3 + [*range(9)]])
    logits = jax.jit(lambda parameters: nnx.merge(graph, parameters)(padded, places))(parameters)
    np.testing.assert_allclose(logits[1, 3:], logits[0, :9], rtol=1e-4, atol=1e-4)


def test_at_the_training_length_nothing_is_scaled_and_beyond_it_all():
    """ln n / ln L is 1 where n = L; `log_n_beyond` is 1 up to there, and the plain model's logits are the same."""
    plain, beyond = (tiny(encoding="rope", train_length=8, logit_scale=each) for each in ("none", "log_n_beyond"))
    (graph, parameters), (other, _) = perturbed(plain), perturbed(beyond)
    tokens = ids(plain, 1, 12)
    one, two = forward(graph)(parameters, tokens), forward(other)(parameters, tokens)
    np.testing.assert_allclose(two[:, :8], one[:, :8], rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(two[:, 8:] - one[:, 8:]).min(axis=-1).max()) > 0 and float(jnp.abs(two - one).max()) > 1e-3


def test_a_learned_scale_starts_at_log_n_is_one_a_head_and_layer_and_trains():
    config = tiny(encoding="alibi", logit_scale="learned", train_length=8)
    graph, parameters = perturbed(config)
    assert by_path(parameters)["blocks/0/logit_scale"].shape == (2, 2)
    start = nnx.state(nnx.merge(graph, parameters).__class__(config, rngs=nnx.Rngs(0)), nnx.Param)
    raw = by_path(start)["blocks/0/logit_scale"]
    np.testing.assert_allclose(np.log1p(np.exp(raw)), 1 / math.log(8), rtol=1e-6)
    tokens = ids(config, 2, 8)
    run = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(nnx.merge(graph, p)(tokens)))))
    assert (np.abs(by_path(run(parameters))["blocks/0/logit_scale"]) > 1e-4).all()


def test_a_negative_parameter_is_a_small_scale_not_a_negative_one():
    config = tiny(encoding="none", logit_scale="learned")
    graph, parameters = perturbed(config)
    low = nnx.merge(graph, parameters)
    low.blocks[0].logit_scale[...] = jnp.full((2, 2), -30.0)
    flat = low(ids(config, 1, 6))
    assert bool(jnp.isfinite(flat).all())


def test_none_costs_nothing_and_others_are_refused_by_name():
    assert LOGIT_SCALES[0] == "none"
    with pytest.raises(ValueError, match="logit_scale: 'ssmax' is not allowed; allowed: none, log_n"):
        tiny(logit_scale="ssmax")
    with pytest.raises(ValueError, match="logit_scale: 'log_n' needs a training length of 2"):
        GPTConfig(8, 1, 1, 4, 1, "none", logit_scale="log_n")
