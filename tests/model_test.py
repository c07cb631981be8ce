"""The decoder against GPT-2 in float64 numpy, and what every configuration of it promises."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpt2_oracle import gpt2
from tiny_models import LINEARS, TINY, abstract_parts, by_path, for_gpt2, forward, ids, perturbed, tiny

from pe_ablation import encodings
from pe_ablation.attention import Mask
from pe_ablation.model import GPT, Block, GPTConfig, count_parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")

NO_WINDOW = 2**31 - 1


# GPT-2 itself


SHAPES = [
    (tiny(encoding="learned"), 16),
    (tiny(vocab_size=29, num_layers=3, num_heads=4, model_dim=12, mlp_dim=20, embed_scale=1.7), 9),
    (tiny(vocab_size=7, num_layers=1, num_heads=1, model_dim=6, train_length=5, encoding="learned"), 5),
    (tiny(num_layers=4, pattern=(("none", 3), ("none", None))), 11),
]


@pytest.mark.parametrize("config, length", SHAPES, ids=["learned", "none", "one_head", "windows"])
def test_logits_equal_gpt2_in_float64(config, length):
    graph, parameters = perturbed(config)
    tokens = ids(config, 2, length)
    logits = forward(graph)(parameters, tokens)
    assert logits.shape == (2, length, config.vocab_size) and logits.dtype == jnp.float32
    weights = for_gpt2(config, parameters)
    expected = [gpt2(weights, row, config.num_heads, config.embed_scale) for row in np.asarray(tokens)]
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_gradients_equal_differences_of_gpt2_in_float64():
    """Along a random direction of each parameter, the embedding's with both of its uses among them."""
    config = tiny(encoding="learned", num_layers=1)
    graph, parameters = perturbed(config)
    tokens = ids(config, 1, 6)
    cotangent = np.random.default_rng(1).standard_normal((6, config.vocab_size))

    def loss(parameters):
        return jnp.sum(nnx.merge(graph, parameters)(tokens)[0] * cotangent)

    def expected(changed):
        return np.sum(gpt2(for_gpt2(config, changed), np.asarray(tokens[0]), config.num_heads) * cotangent)

    gradients = by_path(jax.jit(jax.grad(loss))(parameters))
    leaves, tree = jax.tree.flatten(parameters)
    paths = list(by_path(parameters))
    for index, path in enumerate(paths):
        direction = np.random.default_rng(index).standard_normal(leaves[index].shape)
        moved = []
        for step in (1e-5, -1e-5):
            shifted = [np.asarray(leaf, np.float64) for leaf in leaves]
            shifted[index] = shifted[index] + step * direction
            moved.append(expected(jax.tree.unflatten(tree, shifted)))
        slope = (moved[0] - moved[1]) / 2e-5
        assert abs(slope) > 1e-3, path
        np.testing.assert_allclose(np.sum(gradients[path] * direction), slope, rtol=2e-4, atol=2e-4, err_msg=path)


def test_the_embedding_learns_from_both_of_its_uses():
    """A token's row from being read, another's from being predicted, and nothing else in it moves."""
    config = tiny()
    graph, parameters = perturbed(config)
    tokens = jnp.asarray([[1, 2]], jnp.int32)

    def logit(parameters):
        return nnx.merge(graph, parameters)(tokens)[0, 1, 5]

    rows = np.abs(np.asarray(jax.jit(jax.grad(logit))(parameters)["embedding"][...])).max(axis=1)
    assert set(np.nonzero(rows)[0]) == {1, 2, 5}


def test_gpt2_small_has_its_published_size():
    small = GPTConfig(50257, 12, 12, 768, 1024, "learned")
    assert count_parameters(small) == 124_439_808
    assert count_parameters(dataclasses.replace(small, encoding="none")) == 123_653_376


