import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from other_process import OtherProcess

import pe_ablation
from pe_ablation import config, launch, lease, placement, record, workers
from pe_ablation.placement import Share
from pe_ablation.record import HeldError, RecordError, Run
from pe_ablation.sweep import Point

ARMS = ("none", "rope", "alibi", "t5")

# Started instead of training: an arm does what behaviour.json says, and logs which arms have a result by then.
CHILD = """
import json, os, pathlib, signal, sys, time, types
import pe_ablation
from pe_ablation import launch, stopping

workdir = pathlib.Path(sys.argv[1])

def fit_pack(experiments, run_dirs):
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
pe_ablation.train = types.SimpleNamespace(fit_pack=fit_pack)
pe_ablation.evaluate = types.SimpleNamespace(evaluate_run=lambda run_dir: None)
sys.exit(launch.child(sys.argv[2:]))
"""


# The same without jax, and so without `launch.child`: it starts in a tenth of a second.
QUICK_CHILD = """
import json, os, signal, sys, time
from pathlib import Path
from pe_ablation import lease

workdir, runs = Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]]
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append("SIGTERM"))
signal.signal(signal.SIGINT, signal.SIG_IGN)
configs = [json.loads((run / "config.json").read_text()) for run in runs]
arm = configs[0]["arm"]

def log(event):
    about = {"event": event, "arm": arm, "pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0))}
    with (workdir / "events.jsonl").open("a") as file:
        file.write(json.dumps({**about, "device": os.environ.get("CUDA_VISIBLE_DEVICES")}) + "\\n")

def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

for run in runs:
    lease.take(run / "attempts")
    (run / "error.json").unlink(missing_ok=True)
log("start")
print(f"{arm} speaks", flush=True)
behaviours = json.loads((workdir / "behaviour.json").read_text())
behaviour = behaviours.get(arm, "")
if behaviour == "raise":
    for run in runs:
        (run / "error.json").write_text(json.dumps({"error": "no luck", "time": ""}))
        lease.release(run / "attempts", "failed")
    sys.exit(1)
if behaviour == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "meet":
    until(lambda: (workdir / "events.jsonl").read_text().count("start") >= 2)
if behaviour.startswith("kill "):
    os.kill(int(behaviour.split()[1]), signal.SIGKILL)
if behaviour.startswith("signal "):
    _, number, *then = behaviour.split()
    waiting = [other for other in behaviours if behaviours[other] == "wait"]
    until(lambda: all(f'"arm": "{other}"' in (workdir / "events.jsonl").read_text() for other in waiting))
    os.kill(os.getppid(), int(number))
    until(lambda: asked)
    if then == ["again"]:
        os.kill(os.getppid(), int(number))
    if then:
        until(lambda: False)
if behaviour == "wait":
    until(lambda: asked)
if asked:
    for run in runs:
        lease.release(run / "attempts", "stopped", f"trained to step 1, then {asked[0]}")
    log("stop")
    sys.exit(75)
log("end")
for run, about in zip(runs, configs):
    (run / "result.json").write_text(json.dumps({"status": "ok", "eval": about["experiment"]["eval"]}))
    lease.release(run / "attempts", "done")
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

    def quick(self):
        self.child.write_text(QUICK_CHILD)
        return self

    @property
    def command(self):
        return (sys.executable, str(self.child), str(self.workdir))

    def behave(self, behaviour):
        (self.workdir / "behaviour.json").write_text(json.dumps(behaviour))

    def launch(self, **asked):
        (self.workdir / "started.jsonl").unlink(missing_ok=True)
        (self.workdir / "events.jsonl").unlink(missing_ok=True)
        return launch.launch(self.points, self.workdir, "configs/grid.py", command=self.command, **asked)

    def events(self, *kinds):
        """What quick children logged, in order."""
        path = self.workdir / "events.jsonl"
        logged = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [each for each in logged if each["event"] in kinds]

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


def eventually(condition, seconds=120.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.05)


@pytest.fixture
def roomy(monkeypatch):
    """As many workers as are asked for, on whatever this machine has."""
    monkeypatch.setattr(placement, "shares", lambda workers: [Share()] * workers)


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


def test_the_same_grid_on_two_workers(grid, roomy):
    grid.quick().behave({"rope": "raise", "alibi": "kill"})
    assert grid.launch(workers=2) == 1
    assert sorted(each["arm"] for each in grid.events("start")) == sorted(ARMS)
    assert grid.states() == {"none": "done", "rope": "failed", "alibi": "failed", "t5": "done"}
    assert grid.run("rope").error() == "no luck"
    assert grid.run("alibi").error() == "killed by signal 9 (SIGKILL, possibly out of memory)"
    grid.behave({})
    assert grid.launch(workers=2) == 0
    assert sorted(each["arm"] for each in grid.events("start")) == ["alibi", "rope"]
    assert set(grid.states().values()) == {"done"}
    assert grid.launch(workers=2) == 0 and grid.events("start") == []


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
    grid.quick().points = grid.points[:2]
    launch.plan(grid.points, grid.workdir, None, {})
    with OtherProcess() as other:
        other("take", grid.run("none").path / "attempts")
        assert grid.launch() == 1
        assert [each["arm"] for each in grid.events("start")] == ["rope"]
        out = capsys.readouterr().out
        assert f"seed_0 is left to process {other.pid}\n" in out and "1 runs are left to other launches" in out
        assert grid.run("none").status()[0] == "running"


def test_a_run_whose_process_dies_meanwhile_is_taken_over(grid):
    grid.quick().points = grid.points[:2]
    launch.plan(grid.points, grid.workdir, None, {})
    with OtherProcess() as other:
        other("take", grid.run("none").path / "attempts")
        grid.behave({"rope": f"kill {other.pid}"})
        assert grid.launch() == 0
    assert [each["arm"] for each in grid.events("start")] == ["rope", "none"] and grid.run("none").attempts() == 2


@pytest.mark.parametrize("began", ["after", "before"])
def test_what_failed_in_another_launch_meanwhile_is_left_to_the_next_one(grid, capsys, began):
    grid.quick().points = grid.points[:2]
    plans = launch.plan(grid.points, grid.workdir, None, {})
    run = grid.run("rope")
    with OtherProcess() as other:
        if began == "before":
            other("take", run.path / "attempts")
        ours = launch._Launch([[each] for each in plans], [Share()], grid.command)
        if began == "after":
            other("take", run.path / "attempts")
        (run.path / "error.json").write_text(record.dumps({"error": "ValueError: theirs", "time": ""}))
        other("release", run.path / "attempts", "failed")
    assert ours.run() == 1
    assert [each["arm"] for each in grid.events("start")] == ["none"]
    assert "seed_0 failed in another launch: ValueError: theirs" in capsys.readouterr().out
    assert grid.launch() == 0 and [each["arm"] for each in grid.events("start")] == ["rope"]


def test_lengths_that_were_asked_for_while_another_launch_trained_are_scored(grid, monkeypatch):
    """When all was planned the run was held, so that its config could not be brought up to date."""
    grid.quick().points = [point("none", eval={"lengths": (64, 512)})]
    launch.plan([point("none")], grid.workdir, None, {})
    with OtherProcess() as other:
        other("take", grid.run("none").path / "attempts")
        plans = launch.plan(grid.points, grid.workdir, None, {})
        assert 512 not in grid.run("none").experiment.eval.lengths
        other("release", grid.run("none").path / "attempts", "done")
    assert launch._Launch([[each] for each in plans], [Share()], grid.command).run() == 0
    assert grid.run("none").result()["eval"]["lengths"] == [64, 512]


# Several at once


def test_workers_run_at_once_and_no_more_than_asked_for(grid, roomy, capsys):
    grid.quick().behave(dict.fromkeys(ARMS, "meet"))
    assert grid.launch(workers=2) == 0
    at_once = most = 0
    for each in grid.events("start", "end"):
        at_once += 1 if each["event"] == "start" else -1
        most = max(most, at_once)
    assert most == 2 and len(grid.events("start")) == 4
    lines = capsys.readouterr().out.splitlines()
    for number, each in enumerate(grid.points, 1):
        log = grid.workdir / each.directory_name / "log.txt"
        about = [line for line in lines if line.startswith(f"[{number}/4] {each.directory_name}: ")]
        assert about[0].endswith(f": seed_0, output in {log}") and ": seed_0 done after" in about[1] and len(about) == 2
        assert log.read_text() == f"{each.arm} speaks\n"
    assert len(lines) == 8


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_are_pinned_to_cores_of_their_own(grid, monkeypatch):
    monkeypatch.setattr(placement, "_backend", lambda: ("cpu", 1))
    before = os.sched_getaffinity(0)
    grid.quick().behave(dict.fromkeys(ARMS, "meet"))
    assert grid.launch(workers=2) == 0
    first, second = {tuple(each["cores"]) for each in grid.events("start")}
    assert not set(first) & set(second) and {*first, *second} == before == os.sched_getaffinity(0)
    grid.behave({})
    assert grid.launch(force=True) == 0
    assert [each["cores"] for each in grid.events("start")] == [sorted(before)] * 4


def packs_of(*arms, rates=(1e-3, 2e-3, 4e-3), **fields):
    """Points of some arms at several learning rates, the arms in turn."""
    return [point(arm, train={"learning_rate": rate}, **fields) for rate in rates for arm in arms]


def test_a_pack_is_one_process_and_what_is_done_is_left_out(grid, capsys):
    grid.quick().points = [*packs_of("rope"), point("none")]
    names = [each.directory_name for each in grid.points]
    assert grid.launch(pack=True) == 0
    assert [each["arm"] for each in grid.events("start")] == ["rope", "none"]
    runs = [Run(grid.workdir / name / "seed_0") for name in names]
    assert [run.status()[0] for run in runs] == ["done"] * 4 and len({run.identity for run in runs}) == 4
    title, out = f"[1/2] {names[0]} and 2 more: ", capsys.readouterr().out.splitlines()
    about = "packed: 3 points, 3 runs in one program, train.learning_rate 0.001, 0.002, 0.004"
    assert out[0] == f"{title}{about} ({', '.join(names[:3])}), 3 to do"
    assert out[1] == title + ", ".join(f"{name}/seed_0" for name in names[:3])
    assert out[2].startswith(f"{title}{names[0]}/seed_0 done; {names[1]}/seed_0 done; ")
    assert out[3] == f"[2/2] {names[3]}: seed_0"

    (runs[1].path / "result.json").write_text("torn")
    assert grid.launch(pack=True) == 0 and len(grid.events("start")) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith(", 1 to do") and f"{title}{names[1]}/seed_0" in out
    grid.launch(force=True)
    assert len(grid.events("start")) == 4


def test_packs_are_dealt_to_workers(grid, roomy):
    grid.quick().points = packs_of("none", "rope")
    grid.behave({"none": "meet", "rope": "meet"})
    assert grid.launch(pack=True, workers=2) == 0
    assert sorted(each["arm"] for each in grid.events("start")) == ["none", "rope"]
    logs = [grid.workdir / each.directory_name / "log.txt" for each in grid.points]
    assert [log.exists() for log in logs] == [True, True, *[False] * 4]


def test_a_pack_that_is_killed_or_stopped_is_a_failure_or_a_stop_of_each_of_its_runs(grid):
    grid.quick().points = packs_of("none", "rope", "alibi")
    grid.behave({"rope": "kill", "alibi": f"signal {int(signal.SIGTERM)}"})
    assert grid.launch(pack=True) == launch.RESUMABLE
    states = {arm: [] for arm in ("none", "rope", "alibi")}
    for each in grid.points:
        states[each.arm].append(Run(grid.workdir / each.directory_name / "seed_0").status()[0])
    assert states == {"none": ["done"] * 3, "rope": ["failed"] * 3, "alibi": ["stopped"] * 3}
    grid.behave({})
    assert grid.launch() == 0 and len(grid.events("start")) == 6


def test_two_launches_at_once_run_no_point_twice(grid):
    grid.quick().behave({"t5": "raise"})
    seeds = range(5)
    source = LAUNCHER.replace("POINTS", repr([[arm, {"seed": seed}] for seed in seeds for arm in ARMS]))
    command = [sys.executable, "-c", source, str(grid.workdir), *grid.command]
    launches = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for each in launches:
        assert each.stdout.readline() == "ready\n"
    for each in launches:
        each.stdin.write("\n")
        each.stdin.flush()
    for each in launches:
        each.communicate(timeout=60)
        assert each.returncode == 1
    starts = grid.events("start")
    assert len(starts) == 20 and len(record.find(grid.workdir)) == 20
    states = [run.status()[0] for run in record.find(grid.workdir)]
    assert {run.attempts() for run in record.find(grid.workdir)} == {1}
    assert (states.count("done"), states.count("failed")) == (15, 5)


# Being stopped


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, launch.RESUMABLE)]
)
def test_a_signal_stops_all_workers_after_a_checkpoint(grid, roomy, capsys, number, code):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    grid.quick().behave({"none": "wait", "rope": f"signal {int(number)}"})
    assert grid.launch(workers=2) == code
    assert grid.states() == {"none": "stopped", "rope": "stopped", "alibi": "missing", "t5": "missing"}
    assert grid.run("rope").status()[1] == "trained to step 1, then SIGTERM"
    assert {each["arm"] for each in grid.events("stop")} == {"none", "rope"}
    listing = list(launch.status(grid.workdir))
    assert listing[-1] == "4 runs: 0 done, 0 running, 0 failed, 2 missing, 2 stopped"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    grid.behave({})
    assert grid.launch(workers=2) == 0 and len(grid.events("start")) == 4
    assert list(launch.status(grid.workdir))[-1] == "4 runs: 4 done, 0 running, 0 failed, 0 missing"


@pytest.mark.parametrize("how", ["again", "slow"])
def test_what_does_not_stop_is_killed_and_still_no_failure(grid, monkeypatch, how):
    if how == "slow":
        monkeypatch.setattr(workers, "SECONDS_TO_STOP", 0.05)
    grid.quick().behave({"none": f"signal {int(signal.SIGTERM)} {how}"})
    assert grid.launch() == launch.RESUMABLE
    assert grid.run("none").status() == (
        "stopped",
        "SIGTERM, killed by signal 9 (SIGKILL, possibly out of memory)",
    )
    grid.behave({})
    assert grid.launch() == 0


def test_a_run_that_stops_by_itself_makes_the_launch_resumable(grid):
    """A scheduler may signal every process of a job: the child may have ended before the launcher hears of it."""
    grid.quick()
    (grid.workdir / "child.py").write_text(QUICK_CHILD.replace("asked = []", "asked = ['SIGUSR1']"))
    grid.points = grid.points[:1]
    assert grid.launch() == launch.RESUMABLE and grid.run("none").status()[0] == "stopped"


def test_a_signal_while_all_is_still_planned_is_resumable_too(grid, monkeypatch):
    monkeypatch.setattr(launch, "check", lambda points: os.kill(os.getpid(), signal.SIGUSR1))
    assert grid.launch() == launch.RESUMABLE
    assert grid.started() == [] and not (grid.workdir / grid.points[0].directory_name).exists()


LAUNCHER = """
import sys
from pe_ablation import config, launch
from pe_ablation.sweep import Point

