"""The training step: every encoding, several seeds at once, and peers on the same shapes, in one run.

A call is STEPS steps on one batch of random bytes, through the program that training runs, without what surrounds it
(batches, logs, checkpoints).
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pe_ablation import encodings, train
from pe_ablation.bench import peers, products
from pe_ablation.bench.asked import Request, experiment
from pe_ablation.bench.peers import Asked, Peer
from pe_ablation.bench.tables import ratio, spread
from pe_ablation.bench.tables import table as markdown
from pe_ablation.bench.turns import ROUNDS, Way, compiled, taken_in_turns
from pe_ablation.config import Experiment, TrainConfig
from pe_ablation.data.tokenizers import ByteTokenizer
from pe_ablation.encodings import Scores
from pe_ablation.model import SIZES, GPTConfig, count_parameters

BATCH = 32
STEPS = 2
SEEDS = 3
SEEDED = "rope"  # or, where it isn't asked for, the first encoding
TOKENIZER = ByteTokenizer()
POSITIONS = {  # of x-transformers: our encoding and what its decoder takes; attn_flash is torch's own attention
    "rotary": ("rope", {"rotary_pos_emb": True, "attn_flash": True}),
    "alibi": ("alibi", {"alibi_pos_bias": True, "attn_flash": True}),
    "t5": ("t5", {"rel_pos_bias": True}),  # which attn_flash doesn't go with
}


def plain() -> tuple[str, ...]:
    """The registered encodings that leave the logits alone or add to them a function of two positions."""
    shape: Any = SIZES["nano"]
    found = []
    for name in encodings.names():
        config = GPTConfig(TOKENIZER.vocab_size, train_length=16, encoding=name, **shape)
        if config.abstract_encoding(config.slots[0]).scores in (Scores.NONE, Scores.BIAS):
            found.append(name)
    return tuple(found)


def measure(asked: Request, say: Callable[[str], None]) -> dict[str, Any]:
    """{ours, peers, missing, tokens_per_second by way, products, peak, operations of one step, ...}."""
    names, rounds = asked.encodings or plain(), asked.rounds or ROUNDS
    batch = BATCH if asked.batch is None else asked.batch
    gpt = experiment(asked, "none", asked.length, batch).gpt(TOKENIZER.vocab_size)
    multiplied = products.shapes(gpt, batch * asked.length)
    ours, ways = _ours(asked, names, batch, say)
    with contextlib.ExitStack() as opened:
        rivals, missing = peers.started(opened, _products(multiplied), say)
        others, absent = peers.started(opened, asked_peers(gpt, asked.length, batch), say)
        multiplications = products.ways(multiplied, rivals)
        ways += [each.way(STEPS * batch * asked.length, STEPS) for each in others]
        say(f"{len(multiplications) + len(ways)} ways take {rounds} turns")
        rates = taken_in_turns([*multiplications, *ways], rounds)
    multiplying = {way.name: rates.pop(way.name) for way in multiplications}
    return {
        "size": asked.size,
        "length": asked.length,
        "batch": batch,
        "steps_a_call": STEPS,
        "operations": products.step(gpt, batch, asked.length),
        "products": multiplying,
        "peak": max(map(statistics.median, multiplying.values())),
        "ours": ours,
        "peers": {each.name: _about(each) for each in others},
        "missing": [*missing, *absent],
        "waiting": peers.waiting(),
        "tokens_per_second": rates,
    }


def _ours(
    asked: Request, names: Sequence[str], batch: int, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[Way]]:
    """What is known of each way, and the ways: every encoding on one seed, one of them on several."""
    about, ways = {}, []
    seeded = SEEDED if SEEDED in names else names[0]
    for name, count in [*((name, 1) for name in names), (seeded, SEEDS)]:
        each = experiment(asked, name, asked.length, batch)
        call, seconds = _program(each, count, batch)
        label = name if count == 1 else f"{name}, {count} seeds"
        parameters = count_parameters(each.gpt(TOKENIZER.vocab_size))
        about[label] = {"encoding": name, "seeds": count, "parameters": parameters, "compile_seconds": seconds}
        ways.append(Way(label, STEPS * count * batch * asked.length, call))
        say(f"{label}: compiled in {seconds:.1f} s")
    return about, ways


def _program(each: Experiment, count: int, batch: int) -> tuple[Callable[[], None], float]:
    """STEPS steps of `count` seeds, and the seconds that the program took to compile."""
    step, init = train.programs(each, TOKENIZER, count)
    seeds, peaks = np.arange(count, dtype=np.uint32), np.full(count, each.train.learning_rate, np.float32)
    windows = np.random.default_rng(0).integers(0, 256, (count, 1, batch, each.train.length + 1)).astype(np.int32)
    state = jax.device_put(init(seeds), step.split.sharding())
    program, seconds = compiled(lambda: step.jitted.lower(state, windows, seeds, peaks).compile())

    def call() -> None:
        nonlocal state
        for _ in range(STEPS):
            state, metrics = program(state, windows, seeds, peaks)
        jax.block_until_ready((state, metrics))

    return call, seconds


def _products(shapes: Sequence[products.Shape]) -> list[Asked]:
    return [
        Asked(
            products.name("torch", (rows, inner, columns)),
            "product",
            {"rows": rows, "inner": inner, "columns": columns},
        )
        for rows, inner, columns in shapes
    ]


def asked_peers(gpt: GPTConfig, length: int, batch: int) -> list[Asked]:
    """Peers on `batch` windows of `length` tokens a step, of our sizes, with our optimizer's settings."""
    shape = {"layers": gpt.num_layers, "dim": gpt.model_dim, "heads": gpt.num_heads, "hidden": gpt.hidden_dim}
    shape |= {"vocab": gpt.vocab_size, "length": length, "batch": batch}
    chosen = TrainConfig()
    given = {
        "shape": shape,
        "train": {
            "learning_rate": chosen.learning_rate,
            "betas": [chosen.beta1, chosen.beta2],
            "weight_decay": chosen.weight_decay,
            "clip_norm": chosen.clip_norm,
        },
    }
    found = []
    for compiles, suffix in ((False, ""), (True, ", compiled")):
        found.append(Asked(f"transformers GPT-2{suffix}", "gpt2", {**given, "compiled": compiles}))
        for name, (_, layers) in POSITIONS.items():
            own = {**given, "compiled": compiles, "layers": layers}
            found.append(Asked(f"x-transformers {name}{suffix}", "x_transformers", own))
    return found


