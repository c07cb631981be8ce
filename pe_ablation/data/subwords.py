"""What tokenizers with a vocabulary of byte strings share: nothing is loaded before the first id is needed."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from pe_ablation.data.tokenizers import in_vocabulary, words_begun

PIECE = 1 << 16  # bytes of text that are tokenized at once, or a little more: libraries need 100 bytes for each
# The last white space before visible ASCII begins a token, in both BPEs: text may be cut there.
_SEAM = re.compile(rb"[ \n](?=[!-~])")


class Vocabulary(NamedTuple):
    """What ids mean: the bytes of each id but the special ones, and how text becomes ids."""

    entries: tuple[bytes, ...]
    encode: Callable[[bytes], list[int]]
    digest: str


class SubwordTokenizer:
    """Ids 0 to len(entries) - 1 stand for bytes, the special ids for none; V holds them all.

    `load` gives the vocabulary, and is called when ids are first asked for: what a run's size depends on (`vocab_size`,
    `bos`, `eos`) is known without it. Any bytes round-trip, invalid UTF-8 too.
    """

    def __init__(self, name: str, vocab_size: int, bos: int | None, eos: int, load: Callable[[], Vocabulary]):
        self.name, self.vocab_size, self.bos, self.eos = name, vocab_size, bos, eos
        self._load = load

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._load()

    @functools.cached_property
    def _entries(self) -> np.ndarray:
        """Bytes by id, object [V]; empty for special ids."""
        entries = np.full(self.vocab_size, b"", object)
        ordinary = [each for each in range(self.vocab_size) if each not in (self.bos, self.eos)]
        entries[ordinary] = self._vocabulary.entries
        return entries

    @property
    def digest(self) -> str:
        """sha256 (hex) of the vocabulary."""
        return self._vocabulary.digest

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        return np.array([len(entry) for entry in self._entries], np.int32)

    @property
    def bytes_per_token(self) -> np.ndarray:
        """int32 [V]: how many bytes of text each id stands for; 0 for special ids."""
        return self._sizes

    def encode(self, content: bytes) -> np.ndarray:
        """Bytes -> int32 [tokens]; text that looks like a control token is text."""
        parts = [np.array(self._vocabulary.encode(piece), np.int32) for piece in pieces(content)]
        return np.concatenate(parts)

    def decode(self, ids: np.ndarray) -> bytes:
        """Ids -> bytes, special ids left out. Raises ValueError for an id outside the vocabulary."""
        return b"".join(self._entries[in_vocabulary(self, ids)])

    def words(self, ids: np.ndarray) -> np.ndarray:
        """Ids of a document [tokens] -> int32 [tokens]: how many of its words begin in each."""
        return words_begun(self.decode(ids), self._sizes[ids])


def pieces(content: bytes, size: int = PIECE) -> Iterator[bytes]:
    """`content` in pieces of `size` bytes or little more, cut where no token of either BPE reaches across."""
    start = 0
    while seam := _SEAM.search(content, start + size):
        yield content[start : seam.start()]
        start = seam.start()
    yield content[start:]
