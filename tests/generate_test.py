"""Drawing, and continuations against a loop that reads everything anew for each token."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiles import compiles
from flax import nnx
from written_runs import BOS, EOS, experiment, written

from pe_ablation import cli, eviction, generate, trained
from pe_ablation.eviction import EvictionError, Policy
from pe_ablation.generate import GenerationError, Request, Sampling, draw, text

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")

PROMPTS = (b"abcdefghij", b"xy", b"")
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Random models by encoding, each made once."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def made(name, **overrides):
        asked = experiment(folder, encoding__name=name, **overrides)
        return written(folder / "-".join([name, *map(str, overrides.values())]), asked)

    return made


@pytest.fixture(scope="module")
def loaded(run):
    return functools.cache(lambda name, **overrides: trained.load(run(name, **overrides)))


@functools.cache
def last_logits(graph):
    return jax.jit(lambda params, tokens, positions: nnx.merge(graph, params)(tokens, positions)[0, -1])


def argmax_loop(model, prompt, count, context=lambda ids: ids):
    """Greedy ids until EOS: all of `context(ids)` read anew each time, in an array of one length."""
    ids = [BOS, *prompt]
    for _ in range(count):
        seen = context(ids)
        tokens = np.zeros((1, 64), np.int32)
        positions = np.full((1, 64), -1, np.int32)
        tokens[0, 64 - len(seen) :], positions[0, 64 - len(seen) :] = seen, np.arange(len(seen))
        logits = np.array(last_logits(model.graph)(model.params, tokens, positions))
        logits[BOS] = -math.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == EOS:
            return ids[1 + len(prompt) : -1]
    return ids[1 + len(prompt) :]


def continued(model, prompts=PROMPTS, count=20, **how):
    found = generate.generate(model, prompts, max_new_tokens=count, **{"sampling": GREEDY, **how})
    return [each.ids.tolist() for each in found.continuations]


# Drawing


def allowed(logits, temperature, top_k, top_p):
    """The ids that may be drawn and their probabilities, by the definition, in float64."""
    order = sorted(range(len(logits)), key=lambda each: -logits[each])[:top_k]
    weights = np.exp([logits[each] / temperature for each in order])
    weights /= weights.sum()
    kept, total = [], 0.0
    for each, weight in zip(order, weights, strict=True):
        if kept and total >= top_p:
            break
        kept.append(each)
        total += weight
    return {each: weight / total for each, weight in zip(kept, weights, strict=False)}


LOGITS = [1.0, -0.5, 2.0, 0.3, 1.4, -3.0]


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1.0, 6, 1.0), (0.7, 6, 1.0), (1.0, 3, 1.0), (1.0, 99, 0.6), (2.0, 4, 0.8), (1.0, 6, 0.0), (1.0, 1, 1.0)],
)
def test_draws_have_the_probabilities_that_are_left(temperature, top_k, top_p):
    rows = 20_000
    ids = draw(jnp.tile(jnp.asarray(LOGITS), (rows, 1)), jax.random.key(3), temperature, top_k, top_p)
    expected = allowed(LOGITS, temperature, top_k, top_p)
    share = np.bincount(ids, minlength=6) / rows
    assert set(np.flatnonzero(share)) == set(expected)
    for each, probability in expected.items():
        assert share[each] == pytest.approx(probability, abs=4 * math.sqrt(0.25 / rows))


def test_temperature_zero_takes_the_most_likely_and_of_equals_the_smaller_id():
    logits = jnp.asarray([LOGITS, [0.0, 5.0, 5.0, 1.0, 0.0, 0.0]])
    assert np.asarray(draw(logits, jax.random.key(0), 0.0, 6, 1.0)).tolist() == [2, 1]
    assert np.asarray(draw(logits, jax.random.key(0), 1.0, 6, 0.0)).tolist() == [2, 1]


def test_ids_without_probability_are_never_drawn():
    logits = jnp.tile(jnp.asarray([0.0, -jnp.inf, 0.0, -jnp.inf]), (2000, 1))
    assert set(np.asarray(draw(logits, jax.random.key(0), 1.0, 4, 1.0)).tolist()) == {0, 2}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"temperature": -0.1}, "temperature: -0.1"),
        ({"temperature": math.nan}, "temperature: nan"),
        ({"temperature": math.inf}, "temperature: inf"),
        ({"top_k": 0}, "top_k: 0"),
        ({"top_p": 1.01}, "top_p: 1.01"),
        ({"top_p": -0.1}, "top_p: -0.1"),
        ({"seed": -1}, "seed: -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(fields, message):
    with pytest.raises(GenerationError, match=message):
        Sampling(**fields)


# Continuations


@pytest.mark.parametrize("name", ["learned", "rope", "t5", "transformer_xl"])
def test_a_batch_of_prompts_goes_on_as_each_read_anew(loaded, name):
    model = loaded(name, train__length=32, data__block=32, train__batch_tokens=32)
    assert continued(model) == [argmax_loop(model, prompt, 20) for prompt in PROMPTS]


def test_a_long_prompt_is_read_in_pieces(loaded, monkeypatch):
    model = loaded("t5", train__length=32, data__block=32, train__batch_tokens=32)
    expected = continued(model, [b"abcdefghijklmnopqrst", b"xyz"], 5)
    monkeypatch.setattr(generate, "PIECE", 8)
    generate.programs.cache_clear()
    assert continued(model, [b"abcdefghijklmnopqrst", b"xyz"], 5) == expected
    generate.programs.cache_clear()


def test_a_row_ends_at_its_eos_and_the_others_go_on(loaded):
    """The most likely token of one row is made EOS by its logit: the table's row of EOS is moved towards it."""
    model = loaded("none")
    free = continued(model, count=12)
    stop = free[0][4]
    table = np.array(model.params["embedding"][...])
    table[[stop, EOS]] = table[[EOS, stop]]
    params = jax.tree.map(lambda leaf: leaf, model.params)
    params["embedding"] = nnx.Param(jnp.asarray(table))
    swapped = dataclasses.replace(model, params=params)
    found = generate.generate(swapped, PROMPTS, max_new_tokens=12, sampling=GREEDY).continuations
    for each, prompt in zip(found, PROMPTS, strict=True):
        assert each.ids.tolist() == argmax_loop(swapped, prompt, 12) and EOS not in each.ids
        assert each.ended == ("eos" if len(each.ids) < 12 else "length")
    assert "eos" in {each.ended for each in found}


