"""Evaluation past the training length: a protocol is a set of windows and the targets it scores.

A window is a document's tokens [start, start + length) as inputs; target i of a window is the token after input i.
Windows never cross documents, special tokens are never scored, and every length of a run is scored on the same
documents: those with a token more than the longest length. Sums are float64, per document and position, of nats,
tokens, bytes and words (see `data.tokenizers.words_begun`).
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx

from pe_ablation import config, data, fused, report, stopping, trained, transforms, untrained
from pe_ablation.attention import Mask
from pe_ablation.config import ConfigError, EvalConfig, Experiment, PositionsConfig
from pe_ablation.memory import memory_limit, program_bytes
from pe_ablation.model import GPTConfig, abstract
from pe_ablation.record import RecordError, Run
from pe_ablation.train import perplexity, window_nats
from pe_ablation.trained import Trained
from pe_ablation.transforms import TransformError

NO_WINDOW = 2**31 - 1  # an attention window that hides nothing: the windowed null shares the compiled program


class EvaluationError(ValueError):
    """A run that cannot be scored as asked; the message names it."""


@dataclasses.dataclass(frozen=True)
class Windows:
    """W windows of `length` inputs: int arrays [W] of document, start in it, and the scored targets [first, stop)."""

    length: int
    document: np.ndarray
    start: np.ndarray
    first: np.ndarray
    stop: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    def __getitem__(self, rows: slice | np.ndarray) -> "Windows":
        return Windows(self.length, self.document[rows], self.start[rows], self.first[rows], self.stop[rows])


def blocks(sizes: Sequence[int], length: int) -> Windows:
    """Non-overlapping windows (stride `length`) over documents of these token counts; every target once."""
    return sliding(sizes, length, length)


def sliding(sizes: Sequence[int], length: int, stride: int) -> Windows:
    """Windows that advance by `stride` and score what the window before did not reach; every target once."""
    parts = []
    for document, size in enumerate(sizes):
        count = 1 + max(0, math.ceil((size - 1 - length) / stride))
        start = stride * np.arange(count)
        first = np.where(start == 0, 0, length - stride)
        stop = np.minimum(length, size - 1 - start)
        parts.append((np.full(count, document), start, first, stop))
    return Windows(length, *(np.concatenate(each) for each in zip(*parts, strict=True)))


def targets(sizes: Sequence[int], length: int, *, longest: int, spacing: int, last_k: int) -> Windows:
    """Windows of `length` that end where those of every other length end: the same `last_k` targets at each length.

    Ends lie every `spacing` tokens, the first after `longest` inputs, in documents of at least longest + 1 tokens.
    """
    ends = [np.arange(longest, size, spacing) for size in sizes]
    document = np.repeat(np.arange(len(ends)), [len(each) for each in ends])
    start = np.concatenate(ends) - length
    return Windows(length, document, start, np.full(len(start), length - last_k), np.full(len(start), length))


def check(experiment: Experiment) -> None:
    """ConfigError where no document of the split is long enough for the longest evaluation length."""
    if not experiment.eval.windowed:
        return
    split = experiment.eval.split
    _documents(experiment.eval, experiment.train.length, data.load(experiment.data, split))


def check_transforms(runs: Sequence[Run], overrides: Mapping[str, Any]) -> None:
    """ConfigError for a transform that none of these runs can be scored under; unreadable ones are left out."""
    experiments = []
    for run in runs:
        with contextlib.suppress(RecordError):
            experiments.append(config.read(run.config["experiment"], overrides))
    for text in dict.fromkeys(each for asked in experiments for each in asked.eval.transforms):
        reasons = [_why_not(text, asked) for asked in experiments if text in asked.eval.transforms]
        if all(reasons):
            raise ConfigError(f"eval.transforms: {reasons[0]}" + (", nor any other run" if len(reasons) > 1 else ""))


def reasons(run: Run, rows: pd.DataFrame) -> list[str]:
    """Why cells of these rows are n/a, where their cells say so."""
    keys = set(rows.key)
    return list(dict.fromkeys(cell["reason"] for cell in run.cells() if cell["key"] in keys and "reason" in cell))


def _why_not(text: str, experiment: Experiment) -> str:
    """Why its model cannot be had under a transform, "" where it can."""
    asked = config.transform(text)
    try:
        if asked is not None:
            asked.refuse(experiment.gpt(vocab_size=258))
    except TransformError as error:
        return str(error)
    return ""


def evaluate_run(run_dir: str | Path) -> None:
    """Score everything that the run's config asks for and store the cells; cells that are there stay as they are.

    One that ran out of memory is tried again: there may be more of it now, or fewer `eval.batch_tokens`.
    """
    run = Run(Path(run_dir))
    _Scorer(run, run.experiment.eval).score()


def curve(
    run_dir: str | Path,
    lengths: Sequence[int],
    *,
    split: str = "validation",
    protocols: Sequence[str] = ("targets",),
    nulls: Sequence[str] = ("window_mask", "window_recompute"),
) -> pd.DataFrame:
    """Score a trained run at `lengths` tokens (and its training length) and return these rows of `report.rows`.

    Raises NotTrained for a run that isn't trained to its end and ConfigError for what its data can't serve.
    """
    asked = {"lengths": list(lengths), "split": split, "protocols": list(protocols), "nulls": list(nulls)}
    return score(run_dir, {f"eval.{name}": value for name, value in asked.items()})


def score(run_dir: str | Path, overrides: Mapping[str, Any]) -> pd.DataFrame:
    """`curve` under the run's own `eval` fields with `overrides` laid over them (dotted path -> value)."""
    run = Run(Path(run_dir))
    experiment = config.read(run.config["experiment"], overrides)
    _Scorer(run, experiment.eval).score()
    return asked_rows(run, experiment)


