"""How often each pair of a rotation turns within the training length, as it was trained and under transforms."""

from collections.abc import Sequence

import numpy as np

from pe_ablation import transforms
from pe_ablation.config import ConfigError, Experiment, transform
from pe_ablation.encodings import frequencies
from pe_ablation.encodings.rotary import RoPE
from pe_ablation.model import GPTConfig
from pe_ablation.tables import text_grid
from pe_ablation.transforms import TransformError

USUAL = ("pi", "ntk", "ntk_by_parts", "yarn:ramp=paper", "llama3")


def to_markdown(experiment: Experiment, length: int, asked: Sequence[str] = USUAL) -> str:
    """A row per pair: radians a token, tokens a turn, turns in the training length L; and those under each transform.

    A factor that isn't named is `length` over L. Raises ConfigError for transforms that change no frequencies, and for
    a model without RoPE.
    """
    train_length = experiment.train.length
    config = experiment.gpt(vocab_size=258)
    theta = _frequencies(config)
    columns = {name: frequencies.rotations(_under(name, config, length, train_length), train_length) for name in asked}
    header = ["pair", "radians a token", "tokens a turn", f"turns in {train_length}", *columns]
    turns = frequencies.rotations(theta, train_length)
    lines = [
        [str(k), f"{theta[k]:.6g}", f"{2 * np.pi / theta[k]:,.1f}", f"{turns[k]:.4g}"]
        + [f"{each[k]:.4g}" for each in columns.values()]
        for k in range(len(theta))
    ]
    about = (
        f"Turns of each pair of dims within the training length of {train_length} tokens, as trained and under "
        f"transforms for {length} tokens ({length / train_length:.3g}x). A pair that turns less than once has phases "
        "that longer texts show it for the first time; one that turns often has seen all of them."
    )
    return f"{about}\n\n{text_grid([header, *lines])}\n"


def _under(text: str, config: GPTConfig, length: int, train_length: int) -> np.ndarray:
    asked = transform(text, "transforms")
    if not isinstance(asked, transforms.Rotation):
        raise ConfigError(f"transforms: {text} changes no frequencies; allowed: {', '.join(USUAL)}, base, dynamic_ntk")
    try:
        asked.refuse(config)
        return _frequencies(asked.at(length, train_length).config(config))
    except TransformError as error:
        raise ConfigError(f"transforms: {error}") from None


def _frequencies(config: GPTConfig) -> np.ndarray:
    for slot in config.distinct:
        encoding = config.abstract_encoding(slot)
        if isinstance(encoding, RoPE):
            return encoding.frequencies
    raise ConfigError(f"encoding.name: {', '.join(slot.name for slot in config.distinct)} has no rotations of rope")