launch.check = lambda points: {}
points = [Point((config.read({"encoding": {"name": arm}, **fields}),)) for arm, fields in POINTS]
print("ready", flush=True)
sys.stdin.readline()
sys.exit(launch.launch(points, sys.argv[1], None, command=sys.argv[2:]))
"""


@pytest.fixture
def waiting(grid):
    """A launcher in a process of its own whose first point waits: (grid, launcher, pid of the point's process)."""
    grid.behave({"none": "wait"})
    source = LAUNCHER.replace("POINTS", repr([[arm, {}] for arm in ARMS]))
    launcher = subprocess.Popen([sys.executable, "-c", source, str(grid.workdir), *grid.command], stdin=subprocess.PIPE)
    launcher.stdin.write(b"\n")
    launcher.stdin.flush()
    eventually(lambda: (grid.workdir / "pid").exists() and (grid.workdir / "pid").read_text())
    yield grid, launcher, int((grid.workdir / "pid").read_text())
    launcher.kill()
    launcher.communicate()


def test_ctrl_c_stops_the_child_and_leaves_records_whole(waiting):
    grid, launcher, pid = waiting
    assert grid.run("none").status() == ("running", f"process {pid} of launch {launcher.pid}")
    os.kill(pid, signal.SIGINT)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 130
    assert lease.start_of(pid) is None
    assert grid.states() == {"none": "stopped", "rope": "missing", "alibi": "missing", "t5": "missing"}
    assert grid.run("none").status() == ("stopped", "waited, then SIGTERM")


def test_a_killed_launcher_takes_its_child_along(waiting):
    grid, launcher, pid = waiting
    launcher.kill()
    eventually(lambda: lease.start_of(pid) is None)
    state, reason = grid.run("none").status()
    assert (state, reason) == ("failed", f"process {pid} of launch {launcher.pid} ended without a result")


# Again


def test_force_trains_again_and_keeps_what_was(grid, capsys):
    grid.quick().launch()
    before = grid.run("rope").path / "result.json"
    kept = before.read_bytes(), before.stat().st_ino
    grid.points = [point("rope"), point("none", seeds=(0, 1))]
    assert grid.launch(force=True) == 0
    assert [each["arm"] for each in grid.events("start")] == ["rope", "none"]
    assert f"{grid.run('rope').path}: kept as seed_0.replaced-1" in capsys.readouterr().out
    aside = grid.run("rope").path.with_name("seed_0.replaced-1") / "result.json"
    assert (aside.read_bytes(), aside.stat().st_ino) == kept and before.stat().st_ino != kept[1]
    names = [run.path.name for run in record.find(grid.workdir)]
    assert sorted(names) == ["seed_0"] * 4 + ["seed_1"]
    assert grid.launch(force=True) == 0 and before.parent.with_name("seed_0.replaced-2").exists()


def test_force_refuses_what_is_running_before_it_moves_anything(grid):
    grid.quick().launch()
    with OtherProcess() as other:
        other("take", grid.run("t5").path / "attempts")
        with pytest.raises(HeldError, match=f"t5.*seed_0: cannot be replaced while it runs in process {other.pid}"):
            grid.launch(force=True)
    assert not list(grid.workdir.glob("*/*replaced*")) and grid.events("start") == []


def test_an_index_is_one_point_and_must_exist(grid):
    assert [launch.at(grid.points, index)[0].arm for index in (0, 3)] == ["none", "t5"]
    for index in (-1, 4):
        with pytest.raises(ValueError, match=rf"--index {index}: 4 points are selected, 0 to 3"):
            launch.at(grid.points, index)


# Before anything starts


def test_data_and_lengths_are_checked_before_a_directory_exists(tmp_path, monkeypatch):
    loaded, scored = [], []

    def load(data, split):
        loaded.append((data.source, split))
        if data.source == "text" and split == "validation":
            raise FileNotFoundError("data.text.validation: no file matches")
        return SimpleNamespace(digest=f"digest of {data.source}")

    def check_batches(tokens, **sizes):
        assert sizes == {"block": 64, "batch_tokens": 4096, "length": 64, "bos": "document"}, tokens

    def check(experiment):
        load(experiment.data, experiment.eval.split)
        scored.append((experiment.arm, experiment.eval.lengths))

    monkeypatch.setattr(pe_ablation, "data", SimpleNamespace(load=load, check_batches=check_batches), raising=False)
    monkeypatch.setattr(pe_ablation, "evaluate", SimpleNamespace(check=check), raising=False)
    long = (64, 512)
    points = [point("none", seeds=(0, 1)), point("rope"), point("rope", eval={"lengths": long})]
    with pytest.raises(FileNotFoundError, match=r"data\.text\.validation"):
        # Were it not refused, the command would fail at once instead of training.
        launch.launch([*points, point("t5", data={"source": "text"})], tmp_path / "work", None, command=("false",))
    sotu = [("sotu", "train"), *[("sotu", "validation")] * 2]
    assert loaded == [*sotu, ("text", "train"), ("text", "validation")]  # each question once
    assert [each for each in scored if each[1] == long] == [("rope", long)] and len(scored) == 2
    assert not (tmp_path / "work").exists()
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
    assert lines[0].split("  ")[1:4] == ["seeds 0,1", f"{none:,} parameters", "4,096,000 tokens per run"]
    assert f"  {none + 64 * 64:,} parameters" in lines[1]
    assert lines[-1].startswith("2 points, 3 runs, 12,288,000 tokens; estimated ") and list(tmp_path.iterdir()) == []


# Inside the child


@pytest.fixture
def planned(tmp_path):
    [plan] = launch.plan([point("none", seeds=(0, 1))], tmp_path, None, {})
    return plan.runs


def pretend(monkeypatch, fit_pack, evaluate_run=lambda run_dir: None):
    monkeypatch.setattr(pe_ablation, "train", SimpleNamespace(fit_pack=fit_pack), raising=False)
    monkeypatch.setattr(pe_ablation, "evaluate", SimpleNamespace(evaluate_run=evaluate_run), raising=False)


class Here:
    """Brings points up in this process, with stand-ins that remember which seeds were trained."""

    def __init__(self, workdir, monkeypatch):
        self.workdir = workdir
        self.trained = []
        self.unscorable = ""
        pretend(monkeypatch, self.fit_pack, self.evaluate_run)

    def fit_pack(self, experiments, run_dirs):
        self.trained.append([each.seed for each in experiments])
        return [{"status": "ok", "steps": 1} for _ in experiments]

    def evaluate_run(self, run_dir):
        if run_dir.name == self.unscorable:
            raise RuntimeError(f"cannot score {run_dir.name}")

    def bring_up(self, asked):
        """(exit code, runs of the point)."""
        [plan] = launch.plan([asked], self.workdir, None, {})
        return launch.run_pack([run.path for run in plan.open_runs]), plan.runs


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
    assert launch.run_pack([run.path for run in planned]) == 0
    assert [run.result()["status"] for run in planned] == ["diverged", "ok"]


def test_a_failure_of_training_is_recorded_for_every_seed(planned, monkeypatch):
    def fit_pack(experiments, run_dirs):
        assert [run.status()[0] for run in planned] == ["running", "running"]
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

    pretend(monkeypatch, fit_pack)
    assert launch.run_pack([run.path for run in planned]) == 1
    assert {run.status() for run in planned} == {("failed", "MemoryError: RESOURCE_EXHAUSTED: out of memory")}


def test_an_interruption_is_recorded_and_goes_on(planned, monkeypatch):
    def evaluate_run(run_dir):
        if run_dir.name == "seed_1":
            raise KeyboardInterrupt

    pretend(monkeypatch, lambda experiments, run_dirs: [{"status": "ok"}] * 2, evaluate_run)
    with pytest.raises(KeyboardInterrupt):
        launch.run_pack([run.path for run in planned])
    assert [run.status() for run in planned] == [("done", ""), ("failed", "interrupted")]


def test_seeds_that_are_held_elsewhere_are_left_and_the_others_trained(here, capsys):
    [plan] = launch.plan([point("none", seeds=(0, 1))], here.workdir, None, {})
    with OtherProcess() as other:
        other("take", plan.runs[1].path / "attempts")
        assert launch.run_pack([run.path for run in plan.runs]) == 1
        assert here.trained == [[0]] and [run.status()[0] for run in plan.runs] == ["done", "running"]
        assert f"already running in process {other.pid}; left to it" in capsys.readouterr().err
        with pytest.raises(HeldError, match="already running"):
            launch.run_pack([plan.runs[1].path])


def committed(run, *steps):
    for step in steps:
        folder = run.path / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        (folder / "_CHECKPOINT_METADATA").touch()


def test_seeds_train_together_where_they_can_go_on_together(here):
    """A fresh seed doesn't send a half-trained one back to the start; seeds broken off in a save share a step."""
    [plan] = launch.plan([point("none", seeds=range(5))], here.workdir, None, {})
    committed(plan.runs[0], 8, 16)
    committed(plan.runs[2], 8)
    committed(plan.runs[4], 24, 32)
    assert launch.run_pack([run.path for run in plan.runs]) == 0
    assert here.trained == [[0, 2], [1, 3], [4]]


def test_runs_of_several_points_train_together_and_those_ahead_on_their_own(here, monkeypatch):
    plans = launch.plan(packs_of("none", seeds=(0, 1)), here.workdir, None, {})
    runs = [run for each in plans for run in each.runs]
    committed(runs[1], 8)
    committed(runs[2], 8)
    assert launch.run_pack([run.path for run in runs[:4]]) == 0
    assert here.trained == [[0, 1], [1, 0]]

    def fit_pack(experiments, run_dirs):
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

    pretend(monkeypatch, fit_pack)
    assert launch.run_pack([run.path for run in runs[4:]]) == 1
    assert {run.status() for run in runs[4:]} == {("failed", "MemoryError: RESOURCE_EXHAUSTED: out of memory")}


def test_one_group_that_fails_does_not_stop_the_others(here, monkeypatch):
    [plan] = launch.plan([point("none", seeds=(0, 1))], here.workdir, None, {})
    committed(plan.runs[0], 8)

    def fit_pack(experiments, run_dirs):
        if experiments[0].seed == 0:
            raise RuntimeError("no luck")
        return [{"status": "ok"}]

    pretend(monkeypatch, fit_pack)
    assert launch.run_pack([run.path for run in plan.runs]) == 1
    assert [run.status() for run in plan.runs] == [("failed", "RuntimeError: no luck"), ("done", "")]


@pytest.mark.parametrize("moment", ["before", "scoring"])
def test_a_signal_stops_a_point_and_is_no_failure(planned, monkeypatch, moment):
    before = signal.getsignal(signal.SIGTERM)

    def evaluate_run(run_dir):
        if run_dir.name == "seed_1" and moment == "scoring":
            os.kill(os.getpid(), signal.SIGTERM)
            launch.stopping.check("trained; 3 cells scored")

    def fit_pack(experiments, run_dirs):
        if moment == "before":
            os.kill(os.getpid(), signal.SIGTERM)
            launch.stopping.check("trained to step 0")
        return [{"status": "ok"}] * 2

    pretend(monkeypatch, fit_pack, evaluate_run)
    assert launch.run_pack([run.path for run in planned]) == launch.RESUMABLE
    assert planned[1].status()[0] == "stopped" and planned[1].status()[1].endswith(", then SIGTERM")
    assert planned[0].status()[0] == ("stopped" if moment == "before" else "done")
    assert signal.getsignal(signal.SIGTERM) == before and not launch.stopping.requested()
    pretend(monkeypatch, lambda experiments, run_dirs: [{"status": "ok"} for _ in experiments])
    assert launch.run_pack([run.path for run in planned]) == 0


def test_a_point_that_was_taken_over_leaves_the_record_to_its_new_owner(planned, monkeypatch, capsys):
    with OtherProcess() as other:

        def fit_pack(experiments, run_dirs):
            hour_ago = time.time() - 3600
            os.utime(planned[0].path / "attempts/1.json", (hour_ago, hour_ago))
            assert other("take", planned[0].path / "attempts") == "taken"
            return [{"status": "late"}] * 2

        pretend(monkeypatch, fit_pack)
        assert launch.run_pack([run.path for run in planned]) == 1
        assert planned[0].status() == ("running", f"process {other.pid}") and planned[0].result() is None
        assert planned[1].status()[0] == "done" and "taken over by process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "text"), [(-11, "killed by signal 11 (SIGSEGV)"), (1, "exit code 1"), (-9, "possibly out of memory")]
)
def test_ends_are_described(code, text):
    assert text in workers.describe(code)
