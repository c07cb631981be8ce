"""Daggers: which cells rest on entries of an encoding's parameters that no training gradient reached."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs

from pe_ablation import checkpoint, evaluate, untrained
from pe_ablation.checkpoint import Checkpoints
from pe_ablation.encodings.bias import t5_bucket_starts
from pe_ablation.record import Run
from pe_ablation.trained import load

LENGTH, STEPS = 4, 2
BUCKETS, MAX_DISTANCE = 6, 8


def trained(folder, name, **options):
    """A run of two real steps at 4 tokens, its validation documents beside it."""
    (folder / "validation.txt").write_bytes(tiny_runs.text(60))
    overrides = {
        "encoding.name": name, "encoding.options": options, "model.num_layers": 1, "train.length": LENGTH,
        "train.steps": STEPS, "train.warmup_steps": 0, "train.accumulation": 1, "train.checkpoint_every": STEPS,
        **{f"model.dropout_{where}": 0.0 for where in ("embed", "attention", "residual")},
        "data.text.validation": str(folder / "validation.txt"),
        "eval.lengths": [2, 4, 5, 6, 12], "eval.last_k": 1, "eval.spacing": 20, "eval.stride": 2,
        "eval.protocols": ["targets", "blocks"], "eval.nulls": ["window_mask"],
    }  # fmt: skip
    asked = tiny_runs.experiment(folder, overrides)
    [path] = tiny_runs.plan(folder / "runs", [asked])
    tiny_runs.fit([asked], [path])
    return Run(path)


def entries(run):
    return load(run).unread


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    run = trained(tmp_path_factory.mktemp("t5"), "t5", num_buckets=BUCKETS, max_distance=MAX_DISTANCE)
    with tiny_runs.quick_compiles():
        evaluate.evaluate_run(run.path)
    return run


def test_buckets_past_the_training_length_never_train(t5):
    out_of_reach = t5_bucket_starts(BUCKETS, MAX_DISTANCE) >= LENGTH  # distances in training: 0 to 3
    assert 0 < out_of_reach.sum() < BUCKETS
    [(name, where)] = entries(t5).items()
    assert name == "encodings/0/table/value"
    assert where.tolist() == [[bool(each)] * 2 for each in out_of_reach]


def test_a_cell_carries_a_dagger_where_it_reads_such_a_bucket(t5):
    """Buckets start at distances 0, 1, 2, 3, 5, 6. The one from 3 trains and serves 4; 6 tokens first reach 5.

    With the masked window no query looks back further than 3.
    """
    assert t5_bucket_starts(BUCKETS, MAX_DISTANCE).tolist() == [0, 1, 2, 3, 5, 6]
    found = {(cell["protocol"], cell["length"], cell["null"]): cell["untrained"] for cell in t5.cells()}
    assert found == {
        (protocol, length, null): length >= 6 and null == "none"
        for protocol in ("targets", "blocks")
        for null, lengths in (("none", (2, 4, 5, 6, 12)), ("window_mask", (5, 6, 12)))
        for length in lengths
    }


def test_an_entry_that_the_cell_does_not_read_changes_nothing(t5):
    """Only the last bucket, from distance 6 on, is called untrained: 6 tokens don't reach it, 12 do."""
    scorer = evaluate._Scorer(t5, t5.experiment.eval)
    last = np.zeros((BUCKETS, 2), bool)
    last[-1] = True
    model = dataclasses.replace(scorer.trained, unread={"encodings/0/table/value": last})
    with tiny_runs.quick_compiles():
        assert not scorer._reads(model, "targets", 6, "none")
        assert scorer._reads(model, "targets", 12, "none")


@pytest.mark.parametrize("name", ["learned", "transformer_xl", "fire", "dape"])
def test_tables_and_vectors_of_other_encodings_train_whole(tmp_path, name):
    assert entries(trained(tmp_path, name)) == {}


def test_changed_entries_are_all_moved_and_no_others():
    table = jnp.zeros((3, 2))
    where = np.array([[True, True], [False, False], [False, True]])
    params = {"encodings": [{"table": table}], "embedding": jnp.ones(4)}
    moved = untrained.changed(params, {"encodings/0/table": where})
    assert np.array_equal(np.asarray(moved["encodings"][0]["table"]) >= 0.5, where)
    assert len(np.unique(moved["encodings"][0]["table"])) == 4
    assert np.array_equal(moved["embedding"], params["embedding"])


def saved(folder, state):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {"position": 0})
    return folder


def test_a_checkpoint_without_second_moments_is_unknown(tmp_path):
    params = {"encodings": [{"table": jnp.ones((2, 2))}], "blocks": [{"kernel": jnp.ones(2)}]}
    assert untrained.find(saved(tmp_path, {"params": params}), 1, params) is None
    bare = {"encodings": [{}], "blocks": [{"kernel": jnp.ones(2)}]}
    assert untrained.find(tmp_path, 1, bare) == {}  # nothing that could be untrained


def test_some_leaves_of_a_state_are_read_by_path(tmp_path):
    state = {"nu": {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}, "rest": jnp.zeros(5)}
    saved(tmp_path, state)
    found = checkpoint.load_leaves(tmp_path, 1, lambda name: name.startswith("nu/"))
    assert found.keys() == {"nu/a", "nu/b"} and np.array_equal(found["nu/a"], [0, 1, 2])
    assert checkpoint.load_leaves(tmp_path, 1, lambda name: False) == {}
