"""Scoring long windows: speed, compile time and memory by length and encoding, through the program of evaluation.

A call scores one window, whatever its length, so that memory tells how it grows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from pe_ablation import evaluate
from pe_ablation.bench.asked import Request, experiment
from pe_ablation.bench.tables import ratio, spread
from pe_ablation.bench.tables import table as markdown
from pe_ablation.bench.training import TOKENIZER, plain
from pe_ablation.bench.turns import Way, compiled, taken_in_turns
from pe_ablation.config import PositionsConfig
from pe_ablation.memory import memory_limit, program_bytes
from pe_ablation.model import GPT

ROUNDS = 3

Cell = dict[str, Any]


def measure(asked: Request, say: Callable[[str], None]) -> dict[str, Any]:
    """{size, cells: what is known of each encoding at each length, or why it isn't}."""
    names = asked.encodings or plain()
    longest = max(asked.lengths)  # as the training length, so that `learned` has a vector for each position
    gpts = {name: experiment(asked, name, longest).gpt(TOKENIZER.vocab_size) for name in names}
    models = {name: GPT(gpt, rngs=nnx.Rngs(0)) for name, gpt in gpts.items()}
    cells = []
    for length in asked.lengths:
        found = [_cell(name, model, length, say) for name, model in models.items()]
        rates = taken_in_turns([way for _, way in found if way is not None], asked.rounds or ROUNDS)
        cells += [cell | {"tokens_per_second": rates.get(cell["encoding"])} for cell, _ in found]
        say(f"length {length}: {len(rates)} encodings measured")
    return {"size": asked.size, "train_length": longest, "cells": cells}


def _cell(name: str, model: GPT, length: int, say: Callable[[str], None]) -> tuple[Cell, Way | None]:
    """What is known of one encoding at one length before its turns, and its way; None where it can't be measured."""
    about: Cell = {"encoding": name, "length": length}
    if model.max_position is not None and length > model.max_position:
        return about | {"reason": f"{model.max_position} positions"}, None
    evaluate.scoring_program.cache_clear()
    make = lambda: evaluate.scoring_program(model.config, 1, length, PositionsConfig())  # noqa: E731
    program, seconds = compiled(make)
    say(f"{name}, length {length}: compiled in {seconds:.1f} s")
    params = nnx.state(model, nnx.Param)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    need = program_bytes(program)
    about |= {
        "compile_seconds": seconds,
        "parameter_bytes": kept,
        "memory_bytes": None if need is None else need - kept,
    }
    if need is not None and need - kept > memory_limit():
        return about | {"reason": f"needs {need:,} bytes"}, None
    inputs, wanted = np.random.default_rng(0).integers(0, 256, (2, 1, length)).astype(np.int32)
    window = np.int32(evaluate.NO_WINDOW)
    return about, Way(name, length, lambda: jax.block_until_ready(program(params, inputs, wanted, window)))


def table(found: dict[str, Any]) -> Iterator[str]:
    """Speed, time over that of `none`, memory and its growth, compile time; a row an encoding, a column a length."""
    cells = {(cell["encoding"], cell["length"]): cell for cell in found["cells"]}
    names, lengths = (list(dict.fromkeys(each)) for each in zip(*cells, strict=True))
    yield f"Scoring a window, {found['size']}, {TOKENIZER.vocab_size} ids, float32"
    yield ""
    titles = ("encoding", *map(str, lengths))

    def rows(text: Callable[[str, int], str]) -> Iterator[Sequence[str]]:
        return ((name, *(text(name, length) for length in lengths)) for name in names)

    def speed(name: str, length: int) -> str:
        rates = cells[name, length]["tokens_per_second"]
        return cells[name, length].get("reason", "-") if rates is None else "{} ({})".format(*spread(rates))

    def slower(name: str, length: int) -> str:
        none = cells.get(("none", length), {}).get("tokens_per_second")
        return ratio(none, cells[name, length]["tokens_per_second"])

    def memory(name: str, length: int) -> str:
        own, half = (cells.get((name, each), {}).get("memory_bytes") for each in (length, length / 2))
        grown = "" if own is None or half is None else f" ({own / half:.2f}x)"
        return "-" if own is None else f"{own / 2**20:.1f}{grown}"

    def compiling(name: str, length: int) -> str:
        seconds = cells[name, length].get("compile_seconds")
        return "-" if seconds is None else f"{seconds:.1f}"

    for what, text in (
        ("Tokens/s: median (range)", speed),
        ("Time over that of `none`, by medians", slower),
        ("Memory of the program beyond the parameters, MiB (over that of half the length: 2x is linear)", memory),
        ("Seconds to compile: tracing, lowering and XLA, with nothing kept from before", compiling),
    ):
        yield from (what, "")
        yield from markdown(titles, rows(text))
