"""Checkpoints: strict restore, what a killed or failed save leaves behind, retention, parts of a state."""

import functools
import shutil
import signal
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_ablation import checkpoint, config, train
from pe_ablation.checkpoint import CheckpointError, Checkpoints, last_step, load_parts, named

STATE = {
    "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)},
    "step": np.int32(7),
}
DATA = {"grain": {"next_index": 3}, "order": "abc"}

# Saves step 10 whole, begins to save a large step 20 and dies.
KILLED = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp
from pe_ablation.checkpoint import Checkpoints

def state(step):
    return {"w": jnp.full((16, 1024, 1024), float(step)), "step": jnp.int32(step)}
checkpoints = Checkpoints(Path(sys.argv[1]))
checkpoints.save(10, state(10), {"at": 10})
checkpoints.wait()
checkpoints.save(20, state(20), {"at": 20})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def state_of(step):
    return jax.tree.map(lambda x: jnp.asarray(x + np.asarray(step, x.dtype)), STATE)


def like(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def save(folder, *steps):
    with Checkpoints(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), {**DATA, "at": step})


def assert_holds(folder, step):
    with Checkpoints(folder) as checkpoints:
        state, data = checkpoints.load(step, like(STATE))
    assert data == {**DATA, "at": step}
    assert jax.tree.structure(state) == jax.tree.structure(STATE)
    for name, leaf in named(state_of(step)).items():
        found = named(state)[name]
        assert found.dtype == leaf.dtype and np.array_equal(found, leaf), name


def plant(folder, name):
    """A folder such as a killed save leaves: some bytes, no commit mark."""
    (folder / name / "state").mkdir(parents=True)
    (folder / name / "state" / "bytes").write_bytes(b"half")


def bytes_below(folder):
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@functools.cache
def gpt_state(encoding="learned", vocab_size=258, **model):
    experiment = config.read(
        {
            "encoding": {"name": encoding},
            "model": {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 8, **model},
            "train": {"length": 8, "batch_tokens": 64},
            "eval": {"last_k": 8, "stride": 8},
        }
    )
    optimizer = train.make_optimizer(experiment.train)
    return jax.eval_shape(lambda: train.init_state(experiment.gpt(vocab_size), optimizer, jnp.uint32(0)))


@pytest.fixture(scope="module")
def saved_gpts(tmp_path_factory):
    """Folders with a checkpoint of step 5 of the two-layer model, by encoding."""
    folders = {}
    for encoding in ("learned", "rope"):
        folders[encoding] = tmp_path_factory.mktemp(encoding) / "checkpoints"
        with Checkpoints(folders[encoding]) as checkpoints:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), gpt_state(encoding))
            checkpoints.save(5, zeros, DATA)
    return folders


def test_a_saved_state_and_data_state_come_back_exactly(folder):
    save(folder, 3)
    assert_holds(folder, 3)
    assert last_step(folder) == 3


def test_the_same_model_is_restored(saved_gpts):
    for encoding, folder in saved_gpts.items():
        with Checkpoints(folder) as checkpoints:
            state, data = checkpoints.load(5, gpt_state(encoding))
        assert data == DATA
        kinds = [{name: (x.shape, x.dtype) for name, x in named(tree).items()} for tree in (state, gpt_state(encoding))]
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    ("saved", "other", "differing"),
    [
        ("learned", {"num_layers": 3}, [("blocks/0/qkv/kernel", "float32[2,8,24]", "float32[3,8,24]")]),
        ("learned", {"num_layers": 1}, [("blocks/0/mlp_in/bias", "float32[2,8]", "float32[1,8]")]),
        ("learned", {"model_dim": 16}, [("embedding", "float32[258,8]", "float32[258,16]")]),
        ("learned", {"vocab_size": 300}, [("embedding", "float32[258,8]", "float32[300,8]")]),
        ("learned", {"encoding": "rope"}, [("encodings/0/table", "only in the checkpoint")]),
        ("rope", {"encoding": "t5"}, [("encodings/0/", "missing from the checkpoint")]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_paths_that_differ(saved_gpts, saved, other, differing):
    wanted = gpt_state(**{"encoding": saved, **other})
    before, after = named(gpt_state(saved)), named(wanted)
    shapes = [{path: leaf.shape for path, leaf in tree.items()} for tree in (before, after)]
    expected = {path for path, _ in shapes[0].items() ^ shapes[1].items()}
    with Checkpoints(saved_gpts[saved]) as checkpoints, pytest.raises(CheckpointError) as refused:
        checkpoints.load(5, wanted)
    lines = str(refused.value).splitlines()
    assert str(saved_gpts[saved] / "5") in lines[0]
    assert {line.strip().split(":")[0] for line in lines[1:]} == expected
    for path, *kinds in differing:
        assert any(f"params/{path}" in line and all(kind in line for kind in kinds) for line in lines), (path, lines)
    with pytest.raises(CheckpointError, match="another model"):
        load_parts(saved_gpts[saved], 5, {"params": wanted.params})


def test_a_changed_dtype_is_refused(folder):
    save(folder, 1)
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), STATE)
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError, match=r"float32\[2,3\].*bfloat16\[2,3\]"):
        checkpoints.load(1, half)


