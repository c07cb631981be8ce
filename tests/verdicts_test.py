"""Verdicts, horizons and differences: the rules alone, then on run records whose sums are made to order."""

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pe_ablation import cli, config, record, report, stats, tables, verdict_tables, verdicts
from pe_ablation.stats import Difference
from pe_ablation.verdicts import CANNOT, EXTRAPOLATES, FAILS, STABLE, Step

DOCUMENTS = 12
LENGTHS = (8, 16, 32)


def plan(root, name="rope", seed=0, *, length=8, lengths=LENGTHS, digest="d0", overrides: Any = None):
    tree = {
        "encoding": {"name": name},
        "data": {"block": 16},
        "train": {"length": length, "batch_tokens": 64},
        "eval": {"lengths": lengths, "last_k": 4, "spacing": 8},
        "seed": seed,
    }
    experiment = config.read(tree, overrides)
    point = config.point_identity(experiment)
    return record.Run.plan(root / f"{name}-L{length}-{point}" / f"seed_{seed}", experiment, None, digest)


def asked(run) -> tuple[config.EvalConfig, int]:
    """A run's `eval` fields and training length, without the checks of a whole config."""
    tree = run.config["experiment"]
    return config.EvalConfig(**tree["eval"]), tree["train"]["length"]


def store(run, length, bits: Any, *, null="none", status="ok", unscored=0, names=None):
    """A cell of `bits` per byte in each document (a number or [D]), 2 bytes a token; the last 4 targets are scored."""
    planned, train_length = asked(run)
    bits = np.broadcast_to(np.asarray(bits, np.float64), (DOCUMENTS,) if np.ndim(bits) == 0 else np.shape(bits))
    tokens = np.zeros((len(bits) + unscored, length))
    tokens[: len(bits), -4:] = 1 + np.arange(len(bits))[:, None] % 3
    nats_of = np.zeros_like(tokens)
    nats_of[: len(bits), -4:] = 2 * math.log(2) * bits[:, None] * tokens[: len(bits), -4:]
    sums = {"nats": nats_of, "tokens": tokens, "bytes": 2 * tokens}
    nats, counted = sums["nats"].sum(), tokens.sum()
    numbers = {"nats": nats / counted, "perplexity": math.inf, "bits_per_byte": nats / counted / 2 / math.log(2)}
    cell = {
        "key": f"targets-{length}-{null}", "split": "validation", "protocol": "targets", "length": length, "null": null,
        "status": status, "tokens": int(counted), "bytes": int(2 * counted), "documents": len(bits),
        "train_length": train_length, "settings": planned.settings("targets", train_length),
    }  # fmt: skip
    names = names or [f"doc {at}" for at in range(len(bits) + unscored)]
    run.save_cell(
        cell | (numbers if status == "ok" else {}), sums | {"names": np.array(names)} if status == "ok" else {}
    )
    return cell


def noise(*key: int, size=0.002):
    return np.random.default_rng(key).normal(0, size, DOCUMENTS)


def finished(root, name="rope", seed=0, values=(2.0, 2.0, 2.0), masked=(2.1, 2.1), spread=0.002, **fields: Any):
    """A run of `values` at its evaluation lengths and `masked` at those past its own, with shared and own noise."""
    run = plan(root, name, seed, **fields)
    shared = noise(0, size=0.3) + noise(1, seed)[0] * 10
    planned, length = asked(run)
    lengths = planned.lengths
    for at, (each, bits) in enumerate(zip(lengths, values, strict=True)):
        store(run, each, bits + shared + noise(2, seed, at, length, len(name), size=spread))
    for at, (each, bits) in enumerate(zip([each for each in lengths if each > length], masked, strict=True)):
        store(run, each, bits + shared + noise(3, seed, at, length, len(name), size=spread), null="window_mask")
    run.finish({"parameters": 1000})
    return run


def arm(root, name="rope", seeds=(0, 1, 2), **fields: Any):
    return [finished(root, name, seed, **fields) for seed in seeds]


def statistics(root, **choice: Any) -> Any:
    return verdicts.statistics(report.rows(root), root, **choice)


