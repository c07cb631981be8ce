"""Training: the runs of a pack in one program, resumable to the bit.

A pack is runs that differ in their seed and peak learning rate alone: the seeds of a point, or of several. Letters in
shapes: R runs, A micro-batches, B windows of a micro-batch, L window length in tokens.

One step, always in this order: take a batch of each run -> dispatch the step -> record the step before it -> at a
checkpoint step, and when a signal asks to stop, record this one too, then save {state, data iterator}. Nothing random
is kept: dropout keys are made of seed and step, batches of seed and position. So a resumed run repeats an uninterrupted
one bit for bit on one machine with as many cores.
"""

import contextlib
import dataclasses
import functools
import math
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from pe_ablation import cores, data, fused, positions, start, stopping
from pe_ablation.checkpoint import Checkpoints
from pe_ablation.config import Experiment, TrainConfig, pack, read, refuse_imported
from pe_ablation.cores import Split
from pe_ablation.memory import program_bytes
from pe_ablation.model import GPT, GPTConfig, abstract, keyed
from pe_ablation.progress import Progress
from pe_ablation.record import Run


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "optimizer", "step", "alive"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, int32 steps done, and whether every step so far was finite."""

    params: Any
    optimizer: Any
    step: jax.Array
    alive: jax.Array


def decays(path: tuple[Any, ...]) -> bool:
    """Whether weight decay acts on a parameter, by its path, so that stacking layers changes nothing.

    Kernels of the blocks and the token embedding decay; biases, layer norms and all of an encoding's do not.
    """
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return names[0] != "encodings" and ("kernel" in names or names[0] == "embedding")


def schedule(config: TrainConfig) -> optax.Schedule:
    """The share of the peak: linear from 0 over `warmup_steps`, then a cosine to `final_fraction` at `steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=1.0,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.final_fraction,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Global-norm clipping, once, on the accumulated gradient; then AdamW with the decay mask above.

    Its updates are those of a peak learning rate of 1, in which they are linear: the step scales them by the run's own,
    so that one program serves every rate.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: decays(path), params),
        ),
    )


def init_state(config: GPTConfig, optimizer: optax.GradientTransformation, seed: jax.Array) -> TrainState:
    """The state of one seed before its first step."""
    params = nnx.state(GPT(config, rngs=nnx.Rngs(params=jax.random.key(seed))), nnx.Param)
    return TrainState(params, optimizer.init(params), jnp.int32(0), jnp.bool_(True))


def window_nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood of int32 targets [...] under float32 logits [..., V], in nats."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def accumulate(loss_sums, params: Any, micro_batches: Any) -> tuple[Any, dict[str, jax.Array]]:
    """The gradient's sum over micro-batches, stacked on the leading axis, and the sums {nats, tokens, ...}.

    `loss_sums(params, micro_batch)` returns (summed nats, sums).
    """
    gradient = functools.partial(jax.grad(loss_sums, has_aux=True), params)
    first = jax.tree.map(lambda x: x[0], micro_batches)
    if jax.tree.leaves(micro_batches)[0].shape[0] == 1:
        return gradient(first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, first))
    add = lambda total, each: (jax.tree.map(jnp.add, total, gradient(each)), None)  # noqa: E731
    return jax.lax.scan(add, zeros, micro_batches)[0]


def token_mean(grads: Any, sums: dict[str, jax.Array]) -> Any:
    """Summed gradients over the tokens they are of: each token weighs the same, whatever micro-batch it is in."""
    return jax.tree.map(lambda g: g / jnp.maximum(sums["tokens"], 1.0), grads)


Place = Callable[[jax.Array, jax.Array], positions.Placed | None]  # inputs [B,L] and a key -> where they stand


def train_step(
    graph: Any,
    optimizer: Any,
    tokenizer: data.Tokenizer,
    state: TrainState,
    windows: jax.Array,
    seed: jax.Array,
    learning_rate: jax.Array,
    place: Place = lambda tokens, key: None,
    split: Split | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step of one run on int32 windows [A,B,L+1], whose inputs [B,L] `place` gives positions.

    `split` says how a micro-batch is computed, which changes the last bits of sums and nothing else; None: at once.
    `learning_rate` is the peak, a float32 by which the updates of `make_optimizer` are scaled.
    Metrics are sums over the batch, and the gradient's norm. BOS is no target; EOS is one, so that generation can stop.
    After a step that is not finite the state stays frozen.
    """
    grads, sums = summed_gradient(graph, tokenizer, state, windows, seed, place, split)
    return stepped(optimizer, state, grads, sums, learning_rate)


def summed_gradient(
    graph: Any,
    tokenizer: data.Tokenizer,
    state: TrainState,
    windows: jax.Array,
    seed: jax.Array,
    place: Place,
    split: Split | None,
) -> tuple[Any, dict[str, jax.Array]]:
    """The first half of `train_step`: gradient and {nats, tokens, bytes}, summed over the batch."""
    keys = tuple(jax.random.fold_in(keyed(jax.random.key(seed), name), state.step) for name in ("dropout", "positions"))
    bos = -1 if tokenizer.bos is None else tokenizer.bos  # -1 is no target either
    sizes = jnp.asarray(tokenizer.bytes_per_token, jnp.float32)

    def loss_sums(params, part):
        dropping, drawing, tokens = part
        placed = place(tokens[:, :-1], drawing)
        logits = nnx.merge(graph, params)(tokens[:, :-1], placed=placed, dropout_key=dropping)
        targets = tokens[:, 1:]
        weight = (targets != bos).astype(jnp.float32)
        nats = jnp.sum(weight * window_nats(logits, targets))
        return nats, {"nats": nats, "tokens": jnp.sum(weight), "bytes": jnp.sum(sizes[targets])}

    split = split or Split(windows.shape[1], batched=True)
    return _in_parts(functools.partial(accumulate, loss_sums), state.params, windows, keys, split)


def stepped(
    optimizer: Any, state: TrainState, grads: Any, sums: dict[str, jax.Array], learning_rate: jax.Array
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The second half: the state after a step along summed gradients, and the metrics."""
    grads = token_mean(grads, sums)
    norm = optax.tree.norm(grads)
    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
    alive = state.alive & jnp.isfinite(sums["nats"]) & jnp.isfinite(norm)
    moved = (optax.apply_updates(state.params, optax.tree.scale(learning_rate, updates)), optimizer_state)
    params, optimizer_state = jax.tree.map(
        lambda new, old: jnp.where(alive, new, old), moved, (state.params, state.optimizer)
    )
    metrics = {**sums, "gradient_norm": norm, "alive": alive, "was_alive": state.alive}
    return TrainState(params, optimizer_state, state.step + 1, alive), metrics


def _in_parts(summed, params, windows, keys, split):
    """`summed(params, parts)` of all windows [A,B,L+1], of which some are computed at a time and by each device.

    `keys` are those of dropout and of drawn positions. A part is (dropout key, drawing key, windows): each part drops
    its own, and parts of a micro-batch share what is drawn.
    """
    dropping, drawing = keys
    batches, parts = windows.shape[0], windows.shape[1] // split.windows
    windows = windows.reshape(batches, parts, split.windows, -1)
    keyed_by = jax.vmap(jax.random.fold_in, (None, 0))
    drop = keyed_by(dropping, jnp.arange(batches * parts)).reshape(batches, parts)
    draw = jnp.broadcast_to(keyed_by(drawing, jnp.arange(batches))[:, None], (batches, parts))

    def own(params, *stacked):
        return summed(params, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked))

    if split.devices == 1:
        return own(params, drop, draw, windows)
    shared, by_part = PartitionSpec(), PartitionSpec(None, cores.AXIS)
    total = lambda *given: jax.lax.psum(own(*given), cores.AXIS)  # noqa: E731
    specs = (shared, by_part, by_part, by_part)
    return jax.shard_map(total, mesh=split.mesh(), in_specs=specs, out_specs=shared, check_vma=False)(
        params, drop, draw, windows
    )


def placing(experiment: Experiment, tokenizer: data.Tokenizer) -> Place:
    """How an experiment's training windows are given positions."""
    chosen, bos = experiment.positions, experiment.data.bos
    if chosen.name == "randomized":
        return lambda tokens, key: positions.randomized(key, tokens.shape[1], chosen.maximum or 0)
    if chosen.name == "interpolated":
        return lambda tokens, key: positions.spread(tokens.shape[1], chosen.maximum or 0)
    if chosen.name == "documents" and bos == "document":
        return lambda tokens, key: positions.documents(tokens, tokens == tokenizer.bos)
    if chosen.name == "documents":
        ends = lambda tokens: jnp.roll(tokens == tokenizer.eos, 1, axis=1).at[:, 0].set(False)  # noqa: E731
        return lambda tokens, key: positions.documents(tokens, ends(tokens))
    return lambda tokens, key: None


def fit(config: Any, run_dir: str | Path) -> dict[str, Any]:
    """Train one run in `run_dir`, from its last checkpoint if it has one; returns its summary (see `fit_pack`).

    `config` is an Experiment, or the ConfigDict that a config file's `get_config` returns, which is read strictly.
    The summary is also the run's result.json. Raises RecordError for a directory of another identity or one that
    another process is training, ConfigError for an imported experiment; what else is raised is recorded in error.json
    first.
    """
    experiment = start.resolved(config if isinstance(config, Experiment) else read(config))
    refuse_imported(experiment)
    run = Run.plan(Path(run_dir), experiment, None, data.load(experiment.data, "train").digest)
    run.start()
    try:
        summary = fit_pack([experiment], [run.path])[0]
    except BaseException:
        run.close("failed", traceback.format_exc())
        raise
    run.finish(summary)
    return summary


def fit_pack(experiments: Sequence[Experiment], run_dirs: Sequence[Path]) -> list[dict[str, Any]]:
    """Train runs that differ in nothing but the seed and the learning rate together; a summary for each.

    They start from the newest step that all have a checkpoint of. A run that stops being finite is frozen and marked
    diverged; the others go on. Summary: status (ok | diverged), steps, tokens, parameters, nats of the last step, ...
    Raises ValueError for experiments that no one program trains and for imported ones, Stopped after the checkpoint
    that a signal asked for, HeldError when another process took a run over, and whatever data, model or checkpoints
    refuse.
    """
    refuse_imported(experiments[0])
    if len({pack(each) for each in experiments}) > 1:
        raise ValueError(
            f"fit_pack: {', '.join(map(str, run_dirs))} differ in more than may differ within a pack: seed, "
            "train.learning_rate, label, eval, stream, wandb"
        )
    return _Fit(experiments, [Run(Path(path)) for path in run_dirs]).run()


def _over_runs(gradient: Callable[..., Any], update: Callable[..., Any], count: int, batched: bool) -> Any:
    """A step over a leading axis of `count` runs; gradients that are not batched are computed one after another."""

    def train_step(state, windows, seeds, rates):
        if count == 1:
            state, windows, seed, rate = jax.tree.map(lambda x: x[0], (state, windows, seeds, rates))
            return jax.tree.map(lambda x: x[None], update(state, *gradient(state, windows, seed), rate))
        each = (dataclasses.replace(state, optimizer=()), windows, seeds)
        found = jax.vmap(gradient)(*each) if batched else jax.lax.map(lambda run: gradient(*run), each)
        return jax.vmap(update)(state, *found, rates)

    return train_step


class Program:
    """A step, compiled for what it is first called with and then known by the memory it takes; it donates its state."""

    def __init__(self, step: Callable[..., Any], split: Split):
        self.split = split
        self.jitted = jax.jit(step, donate_argnums=0)
        self.compiled: Any = None

    def __call__(self, *args: Any) -> Any:
        if self.compiled is None:
            self.compiled = self.jitted.lower(*args).compile()
        return self.compiled(*args)

    @property
    def memory_bytes(self) -> int | None:
        """Of all its devices; None before its first call, and where the backend gives no account."""
        own = None if self.compiled is None else program_bytes(self.compiled)
        return None if own is None else self.split.devices * own


def programs(experiment: Experiment, tokenizer: data.Tokenizer, count: int) -> tuple[Program, Any]:
    """What trains `count` runs R of a pack: the step and, jitted, what makes its first state of uint32 seeds [R].

    The step takes a state, int32 windows [R,A,B,L+1], the seeds and float32 peak learning rates [R], and gives the next
    state and metrics. Raises ValueError for a kernel of attention that this backend, or a program of so many, lacks.
    """
    config, optimizer = experiment.gpt(tokenizer.vocab_size).together(count), make_optimizer(experiment.train)
    fused.refuse_backend(config.implementation)
    graph, place = nnx.graphdef(abstract(config)), placing(experiment, tokenizer)
    train, backend = experiment.train, jax.default_backend()
    windows = train.batch_tokens // train.length // train.accumulation
    split = cores.split(windows, train.length, backend, jax.local_device_count())
    gradient = functools.partial(summed_gradient, graph, tokenizer, place=place, split=split)
    step = _over_runs(gradient, functools.partial(stepped, optimizer), count, split.batched)
    return Program(step, split), jax.jit(jax.vmap(functools.partial(init_state, config, optimizer)))


class _Fit:
    """The loop's parts: model, optimizer, batches, records. R runs ride on the leading axis of everything.

    `experiment` is the first run's, asked for what all share; runs of a seed have one stream of batches.
    """

    def __init__(self, experiments: Sequence[Experiment], runs: list[Run]):
        self.experiments, self.runs = experiments, runs
        self.experiment = experiment = experiments[0]
        self.seeds = [each.seed for each in experiments]
        self.peaks = np.asarray([each.train.learning_rate for each in experiments], np.float32)
        self.tokenizer = data.tokenizer(experiment.data)
        self.config = experiment.gpt(self.tokenizer.vocab_size).together(len(experiments))
        self.tokens = data.load(experiment.data, "train")
        self.batches = {seed: self._batches(seed) for seed in dict.fromkeys(self.seeds)}
        self.step, self.init = programs(experiment, self.tokenizer, len(experiments))

    def _batches(self, seed: int) -> data.Batches:
        train, source = self.experiment.train, self.experiment.data
        return data.Batches(
            self.tokens,
            block=source.block,
            batch_tokens=train.batch_tokens,
            length=train.length,
            seed=seed,
            bos=source.bos,
        )

    def run(self) -> list[dict[str, Any]]:
        with contextlib.ExitStack() as opened:
            checkpoints = [opened.enter_context(Checkpoints(run.path / "checkpoints")) for run in self.runs]
            state = self._loop(checkpoints, *self._restore(checkpoints))
        return self._summaries(state)

    def _restore(self, checkpoints: list[Checkpoints]) -> tuple[TrainState, int]:
        """The state of the newest step that every run has, and that step; logs are cut back to it."""
        common = set.intersection(*(set(each.steps()) for each in checkpoints))
        step = max(common, default=0)
        seeds = jnp.asarray(self.seeds, jnp.uint32)
        if step:
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.eval_shape(self.init, seeds))
            restored = [each.load(step, like) for each in checkpoints]
            state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(each for each, _ in restored))
            for seed, (_, saved) in zip(self.seeds, restored, strict=True):
                self.batches[seed].set_state(saved)
        else:
            state = self.init(seeds)
            if self.experiment.start.run is not None:
                params = start.parameters(self.experiment, self.seeds, state.params)
                state = dataclasses.replace(state, params=params)
        for run in self.runs:
            run.truncate("metrics", step)
            run.truncate("timing", step)
        return jax.device_put(state, self.step.split.sharding()), step

    def _loop(self, checkpoints: list[Checkpoints], state: TrainState, done: int) -> TrainState:
        train = self.experiment.train
        together = f" x{len(self.runs)} runs" if len(self.runs) > 1 else ""
        label = f"{self.experiment.arm} L={train.length}{together}"
        progress = Progress(train.steps, label, train.batch_tokens * len(self.experiments))
        try:
            return self._steps(checkpoints, state, done, _Log(self.runs, self.peaks, train, progress, done))
        finally:
            progress.close()

    def _steps(self, checkpoints: list[Checkpoints], state: TrainState, done: int, log: "_Log") -> TrainState:
        train = self.experiment.train
        seeds = np.asarray(self.seeds, np.uint32)
        waiting: tuple[int, Any] | None = None
        for step in range(done + 1, train.steps + 1):
            if waiting is None:  # at the start and after checkpoints
                stopping.check(f"trained to step {step - 1}")
                if not bool(jnp.any(state.alive)):
                    break
            state, metrics = self.step(state, self._next(), seeds, self.peaks)
            if waiting is not None:
                log.write(*waiting)
            waiting = (step, metrics)
            for run in self.runs:
                run.check_held(look=False)
            if step % train.checkpoint_every == 0 or step == train.steps or stopping.requested():
                log.write(*waiting)
                waiting = None
                self._save(checkpoints, step, state)
        return state

    def _next(self) -> np.ndarray:
        """int32 [R,A,B,L+1]."""
        taken = {seed: next(batches) for seed, batches in self.batches.items()}
        windows = np.stack([taken[seed] for seed in self.seeds])
        return windows.reshape(len(self.seeds), self.experiment.train.accumulation, -1, windows.shape[-1])

    def _save(self, checkpoints: list[Checkpoints], step: int, state: TrainState) -> None:
        for run in self.runs:
            run.check_held()
        for each in checkpoints:  # all, before any goes on: runs stay less than two saves apart and share a step
            each.wait()
        for row, (each, seed) in enumerate(zip(checkpoints, self.seeds, strict=True)):
            each.save(
                step, jax.tree.map(lambda x, row=row: x.addressable_data(0)[row], state), self.batches[seed].get_state()
            )

    def _summaries(self, state: TrainState) -> list[dict[str, Any]]:
        train = self.experiment.train
        split = self.step.split
        taken = self.config.attention(split.windows, train.length, fused.kernel(), **self.experiment.positions.asked)
        shared = {
            "parameters": sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(state.params)),
            "attention": ", ".join(dict.fromkeys(taken.values())),
            "memory_bytes": self.step.memory_bytes,
            "devices": split.devices,
            "platform": jax.default_backend(),
            "jax": jax.__version__,
            **start.recorded(self.experiment),
        }
        rows = [run.rows("metrics") for run in self.runs]
        return [
            {
                "status": "ok" if alive else "diverged",
                "steps": step,
                "tokens": step * train.batch_tokens,
                **shared,
                "last": own[-1] if own else None,
            }
            for alive, step, own in zip(state.alive.tolist(), state.step.tolist(), rows, strict=True)
        ]


class _Log:
    """Turns fetched metrics into rows of each run's logs and into progress."""

    def __init__(self, runs: list[Run], peaks: np.ndarray, train: TrainConfig, progress: Progress, done: int):
        self.runs, self.peaks, self.train, self.progress = runs, peaks, train, progress
        self.schedule = schedule(train)
        self.since, self.began = done, time.monotonic()

    def write(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Record one step, where it is due: each `log_every`, the last, and the one at which a run diverges."""
        due = step % self.train.log_every == 0 or step == self.train.steps
        alive, was_alive = np.asarray(metrics["alive"]), np.asarray(metrics["was_alive"])
        if not due and np.array_equal(alive, was_alive):
            return
        values = {name: np.asarray(each, np.float64) for name, each in metrics.items()}
        values["learning_rate"] = self.peaks * np.asarray(self.schedule(step - 1))
        for row, run in enumerate(self.runs):
            if was_alive[row] and (due or not alive[row]):
                run.append("metrics", [self._row(step, {name: float(each[row]) for name, each in values.items()})])
        if due:
            self._time(step)
            losses = (values["nats"] / values["tokens"])[alive]
            self.progress.update(step, float(losses.mean()) if losses.size else math.nan)

    def _row(self, step: int, sums: dict[str, float]) -> dict[str, Any]:
        nats = sums["nats"] / sums["tokens"]
        return {
            "step": step,
            "tokens": step * self.train.batch_tokens,
            "nats": nats,
            "perplexity": perplexity(nats),
            "bits_per_byte": sums["nats"] / math.log(2) / max(sums["bytes"], 1.0),
            "gradient_norm": sums["gradient_norm"],
            "learning_rate": sums["learning_rate"],
            "diverged": not sums["alive"],
        }

    def _time(self, step: int) -> None:
        now = time.monotonic()
        seconds, steps = now - self.began, step - self.since
        tokens = steps * self.train.batch_tokens * len(self.runs)
        rate = tokens / seconds if seconds else math.inf
        row = {"step": step, "seconds": seconds, "tokens_per_second": rate, "seeds": len(self.runs)}
        for run in self.runs:
            run.append("timing", [row])
        self.since, self.began = step, now


def perplexity(nats: float) -> float:
    """exp of a mean in nats; infinite past float64's range instead of an error."""
    return math.exp(nats) if nats < 709.0 else (nats if math.isnan(nats) else math.inf)
