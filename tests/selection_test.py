"""Which value is chosen, from which numbers; what the table then shows; what is refused."""

import json
import math

import pytest
from report_test import cell, finished, plan, read, store

from pe_ablation import report, selection
from pe_ablation.selection import choose

LOW, MID, HIGH = VALUES = (1e-3, 3e-3, 1e-2)
GRID_SEED = 100


def at(rate, **more):
    return {"train.learning_rate": rate, **more}


def alone(root, name, rate, bits, *, seed=GRID_SEED, length=8, **more):
    """A run of the grid: scored at its training length alone."""
    run = plan(root, name, seed, length=length, lengths=(length,), overrides=at(rate, **{"eval.nulls": (), **more}))
    store(run, length, bits)
    run.finish({"parameters": 1000})
    return run


def grid_of(root, name="rope", bits=(2.2, 2.0, 2.1), **fields):
    for rate, value in zip(VALUES, bits, strict=True):
        alone(root, name, rate, value, **fields)


def lines(choice):
    return [
        (row.arm, row.train_length, row.value, row.status, row.chosen, row.edge) for row in choice.grid.itertuples()
    ]


def chosen(choice):
    return {(row.arm, row.train_length): (row.value, row.edge) for row in choice.grid.itertuples() if row.chosen}


def test_the_lowest_bits_per_byte_of_other_seeds_is_chosen_per_arm_and_training_length(tmp_path):
    grid_of(tmp_path)
    grid_of(tmp_path, "alibi", (2.0, 2.1, 2.2))
    grid_of(tmp_path, "rope", (2.3, 2.2, 2.1), length=16)
    for seed in (0, 1):
        finished(tmp_path, "rope", seed, overrides=at(MID))
        finished(tmp_path, "alibi", seed, overrides=at(LOW))
        finished(tmp_path, "rope", seed, length=16, lengths=(16, 32), values=(2, 3), masked=(2,), overrides=at(HIGH))
    choice = choose(read(tmp_path))
    assert choice.seeds == (GRID_SEED,)
    assert chosen(choice) == {("rope", 8): (MID, ""), ("alibi", 8): (LOW, "low"), ("rope", 16): (HIGH, "high")}
    assert choice.grid[["train_length", "arm", "value"]].to_numpy().tolist() == [
        [length, arm, value] for length, arm in ((8, "rope"), (8, "alibi"), (16, "rope")) for value in VALUES
    ]
    assert choice.grid.bits_per_byte.tolist()[:3] == [2.2, 2.0, 2.1]
    assert set(choice.rows.seed) == {0, 1} and list(choice.rows.columns) == list(report.COLUMNS)
    assert {each for each in choice.rows.variant} == {""}
    table = report.table(choice.rows)
    assert cell(table, "rope", 8) == "2.000 ± 0.000" and len(table) == 3


def test_only_the_training_length_on_validation_decides(tmp_path):
    """The value that is best at longer lengths, on the test split, under a null, or for the table's seeds loses."""
    grid_of(tmp_path)
    tempting = alone(tmp_path, "rope", 1e-4, 2.2)
    store(tempting, 16, 0.1)
    store(tempting, 8, 0.1, split="test")
    store(tempting, 8, 0.1, protocol="blocks")
    store(tempting, 8, 0.1, null="window_mask")
    alone(tmp_path, "rope", 1e-4, 0.1, seed=0)
    finished(tmp_path, seed=0, overrides=at(MID))
    choice = choose(read(tmp_path), seeds=[GRID_SEED])
    assert chosen(choice) == {("rope", 8): (MID, "")} and choice.grid.bits_per_byte.tolist() == [2.2, 2.2, 2.0, 2.1]


def test_a_mean_over_several_seeds_decides(tmp_path):
    for seed, bits in ((7, (1.0, 2.0, 3.0)), (8, (3.5, 2.0, 1.5))):
        grid_of(tmp_path, bits=bits, seed=seed)
    finished(tmp_path, seed=0, overrides=at(MID))
    choice = choose(read(tmp_path))
    assert choice.seeds == (7, 8) and chosen(choice) == {("rope", 8): (MID, "")}
    assert choice.grid.bits_per_byte.tolist() == [2.25, 2.0, 2.25]


