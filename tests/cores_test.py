"""A batch computed in parts and by several devices gives what it gives at once."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pe_ablation import cores, data, estimate, train
from pe_ablation.cores import Split
from pe_ablation.model import abstract
from tests import tiny_runs

PROGRAM = """
import json, sys
from pathlib import Path
import jax
from pe_ablation import cores, train
from tests import tiny_runs
cores.TOKENS_AT_ONCE = 16
found, split = [], cores.split
for devices in (1, 2):
    folder = Path(sys.argv[1]) / str(devices)
    folder.mkdir()
    experiment = tiny_runs.experiment(folder, json.loads(sys.argv[2]))
    cores.split = lambda windows, length, platform, _: split(windows, length, platform, devices)
    paths = tiny_runs.plan(folder / "runs", [experiment])
    with tiny_runs.quick_compiles():
        [summary] = train.fit_pack([experiment], paths)
    rows = [(row["nats"], row["gradient_norm"]) for row in train.Run(paths[0]).rows("metrics")]
    found.append((jax.local_device_count(), summary["devices"], summary["memory_bytes"], rows))
print(json.dumps(found))
"""
DROPPED = ("model.dropout_embed", "model.dropout_attention", "model.dropout_residual")


@pytest.mark.parametrize(
    ("windows", "length", "platform", "devices", "expected"),
    [
        (32, 128, "cpu", 2, Split(2, 2)),
        (32, 128, "cpu", 1, Split(2, 1)),
        (32, 128, "cpu", 64, Split(2, 16)),
        (3, 128, "cpu", 2, Split(1, 1)),
        (6, 128, "cpu", 2, Split(1, 2)),
        (12, 128, "cpu", 4, Split(2, 3)),
        (15, 32, "cpu", 2, Split(5, 1)),
        (4, 1024, "cpu", 2, Split(1, 2)),
        (8, 8, "cpu", 2, Split(8, 1)),
        (32, 128, "gpu", 8, Split(32, 1, batched=True)),
        (1, 8192, "cpu", 2, Split(1, 1)),
    ],
)
def test_parts_are_even_and_few_tokens_and_devices_share_them_evenly(windows, length, platform, devices, expected):
    found = cores.split(windows, length, platform, devices)
    assert found == expected
    assert windows % (found.windows * found.devices) == 0


@pytest.mark.parametrize("overrides", [{}, {"positions.name": "randomized", "positions.maximum": 32}])
def test_devices_change_the_last_bits_alone(tmp_path, overrides):
    """Dropout and drawn positions included: what is drawn does not depend on who computes it."""
    sizes = {"train.batch_tokens": 128, "train.accumulation": 2, "train.log_every": 1}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(sizes | overrides)]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (count, alone, small, first), (_, together, large, second) = json.loads(done.stdout.splitlines()[-1])
    assert (count, alone, together) == (2, 1, 2) and large > small > 0
    assert len(first) == len(second) > 3
    for mine, other in zip(first, second, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


@pytest.mark.usefixtures("quick_compilation")
def test_without_dropout_parts_change_the_last_bits_alone(tmp_path):
    experiment = tiny_runs.experiment(tmp_path, dict.fromkeys(DROPPED, 0.0))
    tokenizer, optimizer = data.tokenizer(experiment.data), train.make_optimizer(experiment.train)
    gpt = experiment.gpt(tokenizer.vocab_size)
    state = train.init_state(gpt, optimizer, jnp.uint32(0))
    windows = jnp.asarray(np.random.default_rng(0).integers(97, 120, (2, 4, 9)), jnp.int32)
    step = functools.partial(train.train_step, nnx.graphdef(abstract(gpt)), optimizer, tokenizer)
    found = []
    for split in (None, Split(4), Split(2), Split(1)):
        after, metrics = jax.jit(functools.partial(step, split=split))(state, windows, jnp.uint32(0), jnp.float32(0.1))
        found.append((after.params, {name: float(each) for name, each in metrics.items()}))
    for params, metrics in found[1:]:
        assert metrics == pytest.approx(found[0][1], rel=1e-5)
        for mine, whole in zip(jax.tree.leaves(params), jax.tree.leaves(found[0][0]), strict=True):
            np.testing.assert_allclose(mine, whole, atol=2e-4)


def test_what_the_environment_says_of_devices_stays(monkeypatch):
    asked = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: asked.append((name, value)))
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    cores.as_devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    cores.as_devices()
    assert not asked
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    cores.as_devices()
    assert asked == [("jax_num_cpu_devices", cores.count())]
    assert cores.count() == estimate.cores.count() >= 1


def test_where_jax_has_begun_devices_stay_as_they_are(monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    before = jax.local_device_count()
    monkeypatch.setattr(cores, "count", lambda: before + 1)
    cores.as_devices()
    assert jax.local_device_count() == before
