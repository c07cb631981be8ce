"""A run that is interrupted, however and wherever, ends bit for bit as one that never was."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from flax import nnx
from other_process import OtherProcess
from tiny_runs import EPOCH, STEPS, differing, saved

from pe_ablation import lease, stopping, train
from pe_ablation.checkpoint import Checkpoints
from pe_ablation.model import abstract
from pe_ablation.record import HeldError, Run

# Trains both seeds and kills itself: in the middle of stepping, or right after the first seed's save of a step began.
CHILD = """
import os, signal, sys, time
from pathlib import Path
import tiny_runs
from pe_ablation.checkpoint import Checkpoints
from pe_ablation.record import Run

folder, moment, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
paths = sorted(folder.glob("seed_*"))
save, restore = Checkpoints.save, tiny_runs.SharedFit._restore

def die(_=None):
    while moment == "step" and not all((path / "checkpoints" / str(at - at % 8)).exists() for path in paths):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

def save_and_die(self, step, *rest):
    save(self, step, *rest)
    if step == at:
        die()

def say_start(self, checkpoints):
    state, start = restore(self, checkpoints)
    print(start, flush=True)
    return state, start

tiny_runs.SharedFit._restore = say_start
if moment == "save":
    Checkpoints.save = save_and_die
tiny_runs.fit([Run(path).experiment for path in paths], paths, stop_at=at if moment == "step" else None, stop=die)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


