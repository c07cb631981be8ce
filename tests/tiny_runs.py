"""Runs that train in a second, for the tests of the loop: a small text, a small model, each program compiled once."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from pe_ablation import config, train
from pe_ablation.record import Run

STEPS = 100
EPOCH = 6  # steps: 24 blocks of 16 tokens, 4 a step


class Interrupted(Exception):
    pass


def text(size: int = 398) -> bytes:
    """Letters without a period, the same everywhere; with BOS and EOS 400 tokens, a block's last target included."""
    state, letters = 1, []
    for _ in range(size):
        state = (state * 1103515245 + 12345) % 2**31
        letters.append(b"abcdefgh \n"[(state >> 16) % 10])
    return bytes(letters)


def experiment(folder: Path, overrides: dict[str, Any] | None = None, *, seed: int = 0) -> config.Experiment:
    """Dropout, accumulation and a corpus in `folder`, written where it is missing."""
    corpus = folder / "train.txt"
    if not corpus.exists():
        corpus.write_bytes(text())
    dropout = {f"dropout_{where}": 0.1 for where in ("embed", "attention", "residual")}
    tree = {
        "encoding": {"name": "t5", "options": {"num_buckets": 8, "max_distance": 16}},
        "model": {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, **dropout},
        "data": {"source": "text", "text": {"train": str(corpus)}, "block": 16, "cache_dir": str(folder / "cache")},
        "train": {
            "length": 8, "steps": STEPS, "batch_tokens": 64, "accumulation": 2, "learning_rate": 1e-2,
            "warmup_steps": 5, "log_every": 1, "checkpoint_every": STEPS,
        },
        "eval": {"lengths": (8,), "last_k": 8, "stride": 8},
        "seed": seed,
    }  # fmt: skip
    return config.read(tree, overrides)


class Trained(NamedTuple):
    """What a run saw and left: its summaries, first step, batches by step (int32 [R,A,B,L+1]), last state."""

    summaries: list[dict[str, Any]]
    start: int
    seen: dict[int, np.ndarray]
    state: train.TrainState


class SharedFit(train._Fit):
    """The loop as it is, but with the compiled step of an earlier run of the same program, and a way to stop it."""

    programs: ClassVar[dict[str, Any]] = {}

    def __init__(self, experiments, runs):
        super().__init__(experiments, runs)
        fields = dataclasses.replace(self.experiment.train, log_every=1, checkpoint_every=1, learning_rate=1.0)
        known = repr((self.config, fields, len(experiments)))
        self.step, self.init = self.programs.setdefault(known, (self.step, self.init))
        self.start, self.seen, self.stop_at, self.stop = 0, {}, None, None

    def _restore(self, checkpoints):
        state, self.start = super()._restore(checkpoints)
        return state, self.start

    def _next(self):
        step = self.start + len(self.seen) + 1
        if step - 1 == self.stop_at and self.stop is not None:
            self.stop(self)
        self.seen[step] = super()._next()
        return self.seen[step]

    def _loop(self, checkpoints, state, start):
        self.state = super()._loop(checkpoints, state, start)
        return self.state


@contextlib.contextmanager
def quick_compiles():
    """Compiled programs are slow, and compiled three times as fast."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def plan(folder: Path, experiments: list[config.Experiment]) -> list[Path]:
    """A planned run directory below `folder` for each experiment."""
    return [Run.plan(folder / f"seed_{each.seed}", each, None).path for each in experiments]


def _interrupt(_: SharedFit) -> None:
    raise Interrupted


def fit(experiments, paths, *, stop_at: int | None = None, stop=_interrupt) -> Trained:
    """`train.fit_pack`; at the end of step `stop_at`, `stop` is called with the loop (by default it raises)."""
    made = []

    def make(*args):
        made.append(SharedFit(*args))
        made[-1].stop_at, made[-1].stop = stop_at, stop
        return made[-1]

    with quick_compiles(), mock.patch.object(train, "_Fit", make):
        summaries = train.fit_pack(experiments, paths)
    loop = made[-1]
    return Trained(summaries, loop.start, loop.seen, loop.state)


def fit_until(step: int, experiments, paths) -> None:
    """Train up to the end of `step` and break off there."""
    with contextlib.suppress(Interrupted):
        fit(experiments, paths, stop_at=step)
        raise AssertionError(f"went past step {step}")


def saved(path: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    """Every array of a run's checkpoint, by name, read without the package."""
    folder: Any = (path / "checkpoints" / str(step)).absolute()
    found = ocp.load(folder, checkpointable_name="state")
    return {name: np.asarray(leaf) for name, leaf in found.items()}


def differing(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """The names whose arrays are not the same bytes."""
    assert len(one) > 10 and one.keys() == other.keys()
    return [
        name for name in one if one[name].tobytes() != other[name].tobytes() or one[name].dtype != other[name].dtype
    ]
