"""What the benchmark measures is what it says; how fast it is, no test asks."""

import contextlib
import dataclasses
import importlib.util
import json
import math

import jax
import jax.extend
import jax.numpy as jnp
import pytest
import tiny_models
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from tiny_models import tiny

from pe_ablation import bench, cli, model, train
from pe_ablation.bench import decoding, evaluation, peer_process, peers, products, streaming, training, turns
from pe_ablation.bench.peers import Asked
from pe_ablation.bench.turns import Way

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")

WITH_TORCH = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "x_transformers")),
    reason="compared with torch, transformers and x-transformers: pip install -e '.[bench]'",
)


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch):
    monkeypatch.setitem(model.SIZES, "tiny", {"num_layers": 1, "model_dim": 8, "num_heads": 2, "mlp_dim": None})


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setattr(peers, "_missing", lambda kind: list(peers.NEEDS[kind]))


def written(folder, part, **fields):
    """(what is stored of a part, its lines) after a tiny run."""
    lines = list(bench.write(folder, [part], bench.Request(size="tiny", rounds=2, **fields)))
    assert (folder / f"{part}.md").read_text().splitlines() == lines
    return json.loads((folder / f"{part}.json").read_text()), lines


def test_ways_take_turns_after_a_call_that_does_not_count():
    calls = []
    ways = [Way(name, tokens, lambda name=name: calls.append(name)) for name, tokens in (("a", 10), ("b", 1))]
    rates = turns.taken_in_turns(ways, rounds=3)
    assert calls == ["a", "b"] * 4 and {name: len(each) for name, each in rates.items()} == {"a": 3, "b": 3}
    assert all(rate > 0 for each in rates.values() for rate in each)


