"""Child processes, several at once, each on its share of the machine: started, waited for, and stopped together."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pe_ablation import lease
from pe_ablation.placement import Share, pinned

# glibc keeps freed arrays instead of returning them to the kernel each step: a sixth more training steps on CPU.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
# What a child may take to finish a step and commit a checkpoint; schedulers commonly grant 30 to 120 s.
SECONDS_TO_STOP = 100.0


class Workers:
    """At most one process per share. `asked` is the first signal that was heard, by which all were asked to stop."""

    def __init__(self, shares: Sequence[Share]):
        self.free = list(shares)
        self.running: dict[subprocess.Popen, Share] = {}
        self.asked: signal.Signals | None = None
        self._deadline: float | None = None
        self._events: queue.SimpleQueue[signal.Signals | subprocess.Popen] = queue.SimpleQueue()

    def start(self, arguments: Sequence[str], log: Path | None) -> subprocess.Popen:
        """A process on the next free share; with `log`, what it prints is appended there.

        It ends with us, even if we are killed, if it watches for the end of its input.
        """
        share = self.free.pop(0)
        environment = {**KEEP_MEMORY, **os.environ, **share.environment, lease.VARIABLE: lease.OWNER}
        with pinned(share), contextlib.ExitStack() as files:
            output = {"stdout": files.enter_context(log.open("ab")), "stderr": subprocess.STDOUT} if log else {}
            process = subprocess.Popen(arguments, stdin=subprocess.PIPE, env=environment, **output)
        self.running[process] = share
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()
        return process

    def _watch(self, process: subprocess.Popen) -> None:
        process.wait()
        self._events.put(process)

    def hear(self, number: signal.Signals) -> None:
        """The handler of signals: `next_end` acts on them."""
        self._events.put(number)

    def next_end(self) -> subprocess.Popen:
        """Wait for a process to end. The first signal asks all to stop, one more or SECONDS_TO_STOP kill them."""
        while True:
            try:
                event = self._events.get(timeout=self._deadline and max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                self._kill()
                continue
            if isinstance(event, subprocess.Popen):
                self.free.append(self.running.pop(event))
                assert event.stdin is not None
                event.stdin.close()
                return event
            self._stop(event)

    def _stop(self, number: signal.Signals) -> None:
        if self.asked is not None:
            self._kill()
            return
        self.asked, self._deadline = number, time.monotonic() + SECONDS_TO_STOP
        again = "Ctrl-C again" if number == signal.SIGINT else f"{number.name} again"
        print(f"{number.name}: stopping after a checkpoint of what is running; {again} kills it", flush=True)
        for process in self.running:
            process.terminate()

    def _kill(self) -> None:
        self._deadline = None
        for process in self.running:
            process.kill()


def describe(code: int) -> str:
    """How a process ended, by its exit code, as subprocess gives it."""
    if code >= 0:
        return f"the process ended with exit code {code} and no result"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = ", possibly out of memory" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({name}{hint})"
