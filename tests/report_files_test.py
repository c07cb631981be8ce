"""What `report.write` narrows down, marks and adds: splits, daggers, costs, pictures."""

import math
from typing import Any

import numpy as np
import pytest
from report_test import cell, finished, lines, plan, read, store

from pe_ablation import cost, record, report, tables
from pe_ablation.config import ConfigError


def marked(run, *lengths, untrained=True):
    """Rewrite the stored cells of these lengths with the mark."""
    for stored in run.cells():
        if stored["length"] in lengths and stored["null"] == "none":
            path = run.path / "evaluation" / f"{stored['key']}.json"
            path.write_text(record.dumps(stored | {"untrained": untrained}))
    return run


def test_the_test_split_is_shown_where_it_is_asked_for_alone(tmp_path):
    run = finished(tmp_path)
    store(run, 8, 7.0, split="test")
    text = report.write(tmp_path, tmp_path / "out")
    assert "split `validation`" in text and "split `test`" not in text and "7.000" not in text
    assert "test" not in set(report.read_csv(tmp_path / "out" / "rows.csv").split)
    text = report.write(tmp_path, tmp_path / "test", split="test")
    assert "split `test`" in text and "split `validation`" not in text and "7.000" in text
    assert set(report.read_csv(tmp_path / "test" / "rows.csv").split) == {"test"}