@pytest.mark.parametrize("sharing, tables", [("all", 1), ("paper", 1), ("none", 2)])
def test_counts_follow_the_sharing(sharing, tables):
    base = count_parameters(TINY)
    assert count_parameters(tiny(encoding="t5", sharing=sharing)) == base + tables * 32 * 2
    layers = 1 if sharing == "all" else 2
    shared = tables * 2 * 8
    assert count_parameters(tiny(encoding="transformer_xl", sharing=sharing)) == base + shared + layers * 8 * 8


SUM = {"first": "alibi", "second": "transformer_xl"}


@pytest.mark.parametrize("sharing, layers", [("all", 1), ("paper", 2), ("none", 2)])
def test_what_is_one_per_layer_stays_so_inside_another(sharing, layers):
    base = count_parameters(TINY)
    shared = 2 * 8 * (2 if sharing == "none" else 1)
    added = count_parameters(tiny(encoding="sum", encoding_options=SUM, sharing=sharing)) - base
    assert added == shared + layers * 8 * 8
    dape = tiny(encoding="dape", encoding_options={"base": "kerple_log", "width": 5}, sharing=sharing)
    assert count_parameters(dape) - base == layers * (3 * 2 * 5 + 5 + 2 * 2)


def test_a_sum_with_none_is_the_other_in_every_layer():
    alone, both = tiny(encoding="transformer_xl"), tiny(encoding="sum", encoding_options=SUM | {"first": "none"})
    graph, parameters = perturbed(alone)
    other, abstract = abstract_parts(repr(both))
    values = by_path(parameters)
    wanted = [path.replace("/second/", "/") for path in by_path_of(abstract)]
    filled = jax.tree.unflatten(jax.tree.structure(abstract), [jnp.asarray(values[path]) for path in wanted])
    tokens = ids(alone, 2, 7)
    np.testing.assert_array_equal(forward(other)(filled, tokens), forward(graph)(parameters, tokens))


def by_path_of(abstract):
    return ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(abstract)]


def test_configs_with_nested_options_hash_and_tell_apart():
    made = [tiny(encoding="sum", encoding_options={"first_options": {"base": base}}) for base in (50.0, 50.0, 60.0)]
    assert made[0] == made[1] != made[2] and hash(made[0]) == hash(made[1])
    assert made[0].slots[0] == made[1].slots[0] != made[2].slots[0]
    two = tuple(({"name": "sum", "options": {"first_options": {"base": base}}}, None) for base in (50.0, 60.0))
    assert len(tiny(pattern=two).distinct) == 2 and len(tiny(pattern=(two[0], two[0])).distinct) == 1


# Initial values


@functools.cache
def initial(encoding, seed=0):
    config = tiny(vocab_size=256, model_dim=32, encoding=encoding)
    return by_path(nnx.state(GPT(config, rngs=nnx.Rngs(seed))))


def test_initial_values_are_gpt2s():
    flat = initial("learned")
    residual = 0.02 / math.sqrt(2 * 2)
    deviations = {"embedding": 0.02, "encodings/0/table": 0.02}
    deviations |= {f"blocks/0/{name}/kernel": residual if name.endswith("out") else 0.02 for name in LINEARS}
    for path, value in flat.items():
        if path in deviations:
            assert value.std() == pytest.approx(deviations[path], rel=0.06), path
            assert abs(value.mean()) < 5 * deviations[path] / math.sqrt(value.size), path
        else:
            np.testing.assert_array_equal(value, 1.0 if path.endswith("scale") else 0.0, err_msg=path)
    assert set(deviations) < set(flat) and all(value.dtype == np.float32 for value in flat.values())
    for name in LINEARS:
        first, second = flat[f"blocks/0/{name}/kernel"]
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1
    kernels = [flat[f"blocks/0/{name}/kernel"].ravel()[:1000] for name in LINEARS]
    assert np.abs(np.corrcoef(kernels) - np.eye(4)).max() < 0.2


