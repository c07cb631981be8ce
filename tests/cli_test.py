import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest

import pe_ablation
from pe_ablation import cli, config, encodings, evaluate, launch, trained, tuning
from pe_ablation.record import Run

SOURCE = """
from ml_collections import ConfigDict

def get_config(arg="full"):
    if arg not in ("full", "quick"):
        raise ValueError(f"argument {arg!r}; allowed: full, quick")
    return ConfigDict({"encoding": {"name": "rope"}, "train": {"steps": 200}})

def sweep(arg="full"):
    for name in ("none", "rope"):
        yield {"encoding.name": name}

def sweep_seeds(arg="full"):
    for seed in range(2):
        yield {"seed": seed}
"""

HELP = """
import sys
from pe_ablation import cli
try:
    cli.main(["launch", "--help"])
finally:
    print("jax" in sys.modules)
"""


LINES = """
from pe_ablation import cli
raise SystemExit(cli._print(range(10**5)))
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A config file in a folder of its own, which is where commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_leave_accelerators", lambda: None)
    (tmp_path / "study.py").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def launched(monkeypatch):
    """What `launch` was called with; instead of training it plans."""
    calls = []

    def pretend(points, workdir, source, **_):
        calls.append((points, str(workdir), source))
        launch.plan(points, workdir, source, {})
        return 1

    monkeypatch.setattr(launch, "launch", pretend)
    return calls


def refused(capsys, *argv):
    """The one line on stderr of a command that is refused with exit code 2."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_launch_passes_overrides_of_both_forms_on(study, launched, capsys):
    fields = ("--config.train.learning_rate=1e-4", "--config.seed", "3", "--config.model.mlp_dim=None")
    assert cli.main(["launch", fields[0], "--config", "study.py:quick", *fields[1:]]) == 1
    [(points, workdir, source)] = launched
    assert [point.arm for point in points] == ["none", "rope"]
    assert (workdir, source) == ("runs/study-quick", "study.py:quick")
    for point in points:
        [experiment] = point.experiments
        assert experiment.train.learning_rate == 1e-4 and experiment.seed == 3 and experiment.model.mlp_dim is None
    out = capsys.readouterr().out
    assert "2 runs: 0 done, 0 running, 0 failed, 2 missing" in out
    assert out.endswith("\npe-ablation report runs/study-quick\n")


def test_launch_takes_a_named_sweep_and_a_work_directory(study, launched):
    cli.main(["launch", "--config=study.py", "--sweep", "seeds", "--workdir", "there"])
    [(points, workdir, _)] = launched
    assert [each.seed for each in points[0].experiments] == [0, 1] and workdir == "there"


def test_launch_replaces_an_axis_and_keeps_some_points_and_seeds(study, launched):
    arguments = ("--sweep", "default,seeds", "--sweep.seed=4,5", "--sweep.encoding.name", "t5,alibi,none")
    assert cli.main(["launch", "--config", "study.py", *arguments, "--only", "seed=5", "--only", "arm=?5"]) == 1
    [(points, _, _)] = launched
    assert [(point.arm, point.seeds) for point in points] == [("t5", "5")]


