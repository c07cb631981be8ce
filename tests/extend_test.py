"""What another launch of the same work directory trains and scores, and what it leaves alone: by real, tiny runs."""

import os
import shutil
import signal

import pytest

from pe_ablation import config, launch, record
from pe_ablation.record import Run
from pe_ablation.sweep import Point

pytestmark = pytest.mark.usefixtures("quick_compilation")


def tree(folder):
    """Four steps of one layer, on letters; scored at the training length and twice that."""
    for split, size in (("train", 700), ("validation", 90)):
        path = folder / f"{split}.txt"
        if not path.exists():
            path.write_bytes(b"abcdefg h" * (size // 9))
    text = {split: str(folder / f"{split}.txt") for split in ("train", "validation")}
    return {
        "encoding": {"name": "alibi"},
        "model": {"num_layers": 1, "num_heads": 2, "model_dim": 8, "mlp_dim": 8},
        "data": {"source": "text", "text": text, "block": 16, "cache_dir": str(folder / "cache")},
        "train": {
            "length": 8, "steps": 4, "batch_tokens": 32, "warmup_steps": 1, "log_every": 1, "checkpoint_every": 2,
        },
        "eval": {"lengths": (8, 16), "last_k": 4, "spacing": 8, "batch_tokens": 32, "max_windows": 4},
    }  # fmt: skip


class Study:
    def __init__(self, folder, workdir):
        self.folder, self.workdir = folder, workdir

    def point(self, *seeds, **overrides):
        fields = {path.replace("__", "."): value for path, value in overrides.items()}
        return Point(tuple(config.read(tree(self.folder) | {"seed": seed}, fields) for seed in seeds))

    def bring_up(self, point):
        """Train and score what is missing, in this process; the exit code."""
        [plan] = launch.plan([point], self.workdir, None, launch.check([point]))
        return launch.run_pack([run.path for run in plan.open_runs])

    def launch(self, point, **asked):
        """A real launch, which starts a command that fails: 0 only if nothing was to be done."""
        return launch.launch([point], self.workdir, None, command=("false",), **asked)

    def trained(self):
        """What training has written for each seed: content, and which files they are."""
        return {
            run.path.name: {
                str(path.relative_to(run.path)): (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns)
                for path in run.path.rglob("*")
                if path.is_file() and (path.name.endswith(".jsonl") or "checkpoints" in path.parts)
            }
            for run in record.find(self.workdir)
        }

    def cells(self, seed=0):
        [run] = [run for run in record.find(self.workdir) if run.seed == seed]
        return {cell["key"]: (run.path / f"evaluation/{cell['key']}.json").stat().st_mtime_ns for cell in run.cells()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Corpora, and a work directory in which seed 0 is done."""
    folder = tmp_path_factory.mktemp("extend")
    study = Study(folder, folder / "first")
    assert study.bring_up(study.point(0)) == 0
    return folder


@pytest.fixture
def study(folder, tmp_path):
    """A copy of that work directory: where it lies is no part of what it is."""
    study = Study(folder, tmp_path / "work")
    shutil.copytree(folder / "first", study.workdir)
    trained = study.trained()["seed_0"]
    assert trained["metrics.jsonl"][0].count(b"\n") == 4 and any("checkpoints/4/" in name for name in trained)
    assert len(study.cells()) == 3  # 8, 16, and 16 with a window of 8
    return study


def test_lengths_and_protocols_are_scored_on_the_stored_checkpoint(study, monkeypatch):
    trained, cells = study.trained(), study.cells()
    assert study.bring_up(study.point(0, eval__lengths=(8, 16, 32))) == 0
    assert study.trained() == trained
    longer = study.cells()
    new = longer.keys() - cells.keys()
    assert any("targets-L32-none" in key for key in new)
    more = study.point(0, eval__lengths=(8, 16, 32), eval__protocols=("targets", "blocks"))
    save_cell = Run.save_cell

    def save_and_signal(self, cell, arrays):
        save_cell(self, cell, arrays)
        os.kill(os.getpid(), signal.SIGUSR1)

    # Stopped between two cells, it goes on with the next.
    monkeypatch.setattr(Run, "save_cell", save_and_signal)
    assert study.bring_up(more) == launch.RESUMABLE
    [run] = record.find(study.workdir)
    assert run.status() == ("stopped", f"trained; {len(longer) + 1} cells scored, then SIGUSR1")
    assert len(study.cells()) == len(longer) + 1
    monkeypatch.setattr(Run, "save_cell", save_cell)
    assert study.bring_up(more) == 0 and run.status() == ("done", "")
    both = study.cells()
    assert longer.items() <= both.items() and sum("blocks" in key for key in both) == 5
    assert study.trained() == trained and study.launch(more) == 0


def test_a_new_seed_is_trained_alone(study):
    trained, cells = study.trained(), study.cells()
    assert study.bring_up(study.point(0, 1)) == 0
    now = study.trained()
    assert now.keys() == {"seed_0", "seed_1"} and now["seed_0"] == trained["seed_0"] and study.cells() == cells
    assert now["seed_1"]["metrics.jsonl"][0].count(b"\n") == 4
    assert now["seed_1"]["metrics.jsonl"][0] != now["seed_0"]["metrics.jsonl"][0]


def test_workers_paths_and_how_often_is_logged_change_nothing(study, capsys):
    trained = study.trained()
    study.workdir = study.workdir.rename(study.workdir.with_name("elsewhere"))
    assert study.launch(study.point(0)) == 0
    if len(os.sched_getaffinity(0)) > 1:
        assert study.launch(study.point(0), workers=2) == 0
    fields = {"train__log_every": 2, "train__checkpoint_every": 4, "model__implementation": "dense"}
    assert study.launch(study.point(0, data__cache_dir=str(study.folder / "other cache"), **fields)) == 0
    assert study.trained() == trained
    out = capsys.readouterr().out
    assert out.count("done before") == len(out.splitlines()) >= 2
    assert study.launch(study.point(0, train__steps=5)) == 1  # this one would have been trained


def test_forced_again_it_ends_with_the_same_numbers(study):
    before = study.trained()["seed_0"]["metrics.jsonl"][0]
    assert study.launch(study.point(0), force=True) == 1  # its command fails; what was there is aside
    [run] = record.find(study.workdir)
    assert run.status()[0] == "failed" and run.rows("metrics") == []
    assert study.bring_up(study.point(0)) == 0
    assert (run.path / "metrics.jsonl").read_bytes() == before
    assert (run.path.with_name("seed_0.replaced-1") / "metrics.jsonl").read_bytes() == before
