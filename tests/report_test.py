"""Tables and figures from run records: what is averaged, what is not, and how the rest is told apart."""

import colorsys
import json
import math
import statistics
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pe_ablation import config, encodings, figure, record, report, tables
from pe_ablation.claims import CLAIMS, Seen, dearer, fails_past_reach, order, ratio_within, worst_as_trained
from pe_ablation.figure import spread

LENGTHS = (8, 16, 32)


def plan(
    root,
    name="rope",
    seed=0,
    *,
    length=8,
    lengths=LENGTHS,
    digest: str | None = "d0",
    protocols=("targets",),
    overrides: Any = None,
):
    """A planned run of a small experiment, and nothing in it."""
    tree = {
        "encoding": {"name": name},
        "data": {"block": 16},
        "train": {"length": length, "batch_tokens": 64},
        "eval": {"lengths": lengths, "last_k": 4, "spacing": 8, "protocols": protocols},
        "seed": seed,
    }
    experiment = config.read(tree, overrides)
    point = config.point_identity(experiment)
    return record.Run.plan(root / f"{name}-L{length}-{point}" / f"seed_{seed}", experiment, None, digest)


def store(run, length, bits, *, status="ok", null="none", protocol="targets", split="validation", **settings):
    """A cell of `bits` per byte, 2 bytes a token, in 3 documents."""
    nats = 2 * bits * math.log(2)
    experiment = run.experiment
    planned = experiment.eval.settings(protocol, experiment.train.length)
    cell = {
        "key": f"{protocol}-{split}-{length}-{null}-{'-'.join(map(str, settings.values()))}",
        "split": split, "protocol": protocol, "length": length, "null": null, "status": status, "nats": nats,
        "perplexity": math.exp(nats) if nats < 709 else math.inf, "bits_per_byte": bits, "tokens": 120, "bytes": 240,
        "documents": 3, "train_length": experiment.train.length, "settings": planned | settings,
    }  # fmt: skip
    position = np.arange(length)
    sums = {
        "nats": np.full((3, length), nats) * (1 + position),
        "tokens": np.ones((3, length)),
        "bytes": np.full((3, length), 2.0),
    }
    run.save_cell(cell, sums | {"names": np.array(["a", "b", "c"])})


def finished(root, name="rope", seed=0, values=(2.0, 2.5, 3.0), masked=(2.2, 2.3), **fields: Any):
    run = plan(root, name, seed, **fields)
    lengths = run.config["experiment"]["eval"]["lengths"]
    for length, bits in zip(lengths, values, strict=True):
        store(run, length, bits)
    for length, bits in zip(lengths[1:], masked, strict=True):
        store(run, length, bits, null="window_mask")
    run.finish({"parameters": 1000})
    return run


def read(runs_dir) -> Any:
    """`report.rows`; Any, since the type checker cannot follow pandas' selections."""
    return report.rows(runs_dir)


def cell(frame, encoding, length, train_length=8):
    part = frame.xs((train_length, encoding), level=("train_length", "encoding"))
    assert len(part) == 1
    return part[length].iloc[0]


def test_one_row_per_run_and_planned_cell(tmp_path):
    finished(tmp_path)
    rows = read(tmp_path)
    assert list(rows.columns) == list(report.COLUMNS)
    seen = [(row.null, row.eval_length) for row in rows.itertuples()]
    assert seen == [("none", 8), ("none", 16), ("none", 32)] + [
        (null, length) for null in ("window_mask", "window_recompute") for length in (16, 32)
    ]
    first = rows.iloc[0]
    assert (first.encoding, first.train_length, first.seed, first.status, first.parameters) == (
        "rope",
        8,
        0,
        "ok",
        1000,
    )
    assert (first.tokens, first.bytes, first.documents, rows.ratio[2]) == (120, 240, 3, 4.0)
    assert first.perplexity == pytest.approx(2.0 ** (2 * 2.0))


def test_recomputed_window_is_the_models_own_cell_under_the_same_settings(tmp_path):
    run = finished(tmp_path, values=(2.0, 2.5, 3.0))
    store(run, 8, 9.0, last_k=2)
    store(run, 16, 9.5, last_k=2)
    rows = read(tmp_path)
    derived = rows[rows.null == "window_recompute"]
    by_settings = {json.loads(key)["last_k"]: set(part.bits_per_byte) for key, part in derived.groupby("settings")}
    assert by_settings == {4: {2.0}, 2: {9.0}}
    assert set(derived.eval_length) == {16, 32}