def test_values_without_a_number_are_shown_and_never_chosen(tmp_path):
    alone(tmp_path, "rope", LOW, 2.2)
    plan(tmp_path, "rope", GRID_SEED, overrides=at(MID)).finish({"status": "diverged"})
    plan(tmp_path, "rope", GRID_SEED, overrides=at(HIGH)).fail("Traceback ...\nValueError: no")
    plan(tmp_path, "rope", GRID_SEED, overrides=at(2e-2))
    alone(tmp_path, "rope", 5e-4, math.nan)
    finished(tmp_path, seed=0, overrides=at(LOW))
    choice = choose(read(tmp_path))
    assert lines(choice) == [
        ("rope", 8, 5e-4, "ok", False, ""),
        ("rope", 8, LOW, "ok", True, ""),
        ("rope", 8, MID, "diverged", False, ""),
        ("rope", 8, HIGH, "failed", False, ""),
        ("rope", 8, 2e-2, "missing", False, ""),
    ]
    text = selection.to_markdown(choice)
    assert all(status in text for status in ("nan", "diverged", "failed", "missing", "2.2000"))


@pytest.mark.parametrize("status, edge", [("diverged", ""), ("failed", "high"), ("missing", "high")])
def test_an_edge_is_where_nothing_beyond_is_known_to_be_worse(tmp_path, status, edge):
    alone(tmp_path, "rope", LOW, 2.2)
    alone(tmp_path, "rope", MID, 2.1)
    last = plan(tmp_path, "rope", GRID_SEED, overrides=at(HIGH))
    {"diverged": lambda: last.finish({"status": "diverged"}), "failed": lambda: last.fail("no")}.get(status, int)()
    finished(tmp_path, seed=0, overrides=at(MID))
    choice = choose(read(tmp_path))
    assert chosen(choice) == {("rope", 8): (MID, edge)}
    assert ("the highest value of the grid; a better one may lie beyond" in selection.note(choice)) == bool(edge)


def test_an_arm_without_a_number_has_no_choice_and_is_said_not_to_be_in_the_table(tmp_path):
    grid_of(tmp_path)
    finished(tmp_path, seed=0, overrides=at(MID))
    for rate in VALUES:
        plan(tmp_path, "alibi", GRID_SEED, overrides=at(rate)).fail("no")
    grid_of(tmp_path, "none")
    choice = choose(read(tmp_path))
    assert chosen(choice).keys() == {("rope", 8), ("none", 8)} and set(choice.rows.encoding) == {"rope"}
    note = selection.note(choice)
    assert "alibi at 8 tokens: seed 100 scored no value" in note
    assert "none at 8 tokens: no other seed has a run at 0.003" in note and "rope at 8 tokens" not in note


def test_numbers_of_other_settings_are_not_compared(tmp_path):
    """Two of three values were scored under a longer longest length, on fewer documents: the third has no number."""
    for rate, bits in ((LOW, 2.2), (MID, 2.1)):
        finished(tmp_path, seed=GRID_SEED, values=(bits, 3, 3), overrides=at(rate))
    alone(tmp_path, "rope", HIGH, 0.5)
    finished(tmp_path, seed=0, overrides=at(MID))
    assert [line[3:] for line in lines(choose(read(tmp_path)))] == [
        ("ok", False, ""), ("ok", True, "high"), ("missing", False, ""),
    ]  # fmt: skip


def test_another_protocol_serves_where_targets_was_not_scored(tmp_path):
    for rate, bits in zip(VALUES, (2.2, 2.0, 2.1), strict=True):
        run = plan(tmp_path, "rope", GRID_SEED, protocols=("blocks",), overrides=at(rate))
        store(run, 8, bits, protocol="blocks")
    finished(tmp_path, seed=0, overrides=at(MID))
    choice = choose(read(tmp_path))
    assert chosen(choice) == {("rope", 8): (MID, "")} and set(choice.grid.protocol) == {"blocks"}


def test_arms_that_differ_in_another_field_are_chosen_for_apart(tmp_path):
    for steps, bits in ((500, (2.2, 2.0, 2.1)), (1000, (2.0, 2.1, 2.2))):
        grid_of(tmp_path, bits=bits, **{"train.steps": steps})
        for rate in (LOW, MID):
            finished(tmp_path, seed=0, overrides=at(rate, **{"train.steps": steps}))
    choice = choose(read(tmp_path))
    assert chosen(choice) == {("rope (steps=500)", 8): (MID, ""), ("rope (steps=1000)", 8): (LOW, "low")}
    assert set(choice.rows.variant) == {"steps=500", "steps=1000"} and len(choice.rows) == 2 * 7
    assert {each for text in choice.rows.differs for each in json.loads(text)} == {"train.steps"}