def cell(frame: Any, name="rope", length=32, train_length=8, null="none") -> Any:
    keep = (frame.encoding == name) & (frame.eval_length == length) & (frame.train_length == train_length)
    [found] = frame[keep & (frame.null == null)].itertuples()
    return found


def by_verdict(frame: Any, name="rope", train_length=8) -> dict[int, str]:
    keep = (frame.encoding == name) & (frame.train_length == train_length) & (frame.null == "none")
    return dict(zip(frame[keep].eval_length, frame[keep].verdict, strict=True))


# The rules


def gap(low, high) -> Difference:
    return Difference((low + high) / 2, low, high, np.array([]))


NO_GAIN, GAIN = gap(-0.1, 0.1), gap(-0.3, -0.1)


@pytest.mark.parametrize(
    "own, null, gain, expected",
    [
        (gap(-0.3, -0.2), gap(-0.3, -0.2), None, EXTRAPOLATES),
        (gap(-0.3, -0.2), gap(-0.3, -0.2), GAIN, EXTRAPOLATES),
        (gap(-0.3, -0.2), gap(-0.3, -0.2), NO_GAIN, CANNOT),
        (gap(-0.3, -0.2), gap(-0.3, -0.2), gap(0.1, 0.2), CANNOT),  # trained there it would be worse
        (gap(-0.3, -0.2), gap(-0.3, -0.2), gap(-0.2, 0.0), CANNOT),  # up to 0 is not below it
        (gap(-0.3, -0.2), gap(-0.1, 0.0), None, STABLE),  # better than 1x, not than the better null
        (gap(-0.1, 0.019), gap(-0.1, 0.019), None, STABLE),
        (gap(-0.1, 0.019), gap(-0.1, 0.019), GAIN, STABLE),
        (gap(-0.1, 0.019), gap(-0.1, 0.019), NO_GAIN, CANNOT),
        (gap(-0.1, 0.02), gap(-0.1, 0.02), None, FAILS),  # the margin itself is not under it
        (gap(-0.1, 0.1), gap(-0.1, 0.1), GAIN, FAILS),
        (gap(-0.1, 0.1), gap(-0.1, 0.1), NO_GAIN, CANNOT),  # not clearly worse
        (gap(0.021, 0.1), gap(0.1, 0.2), None, FAILS),
        (gap(0.021, 0.1), gap(0.1, 0.2), NO_GAIN, FAILS),
        (gap(math.nan, math.nan), gap(-0.3, -0.2), None, CANNOT),
        (gap(-0.3, -0.2), gap(math.nan, math.nan), GAIN, CANNOT),
    ],
)
def test_the_rules_in_their_order(own, null, gain, expected):
    assert verdicts.verdict(own, null, gain, 0.02) == expected


@pytest.mark.parametrize(
    "steps, expected",
    [
        ([], (8, "longest evaluated")),
        ([Step(16, STABLE, True), Step(32, EXTRAPOLATES, True)], (32, "longest evaluated")),
        ([Step(16, STABLE, True), Step(32, FAILS, False), Step(64, STABLE, True)], (16, "")),
        ([Step(16, CANNOT, True), Step(32, CANNOT, False)], (16, "")),
        ([Step(16, FAILS, False)], (8, "")),
        ([Step(16, "n/a", None)], (8, "")),
        ([Step(16, STABLE, True), Step(32, "OOM", None), Step(64, STABLE, True)], (16, "OOM at 32")),
        ([Step(16, "missing", None)], (8, "missing at 16")),
        ([Step(16, CANNOT, None)], (8, "cannot discriminate at 16")),
    ],
)
def test_the_horizon_ends_at_the_first_length_that_does_not_hold(steps, expected):
    assert verdicts.horizon(8, steps) == expected


# On records


