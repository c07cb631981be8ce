import json
import math
import os
import time

import jax.numpy as jnp
import numpy as np
import pytest
from other_process import OtherProcess

from pe_ablation import atomic, config, lease, record
from pe_ablation.record import HeldError, RecordError, Run

EXPERIMENT = config.read({"encoding": {"name": "rope", "options": {"base": 500.0}}, "seed": 3})
EXPERIMENT_DICT = config.to_dict(EXPERIMENT)


def strict(text):
    """A reader that is not ours and accepts no bare NaN or Infinity."""

    def refuse(name):
        raise AssertionError(f"bare {name}")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def run(tmp_path):
    return Run.plan(tmp_path / "point" / "seed_3", EXPERIMENT, "configs/x.py:quick", "d1")


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, jnp.float32, lambda x: jnp.asarray(x, jnp.bfloat16)])
@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_non_finite_numbers_are_kept_in_strict_json(kind, value, text):
    written = record.dumps({"loss": kind(value)})
    assert strict(written) == {"loss": text}
    back = record.loads(written)["loss"]
    assert isinstance(back, float) and (back == value or (math.isnan(back) and math.isnan(value)))


def test_a_huge_loss_survives_where_its_perplexity_overflows():
    cell = {"nats": 800.0, "perplexity": math.inf}
    assert record.loads(record.dumps(cell)) == cell
    assert strict(record.dumps(cell))["nats"] == 800.0


def test_numpy_and_jax_values_become_plain_json():
    value = {"n": np.int64(3), "ok": np.bool_(True), "x": np.float32(0.5), "rows": jnp.arange(3), "pair": (1, None)}
    assert strict(record.dumps(value)) == {"n": 3, "ok": True, "x": 0.5, "rows": [0, 1, 2], "pair": [1, None]}


@pytest.mark.parametrize("value", [{1: 2}, {"x": object()}, {"x": {1, 2}}, {"name": "NaN"}, {"x": b"bytes"}])
def test_what_would_not_come_back_is_refused(value):
    with pytest.raises(RecordError):
        record.dumps(value)


@pytest.mark.parametrize("text", ['{"x": NaN}', '{"x": -Infinity}', '{"x": 1', ""])
def test_torn_and_lax_json_is_refused(text):
    with pytest.raises(ValueError):
        record.loads(text)


def test_an_atomic_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    atomic.write(path, [b"old"])
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        atomic.write(path, [b"new"])
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_plan_reads_back_as_the_same_experiment(run):
    assert Run(run.path).experiment == EXPERIMENT
    assert run.identity == config.training_identity(EXPERIMENT) and run.seed == 3
    written = strict((run.path / "config.json").read_text())
    assert written["point"] == config.point_identity(EXPERIMENT) and written["arm"] == "rope"
    assert written["source"] == "configs/x.py:quick" and written["data_digest"] == "d1"


def test_another_identity_is_refused_with_both_and_the_fields(run):
    other = config.read(EXPERIMENT_DICT | {"encoding": {"name": "rope", "options": {"base": 600.0}}, "label": "mine"})
    with pytest.raises(RecordError) as refusal:
        Run.plan(run.path, other, None)
    message = str(refusal.value)
    assert str(run.path) in message and run.identity in message and config.training_identity(other) in message
    assert "encoding.options.base (500.0, 600.0)" in message and "label" not in message
    assert Run(run.path).experiment == EXPERIMENT


def test_evaluation_fields_are_brought_up_to_date_and_the_rest_is_kept(run):
    longer = config.read(EXPERIMENT_DICT, {"eval.lengths": (64, 512)})
    Run.plan(run.path, longer, None)
    assert Run(run.path).experiment.eval.lengths == (64, 512)
    assert run.config["source"] == "configs/x.py:quick" and run.config["data_digest"] == "d1"


def test_other_data_is_refused(run):
    with pytest.raises(RecordError, match="digest d1, but data now gives d2"):
        Run.plan(run.path, EXPERIMENT, None, "d2")


def test_another_record_format_is_refused(run):
    (run.path / "config.json").write_text(record.dumps(run.config | {"format": record.FORMAT + 1}))
    with pytest.raises(RecordError, match="format"):
        Run.plan(run.path, EXPERIMENT, None)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecordError, match="cannot write a run directory here"):
        Run.plan(tmp_path / "file" / "seed_0", EXPERIMENT, None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RecordError, match="cannot write"):
        Run.plan(tmp_path / "seed_0", EXPERIMENT, None)