def windowed(seen):
    return lambda ids: ids[-seen:]


def blocks(seen):
    stride = seen - seen // 2
    return lambda ids: ids[stride * max(0, math.ceil((len(ids) - seen) / stride)) :]


@pytest.mark.parametrize("name", ["learned", "rope"])
@pytest.mark.parametrize("cache, context", [("recompute", windowed), ("block_recompute", blocks)])
def test_fresh_contexts_go_on_as_a_loop_over_them(loaded, name, cache, context):
    model = loaded(name)
    expected = [argmax_loop(model, prompt, 30, context(8)) for prompt in PROMPTS]
    assert continued(model, count=30, policy=Policy(cache, 7)) == expected


@pytest.mark.parametrize("policy", [Policy("sink", 7, 2), Policy("window", 5), Policy("sink", 7, 2, evict="before")])
def test_a_cache_that_drops_goes_on_as_the_whole_read_through_it(loaded, policy):
    """Each row alone, its tokens one by one through the policy (see `eviction_test`)."""
    model = loaded("rope")
    graph, params = model.graph, model.params

    @jax.jit
    def one(params, token, position, cache):
        return eviction.advance(policy, nnx.merge(graph, params), token, position, cache)

    found = continued(model, count=25, policy=policy)
    for prompt, ids in zip(PROMPTS, found, strict=True):
        cache = eviction.cache(policy, model.model, 1)
        drawn = []
        for at, token in enumerate([BOS, *prompt, *ids]):
            logits, cache = one(params, jnp.asarray([[token]]), jnp.asarray([[at]]), cache)
            drawn.append(int(logits[0, 0].at[BOS].set(-jnp.inf).argmax()))
        assert drawn[len(prompt) : -1] == ids
    assert found != continued(model, count=25)


