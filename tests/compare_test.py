"""Two folders side by side: what is paired, what the configs differ in, and what is refused."""

import math

import numpy as np
import pandas as pd
import pytest
from report_test import finished, plan

from pe_ablation import compare, report, stats

NAMES = ("a", "b", "c", "d", "e")


def scored(root, name="rope", seed=0, *, bits, lengths=(8, 16), names=NAMES, size=100.0, **fields):
    """A run whose documents have `bits` [documents] per byte at every length, plus 1 at longer ones."""
    run = plan(root, name, seed, lengths=lengths, **fields)
    experiment = run.experiment
    for length in lengths:
        each = np.asarray(bits, float) + (length > 8)
        nats = each * math.log(2) * size
        sums = {"nats": nats, "tokens": np.full(len(each), size / 2), "bytes": np.full(len(each), size)}
        place = np.zeros((len(each), length))
        place[:, -1] = 1.0
        arrays = {kind: place * values[:, None] for kind, values in sums.items()}
        cell = {
            "key": f"targets-{length}", "split": "validation", "protocol": "targets", "length": length, "null": "none",
            "status": "ok", "nats": nats.sum() / sums["tokens"].sum(), "perplexity": 2.0, "bits_per_byte": each.mean(),
            "tokens": int(sums["tokens"].sum()), "bytes": int(sums["bytes"].sum()), "documents": len(each),
            "train_length": 8, "settings": experiment.eval.settings("targets", 8),
        }  # fmt: skip
        run.save_cell(cell, arrays | {"names": np.array(names)})
    run.finish({"parameters": 1000})
    return run


@pytest.fixture
def folders(tmp_path):
    return tmp_path / "one", tmp_path / "two"


def written(folders, tmp_path, **options):
    text = compare.write(*folders, tmp_path / "out", **options)
    return text, pd.read_csv(tmp_path / "out" / "compare.csv", keep_default_na=False, na_values=["NaN"])


HARD = np.array([1.0, 2.0, 3.0, 4.0, 5.0])


def test_seeds_and_documents_are_paired(folders, tmp_path):
    """Documents and seeds differ by whole bits, the folders by 0.1 and a little: paired, the interval is narrow."""
    one, two = folders
    noise = {0: [0.0, 0.01, 0.02, -0.01, -0.02], 1: [0.02, 0.0, -0.02, 0.01, -0.01]}
    for seed in (0, 1):
        scored(one, seed=seed, bits=HARD + 3 * seed)
        scored(two, seed=seed, bits=HARD + 3 * seed - 0.1 + noise[seed], overrides={"train.steps": 2000})
    text, found = written(folders, tmp_path)
    assert list(found.columns) == list(compare.COLUMNS) and found.eval_length.tolist() == [8, 16]
    for row in found.itertuples():
        assert (row.status, row.n, row.documents, row.seeds, row.over) == ("ok", 2, 5, "0 1", "seeds and documents")
        assert row.difference == pytest.approx(-0.1) and row.second - row.first == pytest.approx(-0.1)
        assert -0.13 < row.low95 < -0.1 < row.high95 < -0.07
    assert found["first"].tolist() == pytest.approx([4.5, 5.5])
    whole = stats.Sample((0, 1), NAMES, np.stack([HARD, HARD + 3]), np.ones((2, 5)))
    less = stats.Sample((0, 1), NAMES, whole.top - 0.1 + np.array([noise[0], noise[1]]), np.ones((2, 5)))
    wanted = stats.difference(less, whole)
    assert (found.low95[0], found.high95[0]) == pytest.approx((wanted.low, wanted.high))
    assert f"-0.100 [{wanted.low:+.3f}, {wanted.high:+.3f}]" in text
    assert "two less" in text and "below 0: the second is better" in text and "5 paired documents" in text


def test_the_second_less_the_first(folders, tmp_path):
    scored(folders[0], bits=HARD)
    scored(folders[1], bits=HARD + 0.5, overrides={"train.steps": 2000})
    assert (written(folders, tmp_path)[1].difference > 0).all()
    assert (written(folders[::-1], tmp_path)[1].difference < 0).all()


def test_config_differences_are_listed_with_both_values(folders, tmp_path):
    one, two = folders
    for name in ("rope", "t5"):
        scored(one, name, bits=HARD)
        extra = {"encoding.options.max_distance": 64, "label": "t5"} if name == "t5" else {}
        scored(two, name, bits=HARD, digest="d1", overrides={"train.steps": 2000, **extra})
    text, _ = written(folders, tmp_path)
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.split("Configs")[1].splitlines()]
    assert ["train.steps", "1000", "2000", "all"] in rows and ["data digest", "d0", "d1", "all"] in rows
    assert ["encoding.options.max_distance", "-", "64", "t5 at 8"] in rows
    assert sum(len(row) == 4 for row in rows) == 2 + 3


def test_the_same_experiments_differ_in_nothing(folders, tmp_path):
    for folder in folders:
        scored(folder, bits=HARD)
    text, found = written(folders, tmp_path)
    assert "No field differs between matched points" in text and (found.difference == 0).all()