def asked_rows(run: Run, experiment: Experiment) -> pd.DataFrame:
    """The rows of `report.rows` that belong to what `experiment.eval` asks of this run, scored or not."""
    asked, train_length = experiment.eval, experiment.train.length
    rows = report.rows(run.path)
    wanted = [asked.settings(protocol, train_length) for protocol in asked.windowed]
    keep = rows.settings.map(lambda text: json.loads(text) in wanted)
    keep &= rows.split.eq(asked.split) & rows.protocol.isin(asked.windowed) & rows.null.isin(["none", *asked.nulls])
    keep &= rows.eval_length.isin([train_length, *asked.lengths])
    keep &= rows["transform"].isin([report.transform_column(each) for each in asked.transforms])
    return rows.loc[keep].reset_index(drop=True)


def cell_key(
    step: int, split: str, protocol: str, length: int, null: str, chosen: dict[str, Any], transform: str = ""
) -> str:
    """The file name of a cell: checkpoint, split, protocol, length, null, and a digest of settings and transform."""
    about = chosen | {"transform": transform} if transform else chosen
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    name = f"-{transform.partition(':')[0]}" if transform else ""
    return f"step{step}-{split}-{protocol}-L{length}-{null}{name}-{digest}"


def _documents(evaluation: EvalConfig, train_length: int, tokens: data.TokenFile) -> list[int]:
    """Indices of the documents that every length is scored on."""
    longest = evaluation.longest(train_length)
    sizes = np.diff(tokens.starts)
    chosen = np.flatnonzero(sizes > longest)
    if not len(chosen):
        raise ConfigError(
            f"eval.lengths: {longest} needs a document of at least {longest + 1} tokens; "
            f"the longest of the {evaluation.split} split has {int(sizes.max(initial=0))}"
        )
    return _evenly(chosen, evaluation.max_documents).tolist()


def _evenly(items: Any, most: int | None) -> Any:
    """At most `most` of `items`, evenly spread."""
    if most is None or len(items) <= most:
        return items
    return items[np.linspace(0, len(items) - 1, most).round().astype(int)]


@functools.lru_cache(maxsize=256)
def scoring_program(config: GPTConfig, batch: int, length: int, chosen: PositionsConfig, windowed: bool = True) -> Any:
    """The program that gives the nats [B,L] of a batch; one for every split, protocol, null and seed.

    It is given an int32 attention window, or None where it isn't `windowed`.
    """
    graph, params = nnx.split(abstract(config))

    def score(params, inputs, wanted, window):
        logits = nnx.merge(graph, params)(inputs, mask=Mask(window=window), placed=chosen.placed(length))
        return window_nats(logits, wanted)

    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    window = jax.ShapeDtypeStruct((), jnp.int32) if windowed else None
    return jax.jit(score).lower(params, ids, ids, window).compile()


class _OutOfMemory(Exception):
    pass


def _program(config: GPTConfig, batch: int, length: int, chosen: PositionsConfig, windowed: bool) -> Any:
    """`scoring_program`, refused before it runs where its own estimate exceeds the memory there is."""
    try:
        program = scoring_program(config, batch, length, chosen, windowed)
    except jax.errors.JaxRuntimeError as error:
        raise _out_of_memory(error) from error
    need = program.memory_analysis()
    if need is not None and need.temp_size_in_bytes + need.output_size_in_bytes > memory_limit():
        raise _OutOfMemory(f"needs {need.temp_size_in_bytes + need.output_size_in_bytes:,} bytes")
    return program


def _out_of_memory(error: Exception) -> Exception:
    return _OutOfMemory(str(error)) if "RESOURCE_EXHAUSTED" in str(error) else error