def test_draws_are_the_seeds(loaded):
    model = loaded("rope")
    one = continued(model, sampling=Sampling(seed=1))
    assert one == continued(model, sampling=Sampling(seed=1)) != continued(model, sampling=Sampling(seed=2))
    assert continued(model, PROMPTS[:1], sampling=Sampling(seed=1)) == one[:1]
    assert BOS not in {each for row in continued(model, count=200, sampling=Sampling(10.0)) for each in row}


def test_a_bf16_cache_and_top_k_past_the_vocabulary(loaded):
    model = loaded("rope")
    found = generate.generate(model, PROMPTS, max_new_tokens=20, dtype=jnp.bfloat16).continuations
    assert all(each.ended == "eos" or len(each.ids) == 20 for each in found)
    assert continued(model, sampling=Sampling(top_k=10**6)) == continued(model, sampling=Sampling())


def test_no_new_tokens_are_none(loaded):
    found = generate.generate(loaded("rope"), PROMPTS, max_new_tokens=0).continuations
    assert [(each.ids.tolist(), each.content, each.ended) for each in found] == [([], b"", "length")] * 3


def test_a_learned_table_is_used_to_its_end_and_no_further(loaded):
    model = loaded("learned")  # 8 positions
    assert len(continued(model, [b"abc"], 5)[0]) <= 5  # BOS, 3 and 5: the ninth token is not read
    with pytest.raises(GenerationError, match=r"max_new_tokens: 10 tokens .*position 8 .*8 positions"):
        continued(model, [b"abc"], 6)


def test_an_empty_prompt_without_bos_starts_from_eos(loaded):
    model = loaded("rope", data__bos="none")
    [row] = generate.generate(model, [b""], max_new_tokens=1).continuations
    assert row.prompt.tolist() == [EOS]
    assert generate.generate(model, [b"a"], max_new_tokens=1).continuations[0].prompt.tolist() == [97]


def test_steps_and_prompts_of_a_length_share_their_programs(loaded):
    model, policy = loaded("alibi"), Policy("full", 64)
    read, step = generate.programs(model.config, policy, jnp.float32, BOS, EOS)
    for prompt, how in ((b"abc", Sampling(seed=1)), (b"abcdefgh", Sampling(0.5, 3, 0.9))):
        continued(model, [prompt], 30, policy=policy, sampling=how)
    assert generate.programs(model.config, policy, jnp.float32, BOS, EOS) == (read, step)
    assert step._cache_size() == 1


def test_a_model_compiles_two_programs_and_one_for_each_longer_prompt(run):
    """Reading and a step; prompts up to 16 tokens are one length, up to 32 another."""
    model = trained.load(run("t5", model__model_dim=12, eval__batch_tokens=24))  # a model of no other test

    def programs(*prompts, **how):
        with compiles() as names:
            for prompt in prompts:
                assert continued(model, [prompt], 30, policy=Policy("full", 64), **how)
        return [name for name in names if name in ("jit(read)", "jit(step)")]

    assert programs(b"abc") == ["jit(read)", "jit(step)"]
    assert programs(b"abc", b"a", b"abcdefghij", sampling=Sampling(0.5, 3, 0.9, seed=1)) == []
    assert programs(b"abcdefghijklmnopqrst") == ["jit(read)"]


def test_where_the_first_token_is_drawn_without_sight_of_all(loaded):
    """W = 5: the token at place 6 is the first that misses one, and draws the one at 7."""
    model, policy = loaded("none"), Policy("window", 5)
    found = generate.generate(model, [b"", b"abc", b"abcdefghij"], max_new_tokens=9, policy=policy).continuations
    assert [each.evicted for each in found if len(each.ids) == 9] == [6, 3, -4][: len(found)]
    assert generate.generate(model, [b""], max_new_tokens=3, policy=policy).continuations[0].evicted is None
    assert generate.generate(model, [b""], max_new_tokens=3).continuations[0].evicted is None


def test_nan_is_an_error_not_a_text(loaded):
    model = loaded("rope")
    broken = dataclasses.replace(model, params=jax.tree.map(lambda p: p * jnp.nan, model.params))
    with pytest.raises(GenerationError, match="NaN"):
        continued(broken)