def test_what_points_of_a_folder_differ_in_among_themselves_is_said(folders, tmp_path):
    for folder in folders:
        scored(folder, "rope", bits=HARD)
    scored(folders[1], "alibi", bits=HARD, overrides={"train.steps": 2000})
    text, _ = written(folders, tmp_path)
    assert f"Within {folders[1]}, points also differ in: train.steps (" in text
    assert f"Within {folders[0]}" not in text and f"Only in {folders[1]}: alibi at 8" in text


def test_points_and_seeds_of_one_folder_alone_are_listed(folders, tmp_path):
    one, two = folders
    for seed in (0, 1):
        scored(one, "rope", seed, bits=HARD)
        scored(two, "rope", seed + 1, bits=HARD)
    scored(one, "none", bits=HARD)
    scored(two, "alibi", bits=HARD)
    text, found = written(folders, tmp_path)
    assert f"Only in {one}: none at 8" in text and f"Only in {two}: alibi at 8" in text
    assert "Seeds of one folder alone, left out: 0 2 (rope at 8)" in text
    assert (
        set(found.arm) == {"rope"} and set(found.seeds.astype(str)) == {"1"} and (found.over == "documents only").all()
    )


def test_points_without_a_common_seed_have_no_difference(folders, tmp_path):
    scored(folders[0], bits=HARD)
    scored(folders[1], seed=1, bits=HARD)
    text, found = written(folders, tmp_path)
    assert set(found.status) == {"no seed in common"} and found.difference.isna().all() and "no seed in common" in text


def test_a_cell_that_is_not_whole_on_a_side_has_its_status(folders, tmp_path):
    scored(folders[0], bits=HARD)
    scored(folders[0], seed=1, bits=HARD)
    scored(folders[1], bits=HARD)
    plan(folders[1], seed=1, lengths=(8, 16)).finish({"status": "diverged"})
    _, found = written(folders, tmp_path)
    assert set(found.status) == {"ok | diverged"} and found.difference.isna().all()


def test_other_documents_are_refused_with_both(folders, tmp_path):
    scored(folders[0], bits=HARD)
    scored(folders[1], bits=HARD, names=("a", "b", "c", "x", "y"), overrides={"train.steps": 2000})
    with pytest.raises(
        ValueError, match=r"rope at training length 8, evaluation length 8: other documents.*"
    ) as refused:
        compare.write(*folders, tmp_path / "out")
    assert f"{folders[0]} (2) d, e" in str(refused.value) and f"{folders[1]} (2) x, y" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_documents_of_one_name_and_another_size_are_refused(folders, tmp_path):
    scored(folders[0], bits=HARD)
    scored(folders[1], bits=HARD, size=90.0)
    with pytest.raises(ValueError, match=r"a was scored over other amounts: 100 in .*one, 90 in .*two"):
        compare.write(*folders, tmp_path / "out")


def test_folders_scored_in_other_ways_are_refused_with_both(folders, tmp_path):
    scored(folders[0], bits=HARD)
    scored(folders[1], bits=HARD, lengths=(8, 32))
    with pytest.raises(ValueError, match=r"not scored alike.*\"longest\": 16.*\"longest\": 32"):
        compare.write(*folders, tmp_path / "out")


def test_folders_without_a_common_point_are_refused_with_both(folders, tmp_path):
    scored(folders[0], bits=HARD)
    scored(folders[1], "alibi", bits=HARD)
    with pytest.raises(ValueError, match=r"no arm and training length is in both: .*rope at 8.*alibi at 8"):
        compare.write(*folders, tmp_path / "out")


def test_a_metric_without_sums_is_refused(folders, tmp_path):
    scored(folders[0], bits=HARD)
    with pytest.raises(ValueError, match="metric: 'perplexity' has no sums"):
        compare.write(folders[0], folders[0], tmp_path / "out", metric="perplexity")


def test_nats_are_per_token(folders, tmp_path):
    scored(folders[0], bits=HARD)
    scored(folders[1], bits=HARD + 0.5, overrides={"train.steps": 2000})
    _, found = written(folders, tmp_path, metric="nats")
    assert found.difference.tolist() == pytest.approx([0.5 * math.log(2) * 2] * 2)  # 2 bytes a token


def test_chosen_values_are_compared(folders, tmp_path):
    for folder, shift in zip(folders, (0.0, 0.25), strict=True):
        for rate, bits in ((1e-3, 2.0), (3e-3, 1.0)):
            scored(folder, seed=9, bits=HARD + bits, overrides={"train.learning_rate": rate})
        scored(folder, bits=HARD + shift, overrides={"train.learning_rate": 3e-3})
    _, found = written(folders, tmp_path, field="train.learning_rate")
    assert found.arm.tolist() == ["rope", "rope"] and found.difference.tolist() == pytest.approx([0.25] * 2)


def test_split_and_protocol_are_narrowed_as_in_a_report(folders, tmp_path):
    finished(folders[0])
    with pytest.raises(ValueError, match="no rows of split 'test'"):
        compare.write(folders[0], folders[0], tmp_path / "out", split="test")
    assert report.shown(report.rows(folders[0]), "validation", "targets").protocol.eq("targets").all()
