"""Reading through a cache that drops tokens, against float64 lists; many tokens at once against one at a time."""

import dataclasses
import functools
import itertools

import encodings_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from streaming_oracle import stream
from tiny_models import TINY, by_path, for_gpt2, forward, ids, perturbed, tiny

from pe_ablation import encodings, eviction
from pe_ablation.attention import Mask
from pe_ablation.eviction import EvictionError, Policy
from pe_ablation.model import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")

RELATIVE = ("none", "rope", "alibi", "t5", "transformer_xl")
NEWER = ("xpos", "shaw", "fox")
T = 24


def three(encoding, **changes):
    return tiny(encoding=encoding, num_layers=3, train_length=8, **changes)


def formulas(config, parameters):
    """The oracle's formula of each layer."""
    flat = {path: value.astype(np.float64) for path, value in by_path(parameters).items()}
    own = encodings.find(config.encoding).per_layer
    named = {
        path.removeprefix("encodings/0/"): value for path, value in flat.items() if path.startswith("encodings/0/")
    }
    return [
        oracle.FORMULAS[config.encoding]({name: value[n] if name in own else value for name, value in named.items()})
        for n in range(config.num_layers)
    ]


def expected(config, parameters, tokens, **how):
    """Logits [T,V] and trace of the oracle."""
    weights = for_gpt2(config, parameters)
    return stream(weights, np.asarray(tokens), config.num_heads, formulas(config, parameters), **how)


