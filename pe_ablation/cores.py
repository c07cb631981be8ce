"""How a batch is computed: a few windows at a time, on each core of a CPU its share of them.

A CPU's caches hold the activations of a few hundred tokens, and two cores that share every operation wait for each
other for a third of the time, so each core is a device with windows of its own (docs/performance.md has the figures).
An accelerator takes the whole batch at once.
"""

import contextlib
import os
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

AXIS = "cores"
TOKENS_AT_ONCE = 256
FORCED = "--xla_force_host_platform_device_count"


def count() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_devices() -> None:
    """Make every core a device of jax's, unless the environment says how many there are, or jax has begun."""
    if "JAX_NUM_CPU_DEVICES" in os.environ or FORCED in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(RuntimeError):  # jax has opened its devices
        jax.config.update("jax_num_cpu_devices", count())


class Split(NamedTuple):
    """Windows that are computed at a time, how many devices compute them, each its own, and whether the gradients of
    several runs are batched.

    On a CPU they are computed one after another: there a product of R small matrices takes longer than R products.
    """

    windows: int
    devices: int = 1
    batched: bool = False

    def mesh(self) -> Mesh:
        return Mesh(np.asarray(jax.local_devices()[: self.devices]), (AXIS,), axis_types=(AxisType.Auto,))

    def sharding(self) -> Sharding:
        """Of arrays that every device has whole, by name, so that restored ones are stepped by the same program."""
        if self.devices == 1:
            return SingleDeviceSharding(jax.local_devices()[0])
        return NamedSharding(self.mesh(), PartitionSpec())


def split(windows: int, length: int, platform: str, devices: int) -> Split:
    """How so many devices of a platform compute a batch of `windows` windows of `length` tokens.

    On a CPU, at a time the largest part, a divisor, of TOKENS_AT_ONCE tokens at most (or one window), of which there
    are an even number if they can be; on as many devices as share the parts evenly.
    """
    if platform != "cpu":
        return Split(windows, batched=True)
    fits = lambda part: windows % part == 0 and part * length <= TOKENS_AT_ONCE  # noqa: E731
    fitting = list(filter(fits, range(1, windows + 1))) or [1]
    part = max(fitting, key=lambda part: (part == windows or windows // part % 2 == 0, part))
    parts = windows // part
    return Split(part, max(each for each in range(1, min(devices, parts) + 1) if parts % each == 0))
