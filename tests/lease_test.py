import contextlib
import json
import os
import socket
import time

import pytest
from other_process import OtherProcess

from pe_ablation import lease


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "attempts"


@pytest.fixture
def other():
    with OtherProcess() as process:
        yield process


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    for folder in tuple(lease._held):
        lease.release(folder, "done")


def age(folder, number, seconds):
    """Let an attempt have been touched last so long ago."""
    then = time.time() - seconds
    os.utime(folder / f"{number}.json", (then, then))


def rewrite(folder, number, **owner):
    """Change what an attempt says about its owner, but not when it was touched."""
    path = folder / f"{number}.json"
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    told = json.loads(path.read_text())
    told["owner"] |= owner
    path.write_text(json.dumps(told))
    os.utime(path, ns=times)


def test_what_another_process_holds_is_refused_until_it_is_released(folder, other):
    assert lease.last(folder) is None
    assert other("take", folder) == "taken"
    with pytest.raises(lease.Held, match=rf"^process {other.pid}$"):
        lease.take(folder)
    assert not lease.reserve(folder, 1)
    other("release", folder, "failed", "why")
    attempt = lease.last(folder)
    assert attempt and not attempt.alive and (attempt.end or {})["reason"] == "why"
    assert lease.take(folder).number == 2
    assert other("take", folder) == f"held by process {os.getpid()}"


def test_taking_twice_in_one_process_is_one_attempt(folder):
    assert lease.take(folder) is lease.take(folder)
    lease.release(folder, "done")
    lease.release(folder, "done")
    assert [path.name for path in folder.iterdir()] == ["1.json"]


def test_a_dead_process_of_this_machine_is_taken_over_at_once(folder, other):
    other("take", folder)
    other.kill(reap=False)  # a zombie still has its pid and start time, but trains nothing
    attempt = lease.last(folder)
    assert attempt and not attempt.alive and attempt.end is None
    assert lease.take(folder).number == 2


def test_a_recycled_pid_is_another_process(folder, other):
    other("take", folder)
    rewrite(folder, 1, started="earlier")
    assert lease.take(folder).number == 2


def test_an_owner_that_gives_no_sign_of_life_loses_its_lease_and_notices(folder, other):
    other("take", folder)
    age(folder, 1, lease.STALE - 60)
    assert (attempt := lease.last(folder)) and attempt.alive
    assert other("touch", folder) == "kept"
    assert (attempt := lease.last(folder)) and attempt.seconds < 60
    age(folder, 1, lease.STALE + 1)
    assert lease.take(folder).number == 2
    assert other("touch", folder) == "lost"
    other("release", folder, "done")  # what it still says changes nothing
    assert (attempt := lease.last(folder)) and attempt.number == 2 and attempt.alive


def test_a_process_of_another_machine_lives_by_its_heartbeat_alone(folder, other):
    other("take", folder)
    other.kill()
    rewrite(folder, 1, where="elsewhere", host="elsewhere")
    with pytest.raises(lease.Held, match=r"on elsewhere, last seen \d+ s ago$"):
        lease.take(folder)
    age(folder, 1, lease.STALE + 1)
    assert lease.take(folder).number == 2


def test_a_container_with_the_same_host_name_is_another_machine(folder, other):
    other("take", folder)
    other.kill()
    rewrite(folder, 1, where=f"{socket.gethostname()} another pid namespace")
    with pytest.raises(lease.Held):
        lease.take(folder)


@pytest.mark.parametrize("offset", [-7200.0, 7200.0])
def test_the_clock_of_this_machine_does_not_matter(folder, other, monkeypatch, offset):
    other("take", folder)
    rewrite(folder, 1, where="elsewhere")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + offset)
    assert (attempt := lease.last(folder)) and attempt.alive and abs(attempt.seconds) < 60


def test_a_file_without_an_owner_is_held_until_it_is_old(folder):
    folder.mkdir()
    (folder / "1.json").touch()
    with pytest.raises(lease.Held, match="has not said its name"):
        lease.take(folder)
    age(folder, 1, lease.STALE + 1)
    assert lease.take(folder).number == 2


def test_a_number_is_never_used_again(folder, other):
    assert lease.reserve(folder, 1)
    lease.release(folder, "done")
    assert not other("reserve", folder, 1) and other("reserve", folder, 2)


def test_a_launchers_lease_passes_to_the_process_that_it_starts(folder, other):
    assert lease.reserve(folder, 1)
    assert other("take", folder) == f"held by process {os.getpid()} of launch {os.getpid()}"
    with OtherProcess({lease.VARIABLE: lease.OWNER}) as child:
        assert child("take", folder) == "taken"
        assert (attempt := lease.last(folder)) and attempt.whose == f"process {child.pid} of launch {os.getpid()}"
        assert lease.is_open(folder)
        child("release", folder, "stopped", "by a signal")
    assert not lease.is_open(folder) and [path.name for path in folder.iterdir()] == ["1.json"]


def test_the_heartbeat_beats_and_ends(folder, monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT", 0.001)
    mine = lease.take(folder)
    until = time.monotonic() + 20
    for _ in range(3):
        age(folder, 1, 1000)
        while (attempt := lease.last(folder)) and attempt.seconds > 500:
            assert time.monotonic() < until
    lease.release(folder, "done")
    assert mine._beating is not None
    mine._beating.join(10)
    assert not mine._beating.is_alive()


def test_a_heartbeat_of_a_folder_that_was_moved_away_loses_the_lease(folder):
    mine = lease.take(folder)
    folder.rename(folder.with_name("moved"))
    mine.touch()
    assert mine.lost


@pytest.mark.parametrize("number", [1, 2], ids=["free", "stale"])
def test_of_many_processes_one_wins(tmp_path, number):
    """Each of eight asks for each of forty folders, all at the same time; the stale ones have an owner that died."""
    folders = [tmp_path / str(each) for each in range(40)]
    if number == 2:
        with OtherProcess() as dead:
            assert all(dead("take", folder) == "taken" for folder in folders)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(OtherProcess()) for _ in range(8)]
        for each in others:
            each("reserve", tmp_path / f"ready {each.pid}", 1)
        for folder in folders:
            for each in others:
                each.ask("take", folder)
        answers = [[each.answer() for _ in folders] for each in others]
    for folder, given in zip(folders, zip(*answers, strict=True), strict=True):
        assert sum(each == "taken" for each in given) == 1
        assert sorted(path.name for path in folder.iterdir()) == [f"{each + 1}.json" for each in range(number)]
