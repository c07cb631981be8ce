"""What the README shows works as written."""

import json
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from written_runs import written

from pe_ablation import cli, config, encodings, sweep
from pe_ablation.attention import attend
from pe_ablation.encodings import Tokens

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture
def example(tmp_path):
    """The README's encoding, saved as a file."""
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "my_encoding.py"
    path.write_text(code)
    return f"{path}:Slopes"


def test_the_example_encoding_adds_its_slopes(example):
    encoding = encodings.make(
        example, num_heads=2, head_dim=4, model_dim=8, train_length=8, rngs=nnx.Rngs(0), start=-1.0
    )
    zeros, values = jnp.zeros((1, 5, 2, 4)), jax.random.normal(jax.random.key(0), (1, 5, 2, 4))
    pos = jnp.arange(5)
    slope = np.log1p(np.exp(-1.0))
    weights = np.exp(-slope * np.arange(4, -1, -1.0))
    wanted = np.einsum("s,shd->hd", weights / weights.sum(), np.asarray(values)[0])
    for implementation in ("dense", "blockwise"):
        out = attend(encoding, Tokens(zeros, pos), Tokens(zeros, pos), values, implementation=implementation)
        np.testing.assert_allclose(out[0, -1], wanted, rtol=1e-5)


def test_the_example_is_configured_by_file_and_class_and_known_by_its_content(example):
    tree = {"encoding": {"name": example, "options": {"start": -2.0}}}
    before = config.training_identity(config.read(tree))
    with pytest.raises(config.ConfigError, match=r"encoding\.options\.begin.*start"):
        config.read({"encoding": {"name": example, "options": {"begin": -2.0}}})
    path = Path(example.rpartition(":")[0])
    path.write_text(path.read_text() + "\n")
    assert config.training_identity(config.read(tree)) != before


@pytest.fixture
def beside_the_example(example, monkeypatch):
    """The working directory that the README has in mind: the encoding's file next to the configs."""
    folder = Path(example.rpartition(":")[0]).parent
    (folder / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(folder)


def commands(*words):
    """The arguments of the README's `pe-ablation` commands that hold one of these words."""
    lines = re.findall(r"^ {4}pe-ablation (.*)$", README.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines if any(word in line for word in words)]


@pytest.mark.usefixtures("beside_the_example", "quick_compilation")
def test_the_example_is_trained_and_scored_by_the_command_as_written(capsys):
    [command] = commands("run --config configs/extrapolation.py:quick --config.encoding.name=my_encoding.py:Slopes")
    small = {"model.num_layers": 1, "train.length": 8, "train.steps": 2, "train.batch_tokens": 16, "data.block": 8}
    small |= {"train.warmup_steps": 1, "eval.lengths": "8,12", "eval.last_k": 4, "eval.max_windows": 2}
    assert cli.main([*command, *(f"--config.{field}={value}" for field, value in small.items())]) == 0
    [cell] = Path().rglob("evaluation/*-L12-none-*.json")
    assert json.loads(cell.read_text())["status"] == "ok"


@pytest.mark.usefixtures("beside_the_example", "quick_compilation", "rolled_layers")
def test_the_example_keeps_every_promise_by_the_command_as_written(capsys):
    [command] = commands("encodings --check")
    assert cli.main(command) == 0
    assert capsys.readouterr().out.endswith("my_encoding.py:Slopes: all kept\n")


def test_the_commands_of_the_readme_parse(tmp_path, monkeypatch, capsys):
    """Every `pe-ablation launch` and `run` of the README plans its points, without starting anything."""
    monkeypatch.chdir(ROOT)
    run = written(tmp_path / "run", config.read(sweep.load("configs/base.py:quick").config))
    planned = [each for each in commands("launch", "run") if each[0] in ("launch", "run")]
    planned = [each for each in planned if "my_encoding" not in str(each)]
    planned = [[word.replace("=RUN", f"={run.path}") for word in each] for each in planned]
    assert len(planned) >= 4
    for command in planned:
        assert cli.main([*command, *([] if "--dry_run" in command else ["--dry_run"])]) == 0, command
    assert "points" in capsys.readouterr().out