@functools.cache
def reader(graph, policy, size):
    """Jitted parameters, tokens [B,T], positions [B,T], cache -> logits, cache: `size` tokens at a time."""

    def run(parameters, tokens, positions, cache):
        model = nnx.merge(graph, parameters)

        def step(cache, piece):
            logits, cache = eviction.advance(policy, model, *piece, cache)
            return cache, logits

        pieces = [jnp.stack(jnp.split(each, each.shape[1] // size, axis=1)) for each in (tokens, positions)]
        cache, logits = jax.lax.scan(step, cache, tuple(pieces))
        return jnp.concatenate(list(logits), axis=1), cache

    return jax.jit(run)


def read(config, policy, tokens, size, parts=None):
    """Logits [B,T,V] of tokens [B,T], `size` at a time; and the cache at the end."""
    graph, parameters = parts or perturbed(config)
    tokens = jnp.atleast_2d(tokens)
    pad = -tokens.shape[1] % size
    positions = jnp.pad(
        jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), [(0, 0), (0, pad)], constant_values=-1
    )
    model = nnx.merge(graph, parameters)
    eviction.refuse(policy, model)
    cache = eviction.cache(policy, model, tokens.shape[0])
    logits, cache = reader(graph, policy, size)(parameters, jnp.pad(tokens, [(0, 0), (0, pad)]), positions, cache)
    return logits[:, : tokens.shape[1]], cache


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


# Streaming


@pytest.mark.parametrize("name, sinks", [*itertools.product(RELATIVE, [0, 1, 2, 4]), *itertools.product(NEWER, [0, 2])])
def test_streaming_equals_lists_in_float64_and_many_tokens_at_once_equal_one(name, sinks):
    """3 layers, T >= 3 W; the mask and the views of the whole text at once are the same again."""
    config, policy = three(name), Policy("sink" if sinks else "window", sinks + 3, sinks)
    parts = perturbed(config)
    tokens = ids(config, T)
    wanted, trace = expected(config, parts[1], tokens, sinks=sinks, recent=3)
    assert len(trace[-1][0]) == sinks + 3 and trace[-1][1] == sinks + 3
    one, cache = read(config, policy, tokens, 1, parts)
    close(one[0], wanted)
    assert set(np.asarray(cache.pos[0])) == {*range(sinks), T - 3, T - 2, T - 1}
    close(read(config, policy, tokens, 3, parts)[0][0], wanted)
    plain = forward(parts[0])(parts[1], tokens[None])[0]
    close(plain[: policy.seen], wanted[: policy.seen])
    assert float(np.abs(plain[policy.seen :] - wanted[policy.seen :]).max()) > 1e-3


@pytest.mark.parametrize("name", ["rope", "t5", "xpos", "shaw", "fox"])
def test_one_masked_pass_with_two_views_is_streaming(name):
    config, policy = three(name), Policy("sink", 5, 2)
    graph, parameters = perturbed(config)
    tokens = ids(config, T)
    model = nnx.merge(graph, parameters)
    views = [view._replace(slots=None) for view in eviction.views(policy, model, T, jnp.zeros(1, jnp.int32))]
    run = jax.jit(
        lambda parameters: nnx.merge(graph, parameters)(tokens[None], mask=Mask(sinks=2, recent=3), views=views)
    )
    close(run(parameters)[0], expected(config, parameters, tokens, sinks=2, recent=3)[0])


def test_the_cache_of_the_paper_step_by_step():
    """S = 2, R = 3: what is kept when a token is read, and the positions; evicting before, one less."""
    config = three("rope")
    parameters = perturbed(config)[1]
    after = expected(config, parameters, ids(config, 9), sinks=2, recent=3)[1]
    assert [[j for j, _ in after[t][0]] for t in (5, 6, 8)] == [[0, 1, 2, 3, 4], [0, 1, 3, 4, 5], [0, 1, 5, 6, 7]]
    assert [after[t][1] for t in (3, 5, 6, 8)] == [3, 5, 5, 5]
    before = expected(config, parameters, ids(config, 9), sinks=2, recent=3, evict="before")[1]
    assert [[j for j, _ in before[t][0]] + [t] for t in (5, 8)] == [[0, 1, 3, 4, 5], [0, 1, 6, 7, 8]]
    assert before[8] == ([(0, 0), (1, 1), (6, 2), (7, 3)], 4)
    _, cache = read(config, Policy("sink", 5, 2), ids(config, 8), 1)
    assert sorted(np.asarray(cache.pos[0])) == [0, 1, 5, 6, 7]


def test_evicting_before_reading_sees_one_less():
    config, policy = three("rope"), Policy("sink", 5, 2, evict="before")
    parts, tokens = perturbed(config), ids(config, T)
    wanted, _ = expected(config, parts[1], tokens, sinks=2, recent=3, evict="before")
    close(read(config, policy, tokens, 1, parts)[0][0], wanted)
    close(read(config, policy, tokens, 2, parts)[0][0], wanted)
    assert (policy.kept, policy.seen, eviction.first_evicted(policy)) == (4, 5, 5)


@pytest.mark.parametrize("rule, limit", [("original", None), ("capped", 7)])
@pytest.mark.parametrize("name", ["rope", "alibi", "xpos", "shaw"])
def test_other_position_rules(name, rule, limit):
    config, policy = three(name), Policy("sink", 5, 2, positions=rule, limit=limit)
    parts, tokens = perturbed(config), ids(config, T)
    wanted, _ = expected(config, parts[1], tokens, sinks=2, recent=3, rule=rule, limit=limit)
    close(read(config, policy, tokens, 1, parts)[0][0], wanted)
    close(read(config, policy, tokens, 3, parts)[0][0], wanted)
    usual, _ = expected(config, parts[1], tokens, sinks=2, recent=3)
    assert np.abs(usual - wanted).max() > 1e-2


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
@pytest.mark.parametrize("absolute", ["saturate", "ring", "layer0_fix"])
def test_approximations_of_encodings_added_at_the_input(name, absolute):
    config, policy = three(name), Policy("sink", 5, 2, absolute=absolute)
    parts, tokens = perturbed(config), ids(config, T)
    embedded = {
        "saturate": lambda t: min(t, 5),
        "ring": lambda t: t if t < 2 else 2 + (t - 2) % 6,
        "layer0_fix": lambda t: min(t, 5),
    }[absolute]
    how = {"embedded": embedded, "first_layer": absolute == "layer0_fix"}
    wanted, _ = expected(config, parts[1], tokens, sinks=2, recent=3, **how)
    close(read(config, policy, tokens, 1, parts)[0][0], wanted)
    assert eviction.in_parallel(policy, nnx.merge(*parts)) == (absolute != "layer0_fix")
    if absolute != "layer0_fix":
        close(read(config, policy, tokens, 3, parts)[0][0], wanted)


def test_saturated_positions_are_all_the_same():
    """10 tokens, S = 2, R = 3: kept (token, position) are (0,0) (1,1) (7,5) (8,5) (9,5)."""
    policy, model = Policy("sink", 5, 2, absolute="saturate"), nnx.merge(*perturbed(three("learned")))
    shown = eviction.embedded(policy, model, jnp.arange(10))
    assert [(t, int(shown[t])) for t in (0, 1, 7, 8, 9)] == [(0, 0), (1, 1), (7, 5), (8, 5), (9, 5)]


# Identities


def test_a_window_and_no_sinks_are_a_masked_window():
    config = three("rope")
    parts, tokens = perturbed(config), ids(config, 2, T)
    run = jax.jit(lambda parameters: nnx.merge(parts[0], parameters)(tokens, mask=Mask(window=5)))
    close(read(config, Policy("window", 4), tokens, 1, parts)[0], run(parts[1]))


@pytest.mark.parametrize("name", encodings.names())
def test_every_encoding_reads_a_window_at_its_own_places_as_the_masked_whole(name):
    """T >= 3 W for windows of 2, 3 and 5 keys, the token itself among them."""
    config = tiny(encoding=name)
    graph, parameters = parts = perturbed(config)
    tokens = ids(config, 2, 15)
    run = jax.jit(lambda parameters, window: nnx.merge(graph, parameters)(tokens, mask=Mask(window=window)))
    for window in (2, 3, 5) if name in RELATIVE else (3,):
        policy = Policy("window", window - 1, positions="original")
        close(read(config, policy, tokens, 1, parts)[0], run(parameters, window))


@pytest.mark.parametrize("name", ["rope", "t5"])
def test_one_layer_sees_what_an_ordinary_pass_over_the_kept_tokens_sees(name):
    config, policy = tiny(encoding=name, num_layers=1, train_length=8), Policy("sink", 5, 2)
    parts, tokens = perturbed(config), ids(config, T)
    logits, _ = read(config, policy, tokens, 1, parts)
    for t in (6, 8, T - 1):
        kept = np.asarray([0, 1, t - 3, t - 2, t - 1, t])
        alone = forward(parts[0])(parts[1], tokens[kept][None])
        close(logits[0, t], alone[0, -1])


def test_a_cache_wide_enough_keeps_all():
    config = three("transformer_xl")
    parts, tokens = perturbed(config), ids(config, 2, 11)
    for policy, size in ((Policy("sink", 16, 4), 11), (Policy("full", 16), 11), (Policy("window", 11), 11)):
        close(read(config, policy, tokens, size, parts)[0], forward(parts[0])(parts[1], tokens))


def test_rows_of_unequal_age_and_prompts_shorter_than_the_sinks_or_just_full():
    """Left-padded rows of 1, 5 and 11 tokens, S = 4, W = 5 (one recent is full), then four tokens more each."""
    config, policy = three("rope"), Policy("sink", 5, 4)
    graph, parameters = parts = perturbed(config)
    lengths, more = (1, 5, 11), 4
    rows = [ids(config, length + more, seed=length) for length in lengths]
    wide = max(lengths)
    tokens = jnp.stack([jnp.pad(row, (wide + more - len(row), 0)) for row in rows])
    positions = jnp.stack([jnp.arange(wide + more) - (wide + more - len(row)) for row in rows])
    cache = eviction.cache(policy, nnx.merge(graph, parameters), 3)
    logits, _ = reader(graph, policy, 1)(parameters, tokens, jnp.maximum(positions, -1), cache)
    for row, own in zip(rows, logits, strict=True):
        close(own[-len(row) :], read(config, policy, row, 1, parts)[0][0])


@pytest.mark.parametrize("name", ["rope", "xpos"])
def test_positions_of_an_endless_text_lose_nothing(name):
    """A million tokens in, the same numbers as at the start: angles are of positions in the cache."""
    config, policy = three(name), Policy("sink", 5, 2)
    graph, parameters = parts = perturbed(config)
    tokens = ids(config, T)
    wanted, _ = read(config, policy, tokens, 3, parts)
    model = nnx.merge(graph, parameters)
    cache = eviction.cache(policy, model, 1)
    run = reader(graph, policy, 3)
    first, positions = tokens[None], jnp.arange(T)[None]
    _, cache = run(parameters, first[:, :6], positions[:, :6], cache)
    far = 999_999  # a multiple of R: slots stay where they were
    moved = jnp.where(cache.pos >= 2, cache.pos + far, cache.pos)
    cache = dataclasses.replace(cache, pos=moved, next=cache.next + far)
    logits, _ = run(parameters, first[:, 6:], positions[:, 6:] + far, cache)
    close(logits, wanted[:, 6:])


def test_an_encoding_that_orders_all_keys_streams_one_token_at_a_time():
    config, policy = three("cope"), Policy("sink", 5, 2)
    parts, tokens = perturbed(config), ids(config, T)
    assert not eviction.in_parallel(policy, nnx.merge(*parts))
    close(read(config, policy, tokens, 1, parts)[0][0], expected(config, parts[1], tokens, sinks=2, recent=3)[0])
    with pytest.raises(EvictionError, match="at most 1"):
        read(config, policy, tokens, 3, parts)


# Refusals


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"name": "window", "slots": 4, "sinks": 1}, ["sinks: 1", "window"]),
        ({"name": "sink", "slots": 4, "sinks": 4}, ["window: 4", "4 sinks", "at least 5"]),
        ({"name": "sink", "slots": 5, "sinks": 4, "evict": "before"}, ["window: 5", "at least 6"]),
        ({"name": "window", "slots": 0}, ["window: 0", "at least 1"]),
        ({"name": "sink", "slots": 5, "sinks": -1}, ["sinks: -1"]),
        ({"name": "sink", "slots": 5, "sinks": 1, "positions": "capped"}, ["limit: None", "capped"]),
        ({"name": "sink", "slots": 5, "sinks": 1, "limit": 9}, ["limit: 9", "in_cache"]),
        ({"name": "sink", "slots": 5, "sinks": 1, "positions": "capped", "limit": 3}, ["limit: 3", "at least 5"]),
        ({"name": "sink", "slots": 5, "sinks": 1, "positions": "original", "absolute": "ring"}, ["absolute: 'ring'"]),
        ({"name": "recompute", "slots": 5, "absolute": "ring"}, ["absolute: 'ring'"]),
    ],
)
def test_policies_that_make_no_sense_are_refused_by_field(fields, words):
    with pytest.raises(EvictionError) as refusal:
        Policy(**fields)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize(
    "name, policy, words",
    [
        ("learned", Policy("sink", 5, 2), ["absolute", "saturate, ring or layer0_fix", "recompute"]),
        ("sinusoidal", Policy("window", 5), ["absolute", "saturate"]),
        ("rope", Policy("sink", 5, 2, absolute="ring"), ["absolute: 'ring'", "added at the input"]),
        ("learned", Policy("sink", 8, 2, absolute="layer0_fix"), ["window: 8", "need 9", "has 8"]),
        ("learned", Policy("recompute", 8), ["window: 8", "need 9", "has 8"]),
        ("learned", Policy("sink", 12, 8, absolute="ring"), ["sinks: 8", "8 positions"]),
        ("sinusoidal", Policy("sink", 5, 2, positions="capped", limit=9), ["capped"]),
    ],
)
def test_models_that_cannot_be_read_so_are_refused(name, policy, words):
    model = nnx.eval_shape(lambda: GPT(three(name), rngs=nnx.Rngs(0)))
    with pytest.raises(EvictionError) as refusal:
        eviction.refuse(policy, model)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_what_fits_is_not_refused():
    learned, sinusoidal = (
        nnx.eval_shape(lambda n=n: GPT(three(n), rngs=nnx.Rngs(0))) for n in ("learned", "sinusoidal")
    )
    eviction.refuse(Policy("sink", 7, 2, absolute="layer0_fix"), learned)
    eviction.refuse(Policy("recompute", 8, evict="before"), learned)
    eviction.refuse(Policy("sink", 50, 2, positions="original"), sinusoidal)
    eviction.refuse(Policy("full", 8), learned)


def test_more_tokens_at_once_than_recent_ones_are_refused():
    config = three("rope")
    with pytest.raises(EvictionError, match="4 at once; at most 3"):
        read(config, Policy("sink", 5, 2), ids(config, 8), 4)


def test_a_policy_without_a_cache_has_none():
    with pytest.raises(EvictionError, match="recompute"):
        eviction.cache(Policy("recompute", 4), nnx.eval_shape(lambda: GPT(TINY, rngs=nnx.Rngs(0))), 1)