def test_a_split_that_was_not_scored_is_refused_with_the_way_to_it(tmp_path):
    finished(tmp_path)
    with pytest.raises(ValueError, match=r"no rows of split 'test'.*targets / validation; score it first: .*--split"):
        report.write(tmp_path, tmp_path / "out", split="test")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("asked, message", [
    ({"split": "tset"}, r"split: 'tset' is not allowed \(did you mean test\?\); allowed: 'validation', 'test'"),
    ({"protocol": "block"}, r"protocol: 'block' is not allowed \(did you mean blocks\?\)"),
    ({"metric": "bpb"}, "metric: 'bpb' is not allowed"),
    ({"protocol": "sliding"}, "no rows of split 'validation', protocol 'sliding'; present: targets / validation"),
])  # fmt: skip
def test_unknown_choices_are_refused_with_the_allowed_ones(tmp_path, asked, message):
    finished(tmp_path)
    with pytest.raises((ConfigError, ValueError), match=message):
        report.write(tmp_path, tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


def test_one_protocol_and_another_metric(tmp_path):
    store(finished(tmp_path), 8, 7.0, protocol="blocks")
    text = report.write(tmp_path, tmp_path / "out", protocol="blocks", metric="nats")
    assert f"{14 * math.log(2):.3f}" in text and "Nats per token" in text and "protocol `targets`" not in text
    assert (tmp_path / "out" / "positions.png").exists() and not (tmp_path / "out" / "table_2.csv").exists()


def test_daggers_stand_where_a_seed_read_untrained_entries(tmp_path):
    for seed in (0, 1):
        finished(tmp_path, "t5", seed)
        finished(tmp_path, "rope", seed)
    runs = {run.path: run for run in record.find(tmp_path)}
    t5 = [run for run in runs.values() if run.experiment.arm == "t5"]
    marked(t5[0], 8, untrained=False)
    marked(t5[1], 16)
    rows = read(tmp_path)
    assert rows[(rows.encoding == "t5") & (rows.eval_length == 16) & (rows.null == "none")].untrained.tolist() == [
        "", "True",
    ]  # fmt: skip
    assert rows[(rows.encoding == "t5") & (rows.eval_length == 8)].untrained.tolist() == ["False", ""]
    table = report.table(rows)
    assert [cell(table, "t5", length) for length in (8, 16, 32)] == [
        "2.000 ± 0.000", "2.500 ± 0.000†", "3.000 ± 0.000",
    ]  # fmt: skip
    assert "†" not in "".join(cell(table, "rope", length) for length in (8, 16, 32))
    assert tables.UNTRAINED in report.to_markdown(rows)
    assert "†" not in report.to_markdown(rows[rows.encoding == "rope"].reset_index(drop=True))


def test_a_null_that_recomputes_the_own_length_has_its_mark(tmp_path):
    marked(finished(tmp_path), 8)
    rows = read(tmp_path)
    assert set(rows[rows.null == "window_recompute"].untrained) == {"True"}
    assert set(rows[rows.null == "window_mask"].untrained) == {""}


def test_curves_open_the_markers_of_untrained_points(tmp_path):
    marked(finished(tmp_path, "t5"), 16, 32)
    finished(tmp_path, "rope")
    figure = report.curves(read(tmp_path), tmp_path / "curves.png")
    [axis] = figure.axes
    [hollow] = [line for line in lines(axis, "None") if line.get_markerfacecolor() == "white"]
    assert hollow.get_xdata().tolist() == [16, 32] and hollow.get_ydata().tolist() == [2.5, 3.0]
    assert {"t5†", "rope"} <= {text.get_text() for text in axis.texts}
    assert any("untrained" in text.get_text() for text in figure.legends[0].texts)
    whole: Any = report.curves(read(tmp_path).query("encoding == 'rope'").reset_index(drop=True), tmp_path / "b.png")
    assert not any("untrained" in text.get_text() for text in whole.legends[0].texts)


def test_the_speed_of_a_program_leaves_its_compilation_out(tmp_path):
    run = finished(tmp_path)
    logged = [(10, 60.0, 9.0), (20, 2.0, 300.0), (30, 1.0, 600.0), (35, 1.5, 200.0)]
    run.append("timing", [
        {"step": step, "seconds": seconds, "tokens_per_second": rate, "seeds": 3} for step, seconds, rate in logged
    ])  # fmt: skip
    first = read(tmp_path).iloc[0]
    assert first.seconds_per_step == pytest.approx(0.2)  # of 0.2, 0.1 and 0.3
    assert (first.tokens_per_second, first.program_seeds) == (300.0, 3)
    line = (
        "| rope     |      1,000 |    0.2 |      300 |               3 |         - |         - |    120 |         3 |"
    )
    assert line in cost.to_markdown(read(tmp_path), protocol="targets")


def test_memory_is_that_of_training_and_of_the_longest_length(tmp_path):
    run = finished(tmp_path)
    run.finish({**(run.result() or {}), "memory_bytes": 5 * 2**20})
    for stored in run.cells():
        path = run.path / "evaluation" / f"{stored['key']}.json"
        path.write_text(record.dumps(stored | {"memory_bytes": stored["length"] * 2**20}))
    rows = read(tmp_path)
    assert set(rows.train_memory_bytes) == {5 * 2**20}
    plain = rows[rows.null == "none"]
    assert (plain.memory_bytes == plain.eval_length * 2**20).all()
    assert f"|         5 | {plain.eval_length.max():>9} |" in cost.to_markdown(rows, protocol="targets")


def test_a_speed_that_was_not_logged_is_not_made_up(tmp_path, caplog):
    run = finished(tmp_path)
    run.append("timing", [{"step": 10, "seconds": 60.0, "tokens_per_second": 9.0}])
    rows = read(tmp_path)
    assert rows.seconds_per_step.isna().all() and rows.program_seeds.isna().all()
    assert "|      - |        - |               - |" in cost.to_markdown(rows, protocol="targets")
    (run.path / "timing.jsonl").write_text("broken\n{}\n")
    assert read(tmp_path).bits_per_byte.notna().any() and "its speed is left out" in caplog.text


def test_runs_of_one_arm_in_several_programs_have_a_range(tmp_path):
    for seed, seconds, shared in ((0, 1.0, 2), (1, 1.0, 2), (2, 3.0, 1)):
        run = finished(tmp_path, seed=seed)
        rows = [
            {"step": step, "seconds": seconds, "tokens_per_second": 64 / seconds, "seeds": shared} for step in (1, 2)
        ]
        run.append("timing", rows)
    text = cost.to_markdown(read(tmp_path), protocol="targets")
    assert "|    1-3 |    21-64 |             1-2 |" in text


def test_costs_are_part_of_the_report(tmp_path):
    finished(tmp_path)
    text = report.write(tmp_path, tmp_path / "out")
    assert text.count(cost.NOTE) == 1 and "seeds a program" in text


def test_pictures_are_the_same_bytes_each_time(tmp_path):
    run = finished(tmp_path)
    store(run, 16, 2.0, protocol="blocks")
    for name in ("a", "b"):
        report.write(tmp_path, tmp_path / "out" / name)
    pictures = sorted(path.name for path in (tmp_path / "out" / "a").glob("*.[ps][nv]g"))
    assert pictures == sorted(
        f"{stem}.{form}" for stem in ("curves", "curves_2", "positions_2") for form in ("png", "svg")
    )
    for name in pictures:
        one, other = ((tmp_path / "out" / folder / name).read_bytes() for folder in ("a", "b"))
        assert one == other and (b"<svg" in one) == name.endswith("svg")
    assert b"<dc:date>" not in (tmp_path / "out" / "a" / "curves.svg").read_bytes()


def test_positions_of_chosen_rows_pool_their_seeds(tmp_path):
    """The rows of a choice point at their own runs: the grid's seed and values have no part in the curve."""
    for rate, bits in ((1e-3, 9.0), (3e-3, 5.0)):
        run = plan(tmp_path, seed=9, protocols=("blocks",), overrides={"train.learning_rate": rate})
        store(run, 8, bits, protocol="blocks")
    for seed, bits in ((0, 1.0), (1, 3.0)):
        run = plan(tmp_path, seed=seed, protocols=("blocks",), overrides={"train.learning_rate": 3e-3})
        store(run, 8, 2.0, protocol="blocks")
        store(run, 16, bits, protocol="blocks")
    chosen = report.choose(read(tmp_path)).rows
    (axis,) = report.positions(chosen, tmp_path, tmp_path / "positions.png").axes
    [drawn] = lines(axis, "-")[:1]
    assert np.asarray(drawn.get_ydata())[:3].tolist() == pytest.approx([2, 4, 6])
