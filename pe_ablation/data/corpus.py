"""From a `DataConfig` to a split's token file: built once, then found in the cache under a key of all that made it."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pe_ablation.config import ConfigError, DataConfig, TextConfig
from pe_ablation.data import sotu, text, tokenizers
from pe_ablation.data.documents import SPLITS, Corpus, Document, Split, prefix
from pe_ablation.data.tokenizers import Tokenizer
from pe_ablation.data.tokens import FORMAT, TokenFile, TokenFileError

_log = logging.getLogger(__name__)


def tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer of a config; reads no text. Raises ConfigError for an unknown name."""
    try:
        return tokenizers.make(data.tokenizer)
    except ValueError as error:
        raise ConfigError(f"data.tokenizer: {error}") from None


def load(data: DataConfig, split: Split) -> TokenFile:
    """A split's token file, from the cache or built now.

    The cache folder is `data.cache_dir`, else the environment's PE_ABLATION_CACHE, else ~/.cache/pe_ablation. Raises
    ConfigError, before any token file is written, with the field's path: see `text.corpus`; `data.train_bytes` past the
    end of the training split, a corpus that isn't installed, a cache folder that can't be written.
    """
    if split not in SPLITS:
        raise ConfigError(f"split: {split!r} is not allowed; allowed: {', '.join(SPLITS)}")
    cache, ids = _cache_dir(data), tokenizer(data)
    corpus = _corpus(data, split, cache)
    limit = data.train_bytes if split == "train" else None
    key = _key(corpus, split, ids, data.bos, limit)
    path = cache / "tokens" / f"{data.source}-{split}-{key[:16]}.tokens"
    found = _cached(path, ids, key)
    if found is None:
        _check_writable(cache)
        TokenFile.encode(_limited(corpus.read(), limit), ids, data.bos, key).write(path)
        found = TokenFile.read(path, ids, key)
    return found


def _corpus(data: DataConfig, split: Split, cache: Path) -> Corpus:
    if data.source == "text":
        return text.corpus(data.text, split)
    defaults = TextConfig()
    given = [f"data.text.{name}" for name, value in vars(data.text).items() if value != getattr(defaults, name)]
    if given:
        raise ConfigError(f"{given[0]}: set, while data.source is {data.source!r}; set data.source to 'text' to use it")
    return sotu.corpus(split, cache / "tfds")


def _cache_dir(data: DataConfig) -> Path:
    return Path(data.cache_dir or os.environ.get("PE_ABLATION_CACHE") or "~/.cache/pe_ablation").expanduser().absolute()


def _key(corpus: Corpus, split: Split, ids: Tokenizer, bos: str, limit: int | None) -> str:
    made_from = {
        "format": FORMAT, "corpus": corpus.digest, "split": split, "tokenizer": ids.name, "vocab_size": ids.vocab_size,
        "bos": bos, "train_bytes": limit,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _cached(path: Path, ids: Tokenizer, key: str) -> TokenFile | None:
    try:
        return TokenFile.read(path, ids, key)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except TokenFileError as error:
        _log.warning("building a token file again: %s", error)
        return None


def _limited(documents: Sequence[Document], limit: int | None) -> Sequence[Document]:
    if limit is None:
        return documents
    try:
        return prefix(documents, limit)
    except ValueError as error:
        raise ConfigError(f"data.train_bytes: {error}; leave it out to train on all of them") from None


def _check_writable(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: cannot write to {str(cache)!r}: {error.strerror}; give another folder, here or as "
            "PE_ABLATION_CACHE in the environment"
        ) from error