def pair(folder, **fields):
    """Two seeds of one point; `fields` of `train` that are outside the identity."""
    overrides = {f"train.{name}": value for name, value in fields.items()}
    return [tiny_runs.experiment(folder, overrides, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def reference(folder):
    """(run directories, what it saw) of the uninterrupted run."""
    paths = tiny_runs.plan(folder / "reference", pair(folder))
    return paths, tiny_runs.fit(pair(folder), paths)


def assert_equal_ends(paths, reference_paths):
    for path, whole in zip(paths, reference_paths, strict=True):
        assert differing(saved(path), saved(whole)) == []
        assert (path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def assert_equal_batches(seen, whole):
    for step, windows in seen.items():
        assert np.array_equal(windows, whole[step]), step


def test_the_reference_is_worth_comparing_with(reference):
    paths, whole = reference
    states = [saved(path) for path in paths]
    names = set(states[0])
    assert {"step", "alive", "params/embedding/value", "params/encodings/0/table/value"} <= names
    assert sum("/mu/" in name for name in names) == sum(name.startswith("params/") for name in names) > 10
    assert len(differing(*states)) > 20  # the seeds differ
    nats = [row["nats"] for row in Run(paths[0]).rows("metrics")]
    assert len(nats) == STEPS and nats[-1] < nats[0] - 1
    assert len({windows.tobytes() for windows in whole.seen.values()}) > STEPS - 5  # no batch but by chance twice


def test_killed_twice_in_processes_of_its_own(folder, reference, tmp_path):
    experiments = pair(folder, checkpoint_every=8)
    paths = tiny_runs.plan(tmp_path / "runs", experiments)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": jax.default_backend()}
    for moment, at, start in (("step", 12, 0), ("save", 24, 8)):
        command = [sys.executable, "-c", CHILD, str(tmp_path / "runs"), moment, str(at)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert child.returncode == -signal.SIGKILL, child.stderr
        assert int(child.stdout) == start, (moment, at)
    assert tiny_runs.fit(pair(folder), paths).start == 16
    assert_equal_ends(paths, reference[0])


@pytest.mark.parametrize("steps", [1, 4, EPOCH - 1, EPOCH, EPOCH + 1])
def test_broken_off_after_a_few_steps(folder, reference, tmp_path, steps):
    experiments = pair(folder, checkpoint_every=steps)
    paths = tiny_runs.plan(tmp_path, experiments)
    tiny_runs.fit_until(steps, experiments, paths)
    later = pair(folder, checkpoint_every=STEPS)
    resumed = tiny_runs.fit(later, paths)
    assert resumed.start == steps and list(resumed.seen) == list(range(steps + 1, STEPS + 1))
    assert not np.array_equal(resumed.seen[steps + 1], reference[1].seen[1])
    assert_equal_batches(resumed.seen, reference[1].seen)
    assert_equal_ends(paths, reference[0])


def test_broken_off_twice_in_a_row_and_between_checkpoints(folder, reference, tmp_path):
    experiments = pair(folder, checkpoint_every=3)
    paths = tiny_runs.plan(tmp_path, experiments)
    starts = []
    for stop in (5, EPOCH + 1):
        tiny_runs.fit_until(stop, experiments, paths)
        assert len(Run(paths[0]).rows("metrics")) > stop - 2  # rows past the checkpoint, to be written again
        with Checkpoints(paths[0] / "checkpoints") as checkpoints:
            starts.append(checkpoints.steps()[-1])
    assert starts == [3, EPOCH]
    resumed = tiny_runs.fit(pair(folder), paths)
    assert resumed.start == EPOCH
    assert_equal_ends(paths, reference[0])
    timed = [row["step"] for row in Run(paths[0]).rows("timing")]
    assert timed == list(range(1, STEPS + 1))


def test_seeds_resume_from_the_newest_step_that_all_have(folder, reference, tmp_path):
    experiments = pair(folder, checkpoint_every=4)
    paths = tiny_runs.plan(tmp_path, experiments)
    tiny_runs.fit_until(9, experiments, paths)
    shutil.rmtree(paths[1] / "checkpoints" / "8")
    resumed = tiny_runs.fit(pair(folder), paths)
    assert resumed.start == 4
    assert_equal_ends(paths, reference[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_checkpoints_the_step_under_way_and_stops(folder, reference, tmp_path, number):
    """Between two regular checkpoints; what it leaves is committed, and what goes on from it is the same to the bit."""
    experiments = pair(folder, checkpoint_every=5)
    paths = tiny_runs.plan(tmp_path, experiments)
    with stopping.noted(again=False):
        with pytest.raises(stopping.Stopped, match=rf"^trained to step 8, then {number.name}$"):
            tiny_runs.fit(experiments, paths, stop_at=7, stop=lambda _: os.kill(os.getpid(), number))
        with pytest.raises(stopping.Stopped, match="trained to step 8"):
            tiny_runs.fit(experiments, paths)  # still asked to stop: nothing is trained
    for path in paths:
        with Checkpoints(path / "checkpoints") as checkpoints:
            assert checkpoints.steps() == [5, 8]
        assert [row["step"] for row in Run(path).rows("metrics")] == list(range(1, 9))
    resumed = tiny_runs.fit(pair(folder), paths)
    assert resumed.start == 8
    assert_equal_ends(paths, reference[0])


def test_a_signal_in_the_last_step_changes_nothing(folder, reference, tmp_path):
    paths = tiny_runs.plan(tmp_path, pair(folder))
    with stopping.noted(again=False):
        tiny_runs.fit(pair(folder), paths, stop_at=STEPS - 1, stop=lambda _: os.kill(os.getpid(), signal.SIGTERM))
        assert stopping.requested()
    assert_equal_ends(paths, reference[0])


def test_a_run_that_was_taken_over_stops_without_a_trace(folder, tmp_path):
    """This process slept; another one took the second seed. The heartbeat notices, and nothing more is written."""
    experiments = pair(folder, checkpoint_every=5)
    paths = tiny_runs.plan(tmp_path, experiments)
    for path in paths:
        Run(path).start()
    with OtherProcess() as other:

        def overslept(_):
            hour_ago = time.time() - 3600
            os.utime(paths[1] / "attempts/1.json", (hour_ago, hour_ago))
            assert other("take", paths[1] / "attempts") == "taken"
            lease.held(paths[1] / "attempts").touch()

        with pytest.raises(HeldError, match=f"seed_1: taken over by process {other.pid}"):
            tiny_runs.fit(experiments, paths, stop_at=7, stop=overslept)
        assert [row["step"] for row in Run(paths[1]).rows("metrics")][-1] <= 7
        with Checkpoints(paths[1] / "checkpoints") as checkpoints:
            assert checkpoints.steps() == [5]
    for path in paths:
        lease.forget(path / "attempts")


def test_a_checkpoint_is_not_saved_into_a_run_that_was_taken_over(folder, tmp_path):
    """The same before the heartbeat had a chance: saving looks for itself."""
    experiments = pair(folder, checkpoint_every=5, log_every=50)
    paths = tiny_runs.plan(tmp_path, experiments)
    Run(paths[1]).start()
    with OtherProcess() as other:

        def overslept(_):
            hour_ago = time.time() - 3600
            os.utime(paths[1] / "attempts/1.json", (hour_ago, hour_ago))
            assert other("take", paths[1] / "attempts") == "taken"

        with pytest.raises(HeldError, match=f"seed_1: taken over by process {other.pid}"):
            tiny_runs.fit(experiments, paths, stop_at=7, stop=overslept)
    for path in paths:
        with Checkpoints(path / "checkpoints") as checkpoints:
            assert checkpoints.steps() == [5]
    lease.forget(paths[1] / "attempts")


def test_no_seed_saves_while_an_older_save_of_another_is_under_way(folder, tmp_path, monkeypatch):
    """Else a kill could leave the seeds without a step in common: one ahead by two, where two are kept."""
    under_way, found = {}, []
    save, wait = Checkpoints.save, Checkpoints.wait

    def noted_save(self, step, *rest):
        found.append((step, sorted(other for path, other in under_way.items() if path != self.directory)))
        save(self, step, *rest)
        under_way[self.directory] = step

    def noted_wait(self):
        wait(self)
        under_way.pop(self.directory, None)

    monkeypatch.setattr(Checkpoints, "save", noted_save)
    monkeypatch.setattr(Checkpoints, "wait", noted_wait)
    experiments = pair(folder, checkpoint_every=1)
    tiny_runs.fit_until(3, experiments, tiny_runs.plan(tmp_path, experiments))
    assert found == [(1, []), (1, [1]), (2, []), (2, [2]), (3, []), (3, [3])]


def test_how_often_is_logged_and_saved_changes_no_parameter(folder, reference, tmp_path):
    experiments = pair(folder, log_every=7, checkpoint_every=30)
    paths = tiny_runs.plan(tmp_path, experiments)
    tiny_runs.fit(experiments, paths)
    for path, whole in zip(paths, reference[0], strict=True):
        assert differing(saved(path), saved(whole)) == []
        due = [row for row in Run(whole).rows("metrics") if row["step"] % 7 == 0 or row["step"] == STEPS]
        assert Run(path).rows("metrics") == due


def test_the_clock_is_in_timing_and_nowhere_else(reference):
    for path in reference[0]:
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        numbers = {"nats", "perplexity", "bits_per_byte", "gradient_norm", "learning_rate"}
        assert all(row.keys() == {"step", "tokens", "diverged", *numbers} for row in rows)
        timing = Run(path).rows("timing")
        assert [row["step"] for row in timing] == list(range(1, STEPS + 1))
        assert all(row["seconds"] > 0 and row["tokens_per_second"] > 0 for row in timing)


def test_one_compile_for_all_steps_across_epochs_and_after_a_resume(folder, tmp_path, caplog, monkeypatch):
    """A program of its own, trained past ten epochs, then resumed."""
    monkeypatch.setattr(tiny_runs.SharedFit, "programs", {})
    experiments = [tiny_runs.experiment(folder, {"train.checkpoint_every": 50, "encoding": {"name": "none"}})]
    paths = tiny_runs.plan(tmp_path, experiments)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        tiny_runs.fit_until(70, experiments, paths)
        assert tiny_runs.fit(experiments, paths).start == 50
    compiled = [each for each in caplog.messages if "Finished XLA compilation of jit(train_step)" in each]
    assert len(compiled) == 1


def test_saved_bytes_are_those_of_the_moment_of_saving(folder, tmp_path):
    """The state is donated to the next step while its save is still being written; then restored and stepped twice."""
    loop = tiny_runs.SharedFit(pair(folder), [])
    stores = [Checkpoints(tmp_path / str(seed)) for seed in (0, 1)]
    seeds, peaks = jnp.asarray([0, 1], jnp.uint32), jnp.full(2, 1e-2)
    batches = [loop._next() for _ in range(8)]

    def stepped(state, batches):
        for windows in batches:
            state, _ = loop.step(state, windows, seeds, peaks)
        return state

    with tiny_runs.quick_compiles():
        state = stepped(loop._restore(stores)[0], batches[:3])
        at_save = [np.array(leaf) for leaf in jax.tree.leaves(state)]
        loop._save(stores, 3, state)
        end = [np.array(leaf) for leaf in jax.tree.leaves(stepped(state, batches[3:]))]
        assert any(not np.array_equal(one, other) for one, other in zip(at_save, end, strict=True))
        for store in stores:
            store.wait()
        for _ in range(2):
            state, start = loop._restore(stores)
            assert start == 3 and isinstance(state, train.TrainState)
            assert all(np.array_equal(*pair) for pair in zip(at_save, jax.tree.leaves(state), strict=True))
            again = jax.tree.leaves(stepped(state, batches[3:]))
            assert all(np.array_equal(*pair) for pair in zip(end, again, strict=True))
    for store in stores:
        store.close()


def test_what_reads_a_state_before_it_is_donated_sees_it_whole(folder, tmp_path):
    """A save, a model's pass and a callback may all be under way when the next step takes the state's memory."""
    loop = tiny_runs.SharedFit(pair(folder), [])
    stores = [Checkpoints(tmp_path / str(seed)) for seed in (0, 1)]
    seeds, peaks = jnp.asarray([0, 1], jnp.uint32), jnp.full(2, 1e-2)
    graph, told = nnx.graphdef(abstract(loop.config)), []

    @jax.jit
    def scored(params, tokens):
        jax.debug.callback(lambda *leaves: told.append([np.array(leaf) for leaf in leaves]), *jax.tree.leaves(params))
        return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[1], params))(tokens)

    with tiny_runs.quick_compiles():
        state, _ = loop.step(loop._restore(stores)[0], loop._next(), seeds, peaks)
        windows = loop._next()
        before = [np.array(leaf) for leaf in jax.tree.leaves(state.params)]
        expected = np.asarray(scored(state.params, windows[1, 0, :, :-1]))
        told.clear()
        loop._save(stores, 1, state)
        logits = scored(state.params, windows[1, 0, :, :-1])
        after, _ = loop.step(state, windows, seeds, peaks)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.optimizer)))
        np.testing.assert_array_equal(logits, expected)
        jax.effects_barrier()
        assert all(map(np.array_equal, told[0], before))
        assert not all(map(np.array_equal, before, jax.tree.leaves(after.params)))
        for store in stores:
            store.wait()
        restored, _ = loop._restore(stores)
        assert all(map(np.array_equal, before, jax.tree.leaves(restored.params)))
    for store in stores:
        store.close()
