"""One token at a time equals the whole sequence, for patterns of encodings; what a cache refuses and forgets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY, forward, ids, perturbed, tiny

from pe_ablation.cache import Cache

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")

T = 12


@functools.cache
def decoder(graph):
    """Jitted parameters, tokens, positions, cache -> logits, cache."""
    return jax.jit(lambda parameters, *rest: nnx.merge(graph, parameters).decode(*rest))


def decode(parts, tokens, positions, sizes, cache):
    """Logits [B,T,V] of tokens and positions [B,T] in pieces of these sizes, and the cache."""
    found, start = [], 0
    for size in sizes:
        piece = slice(start, start + size)
        logits, cache = decoder(parts[0])(parts[1], tokens[:, piece], positions[:, piece], cache)
        found.append(logits)
        start += size
    assert start == tokens.shape[1]
    return jnp.concatenate(found, axis=1), cache


def places(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def whole(parts, tokens):
    return forward(parts[0])(parts[1], tokens)


def close(found, wanted, tolerance=1e-4):
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


PIECES = ((5, *[1] * 7), (5, 4, 3), (1,) * 12)


def check(config):
    """Prefill 5 and 7 steps, 5 + 4 + 3, 12 steps: the logits of the whole sequence, with slots to spare.

    A piece of 4 or 3 is one of 5 with room for tokens that aren't there: two programs do for all.
    """
    parts = perturbed(config)
    tokens = ids(config, 2, T)
    expected = whole(parts, tokens)
    for sizes in PIECES:
        cache, found, start = nnx.merge(*parts).cache(2, 16), [], 0
        for size in sizes:
            pad = [(0, 0), (0, 0 if size == 1 else 5 - size)]
            piece = jnp.pad(tokens[:, start : start + size], pad)
            at = jnp.pad(places(tokens)[:, start : start + size], pad, constant_values=-1)
            logits, cache = decoder(parts[0])(parts[1], piece, at, cache)
            found.append(logits[:, :size])
            start += size
        close(jnp.concatenate(found, axis=1), expected)


def test_any_division_of_a_sum_with_states_and_values_gives_the_logits_of_the_whole():
    inner = {"first": "shaw", "second": "fox"}
    check(tiny(encoding="sum", encoding_options={"first": "fox", "second": "sum", "second_options": inner}))


PATTERNS = [
    (("none", 3), ("rope", None)),
    (("transformer_xl", None), ("transformer_xl", 4)),
    (("dape", 5), ({"name": "sum", "options": {"first": "transformer_xl", "second": "fire"}}, None)),
    (("t5", 5), ({"name": "rope", "options": {"base": 50.0}}, None), ("t5", 2), ("alibi", None)),
    (("fox", 4), ("cope", None), ("shaw", 3), ("xpos", None)),
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("sharing", ["paper", "none"])
def test_so_do_patterns_over_layers_with_windows(pattern, sharing):
    check(tiny(encoding="none", num_layers=2 * len(pattern), pattern=pattern, sharing=sharing))


def test_a_single_step_sees_its_own_distances():
    """Slope .5, no content: the 4th step weighs four keys by their distance; a bias of one query would be flat."""
    config = tiny(encoding="alibi", num_layers=1, num_heads=8, model_dim=8)
    graph, parameters = perturbed(config)
    model = nnx.merge(graph, jax.tree.map(jnp.zeros_like, parameters))
    model.blocks[0].attention_norm.bias[...] = jnp.zeros((1, 8)).at[0, 0].set(1.0)
    seen = []
    encoding = model.encodings[0]
    plain = type(encoding).logits

    def spy(self, a, q, k):
        out = plain(self, a, q, k)
        seen.append(jnp.where(k.pos[:, None, None, :] >= 0, out, -jnp.inf))
        return out

    cache = model.cache(1, 8)
    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setattr(type(encoding), "logits", spy)
        for t in range(4):
            _, cache = model.decode(jnp.asarray([[3]]), jnp.asarray([[t]]), cache)
    weights = jax.nn.softmax(seen[-1][0, 0, 0])
    np.testing.assert_allclose(weights[jnp.asarray([0, 1, 2, 8])], [0.1015, 0.1674, 0.2760, 0.4551], atol=1e-4)
    np.testing.assert_allclose(weights[3:8], 0.0)


@pytest.mark.parametrize("name", ["learned", "rope", "transformer_xl", "xpos", "shaw", "cope", "fox"])
def test_left_padded_rows_of_unequal_age(name):
    """Prompts of 2 and 5 tokens in one batch, then steps, in which the first row rests now and then."""
    config = tiny(encoding=name)
    parts = perturbed(config)
    tokens = ids(config, 2, T)
    expected = whole(parts, tokens)
    cache = nnx.merge(*parts).cache(2, 16)
    first = jnp.stack([jnp.pad(tokens[0, :2], (3, 0), constant_values=12), tokens[1, :5]])
    logits, cache = decode(parts, first, jnp.asarray([[-1, -1, -1, 0, 1], [0, 1, 2, 3, 4]]), (5,), cache)
    close(logits[0, 3:], expected[0, :2])
    close(logits[1], expected[1, :5])
    at = [2, 5]
    for step in range(7):
        rests = step % 3 == 1
        given = jnp.asarray([[0 if rests else tokens[0, at[0]]], [tokens[1, at[1]]]])
        logits, cache = decode(parts, given, jnp.asarray([[-1 if rests else at[0]], [at[1]]]), (1,), cache)
        close(logits[1, 0], expected[1, at[1]])
        if not rests:
            close(logits[0, 0], expected[0, at[0]])
            at[0] += 1
        at[1] += 1
    assert np.asarray(cache.next).tolist() == at


@pytest.mark.parametrize("name", ["sinusoidal", "rope", "t5", "cope"])
def test_past_the_training_length(name):
    config = tiny(encoding=name, train_length=4)
    parts = perturbed(config)
    tokens = ids(config, 1, T)
    close(decode(parts, tokens, places(tokens), PIECES[0], nnx.merge(*parts).cache(1, T))[0], whole(parts, tokens))


def test_a_learned_table_is_not_read_past_its_end():
    config = tiny(encoding="learned")
    graph, parameters = perturbed(config)
    model = nnx.merge(graph, parameters)
    cache = dataclasses.replace(model.cache(1, 32), next=jnp.asarray([16]))
    with pytest.raises(ValueError, match=r"position 16 .*16 positions"):
        model.decode(jnp.asarray([[1]]), jnp.asarray([[16]]), cache)
    logits, _ = decoder(graph)(parameters, jnp.asarray([[1]]), jnp.asarray([[16]]), cache)
    assert bool(jnp.isnan(logits).all())


def test_a_cache_that_drops_nothing_refuses_what_it_has_no_room_for():
    """Capacity 8: no eleventh token in the last slot; the error comes before anything is written."""
    config = tiny(encoding="rope")
    graph, parameters = parts = perturbed(config)
    model = nnx.merge(graph, parameters)
    tokens = ids(config, 1, 10)
    _, cache = decode(parts, tokens[:, :8], places(tokens)[:, :8], (8,), model.cache(1, 8))
    with pytest.raises(ValueError, match="position 8 is past the end of a cache of 8 tokens"):
        model.decode(tokens[:, 8:9], jnp.asarray([[8]]), cache)
    logits, after = decoder(graph)(parameters, tokens[:, 8:], jnp.asarray([[8, 9]]), cache)
    assert bool(jnp.isnan(logits).all())
    assert np.asarray(after.tokens[0]).tolist() == np.asarray(tokens[0, :8]).tolist()
    assert np.asarray(after.pos[0]).tolist() == list(range(8))


def test_ids_outside_the_vocabulary_are_refused():
    model = nnx.merge(*perturbed(TINY))
    with pytest.raises(ValueError, match=r"token id 13 .*0\.\.12"):
        model.decode(jnp.asarray([[13]]), jnp.asarray([[0]]), model.cache(1, 4))


@pytest.mark.parametrize("sizes", [(0, 0, None), (4, 2, 3), (4, -1, 5), (4, 4, 0)])
def test_slots_that_do_not_add_up_are_refused(sizes):
    with pytest.raises(ValueError, match=f"cache: {sizes[0]} slots"):
        Cache.empty((), 1, *sizes)


def test_what_an_empty_slot_holds_never_matters():
    config = tiny(encoding="transformer_xl")
    parts = perturbed(config)
    tokens = ids(config, 2, T)
    cache = nnx.merge(*parts).cache(2, 16)
    poisoned = dataclasses.replace(cache, layers=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.layers))
    logits, _ = decode(parts, tokens, places(tokens), PIECES[1], poisoned)
    close(logits, whole(parts, tokens))


def test_a_bf16_cache_stays_bf16_and_costs_precision_alone():
    config = tiny(encoding="rope")
    parts = perturbed(config)
    tokens = ids(config, 2, T)
    cache = nnx.merge(*parts).cache(2, 16, dtype=jnp.bfloat16)
    logits, after = decode(parts, tokens, places(tokens), PIECES[1], cache)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, cache)
    assert cache.layers[0].keys.dtype == jnp.bfloat16 and after.bytes < nnx.merge(*parts).cache(2, 16).bytes
    expected = whole(parts, tokens)
    error = jnp.abs(logits - expected)
    assert float(error[:, :5].max()) < 1e-4  # the first piece sees itself, not the cache
    assert 1e-4 < float(error[:, 5:].max()) < 0.05 * float(jnp.abs(expected).max())


def test_a_bf16_model_decodes_as_it_reads():
    config = tiny(encoding="t5", dtype="bfloat16")
    parts = perturbed(config)
    tokens = ids(config, 1, T)
    logits, _ = decode(parts, tokens, places(tokens), PIECES[0], nnx.merge(*parts).cache(1, T, dtype=jnp.bfloat16))
    expected = whole(parts, tokens)
    assert logits.dtype == jnp.float32
    close(logits, expected, 0.05 * float(jnp.abs(expected).max()))


def test_steps_share_one_program():
    config = tiny(encoding="alibi")
    graph, parameters = perturbed(config)
    run = jax.jit(lambda parameters, *rest: nnx.merge(graph, parameters).decode(*rest))
    cache = nnx.merge(graph, parameters).cache(1, 16)
    _, cache = run(parameters, jnp.ones((1, 4), jnp.int32), jnp.arange(4)[None], cache)
    for t in range(4, 16):
        _, cache = run(parameters, jnp.ones((1, 1), jnp.int32), jnp.full((1, 1), t), cache)
    assert run._cache_size() == 2


def test_of_several_tokens_for_one_slot_the_last_stays():
    cache = Cache.empty((), 1, 5, 2, 3)
    positions = jnp.asarray([[3, -1, 6, 1, 8, 0, 7]])
    assert np.asarray(cache.slot(positions))[0, [0, 2, 3, 4, 5, 6]].tolist() == [3, 3, 1, 2, 0, 4]
    after = cache.followed_by(positions + 10, positions, ())
    assert np.asarray(after.pos).tolist() == [[0, 1, 8, 6, 7]]
    assert np.asarray(after.tokens).tolist() == [[10, 11, 18, 16, 17]]
    assert np.asarray(after.next).tolist() == [9]