def test_what_two_encodings_share_starts_equal_and_seeds_differ():
    base = initial("none")
    for name in ("learned", "t5", "transformer_xl"):
        other = initial(name)
        assert set(base) < set(other)
        for path, value in base.items():
            np.testing.assert_array_equal(other[path], value, err_msg=f"{name}: {path}")
    for path, value in initial("t5", seed=1).items():
        random = "kernel" in path or "embedding" in path or "table" in path
        assert random == bool((value != initial("t5")[path]).any()), path
    projection = initial("transformer_xl")["encodings/0/projection"]
    assert projection.shape[0] == 2 and (projection[0] != projection[1]).mean() > 0.99


# The scan


PATTERNS = {
    "two_equal": ((("transformer_xl", 3), ("transformer_xl", None)), 4),
    "mixed": ((("t5", None), ({"name": "rope", "options": {"base": 50.0}}, 4), ("t5", 2)), 6),
}


@pytest.mark.parametrize("pattern, sharing", [("two_equal", "paper"), ("mixed", "none")])
def test_the_scan_equals_a_loop_over_layers(pattern, sharing):
    """Blocks and encodings built by hand from the stacks: layer n is entry n // P of slot n mod P."""
    slots, layers = PATTERNS[pattern]
    config = tiny(num_layers=layers, pattern=slots, encoding=slots[0][0], sharing=sharing)
    graph, parameters = perturbed(config)
    model = nnx.merge(graph, parameters)
    tokens = ids(config, 2, 7)
    position = jnp.arange(7)[None]
    one_block, _ = nnx.split(nnx.eval_shape(lambda: Block(config, jax.random.key(0))))
    names = list(dict.fromkeys(slot.name for slot in config.slots))

    def encoding_of(layer):
        name, options = config.slots[layer % len(slots)][:2]
        single = nnx.eval_shape(lambda: encodings.make(name, **sizes, rngs=nnx.Rngs(0), **dict(options)))
        stacked = model.encodings[names.index(name)]
        before = [config.slots[n % len(slots)].name for n in range(layer)].count(name)
        for key, leaf in vars(single).items():
            if isinstance(leaf, nnx.Param):
                own = sharing == "none" or key in type(single).per_layer
                value = getattr(stacked, key)[...]
                setattr(single, key, nnx.Param(value[before] if own else value))
                assert getattr(single, key).shape == leaf.shape
        return single

    sizes = {"num_heads": 2, "head_dim": 4, "model_dim": 8, "train_length": 16}

    def loop(parameters):
        x = parameters["embedding"][...][tokens]
        for layer in range(layers):
            state = jax.tree.map(
                lambda p, layer=layer: p[layer // len(slots)], parameters["blocks"][layer % len(slots)]
            )
            mask = Mask(window=slots[layer % len(slots)][1])
            x = nnx.merge(one_block, state)(x, position, encoding_of(layer), mask, None)[0]
        return model.norm(x) @ parameters["embedding"][...].T

    np.testing.assert_allclose(forward(graph)(parameters, tokens), loop(parameters), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "transformer_xl"])
def test_layers_with_copies_of_shared_parameters_equal_sharing(name):
    shared = tiny(encoding=name, sharing="all")
    graph, parameters = perturbed(shared)
    tokens = ids(shared, 2, 7)
    expected = forward(graph)(parameters, tokens)
    for sharing, own in (("none", None), ("paper", encodings.find(name).per_layer)):
        if sharing == "paper" and not own:
            continue  # the program of sharing="all"
        other, abstract = abstract_parts(repr(tiny(encoding=name, sharing=sharing)))
        values = by_path(parameters)
        for path in values:
            if path.startswith("encodings") and (own is None or path.split("/")[-1] in own):
                values[path] = np.stack([values[path]] * 2)
        copied = jax.tree.unflatten(jax.tree.structure(abstract), [jnp.asarray(value) for value in values.values()])
        assert [leaf.shape for leaf in jax.tree.leaves(copied)] == [leaf.shape for leaf in jax.tree.leaves(abstract)]
        np.testing.assert_allclose(forward(other)(copied, tokens), expected, rtol=1e-5, atol=1e-6)