def test_each_verdict_from_sums(tmp_path):
    arm(tmp_path, "alibi", values=(2.0, 1.9, 1.8))
    arm(tmp_path, "t5", values=(2.0, 2.01, 2.03))
    arm(tmp_path, "rope", values=(2.0, 1.98, 2.0), masked=(1.95, 2.1))
    frame = statistics(tmp_path)
    assert by_verdict(frame, "alibi") == {8: "", 16: EXTRAPOLATES, 32: EXTRAPOLATES}
    assert by_verdict(frame, "t5") == {8: "", 16: STABLE, 32: FAILS}
    assert by_verdict(frame, "rope") == {8: "", 16: STABLE, 32: STABLE}
    assert cell(frame, "rope", 16).better_null == "window_mask"
    assert cell(frame, "rope", 32).better_null == "window_recompute"
    assert cell(frame, "rope", 16).own_high95 < 0 < cell(frame, "rope", 16).null_low95
    ends = {(name, *cell(frame, name, 8)[-3:-1]) for name in ("alibi", "t5", "rope")}
    assert ends == {("alibi", 32, "longest evaluated"), ("t5", 16, ""), ("rope", 32, "longest evaluated")}


def test_what_float32_rounds_is_no_gain(tmp_path):
    """The same sums in another order differ in the seventh digit, in every document the same way perhaps."""
    arm(tmp_path, "fox", values=(2.0, 2.0 - 4e-6, 2.0 - 4e-6), masked=(2.0, 2.0), spread=0.0)
    arm(tmp_path, "rope", values=(2.0, 2.0 - 4e-5, 2.0 - 4e-5), masked=(2.0, 2.0), spread=0.0)
    frame = statistics(tmp_path)
    assert cell(frame, "fox", 16).null_high95 < 0
    assert by_verdict(frame, "fox") == {8: "", 16: STABLE, 32: STABLE}
    assert by_verdict(frame, "rope") == {8: "", 16: EXTRAPOLATES, 32: EXTRAPOLATES}


def test_the_margin_is_a_share_of_the_own_value(tmp_path):
    arm(tmp_path, values=(2.0, 2.01, 2.03))
    assert by_verdict(statistics(tmp_path, margin=0.004))[16] == FAILS
    assert by_verdict(statistics(tmp_path, margin=0.02)) == {8: "", 16: STABLE, 32: STABLE}


def test_numbers_are_those_of_the_sums(tmp_path):
    """Mean and sd as in the table; differences and intervals as `stats` gives them for sums read by hand."""
    runs = arm(tmp_path, values=(2.0, 1.9, 1.8))
    others = arm(tmp_path, "alibi", values=(2.0, 2.1, 2.2))

    def sample(runs, length, null="none", amount="bytes"):
        scale = 1 / math.log(2) if amount == "bytes" else 1.0
        found = [run.arrays({"key": f"targets-{length}-{null}"}) for run in runs]
        sums = [np.stack([each[name].sum(axis=1) for each in found]) for name in ("nats", amount)]
        return stats.Sample((0, 1, 2), tuple(found[0]["names"]), sums[0] * scale, sums[1])

    frame = statistics(tmp_path, baseline="alibi")
    row = cell(frame, length=32)
    pairs = {
        "own": sample(runs, 8), "null": sample(runs, 8), "baseline": sample(others, 32),
    }  # fmt: skip
    for name, other in pairs.items():
        found = [getattr(row, f"{name}_{part}") for part in ("difference", "low95", "high95")]
        assert found == list(stats.difference(sample(runs, 32), other)[:3])
    assert (row.low95, row.high95, row.over) == stats.interval(sample(runs, 32))[1:]
    assert (row.n, row.seeds, row.documents) == (3, 3, DOCUMENTS)
    test = stats.paired_t(sample(runs, 32).values - sample(others, 32).values)
    assert (row.baseline_t, row.baseline_t_p) == test[:2] and test.p < 0.05
    assert math.isnan(row.baseline_sign_flip_p) and row.baseline_sign_flip == "cannot reach .05 at n = 3"
    masked = cell(frame, length=32, null="window_mask")
    assert (masked.low95, masked.verdict) == (stats.interval(sample(runs, 32, "window_mask")).low, "")
    nats = cell(statistics(tmp_path, metric="nats"), length=32)
    assert nats.low95 == stats.interval(sample(runs, 32, amount="tokens")).low
    for metric in verdicts.RATIOS:
        found, table = statistics(tmp_path, metric=metric), report.summary(report.rows(tmp_path), metric=metric)
        both = found[found.null == "none"].merge(table, on=["encoding", "eval_length"], suffixes=("", "_table"))
        assert len(both) == 6
        pd.testing.assert_series_equal(both["mean"], both.mean_table, check_names=False)
        pd.testing.assert_series_equal(both.sd, both.sd_table, check_names=False)


