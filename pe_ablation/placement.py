"""Which part of this machine each of several workers gets: a share of the cores, or an accelerator of its own."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

# Asked in a process of its own: a launcher that looked itself would hold the accelerators' memory.
PROBE = """
import jax
backend = jax.default_backend()
print(backend, len({tuple(each.coords) if backend == "tpu" else each.id for each in jax.local_devices()}))
"""
# The variable by which a process is shown one device, by jax's name of the backend.
VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}
ALONE = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclasses.dataclass(frozen=True)
class Share:
    """The cores of one worker (None: whatever there is) and what its environment is told about devices."""

    cores: frozenset[int] | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def shares(workers: int) -> list[Share]:
    """A share for each worker; one worker alone has the whole machine, and nothing is asked or pinned.

    Raises ValueError for more workers than there are devices or, where jax computes on the CPU, cores.
    """
    if workers < 1:
        raise ValueError(f"workers: {workers}; at least 1")
    if workers == 1:
        return [Share()]
    backend, devices = _backend()
    return _cores(workers) if backend == "cpu" else _devices(workers, backend, devices)


def _backend() -> tuple[str, int]:
    """(jax's default backend, devices) as a worker will see them."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    asked = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, check=False)
    if asked.returncode:
        raise ValueError(f"workers: jax finds no device here ({asked.stderr.strip().splitlines()[-1]})")
    backend, count = asked.stdout.split()[-2:]
    return backend, int(count)


def _cores(workers: int) -> list[Share]:
    """The cores that this process may use, dealt evenly; XLA starts a thread for each that it may run on."""
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError(f"workers: {workers}; this system cannot keep processes to cores, so 1 is all there can be")
    cores = sorted(os.sched_getaffinity(0))
    if workers > len(cores):
        raise ValueError(f"workers: {workers} are more than the {len(cores)} cores that this process may use")
    bounds = [len(cores) * each // workers for each in range(workers + 1)]
    return [Share(frozenset(cores[bounds[each] : bounds[each + 1]])) for each in range(workers)]


def _devices(workers: int, backend: str, count: int) -> list[Share]:
    if backend not in VISIBLE:
        raise ValueError(f"workers: {workers}; how to share {backend} devices is not known, so 1 is all there can be")
    if workers > count:
        raise ValueError(f"workers: {workers} are more than the {count} {backend} devices here")
    variable = VISIBLE[backend]
    given = os.environ.get(variable)
    names = given.split(",")[:count] if given else [str(each) for each in range(count)]
    alone = ALONE if backend == "tpu" else {}
    return [Share(None, {variable: name, **alone}) for name in names[:workers]]


@contextlib.contextmanager
def pinned(share: Share) -> Iterator[None]:
    """While it lasts, processes that this thread starts may run on the share's cores alone."""
    if share.cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, share.cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
