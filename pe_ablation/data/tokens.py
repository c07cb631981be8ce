"""A split as token ids: in memory, and as a file that says what it was made from.

File format 1, little-endian: magic (8 bytes), CRC-32 of all that follows (8), the header's length (8), a JSON header,
zeros up to a multiple of 64 bytes, `starts` (int64), ids (uint16 where the vocabulary fits, else int32). The header's
names are a list, or {"numbered": prefix, "count": n}.
"""

import array
import functools
import json
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pe_ablation import atomic
from pe_ablation.config import ConfigError
from pe_ablation.data.documents import Document, Numbered
from pe_ablation.data.tokenizers import Tokenizer

FORMAT = 1
_MAGIC = b"PEtokens"
_ALIGNMENT = 64


class TokenFileError(ConfigError):
    """A token file that is damaged, or not the one that was asked for."""


class TokenFile:
    """One split's documents, concatenated: BOS document EOS each under `bos="document"`, else document EOS.

    stored: integer [n], the ids as they are kept: memory-mapped, uint16 where V fits
    starts: int64 [documents + 1], where each document begins; the last is n
    names: the documents' names; digest: sha256 (hex) of all that made the ids; tokenizer: the name of what wrote them
    Raises TokenFileError: starts that don't frame the documents, an id outside the vocabulary.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        names: Sequence[str],
        digest: str,
        vocab_size: int,
        tokenizer: str = "byte",
    ):
        self.stored = np.asarray(tokens)
        self.starts = np.asarray(starts, np.int64)
        self.names = names
        self.digest = digest
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self._check()

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All ids as int32 [n], in memory: 4 bytes a token. `document` and `Batches` don't need it."""
        return self.stored.astype(np.int32)

    def document(self, index: int) -> np.ndarray:
        """Ids of one document with its special tokens: int32 [tokens]."""
        if not 0 <= index < len(self.names):
            raise IndexError(f"document {index} of {len(self.names)}")
        return self.stored[self.starts[index] : self.starts[index + 1]].astype(np.int32)

    def _check(self) -> None:
        framed = len(self.starts) == len(self.names) + 1 and self.starts[0] == 0 and self.starts[-1] == len(self.stored)
        if not framed or not self.names or (np.diff(self.starts) < 1).any():
            raise TokenFileError(f"starts don't frame {len(self.names)} documents in {len(self.stored)} tokens")
        low, high = int(self.stored.min()), int(self.stored.max())
        if low < 0 or high >= self.vocab_size:
            raise TokenFileError(f"ids reach from {low} to {high}; the vocabulary has 0 to {self.vocab_size - 1}")

    @classmethod
    def encode(
        cls,
        documents: Iterable[Document],
        tokenizer: Tokenizer,
        bos: str,
        digest: str,
        numbered: str | None = None,
        scratch: Path | None = None,
    ) -> "TokenFile":
        """Tokenize documents; `bos` as in `DataConfig`, `digest` stands for all that made them.

        Ids go to an unnamed file in the folder `scratch` (default: the system's), so that memory holds one document,
        and of the others a start and, unless they are `numbered` (see `Corpus`), a name.
        """
        dtype = _dtype(tokenizer.vocab_size)
        head = np.array([tokenizer.bos] if bos == "document" else [], dtype)
        tail = np.array([tokenizer.eos], dtype)
        starts, names = array.array("q", [0]), []
        with tempfile.TemporaryFile(dir=scratch) as file:
            for name, content in documents:
                ids = np.concatenate([head, tokenizer.encode(content).astype(dtype), tail])
                file.write(ids.data)
                starts.append(starts[-1] + len(ids))
                names += [] if numbered is not None else [name]
            file.flush()
            tokens = np.memmap(file, dtype, "r") if starts[-1] else np.zeros(0, dtype)
        known = tuple(names) if numbered is None else Numbered(numbered, len(starts) - 1)
        return cls(tokens, np.asarray(starts), known, digest, tokenizer.vocab_size, tokenizer.name)

    def write(self, path: Path) -> None:
        """Write atomically: whoever opens `path`, at any moment and after any crash, finds all of it or nothing."""
        names: Any = self.names
        if isinstance(names, Numbered):
            names = {"numbered": names.prefix, "count": len(names)}
        header = {
            "format": FORMAT, "digest": self.digest, "tokenizer": self.tokenizer, "vocab_size": self.vocab_size,
            "names": names,
        }  # fmt: skip
        encoded = json.dumps(header, allow_nan=False).encode()
        padding = b"\0" * (_body_offset(len(encoded)) - 24 - len(encoded))
        ids = np.ascontiguousarray(self.stored, _dtype(self.vocab_size))
        starts = np.ascontiguousarray(self.starts, "<i8")
        rest = [len(encoded).to_bytes(8, "little"), encoded, padding, starts.data, ids.data]
        crc = functools.reduce(lambda value, part: zlib.crc32(part, value), rest, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, [_MAGIC, crc.to_bytes(8, "little"), *rest])

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer, digest: str | None = None) -> "TokenFile":
        """Map a token file into memory, after checking that it is whole and what was asked for.

        Raises TokenFileError: not a token file, truncated or damaged, of another format or tokenizer, or (where
        `digest` is given) made from something else. FileNotFoundError where there is none.
        """
        header, body = _mapped(path)
        _check_header(path, header, tokenizer, digest)
        given = header["names"]
        names = Numbered(given["numbered"], given["count"]) if isinstance(given, dict) else tuple(given)
        split = 8 * (len(names) + 1)
        starts, ids = body[:split].view("<i8"), body[split:].view(_dtype(tokenizer.vocab_size))
        return cls(ids, starts, names, header["digest"], tokenizer.vocab_size, tokenizer.name)


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")


def _body_offset(header_length: int) -> int:
    end = 24 + header_length
    return end + -end % _ALIGNMENT


def _mapped(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """The header, and the memory-mapped uint8 [...] behind it, of a file whose checksum is right."""
    with open(path, "rb") as file:
        start = file.read(24)
    if len(start) < 24 or not start.startswith(_MAGIC):
        raise TokenFileError(f"{path}: not a token file")
    content = np.memmap(path, np.uint8, "r").view(np.ndarray)
    if zlib.crc32(content[16:].data) != int.from_bytes(start[8:16], "little"):
        raise TokenFileError(f"{path}: truncated or damaged: {len(content):,} bytes that don't have their checksum")
    length = int.from_bytes(start[16:], "little")
    return json.loads(content[24 : 24 + length].tobytes()), content[_body_offset(length) :]


def _check_header(path: Path, header: dict[str, Any], tokenizer: Tokenizer, digest: str | None) -> None:
    if header["format"] != FORMAT:
        raise TokenFileError(f"{path}: format {header['format']}; this version reads format {FORMAT}")
    given, wanted = (header["tokenizer"], header["vocab_size"]), (tokenizer.name, tokenizer.vocab_size)
    if given != wanted:
        raise TokenFileError(
            f"{path}: written by tokenizer {given[0]!r} with {given[1]} ids; asked for {wanted[0]!r} with {wanted[1]}"
        )
    if digest is not None and header["digest"] != digest:
        raise TokenFileError(f"{path}: made from {header['digest']}; asked for {digest}")
