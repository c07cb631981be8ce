"""What wandb is told, by the messages; and what it made of them, by reading its offline files with its own reader."""

import base64
import json
import math
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from pe_ablation import cli, config, evaluate, launch, mirror, record, sweep
from pe_ablation.mirror_process import Mirror
from pe_ablation.record import Run

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABpfZFQAAAAABJRU5ErkJggg=="
)
FIELDS = {
    "encoding": {"name": "alibi"},
    "train": {"length": 8, "steps": 30, "warmup_steps": 1},
    "data": {"block": 8},
    "eval": {"lengths": (8, 16, 32), "last_k": 4},
    "wandb": {"tags": ("mine",)},
}
BITS = {8: 2.0, 16: 2.01, 32: 2.5}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No W&B variable, key or settings file of whoever runs the tests; and no network, whatever happens."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setattr(mirror, "SECONDS_BETWEEN_LOOKS", 0.01)


def make_run(workdir, seed=0, **fields):
    experiment = config.read({**FIELDS, "seed": seed}, fields)
    [point] = sweep.points(SimpleNamespace(config=FIELDS, spec="x.py"), None, {"seed": seed, **fields})
    return Run.plan(workdir / point.directory_name / f"seed_{seed}", experiment, "configs/x.py:tiny", "ab" * 32)


def train(run, first, last, nats=lambda step: 3.0 - step / 100, diverged_at=None):
    for step in range(first, last + 1):
        bits = nats(step) / math.log(2)
        row = {"step": step, "tokens": 8 * step, "nats": nats(step), "bits_per_byte": bits}
        run.append("metrics", [row | {"diverged": step == diverged_at}])
        run.append("timing", [{"step": step, "seconds": 0.5, "tokens_per_second": 16.0}])


def commit(run, step):
    folder = run.path / "checkpoints" / str(step)
    folder.mkdir(parents=True)
    (folder / "_CHECKPOINT_METADATA").touch()


def score(run, bits=BITS, status="ok"):
    """Cells of one token and one byte each, at these bits per byte."""
    evaluation = run.experiment.eval
    for length, value in bits.items():
        for null in ("none", "window_mask")[: 1 + (length > 8)]:
            chosen = evaluation.settings("targets", 8)
            key = evaluate.cell_key(30, "validation", "targets", length, null, chosen)
            about = {"key": key, "step": 30, "split": "validation", "protocol": "targets", "length": length}
            about |= {"null": null, "train_length": 8, "settings": chosen, "status": status}
            arrays = {"nats": [[value * math.log(2)]], "tokens": [[1.0]], "bytes": [[1.0]], "names": ["d"]}
            sums = {name: np.asarray(each) for name, each in arrays.items()} if status == "ok" else {}
            run.save_cell(about | evaluate.totals(sums), sums)


def told(messages, do, id=None):
    return [message for message in messages if message["do"] == do and id in (None, message["id"])]


def follow(runs):
    """All messages about runs that are as they stay."""
    return list(mirror._follow(runs, SimpleNamespace(wait=lambda seconds: True)))


