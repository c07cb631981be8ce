import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import pe_ablation
from pe_ablation import config, launch, record
from pe_ablation.record import RecordError, Run
from pe_ablation.sweep import Point

ARMS = ("none", "rope", "alibi", "t5")

# Started instead of training: an arm does what behaviour.json says, and logs which arms have a result by then.
CHILD = """
import json, os, pathlib, signal, sys, time, types
import pe_ablation
from pe_ablation import launch, stopping

workdir = pathlib.Path(sys.argv[1])

def fit_seeds(experiments, run_dirs):
    arm = experiments[0].arm
    done = sorted(path.parent.parent.name.split("-")[0] for path in workdir.glob("*/*/result.json"))
    with (workdir / "started.jsonl").open("a") as file:
        file.write(json.dumps([arm, [each.seed for each in experiments], done]) + "\\n")
    behaviour = json.loads((workdir / "behaviour.json").read_text()).get(arm)
    if behaviour == "raise":
        raise RuntimeError(f"no luck with {arm}")
    if behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "exit":
        os._exit(0)
    if behaviour == "wait":
        (workdir / "pid").write_text(str(os.getpid()))
        for _ in range(6000):
            stopping.check("waited")
            time.sleep(0.01)
    return [{"status": "ok", "steps": 1} for _ in experiments]
pe_ablation.train = types.SimpleNamespace(fit_seeds=fit_seeds)
pe_ablation.evaluate = types.SimpleNamespace(evaluate_run=lambda run_dir: None)
sys.exit(launch.child(sys.argv[2:]))
"""


def point(arm, seeds=(0,), **fields):
    return Point(tuple(config.read({"encoding": {"name": arm}, "seed": seed, **fields}) for seed in seeds))


class Grid:
    """Four points in a work directory, launched with stand-ins for training and scoring."""

    def __init__(self, workdir):
        self.workdir = workdir
        self.child = workdir / "child.py"
        self.child.write_text(CHILD)
        self.points = [point(arm) for arm in ARMS]
        self.behave({})

    @property
    def command(self):
        return (sys.executable, str(self.child), str(self.workdir))

    def behave(self, behaviour):
        (self.workdir / "behaviour.json").write_text(json.dumps(behaviour))

    def launch(self):
        (self.workdir / "started.jsonl").unlink(missing_ok=True)
        return launch.launch(self.points, self.workdir, "configs/grid.py", command=self.command)

    def started(self):
        path = self.workdir / "started.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def run(self, arm, seed=0):
        [found] = [each for each in self.points if each.arm == arm]
        return Run(self.workdir / found.directory_name / f"seed_{seed}")

    def states(self):
        return {arm: self.run(arm).status()[0] for arm in ARMS}


@pytest.fixture
def grid(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "check", lambda points: {})
    return Grid(tmp_path)


def eventually(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.05)


def test_a_grid_where_one_run_raises_and_one_is_killed(grid, capsys):
    grid.behave({"rope": "raise", "alibi": "kill"})
    assert grid.launch() == 1
    # Every run was planned before the first started; results are on disk as soon as their point ends.
    assert [(arm, done) for arm, _, done in grid.started()] == [
        ("none", []), ("rope", ["none"]), ("alibi", ["none"]), ("t5", ["none"]),
    ]  # fmt: skip
    assert grid.states() == {"none": "done", "rope": "failed", "alibi": "failed", "t5": "done"}
    assert "RuntimeError: no luck with rope" in grid.run("rope").error()
    assert grid.run("rope").error().startswith("Traceback")
    assert grid.run("alibi").error() == "killed by signal 9 (SIGKILL, possibly out of memory)"
    listing = "\n".join(launch.status(grid.workdir))
    assert "4 runs: 2 done, 0 running, 2 failed, 0 missing" in listing
    assert f"{grid.points[1].directory_name}/seed_0  RuntimeError: no luck with rope" in listing

    grid.behave({})
    assert grid.launch() == 0
    assert [arm for arm, _, _ in grid.started()] == ["rope", "alibi"]
    assert set(grid.states().values()) == {"done"} and grid.run("rope").error() == ""

    capsys.readouterr()
    assert grid.launch() == 0 and grid.started() == []
    assert capsys.readouterr().out.count("done before") == 4
    result = grid.run("t5").path / "result.json"
    result.write_bytes(result.read_bytes()[:-5])
    plans = launch.plan(grid.points, grid.workdir, None, {})
    assert [[run.path for run in each.open_runs] for each in plans] == [[], [], [], [result.parent]]


def test_a_process_that_ends_without_a_word_is_a_failure(grid):
    grid.points = [point("none")]
    grid.behave({"none": "exit"})
    assert grid.launch() == 1
    assert grid.run("none").status() == ("failed", "the process ended with exit code 0 and no result")


def test_a_command_that_cannot_even_start_is_a_failure_of_each(grid):
    grid.child.write_text("raise SystemExit(3)")
    assert grid.launch() == 1
    assert {grid.run(arm).error() for arm in ARMS} == {"the process ended with exit code 3 and no result"}


