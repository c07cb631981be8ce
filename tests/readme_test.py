"""What the README shows works as written."""

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


def test_the_commands_of_the_readme_parse(tmp_path, monkeypatch, capsys):
    """Every `pe-ablation launch` and `run` of the README plans its points, without starting anything."""
    monkeypatch.chdir(ROOT)
    written(tmp_path / "run", config.read(sweep.load("configs/base.py:quick").config))
    text = README.replace("\\\n", " ").replace("=RUN ", f"={tmp_path / 'run'} ")
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^ {4}pe-ablation (.*)$", text, re.MULTILINE)]
    planned = [command for command in commands if command[0] in ("launch", "run") and "my_encoding" not in str(command)]
    assert len(planned) >= 4
    for command in planned:
        assert cli.main([*command, *([] if "--dry_run" in command else ["--dry_run"])]) == 0, command
    assert "points" in capsys.readouterr().out