def test_remat_changes_no_gradient():
    config = tiny(encoding="transformer_xl", num_layers=3)
    tokens = ids(config, 1, 5)
    gradients = []
    for remat in (False, True):
        graph, parameters = perturbed(dataclasses.replace(config, remat=remat))

        def loss(parameters, graph=graph):
            return jnp.sum(jnp.sin(nnx.merge(graph, parameters)(tokens)))

        traced = jax.jit(jax.grad(loss)).trace(parameters)
        assert ("checkpoint" in str(traced.jaxpr) or "remat" in str(traced.jaxpr)) == remat
        gradients.append(traced.lower().compile()(parameters))
    for plain, again in zip(*(jax.tree.leaves(each) for each in gradients), strict=True):
        np.testing.assert_allclose(again, plain, rtol=1e-5, atol=1e-5)


def test_bf16_computes_what_float32_does_and_keeps_parameters_and_logits_float32():
    name = "transformer_xl"
    exact, _ = perturbed(tiny(encoding=name))
    rough, parameters = perturbed(tiny(encoding=name, dtype="bfloat16"))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(parameters))
    tokens = ids(TINY, 2, 7)
    expected, found = forward(exact)(parameters, tokens), forward(rough)(parameters, tokens)
    assert found.dtype == jnp.float32
    assert 0 < float(jnp.abs(found - expected).max()) < 0.05 * float(jnp.abs(expected).max())
    text = str(jax.make_jaxpr(forward(rough))(parameters, tokens))
    assert "bf16" in text and "bf16" not in str(jax.make_jaxpr(forward(exact))(parameters, tokens))


# Whom a logit sees, through the whole model


@functools.cache
def read_out(name, dtype):
    """(jitted gradients, parameters): gradients of sum(weights [B,T] * logits of token 12), and the logits."""
    graph, parameters = perturbed(tiny(encoding=name, dtype=dtype))

    def total(parameters, tokens, positions, weights, window):
        logits = nnx.merge(graph, parameters)(tokens, positions, mask=Mask(window=window))[..., 12]
        return jnp.sum(jnp.where(weights != 0, weights * logits, 0.0)), logits

    return jax.jit(jax.grad(total, has_aux=True)), parameters


FIVE = jnp.broadcast_to(jnp.arange(5), (2, 5))


@pytest.mark.parametrize("name", encodings.names())
def test_a_logit_depends_on_no_later_token(name):
    """The rows of the embedding table that a logit's gradient touches: tokens 0..4 stand at slots 0..4."""
    run, parameters = read_out(name, "float32")
    tokens = jnp.stack([jnp.arange(5), jnp.full(5, 7)])
    for t in range(5):
        weights = jnp.zeros((2, 5)).at[0, t].set(1.0)
        for window in (NO_WINDOW, 2):
            gradient = np.asarray(run(parameters, tokens, FIVE, weights, window)[0]["embedding"][...])
            first = max(0, t - 2 * (window - 1))  # two layers of a window of 2 reach two tokens back
            np.testing.assert_array_equal(gradient[t + 1 : 12], 0.0)
            # differences of sums over the whole text cancel, but for rounding
            np.testing.assert_allclose(gradient[:first], 0.0, atol=1e-8 if name == "fox" else 0.0)
            assert (np.abs(gradient[first : t + 1]).max(axis=1) > 1e-5).all()


PADDED = jnp.asarray([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])