def test_a_list_writes_nothing_and_agrees_with_what_would_be_launched(study, launched, capsys):
    what = ("--config", "study.py", "--sweep", "default,seeds", "--sweep.seed=1,0", "--config.train.steps=300")
    assert cli.main(["launch", *what, "--list"]) == 0 and launched == []
    lines = capsys.readouterr().out.splitlines()
    assert [path.name for path in study.iterdir() if path.suffix != ".py" and path.name != "__pycache__"] == []
    cli.main(["launch", *what])
    [(points, _, _)] = launched
    assert lines == [f"{index}  {point.directory_name}  seeds 1,0" for index, point in enumerate(points)]
    assert [point.experiments[0].train.steps for point in points] == [300, 300]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "nope.py"), "nope.py: no such config file"),
        (("--config", "study.py:fast"), "allowed: full, quick"),
        (("--config", "study.py", "--sweep", "seed"), "did you mean seeds?"),
        (("--config", "study.py", "--config.encoding.name=rope"), "the sweep 'default' of study.py sets encoding.name"),
        (("--config", "study.py", "--config.train.stepz=3"), "did you mean steps?"),
        (("--config", "study.py", "--config.encoding.name=rope"), "replaced by --sweep.encoding.name="),
        (("--config", "study.py", "--sweep.seed=3"), "seed: not swept"),
        (("--config", "study.py", "--sweep.eval.lengths=64,128"), "ambiguous"),
        (("--config", "study.py", "--sweep", "seeds,default,seeds"), "sweep 'seeds' and sweep 'seeds' both set seed"),
        (("--config", "study.py", "--only", "arm=rop"), "matches nothing; there are none, rope"),
        (("--config", "study.py", "--config.model=tiny"), "allowed: nano, micro, gpt2_small"),
        (("--config", "study.py", "--config.train.steps=12.5"), "train.steps: expected int"),
        (("--config", "study.py", "--config.train.steps", "--workdir"), "train.steps: expected int, got '--workdir'"),
    ],
)
def test_launch_refuses_in_one_line(study, capsys, arguments, message):
    assert message in refused(capsys, "launch", *arguments)
    assert [path.name for path in study.iterdir() if path.suffix != ".py" and path.name != "__pycache__"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("launch",),
        ("run",),
        ("launch", "--config", "study.py", "--stepz", "3"),
        ("launch", "--config", "study.py", "--conf.train.steps=3"),
        ("launch", "--config", "study.py", "--config.train.steps"),
        ("launch", "--config", "study.py", "--config.seed=1", "--config.seed=2"),
        ("status", "runs", "--config.seed=1"),
        ("run", "--config", "study.py", "--sweep.seed=1"),
        ("launch", "--config", "study.py", "--sweep.encoding.name"),
        ("launch", "--config", "study.py", "--list", "--dry_run"),
        ("launch", "--config", "study.py", "--dry"),
        ("fly",),
    ],
)
def test_arguments_that_do_not_exist_are_refused(study, arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2


def test_a_fault_inside_a_library_is_not_hidden_as_a_refusal(study, monkeypatch):
    monkeypatch.setattr(config, "read", lambda *_: pd.Timedelta("no duration"))
    with pytest.raises(ValueError, match="unit abbreviation"):
        cli.main(["launch", "--config", "study.py"])


def test_help_and_typing_errors_do_not_wait_for_jax():
    ran = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert "--config FILE[:ARG]" in ran.stdout and ran.stdout.endswith("False\n")


def test_points_are_packed_on_request(study, launched, capsys):
    swept = "def sweep_rates(arg='full'):\n    yield from ({'train.learning_rate': each} for each in (1e-3, 2e-3))\n"
    (study / "study.py").write_text(f"{SOURCE}\n{swept}")
    what = ("--config", "study.py", "--sweep", "rates,default")
    assert cli.main(["launch", *what, "--pack", "--list"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[1].split("-")[0]) for line in lines] == [
        ("0", "none"), ("0", "none"), ("1", "rope"), ("1", "rope"),
    ]  # fmt: skip
    assert "--index 2: 2 packs are selected, 0 to 1" in refused(capsys, "launch", *what, "--pack", "--index", "2")
    cli.main(["launch", *what, "--pack", "--index", "1"])
    [(points, _, _)] = launched
    assert [point.directory_name for point in points] == [line[1] for line in lines[2:]]


def test_who_reads_the_first_lines_only_ends_nothing_with_an_error():
    with subprocess.Popen([sys.executable, "-c", LINES], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as printing:
        assert printing.stdout is not None and printing.stderr is not None
        assert printing.stdout.readline() == b"0\n"
        printing.stdout.close()
        assert printing.stderr.read() == b"" and printing.wait() == 0


def test_a_dry_run_writes_nothing(study, monkeypatch, capsys):
    data = SimpleNamespace(tokenizer=lambda _: SimpleNamespace(vocab_size=258))
    monkeypatch.setattr(pe_ablation, "data", data, raising=False)
    before = set(study.rglob("*"))
    assert cli.main(["launch", "--config", "study.py", "--dry_run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 points, 2 runs, 1,638,400 tokens; estimated ")
    assert cli.main(["run", "--config", "study.py", "--dry_run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 points, 1 runs, 819,200 tokens; estimated ")
    assert {path for path in study.rglob("*") if "__pycache__" not in path.parts} == before


def test_run_trains_the_config_alone_in_this_process(study, monkeypatch, capsys):
    trained = []

    def fit_pack(experiments, run_dirs):
        trained.extend(experiments)
        return [{"status": "ok"} for _ in experiments]

    monkeypatch.setattr(launch, "check", lambda points: {})
    monkeypatch.setattr(pe_ablation, "train", SimpleNamespace(fit_pack=fit_pack), raising=False)
    monkeypatch.setattr(pe_ablation, "evaluate", SimpleNamespace(evaluate_run=lambda run_dir: None), raising=False)
    for _ in range(2):
        assert cli.main(["run", "--config", "study.py:quick", "--config.seed=5"]) == 0
        assert "seed_5" in capsys.readouterr().out
    assert [(each.arm, each.seed) for each in trained] == [("rope", 5)]


def test_ctrl_c_in_run_is_exit_code_130(study, monkeypatch, capsys):
    def fit_pack(experiments, run_dirs):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "check", lambda points: {})
    monkeypatch.setattr(pe_ablation, "train", SimpleNamespace(fit_pack=fit_pack), raising=False)
    monkeypatch.setattr(pe_ablation, "evaluate", SimpleNamespace(), raising=False)
    assert cli.main(["run", "--config", "study.py", "--workdir", "w"]) == 130
    assert cli.main(["status", "w"]) == 0
    assert "failed   " in (out := capsys.readouterr().out) and "interrupted" in out


def planned(workdir, **results):
    """Runs of one point by seed name, with their results; None: never finished."""
    for name, result in results.items():
        run = Run.plan(workdir / "point" / name, config.read({"seed": int(name[-1])}), None)
        if result is not None:
            run.finish(result)


def test_status_lists_every_run_and_counts(study, capsys):
    planned(study / "w", seed_0={"status": "ok"}, seed_1=None, seed_2=None)
    Run(study / "w/point/seed_1").fail("Traceback\nValueError: why\n")
    assert cli.main(["status", "w"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "done     point/seed_0",
        "failed   point/seed_1  ValueError: why",
        "missing  point/seed_2",
        "3 runs: 1 done, 0 running, 1 failed, 1 missing",
    ]
    assert "nowhere: no such folder" in refused(capsys, "status", "nowhere")


def test_evaluate_scores_finished_runs_where_it_is_told(study, monkeypatch, capsys):
    planned(study / "w", seed_0={"status": "ok"}, seed_1=None)
    checked, scored = [], []

    def score(run_dir, overrides):
        if run_dir.name == "seed_1":
            raise trained.NotTrained("seed_1: has no checkpoint to evaluate")
        scored.append((run_dir.name, overrides))
        columns = ("encoding", "train_length", "eval_length", "seed", "protocol", "null", "bits_per_byte", "status")
        return pd.DataFrame([dict.fromkeys(columns, "x")])

    monkeypatch.setattr(evaluate, "check", lambda experiment: checked.append(experiment.eval.lengths))
    monkeypatch.setattr(evaluate, "score", score)
    assert cli.main(["evaluate", "w", "--lengths", "64,512", "--split", "test", "--last_k", "8"]) == 1
    assert scored == [("seed_0", {"eval.lengths": "64,512", "eval.split": "test", "eval.last_k": "8"})]
    assert set(checked) == {(64, 512)} and "no checkpoint to evaluate; left out" in capsys.readouterr().err
    assert "eval.lengths[0]: 0" in refused(capsys, "evaluate", "w/point/seed_0", "--lengths", "0")
    assert "did you mean blocks?" in refused(capsys, "evaluate", "w/point/seed_0", "--protocols", "block")


def test_report_prints_what_it_wrote(monkeypatch, capsys):
    asked = []

    def write(runs_dir, out_dir, **options):
        asked.append((str(runs_dir), str(out_dir), options))
        return "| table |"

    monkeypatch.setattr(pe_ablation, "report", SimpleNamespace(write=write), raising=False)
    assert cli.main(["report", "w"]) == cli.main(["report", "w", "--out", "there"]) == 0
    assert asked == [("w", "w/report", {}), ("w", "there", {})] and capsys.readouterr().out == "| table |\n" * 2
    del asked[:]
    narrow = ["--split", "test", "--metric", "nats", "--protocol", "blocks", "--select", "lr", "--select_seed", "7"]
    assert cli.main(["report", "w", *narrow]) == 0
    assert asked == [
        ("w", "w/report", {
            "split": "test", "metric": "nats", "protocol": "blocks", "field": "train.learning_rate", "seed": 7,
        })
    ]  # fmt: skip


def test_report_compares_two_folders_and_tables_one(monkeypatch, capsys):
    asked = []
    compare = SimpleNamespace(write=lambda *args, **options: asked.append((*map(str, args), options)) or "compared")
    monkeypatch.setattr(pe_ablation, "compare", compare, raising=False)
    assert cli.main(["report", "a", "b", "--compare", "--metric", "nats"]) == 0
    assert asked == [("a", "b", "a/report", {"metric": "nats"})] and capsys.readouterr().out == "compared\n"
    assert "RUNS: 1 given; 2 with --compare" in refused(capsys, "report", "a", "--compare")
    assert "RUNS: 2 given; 1 without --compare" in refused(capsys, "report", "a", "b")


def test_a_seed_to_choose_by_is_a_number_and_goes_with_a_field(study, capsys):
    assert "select_seed: goes with --select" in refused(capsys, "report", "w", "--select_seed", "1")
    for command in (["report", "w"], ["launch", "--config", "study.py"]):
        assert "select_seed: expected int, got 'x'" in refused(capsys, *command, "--select", "lr", "--select_seed", "x")


def test_launch_with_a_choice_trains_in_two_stages(study, monkeypatch, capsys):
    asked = []

    def pretend(points, workdir, source, **options):
        asked.append((len(points), options))
        launch.plan(points, workdir, source, {})
        return 0

    monkeypatch.setattr(tuning, "launch_selected", pretend)
    assert cli.main(["launch", "--config", "study.py", "--select", "lr"]) == 0
    assert asked == [(2, {"field": "train.learning_rate", "seed": None, "workers": 1, "force": False, "pack": False})]
    assert capsys.readouterr().out.endswith("\npe-ablation report runs/study --select lr\n")
    assert "single value of train.learning_rate" in refused(
        capsys, "launch", "--config", "study.py", "--select", "lr", "--dry_run"
    )


def test_encodings_lists_every_one_with_its_card(capsys):
    assert cli.main(["encodings"]) == 0
    out = capsys.readouterr().out
    for name in encodings.names():
        about = encodings.find(name).about
        card = out.partition(f"{name}\n")[2].partition("\n  beyond")[0]
        assert about.formula in card and about.source in card and about.parameters in card and about.beyond in out
