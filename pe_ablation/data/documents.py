"""What a source of text hands over: documents, and a digest that stands for them."""

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Document(NamedTuple):
    """One document: a name that is unique in its corpus, and its bytes as they were found."""

    name: str
    content: bytes


class Corpus(NamedTuple):
    """One split's documents. `digest` (sha256) changes whenever a name or a byte does; `read` may be slow."""

    digest: str
    read: Callable[[], Sequence[Document]]


def digest(documents: Sequence[Document]) -> str:
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


def prefix(documents: Sequence[Document], limit: int) -> list[Document]:
    """The first `limit` bytes of `documents`; the last one is cut. Raises ValueError if there are fewer."""
    kept, left = [], limit
    for name, content in documents:
        if not left:
            break
        kept.append(Document(name, content[:left]))
        left -= len(kept[-1].content)
    if left:
        raise ValueError(f"{limit:,} bytes asked of documents that have {limit - left:,} in all")
    return kept