def test_recomputed_window_is_missing_where_the_own_length_was_not_scored(tmp_path):
    run = plan(tmp_path)
    store(run, 16, 2.5)
    rows = read(tmp_path)
    derived = rows[rows.null == "window_recompute"]
    assert set(derived.status) == {"missing"} and derived.bits_per_byte.isna().all()


def test_cells_stored_beyond_the_plan_are_rows_too(tmp_path):
    run = finished(tmp_path)
    store(run, 64, 3.5)
    store(run, 8, 1.5, split="test")
    rows = read(tmp_path)
    assert rows[(rows.eval_length == 64) & (rows.null == "none")].bits_per_byte.tolist() == [3.5]
    assert rows[rows.split == "test"].eval_length.tolist() == [8]  # nothing else was asked of the test split


def test_mean_and_sample_deviation_over_seeds(tmp_path):
    values = {0: 2.0, 1: 2.3, 2: 2.9}
    for seed, bits in values.items():
        finished(tmp_path, seed=seed, values=(bits, 2.5, 3.0))
    rows = read(tmp_path)
    row: Any = report.summary(rows).iloc[0]
    assert (row.n, row.seeds) == (3, 3)
    assert row["mean"] == pytest.approx(statistics.mean(values.values()))
    assert row.sd == pytest.approx(statistics.stdev(values.values()))  # 0.458; the population's would be 0.374
    table = report.table(rows)
    assert cell(table, "rope", 8) == "2.400 ± 0.458"
    assert table.index.get_level_values("seeds").tolist() == [3]


def test_one_seed_shows_no_deviation(tmp_path):
    finished(tmp_path)
    table = report.table(read(tmp_path))
    assert cell(table, "rope", 16) == "2.500"
    assert "±" not in report.to_markdown(read(tmp_path))


def test_a_missing_seed_is_not_averaged_away(tmp_path):
    finished(tmp_path, seed=0)
    finished(tmp_path, seed=1)
    partial = plan(tmp_path, seed=2)
    store(partial, 8, 2.0)
    rows = read(tmp_path)
    table = report.table(rows)
    assert cell(table, "rope", 8) == "2.000 ± 0.000"
    assert cell(table, "rope", 16) == "- (2/3)"
    lacking = rows[(rows.seed == 2) & (rows.eval_length == 16)]
    assert set(lacking.status) == {"missing", "ok"}  # ok: the recomputed window, which needs length 8 alone
    assert lacking[lacking.status == "missing"][["nats", "bits_per_byte", "perplexity"]].isna().all(axis=None)


def test_a_run_that_never_started_counts_as_missing_in_its_point(tmp_path):
    finished(tmp_path, seed=0)
    plan(tmp_path, seed=1, digest=None)
    table = report.table(read(tmp_path))
    assert len(table) == 1 and cell(table, "rope", 8) == "- (1/2)"


def test_a_length_that_one_seed_has_in_addition_is_incomplete(tmp_path):
    finished(tmp_path, seed=0)
    store(finished(tmp_path, seed=1), 64, 3.0)
    assert cell(report.table(read(tmp_path)), "rope", 64) == "- (1/2)"


def test_statuses_are_different_cells(tmp_path):
    learned = plan(tmp_path, "learned")
    store(learned, 8, 2.0)
    store(learned, 16, math.nan, status="n/a")
    store(learned, 32, math.nan, status="n/a")
    learned.finish({"parameters": 1})
    t5 = plan(tmp_path, "t5")
    store(t5, 8, 2.0)
    store(t5, 16, math.nan, status="OOM")
    t5.finish({"parameters": 1})
    plan(tmp_path, "alibi").fail("Traceback ...\nValueError: no")
    plan(tmp_path, "none").finish({"status": "diverged"})
    table = report.table(read(tmp_path))
    assert [cell(table, "learned", length) for length in LENGTHS] == ["2.000", "n/a", "n/a"]
    assert [cell(table, "t5", length) for length in LENGTHS] == ["2.000", "OOM", "-"]
    assert {cell(table, "alibi", length) for length in LENGTHS} == {"failed"}
    assert {cell(table, "none", length) for length in LENGTHS} == {"diverged"}