def _about(peer: Peer) -> dict[str, Any]:
    """What is known of a peer; `encoding`: ours that does the same."""
    return {
        "encoding": _same(peer.name),
        "parameters": peer.about["parameters"],
        "first_seconds": peer.about["seconds"],
    }


def _same(name: str) -> str:
    library, kind = name.removesuffix(", compiled").split(" ")
    return POSITIONS[kind][0] if library == "x-transformers" else "learned"


def table(found: dict[str, Any]) -> Iterator[str]:
    """Ours, the peers, the seeds; what is not measured, and what the columns are."""
    shape = SIZES[found["size"]]
    yield (
        f"Training step, {found['size']} ({shape['num_layers']} layers, {shape['model_dim']} wide, "
        f"{shape['num_heads']} heads), T = {found['length']}, {found['batch']} windows, {TOKENIZER.vocab_size} ids, "
        "float32, AdamW"
    )
    yield ""
    rates = found["tokens_per_second"]
    titles = ("encoding", "tokens/s (median)", "range", "of `none`", "compile, s", "parameters", "of the peak")
    yield from markdown(titles, (_row(name, found, ratio(rates[name], rates.get("none"))) for name in found["ours"]))
    titles = ("peer", "tokens/s (median)", "range", "ours over it", "first step, s", "parameters", "of the peak")
    pairs = [(name, ratio(rates.get(each["encoding"]), rates[name])) for name, each in found["peers"].items()]
    if pairs:
        yield from markdown(titles, (_row(name, found, over) for name, over in pairs))
    yield from _notes(found)


def _row(name: str, found: dict[str, Any], compared: str) -> tuple[str, ...]:
    own, about = found["tokens_per_second"][name], {**found["ours"], **found["peers"]}[name]
    seconds = about.get("compile_seconds", about.get("first_seconds"))
    steps = statistics.median(own) / (found["batch"] * found["length"])
    share = steps * found["operations"] / found["peak"]
    label = f"{name} ({about['encoding']})" if name in found["peers"] else name
    return (label, *spread(own), compared, f"{seconds:.1f}", f"{about['parameters']:,}", f"{share:.0%}")


def _notes(found: dict[str, Any]) -> Iterator[str]:
    for line in found["missing"]:
        yield f"{line[0].upper()}{line[1:]}."
        yield ""
    rates = found["tokens_per_second"]
    for name, each in found["ours"].items():
        if each["seeds"] > 1:
            alone = found["ours"][each["encoding"]]
            time = each["seeds"] * statistics.median(rates[each["encoding"]]) / statistics.median(rates[name])
            compiling = each["compile_seconds"] / alone["compile_seconds"]
            yield (
                f"{name} in one program: a step takes {time:.2f}x the time of one seed's, compiling {compiling:.2f}x."
            )
            yield ""
    best = ", ".join(f"{name}: {statistics.median(own) / 1e9:.0f}" for name, own in found["products"].items())
    yield (
        f"The peak is the best median of float32 products in the same turns (GFLOP/s; {best}). A step's products, once "
        f"forwards and twice backwards, causal pairs alone, are {found['operations'] / 1e9:.2f} GFLOP. Compiling is "
        "tracing, lowering and XLA, with nothing kept from before; a peer's first step is all that it takes, compiling "
        "included. `ours over it`: our tokens/s over the peer's, with the encoding in brackets. torch has a thread a "
        f"core, OMP_WAIT_POLICY {found['waiting']}, fused AdamW, and its own attention where the peer takes it."
    )
    yield ""
