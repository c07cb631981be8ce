"""Two-stage launches: which points run, on which seeds, scored how; nothing is trained."""

import json
import sys

import pytest

from pe_ablation import config, launch, record, tuning
from pe_ablation.config import ConfigError
from pe_ablation.record import Run
from pe_ablation.sweep import Point

RATES = (1e-3, 3e-3, 1e-2)

# Started instead of training: writes the cell at the training length that scores.json has for an arm and rate.
# It is plain Python, without the package, so that a dozen of them start in a second.
CHILD = """
import json, pathlib, sys

workdir = pathlib.Path(sys.argv[1])
scores = json.loads((workdir / "scores.json").read_text())
for run in map(pathlib.Path, sys.argv[2:]):
    config = json.loads((run / "config.json").read_text())
    asked = config["experiment"]
    rate, length, plan = asked["train"]["learning_rate"], asked["train"]["length"], asked["eval"]
    with (workdir / "started.jsonl").open("a") as file:
        line = [config["arm"], rate, config["seed"], *(plan[name] for name in ("lengths", "protocols", "nulls"))]
        file.write(json.dumps(line) + "\\n")
    bits = scores.get(f"{config['arm']} {rate}")
    if bits is None:
        continue
    settings = {name: plan[name] for name in ("max_documents", "last_k", "spacing", "max_windows")}
    cell = {
        "key": "cell", "split": plan["split"], "protocol": "targets", "length": length, "null": "none", "status": "ok",
        "nats": 1.0, "perplexity": 1.0, "bits_per_byte": bits, "tokens": 1, "bytes": 1, "documents": 1,
        "train_length": length, "settings": settings | {"longest": max(length, *plan["lengths"], 0)},
    }
    (run / "evaluation").mkdir(exist_ok=True)
    (run / "evaluation" / "cell.json").write_text(json.dumps(cell))
    (run / "result.json").write_text(json.dumps({"status": "ok", "eval": plan}))
    attempt = max((run / "attempts").glob("*.json"), key=lambda path: int(path.stem))
    end = {"state": "done", "reason": "", "time": 0}
    attempt.write_text(json.dumps(json.loads(attempt.read_text()) | {"end": end}))
"""
BEST = {"rope": 3e-3, "alibi": 1e-3}
SCORES = {f"{arm} {rate}": 2.0 + abs(rate - best) for arm, best in BEST.items() for rate in RATES}


def point(arm, rate, seeds=(0, 1), length=64):
    tree = {
        "encoding": {"name": arm}, "train": {"learning_rate": rate, "length": length},
        "eval": {"lengths": [64, 128], "protocols": ["blocks", "targets"]},
    }  # fmt: skip
    return Point(tuple(config.read(tree, {"seed": seed}) for seed in seeds))


@pytest.fixture
def sweep():
    return [point(arm, rate) for arm in ("rope", "alibi") for rate in RATES]


class Study:
    def __init__(self, workdir):
        self.workdir = workdir
        (workdir / "child.py").write_text(CHILD)
        self.scores = SCORES

    def launch(self, points, **fields):
        (self.workdir / "scores.json").write_text(json.dumps(self.scores))
        (self.workdir / "started.jsonl").unlink(missing_ok=True)
        command = (sys.executable, str(self.workdir / "child.py"), str(self.workdir))
        return tuning.launch_selected(
            points, self.workdir, "study.py", **{"field": "train.learning_rate", "command": command, **fields}
        )

    def started(self):
        path = self.workdir / "started.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "check", lambda points: {})
    return Study(tmp_path)


def test_a_grid_on_its_own_seed_then_the_sweep_at_the_best(study, sweep, capsys):
    assert study.launch(sweep) == 0
    started = study.started()
    alone = [[64], ["targets"], []]
    assert started[:6] == [[arm, rate, 100, *alone] for arm in ("rope", "alibi") for rate in RATES]
    full = [[64, 128], ["blocks", "targets"], ["window_mask", "window_recompute"]]
    assert started[6:] == [[arm, BEST[arm], seed, *full] for arm in ("rope", "alibi") for seed in (0, 1)]
    out = capsys.readouterr().out
    assert "from seed 100, which no table shows" in out and "alibi at 64 tokens: 0.001 is the lowest value" in out
    assert study.launch(sweep) == 0 and study.started() == []
    more = [point(each.arm, each.experiments[0].train.learning_rate, (0, 1, 2)) for each in sweep]
    assert study.launch(more) == 0
    assert [each[:3] for each in study.started()] == [["rope", 3e-3, 2], ["alibi", 1e-3, 2]]


def test_a_longer_grid_trains_the_new_value_alone_and_chooses_anew(study, sweep):
    assert study.launch(sweep[:3], seed=7) == 0
    study.scores = {**SCORES, "rope 0.03": 1.0}
    assert study.launch([*sweep[:3], point("rope", 3e-2)], seed=7) == 0
    assert [each[:3] for each in study.started()] == [["rope", 3e-2, 7], ["rope", 3e-2, 0], ["rope", 3e-2, 1]]