def test_params_are_loaded_alone(folder):
    save(folder, 4)
    parts = load_parts(folder, 4, {"params": like(STATE["params"])})
    assert list(parts) == ["params"]
    for name, leaf in named(state_of(4)["params"]).items():
        assert np.array_equal(named(parts["params"])[name], leaf), name


def test_the_last_two_are_kept(folder):
    with Checkpoints(folder) as checkpoints:
        for step in (5, 10, 15, 20):
            checkpoints.save(step, state_of(step), {**DATA, "at": step})
        checkpoints.wait()
        assert checkpoints.steps() == [15, 20]
    assert sorted(path.name for path in folder.iterdir()) == ["15", "20"]
    assert_holds(folder, 15)
    assert_holds(folder, 20)


def test_a_step_may_be_saved_again(folder):
    save(folder, 10, 20)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(10, state_of(99), {**DATA, "at": 99})
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20]
        state, data = checkpoints.load(10, like(STATE))
    assert data["at"] == 99 and np.array_equal(state["params"]["w"], state_of(99)["params"]["w"])


def test_uncommitted_folders_are_ignored_with_a_notice_and_kept(folder):
    save(folder, 10, 20)
    plant(folder, "30")
    plant(folder, "40.tmp")
    assert last_step(folder) == 20
    before = bytes_below(folder)
    with pytest.warns(UserWarning, match=r"30: not a committed checkpoint"), Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [10, 20]
    assert bytes_below(folder) == before
    assert_holds(folder, 20)
    with warnings.catch_warnings(), Checkpoints(folder) as checkpoints:
        warnings.simplefilter("error")  # said once; and the step can be reached again
        checkpoints.save(30, state_of(30), {**DATA, "at": 30})
        checkpoints.wait()
        assert checkpoints.steps() == [20, 30]
    assert_holds(folder, 30)
    assert bytes_below(folder).count(b"half") == 2


def test_a_newer_uncommitted_step_never_costs_a_committed_one(folder):
    save(folder, 10)
    with Checkpoints(folder) as checkpoints:
        plant(folder, "30")  # while it is open, so that it can't be set aside at the start
        plant(folder, "40")
        checkpoints.save(20, state_of(20), {**DATA, "at": 20})
        checkpoints.wait()
    assert last_step(folder) == 20
    with pytest.warns(UserWarning, match="not a committed"), Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [10, 20]
    assert_holds(folder, 10)
    assert_holds(folder, 20)


def test_folders_set_aside_never_overwrite_each_other(folder):
    save(folder, 10)
    for _ in range(2):
        plant(folder, "30")
        with pytest.warns(UserWarning, match="set aside"):
            Checkpoints(folder).close()
    assert bytes_below(folder).count(b"half") == 2


def test_a_save_that_cannot_be_written_is_raised_by_the_next_save_or_close(folder):
    checkpoints = Checkpoints(folder)
    checkpoints.save(10, state_of(10), DATA)
    checkpoints.wait()
    shutil.rmtree(folder)
    folder.write_text("a file where the folder was")
    with pytest.raises(CheckpointError, match=str(folder)):
        checkpoints.save(20, state_of(20), DATA)
        checkpoints.save(30, state_of(30), DATA)
    checkpoints.close()


@pytest.mark.parametrize("then", ["save", "wait", "close"])
def test_a_failure_of_the_writing_thread_is_raised(folder, monkeypatch, then):
    class Failed:
        def result(self):
            raise RuntimeError("disk full")

    checkpoints = Checkpoints(folder)
    checkpoints.save(10, state_of(10), {**DATA, "at": 10})
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._checkpointer, "save_checkpointables_async", lambda *args, **options: Failed())
        checkpoints.save(20, state_of(20), DATA)
    with pytest.raises(CheckpointError, match="disk full"):
        checkpoints.save(30, state_of(30), DATA) if then == "save" else getattr(checkpoints, then)()
    checkpoints.close()  # said once
    assert_holds(folder, 10)


def test_an_unwritable_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((CheckpointError, OSError), match="file"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_a_save_killed_midway_leaves_the_one_before(folder):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert last_step(folder) == 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether anything is left to report depends on when it died
        checkpoints = Checkpoints(folder)
    wanted = {"w": jax.ShapeDtypeStruct((16, 1024, 1024), jnp.float32), "step": jax.ShapeDtypeStruct((), jnp.int32)}
    with checkpoints:
        assert checkpoints.steps() == [10]
        state, data = checkpoints.load(10, wanted)
        assert data == {"at": 10} and int(state["step"]) == 10 and np.all(np.asarray(state["w"]) == 10.0)
        checkpoints.save(20, {**state, "step": jnp.int32(20)}, {"at": 20})
    assert last_step(folder) == 20


def test_last_step_of_nothing_is_none(tmp_path):
    assert last_step(tmp_path / "missing") is None
    assert last_step(tmp_path) is None
    assert checkpoint.KEEP == 2