class _Scorer:
    """One run under one evaluation config: loads what it needs once and stores each cell as it is done."""

    def __init__(self, run: Run, evaluation: EvalConfig):
        self.run, self.evaluation = run, evaluation
        self.trained = trained.load(run)
        self.experiment, self.tokenizer = self.trained.experiment, self.trained.tokenizer
        self.changed: dict[tuple[str, int], Trained] = {}
        self.train_length = self.experiment.train.length
        self.tokens = data.load(self.experiment.data, evaluation.split)
        chosen = _documents(evaluation, self.train_length, self.tokens)
        self.documents = [np.asarray(self.tokens.document(index)) for index in chosen]
        self.names = [self.tokens.names[index] for index in chosen]
        self.stored = {cell["key"] for cell in run.cells() if cell["status"] != "OOM"}

    def score(self) -> None:
        lengths = sorted({self.train_length, *self.evaluation.lengths})
        for transform, protocol in itertools.product(self.evaluation.transforms, self.evaluation.windowed):
            for length in lengths:
                self._cell(protocol, length, "none", report.transform_column(transform))
                if length > self.train_length and "window_mask" in self.evaluation.nulls:
                    self._cell(protocol, length, "window_mask", report.transform_column(transform))

    def _cell(self, protocol: str, length: int, null: str, transform: str) -> None:
        chosen = self.evaluation.settings(protocol, self.train_length)
        key = cell_key(self.trained.step, self.evaluation.split, protocol, length, null, chosen, transform)
        if key in self.stored:
            return
        stopping.check(f"trained; {len(self.stored)} cells scored")
        about = {
            "key": key,
            "step": self.trained.step,
            "split": self.evaluation.split,
            "protocol": protocol,
            "length": length,
            "null": null,
            "train_length": self.train_length,
            "settings": chosen,
        }
        status, arrays, model = "n/a", {}, None
        try:
            model, applied = self._under(transform, length)
            about |= applied
        except TransformError as error:
            about |= {"transform": transform, "reason": str(error)}
        if model is not None:
            status, arrays, program = self._measure(model, protocol, length, null)
            if status == "ok":
                about["memory_bytes"] = program_bytes(program)
            if status == "ok" and model.unread is not None:
                about["untrained"] = bool(model.unread) and self._reads(model, protocol, length, null)
        self.run.save_cell(about | {"status": status} | totals(arrays), arrays)
        self.stored.add(key)

    def _under(self, transform: str, length: int) -> tuple[Trained, dict[str, Any]]:
        """The model under a transform ("": none), and what a cell says of it: as asked, and with every field set."""
        asked = config.transform(transform) if transform else None
        if asked is None:
            return self.trained, {}
        if (transform, length) not in self.changed:
            self.changed[transform, length] = transforms.apply(asked, self.trained, length)
        applied = str(asked.at(length, self.train_length))
        return self.changed[transform, length], {"transform": transform, "applied": applied}

    def _measure(self, model: Trained, protocol: str, length: int, null: str) -> tuple[str, dict[str, np.ndarray], Any]:
        """(status, sums by document and position, the program that gave them); none of it unless the status is ok."""
        limit = model.abstract.max_position
        if limit is not None and length > limit:
            return "n/a", {}, None
        if not model.alive:
            return "diverged", {}, None
        windows, window = self._windows(protocol, length), self._window(null)
        asked = model.config, self.evaluation.batch(length), length, self.experiment.positions
        try:
            program = _program(*asked, window is not None)
            return "ok", self._sums(program, model, windows, window), program
        except (_OutOfMemory, MemoryError):
            return "OOM", {}, None

    def _window(self, null: str) -> np.int32 | None:
        """What a program is given. A fused kernel serves no window that is an argument, even one that hides nothing."""
        if null == "window_mask":
            return np.int32(self.train_length)
        return np.int32(NO_WINDOW) if fused.kernel() is None else None

    def _reads(self, model: Trained, protocol: str, length: int, null: str) -> bool:
        """Whether other values of what never trained give other nats: the first batch, which has every distance."""
        batch = self.evaluation.batch(length)
        part = self._windows(protocol, length)[:batch]
        inputs, wanted = self._batch(part, batch)
        window = self._window(null)
        program = scoring_program(model.config, batch, length, self.experiment.positions, window is not None)
        moved = untrained.changed(model.params, model.unread or {})
        found = [np.asarray(program(each, inputs, wanted, window))[: len(part)] for each in (model.params, moved)]
        scored = _scored_places(part)
        return not np.array_equal(found[0][scored], found[1][scored])

    def _windows(self, protocol: str, length: int) -> Windows:
        evaluation, sizes = self.evaluation, [len(each) for each in self.documents]
        if protocol == "blocks":
            return blocks(sizes, length)
        if protocol == "sliding":
            return sliding(sizes, length, evaluation.stride)
        longest = evaluation.longest(self.train_length)
        found = targets(sizes, length, longest=longest, spacing=evaluation.spacing, last_k=evaluation.last_k)
        return found[_evenly(np.arange(len(found)), evaluation.max_windows)]

    def _sums(self, program: Any, model: Trained, windows: Windows, window: np.int32 | None) -> dict[str, np.ndarray]:
        """{nats, tokens, bytes, words}: float64 [documents, length], and the documents' names."""
        sums = {name: np.zeros((len(self.documents), windows.length)) for name in ("nats", "tokens", "bytes", "words")}
        sizes = np.asarray(self.tokenizer.bytes_per_token)
        for part, wanted, nats in self._scored(program, model, windows, window):
            scored = _scored_places(part) & (sizes[wanted] > 0)
            if np.isnan(nats[scored]).any():
                raise EvaluationError(f"{self.run.path}: NaN at evaluation length {windows.length}")
            where = (np.broadcast_to(part.document[:, None], scored.shape)[scored], np.nonzero(scored)[1])
            np.add.at(sums["nats"], where, nats[scored].astype(np.float64))
            np.add.at(sums["tokens"], where, 1.0)
            np.add.at(sums["bytes"], where, sizes[wanted[scored]])
            np.add.at(sums["words"], where, self._words(part)[scored])
        return sums | {"names": np.asarray(self.names)}

    @functools.cached_property
    def words(self) -> list[np.ndarray]:
        """For every document, int32 [tokens]: how many words begin in each."""
        return [self.tokenizer.words(tokens) for tokens in self.documents]

    def _words(self, part: Windows) -> np.ndarray:
        """int32 [B,L]: how many words begin in each target, 0 past a document's end."""
        words = np.zeros((len(part), part.length), np.int32)
        for row, (document, start) in enumerate(zip(part.document, part.start, strict=True)):
            own = self.words[document][start + 1 : start + part.length + 1]
            words[row, : len(own)] = own
        return words

    def _scored(
        self, program: Any, model: Trained, windows: Windows, window: np.int32 | None
    ) -> Iterator[tuple[Windows, np.ndarray, np.ndarray]]:
        """(windows, targets [B,L], nats [B,L]) a batch; the next one is dispatched before one is fetched."""
        batch, pending = self.evaluation.batch(windows.length), None
        try:
            for begin in range(0, len(windows), batch):
                part = windows[begin : begin + batch]
                inputs, wanted = self._batch(part, batch)
                nats = program(model.params, inputs, wanted, window)
                if pending is not None:
                    yield _fetched(*pending)
                pending = (part, wanted, nats)
            if pending is not None:
                yield _fetched(*pending)
        except jax.errors.JaxRuntimeError as error:
            raise _out_of_memory(error) from error

    def _batch(self, part: Windows, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 inputs and targets [B,L]; what is past a document's end, or past the last window, is 0 and unscored."""
        inputs, wanted = np.zeros((2, batch, part.length), np.int32)
        bos = self.tokenizer.bos if self.experiment.data.bos == "window" else None
        for row, (document, start) in enumerate(zip(part.document, part.start, strict=True)):
            tokens = self.documents[document][start : start + part.length + 1]
            inputs[row, : len(tokens) - 1], wanted[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
            if bos is not None:
                inputs[row, 0] = bos
        return inputs, wanted


def _scored_places(part: Windows) -> np.ndarray:
    """bool [B,L]: the targets that the protocol scores."""
    place = np.arange(part.length)
    return (place >= part.first[:, None]) & (place < part.stop[:, None])


def _fetched(part: Windows, wanted: np.ndarray, nats: jax.Array) -> tuple[Windows, np.ndarray, np.ndarray]:
    return part, wanted[: len(part)], np.asarray(nats)[: len(part)]


def totals(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Nats per scored token, perplexities and bits per byte of summed arrays, with what was scored; NaN for none.

    A word counts where its first byte is scored, so that the perplexity per word does not depend on the tokenizer.
    """
    empty = np.zeros((1, 1))
    nats, tokens, size, words = (float(arrays.get(name, empty).sum()) for name in ("nats", "tokens", "bytes", "words"))
    mean = nats / tokens if tokens else math.nan
    return {
        "nats": mean,
        "perplexity": perplexity(mean),
        "bits_per_byte": nats / math.log(2) / size if size else math.nan,
        "word_perplexity": perplexity(nats / words) if words else math.nan,
        "tokens": int(tokens),
        "bytes": int(size),
        "words": int(words),
        "documents": int((arrays.get("tokens", empty).sum(axis=1) > 0).sum()),
    }
