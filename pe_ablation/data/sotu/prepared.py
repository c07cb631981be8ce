"""The corpus as a tensorflow-datasets dataset in array_record files: prepared once per cache folder, then read."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from pe_ablation.config import ConfigError
from pe_ablation.data.documents import Document, Split
from pe_ablation.data.sotu import package
from pe_ablation.data.tfds import quiet


def documents(split: Split, cache: Path) -> list[Document]:
    """The addresses of `split`, read with `tfds.data_source` from `cache` and checked against the package's sha256.

    Raises ConfigError where the prepared dataset holds anything else than the package.
    """
    root = cache / f"sotu-{package.digest()[:16]}"
    with quiet():
        import tensorflow_datasets as tfds  # half a second, and only when a token file is built

        from pe_ablation.data.sotu import sotu_dataset_builder

        tfds.disable_progress_bar()
        if not root.is_dir():
            _prepare(sotu_dataset_builder.Builder, root)
        source: Any = tfds.data_source("sotu", split=split, data_dir=root, download=False)
        found = [Document(row["fileid"].decode(), row["text"]) for row in source]
    _check(found, split, root)
    return found


def _prepare(builder: type, root: Path) -> None:
    """Prepare in a scratch folder and rename: of several processes that start at once, the first to finish wins."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}.") as scratch:
        ready = Path(scratch) / "ready"
        builder(data_dir=ready, file_format="array_record").download_and_prepare()
        try:
            os.rename(ready, root)
        except OSError:
            if not root.is_dir():
                raise


def _check(found: list[Document], split: Split, root: Path) -> None:
    expected = [(each.fileid, each.sha256) for each in package.addresses() if each.split == split]
    if [(name, hashlib.sha256(content).hexdigest()) for name, content in found] != expected:
        raise ConfigError(f"data.cache_dir: {root} does not hold the addresses of the package sotu; delete that folder")
