"""A user's own text: documents from files, split as `data.text` says. JSON lines are read in `jsonl`.

Files are read in binary and every byte of a document is kept: CRLF, a byte order mark, U+2028 and invalid UTF-8 are
bytes like any other. A NUL byte means a binary (or UTF-16) file and is refused. Relative paths start at the working
directory, `~` is the home folder; folders are read with their subfolders, hidden files left out.
"""

import glob
import logging
import os
import re
from pathlib import Path

from pe_ablation.config import ConfigError, TextConfig
from pe_ablation.data import jsonl
from pe_ablation.data.documents import SPLITS, Corpus, Document, Split, dealt, digest

_log = logging.getLogger(__name__)
_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}


def corpus(config: TextConfig, split: Split) -> Corpus:
    """The documents of `split`, read now: their digest is one of contents, so moving the files changes nothing.

    Raises ConfigError with the field's path: contradictory fields, a split that is not configured, a missing, empty,
    unreadable or binary file, byte ranges that overlap or pass the end.
    """
    _check_fields(config)
    _check_json(config)
    documents = _from_paths(config, split) if config.file is None else _from_file(config.file, config, split)
    return Corpus(digest(documents), lambda: documents)


def separator_bytes(separator: str) -> bytes:
    r"""The bytes between two documents: UTF-8, where the two characters `\n`, `\r`, `\t` and `\\`, as typed at a shell,
    stand for newline, carriage return, tab and one backslash; other backslashes are themselves."""
    return re.sub(r"\\[nrt\\]", lambda found: _ESCAPES[found.group()], separator).encode()


def _check_fields(config: TextConfig) -> None:
    paths = [f"data.text.{split}" for split in SPLITS if getattr(config, split) is not None]
    ranges = [f"data.text.{split}_bytes" for split in SPLITS if _range(config, split) is not None]
    if config.separator == "":
        raise ConfigError("data.text.separator: '' separates nothing; give the text between documents, or leave it out")
    if config.file is not None:
        _check_one_file(config, paths, ranges)
    elif ranges:
        raise ConfigError(f"{ranges[0]}: a byte range needs data.text.file, the file that it is a range of")
    elif not paths:
        raise ConfigError(
            "data.text: no text is named; give data.text.train, data.text.validation and data.text.test (a folder, "
            "a glob or a file each), or data.text.file with data.text.separator or byte ranges"
        )


def _check_one_file(config: TextConfig, paths: list[str], ranges: list[str]) -> None:
    if paths:
        raise ConfigError(f"data.text.file: given with {', '.join(paths)}; give one file for all splits, or paths")
    if ranges and config.separator is not None:
        raise ConfigError(f"data.text.separator: given with {', '.join(ranges)}; a byte range is one document")
    if not ranges and config.separator is None and config.field is None:
        raise ConfigError(
            "data.text.file: one file needs data.text.separator, by which it is cut into documents that are dealt to "
            "splits, data.text.field, if it is JSON lines, or data.text.train_bytes, data.text.validation_bytes and "
            "data.text.test_bytes"
        )
    _check_ranges(config)


def _check_json(config: TextConfig) -> None:
    """A line is a document: nothing else may say what one is."""
    if config.field is None:
        return
    given = [
        name for name in ("separator", *(f"{split}_bytes" for split in SPLITS)) if getattr(config, name) is not None
    ]
    if given:
        raise ConfigError(f"data.text.field: given with data.text.{given[0]}; in JSON lines a line is a document")


def _check_ranges(config: TextConfig) -> None:
    taken: dict[str, tuple[int, ...]] = {}
    for split in SPLITS:
        given, field = _range(config, split), f"data.text.{split}_bytes"
        if given is None:
            continue
        if len(given) != 2 or not 0 <= given[0] < given[1]:
            raise ConfigError(f"{field}: {given} is not a byte range; allowed: (start, stop) with 0 <= start < stop")
        for other, (start, stop) in taken.items():
            if given[0] < stop and start < given[1]:
                raise ConfigError(f"{field}: {given} overlaps {other} = {(start, stop)}")
        taken[field] = given


def _range(config: TextConfig, split: Split) -> tuple[int, ...] | None:
    return getattr(config, f"{split}_bytes")