def test_the_states_of_a_run(run):
    assert run.status() == ("missing", "")
    run.start()
    assert run.status() == ("running", f"process {os.getpid()}")
    run.fail("Traceback ...\n  line\nMemoryError: too much\n")
    assert run.status() == ("failed", "MemoryError: too much") and run.error().startswith("Traceback")
    run.start()
    assert run.status()[0] == "running" and run.error() == ""
    run.finish({"status": "ok", "loss": math.nan})
    assert run.status() == ("done", "") and math.isnan(run.result()["loss"])
    assert Run(run.path.parent / "seed_9").status() == ("missing", "")


def test_every_truncation_of_a_result_counts_as_not_done(run):
    run.finish({"status": "ok", "loss": 1.0})
    whole = (run.path / "result.json").read_text().strip()
    for size in range(len(whole)):
        (run.path / "result.json").write_text(whole[:size])
        assert run.status() == ("failed", "result.json is truncated") and run.result() is None


def test_a_run_of_another_process_is_not_started_here(run):
    with OtherProcess() as other:
        other("take", run.path / "attempts")
        assert run.status() == ("running", f"process {other.pid}")
        with pytest.raises(HeldError, match=f"already running in process {other.pid}"):
            run.start()
        other.kill(reap=False)
        assert run.status() == ("failed", f"process {other.pid} ended without a result")
        run.start()
        assert run.status() == ("running", f"process {os.getpid()}") and run.attempts() == 2


def test_a_stopped_run_is_not_failed_and_starts_again(run):
    run.start()
    run.stop("trained to step 3, then SIGTERM")
    assert run.status() == ("stopped", "trained to step 3, then SIGTERM")
    run.start()
    run.fail("ValueError: no")
    assert run.reserve(run.attempts() + 1)  # and stopped before its process could begin
    run.close("stopped", "SIGTERM")
    assert run.status() == ("stopped", "SIGTERM")
    run.start()
    run.finish({"status": "ok"})
    assert run.status() == ("done", "")


WRITES = {
    "append": lambda run: run.append("metrics", [{"step": 3}]),
    "truncate": lambda run: run.truncate("metrics", 0),
    "save_cell": lambda run: run.save_cell({"key": "a"}, {}),
    "finish": lambda run: run.finish({"status": "late"}),
    "fail": lambda run: run.fail("late"),
    "stop": lambda run: run.stop("late"),
    "close": lambda run: run.close("failed", "late"),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("finished", [False, True], ids=["running", "finished"])
def test_a_process_that_was_taken_over_writes_nothing(run, write, finished):
    """It slept past STALE; another one took the run, and may have brought it to its end."""
    run.start()
    run.append("metrics", [{"step": 1}])
    hour_ago = time.time() - 3600
    os.utime(run.path / "attempts/1.json", (hour_ago, hour_ago))
    with OtherProcess() as other:
        assert other("take", run.path / "attempts") == "taken"
        if finished:
            other("release", run.path / "attempts", "done")
        before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
        for _ in range(2):
            with pytest.raises(HeldError, match=f"taken over by process {other.pid}, because .* no sign of life"):
                WRITES[write](run)
        assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    lease.forget(run.path / "attempts")


def test_only_what_the_heartbeat_noticed_counts_without_a_look(run):
    run.start()
    lease.reserve(run.path / "other", 1)
    (run.path / "attempts/2.json").write_text((run.path / "other/1.json").read_text())
    run.check_held(look=False)
    mine = lease.held(run.path / "attempts")
    assert mine is not None
    mine.touch()
    with pytest.raises(HeldError, match="taken over by process"):
        run.check_held(look=False)


def test_what_is_set_aside_is_kept_and_is_no_run(run):
    assert run.set_aside() is None  # a plan alone is nothing to keep
    for number in (1, 2):
        run.start()
        run.append("metrics", [{"step": number}])
        run.finish({"status": f"ok {number}"})
        kept = run.set_aside()
        assert kept == run.path.with_name(f"seed_3.replaced-{number}") and not run.path.exists()
        assert Run(kept).result() == {"status": f"ok {number}"} and Run(kept).status() == ("done", "")
        run = Run.plan(run.path, EXPERIMENT, None)
        assert run.status() == ("missing", "") and run.attempts() == 0
        assert [each.path for each in record.find(run.path.parent.parent)] == [run.path]
    assert record.find(run.path.with_name("seed_3.replaced-1"))[0].result() == {"status": "ok 1"}


def test_a_running_run_is_not_set_aside(run):
    with OtherProcess() as other:
        other("take", run.path / "attempts")
        with pytest.raises(HeldError, match="just claimed"):
            run.set_aside()
    assert run.path.exists()


def test_an_unplanned_directory_cannot_start(tmp_path):
    with pytest.raises(RecordError, match="not a run directory"):
        Run(tmp_path).start()


def test_logs_drop_a_torn_line_and_go_on_after_it(run):
    run.append("metrics", [{"step": 1, "loss": 2.5}, {"step": 2, "loss": math.inf}])
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in run.rows("metrics")] == [1, 2]
    run.append("metrics", [{"step": 3, "loss": 1.0}])
    assert [(row["step"], row["loss"]) for row in run.rows("metrics")] == [(1, 2.5), (2, math.inf), (3, 1.0)]
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        strict(line)


