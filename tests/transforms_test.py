"""Transforms of a trained model: published numbers, whole decoders against loops, caches, cells and tables."""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import encodings_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from streaming_oracle import stream
from tiny_models import by_path, for_gpt2, forward, ids, perturbed, tiny
from written_runs import experiment, written

from pe_ablation import cli, config, encodings, evaluate, eviction, generate, launch, report, trained, transforms
from pe_ablation import verdicts as verdicts_module
from pe_ablation.config import ConfigError
from pe_ablation.encodings import frequencies
from pe_ablation.encodings.base import geometric
from pe_ablation.eviction import Policy
from pe_ablation.generate import Sampling
from pe_ablation.model import GPTConfig
from pe_ablation.trained import Trained
from pe_ablation.transforms import TransformError

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")

THETA = geometric(32, 10_000.0)


def rope(train_length=512, dim=64, **options) -> Any:
    sizes = {"num_heads": 1, "head_dim": dim, "model_dim": dim, "train_length": train_length}
    return encodings.make("rope", rngs=nnx.Rngs(0), **sizes, **options)


def schedule(text, length, train_length=512):
    """(frequencies, magnitude) of 64 dims under a transform at `length` tokens."""
    asked: Any = config.transform(text)
    return asked.at(length, train_length).schedule(rope(train_length))


def base_of(theta):
    """The base that has these frequencies."""
    return theta[1] ** -len(theta)


# Published numbers