def test_seeds_at_every_value_are_the_grids_and_others_the_tables(tmp_path):
    """A seed that was trained at two of the three values, after a choice that changed, stays in the table.

    So do those of an arm without a grid, which has no choice.
    """
    grid_of(tmp_path)
    finished(tmp_path, "alibi", 0, overrides=at(MID))
    finished(tmp_path, seed=0, overrides=at(MID))
    finished(tmp_path, seed=0, overrides=at(LOW))
    choice = choose(read(tmp_path))
    assert choice.seeds == (GRID_SEED,) and set(choice.rows.seed) == {0} and set(choice.rows.encoding) == {"rope"}


def test_a_grid_of_all_seeds_needs_one_named(tmp_path):
    for seed in (0, 1):
        for rate, bits in zip(VALUES, ((2.2, 2.0, 2.1), (2.0, 2.1, 2.2))[seed], strict=True):
            finished(tmp_path, seed=seed, values=(bits, 3, 3), overrides=at(rate))
    rows = read(tmp_path)
    with pytest.raises(ValueError, match=r"every seed \(0, 1\) was trained at every value.*--select_seed K"):
        choose(rows)
    choice = choose(rows, seeds=[1])
    assert chosen(choice) == {("rope", 8): (LOW, "low")} and set(choice.rows.seed) == {0}
    with pytest.raises(ValueError, match="select_seed: no run has seed 5; there are: 0, 1"):
        choose(rows, seeds=[5])


def test_a_field_in_which_no_runs_differ_is_refused_with_those_that_do(tmp_path):
    grid_of(tmp_path)
    with pytest.raises(ValueError, match=r"do not differ in train.learning_rat \(did you mean train.learning_rate\?\)"):
        choose(read(tmp_path), "train.learning_rat")
    with pytest.raises(ValueError, match=r"do not differ in train.steps; they differ in: train.learning_rate"):
        choose(read(tmp_path), "train.steps")


def test_values_that_are_no_numbers_are_chosen_too(tmp_path):
    for kind, bits in (("float32", 2.1), ("bfloat16", 2.0)):
        alone(tmp_path, "rope", MID, bits, **{"model.dtype": kind})
        finished(tmp_path, seed=0, overrides={"train.learning_rate": MID, "model.dtype": kind})
    for width, bits in ((None, 1.9), (64, 2.3)):
        alone(tmp_path, "alibi", MID, bits, **{"model.mlp_dim": width})
        finished(tmp_path, "alibi", 0, overrides={"train.learning_rate": MID, "model.mlp_dim": width})
    rows = read(tmp_path)
    rope = choose(rows[rows.encoding == "rope"].reset_index(drop=True), "model.dtype", [GRID_SEED])
    assert chosen(rope)["rope", 8][0] == "bfloat16"
    alibi = choose(rows[rows.encoding == "alibi"].reset_index(drop=True), "model.mlp_dim", [GRID_SEED])
    assert chosen(alibi)["alibi", 8][0] is None and len(alibi.grid) == 2


def test_the_report_shows_the_chosen_and_keeps_the_grid(tmp_path):
    grid_of(tmp_path / "runs")
    grid_of(tmp_path / "runs", "alibi", (2.0, 2.1, 2.2))
    for seed in (0, 1):
        finished(tmp_path / "runs", "rope", seed, overrides=at(MID))
        finished(tmp_path / "runs", "alibi", seed, overrides=at(LOW))
    text = report.write(tmp_path / "runs", tmp_path / "out", field="train.learning_rate")
    assert "learning_rate=" not in text and "Not on equal terms" not in text
    assert "train.learning_rate was chosen for each row, at its training length, on split `validation`" in text
    assert "from seed 100, not shown here (see grid.md). trained at 8: rope 0.003, alibi 0.001" in text
    assert "alibi at 8 tokens: 0.001 is the lowest value of the grid" in text and "Seeds 0, 1" in text
    grid = (tmp_path / "out" / "grid.csv").read_text().splitlines()
    assert len(grid) == 7 and grid[0].startswith("arm,train_length,value,seeds,bits_per_byte,status,chosen,edge")
    assert "chosen (low edge)" in (tmp_path / "out" / "grid.md").read_text()
    assert set(report.read_csv(tmp_path / "out" / "rows.csv").seed) == {0, 1}


def test_a_choice_without_runs_for_the_table_is_refused(tmp_path):
    grid_of(tmp_path)
    with pytest.raises(ValueError, match="no rows of split 'validation'"):
        report.write(tmp_path, tmp_path / "out", field="train.learning_rate", seed=GRID_SEED)
    assert not (tmp_path / "out").exists()