def inspected(path):
    """The records of an offline run by type, as wandb's own reader prints them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = {}
    for each in map(json.loads, lines):
        records.setdefault(each["type"], []).append(each[each["type"]])
    return records


def summary(records):
    values = {}
    for each in records["summary"]:
        values |= each["update"]
    return values


def offline(workdir, id="*"):
    return sorted((workdir / "wandb").glob(f"offline-run-*-{id}"))


def fake_wandb(tmp_path, monkeypatch, source):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))


def test_a_run_that_is_killed_and_resumed_offline_has_each_step_once(tmp_path, capfd):
    run = make_run(tmp_path)
    train(run, 1, 20)
    commit(run, 10)
    killed = [message for message in follow([run]) if message["do"] in ("begin", "log", "replace")]
    lines = "".join(json.dumps(message) + "\n" for message in killed)
    subprocess.run([sys.executable, "-P", mirror.PROCESS], input=lines.encode(), check=True)
    [first] = offline(tmp_path)
    run.truncate("metrics", 10)
    run.truncate("timing", 10)
    with mirror.training([run]):
        train(run, 11, 30, lambda step: math.nan if step == 29 else math.inf if step == 30 else 3.0 - step / 100)
        commit(run, 30)
        score(run)
        run.finish({"status": "ok", "steps": 30, "parameters": 5})
    [segment] = offline(tmp_path)  # no key: offline without being asked to
    assert [path.name for path in (tmp_path / "wandb" / "replaced").iterdir()] == [first.name]
    records = inspected(segment)
    [about] = records["run"]
    assert (about["run_id"], about["job_type"]) == (run.identity, "train")
    assert (about["run_group"], about["project"]) == (run.path.parent.name, "pe-ablation")
    assert about["tags"] == ["alibi", "mine"] and about["display_name"] == "alibi L8 seed 0"
    history = [each["item"] for each in records["history"]]
    steps = [each["train/step"] for each in history if "train/step" in each]
    assert steps == list(range(1, 31)) == [each["_step"] for each in history if "train/step" in each]
    shown = {each["train/step"]: each["train/bpb"] for each in history if "train/step" in each}
    assert shown[28] == pytest.approx(2.72 / math.log(2)) and (shown[29], shown[30]) == ("NaN", "Infinity")
    curve = {each["extrap/length"]: each for each in history if "extrap/length" in each}
    assert {length: each["extrap/targets/bpb"] for length, each in curve.items()} == pytest.approx(BITS)
    assert {each["extrap/ratio"]: each["extrap/by_ratio/targets/bpb"] for each in curve.values()} == pytest.approx(
        {1.0: 2.0, 2.0: 2.01, 4.0: 2.5}
    )
    assert curve[32]["extrap/targets/window_recompute/nats"] == pytest.approx(2 * math.log(2))
    axes = {each.get("glob_name") or each["name"]: each.get("step_metric") for each in records["metric"]}
    assert (axes["train/*"], axes["extrap/*"]) == ("train/step", "extrap/length")
    assert axes["extrap/by_ratio/targets/bpb"] == "extrap/ratio"
    final = summary(records)
    assert final["extrap/targets/bpb@32"] == pytest.approx(2.5) and final["extrap/horizon"] == 16
    assert final["train/best_step"] == 28 and final["diverged"] is False and final["parameters"] == 5
    assert records["exit"][0]["exit_code"] == 0
    assert capfd.readouterr() == ("", "")


def test_evaluations_and_reports_are_runs_of_their_own(tmp_path):
    run = make_run(tmp_path, **{"wandb.mode": "offline"})
    score(run)
    mirror.evaluated([(run, run.experiment, evaluate.asked_rows(run, run.experiment))])
    [evaluated] = offline(tmp_path)
    records = inspected(evaluated)
    assert records["run"][0]["job_type"] == "eval" and records["run"][0]["run_group"] == run.path.parent.name
    assert records["run"][0]["run_id"].startswith(f"{run.identity}-eval-")
    assert [each["item"]["extrap/length"] for each in records["history"]] == [8, 16, 32]
    out = tmp_path / "report"
    out.mkdir()
    (out / "table.csv").write_text('null,encoding,8\nnone,"alibi, a",2.0\n')
    (out / "curves.png").write_bytes(PIXEL)
    (out / "rows.csv").write_text("a\n1\n")
    [line] = mirror.reported(tmp_path, out)
    segment = mirror.Path(line.removeprefix("wandb sync "))
    assert segment in offline(tmp_path)
    records = inspected(segment)
    assert records["run"][0]["job_type"] == "report" and records["run"][0]["run_id"].startswith("report-")
    [item] = [each["item"] for each in records["history"]]
    assert (item["report/table._type"], item["report/curves._type"]) == ("table-file", "image-file")
    table = json.loads((segment / "files" / item["report/table.path"]).read_text())
    assert table["columns"] == ["null", "encoding", "8"] and table["data"] == [["none", "alibi, a", "2.0"]]
    files = {each["type"]: list(each["manifest"]["contents"]) for each in records["artifact"]}
    assert [content["path"] for content in files["dataset"]] == ["rows.csv"]


def test_rows_are_told_once_a_checkpoint_that_all_seeds_have_is_committed(tmp_path):
    runs = [make_run(tmp_path, seed) for seed in (0, 1)]
    counts = []

    def count(change=lambda: None):
        def look():
            counts.append(len(seen))
            change()

        return look

    for run in runs:
        train(run, 1, 25)
    looks = [
        count(lambda: commit(runs[0], 10)),  # the other would resume at 0
        count(lambda: commit(runs[1], 10)),
        count(lambda: commit(runs[1], 20)),
        count(lambda: commit(runs[0], 20)),
        count(lambda: runs[0].finish({"status": "ok"})),
        count(),
    ]
    seen = []

    class Stop:
        def wait(self, seconds):
            if looks:
                looks.pop(0)()
            return not looks

    for message in mirror._follow(runs, Stop()):
        if message["do"] == "log" and "train/step" in message["row"]:
            seen.append((message["id"], message["step"]))
    assert counts == [0, 0, 20, 20, 40, 45]
    assert set(Counter(seen).values()) == {1}
    assert Counter(id for id, _ in seen) == {runs[0].identity: 25, runs[1].identity: 20}


def test_a_diverged_run_is_flagged_and_its_best_ignores_what_is_no_number(tmp_path):
    run = make_run(tmp_path)
    train(run, 1, 4, lambda step: [math.nan, 1.0, math.inf, 2.0][step - 1], diverged_at=4)
    score(run, status="diverged")
    run.finish({"status": "diverged"})
    messages = follow([run])
    [final] = [message["values"] for message in told(messages, "summary")]
    assert final["diverged"] is True and final["status"] == "diverged"
    assert (final["train/best_bpb"], final["train/best_step"]) == (1.0 / math.log(2), 2)
    assert math.isnan(final["extrap/targets/bpb@8"]) and "extrap/horizon" not in final
    curve = [message["row"] for message in told(messages, "log") if "extrap/length" in message["row"]]
    assert [row["extrap/length"] for row in curve] == [8, 16, 32]
    assert all(math.isnan(row["extrap/targets/bpb"]) for row in curve)


def test_a_run_without_an_end_is_finished_as_failed(tmp_path):
    run = make_run(tmp_path)
    train(run, 1, 4)
    assert told(follow([run]), "finish") == [{"do": "finish", "id": run.identity, "code": 1}]


def table(**rows):
    """{length: (bits per byte, status)} of a run trained at 64, with a null that must not count."""
    records = []
    for length, (bits, status) in rows.items():
        common = {"protocol": "targets", "train_length": 64, "eval_length": int(length[1:]), "status": status}
        records += [
            common | {"null": "none", "bits_per_byte": bits},
            common | {"null": "window_mask", "bits_per_byte": 9},
        ]
        records += [common | {"null": "none", "bits_per_byte": 0, "transform": "yarn"}]
    return pd.DataFrame(records).fillna({"transform": ""})


@pytest.mark.parametrize(
    ("rows", "reached"),
    [
        ({"L64": (2.0, "ok"), "L128": (2.02, "ok"), "L256": (1.5, "ok")}, 256),
        ({"L256": (2.0, "ok"), "L128": (2.0201, "ok"), "L64": (2.0, "ok")}, 64),
        ({"L32": (9.0, "ok"), "L64": (2.0, "ok"), "L128": (math.nan, "n/a"), "L256": (2.0, "ok")}, 64),
        ({"L64": (2.0, "ok"), "L128": (math.inf, "ok")}, 64),
        ({"L64": (math.nan, "diverged"), "L128": (2.0, "ok")}, None),
        ({"L128": (2.0, "ok")}, None),
    ],
)
def test_the_horizon_is_contiguous_from_the_training_length_and_within_one_percent(rows, reached):
    assert mirror.horizon(table(**rows)) == reached


# A wandb that notes in a file how it was called.
NOTING = r"""
import json, os
class Run:
    def __init__(self, id): self.id, self.summary, self.settings = id, {}, Settings(sync_dir="/nowhere/x")
    def define_metric(self, *args, **options): pass
    def log(self, row, **options): note("log", row)
    def finish(self, exit_code): note("finish", exit_code)