def test_six_seeds_have_a_sign_flip_test(tmp_path):
    arm(tmp_path, "rope", seeds=range(6))
    arm(tmp_path, "alibi", seeds=range(6), values=(2.5, 2.5, 2.5))
    row = cell(statistics(tmp_path, baseline="alibi"))
    assert (row.baseline_sign_flip_p, row.baseline_sign_flip) == (2 / 2**6, "exact")


@pytest.mark.parametrize(
    "values, there, expected",
    [
        ((2.0, 1.9, 2.0), 1.8, EXTRAPOLATES),
        ((2.0, 2.0, 2.0), 1.8, STABLE),
        ((2.0, 2.2, 2.0), 1.8, FAILS),
        ((2.0, 1.9, 2.0), 2.0, CANNOT),
        ((2.0, 2.0, 2.0), 2.0, CANNOT),
        ((2.0, 2.0, 2.0), 2.1, CANNOT),
        ((2.0, 2.2, 2.0), 2.0, FAILS),
    ],
)
def test_a_model_trained_at_a_length_says_whether_there_is_a_gain(tmp_path, values, there, expected):
    arm(tmp_path, values=values)
    arm(tmp_path, length=16, values=(2.0, there, there), masked=(2.1,))
    frame = statistics(tmp_path)
    row = cell(frame, length=16)
    assert row.verdict == expected
    assert row.trained_there_difference == pytest.approx(values[1] - there, abs=0.01)
    assert row.gain_difference == pytest.approx(there - 2.0, abs=0.01)
    assert math.isnan(cell(frame, length=32).gain_difference)  # none was trained at 32
    short = cell(frame, length=8, train_length=16)
    assert short.trained_there_difference == pytest.approx(0, abs=0.01) and short.verdict == ""
    assert row.holds == ("no" if expected == FAILS else "yes")
    assert row.horizon == (8 if expected == FAILS else 32)


def test_a_model_trained_elsewhere_on_other_data_or_as_another_arm_is_no_peer(tmp_path):
    arm(tmp_path)
    arm(tmp_path, "alibi", length=16, masked=(2.1,))
    arm(tmp_path, length=16, masked=(2.1,), digest="d1")
    assert by_verdict(statistics(tmp_path)) == {8: "", 16: STABLE, 32: STABLE}


def test_unpaired_seeds_are_named_and_give_no_difference(tmp_path):
    arm(tmp_path, values=(2.0, 1.9, 1.8))
    arm(tmp_path, length=16, seeds=(0, 1), masked=(2.1,))
    arm(tmp_path, "alibi", seeds=(1, 2, 3))
    frame = statistics(tmp_path, baseline="alibi")
    row = cell(frame, length=16)
    assert row.verdict == EXTRAPOLATES  # the gain is unknown
    assert math.isnan(row.baseline_difference) and math.isnan(row.gain_difference) and row.baseline == "alibi"
    assert "baseline: not the same seeds, so nothing to pair: 0, 1, 2 against 1, 2, 3" in row.note
    assert "gain: not the same seeds, so nothing to pair: 0, 1 against 0, 1, 2" in row.note
    assert "nothing to pair: 0, 1, 2 against" in verdict_tables.to_markdown(frame)