@pytest.mark.parametrize("name, dtype", [*((name, "float32") for name in encodings.names()), ("alibi", "bfloat16")])
@pytest.mark.parametrize("window", [NO_WINDOW, 2])
def test_left_padding_changes_no_logit_and_no_gradient(name, dtype, window):
    """A batch whose second row is padded on the left, against that row unpadded (what follows it is not read).

    The padding's token is none of the vocabulary: whatever it is, it must not matter.
    """
    run, parameters = read_out(name, dtype)
    tokens = jnp.asarray([[1, 2, 3, 4, 5], [13, 13, 6, 7, 8]])
    weights = jnp.asarray([[1.0, -2.0, 0.5, 1.0, 2.0], [0.0, 0.0, 1.0, 3.0, -1.0]])
    gradients, logits = run(parameters, tokens, PADDED, weights, window)
    plain = tokens.at[1].set(jnp.asarray([6, 7, 8, 9, 9]))
    expected, theirs = run(parameters, plain, FIVE, weights.at[1].set(jnp.roll(weights[1], -2)), window)
    assert bool(jnp.isfinite(logits).all())
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(logits[1, 2:], theirs[1, :3], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(logits[0], theirs[0], rtol=tolerance, atol=tolerance)
    for ours, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        size = max(1.0, float(jnp.abs(other).max()))
        assert bool(jnp.isfinite(ours).all())
        np.testing.assert_allclose(ours, other, rtol=tolerance, atol=tolerance * size)


def test_without_positions_and_a_causal_mask_the_order_of_tokens_is_nothing():
    """Logits move with their tokens; under a causal mask they don't, which is all the order that `none` has."""
    graph, parameters = perturbed(TINY)
    tokens, order = ids(TINY, 1, 7), np.asarray([3, 1, 4, 0, 6, 2, 5])
    run = jax.jit(lambda tokens, mask: nnx.merge(graph, parameters)(tokens, mask=mask))
    both, causal = (
        [run(each, Mask(causal=each_way)) for each in (tokens, tokens[:, order])] for each_way in (False, True)
    )
    np.testing.assert_allclose(both[1], both[0][:, order], rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(causal[1] - causal[0][:, order]).max()) > 0.1


def test_positions_may_be_left_out_or_of_one_row():
    graph, parameters = perturbed(tiny(encoding="learned", num_layers=1))
    run = jax.jit(lambda tokens, positions: nnx.merge(graph, parameters)(tokens, positions))
    tokens = ids(TINY, 2, 5)
    expected = run(tokens, None)
    for positions in (jnp.arange(5), FIVE):
        np.testing.assert_allclose(run(tokens, positions), expected, rtol=1e-6, atol=1e-6)
    assert float(jnp.abs(run(tokens, FIVE[:, ::-1]) - expected).max()) > 1e-2


# Dropout


def test_embedding_dropout_zeroes_its_share_and_scales_the_rest(monkeypatch):
    """Without layers and norm, logits are the embedded token times the table, which can be undone."""
    monkeypatch.setattr(GPT, "_layers", lambda self, x, *rest: (x, None))
    graph, parameters = perturbed(tiny(vocab_size=8, dropout_embed=0.25))
    model = nnx.merge(graph, parameters)
    model.norm = lambda x: x
    table = np.asarray(parameters["embedding"][...], np.float64)
    tokens = ids(tiny(vocab_size=8), 40, 16)
    dropped = np.asarray(model(tokens, dropout_key=jax.random.key(0)), np.float64) @ np.linalg.inv(table.T)
    ratio = dropped / table[np.asarray(tokens)]
    kept = np.abs(ratio) > 0.5
    np.testing.assert_allclose(np.abs(dropped[~kept]), 0.0, atol=1e-4)
    np.testing.assert_allclose(dropped[kept], table[np.asarray(tokens)][kept] / 0.75, atol=1e-4)
    assert kept.mean() == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("field", ["dropout_attention", "dropout_residual"])
def test_dropout_inside_a_block_keeps_the_mean(field):
    """A block whose MLP adds nothing is linear in what is dropped: its mean over keys is the plain output."""
    config = tiny(**{field: 0.2})
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Block(config, jax.random.key(0))))
    random = np.random.default_rng(0)
    block = nnx.merge(
        graph, jax.tree.map(lambda p: jnp.asarray(0.4 * random.standard_normal(p.shape), jnp.float32), abstract)
    )
    block.mlp_out.kernel[...] = jnp.zeros(block.mlp_out.kernel.shape)
    block.mlp_out.bias[...] = jnp.zeros(8)
    x = jnp.asarray(random.standard_normal((1, 5, 8)), jnp.float32)
    encoding = encodings.make("none", num_heads=2, head_dim=4, model_dim=8, train_length=16, rngs=nnx.Rngs(0))
    plain = block(x, FIVE[:1], encoding, Mask(), None)[0]
    samples = jax.jit(jax.vmap(lambda key: block(x, FIVE[:1], encoding, Mask(), key)[0]))(
        jax.random.split(jax.random.key(0), 1024)
    )
    deviation = samples.std(axis=0)
    assert float(deviation.max()) > 0.05
    assert float((jnp.abs(samples.mean(axis=0) - plain) / (deviation / 32 + 1e-6)).max()) < 5
    if field == "dropout_residual":
        share = (samples == x).mean()  # what is dropped leaves x
        assert float(share) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("pattern", [None, (("none", None), ("none", 3))], ids=["stacked", "slots"])
