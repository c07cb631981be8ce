"""Checkpoints of {state, data iterator}: written in the background, committed whole, restored strictly."""

import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

KEEP = 2


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read, or that belongs to another model; the message names its path."""


class Checkpoints:
    """The checkpoints below `directory`, by step; the last two are kept.

    What a killed save left behind is not a checkpoint: its folder is renamed to STEP.uncommitted and reported. A save
    runs in the background; if it failed, the next `save` or `close` raises.
    """

    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        for path in _uncommitted(self.directory):
            aside = path.with_name(f"{path.name}.uncommitted")
            warnings.warn(f"{path}: not a committed checkpoint; set aside as {aside.name}", stacklevel=2)
            path.rename(_free(aside))
        self._pending: Any = None
        self._checkpointer = ocp.training.Checkpointer(
            self.directory,  # pyright: ignore[reportArgumentType]
            preservation_policy=ocp.training.preservation_policies.LatestN(KEEP),  # pyright: ignore[reportArgumentType]
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return sorted(each.step for each in self._checkpointer.checkpoints)

    def save(self, step: int, state: Any, data: Mapping[str, Any]) -> None:
        """Start writing a pytree of arrays and the data iterator's JSON state, replacing an older save of this step."""
        self.wait()
        try:
            with tempfile.TemporaryFile(dir=self.directory):
                pass  # a folder that can't be written would leave orbax's threads waiting for it for minutes
            self._pending = self._checkpointer.save_checkpointables_async(
                step, {"state": named(state), "data": dict(data)}, force=True, overwrite=step in self.steps()
            )
        except OSError as error:
            raise CheckpointError(f"{self.directory}: cannot write the checkpoint of step {step} ({error})") from error

    def wait(self) -> None:
        """Until the save under way is committed; raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:  # whatever the writing thread met
            raise CheckpointError(f"{self.directory}: the last checkpoint was not written ({error})") from error

    def load(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """(state shaped as the pytree `like`, data iterator's state); CheckpointError lists every path that differs."""
        abstract = jax.tree.map(_on_device, named(like))
        found = self._checkpointer.checkpointables_metadata(step).metadata["state"]
        _refuse_other(f"{self.directory / str(step)}", found, abstract)
        loaded = self._checkpointer.load_checkpointables(step, {"state": abstract, "data": None})
        leaves = [loaded["state"][name] for name in named(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), loaded["data"]

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._checkpointer.close()


def load_parts(directory: Path, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """Some fields of a saved state (`params`, ...), each shaped as its value in `like`, without reading the rest."""
    path: Any = directory.absolute() / str(step)
    abstract = jax.tree.map(_on_device, named(dict(like)))
    found = _metadata(path)
    _refuse_other(str(path), {name: each for name, each in found.items() if name.split("/")[0] in like}, abstract)
    whole = {name: abstract.get(name, ocp.PLACEHOLDER) for name in found}
    loaded = _load(path, whole)
    return jax.tree.unflatten(jax.tree.structure(dict(like)), [loaded[name] for name in named(dict(like))])


def load_leaves(directory: Path, step: int, wanted: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """The arrays of a saved state whose path `wanted` accepts, by path, without reading the rest."""
    path: Any = directory.absolute() / str(step)
    found = _metadata(path)
    whole = {name: _on_device(leaf) if wanted(name) else ocp.PLACEHOLDER for name, leaf in found.items()}
    if not any(map(wanted, found)):
        return {}
    loaded = _load(path, whole)
    return {name: np.asarray(loaded[name]) for name in found if wanted(name)}


def _metadata(path: Any) -> Any:
    try:
        found = ocp.metadata(path, checkpointable_name="state").metadata
    except Exception as error:  # whatever orbax makes of a broken folder
        raise _unreadable(path, error) from error
    if found is None:
        raise _unreadable(path, "no description of its arrays")
    return found


def _load(path: Any, whole: Any) -> Any:
    try:
        return ocp.load(path, whole, checkpointable_name="state")
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Any, why: Any) -> CheckpointError:
    reason = str(why).strip().split("\n")[0][:200]
    return CheckpointError(f"{path}: a damaged checkpoint ({reason}); move it away, and the step before it counts")


def last_step(directory: Path) -> int | None:
    """The newest committed step below `directory`, or None."""
    return max(steps(directory), default=None)


def steps(directory: Path) -> list[int]:
    """The committed steps below `directory`, ascending."""
    return sorted(int(path.name) for path in _steps(directory) if _is_committed(path))


def named(tree: Any) -> dict[str, Any]:
    """A pytree's leaves by path, `a/b/0/c`, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _on_device(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _refuse_other(path: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    def kind(leaf):
        return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"

    differing = [f"{name}: only in the checkpoint" for name in found if name not in wanted]
    differing += [f"{name}: missing from the checkpoint" for name in wanted if name not in found]
    differing += [
        f"{name}: {kind(found[name])} in the checkpoint, {kind(wanted[name])} in the model"
        for name in wanted
        if name in found and kind(found[name]) != kind(wanted[name])
    ]
    if differing:
        raise CheckpointError(f"{path}: a checkpoint of another model:\n  " + "\n  ".join(sorted(differing)))


def _steps(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*") if path.name.isdigit()] if directory.is_dir() else []


def _is_committed(path: Path) -> bool:
    return (path / "_CHECKPOINT_METADATA").is_file()


def _uncommitted(directory: Path) -> list[Path]:
    return [path for path in _steps(directory) if not _is_committed(path)]


def _free(path: Path) -> Path:
    """`path`, or with the first number behind it that no file has."""
    tries = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, 1000))]
    return next(each for each in tries if not each.exists())