def test_unpaired_documents_are_named(tmp_path):
    arm(tmp_path, seeds=(0,))
    [other] = arm(tmp_path, "alibi", seeds=(0,))
    store(other, 8, 2.0, names=[f"text {at}" for at in range(DOCUMENTS)])
    row = cell(statistics(tmp_path, baseline="alibi"), length=8)
    assert "not the same documents" in row.note and "doc 0, doc 1" in row.note and "text 0, text 1" in row.note
    odd = cell(statistics(tmp_path), "alibi", 16)
    assert (odd.verdict, math.isnan(odd.own_difference)) == ("missing", True) and "text 0, text 1" in odd.note


def test_seeds_that_scored_different_documents_make_no_sample(tmp_path):
    runs = arm(tmp_path, seeds=(0, 1))
    store(runs[1], 32, 2.0, names=[f"text {at}" for at in range(DOCUMENTS)])
    frame = statistics(tmp_path)
    assert by_verdict(frame)[32] == "missing" and by_verdict(frame)[16] == STABLE
    assert "seeds (0, 1) scored different documents: doc 0" in cell(frame).note


@pytest.mark.parametrize("null, length, lost", [("none", 16, {16}), ("window_mask", 16, {16}), ("none", 8, {16, 32})])
def test_a_missing_seed_takes_the_numbers_and_every_verdict_that_needs_them(tmp_path, null, length, lost):
    runs = arm(tmp_path, values=(2.0, 2.0, 2.0))
    for suffix in ("json", "npz"):
        (runs[1].path / "evaluation" / f"targets-{length}-{null}.{suffix}").unlink()
    frame = statistics(tmp_path)
    found = by_verdict(frame)
    assert {each for each, verdict in found.items() if verdict == "missing"} == lost
    row = cell(frame, length=length, null=null)
    assert (row.n, row.seeds, row.status) == (2, 3, "missing")
    assert all(math.isnan(getattr(row, name)) for name in ("mean", "sd", "low95", "own_difference", "null_difference"))
    assert cell(frame).horizon_end == ("missing" if length == 8 else "missing at 16")
    assert pd.isna(cell(frame).horizon) == (length == 8)
    text = verdict_tables.to_markdown(frame)
    assert ("- (2/3)" in text) == (null == "none")


def test_rows_without_a_null_are_judged_by_the_other_and_never_without_1x(tmp_path):
    arm(tmp_path, values=(2.0, 1.98, 2.0), masked=(1.95, 2.1))
    rows: Any = report.rows(tmp_path)
    kept = verdicts.statistics(rows[rows.null != "window_mask"], tmp_path)
    assert by_verdict(kept) == {8: "", 16: EXTRAPOLATES, 32: STABLE}
    kept = verdicts.statistics(rows[(rows.null != "window_recompute") & (rows.eval_length != 8)], tmp_path)
    assert by_verdict(kept) == {16: "missing", 32: "missing"}
    kept = verdicts.statistics(rows[rows.null == "none"], tmp_path)
    assert by_verdict(kept) == {8: "", 16: "missing", 32: "missing"}


def test_statuses_pass_through(tmp_path):
    for name, status in (("learned", "n/a"), ("t5", "OOM")):
        run = plan(tmp_path, name)
        store(run, 8, 2.0)
        for length in (16, 32):
            store(run, length, 0, status=status)
            store(run, length, 0, status=status, null="window_mask")
        run.finish({"parameters": 1})
    plan(tmp_path, "alibi").fail("Traceback ...\nValueError: no")
    plan(tmp_path, "none").finish({"status": "diverged"})
    plan(tmp_path, "rope")
    frame = statistics(tmp_path)
    found = {name: set(list(by_verdict(frame, name).values())[1:]) for name in frame.encoding.unique()}
    assert found == {
        "learned": {"n/a"}, "t5": {"OOM"}, "alibi": {"failed"}, "none": {"diverged"}, "rope": {"missing"},
    }  # fmt: skip
    ends = {name: cell(frame, name).horizon_end for name in found}
    assert ends == {"learned": "", "t5": "OOM at 16", "alibi": "failed", "none": "diverged", "rope": "missing"}
    lines = {line.split("|")[2].strip(): line for line in verdict_tables.to_markdown(frame).split("\n")[2:9]}
    shown = {name: lines[name].split("|")[-2].strip() for name in found}
    assert shown == {"learned": "8 (1x)", "t5": "≥ 8 (1x)", "alibi": "failed", "none": "diverged", "rope": "-"}


