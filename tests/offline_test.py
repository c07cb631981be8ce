"""A user without TensorFlow and without a network: own text works, a dataset that isn't there is refused at once.

Every command runs in a process that cannot import TensorFlow, and so do the processes it starts: PYTHONPATH makes each
of them execute `sitecustomize.py` first.
"""

import os
import subprocess
import sys

import pytest
from isolated import BLOCKED

STUDY = """
from ml_collections import ConfigDict

def get_config(arg=""):
    return ConfigDict({
        "model": {"num_layers": 1, "num_heads": 2, "model_dim": 8},
        "data": {"source": "text", "block": 8, "text": {"train": "train.txt", "validation": "validation.txt"}},
        "train": {"length": 8, "steps": 2, "batch_tokens": 16, "warmup_steps": 1},
        "eval": {"lengths": (8, 12), "last_k": 4, "spacing": 8},
    })
"""


@pytest.fixture
def command(tmp_path):
    """Runs `pe-ablation ...` in a folder with a config file and texts; gives (exit code, stdout, stderr)."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCKED)
    (tmp_path / "study.py").write_text(STUDY)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_bytes(b"some text of mine, again and again; " * 4)
    paths = os.pathsep.join([str(tmp_path / "blocked"), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": paths, "PE_ABLATION_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # a run of two steps

    def run(*argv):
        whole = [sys.executable, "-W", "error:::pe_ablation", "-m", "pe_ablation", *argv]
        done = subprocess.run(whole, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout, done.stderr

    return run


def test_own_text_is_trained_on_and_scored(command, tmp_path):
    code, out, err = command("launch", "--config", "study.py", "--workdir", "runs")
    assert code == 0, err
    assert "1 runs: 1 done" in out
    assert "the network was asked" not in err
    assert len(list(tmp_path.glob("runs/*/seed_0/evaluation/*.json"))) == 3


@pytest.mark.parametrize("action, name", [("launch", "lm1b"), ("run", "wiki40b/en")])
def test_an_absent_dataset_is_refused_before_anything_is_written(command, tmp_path, action, name):
    fields = ["--config.data.source=tfds", f"--config.data.tfds.name={name}", "--config.data.text.train=None"]
    fields += ["--config.data.text.validation=None", f"--config.data.tfds.data_dir={tmp_path}"]
    before = {path.name for path in tmp_path.iterdir()}
    code, out, err = command(action, "--config", "study.py", "--workdir", "runs", *fields)
    assert code == 2 and out == ""
    assert err.startswith(f"error: data.tfds.name: '{name}' is not prepared in {tmp_path}") and err.count("\n") == 1
    assert "set data.source to 'text' and data.text.train, data.text.validation to your own files" in err
    assert {path.name for path in tmp_path.iterdir()} - before <= {"__pycache__"}