def test_mixed_statuses_are_all_named(tmp_path):
    finished(tmp_path, seed=0)
    plan(tmp_path, seed=1).finish({"status": "diverged"})
    plan(tmp_path, seed=2)
    assert cell(report.table(read(tmp_path)), "rope", 8) == "diverged, - (1/3)"


def test_an_unknown_status_is_refused(tmp_path):
    store(plan(tmp_path), 8, 2.0, status="okay")
    with pytest.raises(ValueError, match="'okay' is not known; allowed: ok, n/a, OOM"):
        read(tmp_path)


def test_infinite_and_undefined_numbers_are_printed(tmp_path):
    run = plan(tmp_path)
    store(run, 8, 1000.0)
    store(run, 16, math.nan)
    store(run, 32, 3.0)
    rows = read(tmp_path)
    assert cell(report.table(rows, metric="perplexity"), "rope", 8) == "inf"
    assert cell(report.table(rows, metric="nats"), "rope", 8) == f"{2000 * math.log(2):.3f}"
    assert cell(report.table(rows), "rope", 16) == "NaN"
    assert "NaN" in report.to_markdown(rows)


def test_points_that_differ_in_a_field_are_never_pooled(tmp_path):
    finished(tmp_path, values=(2.0, 2.5, 3.0), overrides={"train.learning_rate": 1e-3})
    finished(tmp_path, values=(4.0, 4.5, 5.0), overrides={"train.learning_rate": 3e-3})
    finished(tmp_path, "alibi")
    table = report.table(read(tmp_path))
    assert cell(table, "rope (learning_rate=0.001)", 8) == "2.000"
    assert cell(table, "rope (learning_rate=0.003)", 8) == "4.000"
    assert cell(table, "alibi", 8) == "2.000"
    assert set(table.index.get_level_values("seeds")) == {1}


def test_points_that_differ_in_code_alone_are_told_apart_by_name(tmp_path):
    runs = [finished(tmp_path, seed=seed) for seed in (0, 1)]
    file = runs[1].path / "config.json"
    file.write_text(record.dumps(runs[1].config | {"point": "c0de"}))
    table = report.table(read(tmp_path))
    assert cell(table, "rope (c0de)", 8) == "2.000" and len(table) == 2


def test_other_training_data_is_another_point(tmp_path):
    finished(tmp_path / "a", seed=0, digest="a" * 64)
    finished(tmp_path / "b", seed=1, digest="b" * 64)
    rows = pd.concat([read(tmp_path / "a"), read(tmp_path / "b")])
    assert report.summary(rows).n.tolist() == [1] * 6


def test_one_seed_recorded_twice_is_refused(tmp_path):
    finished(tmp_path)
    (tmp_path / "copy").mkdir()
    finished(tmp_path / "copy")
    for each in (tmp_path / "copy").iterdir():
        each.rename(tmp_path / f"{each.name}-copy")
    with pytest.raises(ValueError, match="both hold seed 0 of point"):
        read(tmp_path)


def test_protocols_splits_and_settings_never_meet_in_a_table(tmp_path):
    run = finished(tmp_path)
    store(run, 8, 7.0, protocol="blocks")
    rows = read(tmp_path)
    assert cell(report.table(rows, protocol="blocks"), "rope", 8) == "7.000"
    assert cell(report.table(rows, protocol="targets"), "rope", 8) == "2.000"
    store(run, 8, 6.0, last_k=2)
    rows = read(tmp_path)
    with pytest.raises(ValueError, match="more than one way"):
        report.table(rows)
    text = report.write(tmp_path, tmp_path / "out")
    assert "last 4 target tokens" in text and "last 2 target tokens" in text and "non-overlapping" in text
    with pytest.raises(ValueError, match=r"no rows of protocol 'sliding'.*present: targets"):
        report.table(rows, protocol="sliding")


@pytest.mark.parametrize("field", ["metric", "null"])
def test_unknown_choices_are_refused(tmp_path, field):
    finished(tmp_path)
    with pytest.raises(ValueError, match=f"{field}: 'bpb' is not known; allowed:"):
        report.table(read(tmp_path), **{field: "bpb"})


