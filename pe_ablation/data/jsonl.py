"""JSON lines: a document a line, the text under one field of its object.

Strict: UTF-8, one JSON object a line (RFC 8259), and only a newline ends a line: U+2028 in a text is text. Escapes
become UTF-8; half of a surrogate pair is no character and is refused. Lines without anything, and documents of white
space alone, are left out, as between separators.
"""

import json
from typing import Any, NoReturn

from pe_ablation.config import ConfigError, near
from pe_ablation.data.documents import Document


def documents(name: str, content: bytes, given_as: str, field: str) -> list[Document]:
    """The texts under `field` in the lines of a file, named `name:LINE`, lines counted from 1.

    Raises ConfigError with `given_as` (the config field that names the file), the file and the line: a line that is no
    JSON object, an object without the field, a value that is no text.
    """
    found = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text = _text(line, field)
        except ValueError as error:
            raise ConfigError(f"{given_as}: {name}:{number}: {error}") from None
        if text.strip():
            found.append(Document(f"{name}:{number}", text))
    return found


def _text(line: bytes, field: str) -> bytes:
    """The document of one line as UTF-8. Raises ValueError saying what is wrong with it."""
    row = _parsed(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    if field not in row:
        raise ValueError(f"no field {field!r}{near(field, row)}; there: {', '.join(map(repr, row)) or 'none'}")
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(f"{field!r} is no text but {type(value).__name__}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field!r} has half of a surrogate pair at character {error.start}") from None


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode(), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos} of the line") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"not JSON: {constant}")
