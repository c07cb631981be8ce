"""What a source of text hands over: documents, and a digest that stands for them."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, overload

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Document(NamedTuple):
    """One document: a name that is unique in its corpus, and its bytes as they were found."""

    name: str
    content: bytes


class Corpus(NamedTuple):
    """One split's documents. `digest` (sha256) changes whenever a name or a byte does; `read` may be slow.

    Where `numbered` is given, the documents are named `numbered[0]`, `numbered[1]`, ...: no name needs to be kept.
    """

    digest: str
    read: Callable[[], Iterable[Document]]
    numbered: str | None = None


class Numbered(Sequence[str]):
    """The names `prefix[0]` to `prefix[count - 1]`, none of them in memory: there may be millions."""

    def __init__(self, prefix: str, count: int):
        self.prefix, self._indices = prefix, range(count)

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[each] for each in self._indices[index]]
        return f"{self.prefix}[{self._indices[index]}]"


def digest(documents: Iterable[Document]) -> str:
    """sha256 (hex) of names and contents, in order."""
    state = hashlib.sha256()
    for name, content in documents:
        encoded = os.fsencode(name)
        state.update(b"%d %d\n" % (len(encoded), len(content)))
        state.update(encoded)
        state.update(content)
    return state.hexdigest()


def dealt(index: int) -> Split:
    """The split of document `index` of an undivided corpus: mod 10 == 4 validation, == 9 test, the rest train."""
    return {4: "validation", 9: "test"}.get(index % 10, "train")  # pyright: ignore[reportReturnType]


class TooShort(ValueError):
    """Documents that have fewer bytes than asked for."""


def prefix(documents: Iterable[Document], limit: int) -> Iterator[Document]:
    """The first `limit` bytes of `documents`, read no further than that; the last one is cut. Raises TooShort."""
    left = limit
    for name, content in documents:
        yield Document(name, content[:left])
        left -= min(left, len(content))
        if not left:
            return
    raise TooShort(f"{limit:,} bytes asked of documents that have {limit - left:,} in all")