def test_markdown_is_aligned_and_says_what_was_scored(tmp_path):
    for seed in (0, 1):
        finished(tmp_path, seed=seed)
        finished(tmp_path, "learned", seed=seed)
    text = report.to_markdown(read(tmp_path))
    blocks = [block.split("\n") for block in text.split("\n\n") if block.startswith("|")]
    assert [len(block) for block in blocks] == [4, 4]  # the table and the masked null: header, rule, two arms
    for block in blocks:
        assert len({len(line) for line in block}) == 1
        assert len({tuple(at for at, letter in enumerate(line) if letter == "|") for line in block}) == 1
    assert "| 8 (1x) |" in " ".join(blocks[0][0].split()) and "32 (4x)" in blocks[0][0]
    for part in (
        "split `validation`",
        "last 4 target tokens",
        "8 tokens apart",
        "120 tokens in 3 documents",
        "Seeds 0, 1",
    ):
        assert part in text
    assert "2.200 ± 0.000" in "".join(blocks[1])


def test_written_rows_are_read_back_to_the_last_bit(tmp_path):
    run = finished(tmp_path, values=(0.1 + 0.2, 1000.0, math.nan))
    store(run, 64, math.nan, status="n/a")
    finished(tmp_path, "none")
    plan(tmp_path, "alibi")
    report.write(tmp_path, tmp_path / "out")
    back = report.read_csv(tmp_path / "out" / "rows.csv")
    pd.testing.assert_frame_equal(back, read(tmp_path), check_exact=True)
    assert {"n/a", "missing", "ok"} <= set(back.status) and "none" in set(back.encoding)
    assert math.inf in set(back.perplexity)


