"""A second process that takes, keeps and gives back leases as it is told, for tests of who holds a run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = """
import json, sys
from pathlib import Path
from pe_ablation import lease

for line in sys.stdin:
    command, folder, *arguments = json.loads(line)
    folder = Path(folder)
    try:
        if command == "take":
            lease.take(folder)
            answer = "taken"
        elif command == "reserve":
            answer = lease.reserve(folder, *arguments)
        elif command == "touch":
            lease.held(folder).touch()
            answer = "lost" if lease.held(folder).lost else "kept"
        elif command == "release":
            answer = lease.release(folder, *arguments)
    except lease.Held as holder:
        answer = f"held by {holder}"
    print(json.dumps(answer), flush=True)
"""


class OtherProcess:
    """`other("take", folder)`; it starts without importing jax, so it is quick. `told` says who launched it."""

    def __init__(self, told: dict[str, str] | None = None):
        environment = {**os.environ, **(told or {})}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", SOURCE], env=environment, **pipes)
        self.pid = self.process.pid

    def ask(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(each) if isinstance(each, Path) else each for each in command]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def __call__(self, *command: Any) -> Any:
        self.ask(*command)
        return self.answer()

    def kill(self, *, reap: bool = True) -> None:
        self.process.kill()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # gone, and perhaps not yet reaped
        if reap:
            self.close()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> "OtherProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
