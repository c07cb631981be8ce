"""Leases: at most one process trains a run, on one machine or on many that share its file system.

A folder holds an attempt per file, 1.json, 2.json, ...; the last one counts. Attempt n + 1 begins with the creation of
its file (O_EXCL), which one process alone can do, on network file systems too, where flock is often local to a machine
or absent. No file is removed and no number used again: who acts on an outdated look meets a file that is there.

The owner touches its file every HEARTBEAT seconds. An attempt is over when it says so, when its file is older than
STALE seconds by the file system's own clock (machines' clocks differ), or at once where its process is known to be
gone. Whoever begins the next one needs nobody's leave; an owner that slept through that finds the newer file.
"""

import dataclasses
import json
import math
import os
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pe_ablation import atomic

HEARTBEAT = 15.0
STALE = 300.0
# A launcher's leases pass to the processes that it starts with this variable.
VARIABLE = "PE_ABLATION_OWNER"
OWNER = os.environ.get(VARIABLE) or uuid.uuid4().hex


class Held(Exception):
    """Somebody else has the lease; the message says who."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What a file says: its owner (empty while it is being written) and its end (None: not yet)."""

    path: Path
    owner: Mapping[str, Any]
    end: Mapping[str, Any] | None

    @property
    def number(self) -> int:
        return int(self.path.stem)

    @property
    def seconds(self) -> float:
        """Since it was touched, by the clock of its file system."""
        try:
            touched = self.path.stat().st_mtime
        except FileNotFoundError:  # the whole run was moved aside just now
            return math.inf
        try:
            with tempfile.TemporaryFile(dir=self.path.parent) as probe:
                return os.fstat(probe.fileno()).st_mtime - touched
        except OSError:  # a folder that we may only read
            return time.time() - touched

    @property
    def alive(self) -> bool:
        gone = self.owner.get("where") == _where() and start_of(self.owner["pid"]) != self.owner["started"]
        return self.end is None and not gone and self.seconds < STALE

    @property
    def whose(self) -> str:
        """'process 12 of launch 10 on HOST, last seen 20 s ago'; the last part for other machines alone."""
        if not self.owner:
            return f"a process that has not said its name, {self.seconds:.0f} s ago"
        launch = f" of launch {self.owner['launch']}" if self.owner["launch"] else ""
        here = self.owner["where"] == _where()
        return f"process {self.owner['pid']}{launch}" + (
            "" if here else f" on {self.owner['host']}, last seen {self.seconds:.0f} s ago"
        )


def last(folder: Path) -> Attempt | None:
    """The attempt that counts, or None if there was none."""
    number = max((int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit()), default=0)
    return _read(_file(folder, number)) if number else None


def _read(path: Path) -> Attempt | None:
    try:
        found = json.loads(path.read_bytes())
        return Attempt(path, dict(found["owner"]), found["end"])
    except FileNotFoundError:  # the whole run was moved aside just now
        return None
    except (ValueError, KeyError, TypeError):  # created, and not yet or never written
        return Attempt(path, {}, None)


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number}.json"


class Lease:
    """This process's hold on the attempt `number` of `folder`."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.number = folder, number
        self.lost = False
        self._over = threading.Event()
        self._beating: threading.Thread | None = None

    @property
    def path(self) -> Path:
        return _file(self.folder, self.number)

    def keep(self) -> None:
        """Touch the file every HEARTBEAT seconds from a thread, until the end or until the lease is lost."""
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name=f"lease {self.path}", daemon=True)
            self._beating.start()

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT):
            self.touch()
            if self.lost:
                return

    def touch(self) -> None:
        """One beat. A file system that is away for a moment costs nothing; a newer attempt costs the lease."""
        self.look()
        if not self.lost:
            try:
                os.utime(self.path)
            except FileNotFoundError:
                self.lost = True
            except OSError:
                return

    def look(self) -> None:
        """Notice a newer attempt."""
        self.lost = self.lost or _file(self.folder, self.number + 1).exists()

    def close(self, end: Mapping[str, Any]) -> None:
        self._over.set()
        found = last(self.folder)
        if found is not None and found.number == self.number:
            _write(self.path, found.owner, end)


_held: dict[Path, Lease] = {}
_taking = threading.Lock()


def held(folder: Path) -> Lease | None:
    """The lease that this process has, or had until it lost it."""
    return _held.get(folder.absolute())


def reserve(folder: Path, number: int) -> bool:
    """Begin attempt `number` for a process that this one starts next; False if somebody else has begun one."""
    folder = folder.absolute()
    with _taking:
        found = last(folder)
        return not (found and found.alive) and _begin(folder, number, launch=os.getpid()) is not None


def take(folder: Path) -> Lease:
    """Begin the next attempt for this process, or carry on one that it or its launcher began; raises Held."""
    folder = folder.absolute()
    with _taking:
        found = last(folder)
        if found is not None and found.end is None and found.owner.get("token") == OWNER:
            return _carry_on(folder, found)
        if found is not None and found.alive:
            raise Held(found.whose)
        lease = _begin(folder, found.number + 1 if found else 1, launch=None)
    if lease is None:
        found = last(folder)
        raise Held(found.whose if found else "another process")
    lease.keep()
    return lease


def is_open(folder: Path) -> bool:
    """Whether this process has an attempt there that has not said how it ended."""
    lease = held(folder)
    attempt = lease and _read(lease.path)
    return attempt is not None and attempt.end is None


def forget(folder: Path) -> None:
    """Nothing here belongs to this process any more."""
    _held.pop(folder.absolute(), None)


def moved(folder: Path, to: Path) -> None:
    """The folder was renamed, with the lease that this process has of it."""
    _held[to.absolute()] = Lease(to.absolute(), _held.pop(folder.absolute()).number)


def release(folder: Path, state: str, reason: str = "") -> None:
    """End this process's attempt, if it has one: the folder is free."""
    lease = _held.pop(folder.absolute(), None)
    if lease is not None:
        lease.close({"state": state, "reason": reason, "time": time.time()})


def _begin(folder: Path, number: int, launch: int | None) -> Lease | None:
    folder.mkdir(exist_ok=True)
    path = _file(folder, number)
    try:
        with path.open("x") as file:
            json.dump({"owner": _this_process(launch), "end": None}, file)
    except FileExistsError:
        return None
    _held[folder] = Lease(folder, number)
    return _held[folder]


def _carry_on(folder: Path, found: Attempt) -> Lease:
    lease = _held.get(folder)
    if lease is None or lease.number != found.number:
        _write(_file(folder, found.number), _this_process(found.owner["launch"]), None)
        lease = _held[folder] = Lease(folder, found.number)
    lease.keep()
    return lease


def _write(path: Path, owner: Mapping[str, Any], end: Mapping[str, Any] | None) -> None:
    atomic.write(path, [json.dumps({"owner": owner, "end": end}).encode()])


def _this_process(launch: int | None) -> dict[str, Any]:
    pid = os.getpid()
    here = {"host": socket.gethostname(), "where": _where(), "pid": pid, "started": start_of(pid)}
    return {**here, "launch": launch, "token": OWNER, "time": time.time()}


def _where() -> str:
    """Where a pid means the same process: the host, its boot and the pid namespace (containers share host names)."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    linux = [boot.read_text().strip(), os.readlink(space)] if boot.exists() and space.is_symlink() else []
    return " ".join([socket.gethostname(), *linux])


def start_of(pid: int) -> str | None:
    """When a process started, as text that only it gives; None for one that is gone or only waits to be reaped."""
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return listed.stdout.strip() or None
    try:
        # The command's name, in parentheses, may hold anything: fields are counted from the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
