"""Programs kept on disk: a second process compiles none, with the same bits; what jax was told, and what can't be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from written_runs import experiment

from pe_ablation import compiled, config

PROGRAM = """
import collections, json, sys
import jax
from pe_ablation import cli

seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rpartition("/")[2]]))
code = cli.main(["run", "--config", sys.argv[1], "--workdir", sys.argv[2]])
print(json.dumps([code, seen["cache_hits"], seen["cache_misses"]]))
"""


def launched(file, workdir, cache):
    """(exit code, programs taken from disk, programs compiled) of a run in a process of its own."""
    told = {"JAX_ENABLE_COMPILATION_CACHE": "true", "PE_ABLATION_CACHE": str(cache)}
    command = [sys.executable, "-c", PROGRAM, str(file), str(workdir)]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_second_launch_compiles_nothing_and_ends_with_the_same_bits(tmp_path):
    tree = config.to_dict(experiment(tmp_path, train__steps=2, eval__lengths=[8]))
    file = tmp_path / "own.py"
    file.write_text(f"import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict({tree!r})\n")
    logs = []
    for name in ("first", "second"):
        (code, hits, misses), errors = launched(file, tmp_path / name, tmp_path / "programs")
        assert code == 0 and "rror" not in errors, errors
        logs.append(next((tmp_path / name).rglob("metrics.jsonl")).read_bytes())
        assert (hits == 0 < misses) if name == "first" else (misses == 0 < hits), (hits, misses)
    assert logs[0] == logs[1]
    cells = [next((tmp_path / name).rglob("*-L8-none-*.json")).read_bytes() for name in ("first", "second")]
    assert cells[0] == cells[1] and json.loads(cells[0])["memory_bytes"] > 0


def folder_of_jax():
    told: Any = jax.config
    return told.jax_compilation_cache_dir


@pytest.fixture
def enabled():
    """jax as it is outside of the tests, and as it was afterwards."""
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_compilation_cache_max_size",
             "jax_persistent_cache_min_compile_time_secs")  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_lie_apart_by_machine_and_what_jax_was_told_holds(tmp_path, enabled, monkeypatch):
    compiled.keep(tmp_path)
    own = Path(folder_of_jax() or "")
    assert own.parent == tmp_path / "compiled" and own.is_dir()
    compiled.keep(tmp_path / "other")
    assert folder_of_jax() == str(own)
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    compiled._machine.cache_clear()
    assert compiled._machine() != own.name
    compiled._machine.cache_clear()


def test_a_folder_that_takes_no_programs_stops_nothing(tmp_path, enabled):
    (tmp_path / "compiled").write_text("a file")
    compiled.keep(tmp_path)
    assert folder_of_jax() is None


def test_told_to_keep_none_it_keeps_none(tmp_path):
    compiled.keep(tmp_path)
    assert folder_of_jax() is None and not list(tmp_path.iterdir())