def test_a_log_that_is_one_torn_line_is_empty(run):
    (run.path / "timing.jsonl").write_text('{"step"')
    assert run.rows("timing") == []
    run.append("timing", [{"step": 1}])
    assert run.rows("timing") == [{"step": 1}]


def test_a_broken_line_inside_a_log_is_refused_with_its_number(run):
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RecordError, match=r"metrics\.jsonl:2"):
        run.rows("metrics")


def test_truncate_keeps_steps_up_to_the_checkpoint(run):
    run.truncate("metrics", 10)
    run.append("metrics", [{"step": step} for step in (10, 20, 30)])
    run.truncate("metrics", 20)
    assert [row["step"] for row in run.rows("metrics")] == [10, 20]
    assert run.rows("timing") == []


def test_an_unknown_log_is_refused(run):
    with pytest.raises(ValueError, match="'metrics', 'timing'"):
        run.rows("other")


def test_cells_and_arrays_come_back(run):
    cell = {"key": "targets-L128-none", "nats": 800.0, "perplexity": math.inf, "status": "ok"}
    arrays = {"nats": np.array([[1.0, math.nan]]), "tokens": np.ones((1, 2)), "names": np.array(["a"])}
    run.save_cell(cell, arrays)
    run.save_cell({"key": "blocks-L64", "status": "n/a"}, {})
    assert [each["key"] for each in run.cells()] == ["blocks-L64", "targets-L128-none"]
    assert run.cells()[1] == cell and strict((run.path / "evaluation/targets-L128-none.json").read_text())
    stored = run.arrays(cell)
    assert stored.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(stored[name], array)
    assert run.arrays(run.cells()[0]) == {}


def test_a_torn_cell_is_not_there_and_missing_arrays_are_an_error(run):
    run.save_cell({"key": "a", "status": "ok"}, {"nats": np.ones(3)})
    (run.path / "evaluation/a.npz").write_bytes(b"PK")
    with pytest.raises(RecordError, match=r"a\.npz"):
        run.arrays({"key": "a"})
    (run.path / "evaluation/a.json").write_text('{"key": "a"')
    assert run.cells() == []


@pytest.mark.parametrize("key", ["../x", "", ".hidden", "a/b", "a b"])
def test_a_cell_key_is_a_file_name(run, key):
    with pytest.raises(RecordError, match="not a file name"):
        run.save_cell({"key": key}, {})


def test_runs_are_found_from_any_level_in_order_of_seeds(tmp_path):
    for seed in (10, 2):
        Run.plan(tmp_path / "w/point" / f"seed_{seed}", config.read({"seed": seed}), None)
    for root in (tmp_path / "w", tmp_path / "w/point"):
        assert [run.seed for run in record.find(root)] == [2, 10]
    assert [run.seed for run in record.find(tmp_path / "w/point/seed_2")] == [2]
    with pytest.raises(FileNotFoundError, match="no such folder"):
        record.find(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match="no run directory"):
        record.find(tmp_path / "empty")