@pytest.mark.parametrize("dim, bases", [
    (64, {2: 20452.23, 4: 41829.37, 8: 85550.38, 16: 174969.59}),
    (128, {2: 20221.26, 4: 40889.94, 8: 82684.62, 16: 167198.74}),
])  # fmt: skip
def test_ntk_changes_the_base_and_divides_the_last_frequency_by_the_factor(dim, bases):
    theta = geometric(dim // 2, 10_000.0)
    for factor, base in bases.items():
        found = frequencies.ntk(theta, factor)
        assert base_of(found) == pytest.approx(base, abs=5e-3)
        np.testing.assert_allclose(found, geometric(dim // 2, base_of(found)), rtol=1e-12)
        assert found[0] == 1.0 and found[-1] == pytest.approx(theta[-1] / factor, rel=1e-12)


@pytest.mark.parametrize("factor, bases", [
    (2, {256: 10000, 512: 10000, 1023: 10000, 1024: 10000, 1025: 10020.162, 2048: 31082.237, 4096: 74534.830}),
    (1, {512: 10000, 1024: 10000, 2048: 20452.229}),
])  # fmt: skip
def test_dynamic_ntk_depends_on_the_length_and_leaves_the_trained_one(factor, bases):
    for length, base in bases.items():
        found, magnitude = schedule(f"dynamic_ntk:factor={factor}", length, 1024)
        assert magnitude == 1.0
        if base == 10000:
            np.testing.assert_array_equal(found, THETA)
        else:
            assert base_of(found) == pytest.approx(base, abs=6e-4)
    again = schedule(f"dynamic_ntk:factor={factor}:length=2048", 64, 1024)[0]
    np.testing.assert_array_equal(again, schedule(f"dynamic_ntk:factor={factor}", 2048, 1024)[0])


PARTS = {  # 64 dims, trained at 512, factor 4: frequencies by ramp of the code and of the paper
    3: (0.42169650, 0.42169650), 4: (0.29798386, 0.26855304), 6: (0.14705003, 0.10249798), 8: (0.07115385, 0.04229532),
    10: (0.03352419, 0.01893236), 12: (0.01520326, 0.00911209), 15: (0.00410314, 0.00336176),
    16: (0.00250000, 0.00250000), 31: (0.00003334, 0.00003334),
}  # fmt: skip


@pytest.mark.parametrize("name", ["yarn", "ntk_by_parts"])
@pytest.mark.parametrize("ramp", ["code", "paper"])
def test_ntk_by_parts_under_both_ramps(name, ramp):
    """The code's is linear in the index of the pair, the paper's in its rotations; code is the default."""
    found, _ = schedule(f"{name}:factor=4:ramp={ramp}", 99)
    for pair, both in PARTS.items():
        assert found[pair] == pytest.approx(both[ramp == "paper"], abs=6e-9), pair
    if ramp == "code":
        np.testing.assert_array_equal(found, schedule(name, 2048)[0])


@pytest.mark.parametrize("pairs, length, low, high", [(32, 512, 3, 16), (32, 1024, 5, 18), (32, 2048, 8, 21),
                                                      (64, 4096, 20, 46)])  # fmt: skip
def test_where_the_ramp_of_the_code_begins_and_ends(pairs, length, low, high):
    ramp = frequencies.ramp_of_index(pairs, 1e4, length, 1, 32)
    np.testing.assert_allclose(ramp, [min(max((high - k) / (high - low), 0), 1) for k in range(pairs)], atol=1e-12)


def test_llama3_ratios():
    found = schedule("llama3:factor=8", 99)[0] / THETA
    np.testing.assert_array_equal(found[:11], 1)
    np.testing.assert_allclose(found[11:16], [0.835585, 0.584916, 0.396941, 0.255979, 0.150273], atol=6e-7)
    np.testing.assert_allclose(found[16:], 0.125, rtol=1e-12)


MAGNITUDES = {1: 1, 2: 1.069315, 4: 1.138629, 8: 1.207944, 16: 1.277259, 32: 1.346574, 128: 1.485203}
SQUARES = {2: 1.143434, 4: 1.296477, 8: 1.459129, 16: 1.631390, 32: 1.813260}


def changed_rope(text, length, **options):
    """(RoPE of 64 dims as it was, as a transform makes it), through the decoder's config."""
    sizes = {"vocab_size": 5, "num_layers": 1, "num_heads": 1, "model_dim": 64, "train_length": 512}
    gpt = GPTConfig(**sizes, encoding="rope", encoding_options=options)
    asked: Any = config.transform(text)
    changed = asked.at(length, 512).config(gpt)
    return [each.build_encoding(each.distinct[0], nnx.Rngs(0)) for each in (gpt, changed)]


@pytest.mark.parametrize("factor", MAGNITUDES)
def test_yarns_temperature_is_applied_once(factor):
    """Rotated vectors grow by 0.1 ln s + 1, logits by its square, and dims that are not rotated not at all."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 1, 64)), jnp.float32)
    pos = jnp.asarray([[0, 5, 900]])
    plain, found = changed_rope(f"yarn:factor={factor}", 64, fraction=0.5)
    for hook in ("query", "key"):
        was, now = (np.asarray(getattr(each, hook)(x, pos), np.float64) for each in (plain, found))
        ratio = np.linalg.norm(now[..., :32], axis=-1) / np.linalg.norm(was[..., :32], axis=-1)
        np.testing.assert_allclose(ratio, MAGNITUDES[factor], atol=2e-6)
        np.testing.assert_array_equal(now[..., 32:], was[..., 32:])
    if factor in SQUARES:
        at_zero = [
            np.asarray(each.query(x, 0 * pos) * each.key(x, 0 * pos))[..., :32].sum(-1) for each in (plain, found)
        ]
        np.testing.assert_allclose(at_zero[1] / at_zero[0], SQUARES[factor], atol=3e-6)


def test_a_named_magnitude_replaces_yarns():
    for magnitude in (1.0, 1.3):
        assert changed_rope(f"yarn:factor=4:magnitude={magnitude}", 64)[1].magnitude == magnitude
    assert changed_rope("yarn:factor=4", 64, magnitude=2.0)[1].magnitude == pytest.approx(2 * 1.138629, abs=1e-6)
    x, pos = (
        jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 1, 64)), jnp.float32),
        jnp.asarray([[0, 5, 900]]),
    )
    plain = changed_rope("ntk_by_parts:factor=4", 64)[1].query(x, pos)  # the same frequencies
    np.testing.assert_array_equal(changed_rope("yarn:factor=4:magnitude=1", 64)[1].query(x, pos), plain)


def test_a_factor_of_one_changes_no_bit():
    for name in ("pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3"):
        for length in (100, 512):
            theta, magnitude = schedule(name, length)
            np.testing.assert_array_equal(theta, THETA)
            assert magnitude == 1.0


# Whole decoders against loops


L, N, T = 16, 40, 24  # trained, to be read, read


def loaded(name, **changes) -> Trained:
    """A decoder as `trained.load` gives it."""
    gpt = tiny(model_dim=16, train_length=L, encoding=name, **changes)
    graph, params = perturbed(gpt)
    about: Any = {"run": None, "tokenizer": None, "step": 0, "alive": True, "unread": {}}
    owner: Any = SimpleNamespace(train=SimpleNamespace(length=L))
    return Trained(experiment=owner, config=gpt, abstract=nnx.merge(graph, params), graph=graph, params=params, **about)


def under(text, model, length=N) -> Trained:
    asked: Any = config.transform(text)
    return transforms.apply(asked, model, length)


def turned(factors, magnitude=1.0):
    """Formula: 8 dims, the frequencies of base 10,000 each times its own number."""
    own = [10_000 ** (-k / 4) * factors[k] for k in range(4)]
    return lambda parameters: oracle.rope(parameters, frequencies=own, magnitude=magnitude)


def parts(factor, low, high):
    """theta' / theta of YaRN's paper ramp, in rotations within L."""
    turns = [L * 10_000 ** (-k / 4) / (2 * math.pi) for k in range(4)]
    kept = [min(max((r - low) / (high - low), 0), 1) for r in turns]
    return [(1 - g) / factor + g for g in kept]


def code_parts(factor):
    low, high = (4 * math.log(L / (2 * math.pi * r)) / math.log(10_000) for r in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), 7)
    kept = [1 - min(max((k - low) / (high - low), 0), 1) for k in range(4)]
    return [(1 - g) / factor + g for g in kept]


def moved(formula, pair):
    """`formula` with each (query, key) position replaced by `pair` of them."""

    def make(parameters):
        own = formula(parameters)
        return own._replace(logit=lambda q, k, i, j, head: own.logit(q, k, *pair(i, j), head))

    return make


def clipped(window):
    return lambda i, j: (i, j) if i - j < window else (window, 0)


def grouped(window, group):
    return lambda i, j: (i, j) if i - j < window else (i // group + window - window // group, j // group)


def rows(place):
    """Formula of a learned table whose position p is at `place(p)` between trained rows."""

    def make(parameters):
        table = parameters["table"]

        def embed(x, p):
            at = place(p)
            low, share = int(at), at - int(at)
            return x + (table[low] if not share else (1 - share) * table[low] + share * table[low + 1])

        return oracle.Formula(embed, oracle.none(parameters).logit)

    return make


def lengthened(formula, least=1.0):
    """`formula` with logits times ln n / ln L of a query that sees n keys, at least `least`."""

    def make(parameters):
        own = formula(parameters)
        scale = lambda i: max(least, math.log(i + 1) / math.log(L))  # noqa: E731
        return own._replace(logit=lambda q, k, i, j, head: scale(i) * own.logit(q, k, i, j, head))

    return make


S = N / L
SCALES = {
    "pi": turned([1 / S] * 4),
    "pi:factor=4": turned([1 / 4] * 4),
    "ntk": turned([S ** (-k / 3) for k in range(4)]),
    "dynamic_ntk:factor=2": turned([(2 * S - 1) ** (-k / 3) for k in range(4)]),
    "ntk_by_parts:ramp=paper": turned(parts(S, 1, 32)),
    "yarn": turned(code_parts(S), 0.1 * math.log(S) + 1),
    "yarn:factor=4:ramp=paper:beta=2": turned(parts(4, 1, 2), 0.1 * math.log(4) + 1),
    "llama3:beta=3": turned(parts(S, 1, 3)),
    "base:base=500000": turned([50 ** (-k / 4) for k in range(4)]),
}
CASES = [
    *(("rope", text, formula) for text, formula in SCALES.items()),
    ("rope", "clip", moved(oracle.rope, clipped(L - 1))),
    ("rope", "rerope", moved(oracle.rope, clipped(8))),
    ("rope", "rerope:window=3", moved(oracle.rope, clipped(3))),
    ("xpos", "rerope:window=5", moved(oracle.xpos, clipped(5))),
    ("rope", "self_extend", moved(oracle.rope, grouped(8, 4))),
    ("rope", "self_extend:window=4:group=3", moved(oracle.rope, grouped(4, 3))),
    ("alibi", "clip:limit=5", moved(oracle.alibi, clipped(5))),
    ("t5", "self_extend:window=4:group=2", moved(oracle.t5, grouped(4, 2))),
    ("transformer_xl", "clip:limit=7", moved(oracle.transformer_xl, clipped(7))),
    ("learned", "interpolate", rows(lambda p: min(p / S, L - 1))),
    ("learned", "interpolate:factor=2", rows(lambda p: min(p / 2, L - 1))),
    ("learned", "clamp", rows(lambda p: min(p, L - 1))),
    ("learned", "wrap", rows(lambda p: p % L)),
    ("alibi", "log_n", lengthened(oracle.alibi)),
    ("t5", "log_n:beyond=false", lengthened(oracle.t5, 0.0)),
    ("rope", "rerope+log_n", lengthened(moved(oracle.rope, clipped(8)))),
    ("rope", "pi+log_n", lengthened(turned([1 / S] * 4))),
    ("learned", "log_n+wrap", lengthened(rows(lambda p: p % L))),
]


def weights_of(model, formula):
    """Weights and one formula a layer for the oracles, of a decoder as it was trained."""
    flat = {path: value.astype(np.float64) for path, value in by_path(model.params).items()}
    named = {path.removeprefix("encodings/0/"): value for path, value in flat.items() if "encodings" in path}
    own = encodings.find(model.config.encoding).per_layer
    per_layer = [{key: value[n] if key in own else value for key, value in named.items()} for n in range(2)]
    return for_gpt2(model.config, model.params), [formula(each) for each in per_layer]


@functools.cache
def decoder(graph):
    return jax.jit(lambda params, *rest: nnx.merge(graph, params).decode(*rest))


@pytest.mark.parametrize("name, text, formula", CASES, ids=[f"{name}-{text}" for name, text, _ in CASES])
def test_a_decoder_under_a_transform_equals_loops_and_its_cache(name, text, formula):
    model = loaded(name)
    found = under(text, model)
    tokens = ids(model.config, 1, T)
    weights, formulas = weights_of(model, formula)
    expected = stream(weights, np.asarray(tokens[0]), model.config.num_heads, formulas)[0]
    logits = forward(found.graph)(found.params, tokens)
    np.testing.assert_allclose(logits[0], expected, rtol=2e-4, atol=2e-4)
    if name != "learned":
        plain = forward(model.graph)(model.params, tokens)
        assert np.abs(np.asarray(plain) - logits).max() > 1e-3
    cache, start = found.model.cache(1, T), 0
    for size in (8, *[1] * 8, 8):
        piece = slice(start, start + size)
        places = jnp.arange(start, start + size)[None]
        part, cache = decoder(found.graph)(found.params, tokens[:, piece], places, cache)
        np.testing.assert_allclose(part, logits[:, piece], rtol=1e-4, atol=1e-4)
        start += size


def test_blockwise_equals_dense_under_far_views():
    for text in ("rerope", "self_extend"):
        parts = {each: under(text, loaded("rope", implementation=each)) for each in ("dense", "blockwise")}
        tokens = ids(parts["dense"].config, 1, 300)
        dense, blockwise = (forward(each.graph)(each.params, tokens) for each in parts.values())
        np.testing.assert_allclose(blockwise, dense, rtol=1e-4, atol=1e-4)


def test_of_a_pattern_the_rotating_layers_are_changed():
    model = loaded("rope", pattern=(("rope", 8), ("none", None)))
    found = under("ntk", model)
    [(first, window), second] = found.config.pattern or ()
    assert (first["name"], window, second) == ("rope", 8, ({"name": "none", "options": {}}, None))
    logits = forward(found.graph)(found.params, ids(model.config, 1, T))
    assert np.isfinite(logits).all()
    with pytest.raises(TransformError, match=r"interpolate: makes rows for a learned table; rope, none has none"):
        under("interpolate", model)


def test_the_order_of_lengths_leaves_nothing_behind():
    """Long, then short: what is not past the training length is the trained model itself."""
    model = loaded("rope")
    before = {each: np.asarray(leaf) for each, leaf in by_path(model.params).items()}
    for text in ("dynamic_ntk:factor=2", "pi", "yarn", "self_extend"):
        long = under(text, model, 4096)
        assert long.config != model.config
        assert under(text, model, 12) is model and under(text, model, L) is model
    table = loaded("learned")
    rows_before = by_path(table.params)
    assert under("wrap", table, 40).model.max_position == 40 and under("wrap", table, L) is table
    for path, value in rows_before.items():
        np.testing.assert_array_equal(by_path(table.params)[path], value)
    for path, value in before.items():
        np.testing.assert_array_equal(by_path(model.params)[path], value)


def test_self_extends_group_shows_no_distance_past_training():
    for length in (17, 40, 100, 1000):
        group = under("self_extend", loaded("rope"), length).config.distances
        assert group is not None and group.group is not None
        farthest = [max(grouped(8, each)(length - 1, 0)[0], 7) for each in (group.group, group.group - 1)]
        assert farthest[0] < L <= (farthest[1] if group.group > 1 else L)


def test_rows_of_a_table_that_never_trained_stay_known():
    where = np.zeros((L, 16), bool)
    where[L - 1] = True
    model = dataclasses.replace(loaded("learned"), unread={transforms.TABLE: where})
    assert transforms.TABLE in by_path_names(model.params)
    found = under("clamp", model).unread or {}
    assert found[transforms.TABLE].any(axis=1).tolist() == [p >= L - 1 for p in range(N)]
    assert (under("interpolate", model).unread or {})[transforms.TABLE].any(axis=1)[-3:].all()


def by_path_names(params):
    from pe_ablation import checkpoint

    return set(checkpoint.named(params))


# Caches that evict


@pytest.mark.parametrize("text, pair", [("clip:limit=4", clipped(4)), ("self_extend:window=3:group=2", grouped(3, 2))])
def test_distances_are_changed_from_those_that_the_cache_shows(text, pair):
    model = loaded("rope")
    found, policy = under(text, model), Policy("sink", 7, 2)
    assert eviction.in_parallel(policy, found.model) == text.startswith("clip")
    tokens = ids(model.config, 1, 15)
    weights, formulas = weights_of(model, moved(oracle.rope, pair))
    how = {"sinks": 2, "recent": 5}
    expected = stream(weights, np.asarray(tokens[0]), model.config.num_heads, formulas, **how)[0]

    @jax.jit
    def step(params, ids, places, cache):
        return eviction.advance(policy, nnx.merge(found.graph, params), ids, places, cache)

    for size in (1, 5) if text.startswith("clip") else (1,):
        cache = eviction.cache(policy, found.model, 1)
        for start in range(0, 15, size):
            places = jnp.arange(start, start + size)[None]
            logits, cache = step(found.params, tokens[:, start : start + size], places, cache)
            np.testing.assert_allclose(logits[0], expected[start : start + size], rtol=2e-4, atol=2e-4)


# Refused by name


@pytest.mark.parametrize("name, text, message", [
    ("alibi", "yarn", "yarn: changes the frequencies of rope, which alibi is not"),
    ("alibi", "rerope", "rerope: limits the distances of a rotation; alibi has none, try clip"),
    ("rope", "clamp", "clamp: makes rows for a learned table; rope has none"),
    ("learned", "clip", "clip: changes the distances that an encoding is shown; learned does not depend on distances"),
    ("sinusoidal", "self_extend", "sinusoidal does not depend on distances alone"),
    ("none", "clip", "none sees no distance"),
    ("p_rope", "pi", "pi: changes the frequencies of rope, which p_rope is not"),
    ("cope", "clip", "cope orders all keys of a query together"),
    ("fire", "self_extend", "fire does not depend on distances alone"),
    ("fox", "clip", "clip: changes the distances that an encoding is shown; fox sees no distance"),
    ("alibi", "log_n+yarn", "yarn: changes the frequencies of rope, which alibi is not"),
    ("learned", "wrap:original=17", r"wrap: reads row 16 of a table of 16 rows"),
    ("rope", "self_extend:window=16", "self_extend: window 16 leaves none of 16 trained distances"),
])  # fmt: skip
def test_an_encoding_of_another_kind_is_refused_by_name(name, text, message):
    with pytest.raises(TransformError, match=message):
        under(text, loaded(name))


@pytest.mark.parametrize("text, message", [
    ("yarm", r"no transform 'yarm' \(did you mean yarn\?\); allowed: none, pi, ntk"),
    ("yarn:window=3", r"yarn\.window: no such field; allowed: factor, original, ramp"),
    ("pi:ramp=code", r"pi\.ramp: no such field; allowed: factor, original"),
    ("yarn:ramp=codes", r"yarn\.ramp: 'codes' is not allowed \(did you mean code\?\)"),
    ("yarn:factor=0.5", "yarn: factor 0.5 is out of range; at least 1, and finite"),
    ("yarn:factor=inf", "yarn: factor inf is out of range"),
    ("yarn:factor=nan", "yarn: factor nan is out of range"),
    ("yarn:magnitude=0", "yarn: magnitude 0.0 is out of range; above 0"),
    ("yarn:alpha=32", "yarn: alpha 32.0 is not below beta 32.0"),
    ("yarn:factor", "expected each of FIELD=VALUE once, got 'factor'"),
    ("yarn:factor=2:factor=4", "once, got 'factor=4'"),
    ("none:factor=2", "no transform 'none'"),
    ("base", "base: needs the new one, as base:base=500000"),
    ("base:base=1", "base: base 1.0 is out of range; above 1"),
    ("clip:limit=0", "clip: limit 0 is out of range; at least 1"),
    ("self_extend:group=1.5", r"self_extend\.group: expected int, got '1.5'"),
    ("pi+", "no transform ''"),
    ("none+pi", "no transform 'none'"),
    ("pi+yarn+pi:factor=3", r"pi\+yarn\+pi: pi twice; each once"),
])  # fmt: skip
def test_what_is_no_transform_is_refused_by_field(text, message):
    with pytest.raises(ConfigError, match=rf"^eval\.transforms: .*{message}"):
        config.read({}, {"eval.transforms": ("none", text)})


def test_one_transform_has_one_spelling():
    asked = ("none", "yarn:ramp=paper:factor=4.0", "pi", "self_extend:group=3")
    found = config.read({}, {"eval.transforms": config.from_flag(",".join(asked))}).eval.transforms
    assert found == ("none", "yarn:factor=4:ramp=paper", "pi", "self_extend:group=3")
    for same in (("pi", "pi"), ("yarn", "yarn:ramp=code"), ("ntk:factor=4", "ntk:factor=4.0")):
        with pytest.raises(ConfigError, match=r"eval\.transforms: .* twice"):
            config.read({}, {"eval.transforms": same})
    with pytest.raises(ConfigError, match=r"eval\.transforms: empty"):
        config.read({}, {"eval.transforms": ()})
    with pytest.raises(ConfigError, match=r"eval\.transforms: .* a stream is read without"):
        config.read({}, {"eval.transforms": ("pi",), "eval.protocols": ("stream",)})


def test_logits_are_scaled_once():
    model = loaded("alibi", logit_scale="learned")
    with pytest.raises(TransformError, match=r"log_n: scales logits, which model\.logit_scale 'learned' does"):
        under("log_n", model)


def test_distances_of_a_sum_are_those_of_both_parts():
    model = loaded("sum", encoding_options={"first": "rope", "second": "t5"})
    assert under("clip:limit=5", model).config.distances is not None
    with pytest.raises(TransformError, match="sum does not depend on distances alone"):
        under("clip:limit=5", loaded("sum", encoding_options={"first": "sinusoidal", "second": "t5"}))
    with pytest.raises(TransformError, match="sum sees no distance"):
        under("clip:limit=5", loaded("sum", encoding_options={"first": "none", "second": "fox"}))


@pytest.mark.parametrize("length", [1, 3, 5])
def test_frequencies_of_another_number_of_pairs_are_refused(length):
    with pytest.raises(ValueError, match=rf"encoding\.options\.frequencies: {length} for 4 pairs"):
        rope(dim=8, frequencies=(1.0,) * length)


# Cells, rows and tables


def cells(run):
    return {(each.get("transform", ""), each["length"], each["null"]): each for each in run.cells()}


def asked(**fields):
    return {f"eval.{name}": value for name, value in fields.items()}


def test_keys_of_plain_cells_are_those_that_stored_runs_have():
    chosen = {"longest": 12, "max_documents": None, "last_k": 4, "spacing": 6, "max_windows": None}
    plain = evaluate.cell_key(4, "validation", "targets", 12, "none", chosen)
    assert plain == "step4-validation-targets-L12-none-9ed46ba6"
    other = evaluate.cell_key(4, "validation", "targets", 12, "none", chosen, "yarn:factor=4")
    assert other.startswith("step4-validation-targets-L12-none-yarn-") and other[-8:] != plain[-8:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of rope, one of alibi and one of learned, scored plainly and then under transforms."""
    folder = tmp_path_factory.mktemp("runs")
    how = asked(transforms=["none", "pi", "pi:factor=1.5", "clip:limit=5", "clamp"])
    for name in ("rope", "alibi", "learned"):
        run = written(folder / "runs" / name / "seed_0", experiment(folder, encoding__name=name))
        evaluate.evaluate_run(run.path)
        plain = {path.name: path.read_bytes() for path in (run.path / "evaluation").iterdir()}
        evaluate.score(run.path, how)
        after = {path.name: path.read_bytes() for path in (run.path / "evaluation").iterdir()}
        assert plain.items() <= after.items() and len(after) == 5 * len(plain)
        evaluate.score(run.path, how)
        assert after == {path.name: path.read_bytes() for path in (run.path / "evaluation").iterdir()}
    return folder / "runs"


def run_of(folder, name):
    return evaluate.Run(folder / name / "seed_0")


def test_a_cell_under_a_transform_says_so_and_holds_its_numbers(folder):
    found = cells(run_of(folder, "rope"))
    assert set(cell["status"] for (text, *_), cell in found.items() if text != "clamp") == {"ok"}
    same = [found[text, 12, null]["nats"] for text in ("pi", "pi:factor=1.5") for null in ("none", "window_mask")]
    assert same[:2] == same[2:]
    assert found["pi", 8, "none"]["nats"] == found["", 8, "none"]["nats"]
    assert found["pi:factor=1.5", 8, "none"]["nats"] != found["", 8, "none"]["nats"]
    assert len({found[text, 12, "none"]["nats"] for text in ("", "pi", "clip:limit=5")}) == 3
    cell = found["pi", 12, "none"]
    assert (cell["applied"], cell["settings"]) == ("pi:factor=1.5:original=8", found["", 12, "none"]["settings"])
    assert "transform" not in found["", 12, "none"]


def test_numbers_are_those_of_the_model_under_the_transform(folder):
    """The last four targets of every window, read by the changed model alone."""
    for name, text in (("rope", "pi"), ("alibi", "clip:limit=5"), ("learned", "clamp")):
        model = trained.load(run_of(folder, name))
        found = under(text, model, 12)
        scorer = evaluate._Scorer(run_of(folder, name), model.experiment.eval)
        windows = scorer._windows("targets", 12)
        inputs, wanted = scorer._batch(windows, len(windows))
        logits = np.asarray(forward(found.graph)(found.params, jnp.asarray(inputs)), np.float64)
        chances = np.take_along_axis(jax.nn.softmax(logits), wanted[..., None], axis=-1)[..., 0]
        scored = (np.arange(12) >= 8) & (wanted < 256)
        expected = -np.log(chances[scored]).mean()
        assert cells(run_of(folder, name))[text, 12, "none"]["nats"] == pytest.approx(expected, rel=1e-5)


def test_what_is_not_of_the_kind_is_na_with_the_reason(folder):
    found = cells(run_of(folder, "alibi"))
    for length in (8, 12):
        cell = found["pi", length, "none"]
        assert cell["status"] == "n/a" and math.isnan(cell["nats"])
        assert cell["reason"] == "pi: changes the frequencies of rope, which alibi is not"
    table = cells(run_of(folder, "learned"))
    assert table["", 12, "none"]["status"] == "n/a" and "reason" not in table["", 12, "none"]
    assert table["clamp", 12, "none"]["status"] == "ok"
    assert table["clip:limit=5", 12, "none"]["reason"].endswith("learned does not depend on distances alone")


def test_a_table_has_a_row_for_each_arm_and_transform(folder):
    rows: Any = report.rows(folder)
    assert set(rows["transform"]) == {"", "pi", "pi:factor=1.5", "clip:limit=5", "clamp"}
    assert len(report.selections(rows)) == 1
    table = report.table(rows)
    labels = table.index.get_level_values("encoding").tolist()
    names = ["", " + clamp", " + clip:limit=5", " + pi", " + pi:factor=1.5"]
    assert labels == [f"{arm}{name}" for arm in ("learned", "rope", "alibi") for name in names]
    shown: Any = table.xs("alibi + pi", level="encoding")
    assert shown.iloc[0].tolist() == ["n/a", "n/a"]
    stored = cells(run_of(folder, "rope"))["pi", 12, "none"]["bits_per_byte"]
    own: Any = rows[(rows.encoding == "rope") & (rows["transform"] == "pi") & (rows.eval_length == 12)]
    assert own[own.null == "none"].bits_per_byte.tolist() == [stored]
    assert set(own.null) == {"none", "window_mask", "window_recompute"}
    found: Any = verdicts_module.statistics(rows, folder, baseline="rope")
    judged = found[(found.null == "none") & (found.eval_length == 12)].set_index(["encoding", "transform"])
    assert judged.loc[("rope", "pi"), "baseline"] == "rope" == judged.loc[("rope", ""), "baseline"]
    assert judged.loc[("rope", "pi"), "baseline_difference"] == pytest.approx(
        stored - cells(run_of(folder, "rope"))["", 12, "none"]["bits_per_byte"]
    )
    assert judged.loc[("alibi", "pi"), "verdict"] == "n/a"
    as_trained = cells(run_of(folder, "rope"))["", 8, "none"]["bits_per_byte"]
    masked = cells(run_of(folder, "rope"))["pi", 12, "window_mask"]["bits_per_byte"]
    at = ("rope", "pi")
    assert judged.loc[at, "own_difference"] == pytest.approx(stored - as_trained), "its 1x is that without pi"
    assert judged.loc[at, "null_difference"] == pytest.approx(stored - min(as_trained, masked))
    alone: Any = verdicts_module.statistics(rows[rows["transform"] == "pi"], folder)
    [own] = alone[(alone.null == "none") & (alone.eval_length == 12) & (alone.encoding == "rope")].own_difference
    assert own == pytest.approx(stored - cells(run_of(folder, "rope"))["pi", 8, "none"]["bits_per_byte"])


def test_a_report_names_transforms_and_old_rows_have_none(folder, tmp_path):
    text = report.write(folder, tmp_path / "out")
    assert "| rope + pi:factor=1.5" in text and "`+ NAME`: the same models under this transform" in text
    assert "| alibi + pi" not in text
    left = "alibi: clamp, pi, pi:factor=1.5; learned: clip:limit=5, pi, pi:factor=1.5; rope: clamp"
    assert f"and without a row: {left}." in text
    rows = report.read_csv(tmp_path / "out" / "rows.csv")
    assert rows.equals(report.rows(folder))
    rows[rows["transform"] == ""].drop(columns="transform").to_csv(tmp_path / "old.csv", index=False, na_rep="NaN")
    old: Any = report.read_csv(tmp_path / "old.csv")
    assert (old["transform"] == "").all() and len(report.table(old)) == 3
    assert "+ NAME" not in report.to_markdown(old)


def test_planned_transforms_are_missing_until_they_are_scored(tmp_path):
    run = written(tmp_path / "run", experiment(tmp_path, eval__transforms=["none", "ntk"]))
    assert set(report.rows(run.path).status) == {"missing"}
    evaluate.evaluate_run(run.path)
    frame: Any = report.rows(run.path)
    assert set(frame.status) == {"ok"} and (frame["transform"] == "ntk").sum() == (frame["transform"] == "").sum()


def test_a_run_finished_before_there_were_transforms_is_complete_until_one_is_asked(tmp_path):
    plain = experiment(tmp_path)
    run = written(tmp_path / "run", plain)
    scored = {name: value for name, value in config.to_dict(plain.eval).items() if name != "transforms"}
    run.finish({"status": "ok", "eval": scored})
    assert launch.is_complete(run)
    evaluate.Run.plan(run.path, experiment(tmp_path, eval__transforms=["none", "pi"]), None, None)
    assert not launch.is_complete(run)


# The command line


def test_evaluate_under_transforms(folder, capsys):
    assert cli.main(["evaluate", str(folder), "--transforms", "none,ntk", "--protocols", "blocks"]) == 0
    out, err = capsys.readouterr()
    assert "ntk" in out and out.count("n/a") >= 2
    assert "alibi/seed_0: n/a: ntk: changes the frequencies of rope, which alibi is not" in err


@pytest.mark.parametrize("text, message", [
    ("yarn", "eval.transforms: yarn: changes the frequencies of rope, which alibi is not"),
    ("yarn:factr=4", "no such field (did you mean factor?)"),
    ("yar", "did you mean yarn?"),
])  # fmt: skip
def test_evaluate_refuses_what_no_run_can_have(folder, capsys, text, message):
    before = set((folder / "alibi/seed_0/evaluation").iterdir())
    assert cli.main(["evaluate", str(folder / "alibi"), "--transforms", f"none,{text}"]) == 2
    assert message in capsys.readouterr().err
    assert set((folder / "alibi/seed_0/evaluation").iterdir()) == before


def test_transforms_are_listed(capsys):
    assert cli.main(["transforms"]) == 0
    out = capsys.readouterr().out
    for name in transforms.REGISTRY:
        assert f"{name}\n  fields " in out
    assert "arXiv:2309.00071" in out and "group=None" in out


# Generation


@pytest.mark.parametrize("name, text", [("rope", "dynamic_ntk:factor=2"), ("rope", "self_extend"), ("learned", "wrap")])
def test_a_continuation_is_that_of_the_model_under_the_transform(folder, name, text):
    model = trained.load(run_of(folder, name))
    prompt, count = b"abcdef", 20
    transform = config.transform(text)
    how: Any = {"max_new_tokens": count, "sampling": Sampling(temperature=0), "transform": transform}
    [found] = generate.generate(model, [prompt], **how).continuations
    changed = under(text, model, 1 + len(prompt) + count)
    assert changed is not model
    ids = [256, *prompt]
    for _ in range(count):
        tokens = jnp.zeros((1, 32), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids))
        positions = jnp.where(jnp.arange(32) < len(ids), jnp.arange(32), -1)
        logits = np.array(whole(changed.graph)(changed.params, tokens, positions))[0, len(ids) - 1]
        logits[256] = -math.inf
        if (each := int(logits.argmax())) == 257:
            break
        ids.append(each)
    assert found.ids.tolist() == ids[1 + len(prompt) :] and len(found.ids) > 2


@functools.cache
def whole(graph):
    return jax.jit(lambda params, tokens, positions: nnx.merge(graph, params)(tokens, positions))


def test_generate_under_a_transform_from_the_command_line(folder, capsys):
    run = str(folder / "learned/seed_0")
    arguments = ["generate", run, "--prompt", "abcdef", "--max_new_tokens", "8", "--temperature", "0"]
    assert cli.main(arguments) == 2 and "max_new_tokens" in capsys.readouterr().err
    assert cli.main([*arguments, "--transform", "clamp"]) == 0
    assert cli.main([*arguments, "--transform", "yarn"]) == 2
    assert "which learned is not" in capsys.readouterr().err
    assert cli.main([*arguments, "--transform", "clmp"]) == 2
    assert "transform: no transform 'clmp' (did you mean clamp?)" in capsys.readouterr().err