def _from_file(file: str, config: TextConfig, split: Split) -> list[Document]:
    """One file for all splits: a byte range is one document, or separated documents are dealt by index."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.text.file: {file!r} is {'a folder' if path.is_dir() else 'missing'}; give a file")
    content = _read(path, "data.text.file")
    if config.separator is None and config.field is None:
        return [_ranged(path.name, content, config, split)]
    documents = _documents(path.name, content, "data.text.file", config)
    chosen = [document for index, document in enumerate(documents) if dealt(index) == split]
    if not chosen:
        raise ConfigError(
            f"data.text.file: {file!r} has {len(documents)} documents {_borders(config)}, none for {split}: index mod "
            "10 == 4 is validation, == 9 test, the rest train; give 10 to have all three"
        )
    return chosen


def _ranged(name: str, content: bytes, config: TextConfig, split: Split) -> Document:
    for each in SPLITS:
        given = _range(config, each)
        if given is not None and given[1] > len(content):
            raise ConfigError(f"data.text.{each}_bytes: {given} passes the end of {name!r} at {len(content)}")
    given, field = _range(config, split), f"data.text.{split}_bytes"
    if given is None:
        raise ConfigError(f"{field}: the {split} split is asked for, and not configured; give its (start, stop)")
    document = Document(f"{name}[{given[0]}:{given[1]}]", content[slice(*given)])
    if not document.content.strip():
        raise ConfigError(f"{field}: {given} of {name!r} is empty: white space alone")
    return document


def _from_paths(config: TextConfig, split: Split) -> list[Document]:
    """A folder, glob or file for the split: a document a file, or several where there is a separator."""
    given, field = getattr(config, split), f"data.text.{split}"
    if given is None:
        raise ConfigError(f"{field}: the {split} split is asked for, and not configured; give a folder, glob or file")
    documents: list[Document] = []
    files = _files(given, field)
    _warn_of_shared(files, config, split)
    for name, path in files:
        documents += _documents(name, _read(path, field), field, config)
    if not documents:
        raise ConfigError(f"{field}: {given!r} is empty: nothing {_borders(config)}")
    return documents


def _warn_of_shared(files: list[tuple[str, Path]], config: TextConfig, split: Split) -> None:
    """A warning where a file is in two splits: good for a trial, no measurement."""
    own = {path.resolve() for _, path in files}
    for other in SPLITS:
        given = getattr(config, other)
        if other == split or given is None:
            continue
        try:
            shared = own & {path.resolve() for _, path in _files(given, f"data.text.{other}")}
        except ConfigError:  # told where that split is asked for
            continue
        if shared:
            _log.warning(
                "data.text.%s: %s is in data.text.%s too: what was learned is measured", split, min(shared), other
            )


def _documents(name: str, content: bytes, field: str, config: TextConfig) -> list[Document]:
    """The documents of one file, which `field` of the config names."""
    if config.field is not None:
        return jsonl.documents(name, content, field, config.field)
    if name.endswith(".jsonl"):
        raise ConfigError(
            f"{field}: {name!r} is JSON lines; name the field that holds the text in data.text.field, or rename the "
            "file to train on its JSON"
        )
    return _separated(name, content, config.separator)


def _borders(config: TextConfig) -> str:
    if config.field is not None:
        return f"under {config.field!r}"
    return f"between separators {config.separator!r}"


def _files(given: str, field: str) -> list[tuple[str, Path]]:
    """Names, by which they are sorted, and paths of the files that a folder, glob or path stands for."""
    if not given:
        raise ConfigError(f"{field}: empty; give a folder, a glob or a file")
    path = Path(given).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        root, found = path, [file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))]
    else:
        found = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]
        root = Path(os.path.commonpath([file.parent for file in found])) if found else path
    if not found:
        what = "has no files" if path.is_dir() else "is missing, or matches no file"
        raise ConfigError(f"{field}: {given!r} {what} (seen from {Path.cwd()}); give a folder, a glob or a file")
    return sorted((file.relative_to(root).as_posix(), file) for file in found)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read(path: Path, field: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {str(path)!r}: {error.strerror}") from error
    offset = content.find(b"\0")
    if offset >= 0:
        raise ConfigError(f"{field}: {str(path)!r} is binary: NUL at byte {offset}; give text in UTF-8 or 8 bits")
    if not content.strip():
        raise ConfigError(f"{field}: {str(path)!r} is empty: white space alone in {len(content)} bytes")
    return content


def _separated(name: str, content: bytes, separator: str | None) -> list[Document]:
    """What lies between separators, if any. White space alone (behind the last one, say) is no document."""
    if separator is None:
        return [Document(name, content)]
    pieces = [piece for piece in content.split(separator_bytes(separator)) if piece.strip()]
    return [Document(f"{name}[{index}]", piece) for index, piece in enumerate(pieces)]