def test_every_layer_drops_by_its_own_bits(pattern):
    """Two layers that each add a constant: some entries get it once, which equal bits would rule out."""
    config = tiny(vocab_size=8, dropout_residual=0.5, pattern=pattern)
    graph, parameters = perturbed(config)
    model = nnx.merge(graph, jax.tree.map(jnp.zeros_like, parameters))
    for block in model.blocks:
        block.mlp_out.bias[...] = jnp.ones_like(block.mlp_out.bias[...])
    model.embedding[...] = jnp.eye(8)
    model.norm = lambda x: x
    tokens = ids(config, 2, 5)
    added = model(tokens, dropout_key=jax.random.key(0)) - jax.nn.one_hot(tokens, 8)
    assert set(np.unique(added)) == {0.0, 2.0, 4.0}  # neither, one, both; a kept 1 counts 1 / (1 - 0.5)


@pytest.mark.parametrize("field", ["dropout_embed", "dropout_attention", "dropout_residual"])
def test_each_dropout_acts_alone_and_only_with_a_key(field):
    graph, parameters = perturbed(tiny(**{field: 0.3}))
    tokens = ids(TINY, 2, 5)
    run = jax.jit(lambda key: nnx.merge(graph, parameters)(tokens, dropout_key=key))
    plain_run = forward(perturbed(TINY)[0])
    assert str(jax.make_jaxpr(forward(graph))(parameters, tokens)) == str(jax.make_jaxpr(plain_run)(parameters, tokens))
    plain = plain_run(parameters, tokens)
    one = run(jax.random.key(1))
    assert float(jnp.abs(one - plain).max()) > 1e-2
    np.testing.assert_array_equal(run(jax.random.key(1)), one)
    assert float(jnp.abs(run(jax.random.key(2)) - one).max()) > 1e-2


# Refusals

