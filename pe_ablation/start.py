"""Training that starts with the weights of a finished run, under a transform or with another encoding.

    start.transform = "yarn"         fine-tuning of a RoPE that was scaled (Chen et al. 2023, arXiv:2306.15595)
    encoding.name = "none"           of a run of another encoding: the encoding is dropped (DroPE; Gelberg et al. 2025,
                                     arXiv:2512.12167)

Weights outside the encoding are taken as they are. So are those of the encoding, where it is the same one, and options
that the experiment doesn't give are the run's; of another one they are new, and the old ones are dropped: `check` says
which. The optimizer and the batches begin anew.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pe_ablation import checkpoint, config, data, encodings, trained, transforms
from pe_ablation.config import ConfigError, EncodingConfig, Experiment
from pe_ablation.model import GPTConfig, abstract
from pe_ablation.record import Run
from pe_ablation.transforms import TransformError

SAME = ("num_layers", "num_heads", "model_dim", "mlp_dim", "embed_scale")  # of the model, whatever the encoding
BESIDE = "/logit_scale"  # a parameter of the blocks that comes and goes with a field, as an encoding's do


@dataclasses.dataclass(frozen=True)
class Change:
    """What becomes of the weights in `source`: encodings before and after, the transform between them, and by path the
    arrays that are copied, made of others by the transform, dropped, and new.
    """

    source: Path
    before: str
    after: str
    transform: str
    copied: tuple[str, ...]
    made: Mapping[str, tuple[int, ...]]
    dropped: Mapping[str, tuple[int, ...]]
    new: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        under = "" if self.transform == "none" else f" under {self.transform}"
        return (
            f"starts with {self.source}{under}: {self.before} -> {self.after}; {len(self.copied)} arrays copied; "
            + (f"made of the trained ones: {_listed(self.made)}; " if self.made else "")
            + f"dropped: {_listed(self.dropped)}; new: {_listed(self.new)}"
        )


def resolved(experiment: Experiment) -> Experiment:
    """The experiment with what `start` means for it: which weights these are, and the encoding's options under it.

    Raises ConfigError for a run that isn't there or isn't trained to its end, and for a transform that is not one of
    the encoding, changes nothing, or shows it other distances, which is no way to train.
    """
    start = experiment.start
    if start.run is None or start.identity is not None:
        return experiment
    run = _source(experiment)
    identity, asked = _identity(start.run, run), _transform(experiment)
    before = run.experiment
    experiment = dataclasses.replace(experiment, start=dataclasses.replace(start, identity=identity))
    if experiment.encoding.name == before.encoding.name:
        options = {**before.encoding.options, **experiment.encoding.options}
        experiment = dataclasses.replace(experiment, encoding=EncodingConfig(experiment.encoding.name, options))
    if asked is None:
        return experiment
    if (experiment.encoding, experiment.model.pattern) != (before.encoding, before.model.pattern):
        raise ConfigError(
            f"start.transform: {start.transform!r} changes the encoding of {run.path}, {_encoding(before)}; the "
            f"experiment has {_encoding(experiment)}: name that one, or no transform"
        )
    try:
        old = before.gpt(vocab_size=258)
        asked.refuse(old)
        ready = asked.at(experiment.train.length, before.train.length)
        new = ready.config(old)
    except TransformError as error:
        raise ConfigError(f"start.transform: {error}") from None
    if new == old:
        raise ConfigError(
            f"start.transform: {start.transform!r} changes nothing at train.length {experiment.train.length}, "
            f"{run.path} having {before.train.length}; name a factor, or train longer"
        )
    if new.distances is not None or new.pattern is not None:
        raise ConfigError(
            f"start.transform: {start.transform!r} is for reading alone; allowed: what changes frequencies of rope, "
            "the rows of a learned table or the scale of logits, in a model without a pattern"
        )
    return dataclasses.replace(
        experiment,
        encoding=EncodingConfig(experiment.encoding.name, new.encoding_options),
        model=dataclasses.replace(experiment.model, logit_scale=new.logit_scale),
        start=dataclasses.replace(experiment.start, transform=str(ready)),
    )


def check(experiment: Experiment) -> Change | None:
    """What the weights become; None for training from the beginning.

    Raises ConfigError for weights of another model or vocabulary, and of a run that has changed since.
    """
    if experiment.start.run is None:
        return None
    run = _source(experiment)
    if (found := _identity(experiment.start.run, run)) != experiment.start.identity:
        raise ConfigError(f"start.run: {run.path} holds {found}, and held {experiment.start.identity} when it was read")
    before = run.experiment
    for name in SAME:
        theirs, own = getattr(before.model, name), getattr(experiment.model, name)
        if theirs != own:
            raise ConfigError(f"model.{name}: {own}, but {run.path} was trained with {theirs}")
    lengths = [len(each.model.pattern or (None,)) for each in (before, experiment)]
    if lengths[0] != lengths[1]:
        raise ConfigError(f"model.pattern: of {lengths[1]} layers, but {run.path} was trained with one of {lengths[0]}")
    old, new = (data.tokenizer(each.data) for each in (before, experiment))
    if (old.name, old.vocab_size, old.digest) != (new.name, new.vocab_size, new.digest):
        raise ConfigError(
            f"data.tokenizer: {new.name} of {new.vocab_size} ids, but {run.path} was trained on {old.name} of "
            f"{old.vocab_size}{', with other merges' if old.name == new.name else ''}"
        )
    copied, lost, fresh = _sorted(run, _under(experiment, before, old.vocab_size), experiment.gpt(new.vocab_size))
    asked = _transform(experiment)
    made = [name for name in copied if name == transforms.TABLE and asked is not None and asked.tables]
    return Change(
        source=run.path,
        before=_encoding(before),
        after=_encoding(experiment),
        transform=experiment.start.transform,
        copied=tuple(name for name in copied if name not in made),
        made={_short(name): copied[name] for name in made},
        dropped={_short(name): shape for name, shape in lost.items()},
        new={_short(name): shape for name, shape in fresh.items()},
    )


def parameters(experiment: Experiment, seeds: Sequence[int], fresh: Any) -> Any:
    """`fresh` parameters, stacked by seed on the leading axis, with those that each seed's run hands on in their place.

    Raises what `check` and `trained.load` do.
    """
    rows = [jax.tree.map(lambda leaf, row=row: leaf[row], fresh) for row in range(len(seeds))]
    begun = [_begun(dataclasses.replace(experiment, seed=each), row) for each, row in zip(seeds, rows, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *begun)


def recorded(experiment: Experiment) -> dict[str, Any]:
    """What a run's summary says of its start; nothing where it began from the beginning, or what it began with is gone.

    The run's own config has the identity of the weights, come what may.
    """
    try:
        change = check(experiment)
    except (ValueError, FileNotFoundError):
        return {}
    if change is None:
        return {}
    return {"start": {**dataclasses.asdict(change), "source": str(change.source), "copied": list(change.copied)}}


def _begun(experiment: Experiment, fresh: Any) -> Any:
    change = check(experiment)
    assert change is not None
    loaded = trained.load(Run(change.source))
    if not loaded.alive:
        raise ConfigError(f"start.run: {change.source} diverged")
    if (asked := _transform(experiment)) is not None:
        loaded = transforms.apply(asked, loaded, experiment.train.length)
    old = checkpoint.named(loaded.params)
    kept = {*change.copied, *(name for name in old if _short(name) in change.made)}
    leaves = [old[name] if name in kept else leaf for name, leaf in checkpoint.named(fresh).items()]
    return jax.tree.unflatten(jax.tree.structure(fresh), leaves)


def _transform(experiment: Experiment) -> transforms.Transform | None:
    return config.transform(experiment.start.transform, "start.transform")


def _source(experiment: Experiment) -> Run:
    """The run itself, or of a point that of the experiment's seed; ConfigError where there is none, trained."""
    assert experiment.start.run is not None
    path = Path(experiment.start.run)
    if not (path / "config.json").exists():
        path /= f"seed_{experiment.seed}"
    if not (path / "config.json").exists():
        raise ConfigError(
            f"start.run: {experiment.start.run!r} is no run, nor a point with a run of seed {experiment.seed}; a "
            "launch needs it, also to go on: what starts with its weights is known by them"
        )
    run = Run(path)
    if (run.result() or {}).get("status") != "ok" or checkpoint.last_step(path / "checkpoints") is None:
        raise ConfigError(f"start.run: {path} is not trained to its end ({' '.join(run.status())})")
    return run


