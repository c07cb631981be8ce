"""What a point will cost, before anything runs: minutes from floating-point operations, memory from array sizes.

Estimates to plan with: an encoding's own operations are left out, and so is what a compiler saves. Letters: N layers,
M model dim, F hidden dim of the MLP, H heads, V vocabulary, P parameters, T tokens of a window.
"""

import dataclasses
import importlib.util
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from pe_ablation import attention, cores, fused, record
from pe_ablation.config import ConfigError, Experiment
from pe_ablation.model import UNROLL, GPTConfig
from pe_ablation.record import RecordError, Run

START_SECONDS = 15.0  # a point's process: imports, tokens, compilation
ASSUMED = {"cpu": 2e10, "gpu": 5e13, "tpu": 5e13}  # operations a second of one core or device, where none were measured


def forward(gpt: GPTConfig, length: int) -> float:
    """Operations of one token's forward pass: 2 N (4 M^2 + 2 M F) + 2 V M + 4 N T M.

    The last term is attention, which computes all T x T scores whoever is masked.
    """
    dim = gpt.model_dim
    products = gpt.num_layers * (4 * dim**2 + 2 * dim * gpt.hidden_dim) + gpt.vocab_size * dim
    return 2.0 * products + 4.0 * gpt.num_layers * length * dim


def step(experiment: Experiment, gpt: GPTConfig) -> float:
    """Operations of one seed's training step: three forward passes a token, four where `remat` repeats one."""
    return experiment.train.batch_tokens * (4 if gpt.remat else 3) * forward(gpt, experiment.train.length)


def scoring(experiment: Experiment, gpt: GPTConfig) -> float | None:
    """Operations of scoring one seed; None where the number of windows depends on the corpus: no `max_windows`."""
    evaluation, train_length = experiment.eval, experiment.train.length
    if evaluation.protocols != ("targets",) or evaluation.max_windows is None:
        return None
    total = 0.0
    for length in {train_length, *evaluation.lengths}:
        batch = evaluation.batch(length)
        windows = math.ceil(evaluation.max_windows / batch) * batch
        passes = 2 if length > train_length and "window_mask" in evaluation.nulls else 1
        total += passes * windows * length * forward(gpt, length)
    return total * len(evaluation.transforms)


def memory(experiment: Experiment, gpt: GPTConfig, parameters: int, runs: int) -> float:
    """Bytes of arrays at the worst moment: training all runs together, or scoring one at the longest length.

    Training holds 16 P (weights, gradient, two moments in float32), 4 P more where a batch is computed in parts, the
    activations of a part, 10 M + 3 F numbers a token and layer (with `remat` M, and a loop step's layers whole), and
    8 V bytes a token for logits and their gradient. Dense attention keeps its scores in every layer, blockwise one
    block's, a fused kernel none, but the bias that an encoding may have made for it. Every core of a CPU has its own of
    all that, and has one run's activations at a time.
    """
    train, longest = experiment.train, experiment.eval.longest(experiment.train.length)
    width = 2 if gpt.dtype == "bfloat16" else 4
    platform, count = _platform()
    batch = train.batch_tokens // train.length // train.accumulation
    windows, devices, batched = cores.split(batch, train.length, platform, count)
    tokens = windows * train.length
    layers = min(gpt.num_layers, UNROLL) if gpt.remat else gpt.num_layers
    scores = _scores(gpt.together(runs), windows, train.length, layers, **experiment.positions.asked)
    inputs = gpt.num_layers * tokens * width * gpt.model_dim if gpt.remat else 0
    activations = layers * tokens * width * (10 * gpt.model_dim + 3 * gpt.hidden_dim)
    activations += inputs + scores + 8 * gpt.vocab_size * tokens
    if windows * devices < batch or train.accumulation > 1:
        activations += 4 * parameters
    at_once = runs if batched else 1
    training = devices * (runs * 16 * parameters + at_once * activations)
    batch = experiment.eval.batch(longest)
    scored = batch * longest
    forwards = scored * (width * (4 * gpt.model_dim + 2 * gpt.hidden_dim) + 8 * gpt.vocab_size)
    read = dataclasses.replace(gpt, implementation="auto") if gpt.implementation in fused.PLATFORMS else gpt
    return float(max(training, 4 * parameters + forwards + _scores(read, batch, longest, 1)))


