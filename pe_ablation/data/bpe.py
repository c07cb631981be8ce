"""Byte-pair encoding learned from the training text (Sennrich et al. 2016, on bytes as in GPT-2), with `tokenizers`.

A byte is one character of Latin-1, so that any bytes are text; ids 0 to 255 are the bytes, the merges follow in the
order in which they were learned, then BOS and EOS. Merges stay within the pieces of a fixed pattern: a word with the
space before it, a number, signs, white space; bytes past ASCII are letters, so words in UTF-8 stay whole. The same
text gives the same merges, however many threads there are.
"""

import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pe_ablation import atomic
from pe_ablation.config import ConfigError
from pe_ablation.data.documents import Document
from pe_ablation.data.subwords import SubwordTokenizer, Vocabulary, pieces

FORMAT = 1
SPECIAL = 2
SEEN = 2  # a pair that is there once is no pattern
CACHED = 1 << 18  # words whose ids are kept: most of a text is words seen before, and asking the library costs more
_SPACE, _LETTER = r" \t\n\r\u000b\u000c", r"A-Za-z\u0080-\u00ff"
PATTERN = (
    rf"'(?:[sdmt]|ll|ve|re)| ?[{_LETTER}]+| ?[0-9]+| ?[^{_SPACE}{_LETTER}0-9]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)

_log = logging.getLogger(__name__)


def tokenizer(
    vocab_size: int, cache: Path, made_from: Callable[[], str], read: Callable[[], Iterable[Document]]
) -> SubwordTokenizer:
    """BPE of `vocab_size` ids, BOS and EOS included, learned from the documents of `read` when first needed.

    `made_from` gives a digest of those documents; merges are kept under it in the folder `cache`. Raises ConfigError,
    when it learns, where the text has fewer merges than asked for.
    """

    def load() -> Vocabulary:
        key = hashlib.sha256(f"bpe {FORMAT} {vocab_size} {SEEN} {PATTERN} {made_from()}".encode()).hexdigest()
        path = cache / f"bpe-{vocab_size}-{key[:16]}.json"
        learned = _cached(path, key)
        if learned is None:
            learned = learn(read(), vocab_size)
            _store(path, key, learned)
        return _vocabulary(learned)

    return SubwordTokenizer("bpe", vocab_size, vocab_size - 2, vocab_size - 1, load)


def learn(documents: Iterable[Document], vocab_size: int) -> dict[str, list]:
    """{"entries": Latin-1 text by id, "merges": pairs of such text}. Raises ConfigError where there are too few."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    model: Any = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - SPECIAL, min_frequency=SEEN, show_progress=False,
        initial_alphabet=[chr(byte) for byte in range(256)],
    )  # fmt: skip
    text = (piece.decode("latin-1") for document in documents for piece in pieces(document.content))
    model.train_from_iterator(text, trainer)
    found = json.loads(model.to_str())["model"]
    entries = sorted(found["vocab"], key=found["vocab"].__getitem__)
    if len(entries) < vocab_size - SPECIAL:
        raise ConfigError(
            f"data.vocab_size: the training text has pairs for {len(entries) + SPECIAL} ids (256 bytes, "
            f"{len(entries) - 256} merges, BOS and EOS), {vocab_size} are asked for; ask for fewer, or train on more"
        )
    return {"entries": entries, "merges": found["merges"]}


def _vocabulary(learned: dict[str, list]) -> Vocabulary:
    from tokenizers import Tokenizer, models

    ids = {entry: at for at, entry in enumerate(learned["entries"])}
    model: Any = Tokenizer(models.BPE(vocab=ids, merges=[tuple(pair) for pair in learned["merges"]]))
    part = re.compile(PATTERN)

    @functools.lru_cache(maxsize=CACHED)
    def encoded(word: str) -> list[int]:
        return model.encode(word, add_special_tokens=False).ids

    def encode(content: bytes) -> list[int]:
        return [each for word in part.findall(content.decode("latin-1")) for each in encoded(word)]

    return Vocabulary(tuple(entry.encode("latin-1") for entry in ids), encode, _digest(learned))


def _digest(learned: dict[str, list]) -> str:
    return hashlib.sha256(json.dumps(learned, sort_keys=True).encode()).hexdigest()


def _store(path: Path, key: str, learned: dict[str, list]) -> None:
    stored = {"made_from": key, "digest": _digest(learned), **learned}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, [json.dumps(stored).encode()])


def _cached(path: Path, key: str) -> dict[str, list] | None:
    """What was learned from the same text before; None where it wasn't, or the file is damaged."""
    try:
        stored = json.loads(path.read_bytes())
        learned = {"entries": stored["entries"], "merges": stored["merges"]}
        if (stored["made_from"], stored["digest"]) == (key, _digest(learned)):
            return learned
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass
    _log.warning("learning a vocabulary again: %s is damaged", path)
    return None
