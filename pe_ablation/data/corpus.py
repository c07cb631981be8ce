"""From a `DataConfig` to a split's token file: built once, then found in the cache under a key of all that made it."""

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from pe_ablation.config import ConfigError, DataConfig
from pe_ablation.data import bpe, gpt2, sotu, text, tfds
from pe_ablation.data.documents import SPLITS, Corpus, Document, Split, TooShort, prefix
from pe_ablation.data.tokenizers import ByteTokenizer, Tokenizer
from pe_ablation.data.tokens import FORMAT, TokenFile, TokenFileError

_log = logging.getLogger(__name__)


def tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer of a config; reads no text: `bpe` learns its merges from the training split when first used.

    Raises ConfigError for an unknown name, a vocabulary size that isn't its own, an extra that is not installed.
    """
    if data.tokenizer != "bpe" and data.vocab_size != DataConfig.vocab_size:
        raise ConfigError(
            f"data.vocab_size: set, while data.tokenizer is {data.tokenizer!r}, which has its own; set data.tokenizer "
            "to 'bpe' to use it"
        )
    match data.tokenizer:
        case "byte":
            return ByteTokenizer()
        case "bpe":
            return _learned(data)
        case "gpt2":
            return gpt2.tokenizer(bos=data.bos != "none")
    raise ConfigError(f"data.tokenizer: {data.tokenizer!r} is not known; allowed: byte, bpe, gpt2")


def _learned(data: DataConfig) -> Tokenizer:
    cache = cache_folder(data.cache_dir)
    corpus = functools.cache(lambda: _corpus(data, "train", cache))

    def made_from() -> str:
        return f"{corpus().digest} {data.train_bytes}"

    def read() -> Iterable[Document]:
        _check_writable(cache)
        return _limited(corpus().read(), data.train_bytes)

    return bpe.tokenizer(data.vocab_size, cache / "tokenizers", made_from, read)


def load(data: DataConfig, split: Split) -> TokenFile:
    """A split's token file, from the cache or built now.

    The cache folder is `data.cache_dir`, else the environment's PE_ABLATION_CACHE, else ~/.cache/pe_ablation. Raises
    ConfigError, before any token file is written, with the field's path: see `text.corpus`, `tfds.corpus` and
    `bpe.tokenizer`; `data.train_bytes` past the end of the training split, a corpus that isn't installed, a cache
    folder that can't be written.
    """
    if split not in SPLITS:
        raise ConfigError(f"split: {split!r} is not allowed; allowed: {', '.join(SPLITS)}")
    cache, ids = cache_folder(data.cache_dir), tokenizer(data)
    corpus = _corpus(data, split, cache)
    limit = data.train_bytes if split == "train" else None
    key = _key(corpus, split, ids, data.bos, limit)
    path = cache / "tokens" / f"{data.source}-{split}-{key[:16]}.tokens"
    found = _cached(path, ids, key)
    if found is None:
        _check_writable(cache)
        documents = _limited(corpus.read(), limit)
        TokenFile.encode(documents, ids, data.bos, key, corpus.numbered, cache).write(path)
        found = TokenFile.read(path, ids, key)
    return found


def _corpus(data: DataConfig, split: Split, cache: Path) -> Corpus:
    for source, own in (("text", data.text), ("tfds", data.tfds)):
        given = [name for name, value in vars(own).items() if value != getattr(type(own), name)]
        if given and data.source != source:
            raise ConfigError(
                f"data.{source}.{given[0]}: set, while data.source is {data.source!r}; set data.source to {source!r} "
                "to use it"
            )
    match data.source:
        case "text":
            return text.corpus(data.text, split)
        case "tfds":
            return tfds.corpus(data.tfds, split)
    return sotu.corpus(split, cache / "tfds")


def cache_folder(asked: str | None = None) -> Path:
    """The folder that is asked for, else the environment's PE_ABLATION_CACHE, else ~/.cache/pe_ablation."""
    return Path(asked or os.environ.get("PE_ABLATION_CACHE") or "~/.cache/pe_ablation").expanduser().absolute()


def _key(corpus: Corpus, split: Split, ids: Tokenizer, bos: str, limit: int | None) -> str:
    made_from = {
        "format": FORMAT, "corpus": corpus.digest, "split": split, "tokenizer": ids.name, "vocab_size": ids.vocab_size,
        "bos": bos, "train_bytes": limit,
    }  # fmt: skip
    if ids.digest:
        made_from["vocabulary"] = ids.digest
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _cached(path: Path, ids: Tokenizer, key: str) -> TokenFile | None:
    try:
        return TokenFile.read(path, ids, key)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except TokenFileError as error:
        _log.warning("building a token file again: %s", error)
        return None


def _limited(documents: Iterable[Document], limit: int | None) -> Iterator[Document]:
    if limit is None:
        yield from documents
        return
    try:
        yield from prefix(documents, limit)
    except TooShort as error:
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
