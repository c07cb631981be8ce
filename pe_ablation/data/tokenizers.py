"""Tokenizers: bytes to ids and back. Bytes here; trained ones in `subwords`, `bpe` and `gpt2`."""

from typing import Protocol

import numpy as np

WHITE_SPACE = b" \t\n\r\x0b\x0c"  # what bytes.split() splits at
GPT2_IDS = 50257  # of the released models, EOS included; where BOS is asked for it is one more


class Tokenizer(Protocol):
    """Ids below `vocab_size`; text never encodes to the special ids `bos` and `eos`, only the pipeline places them.

    `bos` is None where the vocabulary has no such id. `digest` stands for what the ids mean, where name and size don't
    say it.
    """

    name: str
    vocab_size: int
    eos: int

    @property
    def bos(self) -> int | None: ...

    @property
    def digest(self) -> str:
        """sha256 (hex), or ""."""
        ...

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

    def words(self, ids: np.ndarray) -> np.ndarray:
        """Ids of a document [tokens] -> int32 [tokens]: how many of its words begin in each (see `words_begun`)."""
        ...


class ByteTokenizer:
    """Each byte is its own id, 0 to 255, whatever its encoding; BOS is 256 and EOS 257, so V = 258."""

    name = "byte"
    vocab_size = 258
    bos = 256
    eos = 257
    digest = ""

    @property
    def bytes_per_token(self) -> np.ndarray:
        """int32 [258]: 1 for every byte, 0 for BOS and EOS."""
        return np.where(np.arange(self.vocab_size) < 256, 1, 0).astype(np.int32)

    def encode(self, content: bytes) -> np.ndarray:
        """Bytes -> int32 [bytes]; text that looks like a control token is text."""
        return np.frombuffer(content, np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> bytes:
        """Ids -> bytes, BOS and EOS left out. Raises ValueError for an id outside 0 to 257."""
        ids = in_vocabulary(self, ids)
        return ids[ids < 256].astype(np.uint8).tobytes()

    def words(self, ids: np.ndarray) -> np.ndarray:
        """Ids [tokens] -> int32 [tokens]: 1 where a word begins."""
        return words_begun(self.decode(ids), np.where(np.asarray(ids) < 256, 1, 0))


def in_vocabulary(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """`ids` as int64. Raises ValueError for one that is none of the tokenizer's."""
    ids = np.asarray(ids, np.int64)
    outside = (ids < 0) | (ids >= tokenizer.vocab_size)
    if outside.any():
        raise ValueError(
            f"{tokenizer.name} tokenizer: id {ids[outside][0]} is not one of 0 to {tokenizer.vocab_size - 1}"
        )
    return ids


def words_begun(content: bytes, sizes: np.ndarray) -> np.ndarray:
    """How many words begin in each token of a document: int32 [tokens].

    A word is a maximal run of bytes other than ASCII white space, as `content.split()` finds them, and counts at the
    token that holds its first byte: counts add up over tokens, and do not depend on how text is cut into them.
    `sizes` [tokens] is how many bytes of `content` each token stands for, in order.
    """
    inside = ~np.isin(np.frombuffer(content, np.uint8), np.frombuffer(WHITE_SPACE, np.uint8))
    begins = inside & ~np.r_[False, inside[:-1]]
    before = np.r_[0, np.cumsum(begins)]
    ends = np.cumsum(sizes)
    return (before[ends] - before[ends - sizes]).astype(np.int32)


def bos_id(name: str, vocab_size: int) -> int | None:
    """The id of BOS, if there is one, in what the tokenizer called `name` wrote: no tokenizer is loaded to tell."""
    if name == "gpt2":
        return GPT2_IDS if vocab_size > GPT2_IDS else None
    return vocab_size - 2