def test_a_run_that_another_process_trains_is_left_to_it(grid, capsys):
    grid.points = grid.points[:2]
    launch.plan(grid.points, grid.workdir, None, {})
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        owner = record._this_process() | {"pid": other.pid, "started": record._start_of(other.pid)}
        (grid.run("none").path / "running.json").write_text(record.dumps(owner))
        assert grid.launch() == 1
        assert [arm for arm, _, _ in grid.started()] == ["rope"]
        assert f"left to process {other.pid}" in capsys.readouterr().out
        assert grid.run("none").status()[0] == "running"


LAUNCHER = """
import sys
from pe_ablation import config, launch
from pe_ablation.sweep import Point

launch.check = lambda points: {}
points = [Point((config.read({"encoding": {"name": arm}}),)) for arm in ("none", "rope", "alibi", "t5")]
sys.exit(launch.launch(points, sys.argv[1], None, command=sys.argv[2:]))
"""


@pytest.fixture
def waiting(grid):
    """A launcher in a process of its own whose second point waits: (grid, launcher, pid of the point's process)."""
    grid.behave({"rope": "wait"})
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(grid.workdir), *grid.command])
    eventually(lambda: (grid.workdir / "pid").exists() and (grid.workdir / "pid").read_text())
    yield grid, launcher, int((grid.workdir / "pid").read_text())
    launcher.kill()
    launcher.wait()


def test_ctrl_c_stops_the_child_and_leaves_records_whole(waiting):
    grid, launcher, pid = waiting
    assert grid.run("rope").status() == ("running", f"process {pid}")
    os.kill(pid, signal.SIGINT)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) == 130
    assert record._start_of(pid) is None
    assert grid.states() == {"none": "done", "rope": "failed", "alibi": "missing", "t5": "missing"}
    assert grid.run("rope").status() == ("failed", "interrupted")


def test_a_killed_launcher_takes_its_child_along(waiting):
    grid, launcher, pid = waiting
    launcher.kill()
    eventually(lambda: record._start_of(pid) is None)
    state, reason = grid.run("rope").status()
    assert (state, reason) == ("failed", f"process {pid} ended without a result")


# Before anything starts


def test_data_and_lengths_are_checked_before_a_directory_exists(tmp_path, monkeypatch):
    loaded, scored = [], []

    def load(data, split):
        loaded.append((data.source, split))
        if data.source == "text" and split == "validation":
            raise FileNotFoundError("data.text.validation: no file matches")
        return SimpleNamespace(digest=f"digest of {data.source}")

    monkeypatch.setattr(pe_ablation, "data", SimpleNamespace(load=load), raising=False)
    evaluate = SimpleNamespace(check=lambda experiment: scored.append(experiment.arm))
    monkeypatch.setattr(pe_ablation, "evaluate", evaluate, raising=False)
    points = [point("none", seeds=(0, 1)), point("rope"), point("t5", data={"source": "text"})]
    with pytest.raises(FileNotFoundError, match=r"data\.text\.validation"):
        launch.launch(points, tmp_path / "work", None)
    assert loaded == [("sotu", "train"), ("sotu", "validation"), ("text", "train"), ("text", "validation")]
    assert scored == ["none", "rope"] and not (tmp_path / "work").exists()
    digests = launch.check(points[:2])
    [first, _] = launch.plan(points[:2], tmp_path / "work", "configs/x.py", digests)
    assert first.runs[1].config["data_digest"] == "digest of sotu" and first.runs[1].config["source"] == "configs/x.py"


def test_a_directory_of_another_identity_stops_the_launch(grid):
    [plan, *_] = launch.plan(grid.points, grid.workdir, None, {})
    config_json = plan.runs[0].path / "config.json"
    config_json.write_text(config_json.read_text().replace(plan.runs[0].identity, "0123456789ab"))
    with pytest.raises(RecordError, match="0123456789ab"):
        grid.launch()
    assert grid.started() == []


def test_a_folder_that_cannot_be_written_stops_the_launch(grid):
    (grid.workdir / "file").write_text("in the way")
    with pytest.raises(RecordError, match="cannot write a run directory here"):
        launch.launch(grid.points, grid.workdir / "file" / "below", None, command=grid.command)
    assert grid.started() == []


def test_a_dry_run_counts_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = SimpleNamespace(vocab_size=258)
    monkeypatch.setattr(pe_ablation, "data", SimpleNamespace(tokenizer=lambda data: tokenizer), raising=False)
    points = [point("none", seeds=(0, 1)), point("learned")]
    lines = list(launch.dry_run(points))
    # 258 x 64 embeddings, two blocks of 12 x 64^2 + 13 x 64, the last LayerNorm; `learned` adds 64 rows of 64.
    none = 258 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64
    assert lines[0].split("  ")[1:] == ["seeds 0,1", f"{none:,} parameters", "4,096,000 tokens per run"]
    assert f"  {none + 64 * 64:,} parameters" in lines[1]
    assert lines[2] == "2 points, 3 runs, 12,288,000 tokens" and list(tmp_path.iterdir()) == []