def test_diverged_models_empty_batches_and_policies_that_do_not_fit_are_refused(loaded):
    model = loaded("learned")
    with pytest.raises(GenerationError, match="diverged"):
        continued(dataclasses.replace(model, alive=False))
    with pytest.raises(GenerationError, match="prompts: none"):
        continued(model, [])
    with pytest.raises(EvictionError, match="absolute"):
        continued(model, policy=Policy("sink", 7, 2))
    with pytest.raises(GenerationError, match="the cache holds 4"):
        continued(model, policy=Policy("full", 4))


# Text


def test_characters_appear_whole():
    whole = "né€𝄞".encode()
    shown = generate.Text()
    assert [shown(whole[at : at + 1]) for at in range(len(whole))] == ["n", "", "é", "", "", "€", "", "", "", "𝄞"]
    assert text(whole[:-1]) == "né€" and text(b"a\xff\xc3b") == "a\ufffd\ufffdb"


# The command


def answer(capsys, *argv):
    code = cli.main(["generate", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_prompt_and_continuation(run, capsys):
    path = run("rope").path
    code, out, _ = answer(capsys, path, "--prompt", "né", "--max_new_tokens", 6, "--temperature", 0)
    expected = continued(trained.load(run("rope")), ["né".encode()], 6)[0]
    assert code == 0 and out.startswith("né" + text(bytes(each for each in expected if each < 256)))
    assert f"new tokens: {len(expected)} (" in out and "tokens/s" in out
    code, streamed, _ = answer(capsys, path, "--prompt", "né", "--max_new_tokens", 6, "--temperature", 0, "--stream")
    assert code == 0 and streamed.splitlines()[0] == out.splitlines()[0]


def test_the_command_continues_several_prompts_under_a_cache_with_statistics(run, capsys):
    where = run("rope").path
    how = ("--max_new_tokens", 40, "--cache", "sink", "--window", 7, "--sinks", 2, "--stats", "--temperature", 0)
    code, out, _ = answer(capsys, where, "--prompt", "ab", "--prompt", "cd", *how)
    assert code == 0 and "== 1" in out and "== 2" in out and "rep_4" in out and "first eviction at token 6" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--temperature", "hot"), "temperature: expected float"),
        (("--top_k", "0"), "top_k: 0"),
        (("--cache", "sinks"), "did you mean sink?"),
        (("--window", "8"), "window: 8 goes with another cache"),
        (("--prompt", "a", "--prompt", "b", "--stream"), "--stream: 2 prompts"),
        (("--cache", "sink", "--window", "3"), "window: 3"),
        (("--max_new_tokens", "-1"), "max_new_tokens: -1 is out of range; 0 to"),
        (("--max_new_tokens", "99999999999"), "max_new_tokens: 99999999999 is out of range"),
        (("--max_new_tokens", "1000000000"), "window: 1073741824 tokens to be kept are too many"),
        (("--cache", "window", "--window", "99999999999"), "window: 99999999999 tokens to be kept are too many"),
        (("--cache", "window", "--absolute", "ring"), "absolute: 'ring'"),
    ],
)
def test_the_command_refuses_in_one_line(run, capsys, arguments, message):
    code, out, err = answer(capsys, run("rope").path, *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_one_run_at_a_time(run, capsys):
    run("rope"), run("none")
    code, _, err = answer(capsys, run("rope").path.parent)
    assert code == 2 and "runs; name one" in err


def test_a_request_is_a_policy():
    assert Request().policy(64) is None
    assert Request(cache="sink").policy(64) == Policy("sink", 63, 4)
    assert Request(cache="window", evict="before").policy(64) == Policy("window", 64, evict="before")
    assert Request(cache="sink", window=9, sinks=1).policy(64) == Policy("sink", 9, 1)


def test_statistics_tie_a_loop_to_the_eviction():
    each = SimpleNamespace(ids=np.array([5, 6, 7, *[1, 2] * 10]), evicted=2)
    lines = list(generate.statistics([each]))
    assert lines[1] == "1: loop of period 2 from token 3; first eviction at token 2, 1 tokens after it"