def _identity(asked: str, run: Run) -> str:
    """Of the weights, as far as the seeds of a point share it: they start one program."""
    own = run.identity if (Path(asked) / "config.json").exists() else run.config["point"]
    return f"{own}@{checkpoint.last_step(run.path / 'checkpoints')}"


def _under(experiment: Experiment, before: Experiment, vocab_size: int) -> GPTConfig:
    """The decoder whose weights are handed on: that of the run, under the transform."""
    asked, gpt = _transform(experiment), before.gpt(vocab_size)
    return gpt if asked is None else asked.at(experiment.train.length, before.train.length).config(gpt)


Shapes = dict[str, tuple[int, ...]]


def _sorted(run: Run, before: GPTConfig, after: GPTConfig) -> tuple[Shapes, Shapes, Shapes]:
    """Arrays that both decoders have, that only the one before has, and only the one after; ConfigError for another."""
    old, new = (checkpoint.named(nnx.state(abstract(each))) for each in (before, after))
    pairs = enumerate(zip(before.distinct, after.distinct, strict=False))
    alike = tuple(f"encodings/{at}/" for at, pair in pairs if _alike(*pair))

    def is_others(name: str) -> bool:
        return name.startswith("encodings/") and not name.startswith(alike)

    copied = [name for name in new if name in old and not is_others(name)]
    if wrong := [name for name in copied if old[name].shape != new[name].shape]:
        shapes = "; ".join(f"{_short(each)} {old[each].shape} there, {new[each].shape} here" for each in wrong)
        way = "; a learned table gets rows by start.transform: interpolate, clamp, wrap" if "table" in shapes else ""
        raise ConfigError(f"start.run: {run.path} has arrays of other shapes: {shapes}{way}")
    lost = [name for name in {**old, **new} if name not in copied and not is_others(name) and BESIDE not in name]
    if lost:
        raise ConfigError(f"start.run: {run.path} is another model: {', '.join(map(_short, lost))} not in both")
    return (
        {name: new[name].shape for name in copied},
        {name: leaf.shape for name, leaf in old.items() if name not in copied},
        {name: leaf.shape for name, leaf in new.items() if name not in copied},
    )


def _alike(one: Any, other: Any) -> bool:
    """Whether two encodings have the same parameters, whatever their sizes: they are of one class."""
    return encodings.find(one.name) is encodings.find(other.name)


def _short(name: str) -> str:
    return name.removesuffix("/value")


def _encoding(experiment: Experiment) -> str:
    """The encoding in a line: rope(frequencies=[8], magnitude=1.07), and what goes with it."""
    given = experiment.encoding.options.items()
    shown = (f"{name}={f'[{len(value)}]' if isinstance(value, tuple) else value}" for name, value in given)
    options = ", ".join(shown)
    pattern = f" in the pattern {experiment.model.pattern}" if experiment.model.pattern else ""
    scale = experiment.model.logit_scale
    return f"{experiment.encoding.name}({options}){pattern}{'' if scale == 'none' else f' with logit_scale {scale}'}"


def _listed(arrays: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in arrays.items()) or "none"