# Inside the child


@pytest.fixture
def planned(tmp_path):
    [plan] = launch.plan([point("none", seeds=(0, 1))], tmp_path, None, {})
    return plan.runs


def pretend(monkeypatch, fit_seeds, evaluate_run=lambda run_dir: None):
    monkeypatch.setattr(pe_ablation, "train", SimpleNamespace(fit_seeds=fit_seeds), raising=False)
    monkeypatch.setattr(pe_ablation, "evaluate", SimpleNamespace(evaluate_run=evaluate_run), raising=False)


class Here:
    """Brings points up in this process, with stand-ins that remember which seeds were trained."""

    def __init__(self, workdir, monkeypatch):
        self.workdir = workdir
        self.trained = []
        self.unscorable = ""
        pretend(monkeypatch, self.fit_seeds, self.evaluate_run)

    def fit_seeds(self, experiments, run_dirs):
        self.trained.append([each.seed for each in experiments])
        return [{"status": "ok", "steps": 1} for _ in experiments]

    def evaluate_run(self, run_dir):
        if run_dir.name == self.unscorable:
            raise RuntimeError(f"cannot score {run_dir.name}")

    def bring_up(self, asked):
        """(exit code, runs of the point)."""
        [plan] = launch.plan([asked], self.workdir, None, {})
        return launch.run_point([run.path for run in plan.open_runs]), plan.runs


@pytest.fixture
def here(tmp_path, monkeypatch):
    return Here(tmp_path, monkeypatch)


def test_seeds_train_together_and_a_new_one_alone(here):
    assert here.bring_up(point("none", seeds=(0, 1)))[0] == 0
    assert here.bring_up(point("none", seeds=(0, 1, 2)))[0] == 0
    assert here.trained == [[0, 1], [2]]


def test_a_seed_that_cannot_be_scored_fails_alone(here):
    here.unscorable = "seed_0"
    code, (first, second) = here.bring_up(point("none", seeds=(0, 1)))
    assert (
        code == 1
        and first.status() == ("failed", "RuntimeError: cannot score seed_0")
        and second.status() == ("done", "")
    )
    here.unscorable = ""
    assert here.bring_up(point("none", seeds=(0, 1)))[0] == 0
    assert here.trained == [[0, 1], [0]] and first.status() == ("done", "")


def test_new_evaluation_lengths_reopen_a_run_without_training_it(here):
    here.bring_up(point("none"))
    longer = point("none", eval={"lengths": (64, 512)})
    code, [run] = here.bring_up(longer)
    assert code == 0 and here.trained == [[0]]
    assert run.result() == {"status": "ok", "steps": 1, "eval": config.to_dict(longer.experiments[0].eval)}


def test_a_diverged_seed_is_a_result(planned, monkeypatch):
    summaries = [{"status": "diverged", "loss": float("nan")}, {"status": "ok", "loss": 1.0}]
    pretend(monkeypatch, lambda experiments, run_dirs: summaries)
    assert launch.run_point([run.path for run in planned]) == 0
    assert [run.result()["status"] for run in planned] == ["diverged", "ok"]


def test_a_failure_of_training_is_recorded_for_every_seed(planned, monkeypatch):
    def fit_seeds(experiments, run_dirs):
        assert [run.status()[0] for run in planned] == ["running", "running"]
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

    pretend(monkeypatch, fit_seeds)
    assert launch.run_point([run.path for run in planned]) == 1
    assert {run.status() for run in planned} == {("failed", "MemoryError: RESOURCE_EXHAUSTED: out of memory")}


def test_an_interruption_is_recorded_and_goes_on(planned, monkeypatch):
    def evaluate_run(run_dir):
        if run_dir.name == "seed_1":
            raise KeyboardInterrupt

    pretend(monkeypatch, lambda experiments, run_dirs: [{"status": "ok"}] * 2, evaluate_run)
    with pytest.raises(KeyboardInterrupt):
        launch.run_point([run.path for run in planned])
    assert [run.status() for run in planned] == [("done", ""), ("failed", "interrupted")]


def test_a_point_is_given_back_if_one_of_its_seeds_is_held_elsewhere(planned, monkeypatch):
    owner = record._this_process() | {"host": "elsewhere"}
    (planned[1].path / "running.json").write_text(record.dumps(owner))
    pretend(monkeypatch, lambda experiments, run_dirs: pytest.fail("trained"))
    with pytest.raises(RecordError, match="already running"):
        launch.run_point([run.path for run in planned])
    assert [run.status()[0] for run in planned] == ["failed", "running"]


@pytest.mark.parametrize(
    ("code", "text"), [(-11, "killed by signal 11 (SIGSEGV)"), (1, "exit code 1"), (-9, "possibly out of memory")]
)
def test_ends_are_described(code, text):
    assert text in launch._describe(code)
