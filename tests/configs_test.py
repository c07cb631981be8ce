"""The config files: what each says it is, checked without training."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pe_ablation import cli, config, data, model, start, sweep, train

CONFIGS = Path(__file__).parent.parent / "configs"
BASE = str(CONFIGS / "base.py")

# Parameters of the released GPT-2 models: 50,257 tokens, a learned table of 1,024 positions, tied embeddings.
RELEASED = {
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}


@pytest.mark.parametrize("size", RELEASED)
def test_a_gpt2_size_has_as_many_parameters_as_the_released_model(size):
    experiment = config.read({}, {"model": size, "encoding.name": "learned", "train.length": 1024, "data.block": 1024})
    assert model.count_parameters(experiment.gpt(vocab_size=50_257)) == RELEASED[size]
    assert experiment.model.model_dim // experiment.model.num_heads == 64


@pytest.mark.parametrize(
    ("size", "parameters"), [("nano", 258 * 64 + 99_968 + 128), ("micro", 258 * 128 + 793_088 + 256)]
)
def test_the_sizes_for_a_cpu_are_small(size, parameters):
    """Embedding, blocks of 12 M^2 + 13 M, and the last layer norm."""
    assert model.count_parameters(config.read({"model": size}).gpt(258)) == parameters


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.name)
def test_a_config_says_how_it_is_launched_and_every_sweep_is_read(path, monkeypatch, capsys):
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.setattr(cli, "_leave_accelerators", lambda: None)
    monkeypatch.setattr(start, "resolved", lambda experiment: experiment)  # start_test has real runs to start from
    file = sweep.load(str(path))
    for name in file.sweeps:
        assert sweep.points(file, name, {"start.run": "RUN"} if "start" in file.config else {})
    text = path.read_text().partition('"""')[2].partition('"""')[0]
    commands = re.findall(r"^ {4}pe-ablation launch (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        assert cli.main(["launch", *(part for part in command.split() if part != "--list"), "--list"]) == 0, command


@pytest.mark.parametrize("arg", ["quick", "cpu", "gpu"])
def test_the_sizes_of_the_base_differ_in_size_alone(arg):
    file, quick = sweep.load(f"{BASE}:{arg}"), sweep.load(BASE)
    assert file.sweeps.keys() == quick.sweeps.keys() and file.config.keys() == quick.config.keys()
    [point] = sweep.points(file, None, {})
    [experiment] = point.experiments
    assert experiment.arm == "rope" and experiment.eval.longest(point.train_length) == 8 * point.train_length
    rates = [each.experiments[0].train.learning_rate for each in sweep.points(file, "rates", {})]
    assert rates == sorted(rates) and experiment.train.learning_rate == rates[1]


def test_an_unknown_size_of_the_base_is_refused():
    with pytest.raises(config.ConfigError, match="'tpu'; allowed: quick, cpu, gpu"):
        sweep.load(f"{BASE}:tpu")


def test_a_size_by_name_and_then_a_field_on_the_command_line(monkeypatch):
    monkeypatch.setattr(start, "resolved", lambda experiment: experiment)
    for path in sorted(CONFIGS.glob("*.py")):
        file = sweep.load(str(path))
        overrides = {"model.num_layers": config.from_flag("6"), "model": config.from_flag("micro")}
        overrides |= {"start.run": "RUN"} if "start" in file.config else {}
        for point in sweep.points(file, sweep.default_sweep(file), overrides):
            assert (point.experiments[0].model.num_layers, point.experiments[0].model.model_dim) == (6, 128)


@pytest.mark.parametrize("name", ["rope", "transformer_xl"])
def test_the_gpu_size_fits_together_in_forward_and_training_step(name):
    """Shapes and dtypes alone: nothing of gpt2_small is allocated."""
    [point] = sweep.points(sweep.load(f"{BASE}:gpu"), None, {"encoding.name": name})
    [experiment] = point.experiments
    settings, tokenizer = experiment.train, data.tokenizer(experiment.data)
    gpt = experiment.gpt(tokenizer.vocab_size)
    assert (gpt.num_layers, gpt.model_dim, gpt.dtype, settings.length) == (12, 768, "bfloat16", 1024)
    windows = settings.batch_tokens // settings.length // settings.accumulation
    seed, optimizer = jax.ShapeDtypeStruct((), jnp.uint32), train.make_optimizer(settings)
    state = jax.eval_shape(functools.partial(train.init_state, gpt, optimizer), seed)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    graph = nnx.graphdef(nnx.eval_shape(lambda: model.GPT(gpt, rngs=nnx.Rngs(0))))

    inputs = jax.ShapeDtypeStruct((windows, settings.length), jnp.int32)
    logits = jax.eval_shape(lambda params, tokens: nnx.merge(graph, params)(tokens), state.params, inputs)
    assert (logits.shape, logits.dtype) == ((windows, 1024, tokenizer.vocab_size), jnp.float32)

    step = functools.partial(train.train_step, graph, optimizer, tokenizer)
    batch = jax.ShapeDtypeStruct((settings.accumulation, windows, settings.length + 1), jnp.int32)
    after, metrics = jax.eval_shape(step, state, batch, seed, jax.ShapeDtypeStruct((), jnp.float32))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["nats"].shape == () and metrics["nats"].dtype == jnp.float32