def _scores(gpt: GPTConfig, windows: int, length: int, layers: int, **asked: bool) -> int:
    """Bytes of attention's scores at the worst moment, where so many layers keep them.

    Dense has float32 scores and weights in all layers, blockwise those of one block; a bias is kept in every layer, in
    2 bytes, and made in float32.
    """
    kernel = next((name for name, platform in fused.PLATFORMS.items() if platform == _platform()[0]), None)
    sizes = []
    for slot, taken in gpt.attention(windows, length, kernel, **asked).items():
        if taken in fused.PLATFORMS:
            sizes.append(gpt.call(slot, length, **asked).tile * (2 * layers + 4))
        elif taken == "dense":
            sizes.append(8 * windows * gpt.num_heads * length**2 * layers)
        else:
            sizes.append(8 * windows * gpt.num_heads * min(attention.BLOCK, length) * length)
    return max(sizes)


def refuse_platform(implementation: str) -> None:
    """ConfigError for a kernel of attention by name that a launch's processes would not find here."""
    needed, found = fused.PLATFORMS.get(implementation), _platform()[0]
    if needed not in (None, found):
        raise ConfigError(
            f"model.implementation: {implementation!r} runs on {needed}, a launch here on {found}; allowed here: "
            "auto, dense, blockwise"
        )


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A finished run: its encoding, the operations of its step for one seed, operations a second of its program."""

    encoding: str
    step: float
    speed: float


class Speed:
    """Operations a second: of the finished run most like a point below `workdir`, else assumed for the platform."""

    def __init__(self, workdir: Path | None):
        self.workdir = workdir
        self.measured = list(_finished(workdir)) if workdir is not None and workdir.is_dir() else []

    def __str__(self) -> str:
        if self.measured:
            return f"the speed of {len(self.measured)} finished runs in {self.workdir}"
        platform, count = _platform()
        units = f"{count} CPU cores" if platform == "cpu" else f"one {platform.upper()}"
        return f"{ASSUMED[platform] * count / 1e9:,.0f} GFLOP/s, assumed for {units}, not measured"

    def of(self, experiment: Experiment, gpt: GPTConfig) -> float:
        """Of a run of the same encoding if there is one, and among these of the nearest size."""
        if not self.measured:
            platform, count = _platform()
            return ASSUMED[platform] * count
        size = step(experiment, gpt)
        unlike = lambda run: (run.encoding != experiment.encoding.name, abs(math.log(run.step / size)))  # noqa: E731
        return min(self.measured, key=unlike).speed


def _finished(workdir: Path) -> Iterator[_Measured]:
    """Runs that are done and timed; records that can't be read measure nothing."""
    try:
        runs = record.find(workdir)
    except RecordError:
        return
    for run in runs:
        try:
            if (found := _measure(run)) is not None:
                yield found
        except (RecordError, ConfigError):
            continue


def _measure(run: Run) -> _Measured | None:
    from pe_ablation import data

    rates: Sequence[float] = [row["tokens_per_second"] for row in run.rows("timing")]
    if run.result() is None or not rates:
        return None
    experiment = run.experiment
    one = step(experiment, experiment.gpt(data.tokenizer(experiment.data).vocab_size))
    speed = one / experiment.train.batch_tokens * statistics.median(rates)
    return _Measured(experiment.encoding.name, one, speed)


def _platform() -> tuple[str, int]:
    """(platform, cores or devices) that a launch will use, without opening a device: that is for its processes."""
    asked = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    plugins = {"gpu": ("jax_cuda12_plugin", "/dev/nvidia[0-9]*"), "tpu": ("libtpu", "/dev/accel*")}
    for platform, (plugin, devices) in plugins.items():
        found = list(Path("/").glob(devices.removeprefix("/")))
        wanted = asked in ("", platform) or (platform, asked) == ("gpu", "cuda")
        if found and wanted and importlib.util.find_spec(plugin) is not None:
            return platform, 1
    return "cpu", cores.count()
