"""The endless stream of training windows: shuffled blocks of the token stream, each cut into windows."""

import functools
import hashlib
import json
import sys
from typing import Any

import numpy as np

from pe_ablation.config import ConfigError
from pe_ablation.data import tokenizers
from pe_ablation.data.tokens import TokenFile


class Batches:
    """Iterator over int32 [batch_tokens / length, length + 1]: inputs are [:, :-1], targets [:, 1:].

    Block i is tokens [i block, (i + 1) block], one token past its end included; what is left at the end of the stream
    is dropped. Blocks are shuffled by `seed`, anew each epoch, for ever; a batch may hold the end of one epoch and the
    start of the next. A block is cut, in order, into windows that overlap by one token, so every `length` sees the
    same targets in the same order, and the order depends on `seed` alone. Windows may cross documents.

    bos: as in `DataConfig`; "window" puts BOS in place of each window's first input, which is never a target.
    Raises ConfigError: sizes that don't divide, a stream shorter than one block, a token file made for another `bos`.
    """

    def __init__(self, token_file: TokenFile, *, block: int, batch_tokens: int, length: int, seed: int, bos: str):
        check(token_file, block=block, batch_tokens=batch_tokens, length=length, bos=bos)
        self._stored = token_file.stored
        self._block, self._length = block, length
        self._bos = _bos_id(token_file) if bos == "window" else None
        self._order = {"tokens": token_file.digest, "block": block, "batch_tokens": batch_tokens, "seed": seed}
        self._blocks = _iterator(_Order((len(self._stored) - 1) // block, batch_tokens // block, seed))

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> np.ndarray:
        return self._cut(next(self._blocks))

    def get_state(self) -> dict[str, Any]:
        """Where the stream is, as plain JSON: the state after k batches makes any equal stream go on at batch k."""
        return {"order": self._order_digest(), "grain": self._blocks.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go where `state` says. Raises ValueError for a state of other tokens, block, batch_tokens or seed."""
        if state["order"] != self._order_digest():
            raise ValueError(f"data state: {state['order']} is not the order {self._order_digest()} of {self._order}")
        self._blocks.set_state(state["grain"])

    def _order_digest(self) -> str:
        return hashlib.sha256(json.dumps(self._order, sort_keys=True).encode()).hexdigest()[:16]

    def _cut(self, blocks: np.ndarray) -> np.ndarray:
        """Block indices [blocks] -> windows [blocks x block / length, length + 1]."""
        starts = (blocks[:, None] * self._block + np.arange(0, self._block, self._length)).reshape(-1, 1)
        windows = self._stored[starts + np.arange(self._length + 1)].astype(np.int32)
        if self._bos is not None:
            windows[:, 0] = self._bos
        return windows


class _Order:
    """A grain source of batches: element k holds the block indices of batch k, int64 [rows].

    Grain's own shuffle costs several microseconds a block, and shuffles epoch e by seed + e, so that neighbouring seeds
    would share their epochs. Here an epoch is one sort of Philox bits, which no numpy version may change.
    """

    def __init__(self, blocks: int, rows: int, seed: int):
        self._blocks, self._rows, self._seed = blocks, rows, seed
        self._epoch = functools.lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> np.ndarray:
        epochs, places = np.divmod(np.arange(index * self._rows, (index + 1) * self._rows), self._blocks)
        return np.concatenate([self._epoch(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)])

    def _permutation(self, epoch: int) -> np.ndarray:
        bits = np.random.Philox(key=np.array([self._seed, epoch], np.uint64)).random_raw(self._blocks)
        return np.argsort(bits, kind="stable")


def _iterator(order: _Order) -> Any:
    """grain's iterator over an order, in this thread: it holds the position, and gives and takes it as a state."""
    import grain  # takes a second; not needed to look at a corpus

    return iter(grain.MapDataset.source(order).to_iter_dataset(grain.ReadOptions(num_threads=0)))


def _bos_id(token_file: TokenFile) -> int | None:
    return tokenizers.bos_id(token_file.tokenizer, token_file.vocab_size)


def check(token_file: TokenFile, *, block: int, batch_tokens: int, length: int, bos: str) -> None:
    """What `Batches` refuses, without making them."""
    _check_sizes(len(token_file.stored), block, batch_tokens, length)
    _check_bos(token_file, bos)


def _check_sizes(tokens: int, block: int, batch_tokens: int, length: int) -> None:
    if min(block, batch_tokens, length) < 1:
        given = f"{block}, {batch_tokens}, {length}"
        raise ConfigError(f"data.block, train.batch_tokens, train.length: {given}; allowed: at least 1 each")
    if block % length:
        raise ConfigError(f"data.block: {block} is not a multiple of train.length = {length}")
    if batch_tokens % block:
        raise ConfigError(f"train.batch_tokens: {batch_tokens} is not a multiple of data.block = {block}")
    if tokens < block + 1:
        raise ConfigError(f"data.block: {block} needs at least {block + 1} tokens; the training split has {tokens}")


def _check_bos(token_file: TokenFile, bos: str) -> None:
    if bos not in ("none", "document", "window"):
        raise ConfigError(f"data.bos: {bos!r} is not allowed; allowed: none, document, window")
    own = _bos_id(token_file)
    if own is None:
        if bos != "none":
            raise ConfigError(f"data.bos: {bos!r} is asked of a token file whose vocabulary has no BOS; allowed: none")
        return
    begins = token_file.stored[token_file.starts[:-1]] == own
    if bos == "document" and not begins.all():
        raise ConfigError("data.bos: 'document' is asked of a token file whose documents don't all begin with BOS")
    if bos != "document" and begins.any():
        raise ConfigError(f"data.bos: {bos!r} is asked of a token file whose documents begin with BOS")
