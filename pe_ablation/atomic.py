"""Files that are replaced whole or not at all."""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Replace `path` by the concatenated parts in one step: a reader sees all of the old or of the new, even if we are
    killed. Several processes may write the same path; the last one stays. Raises OSError."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with scratch.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