def test_broken_sums_cost_their_cell_its_statistics_and_are_named(tmp_path, caplog):
    runs = arm(tmp_path)
    path = runs[2].path / "evaluation" / "targets-32-none.npz"
    path.write_bytes(path.read_bytes()[:100])
    frame = statistics(tmp_path)
    row = cell(frame)
    assert (row.verdict, row.status, math.isnan(row.low95)) == ("missing", "ok", True) and not math.isnan(row.mean)
    assert by_verdict(frame)[16] == STABLE
    assert str(path) in row.note and str(path) in caplog.text and str(path) in verdict_tables.to_markdown(frame)


def test_sums_that_do_not_give_the_cells_number_are_not_used(tmp_path, caplog):
    [run] = arm(tmp_path, seeds=(0,))
    path = run.path / "evaluation" / "targets-32-none.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"bits_per_byte": stored["bits_per_byte"] * 1.001}))
    frame = statistics(tmp_path)
    assert by_verdict(frame) == {8: "", 16: STABLE, 32: "missing"}
    assert "the sums of targets-32-none do not give its numbers" in caplog.text


def test_documents_without_a_scored_target_are_no_documents(tmp_path):
    for seed in (0, 1):
        run = finished(tmp_path, seed=seed)
        for length, null in ((8, "none"), (16, "none"), (16, "window_mask")):
            store(run, length, 2.0 + noise(seed, length), null=null, unscored=5)
    frame = statistics(tmp_path)
    assert (cell(frame, length=16).documents, cell(frame, length=16).verdict) == (DOCUMENTS, STABLE)


def test_one_seed_is_documents_only_and_says_so(tmp_path):
    arm(tmp_path, seeds=(0,))
    frame = statistics(tmp_path)
    assert cell(frame).over == "documents only" and cell(frame).verdict == STABLE and math.isnan(cell(frame).sd)
    text = verdict_tables.to_markdown(frame)
    assert "n = 1: intervals are percentiles of 2,000 bootstrap resamples of the 12 documents only: nothing is" in text
    assert "cannot reach .05 at n = 1" in text and "too narrow" not in text


def test_one_seed_and_one_document_discriminate_nothing(tmp_path):
    run = plan(tmp_path)
    for length in LENGTHS:
        store(run, length, [2.0 + length])
        store(run, length, [2.0], null="window_mask")
    frame = statistics(tmp_path)
    assert by_verdict(frame) == {8: "", 16: CANNOT, 32: CANNOT}
    assert (cell(frame).over, cell(frame).holds, cell(frame).horizon_end) == (
        "nothing",
        "",
        "cannot discriminate at 16",
    )
    assert "one seed and one document, no interval" in verdict_tables.to_markdown(frame)


def test_a_number_that_is_not_finite_fails_and_takes_no_other_along(tmp_path):
    run = finished(tmp_path)
    bits = np.full(DOCUMENTS, 2.0)
    bits[3] = math.inf
    store(run, 16, bits)
    store(run, 32, bits, null="window_mask")
    frame = statistics(tmp_path)
    assert by_verdict(frame) == {8: "", 16: FAILS, 32: STABLE}
    row = cell(frame, length=16)
    assert (row.mean, row.holds, row.horizon) == (math.inf, "no", 8) and math.isnan(row.low95)
    assert cell(frame).better_null == "window_recompute"
    assert "fails?" not in verdict_tables.to_markdown(frame)


