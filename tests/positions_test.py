"""Positions apart from encodings: what is drawn, what a model makes of it, and what is refused."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY, forward, ids, perturbed, tiny

from pe_ablation import config, encodings, generate, positions, streaming, train
from pe_ablation.attention import Mask
from pe_ablation.config import ConfigError
from pe_ablation.data.tokenizers import ByteTokenizer
from pe_ablation.positions import Placed

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")


def at(placed):
    return np.asarray(placed.positions)[0].tolist()


# What is drawn


def test_randomized_positions_are_sorted_different_and_anew_for_each_key():
    draws = [at(positions.randomized(jax.random.key(seed), 6, 40)) for seed in range(200)]
    assert all(each == sorted(set(each)) and len(each) == 6 and each[0] >= 0 and each[-1] < 40 for each in draws)
    assert len({tuple(each) for each in draws}) > 190
    counts = np.bincount(np.concatenate(draws), minlength=40)
    assert counts.min() > 0 and counts.max() < 70  # 30 expected, 4 deviations are 20
    assert at(positions.randomized(jax.random.key(0), 40, 40)) == list(range(40))


def test_evaluation_draws_by_length_or_spreads_evenly():
    assert at(positions.drawn_once(6, 40)) == at(positions.drawn_once(6, 40)) != at(positions.drawn_once(6, 41))
    assert at(positions.spread(4, 10)) == [0, 2, 5, 7] and at(positions.spread(10, 10)) == list(range(10))


def test_documents_begin_at_zero_each():
    begins = jnp.asarray([[1, 0, 0, 1, 0, 1], [0, 0, 1, 0, 0, 0]], bool)
    found = positions.documents(jnp.zeros((2, 6), jnp.int32), begins)
    assert np.asarray(found.positions).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]
    assert np.asarray(found.segments).tolist() == [[1, 1, 1, 2, 2, 3], [0, 0, 1, 1, 1, 1]]


# What a model makes of it


def run(graph, parameters, tokens, **how):
    return jax.jit(lambda parameters: nnx.merge(graph, parameters)(tokens, **how))(parameters)


@pytest.mark.parametrize("name", encodings.names())
def test_a_model_is_shown_the_positions_and_masks_by_place(name):
    """The same logits as with these positions themselves, but for windows, which count tokens."""
    config_ = tiny(encoding=name, encoding_options={"rows": 64} if name == "learned" else {})
    graph, parameters = perturbed(config_)
    tokens, places = ids(config_, 2, 7), jnp.asarray([0, 3, 4, 9, 20, 21, 50])
    placed = Placed(places[None])
    np.testing.assert_allclose(
        run(graph, parameters, tokens, placed=placed),
        run(graph, parameters, tokens, positions=places),
        rtol=1e-4,
        atol=1e-4,
    )
    windowed = jax.jit(lambda tokens: nnx.merge(graph, parameters)(tokens, placed=placed, mask=Mask(window=2)))
    narrow, changed = windowed(tokens), windowed(tokens.at[:, 0].set((tokens[:, 0] + 1) % 13))
    np.testing.assert_allclose(narrow[:, 3:], changed[:, 3:], rtol=1e-5, atol=1e-5)  # two layers reach two tokens back
    assert float(jnp.abs(narrow[:, 2] - changed[:, 2]).max()) > 1e-4


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("name", ["learned", "alibi", "transformer_xl"])
def test_packed_documents_are_read_as_if_alone(name, implementation, monkeypatch):
    from pe_ablation import attention

    monkeypatch.setattr(attention, "BLOCK", 3)
    config_ = tiny(encoding=name, implementation=implementation)
    graph, parameters = perturbed(config_)
    tokens = ids(config_, 2, 9)
    begins = jnp.asarray([[1, 0, 0, 0, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 1, 0]], bool)
    logits = run(graph, parameters, tokens, placed=positions.documents(tokens, begins))
    for row, cuts in enumerate(([0, 4, 9], [0, 2, 7, 9])):
        for start, stop in itertools.pairwise(cuts):
            alone = forward(graph)(parameters, tokens[row : row + 1, start:stop])
            np.testing.assert_allclose(logits[row, start:stop], alone[0], rtol=1e-4, atol=1e-4)


def test_placed_goes_alone():
    model = nnx.merge(*perturbed(TINY))
    with pytest.raises(ValueError, match="placed: goes without positions"):
        model(ids(TINY, 1, 3), jnp.arange(3), placed=positions.spread(3, 9))


# Training


def asked(**overrides):
    base = {
        "encoding": {"name": "rope"},
        "model": {"num_layers": 1, "num_heads": 2, "model_dim": 8},
        "data": {"block": 8},
        "train": {"length": 8, "batch_tokens": 16, "steps": 4, "warmup_steps": 1},
        "eval": {"lengths": [8, 16], "last_k": 4, "stride": 4},
    }
    return config.read(base, {name.replace("__", "."): value for name, value in overrides.items()})


def placed_in_training(experiment, tokens=None, key=0):
    tokens = jnp.full((2, 8), 65) if tokens is None else jnp.asarray(tokens)
    return train.placing(experiment, ByteTokenizer())(tokens, jax.random.key(key))


def test_each_sampler_places_training_windows():
    assert placed_in_training(asked()) is None
    one = asked(positions__name="randomized", positions__maximum=100)
    assert at(placed_in_training(one, key=1)) == at(positions.randomized(jax.random.key(1), 8, 100))
    grid = asked(positions__name="interpolated", positions__maximum=32)
    assert at(placed_in_training(grid)) == [0, 4, 8, 12, 16, 20, 24, 28]
    bos, eos = ByteTokenizer.bos, ByteTokenizer.eos
    packed = [[65, eos, bos, 66, 67, eos, bos, 68]]
    found = placed_in_training(asked(positions__name="documents"), packed)
    assert np.asarray(found.positions).tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    bare = [[65, eos, 66, 67, eos, 68, 69, 70]]
    found = placed_in_training(asked(positions__name="documents", data__bos="none"), bare)
    assert np.asarray(found.positions).tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]


def test_every_step_draws_anew_and_a_rerun_the_same():
    """The positions that a training step shows its model, by seed and step."""
    experiment = asked(positions__name="randomized", positions__maximum=50, encoding__name="sinusoidal")
    gpt = experiment.gpt(258)
    optimizer = train.make_optimizer(experiment.train)
    graph = nnx.graphdef(nnx.eval_shape(lambda: train.GPT(gpt, rngs=nnx.Rngs(0))))
    seen = []
    place = train.placing(experiment, ByteTokenizer())

    def spy(tokens, key):
        placed = place(tokens, key)
        jax.debug.callback(lambda each: seen.append(each.tolist()), placed.positions)
        return placed

    windows = jnp.full((1, 2, 9), 65)
    run = jax.jit(lambda *rest: train.train_step(graph, optimizer, ByteTokenizer(), *rest, place=spy))
    drawn = []
    for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0)):
        state = dataclasses.replace(train.init_state(gpt, optimizer, jnp.uint32(seed)), step=jnp.int32(step))
        jax.block_until_ready(run(state, windows, jnp.uint32(seed), jnp.float32(1e-3)))
        jax.effects_barrier()
        drawn.append(tuple(seen[-1][0]))
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3


# Evaluation and what is refused


def test_evaluation_follows_its_policy():
    randomized = config.PositionsConfig("randomized", 64)
    assert at(randomized.placed(16)) == at(positions.spread(16, 64))
    assert at(dataclasses.replace(randomized, evaluation="random").placed(16)) == at(positions.drawn_once(16, 64))
    assert dataclasses.replace(randomized, evaluation="contiguous").placed(16) is None
    assert at(config.PositionsConfig("interpolated", 64).placed(32))[:3] == [0, 2, 4]
    assert config.PositionsConfig().placed(8) is None and config.PositionsConfig("documents").placed(8) is None


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"positions__name": "randomized"}, "positions.maximum: None with positions.name 'randomized'"),
        (
            {"positions__name": "randomized", "positions__maximum": 30721, "encoding__name": "xpos"},
            "positions.maximum: 30721, but the encoding serves queries up to 30720 positions apart",
        ),
        ({"positions__maximum": 64}, "positions.maximum: 64 with positions.name 'contiguous'"),
        (
            {"positions__name": "randomized", "positions__maximum": 15},
            "maximum: 15 is below the longest window of 16 tokens",
        ),
        (
            {"positions__name": "interpolated", "positions__maximum": 12},
            "maximum: 12 is below the longest window",
        ),
        ({"positions__name": "documents", "positions__evaluation": "random"}, "goes with positions.name 'randomized'"),
        ({"positions__name": "random"}, "did you mean randomized?"),
        (
            {"positions__name": "randomized", "positions__maximum": 64, "encoding__name": "learned"},
            "learned has 8 positions; set encoding.options.rows to 64",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_when_the_config_is_read(overrides, message):
    with pytest.raises(ConfigError) as refusal:
        asked(**overrides)
    assert message in str(refusal.value)


def test_a_table_with_room_and_windows_of_the_training_length_are_not_refused():
    asked(positions__name="randomized", positions__maximum=64, encoding__name="learned", encoding__options={"rows": 64})
    asked(positions__name="randomized", positions__maximum=8, positions__evaluation="contiguous")


def test_positions_of_a_whole_text_are_not_known_token_by_token(tmp_path):
    from written_runs import experiment, written

    from pe_ablation import trained

    overrides = {"positions__name": "interpolated", "positions__maximum": 16}
    one = experiment(tmp_path, **overrides)
    run_ = written(tmp_path / "run", one)
    with pytest.raises(ConfigError, match=r"positions\.evaluation: .* depends on a text's whole length"):
        generate.generate(trained.load(run_), [b"a"], max_new_tokens=1)
    with pytest.raises(ConfigError, match=r"positions\.evaluation"):
        streaming.score(run_, one)