def test_write_leaves_whole_files_and_nothing_else(tmp_path):
    run = finished(tmp_path / "runs")
    store(run, 8, 2.0, protocol="blocks")
    text = report.write(tmp_path / "runs", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "rows.csv", "stats.csv", "table.md", "table.csv", "table_2.csv", "table.tex", "table_2.tex", "curves.png",
        "curves_2.png", "positions_2.png", "curves.svg", "curves_2.svg", "positions_2.svg",
    }  # fmt: skip
    assert (tmp_path / "out" / "table.md").read_text() == text
    stored = pd.read_csv(tmp_path / "out" / "table.csv", dtype=str, keep_default_na=False)
    assert stored.null.tolist() == ["none", "window_mask", "window_recompute"]
    assert stored["16"].tolist() == ["2.500", "2.200", "2.000"] and stored["8"].tolist() == ["2.000", "", ""]


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_a_folder_without_runs_is_refused(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"{folder}.*expected a folder that launch or run wrote"):
        report.write(tmp_path / folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def lines(axis, linestyle):
    """Lines in data coordinates of a style that reach over the figure's lengths."""
    return [line for line in axis.lines if line.get_linestyle() == linestyle and line.get_transform() == axis.transData]


def test_curves_draw_a_line_per_arm_and_null_and_a_band_per_arm(tmp_path):
    for seed, shift in ((0, 0.0), (1, 0.2)):
        finished(tmp_path, seed=seed, values=(2.0 + shift, 2.5, 3.0))
        finished(tmp_path, seed=seed, length=16, lengths=(16, 32), values=(2.0, 3.0), masked=(2.0,))
    learned = plan(tmp_path, "learned")
    store(learned, 8, 2.0)
    for length in (16, 32):
        store(learned, length, math.nan, status="n/a")
    path = tmp_path / "curves.png"
    short, long = report.curves(read(tmp_path), path).axes
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(lines(short, "-")) == 2 and len(lines(long, "-")) == 1
    assert len(lines(short, "--")) == 3 and len(lines(long, "--")) == 2  # matplotlib calls every dash pattern "--"
    assert len(short.collections) == 1 and len(long.collections) == 1
    band = short.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (pytest.approx(2.0), pytest.approx(3.0))
    assert short.get_xscale() == "log" and [tick for tick in short.get_xticks()] == [8, 16, 32]
    assert "learned: n/a past 8" in [text.get_text() for text in short.texts]
    assert "learned" not in " ".join(text.get_text() for text in long.texts)


def test_curves_break_where_a_cell_is_incomplete(tmp_path):
    run = plan(tmp_path)
    store(run, 8, 2.0)
    store(run, 32, 3.0)
    (axis,) = report.curves(read(tmp_path), tmp_path / "curves.png").axes
    heights = next(line.get_ydata() for line in axis.lines if line.get_label() == "rope")
    assert np.isnan(heights).tolist() == [False, True, False]
    assert "rope (missing in between)" in [text.get_text() for text in axis.texts]


def test_curves_of_nothing_scored(tmp_path):
    plan(tmp_path)
    (axis,) = report.curves(read(tmp_path), tmp_path / "curves.png").axes
    assert [text.get_text() for text in axis.texts] == ["rope: missing"]


def test_positions_pool_sums_of_documents_and_seeds(tmp_path):
    for seed, bits in ((0, 1.0), (1, 3.0)):
        run = plan(tmp_path, seed=seed, protocols=("blocks",))
        store(run, 16, bits, protocol="blocks")
    (axis,) = report.positions(read(tmp_path), tmp_path, tmp_path / "positions.png").axes
    x, y = np.array(lines(axis, "-")[0].get_data())
    # position p holds nats = 2 bits ln 2 (1 + p) over 2 bytes: bits per byte (1 + p) times the seeds' mean of 2
    assert x[:3].tolist() == pytest.approx([1, 2, 3])
    assert y[:3].tolist() == pytest.approx([2, 4, 6])
    assert x[-1] <= 16


def test_positions_without_scored_cells_are_refused(tmp_path):
    plan(tmp_path, protocols=("blocks",))
    with pytest.raises(ValueError, match="no scored cell of protocol 'blocks'"):
        report.positions(read(tmp_path), tmp_path, tmp_path / "positions.png")


def test_names_are_spread_without_overlap():
    spots = spread([1.0, 1.01, 1.02, 5.0], 0.5, 0.0, 5.0)
    assert np.diff(spots).min() >= 0.5 - 1e-12
    assert spots[0] == 1.0 and spots[3] == 5.0
    assert spread([4.9, 5.0], 0.5, 0.0, 5.0) == [4.5, 5.0]


def test_arms_stand_in_the_order_of_the_registry_beside_the_name_they_begin_with(monkeypatch):
    assert encodings.names() == tables.ORDER
    arms = ["zeta", "rope_none", "p_rope_reversed", "xpos", "p_rope", "none_scaled", "kerple_log", "rope", "none"]
    wanted = ["none", "none_scaled", "rope", "rope_none", "p_rope", "p_rope_reversed", "xpos", "kerple_log", "zeta"]
    assert sorted(arms, key=tables.family) == wanted
    monkeypatch.setattr(tables, "ORDER", ("kerple_log", "kerple"))
    assert [tables.named_after(arm) for arm in ("kerple_log_2", "kerple_2", "kerples")] == [
        "kerple_log",
        "kerple",
        None,
    ]


MANY_ARMS = (*encodings.names(), *(f"rope_{kind}" for kind in "abcdefg"), "alibi_a", "alibi_b", "mine", "other")


def test_looks_of_many_arms_are_all_different_and_kin_is_alike():
    looks = figure._looks(MANY_ARMS)
    assert len({looks[arm] for arm in MANY_ARMS}) == len(MANY_ARMS)
    assert len({looks[name][0] for name in tables.ORDER}) == len({looks[name][1] for name in tables.ORDER}) == 18

    def hue(colour):
        return colorsys.rgb_to_hsv(*(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)))[0]

    for arm in (arm for arm in MANY_ARMS if arm.startswith(("rope_", "alibi_"))):
        assert hue(looks[arm][0]) == pytest.approx(hue(looks[arm.partition("_")[0]][0]), abs=0.01)
    few = figure._looks(["rope", "rope_a", "mine"])
    assert [few[arm][0] for arm in ("rope_a", "mine")] == list(figure.SPARE_COLOURS[:2])


def test_many_arms_have_room_for_their_names_and_leave_the_nulls_to_the_tables(tmp_path):
    finished(tmp_path)
    one = read(tmp_path)
    everything = pd.concat([one.assign(encoding=arm, point=arm) for arm in MANY_ARMS], ignore_index=True)
    drawn = report.curves(everything, tmp_path / "curves.png")
    (axis,) = drawn.axes
    heights = sorted(text.get_window_extent().y0 for text in axis.texts)
    assert len(heights) == len(MANY_ARMS)
    assert np.diff(heights).min() >= axis.texts[0].get_window_extent().height - 2
    assert lines(axis, "--") == []
    assert "nulls are in the tables" in drawn.legends[0].get_texts()[0].get_text()