REFUSED = [
    ({"vocab_size": 0}, ["vocab_size", "0"]),
    ({"num_layers": 0}, ["num_layers", "0"]),
    ({"num_heads": 0}, ["num_heads", "0"]),
    ({"model_dim": -8}, ["model_dim", "-8"]),
    ({"train_length": 0}, ["train_length", "0"]),
    ({"mlp_dim": 0}, ["mlp_dim", "0"]),
    ({"num_heads": 3}, ["model_dim", "8", "num_heads", "3"]),
    ({"num_layers": 3, "pattern": (("none", None),) * 2}, ["pattern", "2", "num_layers", "3"]),
    ({"pattern": ()}, ["pattern", "empty"]),
    ({"pattern": (({"name": "shaw", "options": {"clp": 3}}, None),)}, ["pattern: shaw: encoding.options.clp"]),
    ({"encoding": "alibi", "pattern": (("rope", 4), ("none", None))}, ["encoding.name", "alibi", "none, rope"]),
    ({"pattern": ("none",)}, ["pattern[0]", "none"]),
    ({"pattern": (("none", None), ("none", 0))}, ["pattern[1]", "window", "0"]),
    ({"pattern": (("none", True),)}, ["pattern[0]", "window", "True"]),
    ({"pattern": (("none", 2.0),)}, ["pattern[0]", "window", "2.0"]),
    ({"pattern": (("learned", None), ("rope", None))}, ["pattern", "learned"]),
    ({"pattern": (("alibi", None), ("ropes", None))}, ["ropes", "rope"]),
    ({"dropout_embed": 1.0}, ["dropout_embed", "1.0"]),
    ({"dropout_attention": -0.1}, ["dropout_attention", "-0.1"]),
    ({"dropout_residual": 1.5}, ["dropout_residual", "1.5"]),
    ({"sharing": "some"}, ["sharing", "some", "all, none, paper"]),
    ({"dtype": "float16"}, ["dtype", "float16", "float32, bfloat16"]),
    ({"implementation": "flash"}, ["implementation", "flash", "auto, dense, blockwise"]),
    ({"encoding": "ropes"}, ["ropes", "rope"]),
    ({"encoding": "rope", "encoding_options": {"bas": 2.0}}, ["encoding.options.bas", "base"]),
    ({"encoding": "rope", "model_dim": 6}, ["head_dim 3"]),
    ({"encoding": "sinusoidal", "model_dim": 7, "num_heads": 1}, ["model_dim", "7"]),
    ({"encoding": "learned", "encoding_options": {"rows": 8}}, ["encoding.options.rows", "8", "16"]),
    ({"encoding": "learned", "sharing": "none"}, ["sharing", "learned"]),
    ({"encoding": "sum", "encoding_options": {"first": "learned"}, "sharing": "none"}, ["sharing", "sum"]),
    ({"pattern": (({"name": "sum", "options": {"first": "learned"}}, None), ("none", None))}, ["pattern", "sum"]),
    ({"encoding": "dape", "encoding_options": {"base": "rope"}}, ["encoding.options.base", "rope"]),
]


@pytest.mark.parametrize("changes, words", REFUSED, ids=["-".join(map(str, changes)) for changes, _ in REFUSED])
def test_what_cannot_be_built_is_refused_by_name(changes, words):
    with pytest.raises(ValueError) as refusal:
        tiny(**changes)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_ids_outside_the_vocabulary_are_refused():
    model = nnx.merge(*perturbed(TINY))
    for wrong in (13, -1):
        with pytest.raises(ValueError, match=rf"token id {wrong} .*0\.\.12"):
            model(jnp.asarray([[1, wrong]]))
        traced = jax.jit(lambda tokens: model(tokens))(jnp.asarray([[1, wrong]]))
        assert bool(jnp.isnan(traced[0, 1]).all())


@pytest.mark.parametrize("length", [17, 64])
def test_positions_past_a_learned_table_are_refused(length):
    """Never a repeated last row: ValueError with both numbers outside a trace, NaN inside one."""
    graph, parameters = perturbed(tiny(encoding="learned"))
    model = nnx.merge(graph, parameters)
    with pytest.raises(ValueError, match=rf"position {length - 1} .*16"):
        model(ids(TINY, 1, length))
    with pytest.raises(ValueError, match=rf"position {length - 1} .*16"):
        model(ids(TINY, 1, 2), jnp.asarray([0, length - 1]))


def test_positions_past_a_learned_table_are_nan_in_a_trace():
    graph, parameters = perturbed(tiny(encoding="learned"))
    logits = forward(graph)(parameters, ids(TINY, 1, 17))
    assert bool(jnp.isnan(logits[0, 16]).all())
    assert bool(jnp.isfinite(forward(graph)(parameters, ids(TINY, 1, 16))).all())


def test_how_many_positions_a_model_has():
    for name in encodings.names():
        model = nnx.eval_shape(lambda name=name: GPT(tiny(encoding=name), rngs=nnx.Rngs(0)))
        assert model.max_position == (16 if name == "learned" else None)