def test_an_arm_without_a_number_stops_no_other(study, sweep, capsys):
    study.scores = {name: bits for name, bits in SCORES.items() if "alibi" not in name and name != "rope 0.001"}
    assert study.launch(sweep) == 1
    assert [each[:3] for each in study.started()[6:]] == [["rope", 3e-3, 0], ["rope", 3e-3, 1]]
    assert "alibi at 64 tokens: seed 100 scored no value" in capsys.readouterr().out
    study.scores = {}
    assert study.launch([point("t5", rate) for rate in RATES]) == 1
    assert all(seed == 100 for _, _, seed, *_ in study.started())


def test_runs_of_other_sweeps_in_the_folder_have_no_part_in_it(study, sweep):
    study.scores = {**SCORES, "rope 0.02": 0.5}
    assert study.launch([point("rope", rate) for rate in (2e-2, 1e-3)]) == 0
    assert study.launch(sweep[:3]) == 0
    assert [each[:3] for each in study.started()[2:]] == [["rope", 3e-3, 0], ["rope", 3e-3, 1]]


def test_an_interrupted_grid_is_not_chosen_from(study, sweep, monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "launch", lambda points, *_, **options: calls.append(len(points)) or 130)
    assert study.launch(sweep) == 130 and calls == [6]


def test_options_go_to_both_launches(study, sweep, monkeypatch):
    seen, real = [], launch.launch

    def spy(points, workdir, source, *, workers, **options):
        seen.append((workers, options["pack"]))
        return real(points, workdir, source, **options)

    monkeypatch.setattr(launch, "launch", spy)
    assert study.launch(sweep, workers=2, pack=True) == 0 and seen == [(2, True)] * 2


def test_a_recorded_run_keeps_its_evaluation_where_that_has_the_number(study, sweep):
    assert study.launch(sweep[:3]) == 0
    path = study.workdir / sweep[0].directory_name / "seed_100"
    file = json.loads((path / "config.json").read_text())
    file["experiment"]["eval"]["nulls"] = ["window_mask"]
    (path / "config.json").write_text(record.dumps(file))
    [kept] = tuning._as_recorded(tuning.grid_points(sweep[:3], "train.learning_rate")[0], study.workdir).experiments
    assert kept.eval.nulls == ("window_mask",)
    file["experiment"]["eval"]["lengths"] = [64, 512]  # its 64 is scored on other documents
    (path / "config.json").write_text(record.dumps(file))
    [other] = tuning._as_recorded(tuning.grid_points(sweep[:3], "train.learning_rate")[0], study.workdir).experiments
    assert other.eval.lengths == (64,) and other.eval.nulls == ()


def test_a_sweep_without_the_grid_is_refused(sweep, tmp_path):
    with pytest.raises(ConfigError, match=r"rope at 64 tokens has a single value of train.learning_rate; sweep it"):
        tuning.launch_selected([*sweep[3:], point("rope", 1e-3)], tmp_path, None, field="train.learning_rate")
    with pytest.raises(ConfigError, match=r"no such field: train.learning_rat \(did you mean train.learning_rate\?\)"):
        tuning.grid_points(sweep, "train.learning_rat")
    with pytest.raises(ConfigError, match=r"single value of train\.weight_decay"):
        tuning.grid_points(sweep, "train.weight_decay")
    with pytest.raises(ConfigError, match=r"select_seed: 1 is one of the sweep's seeds \(0, 1\)"):
        tuning.grid_points(sweep, "train.learning_rate", 1)
    assert not list(tmp_path.iterdir())


def test_each_training_length_has_a_grid_of_its_own(sweep):
    lengths = [*sweep, *(point("rope", rate, length=32) for rate in RATES)]
    grid = tuning.grid_points(lengths, "train.learning_rate")
    assert [each.experiments[0].eval.lengths for each in grid] == [(64,)] * 6 + [(32,)] * 3
    with pytest.raises(ConfigError, match="rope at 32 tokens has a single value"):
        tuning.grid_points(lengths[:7], "train.learning_rate")


def test_a_dry_run_says_what_the_grid_trains_and_what_follows(sweep, monkeypatch):
    monkeypatch.setattr(
        launch, "dry_run", lambda points, _, **options: (f"{each.arm} {each.experiments[0].seed}" for each in points)
    )
    lines = list(tuning.dry_run(sweep, field="train.learning_rate", seed=9))
    assert lines == ["rope 9"] * 3 + ["alibi 9"] * 3 + ["then the best train.learning_rate of each: 2 points, 4 runs"]


def test_the_test_split_is_not_for_launching(tmp_path):
    asked = Point((config.read({"eval": {"split": "test"}}),))
    with pytest.raises(ConfigError, match=r"eval.split: .*pe-ablation evaluate RUNS --split test"):
        launch.launch([asked], tmp_path, None)
    assert not list(tmp_path.iterdir()) and not Run(tmp_path / "x").path.exists()