def test_claims_are_judged_on_numbers():
    seen = Seen(
        8, {"rope": {8: ("ok", 2.0), 16: ("ok", 2.2), 32: ("ok", 4.0)}, "alibi": {8: ("ok", 2.0), 32: ("ok", 2.1)}}
    )
    assert ratio_within("rope", 1.3, beyond=4)(seen) == ("2.00x to 2.00x", True)
    assert ratio_within("rope", 1.3)(seen) == ("1.10x to 2.00x", False)
    assert order("alibi", "rope")(seen)[1] is True and order("rope", "alibi")(seen)[1] is False
    incomplete = Seen(8, {"rope": {8: ("ok", 2.0), 32: ("missing", math.nan)}})
    assert ratio_within("rope", 1.3, beyond=4)(incomplete) == ("not there", None)


def test_expected_says_what_was_seen_and_leaves_out_absent_arms(tmp_path):
    finished(tmp_path, "alibi", values=(2.0, 2.0, 2.2))
    finished(tmp_path, "rope", values=(2.0, 2.0, 4.0))
    text = report.expected(read(tmp_path))
    found = {
        line.split("|")[2].strip(): [part.strip() for part in line.split("|")[4:6]] for line in text.split("\n")[4:-1]
    }
    assert found["alibi stays within 5 % of its own"] == ["1.00x to 1.10x", "no"]
    assert found["rope: over 1.3x its own from 4x on"] == ["2.00x to 2.00x", "yes"]
    assert found["every arm learns: under a unigram's 4.38 at its own length"][1] == "yes"
    assert not any("t5" in statement or "learned" in statement for statement in found)
    assert len(found) < len(CLAIMS)


def scaled(**cells):
    """Trained at 8; bits per byte at 8, 16 and 32 of each transform, `_` for : and = in its name."""
    named = {name.replace("_", ":factor="): values for name, values in cells.items()}
    return Seen(
        8, {name: dict(zip((8, 16, 32), (("ok", each) for each in row), strict=True)) for name, row in named.items()}
    )


def test_claims_about_transforms_are_judged_within_and_past_their_length():
    """pi by 2 is worse than the model as trained at 32, which it isn't meant for."""
    seen = scaled(none=(2.0, 3.0, 4.0), pi_2=(2.2, 2.4, 5.0), ntk_2=(2.1, 2.3, 3.5), ntk_4=(2.3, 2.45, 2.5))
    assert worst_as_trained(seen) == ("16: 3.000, worst ntk:factor=4 2.450; 32: 4.000, worst ntk:factor=4 2.500", True)
    assert dearer("pi", "ntk")(seen) == ("factor=2: 2.200 and 2.100", True)
    assert fails_past_reach(seen) == ("least ntk:factor=2 1.52x, most 2.08x", True)
    better = scaled(none=(2.0, 2.3, 2.4), pi_2=(2.0, 2.4, 2.45), ntk_2=(2.1, 2.2, 3.0))
    assert worst_as_trained(better)[1] is False
    assert dearer("pi", "ntk")(better)[1] is False
    assert fails_past_reach(better) == ("least pi:factor=2 1.02x, most 1.36x", False)
    alone = scaled(none=(2.0, 2.3, 2.4))
    assert [check(alone)[1] for check in (worst_as_trained, dearer("pi", "ntk"), fails_past_reach)] == [None] * 3


def test_claims_about_a_corpus_are_left_out_on_another(tmp_path):
    finished(tmp_path, overrides={"data.source": "text", "data.text.file": "a.txt"})
    assert "unigram" not in report.expected(read(tmp_path))


def test_lengths_scored_in_addition_make_no_planned_cell_missing(tmp_path):
    run = finished(tmp_path)
    store(run, 8, 2.1, longest=64)
    store(run, 64, 4.0, longest=64)
    found = read(tmp_path)
    added = found[found.settings.str.contains('"longest": 64')]
    assert set(zip(added.null, added.eval_length, strict=True)) == {
        ("none", 8), ("none", 64), ("window_recompute", 64)
    }  # fmt: skip
    assert (found.status == "ok").all()


