"""Tokenizers: bytes to ids and back. `make` is the registry."""

from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Ids below `vocab_size`; text never encodes to the special ids `bos` and `eos`, only the pipeline places them."""

    name: str
    vocab_size: int
    bos: int
    eos: int

    @property
    def bytes_per_token(self) -> np.ndarray:
        """int32 [V]: how many bytes of text each id stands for; 0 for special ids."""
        ...

    def encode(self, content: bytes) -> np.ndarray:
        """Bytes -> int32 [tokens]."""
        ...

    def decode(self, ids: np.ndarray) -> bytes:
        """Ids -> bytes, special ids left out; `decode(encode(x)) == x`."""
        ...


class ByteTokenizer:
    """Each byte is its own id, 0 to 255, whatever its encoding; BOS is 256 and EOS 257, so V = 258."""

    name = "byte"
    vocab_size = 258
    bos = 256
    eos = 257

    @property
    def bytes_per_token(self) -> np.ndarray:
        """int32 [258]: 1 for every byte, 0 for BOS and EOS."""
        return np.where(np.arange(self.vocab_size) < 256, 1, 0).astype(np.int32)

    def encode(self, content: bytes) -> np.ndarray:
        """Bytes -> int32 [bytes]; text that looks like a control token is text."""
        return np.frombuffer(content, np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> bytes:
        """Ids -> bytes, BOS and EOS left out. Raises ValueError for an id outside 0 to 257."""
        ids = np.asarray(ids, np.int64)
        outside = (ids < 0) | (ids >= self.vocab_size)
        if outside.any():
            raise ValueError(f"byte tokenizer: id {ids[outside][0]} is not one of 0 to {self.vocab_size - 1}")
        return ids[ids < 256].astype(np.uint8).tobytes()


_TOKENIZERS: dict[str, type[ByteTokenizer]] = {"byte": ByteTokenizer}


def make(name: str) -> Tokenizer:
    """The tokenizer called `name`. Raises ValueError with the known names."""
    if name not in _TOKENIZERS:
        raise ValueError(f"tokenizer {name!r} is not known; allowed: {', '.join(_TOKENIZERS)}")
    return _TOKENIZERS[name]()
