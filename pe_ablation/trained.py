"""A trained run, loaded to be used: what evaluation, generation and streaming start from."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pe_ablation import checkpoint, config, data, fused, untrained
from pe_ablation.config import Experiment
from pe_ablation.model import GPT, GPTConfig, abstract
from pe_ablation.record import Run


class NotTrained(ValueError):
    """A run that cannot be used; the message names its path."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's model: `graph` and `params` merge to a `GPT`; `abstract` is one without values.

    step: of the checkpoint. alive: false where training diverged. unread: entries of the encoding's parameters that no
    training gradient reached (see `untrained.find`), None where that isn't known.
    """

    run: Run
    experiment: Experiment
    tokenizer: data.Tokenizer
    config: GPTConfig
    abstract: GPT
    graph: Any
    params: Any
    step: int
    alive: bool
    unread: untrained.Entries | None

    @property
    def model(self) -> GPT:
        """The model, to be called outside a trace or for what it says of itself."""
        return nnx.merge(self.graph, self.params)


def load(run: Run) -> Trained:
    """Raises NotTrained for a run that isn't trained to its end, or whose encoding's code has changed since."""
    experiment = run.experiment
    _refuse_other_code(run, experiment)
    tokenizer = data.tokenizer(experiment.data)
    gpt = experiment.gpt(tokenizer.vocab_size)
    if gpt.implementation in fused.PLATFORMS:  # named for training: what follows has windows, caches, other machines
        gpt = dataclasses.replace(gpt, implementation="auto")
    without_values = abstract(gpt)
    graph, like = nnx.split(without_values)
    folder = run.path / "checkpoints"
    step = checkpoint.last_step(folder)
    if step is None:
        raise NotTrained(f"{run.path}: has no checkpoint to load")
    found = checkpoint.load_parts(folder, step, {"params": like, "alive": jax.ShapeDtypeStruct((), jnp.bool_)})
    params, alive = found["params"], bool(found["alive"])
    if step < experiment.train.steps and alive and experiment.imported is None:
        raise NotTrained(f"{run.path}: trained to step {step} of {experiment.train.steps} only")
    started = experiment.start.run is not None  # entries that no gradient reached may have been trained before
    unread = None if started else untrained.find(folder, step, params)
    return Trained(run, experiment, tokenizer, gpt, without_values, graph, params, step, alive, unread)


def _refuse_other_code(run: Run, experiment: Experiment) -> None:
    recorded, now = run.identity, config.training_identity(experiment)
    if recorded != now:
        raise NotTrained(
            f"{run.path}: trained as {recorded}, but {experiment.encoding.name} is now {now}: its code has changed "
            "since; restore it, or train anew"
        )