def test_fields_newer_than_a_record_are_no_difference(tmp_path):
    runs = [plan(tmp_path / "runs", seed=seed) for seed in (0, 1)]
    recorded = json.loads((runs[0].path / "config.json").read_text())
    experiment = recorded["experiment"]
    del experiment["wandb"], experiment["data"]["tfds"], experiment["model"]["remat"]
    (runs[0].path / "config.json").write_text(json.dumps(recorded))
    rows = report.rows(tmp_path / "runs")
    assert set(rows.differs) == {"{}"} and set(rows.variant) == {""}


def test_a_broken_record_leaves_the_report_of_the_others_alone(tmp_path, caplog):
    finished(tmp_path)
    broken = finished(tmp_path, "alibi")
    (broken.path / "config.json").write_text("{")
    assert set(read(tmp_path).encoding) == {"rope"}
    assert str(broken.path) in caplog.text
    assert broken.status() == ("failed", "config.json is unreadable")


def test_a_seed_whose_record_broke_is_a_failed_seed_of_its_point(tmp_path, caplog):
    """Its numbers are left out, and the mean is none of the others alone."""
    for seed in range(3):
        run = finished(tmp_path, seed=seed)
    (run.path / "config.json").write_bytes((run.path / "config.json").read_bytes()[:20])
    frame = read(tmp_path)
    assert set(frame[frame.seed == 2].status) == {"failed"} and frame[frame.seed == 2].nats.isna().all()
    assert "failed (2/3)" in report.to_markdown(frame, protocol="targets")
    assert f"{run.path}" in caplog.text and "counted as failed" in caplog.text


def test_records_are_read_without_the_code_that_made_them(tmp_path):
    """A field of a later version, and an encoding whose file is gone."""
    finished(tmp_path)
    later = finished(tmp_path, "alibi")
    recorded = json.loads((later.path / "config.json").read_text())
    recorded["experiment"]["train"]["newer"] = 1
    recorded["experiment"]["encoding"]["name"] = "/gone/mine.py:Mine"
    (later.path / "config.json").write_text(json.dumps(recorded))
    assert set(read(tmp_path).status) == {"ok"}


def test_a_folder_that_takes_no_report_is_named(tmp_path):
    finished(tmp_path / "runs")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write a report here .* --out"):
        report.write(tmp_path / "runs", tmp_path / "file")


def test_rows_on_unequal_terms_are_called_so(tmp_path):
    finished(tmp_path)
    finished(tmp_path, "alibi")
    assert "equal terms" not in report.to_markdown(read(tmp_path))
    finished(tmp_path, "none", overrides={"train.steps": 7, "train.warmup_steps": 1})
    assert "also differ in train.steps (1000, 7)" in report.to_markdown(read(tmp_path)).replace(
        "(7, 1000)", "(1000, 7)"
    )


def test_a_sweep_without_any_result_is_a_table_of_missing_cells(tmp_path):
    plan(tmp_path)
    assert (report.table(read(tmp_path)) == "-").to_numpy().all()


def test_words_are_reported_and_cells_without_them_have_none(tmp_path):
    """Runs that were scored before words were counted stay as they are."""
    old = finished(tmp_path, "rope")
    new = finished(tmp_path, "alibi")
    for stored in new.cells():
        new.save_cell(stored | {"words": 60, "word_perplexity": 16.0}, new.arrays(stored))
    rows = read(tmp_path)
    counted = rows[rows.encoding == "alibi"]
    assert (counted.words == 60).all() and (counted.word_perplexity == 16.0).all()
    assert rows[rows.encoding == "rope"][["words", "word_perplexity"]].isna().all(axis=None)
    shown = report.table(rows, metric="word_perplexity")
    assert (cell(shown, "alibi", 16), cell(shown, "rope", 16)) == ("16.00", "NaN")
    assert "**Perplexity per word**" in report.to_markdown(rows, metric="word_perplexity")
    assert "words" not in old.cells()[0]
    report.write(tmp_path, tmp_path / "out")
    pd.testing.assert_frame_equal(report.read_csv(tmp_path / "out" / "rows.csv"), rows)


def test_rows_of_an_older_file_have_every_column(tmp_path):
    finished(tmp_path)
    rows = read(tmp_path)
    rows.drop(columns=["words", "word_perplexity"]).to_csv(tmp_path / "old.csv", index=False, na_rep="NaN")
    pd.testing.assert_frame_equal(report.read_csv(tmp_path / "old.csv"), rows)