class Settings:
    def __init__(self, **fields):
        self.mode, self.project, self.entity, self.run_group, self.run_tags = "online", None, None, None, None
        vars(self).update(fields)
class setup:
    settings = Settings()
def note(*what):
    with open(os.environ["NOTES"], "a") as file: file.write(json.dumps(what) + "\n")
def login(prompt=True, verify=True):
    note("login", prompt)
    return False
def init(mode, settings, reinit, **chosen):
    note("init", mode, chosen["id"])
    return Run(chosen["id"])
"""


def test_a_process_whose_parent_is_killed_finishes_its_runs_as_killed(tmp_path, monkeypatch):
    fake_wandb(tmp_path, monkeypatch, NOTING)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    begin = json.dumps(follow([make_run(tmp_path)])[0]) + "\n"
    code = subprocess.run([sys.executable, "-P", mirror.PROCESS], input=begin.encode()).returncode
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert code == 0 and notes[0] == ["login", False]  # never a prompt
    assert notes[1][:2] == ["init", "offline"] and notes[2] == ["finish", 255]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("raise ImportError('No module named wandb')", "wandb: ImportError: No module named wandb; nothing more"),
        ("print('hello')", "wandb: AttributeError: module 'wandb' has no attribute 'setup'; nothing more"),
        ("import os; os._exit(7)", "wandb: mirrored in part only (its process ended with code 7)"),
        ("import threading; threading.Event().wait()", "wandb: mirrored in part only (not done after 1 s)"),
    ],
)
def test_a_wandb_that_is_missing_or_broken_is_a_line_and_no_more(tmp_path, monkeypatch, capfd, source, line):
    fake_wandb(tmp_path, monkeypatch, source)
    monkeypatch.setattr(mirror, "SECONDS_TO_END", 1.0 if "wait" in source else 60.0)
    run = make_run(tmp_path)
    before = sorted(path.name for path in run.path.iterdir())
    with mirror.training([run]):
        train(run, 1, 3)
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(line)
    assert sorted(path.name for path in run.path.iterdir()) == sorted([*before, "metrics.jsonl", "timing.jsonl"])


def test_a_fault_of_ours_is_a_line_and_the_errors_of_the_run_stay_its_own(tmp_path, monkeypatch, capfd):
    fake_wandb(tmp_path, monkeypatch, NOTING)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr(mirror, "_scores", lambda rows: 1 / 0)
    with pytest.raises(KeyboardInterrupt), mirror.training([make_run(tmp_path)]):
        raise KeyboardInterrupt
    assert capfd.readouterr().err.startswith("wandb: mirrored in part only (ZeroDivisionError: division by zero)")


@pytest.mark.parametrize("by", ["variable", "field"])
def test_disabled_starts_nothing(tmp_path, monkeypatch, by):
    if by == "variable":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    run = make_run(tmp_path, **({"wandb.mode": "disabled"} if by == "field" else {}))
    score(run)
    monkeypatch.setattr(mirror, "_Process", None)
    with mirror.training([run]):
        pass
    mirror.evaluated([(run, run.experiment, evaluate.asked_rows(run, run.experiment))])
    assert mirror.reported(tmp_path, tmp_path) == []


class FakeWandb:
    """Settings as `wandb.setup` found them, whether there is a key, and whether a server answers and takes the run."""

    def __init__(self, *, key=False, reachable=True, allowed=True, **found):
        empty = {"mode": "online", "project": None, "entity": None, "run_group": None, "run_tags": None}
        self.settings = SimpleNamespace(**{**empty, **found})
        self.key, self.reachable, self.allowed, self.began, self.said = key, reachable, allowed, [], []

    def setup(self):
        return self

    def login(self, *, prompt, verify):
        assert not prompt and verify
        if self.key and not self.reachable:
            raise ConnectionError("no route\nto host")
        return self.key

    def teardown(self):
        self.began.append({"mode": "teardown"})

    def Settings(self, **fields):
        return fields

    def init(self, **chosen):
        self.began.append(chosen)
        if chosen["mode"] == "online" and not self.allowed:
            raise PermissionError("not yours")
        return SimpleNamespace(define_metric=lambda *args, **options: None)


def began(tmp_path, fake, **fields):
    fields = {f"wandb.{name}": value for name, value in fields.items()}
    begin = follow([make_run(tmp_path, **fields)])[0]
    Mirror(fake, fake.said.append).begin(begin["id"], begin["about"])
    return fake.began[-1]


def test_a_field_comes_before_a_variable_and_that_before_the_default(tmp_path):
    variables = {"project": "theirs", "entity": "they", "run_group": "b", "run_tags": ("c",)}
    names = ("project", "entity", "group", "tags")
    fields = {"project": "mine", "entity": "me", "group": "g", "tags": ("t",)}
    plain = began(tmp_path / "1", FakeWandb(), tags=())
    assert [plain[name] for name in names[:2]] == ["pe-ablation", None]
    assert plain["group"].startswith("alibi-L8-") and plain["tags"] == ["alibi"]
    chosen = began(tmp_path / "2", FakeWandb(**variables), tags=())
    assert [chosen[name] for name in names] == ["theirs", "they", "b", ["alibi", "c"]]
    chosen = began(tmp_path / "3", FakeWandb(**variables), **fields)
    assert [chosen[name] for name in names] == ["mine", "me", "g", ["alibi", "t"]]


@pytest.mark.parametrize(
    ("fake", "asked", "mode", "said"),
    [
        (FakeWandb(), None, "offline", 0),
        (FakeWandb(key=True), None, "online", 0),
        (FakeWandb(key=True, mode="offline"), None, "offline", 0),
        (FakeWandb(key=True, mode="dryrun"), None, "offline", 0),
        (FakeWandb(key=True, mode="disabled"), None, "disabled", 0),
        (FakeWandb(key=True, mode="offline"), "online", "online", 0),
        (FakeWandb(key=True), "offline", "offline", 0),
        (FakeWandb(), "online", "offline", 1),
        (FakeWandb(key=True, reachable=False), None, "offline", 1),
        (FakeWandb(key=True, allowed=False), None, "offline", 1),
    ],
)
def test_online_needs_a_key_and_a_server_and_is_never_asked_for(tmp_path, fake, asked, mode, said):
    assert began(tmp_path, fake, mode=asked)["mode"] == mode
    assert len(fake.said) == said and not any("\n" in line for line in fake.said)


@pytest.mark.parametrize(
    ("refusal", "modes", "line"),
    [
        ({"reachable": False}, ["offline", "offline"], "ConnectionError: no route; the mirror is kept offline"),
        (
            {"allowed": False},
            ["online", "teardown", "offline", "offline"],
            "PermissionError: not yours; the mirror is kept offline",
        ),
    ],
)
def test_a_server_that_is_gone_or_refuses_is_tried_once(tmp_path, refusal, modes, line):
    fake = FakeWandb(key=True, **refusal)
    begins = follow([make_run(tmp_path, seed) for seed in (0, 1)])[:2]
    process = Mirror(fake, fake.said.append)
    for begin in begins:
        process.begin(begin["id"], begin["about"])
    assert [each["mode"] for each in fake.began] == modes
    assert fake.said == [line]


def test_launch_tags_its_sweep_and_ends_with_the_lines_that_upload(tmp_path, monkeypatch, capsys):
    file = tmp_path / "conf.py"
    file.write_text(f"def get_config():\n    return {FIELDS}\ndef sweep_short():\n    return [{{'seed': 0}}]\n")
    workdir = tmp_path / "work dir"

    def train_nothing(points, workdir, source, **options):
        for plan in launch.plan(points, workdir, source, {}):
            for run in plan.runs:
                (workdir / "wandb" / f"offline-run-20250131_235959-{run.identity}").mkdir(parents=True)
        return 0

    monkeypatch.setattr(launch, "launch", train_nothing)
    monkeypatch.setattr(cli, "_leave_accelerators", lambda: None)
    assert cli.main(["launch", "--config", str(file), "--sweep", "short", "--workdir", str(workdir)]) == 0
    [run] = record.find(workdir)
    assert run.experiment.wandb.tags == ("short", "mine")
    path = workdir / "wandb" / f"offline-run-20250131_235959-{run.identity}"
    assert capsys.readouterr().out.endswith(f"\nwandb sync '{path}'\n")
    (path / f"run-{run.identity}.wandb.synced").touch()
    other = tmp_path / "elsewhere"
    monkeypatch.setenv("WANDB_DIR", str(other))
    for name in (f"{run.identity}-eval-12345678", f"{run.identity}x", "0123456789ab"):
        (other / "wandb" / f"offline-run-20250131_235959-{name}").mkdir(parents=True)
    path = other / "wandb" / f"offline-run-20250131_235959-{run.identity}-eval-12345678"
    assert mirror.sync_commands(workdir) == [f"wandb sync {path}"]


def test_nothing_of_ours_asks_for_a_terminal_or_prints_for_wandb(tmp_path, monkeypatch):
    started = {}

    def popen(command, **options):
        started.update(options)
        return SimpleNamespace(stdin=open(tmp_path / "in", "wb"), wait=lambda seconds: 0)

    monkeypatch.setenv("WANDB_RUN_ID", "someone-elses")
    monkeypatch.setattr(subprocess, "Popen", popen)
    with mirror.training([make_run(tmp_path)]):
        pass
    assert started["start_new_session"] and started["stdin"] == subprocess.PIPE
    assert started["stdout"] == subprocess.DEVNULL and "WANDB_RUN_ID" not in started["env"]