def test_points_that_differ_in_a_field_are_judged_apart_and_compared_alike(tmp_path):
    for rate, shift in ((1e-3, 0.0), (3e-3, 0.5)):
        for name, more in (("rope", 0.1), ("alibi", 0.0)):
            values = tuple(2.0 + shift + more for _ in LENGTHS)
            arm(tmp_path, name, seeds=(0,), values=values, overrides={"train.learning_rate": rate})
    frame = statistics(tmp_path, baseline="alibi")
    ropes = frame[(frame.encoding == "rope") & (frame.eval_length == 8)]
    assert ropes.baseline.tolist() == ["alibi (learning_rate=0.001)", "alibi (learning_rate=0.003)"]
    assert ropes.baseline_difference.tolist() == pytest.approx([0.1, 0.1], abs=0.01)
    named = statistics(tmp_path, baseline="alibi (learning_rate=0.001)")
    ropes = named[(named.encoding == "rope") & (named.eval_length == 8)]
    assert ropes.baseline_difference.tolist() == pytest.approx([0.1, 0.6], abs=0.01)
    finished(tmp_path, "t5")
    with pytest.raises(
        ValueError, match=r"baseline: 'alibi' is several arms at training length 8; name one of: 'alibi \("
    ):
        statistics(tmp_path, baseline="alibi")


