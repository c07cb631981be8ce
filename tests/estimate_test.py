"""Estimates against what XLA plans for the same program, against sums by hand, and against finished runs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pe_ablation import config, data, estimate, launch, model, train
from pe_ablation.record import Run
from pe_ablation.sweep import Point

TREE = {
    "model": {"num_layers": 2, "num_heads": 2, "model_dim": 32, "mlp_dim": 96},
    "data": {"block": 32},
    "train": {"length": 32, "steps": 10, "warmup_steps": 1, "batch_tokens": 1024},
    "eval": {"lengths": (32, 64), "last_k": 8, "max_windows": 100, "batch_tokens": 256},
}


def experiment(overrides=None, **fields):
    return config.read(TREE, {**(overrides or {}), **fields})


def test_a_forward_pass_is_counted_by_hand():
    gpt = experiment().gpt(vocab_size=258)
    per_layer = 32 * 96 + 32 * 32 + 2 * 32 * 96  # query, key and value; their output; the MLP
    assert estimate.forward(gpt, length=50) == 2 * (2 * per_layer + 258 * 32) + 2 * (2 * 2 * 50 * 32)


@pytest.mark.usefixtures("quick_compilation")
def test_a_training_step_agrees_with_what_the_compiler_plans(monkeypatch):
    """The operations of a batch at once, which the compiler can count, and the memory of the program that trains."""
    monkeypatch.setattr(estimate, "_platform", lambda: ("cpu", 1))
    asked, seeds = experiment(), 2
    gpt, tokenizer = asked.gpt(258), data.tokenizer(asked.data)
    optimizer = train.make_optimizer(asked.train)
    graph = nnx.graphdef(nnx.eval_shape(lambda: model.GPT(gpt, rngs=nnx.Rngs(0))))
    numbers = jax.ShapeDtypeStruct((seeds,), jnp.uint32)
    state = jax.eval_shape(jax.vmap(functools.partial(train.init_state, gpt, optimizer)), numbers)
    batch = jax.ShapeDtypeStruct((seeds, 1, 32, 33), jnp.int32)
    step = jax.vmap(functools.partial(train.train_step, graph, optimizer, tokenizer))
    rates = jax.ShapeDtypeStruct((seeds,), jnp.float32)
    whole = jax.jit(step).lower(state, batch, numbers, rates)
    assert seeds * estimate.step(asked, gpt) == pytest.approx(whole.cost_analysis()["flops"], rel=0.2)
    program = train.programs(asked, tokenizer, seeds)[0]
    assert (program.split.windows, program.split.devices) == (8, 1)
    plan = program.jitted.lower(state, batch, numbers, rates).compile().memory_analysis()
    planned = plan.temp_size_in_bytes + plan.argument_size_in_bytes
    assert estimate.memory(asked, gpt, model.count_parameters(gpt), seeds) == pytest.approx(planned, rel=0.3)


def test_scoring_counts_the_windows_of_every_length_and_null():
    asked = experiment()
    gpt = asked.gpt(258)
    short, long = estimate.forward(gpt, 32), estimate.forward(gpt, 64)
    # 100 windows in batches of 8 and of 4; the longer ones twice, for the null.
    assert estimate.scoring(asked, gpt) == pytest.approx(104 * 32 * short + 2 * 100 * 64 * long)
    without = experiment({"eval.nulls": ()})
    assert estimate.scoring(without, gpt) == pytest.approx(104 * 32 * short + 100 * 64 * long)


@pytest.mark.parametrize(("field", "value"), [("max_windows", None), ("protocols", ("targets", "blocks"))])
def test_scoring_that_depends_on_the_corpus_is_not_guessed(field, value):
    asked = experiment({f"eval.{field}": value})
    assert estimate.scoring(asked, asked.gpt(258)) is None
    assert "evaluation not counted" in list(launch.dry_run([Point((asked,))]))[-2]


def test_memory_grows_with_what_it_should(monkeypatch):
    def on(platform, count):
        def asked(memory):
            monkeypatch.setattr(estimate, "_platform", lambda: (platform, count))
            return memory()

        return asked

    def memory(seeds=1, **fields):
        asked = experiment({path.replace("__", "."): value for path, value in fields.items()})
        gpt = asked.gpt(258)
        return estimate.memory(asked, gpt, model.count_parameters(gpt), seeds)

    parameters = model.count_parameters(experiment().gpt(258))
    one_core, seeds = on("cpu", 1)(memory), on("cpu", 1)(lambda: memory(seeds=3))
    assert seeds == one_core + 2 * 16 * parameters
    assert on("cpu", 2)(memory) == 2 * one_core
    gpu = on("gpu", 1)
    assert gpu(lambda: memory(seeds=3)) == 3 * gpu(memory)
    assert gpu(lambda: memory(train__accumulation=8)) < gpu(memory) < gpu(lambda: memory(train__batch_tokens=2048))
    assert memory(model__dtype="bfloat16") < memory()
    deep = {"model__num_layers": 16, "model__implementation": "blockwise"}
    assert memory(**deep, model__remat=True) < memory(**deep) / 2
    long = {"eval__lengths": (2**16,), "eval__batch_tokens": 2**16}
    assert memory(**long, model__implementation="blockwise") < memory(**long, model__implementation="dense") / 10


def finished(folder, name, rates, *, done=True, **fields):
    """A run of some encoding that took a step of 1,024 tokens at these rates."""
    path = folder / f"{name}-{len(list(folder.iterdir())) if folder.exists() else 0}" / "seed_0"
    run = Run.plan(path, experiment({"encoding.name": name, **fields}), None)
    run.append("timing", [{"step": index, "tokens_per_second": rate} for index, rate in enumerate(rates, 1)])
    if done:
        run.finish({"status": "ok"})
    return run


def speed(workdir, **fields):
    asked = experiment(fields)
    return estimate.Speed(workdir).of(asked, asked.gpt(258)) / estimate.step(asked, asked.gpt(258)) * 1024


def test_the_speed_is_that_of_finished_runs_of_the_encoding(tmp_path):
    finished(tmp_path, "rope", [10.0, 2000.0, 3000.0])
    finished(tmp_path, "alibi", [500.0])
    finished(tmp_path, "t5", [9.0], done=False)
    assert speed(tmp_path, **{"encoding.name": "rope"}) == pytest.approx(2000.0)
    assert speed(tmp_path, **{"encoding.name": "alibi"}) == pytest.approx(500.0)
    assert str(estimate.Speed(tmp_path)) == f"the speed of 2 finished runs in {tmp_path}"


def test_the_speed_of_another_size_is_scaled_from_the_nearest(tmp_path):
    finished(tmp_path, "rope", [1000.0])
    finished(tmp_path, "rope", [7.0], **{"model.num_layers": 40})
    near, base = experiment({"encoding.name": "rope", "model.num_layers": 3}), experiment()
    cost = estimate.step(near, near.gpt(258)) / estimate.step(base, base.gpt(258))
    assert speed(tmp_path, **{"encoding.name": "rope", "model.num_layers": 3}) == pytest.approx(1000.0 / cost)


def test_records_that_cannot_be_read_measure_nothing(tmp_path):
    finished(tmp_path, "rope", [1000.0])
    (tmp_path / "torn" / "seed_0").mkdir(parents=True)
    (tmp_path / "torn" / "seed_0" / "config.json").write_text("{")
    assert str(estimate.Speed(tmp_path)).startswith("the speed of 1 finished runs")
    for nothing in (None, tmp_path / "nowhere", tmp_path / "torn"):
        assert "assumed for" in str(estimate.Speed(nothing)) and "not measured" in str(estimate.Speed(nothing))


def test_a_dry_run_says_minutes_and_where_they_come_from(tmp_path):
    run = finished(tmp_path, "rope", [1024.0])
    before = sorted(tmp_path.rglob("*"))
    asked = experiment({"encoding.name": "rope", "train.steps": 590, "eval.lengths": (32,), "eval.max_windows": 1})
    seeds = tuple(config.read(config.to_dict(asked), {"seed": seed}) for seed in (0, 1))
    first, note, totals = launch.dry_run([Point(seeds)], tmp_path)
    # A second for each of 590 steps of two seeds, and a little to start and to score.
    assert first.endswith("estimated 20 minutes, 0.01 GB") and f"1 finished runs in {tmp_path}" in note
    assert totals.endswith("; estimated 20 minutes one after another, 0.01 GB at a time")
    assert sorted(tmp_path.rglob("*")) == before and run.status()[0] == "done"


def test_a_launch_told_to_use_the_cpu_is_estimated_for_it(monkeypatch):
    monkeypatch.setattr(estimate.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(estimate.Path, "glob", lambda path, pattern: [path / "dev"] if "nvidia" in pattern else [])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert estimate.Speed(None).of(experiment(), experiment().gpt(258)) % estimate.ASSUMED["cpu"] == 0
    assert "CPU cores" in str(estimate.Speed(None))
    for asked in ("", "cuda,cpu"):
        monkeypatch.setenv("JAX_PLATFORMS", asked)
        assert str(estimate.Speed(None)) == "50,000 GFLOP/s, assumed for one GPU, not measured"
