"""Continuing prompts with a cache, greedily: ours by encoding and transformers' `generate`, in one run.

A call reads a batch of prompts, or reads them and goes on by as many tokens. Rows that meet EOS go on here.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pe_ablation import generate
from pe_ablation.bench import peers
from pe_ablation.bench.asked import Request, experiment
from pe_ablation.bench.peers import Asked
from pe_ablation.bench.tables import ratio, spread
from pe_ablation.bench.tables import table as markdown
from pe_ablation.bench.training import TOKENIZER
from pe_ablation.bench.turns import ROUNDS, Way, compiled, taken_in_turns
from pe_ablation.eviction import Policy
from pe_ablation.model import GPT, GPTConfig, count_parameters

ENCODINGS = ("none", "learned", "rope", "alibi", "t5")
BATCH = 8
PEER = "transformers GPT-2"
PROMPT, WHOLE = "{}: prompts", "{}: prompts and new tokens"


def measure(asked: Request, say: Callable[[str], None]) -> dict[str, Any]:
    """{size, length, batch, ours, peers, missing, tokens_per_second by way}: of prompts, and of new tokens."""
    batch, length = BATCH if asked.batch is None else asked.batch, asked.length
    ours, ways = {}, []
    for name in asked.encodings or ENCODINGS:
        gpt = experiment(asked, name, 2 * length).gpt(TOKENIZER.vocab_size)
        found, seconds = _ways(name, gpt, batch, length)
        ways += found
        ours[name] = {"parameters": count_parameters(gpt), "compile_seconds": seconds}
        say(f"{name}: compiled in {seconds:.1f} s")
    gpt = experiment(asked, "learned", 2 * length).gpt(TOKENIZER.vocab_size)
    with contextlib.ExitStack() as opened:
        others, missing = peers.started(opened, asked_peers(gpt, batch, length), say)
        ways += [each.way(batch * length) for each in others]
        say(f"{len(ways)} ways take turns")
        rates = taken_in_turns(ways, asked.rounds or ROUNDS)
    about = {PEER: {"parameters": others[0].about["parameters"]}} if len(others) == 2 else {}
    found = {"size": asked.size, "length": length, "batch": batch, "ours": ours, "peers": about, "missing": missing}
    return found | {"tokens_per_second": rates}


def _ways(name: str, gpt: GPTConfig, batch: int, length: int) -> tuple[list[Way], float]:
    """Reading prompts, and going on as `generate` does; the seconds that both programs took to compile."""
    params = nnx.state(GPT(gpt, rngs=nnx.Rngs(0)), nnx.Param)
    prompts = np.random.default_rng(0).integers(0, 256, (batch, length)).astype(np.int32)
    places = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
    key, how = jax.random.key(0), (np.float32(0.0), np.int32(gpt.vocab_size), np.float32(1.0))
    policy = Policy("full", 2 * length)
    generate.programs.cache_clear()
    read, step = generate.programs(gpt, policy, jnp.float32, TOKENIZER.bos, TOKENIZER.eos)

    def made() -> tuple[Any, Any]:
        first = read.lower(params, prompts, places)
        state = jax.eval_shape(read, params, prompts, places)
        return first.compile(), step.lower(params, state, key, np.int32(0), *how).compile()

    (first, follow), seconds = compiled(made)

    def whole() -> None:
        state, waiting = first(params, prompts, places), None
        for number in range(length):
            tokens, _, state = follow(params, state, key, np.int32(number), *how)
            if waiting is not None:
                np.asarray(waiting)
            waiting = tokens
        jax.block_until_ready((state, waiting))

    reading = Way(PROMPT.format(name), batch * length, lambda: jax.block_until_ready(first(params, prompts, places)))
    return [reading, Way(WHOLE.format(name), batch * length, whole)], seconds


def asked_peers(gpt: GPTConfig, batch: int, length: int) -> list[Asked]:
    """GPT-2 of our sizes on `batch` prompts of `length` tokens; one new token costs a reading of the prompts alone."""
    shape = {"layers": gpt.num_layers, "dim": gpt.model_dim, "heads": gpt.num_heads, "hidden": gpt.hidden_dim}
    shape |= {"vocab": gpt.vocab_size, "positions": 2 * length, "length": length, "batch": batch}
    ways = ((PROMPT, 1), (WHOLE, length))
    return [Asked(text.format(PEER), "continuation", {"shape": shape, "new": new}) for text, new in ways]


def table(found: dict[str, Any]) -> Iterator[str]:
    """A row an encoding, the peer last."""
    rates, batch, length = found["tokens_per_second"], found["batch"], found["length"]
    yield (
        f"Continuing {batch} prompts of {length} tokens by {length}, greedily, with a cache, {found['size']}, "
        f"{TOKENIZER.vocab_size} ids, float32"
    )
    yield ""
    peer = rates.get(WHOLE.format(PEER))
    rows = []
    for name, each in {**found["ours"], **found["peers"]}.items():
        prompts, whole = rates[PROMPT.format(name)], rates[WHOLE.format(name)]
        seconds = [batch * length / statistics.median(own) for own in (prompts, whole)]
        compiling = f"{each['compile_seconds']:.1f}" if "compile_seconds" in each else "-"
        a_step = f"{(seconds[1] - seconds[0]) / length * 1e3:.2f}"
        rows.append((name, *spread(prompts), *spread(whole), a_step, ratio(whole, peer), compiling))
    titles = ("prompts, tokens/s", "range", "new tokens/s", "range", "a step, ms", "over GPT-2's", "compile, s")
    yield from markdown(("model", *titles), rows)
    for line in found["missing"]:
        yield from (f"{line[0].upper()}{line[1:]}.", "")
    yield (
        "New tokens/s count the reading of the prompts; a step is the time beyond it over the new tokens, by medians. "
        "transformers' `generate` reads prompts and draws one token in the time that stands for prompts. Compiling is "
        "that of both programs: tracing, lowering and XLA, with nothing kept from before."
    )
    yield ""
