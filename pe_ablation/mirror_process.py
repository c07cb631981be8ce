"""The process that talks to wandb, started by `mirror` and fed one JSON message a line. It ends with its input.

Alone in its process so that wandb can be missing, break or hang, and a run never notices. It imports nothing of the
package (which would import jax). Whatever goes wrong is one line on stderr; nothing else is ever printed, and nothing
asked: stdin is the pipe, and there is no terminal.
"""

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

SAID = 3  # exit code of a process that gave up and said why
SECONDS_ONLINE = 30  # to reach the server at the start, and to upload the rest at the end
KILLED = 255  # wandb's own exit code for a run whose process was killed
PROJECT = "pe-ablation"
REPLACED = "replaced"  # beside the offline runs, where `wandb sync` doesn't look


class Mirror:
    """The wandb runs that were begun and not yet finished, by id. A message's `do` is the method it calls."""

    def __init__(self, wandb: Any, say: Any):
        self.wandb, self.say, self.runs, self.unreachable = wandb, say, {}, False
        self.settings = wandb.setup().settings  # WANDB_* variables and wandb's own settings files

    def begin(self, id: str, about: dict[str, Any]) -> None:
        """Start the run afresh: one of the same id, offline or on the server, gives way to it."""
        chosen = {
            "id": id,
            "project": about["project"] or self.settings.project or PROJECT,
            "entity": about["entity"] or self.settings.entity,
            "group": about["group"] or self.settings.run_group or about["point"],
            "tags": list(dict.fromkeys([*about["own_tags"], *(about["tags"] or self.settings.run_tags or ())])),
            **{name: about[name] for name in ("name", "job_type", "config", "dir")},
        }
        mode = self._mode(about["mode"])
        Path(about["dir"]).mkdir(parents=True, exist_ok=True)
        try:
            self.runs[id] = self._init(mode, chosen)
        except Exception as error:
            if mode != "online" or self.runs:
                raise
            self._stay_offline(error)
            self.wandb.teardown()  # the service holds on to the id that it failed with
            self.runs[id] = self._init("offline", chosen)
        for metric, options in about["metrics"]:
            self.define(id, metric, options)

    def _mode(self, asked: str | None) -> str:
        """online, offline or disabled; online only with a key, which is never asked for."""
        mode = {"run": "online", "dryrun": "offline"}.get(found := asked or self.settings.mode, found)
        if mode != "online":
            return mode
        if self.unreachable:
            return "offline"
        try:
            if self.wandb.login(prompt=False, verify=True):
                return "online"
        except Exception as error:
            self._stay_offline(error)
            return "offline"
        if asked or "WANDB_MODE" in os.environ:
            self._stay_offline(ValueError("mode is online, but there is no API key"))
        return "offline"

    def _stay_offline(self, error: Exception) -> None:
        self.unreachable = True
        self.say(f"{_line(error)}; the mirror is kept offline")

    def _init(self, mode: str, chosen: dict[str, Any]) -> Any:
        settings = self.wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True,
            x_disable_machine_info=True, x_save_requirements=False, symlink=False, use_dot_wandb=False,
            init_timeout=SECONDS_ONLINE, finish_timeout=SECONDS_ONLINE, finish_timeout_raises=True,
        )  # fmt: skip
        return self.wandb.init(mode=mode, settings=settings, reinit="create_new", **chosen)

    def define(self, id: str, metric: str, options: dict[str, Any]) -> None:
        self.runs[id].define_metric(metric, **options)

    def log(self, id: str, row: dict[str, Any], step: int | None = None) -> None:
        self.runs[id].log(row, step=step, commit=True)

    def summary(self, id: str, values: dict[str, Any]) -> None:
        self.runs[id].summary.update({name: _shown(value) for name, value in values.items()})

    def replace(self, id: str) -> None:
        """Set older offline runs of this id aside: this one now holds all that they did."""
        own = Path(self.runs[id].settings.sync_dir)
        for old in sorted(own.parent.glob(f"offline-run-*-{id}")):
            if old.name != own.name:
                (own.parent / REPLACED).mkdir(exist_ok=True)
                old.rename(_free(own.parent / REPLACED / old.name))

    def report(self, id: str, tables: dict[str, Any], images: dict[str, str], rows: str) -> None:
        """Tables {name: {columns, data}}, images {name: file}, and the tidy rows' csv as an artifact."""
        run = self.runs[id]
        made = {name: self.wandb.Table(**table) for name, table in tables.items()}
        run.log(made | {name: self.wandb.Image(file) for name, file in images.items()})
        artifact = self.wandb.Artifact(f"rows-{id}", type="dataset")
        artifact.add_file(rows)
        run.log_artifact(artifact)

    def finish(self, id: str, code: int) -> None:
        run = self.runs.pop(id)
        try:
            run.finish(exit_code=code)
        except TimeoutError:
            self.say(f"not everything was uploaded; do it with: wandb sync {run.settings.sync_dir}")


def _shown(value: Any) -> Any:
    """wandb writes NaN and infinities of a history as these words; in a summary it would drop them."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _free(path: Path) -> Path:
    tries = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, 1000))]
    return next(each for each in tries if not each.exists())


def _line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def _only_we_speak() -> Any:
    """Silence stderr for wandb and its service; what is left to say goes through the function returned."""
    stream = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return lambda text: print(f"wandb: {text}", file=stream, flush=True)


def main() -> int:
    """Obey the messages on stdin; a run that is open when they end was killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # schedulers send them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    say = _only_we_speak()
    try:
        import wandb

        mirror = Mirror(wandb, say)
        for line in sys.stdin.buffer:
            message = json.loads(line)
            getattr(mirror, message.pop("do"))(**message)
        for id in list(mirror.runs):
            mirror.finish(id, KILLED)
    except BaseException as error:
        say(f"{_line(error)}; nothing more is mirrored, run records are not affected")
        return SAID
    return 0


if __name__ == "__main__":
    os._exit(main())  # wandb's exit hooks may wait for a server; every run was finished above
