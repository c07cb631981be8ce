"""What a benchmark is asked to measure: shapes, encodings, rounds."""

import dataclasses
from typing import Any

from pe_ablation import config, encodings
from pe_ablation.config import Experiment
from pe_ablation.model import SIZES

FEWEST = 1024  # tokens of a text to stream


class BenchError(ValueError):
    """A measurement that cannot be made as asked; the message names the field."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What `pe-ablation bench` can be told. None: what each part takes by itself.

    size: a name of `model.SIZES`. length: tokens of a training window, of a prompt and of what follows it. batch: how
    many of them at once. lengths: tokens of the windows that are scored. tokens: of the text that is streamed. rounds:
    how often each way takes its turn.
    """

    size: str = "micro"
    length: int = 128
    batch: int | None = None
    encodings: tuple[str, ...] | None = None
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    tokens: int = 100_000
    rounds: int | None = None

    def __post_init__(self):
        if self.size not in SIZES:
            raise BenchError(f"size: no size {self.size!r}{config.near(self.size, SIZES)}; allowed: {', '.join(SIZES)}")
        for name in ("length", "batch", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BenchError(f"{name}: {value} is too small; at least 1")
        if not self.lengths or min(self.lengths) < 1:
            raise BenchError(f"lengths: {list(self.lengths)}; at least one, of at least 1 token each")
        if self.tokens < FEWEST:
            raise BenchError(f"tokens: {self.tokens} is too short a text to measure; at least {FEWEST}")
        if self.encodings == ():
            raise BenchError("encodings: none; at least one")
        for name in self.encodings or ():
            try:
                encodings.find(name)
            except ValueError as error:
                raise BenchError(f"encodings: {error}") from None
            if self.encodings is not None and self.encodings.count(name) > 1:
                raise BenchError(f"encodings: {name} is named twice")
        if len(set(self.lengths)) < len(self.lengths):
            raise BenchError(f"lengths: {list(self.lengths)}; each once")


def experiment(asked: Request, encoding: str, length: int, batch: int = 1) -> Experiment:
    """Training on `batch` windows of `length` bytes a step, everything else by default. Raises ConfigError."""
    tree: dict[str, Any] = {
        "encoding": {"name": encoding},
        "model": asked.size,
        "data": {"block": length},
        "train": {"length": length, "batch_tokens": batch * length},
        "eval": {"lengths": [length], "last_k": 1},
    }
    return config.read(tree)