def test_compiling_is_timed_with_nothing_kept_on_disk(tmp_path):
    names = ("enable_compilation_cache", "compilation_cache_dir", "persistent_cache_min_compile_time_secs")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        function = jax.jit(lambda x: jnp.sin(x) @ x)
        program, seconds = turns.compiled(lambda: function.lower(jnp.ones((4, 4))).compile())
        assert seconds > 0 and program(jnp.ones((4, 4))).shape == (4, 4) and not list(tmp_path.iterdir())
        function.lower(jnp.ones((5, 5))).compile()
        assert list(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_a_product_is_counted_by_hand():
    config = tiny(num_layers=2, model_dim=8, vocab_size=13)
    assert products.forward(config, 4) == {
        "qkv": 2 * 2 * 4 * 3 * 64, "scores": 2 * 2 * 10 * 8, "values": 2 * 2 * 10 * 8, "attention_out": 2 * 2 * 4 * 64,
        "mlp": 2 * 2 * 4 * 2 * 8 * 32, "logits": 2 * 4 * 8 * 13,
    }  # fmt: skip


def products_of(jaxpr):
    """Operations of all products in a jaxpr, those of loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inside in jax.extend.core.jaxprs_in_params(equation.params):
            total += times * products_of(inside)
    return total


def test_a_step_takes_what_is_counted_where_causal_pairs_are_all_pairs():
    config, batch, length = tiny(), 3, 8
    graph, parameters = tiny_models.perturbed(config)
    ids = tiny_models.ids(config, batch, length + 1)

    def loss(parameters):
        return jnp.sum(train.window_nats(nnx.merge(graph, parameters)(ids[:, :-1]), ids[:, 1:]))

    masked = 3 * 2 * 2 * batch * config.num_layers * config.model_dim * (length * (length - 1) // 2)
    found = products_of(jax.make_jaxpr(jax.grad(loss))(parameters).jaxpr)
    assert found == products.step(config, batch, length) + masked


def test_plain_encodings_are_those_whose_scores_read_no_content():
    assert training.plain() == (
        "none", "sinusoidal", "learned", "rope", "alibi", "t5", "transformer_xl", "p_rope", "xpos", "kerple_log",
        "kerple_power", "fire", "sandwich", "sum",
    )  # fmt: skip


def test_training_without_torch_says_what_is_missing(tmp_path, monkeypatch, no_torch):
    monkeypatch.setattr(products, "SIDE", 16)
    monkeypatch.setattr(products, "LEAST", 1.0)
    found, lines = written(tmp_path, "training", length=4, batch=2, encodings=("alibi", "none", "shaw"))
    assert list(found["tokens_per_second"]) == ["alibi", "none", "shaw", "alibi, 3 seeds"]
    assert all(len(rates) == 2 for rates in found["tokens_per_second"].values()) and not found["peers"]
    assert found["ours"]["shaw"]["parameters"] > found["ours"]["none"]["parameters"]
    assert found["ours"]["alibi, 3 seeds"]["seeds"] == 3 and found["ours"]["none"]["compile_seconds"] > 0
    assert set(found["products"]) == {"jax, [16,16] x [16,16]", "jax, [8,8] x [8,32]"}
    [torch, others] = found["missing"]
    assert torch.endswith("torch not installed; pip install -e '.[bench]'") and "transformers GPT-2" in others
    assert "Not measured: transformers GPT-2, x-transformers rotary," in "\n".join(lines)
    assert any(line.startswith("alibi, 3 seeds in one program: a step takes") for line in lines)
    assert found["machine"]["cores"] >= 1


def test_a_training_table_has_ratios_of_medians():
    ours = {"encoding": "rope", "seeds": 1, "parameters": 7, "compile_seconds": 1.25}
    peer = {"encoding": "rope", "parameters": 8, "first_seconds": 2.0}
    found = {
        "size": "tiny", "length": 4, "batch": 2, "operations": 80, "peak": 1000.0, "missing": [], "products": {},
        "waiting": "PASSIVE", "ours": {"rope": ours, "none": {**ours, "encoding": "none"}}, "peers": {"other": peer},
        "tokens_per_second": {"rope": [40.0, 50.0, 60.0], "none": [90.0, 100.0, 300.0], "other": [20.0, 25.0, 99.0]},
    }  # fmt: skip
    lines = list(training.table(found))
    assert "| rope | 50 | 40 to 60 | 0.50x | 1.2 | 7 | 50% |" in lines
    assert "| other (rope) | 25 | 20 to 99 | 2.00x | 2.0 | 8 | 25% |" in lines


def test_evaluation_measures_every_length(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "plain", lambda: ("none", "learned"))
    found, lines = written(tmp_path, "evaluation", lengths=(8, 16))
    assert [(cell["encoding"], cell["length"]) for cell in found["cells"]] == [
        ("none", 8), ("learned", 8), ("none", 16), ("learned", 16),
    ]  # fmt: skip
    small, _, large, _ = found["cells"]
    assert 0 < small["memory_bytes"] < large["memory_bytes"] and small["parameter_bytes"] == large["parameter_bytes"]
    assert all(len(cell["tokens_per_second"]) == 2 and cell["compile_seconds"] > 0 for cell in found["cells"])
    grown = f"{large['memory_bytes'] / 2**20:.1f} ({large['memory_bytes'] / small['memory_bytes']:.2f}x)"
    assert any(line.startswith("| none |") and line.endswith(f"| {grown} |") for line in lines)


def test_evaluation_says_what_has_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "memory_limit", lambda: 10)
    found, lines = written(tmp_path, "evaluation", lengths=(8,), encodings=("none",))
    [cell] = found["cells"]
    assert cell["reason"].startswith("needs") and cell["tokens_per_second"] is None
    assert f"| none | {cell['reason']} |" in lines


def test_decoding_without_torch(tmp_path, no_torch):
    found, lines = written(tmp_path, "decoding", length=4, batch=2, encodings=("rope",))
    assert set(found["tokens_per_second"]) == {"rope: prompts", "rope: prompts and new tokens"}
    assert found["ours"]["rope"]["compile_seconds"] > 0 and not found["peers"]
    assert any(line.startswith("| rope | ") for line in lines)
    assert any("torch, transformers not installed; pip install" in line for line in lines)


def test_a_decoding_table_has_the_time_of_a_step():
    rates = {"rope: prompts": [400.0], "rope: prompts and new tokens": [100.0]}
    found = {"size": "tiny", "length": 8, "batch": 10, "peers": {}, "missing": [], "tokens_per_second": rates}
    lines = list(decoding.table(found | {"ours": {"rope": {"compile_seconds": 3.0}}}))
    assert "| rope | 400 | 400 to 400 | 100 | 100 to 100 | 75.00 | - | 3.0 |" in lines


def test_a_streaming_table_has_ratios_of_medians():
    rates = {"in parallel": [90.0, 100.0, 500.0], "recompute": [4.0, 5.0, 6.0]}
    about = {"encoding": "rope", "size": "nano", "parameters": 7, "tokens": 9, "window": 5, "sinks": 2}
    lines = list(streaming.table({"streams": [about | {"tokens_per_second": rates}]}))
    assert lines[-2] == "| recompute | 5 | 4 to 6 | 20.0x |" and "W = 5, S = 2" in lines[0]


def test_streaming_is_written_with_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "CASES", [("tiny", "alibi", 7, 2)])
    stored, lines = written(tmp_path, "streaming", tokens=1200)
    [found] = stored["streams"]
    assert found["parameters"] == model.count_parameters(
        model.GPTConfig(vocab_size=258, num_layers=1, num_heads=2, model_dim=8, train_length=8, encoding="alibi")
    )
    assert set(found["tokens_per_second"]) == {
        "in parallel", "token by token, a loop on the device", "token by token, a call each", "recompute",
    }  # fmt: skip
    assert stored["machine"]["cores"] >= 1 and lines[0].startswith("alibi, tiny")


def test_what_a_part_raises_leaves_the_parts_before_it(tmp_path, monkeypatch):
    def fails(asked, say):
        raise RuntimeError("no more")

    part = bench.Part(lambda asked, say: {"found": 1}, lambda found: iter(["a line"]), ())
    monkeypatch.setattr(bench, "PARTS", {"one": part, "other": part._replace(measure=fails)})
    with pytest.raises(RuntimeError, match="no more"):
        list(bench.write(tmp_path, ["other", "one"]))
    assert json.loads((tmp_path / "one.json").read_text())["found"] == 1
    assert (tmp_path / "one.md").read_text().startswith("a line\n") and not (tmp_path / "other.json").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trainig"], "PART: no part 'trainig' (did you mean training?); allowed: training, evaluation, decoding"),
        (["training", "--tokens", "5000"], "tokens: goes with streaming; measured: training"),
        (["--size", "mikro"], "size: no size 'mikro' (did you mean micro?); allowed: nano, micro"),
        (["--encodings", "none,rop"], "encodings: unknown encoding 'rop'; allowed: none"),
        (["--encodings", "none,rope,none"], "encodings: none is named twice"),
        (["--encodings", ""], "encodings: none; at least one"),
        (["--batch", "0"], "batch: 0 is too small; at least 1"),
        (["--lengths", "8,x"], "lengths: expected int, got 'x'"),
        (["--lengths", "8,0"], "lengths: [8, 0]; at least one, of at least 1 token each"),
        (["--tokens", "300"], "tokens: 300 is too short a text to measure; at least 1024"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, capsys, argv, message):
    assert cli.main(["bench", *argv, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


PEER = """
import json, sys, time
for line in sys.stdin:
    message = json.loads(line)
    if message.get("kind") == "ends":
        sys.exit(3)
    if message.get("kind") == "hangs":
        time.sleep(60)
    answer = {"error": "ValueError: cannot"} if message.get("kind") == "fails" else {"seconds": 1.5}
    print(json.dumps(answer), flush=True)
"""


def test_peers_that_cannot_be_measured_are_listed_with_the_reason(tmp_path, monkeypatch):
    process = tmp_path / "process.py"
    process.write_text(PEER)
    kinds = ("works", "ends", "hangs", "fails")
    monkeypatch.setattr(peers, "PROCESS", process)
    monkeypatch.setattr(peers, "NEEDS", dict.fromkeys(kinds, ()) | {"absent": ("no_such_module",)})
    monkeypatch.setattr(peers, "SECONDS_TO_START", 3.0)
    with contextlib.ExitStack() as opened:
        found, lines = peers.started(opened, [Asked(kind, kind, {}) for kind in (*kinds, "absent")], lambda line: None)
        assert [each.name for each in found] == ["works"] and found[0].about == {"seconds": 1.5}
        assert found[0].way(10).call() == {"seconds": 1.5}
    assert lines == [
        "not measured: absent: no_such_module not installed; pip install -e '.[bench]'",
        "not measured: ends: its process has ended (3)",
        "not measured: hangs: no answer within 3 s",
        "not measured: fails: ValueError: cannot",
    ]
    assert found[0].child.returncode is not None  # none is left behind


def test_a_peer_is_called_as_often_as_asked(monkeypatch):
    calls, made = [], []
    monkeypatch.setitem(peer_process.KINDS, "own", lambda threads: (lambda: calls.append(threads), {"parameters": 4}))
    assert peer_process.answers('{"kind": "own", "given": {"threads": 2}}', made) == {}
    assert peer_process.answers('{"times": 3}', made)["parameters"] == 4 and calls == [2, 2, 2]


@WITH_TORCH
def test_peers_have_our_sizes():
    gpt = tiny(vocab_size=258, num_layers=1, model_dim=128, num_heads=4, encoding="learned", train_length=4)
    step, rotary = [each for each in training.asked_peers(gpt, 4, 2) if not each.given["compiled"]][:2]
    _, continuation = decoding.asked_peers(gpt, 2, 4)
    with contextlib.ExitStack() as opened:
        found, lines = peers.started(opened, [step, rotary, continuation], lambda line: None)
        assert not lines and all(each.way(8, 2).call()["seconds"] > 0 for each in found)
    ours = model.count_parameters(gpt)
    longer = model.count_parameters(dataclasses.replace(gpt, train_length=8))
    assert [found[0].about["parameters"], found[2].about["parameters"]] == [ours, longer]
    assert found[1].about["parameters"] == pytest.approx(ours, rel=0.1)
