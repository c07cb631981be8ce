"""Other implementations of the same, each in a process of its own that waits for its turn (see `peer_process`).

Why a process: what compiles for too long can be ended, and the threads of two libraries stay apart. OpenMP's threads
spin while they wait for each other: on an idle machine that is the fastest (GPT-2 compiled, training at `micro` on 2
cores: 26.9 thousand tokens/s, 22.4 with OMP_WAIT_POLICY=PASSIVE), but where something else takes a core each operation
lasts a time slice (1.6, and 10.9 with it). So nothing is set here: measure on an idle machine, or set that.
"""

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pe_ablation import cores
from pe_ablation.bench.turns import Way

PROCESS = Path(__file__).with_name("peer_process.py")
NEEDS = {  # modules, by the function of `peer_process`
    "product": ("torch",),
    "gpt2": ("torch", "transformers"),
    "x_transformers": ("torch", "x_transformers"),
    "continuation": ("torch", "transformers"),
}
INSTALL = "pip install -e '.[bench]'"
SECONDS_TO_START = 120.0  # imports and a first call
SECONDS_TO_COMPILE = 60.0  # more than that a user would not wait
SECONDS_FOR_A_TURN = 600.0
ENVIRONMENT = {  # what is set already stays
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # what is compiled is compiled now
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class PeerError(RuntimeError):
    """A peer that cannot be measured; the message says why."""


class Asked(NamedTuple):
    """A peer to be started: its name in tables, a function of `peer_process`, and what that is given."""

    name: str
    kind: str
    given: dict[str, Any]


class Peer:
    """One that has been started, with a first call behind it.

    about: what its process said of it, `seconds` of the first call (compiling, where it compiles) among it.
    """

    def __init__(self, asked: Asked):
        self.name = asked.name
        self.child = subprocess.Popen(
            [sys.executable, "-P", str(PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": str(cores.count())},
            start_new_session=True,  # compilers that it starts end with it
        )
        try:
            self._ask({"kind": asked.kind, "given": {"threads": cores.count(), **asked.given}}, SECONDS_TO_START)
            compiles = asked.given.get("compiled", False)
            self.about = self._ask({"times": 1}, SECONDS_TO_COMPILE if compiles else SECONDS_TO_START)
        except BaseException:
            self.close()
            raise

    def way(self, amount: float, times: int = 1) -> Way:
        """A call is `times` calls in the process, `amount` in all."""
        return Way(self.name, amount, lambda: self._ask({"times": times}, SECONDS_FOR_A_TURN))

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self.child.stdin is not None and self.child.stdout is not None
        try:
            self.child.stdin.write(json.dumps(message).encode() + b"\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self.name}: its process has ended") from None
        until, answer = time.monotonic() + seconds, b""
        while not answer.endswith(b"\n"):
            if not select.select([self.child.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise PeerError(f"{self.name}: no answer within {seconds:.0f} s")
            read = os.read(self.child.stdout.fileno(), 65536)
            if not read:
                raise PeerError(f"{self.name}: its process has ended ({self.child.wait()})")
            answer += read
        found = json.loads(answer)
        if "error" in found:
            raise PeerError(f"{self.name}: {found['error']}")
        return found

    def close(self) -> None:
        """End the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


def started(
    opened: contextlib.ExitStack, asked: Sequence[Asked], say: Callable[[str], None]
) -> tuple[list[Peer], list[str]]:
    """The peers that could be started, which `opened` closes, and a line of each that is not measured, and why."""
    peers, lines = [], []
    missing = {each.name: _missing(each.kind) for each in asked}
    absent = sorted({module for modules in missing.values() for module in modules})
    if absent:
        names = ", ".join(name for name, modules in missing.items() if modules)
        lines.append(f"not measured: {names}: {', '.join(absent)} not installed; {INSTALL}")
        say(lines[0])
    for each in asked:
        if missing[each.name]:
            continue
        say(f"{each.name}: starting")
        try:
            peers.append(Peer(each))
        except PeerError as error:
            lines.append(f"not measured: {error}")
            say(lines[-1])
        else:
            opened.callback(peers[-1].close)
    return peers, lines


def waiting() -> str:
    """How OpenMP's threads wait for each other: PASSIVE, ACTIVE, or unset."""
    return os.environ.get("OMP_WAIT_POLICY", "unset")


def _missing(kind: str) -> list[str]:
    return [module for module in NEEDS[kind] if importlib.util.find_spec(module) is None]