@pytest.mark.parametrize(
    "choice, match",
    [
        ({"baseline": "xl"}, "baseline: 'xl' is no arm of these runs; there are: rope"),
        ({"margin": 0.0}, "margin: 0.0; expected a positive share"),
        ({"margin": math.nan}, "margin: nan"),
        ({"metric": "perplexity"}, "metric: 'perplexity' has no sums to resample; allowed: bits_per_byte, nats"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, choice, match):
    finished(tmp_path)
    with pytest.raises(ValueError, match=match):
        statistics(tmp_path, **choice)


def test_every_cell_is_read_once(tmp_path, monkeypatch):
    arm(tmp_path, seeds=(0, 1))
    arm(tmp_path, length=16, seeds=(0, 1), masked=(2.1,))
    read, arrays = Counter(), record.Run.arrays
    monkeypatch.setattr(
        record.Run,
        "arrays",
        lambda run, cell, names=None: read.update([(run.path, cell["key"])]) or arrays(run, cell, names),
    )
    statistics(tmp_path, baseline="rope")
    assert len(read) == 2 * (5 + 4) and set(read.values()) == {1}


# As text


def section(text: str, title: str) -> list[str]:
    """The lines of the grid under a title."""
    return text[text.index(title) :].split("\n\n")[1].split("\n")


def row_of(lines: list[str], name: str) -> list[str]:
    [line] = [line for line in lines if line.split("|")[2].strip() == name]
    return [part.strip() for part in line.split("|")[4:-1]]


def test_markdown_shows_verdicts_intervals_differences_and_how(tmp_path):
    arm(tmp_path, "alibi", values=(2.0, 1.9, 1.8))
    arm(tmp_path, "t5", values=(2.0, 2.01, 2.2))
    arm(tmp_path, "none", values=(2.0, 2.01, 2.2), spread=0.2)
    text = verdict_tables.to_markdown(statistics(tmp_path, baseline="t5"))
    found = section(text, "**Verdicts**")
    assert [part.strip() for part in found[0].split("|")[4:-1]] == ["16 (2x)", "32 (4x)", "horizon"]
    assert row_of(found, "alibi") == [EXTRAPOLATES, EXTRAPOLATES, "≥ 32 (4x)"]
    assert row_of(found, "t5") == [STABLE, FAILS, "16 (2x)"]
    assert row_of(found, "none")[0] == "fails?"
    assert row_of(section(text, "Bits per byte: 95 % interval"), "alibi")[0].startswith("[1.")
    low, high = map(float, row_of(section(text, "Difference to the better null"), "alibi")[1].strip("[]").split(","))
    assert -0.21 < low < -0.2 < high < -0.19
    compared = section(text, "Difference to `t5` at the same")
    assert row_of(compared, "t5") == ["baseline"] * 3 and row_of(compared, "alibi")[2].startswith("-0.40")
    for part in (
        "at a margin of 1 % of the 1x value", "- extrapolates: better than", "- stable:", "- fails:", "- fails?:",
        "n = 3: intervals are percentiles of 2,000 bootstrap resamples of seeds and of the 12 documents",
        "too narrow", "cannot reach .05 at n = 3", "paired over seeds and documents",
    ):  # fmt: skip
        assert part in text
    assert "- cannot discriminate:" not in text and "Not read" not in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({len(line) for line in block.split("\n")}) == 1


def test_markdown_of_two_training_lengths(tmp_path):
    arm(tmp_path, values=(2.0, 2.0, 2.0))
    arm(tmp_path, length=16, values=(2.0, 2.0, 2.0), masked=(2.1,))
    text = verdict_tables.to_markdown(statistics(tmp_path))
    rows = [[part.strip() for part in line.split("|")[4:-1]] for line in section(text, "**Verdicts**")[2:]]
    assert rows == [[CANNOT, STABLE, "≥ 32 (4x)"], ["1x", STABLE, "≥ 32 (2x)"]]
    assert "- cannot discriminate: a model of the same arm trained at that length gains nothing" in text
    gaps = section(text, "Gap to a model of the same arm")
    assert [[part.strip() for part in line.split("|")[1:4]] for line in gaps[2:]] == [
        ["8", "rope", "16"],
        ["16", "rope", "8"],
    ]


def test_markdown_without_a_length_past_the_training_length(tmp_path):
    arm(tmp_path, lengths=(8,), values=(2.0,), masked=())
    text = verdict_tables.to_markdown(statistics(tmp_path))
    assert "Verdicts" not in text and "95 % interval of the mean" in text


def test_write_keeps_the_statistics_beside_the_table(tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    arm(runs, "alibi", values=(2.0, 1.9, 1.8))
    arm(runs, "rope")
    text = report.write(runs, out, baseline="rope", margin=0.02)
    assert "**Verdicts**" in text and "margin of 2 %" in text and "Difference to `rope`" in text
    assert text.index("**Bits per byte**") < text.index("**Verdicts**") < text.index("Expected shapes")
    stored = pd.read_csv(out / "stats.csv", keep_default_na=False, na_values={name: ["NaN"] for name in FLOATS})
    frame = statistics(runs, baseline="rope", margin=0.02)
    assert list(stored.columns) == list(verdicts.COLUMNS) and len(stored) == len(frame) == 14
    assert stored.verdict.tolist() == frame.verdict.tolist() and EXTRAPOLATES in set(stored.verdict)
    pd.testing.assert_series_equal(stored.baseline_low95, frame.baseline_low95, rtol=1e-15)


FLOATS = [name for name, kind in verdicts.COLUMNS.items() if kind in ("float64", "Int64")]


def test_a_baseline_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    finished(tmp_path / "runs")
    with pytest.raises(ValueError, match="'xl' is no arm"):
        report.write(tmp_path / "runs", tmp_path / "out", baseline="xl")
    assert not (tmp_path / "out").exists()


def test_the_command_line_takes_baseline_and_margin(tmp_path, capsys):
    arm(tmp_path / "runs", seeds=(0,))
    assert cli.main(["report", str(tmp_path / "runs"), "--baseline", "rope", "--margin", "0.03"]) == 0
    assert "margin of 3 %" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path / "runs"), "--baseline", "xl"]) == 2
    assert "error: baseline: 'xl' is no arm of these runs" in capsys.readouterr().err


def test_a_baseline_of_one_training_length_is_compared_there_alone(tmp_path):
    arm(tmp_path, seeds=(0,))
    arm(tmp_path, "alibi", seeds=(0,))
    arm(tmp_path, length=16, seeds=(0,), masked=(2.1,))
    frame = statistics(tmp_path, baseline="alibi")
    assert cell(frame, length=16).baseline == "alibi" and cell(frame, length=16, train_length=16).baseline == ""


def test_statistics_keep_the_order_of_the_table(tmp_path):
    for name in ("alibi", "none", "rope"):
        arm(tmp_path, name, seeds=(0,))
        arm(tmp_path, name, seeds=(0,), length=16, masked=(2.1,))
    frame = statistics(tmp_path)
    order = list(dict.fromkeys(zip(frame.train_length, frame.encoding, strict=True)))
    table = tables.table(report.rows(tmp_path))
    assert order == [(length, name) for length, name, _ in table.index]
