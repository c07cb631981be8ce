"""Scored numbers against a plain loop over targets, made-up nats with known means, and what is refused or not a number.

Runs are written, not trained (`written`): random parameters large enough that context matters. One test trains.
"""

import collections
import functools
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from compiles import compiles
from flax import nnx
from written_runs import BOS, EOS, RAGGED, VOCABULARY, experiment, parameters, text, written

from pe_ablation import config, data, encodings, evaluate, memory, record, train
from pe_ablation.attention import Mask
from pe_ablation.config import ConfigError
from pe_ablation.data import tokenizers
from pe_ablation.data.tokens import TokenFile, TokenFileError
from pe_ablation.evaluate import EvaluationError, curve, evaluate_run
from pe_ablation.model import GPT
from pe_ablation.record import Run
from pe_ablation.trained import NotTrained

pytestmark = pytest.mark.usefixtures("quick_compilation")


def cells(run):
    """Stored cells by (protocol, length, null)."""
    found = {(each["protocol"], each["length"], each["null"]): each for each in run.cells()}
    assert len(found) == len(run.cells())
    return found


def scored(folder, documents=RAGGED, *, seed=0, **overrides):
    run = written(folder / "run", experiment(folder, documents, **overrides), seed=seed)
    evaluate_run(run.path)
    return run


class Fake:
    """Stands in for the compiled program: nats [B,L] of (inputs, targets), as float32."""

    def __init__(self, nats):
        self.nats = nats
        self.calls = []

    def __call__(self, params, inputs, wanted, window):
        self.calls.append((inputs.copy(), wanted.copy(), int(window)))
        return np.broadcast_to(np.asarray(self.nats(inputs, wanted), np.float32), inputs.shape)

    def memory_analysis(self):
        return None


@pytest.fixture
def fake(monkeypatch):
    def install(nats):
        program = Fake(nats)
        monkeypatch.setattr(evaluate, "scoring_program", lambda *_: program)
        return program

    return install


# Known means


def short(length, **more):
    """Config fields of a model of this training length."""
    return {"train__length": length, "data__block": length, "train__batch_tokens": length, "data__bos": "none"} | more


def test_a_strided_mean_weighs_every_token_once(tmp_path, fake):
    """Nats of 0.1 t at token t; unweighted window means give 1.711722, weighted by window length 1.599994."""
    fake(lambda inputs, wanted: 0.1 * (wanted - ord("0")))
    fields = short(4, eval__lengths=[4], eval__protocols=["sliding"], eval__stride=2)
    run = scored(tmp_path, [b"0123456789"], **fields)
    cell = cells(run)["sliding", 4, "none"]
    assert (cell["tokens"], cell["bytes"], cell["documents"]) == (9, 9, 1)
    assert cell["nats"] == pytest.approx(0.5, rel=1e-6)
    assert cell["perplexity"] == pytest.approx(1.648721, abs=1e-6)
    arrays = run.arrays(cell)
    np.testing.assert_array_equal(arrays["tokens"], [[1, 1, 4, 3]])
    np.testing.assert_allclose(arrays["nats"], [[0.1, 0.2, 0.3 + 0.5 + 0.7 + 0.9, 0.4 + 0.6 + 0.8]], rtol=1e-6)


def test_no_token_is_lost_between_blocks(tmp_path, fake):
    """A token lost at each seam gives 0.40 over 6 tokens."""
    fake(lambda inputs, wanted: 0.1 * (wanted - ord("0")))
    run = scored(tmp_path, [b"012345678"], **short(4, eval__lengths=[4], eval__protocols=["blocks"]))
    cell = cells(run)["blocks", 4, "none"]
    assert cell["tokens"] == 8
    assert cell["nats"] == pytest.approx(0.45, rel=1e-6)
    assert cell["perplexity"] == pytest.approx(1.568312, abs=1e-6)


def test_a_thousand_tokens_take_thirteen_windows(tmp_path, fake):
    program = fake(lambda inputs, wanted: 1.0)
    fields = {"eval__lengths": [256], "eval__protocols": ["sliding"], "eval__stride": 64, "eval__batch_tokens": 256}
    run = scored(tmp_path, [text(1000)], **short(256, **fields))
    assert [inputs.shape for inputs, *_ in program.calls] == [(1, 256)] * 13
    assert cells(run)["sliding", 256, "none"]["tokens"] == 999


def test_context_is_told_from_target(tmp_path, fake):
    """2 nats at the first 8 places of a context, 1 after: longer blocks look better, on other places."""
    fake(lambda inputs, wanted: np.where(np.arange(inputs.shape[1]) < 8, 2.0, 1.0))
    fields = {"eval__lengths": [8, 16], "eval__protocols": ["blocks", "targets"], "eval__last_k": 8}
    run = scored(tmp_path, [text(32)], eval__spacing=8, **fields)
    found = cells(run)
    for (protocol, length), nats, tokens in [
        (("blocks", 8), 2.0, 32), (("blocks", 16), 1.5, 32), (("targets", 8), 2.0, 24), (("targets", 16), 1.0, 24),
    ]:  # fmt: skip
        cell = found[protocol, length, "none"]
        assert (cell["nats"], cell["tokens"]) == (nats, tokens)
    assert found["targets", 16, "none"]["settings"]["last_k"] == 8


def test_every_length_scores_the_same_tokens_on_targets(tmp_path, fake):
    """Nats drawn per id: equal sums in every document mean equal targets. A sample of windows stays the same one."""
    weight = np.random.default_rng(0).uniform(1, 2, VOCABULARY)
    fake(lambda inputs, wanted: weight[wanted])
    run = scored(tmp_path, eval__lengths=[8, 12, 20], eval__max_windows=5)
    found = [run.arrays(cell) for cell in run.cells() if cell["null"] == "none"]
    sums = [{name: each[name].sum(axis=1) for name in ("nats", "tokens", "bytes")} for each in found]
    assert len(found) == 3 and 0 < sums[0]["tokens"].sum() <= 20
    for each in sums[1:]:
        np.testing.assert_allclose(each["nats"], sums[0]["nats"], rtol=1e-12)
        np.testing.assert_array_equal(each["tokens"], sums[0]["tokens"])


@pytest.mark.parametrize("windows, batch", [(2, 3), (3, 2), (4, 4)])
def test_padding_counts_neither_above_nor_below_the_line(tmp_path, fake, windows, batch):
    """Padding would score 8: in the sum it gives more than 2, in the count alone less."""
    program = fake(lambda inputs, wanted: np.where(wanted == 0, 8.0, 2.0))
    fields = {"eval__lengths": [8], "eval__protocols": ["blocks"], "eval__batch_tokens": 8 * batch}
    run = scored(tmp_path, [text(8 * windows - 2)], data__bos="none", **fields)
    assert any((wanted == 0).any() for _, wanted, _ in program.calls)
    cell = cells(run)["blocks", 8, "none"]
    assert (cell["nats"], cell["tokens"]) == (2.0, 8 * windows - 3)


@pytest.mark.parametrize("bos, missed", [("document", 0), ("none", 1), ("window", 1)])
def test_special_tokens_are_not_scored_and_every_byte_but_a_leading_one_is(tmp_path, fake, bos, missed):
    """EOS would score 1000. The first byte has nothing before it unless the document starts with BOS."""
    fake(lambda inputs, wanted: np.where(wanted < 256, 1.0, 1000.0))
    run = scored(tmp_path, data__bos=bos, eval__protocols=["blocks", "sliding"])
    for cell in run.cells():
        assert cell["tokens"] == cell["bytes"] == sum(map(len, RAGGED)) - missed * len(RAGGED)
        assert (cell["nats"], cell["bits_per_byte"]) == (1.0, pytest.approx(1 / math.log(2), rel=1e-12))


def test_a_multi_byte_token_weighs_its_bytes(tmp_path, fake, monkeypatch):
    fake(lambda inputs, wanted: 1.5)
    monkeypatch.setattr(tokenizers.ByteTokenizer, "bytes_per_token", np.where(np.arange(VOCABULARY) < 256, 3, 0))
    cell = cells(scored(tmp_path))["targets", 8, "none"]
    assert cell["bytes"] == 3 * cell["tokens"] > 0
    assert cell["bits_per_byte"] == pytest.approx(1.5 / math.log(2) / 3, rel=1e-12)


def test_a_mean_of_800_nats_is_kept_and_its_perplexity_is_infinite(tmp_path, fake):
    fake(lambda inputs, wanted: 800.0)
    run = scored(tmp_path)
    cell = cells(run)["targets", 12, "none"]
    assert (cell["nats"], cell["perplexity"]) == (800.0, math.inf)
    assert cell["bits_per_byte"] == pytest.approx(800 / math.log(2))
    stored = (run.path / "evaluation" / f"{cell['key']}.json").read_text()
    parsed = json.loads(stored, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert parsed["perplexity"] == "Infinity"


# The same numbers from a plain loop


class Oracle:
    """Nats of single targets: the model on one window, one target read off, softmax in float64."""

    def __init__(self, run):
        asked = run.experiment
        self.eval, self.bos = asked.eval, asked.data.bos
        graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(asked.gpt(VOCABULARY), rngs=nnx.Rngs(0))))
        params = jax.device_put(parameters(asked.gpt(VOCABULARY)))
        model = jax.jit(lambda params, ids, mask: nnx.merge(graph, params)(ids, mask=mask))
        self.model = functools.partial(model, params)
        self.logits = functools.cache(self._logits)
        self.documents = [[*([BOS] if self.bos == "document" else []), *each, EOS] for each in RAGGED]

    def _logits(self, row, start, length, window):
        """The model on one window alone, float64 [L,V]; what is past the document is token 1."""
        tokens = self.documents[row]
        ids = [*tokens[start : min(start + length, len(tokens) - 1)]]
        ids = np.asarray([ids + [1] * (length - len(ids))], np.int32)
        if self.bos == "window":
            ids[0, 0] = BOS
        return np.asarray(self.model(ids, Mask() if window is None else Mask(window=window))[0], np.float64)

    def nats(self, row, start, length, target, window):
        """-log p of token `target` of a document after the window of `length` tokens at `start`."""
        logits = self.logits(row, start, length, window)[target - start - 1]
        return np.log(np.exp(logits - logits.max()).sum()) - (logits[self.documents[row][target]] - logits.max())

    def window(self, protocol, tokens, length, target):
        """Where the window that scores a target starts; None: no window does."""
        fields = self.eval
        if protocol == "blocks":
            return (target - 1) // length * length
        if protocol == "sliding":
            return next(at for at in range(0, len(tokens), fields.stride) if target <= at + length)
        ends = range(max(fields.lengths), len(tokens), fields.spacing)
        return next((end - length for end in ends if end - fields.last_k < target <= end), None)

    def sums(self, protocol, length, window=None):
        """nats, tokens [documents, length]."""
        nats, count = np.zeros((2, len(self.documents), length))
        for row, tokens in enumerate(self.documents):
            for target in (each for each in range(1, len(tokens)) if tokens[each] < 256):
                start = self.window(protocol, tokens, length, target)
                if start is not None:
                    nats[row, target - start - 1] += self.nats(row, start, length, target, window)
                    count[row, target - start - 1] += 1
        return nats, count


@pytest.mark.parametrize("bos, encoding", [("document", "rope"), ("window", "alibi"), ("none", "sinusoidal")])
def test_every_cell_equals_a_loop_over_single_targets(tmp_path, bos, encoding):
    run = scored(tmp_path, data__bos=bos, encoding__name=encoding, eval__protocols=["blocks", "targets", "sliding"])
    oracle, found = Oracle(run), cells(run)
    kinds = [(8, "none"), (12, "none"), (12, "window_mask")]
    assert set(found) == {(protocol, *kind) for protocol in ("blocks", "targets", "sliding") for kind in kinds}
    for (protocol, length, null), cell in found.items():
        nats, count = oracle.sums(protocol, length, window=8 if null == "window_mask" else None)
        arrays = run.arrays(cell)
        np.testing.assert_array_equal(arrays["tokens"], count)
        np.testing.assert_allclose(arrays["nats"], nats, rtol=2e-6, atol=1e-5)
        assert arrays["names"].tolist() == ["0.txt", "1.txt", "2.txt"]
        assert cell["tokens"] == cell["bytes"] == count.sum() and cell["documents"] == 3
        mean = nats.sum() / count.sum()
        assert cell["nats"] == pytest.approx(mean, rel=1e-6)
        assert cell["perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
        assert cell["bits_per_byte"] == pytest.approx(mean / math.log(2) * cell["tokens"] / cell["bytes"], rel=1e-6)
    for protocol in ("blocks", "targets", "sliding"):
        plain, masked = found[protocol, 12, "none"], found[protocol, 12, "window_mask"]
        assert abs(plain["nats"] - masked["nats"]) > 1e-4
    rows = curve(run.path, [8, 12], protocols=["targets"]).set_index(["null", "eval_length"])
    pair = rows.loc[[("window_recompute", 12), ("none", 8)], ["nats", "tokens", "bytes", "documents"]]
    assert pair.iloc[0].tolist() == pair.iloc[1].tolist()
    assert pair.nats.iloc[0] == found["targets", 8, "none"]["nats"]


def test_batches_do_not_change_results(tmp_path):
    protocols = ["blocks", "targets", "sliding"]
    found = {}
    for batch in (1, 2, 3, 8):
        run = scored(tmp_path / str(batch), eval__lengths=[8], eval__protocols=protocols, eval__batch_tokens=8 * batch)
        found[batch] = {key: (cell, run.arrays(cell)) for key, cell in cells(run).items()}
    for batch in (2, 3, 8):
        for key, (cell, arrays) in found[batch].items():
            own, own_arrays = found[1][key]
            assert cell["perplexity"] == pytest.approx(own["perplexity"], rel=1e-6)
            np.testing.assert_array_equal(arrays["tokens"], own_arrays["tokens"])
            np.testing.assert_allclose(arrays["nats"], own_arrays["nats"], rtol=1e-5)


def test_the_order_of_documents_does_not_change_results(tmp_path):
    forward = scored(tmp_path / "a", RAGGED, eval__protocols=["blocks", "targets", "sliding"])
    backward = scored(tmp_path / "b", RAGGED[::-1], eval__protocols=["blocks", "targets", "sliding"])
    for key, cell in cells(forward).items():
        other = cells(backward)[key]
        assert cell["nats"] == pytest.approx(other["nats"], rel=1e-6)
        assert cell["tokens"] == other["tokens"]
        tokens = backward.arrays(other)["tokens"]
        np.testing.assert_array_equal(forward.arrays(cell)["tokens"], tokens[::-1])


def test_every_length_is_scored_on_the_documents_that_serve_the_longest(tmp_path, fake):
    """With BOS and EOS 30 bytes are 32 tokens: 31 inputs fit, 32 do not."""
    fake(lambda inputs, wanted: 1.0)
    for longest, names in ((31, ["0.txt", "1.txt", "2.txt"]), (32, ["1.txt", "2.txt"])):
        run = scored(tmp_path / str(longest), eval__lengths=[8, longest], eval__protocols=["blocks"])
        assert [run.arrays(cell)["names"].tolist() for cell in run.cells()] == [names] * 3
    run = scored(tmp_path / "most", eval__max_documents=2)
    assert {tuple(run.arrays(cell)["names"]) for cell in run.cells()} == {("0.txt", "2.txt")}


def test_a_trained_run_is_scored_on_what_it_learned(tmp_path):
    """One letter ever: after training its next one is sure, at every length."""
    asked = experiment(tmp_path, [b"a" * 60], train__steps=40, train__learning_rate=0.1, train__batch_tokens=32)
    summary = train.fit(asked, tmp_path / "run")
    assert summary["status"] == "ok"
    assert 16 * summary["parameters"] < summary["memory_bytes"] < 2**28  # weights, gradient and two moments, at least
    rows = curve(tmp_path / "run", [16, 40])
    taken = rows[rows.null == "none"].set_index("eval_length").memory_bytes
    assert 4 * summary["parameters"] < taken[[16, 40]].min() and taken[[16, 40]].max() < 2**28
    assert set(rows.status) == {"ok"}
    assert rows.nats.max() < 0.05
    assert math.log(VOCABULARY) > 5  # what an untrained model would score


# What is not a number


def test_a_learned_table_has_no_value_past_its_end(tmp_path):
    asked = {"encoding__name": "learned", "eval__lengths": [8, 9]}
    found = cells(scored(tmp_path / "own", **asked))
    for (_, length, _), cell in found.items():
        past = length > 8
        assert cell["status"] == ("n/a" if past else "ok")
        assert (cell["tokens"] == 0) == past
        assert all(math.isnan(cell[name]) == past for name in ("nats", "perplexity", "bits_per_byte"))
    assert len(found) == 3
    longer = cells(scored(tmp_path / "longer", encoding__options={"rows": 4096}, **asked))
    assert {cell["status"] for cell in longer.values()} == {"ok"}


def test_a_length_that_does_not_fit_is_oom_and_the_others_are_scored(tmp_path, monkeypatch):
    asked = experiment(tmp_path, eval__lengths=[8, 28], eval__batch_tokens=28)
    run = written(tmp_path / "run", asked)
    sizes = [
        evaluate.scoring_program(asked.gpt(VOCABULARY), 28 // length, length, asked.positions).memory_analysis()
        for length in (8, 28)
    ]
    needs = [size.temp_size_in_bytes + size.output_size_in_bytes for size in sizes]
    assert needs[0] < needs[1]
    monkeypatch.setattr(evaluate, "memory_limit", lambda: needs[0])
    evaluate_run(run.path)
    status = {key[1:]: cell["status"] for key, cell in cells(run).items()}
    assert status == {(8, "none"): "ok", (28, "none"): "OOM", (28, "window_mask"): "OOM"}
    monkeypatch.setattr(evaluate, "memory_limit", lambda: needs[1])
    evaluate_run(run.path)
    assert {cell["status"] for cell in run.cells()} == {"ok"}


def test_the_memory_limit_is_what_the_device_or_the_machine_has_free(monkeypatch):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    stats = None
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert 0 < evaluate.memory_limit() <= physical
    stats = {"bytes_limit": 100, "bytes_in_use": 30}
    assert evaluate.memory_limit() == 70
    stats = None
    monkeypatch.setattr(memory, "Path", lambda name: Path(f"/nowhere{name}"))  # macOS has no /proc
    assert evaluate.memory_limit() == physical


@pytest.mark.parametrize("when", ["compile", "run"])
def test_an_exhausted_device_is_oom_and_other_errors_are_raised(tmp_path, monkeypatch, when):
    run = written(tmp_path / "run", experiment(tmp_path, eval__nulls=[]))
    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte"

    def fail(*_):
        raise jax.errors.JaxRuntimeError(message)

    def compiled(config, batch, length, chosen, windowed):
        if length == 12 and when == "compile":
            fail()
        return Fake(fail if length == 12 else lambda inputs, wanted: 1.0)

    monkeypatch.setattr(evaluate, "scoring_program", compiled)
    evaluate_run(run.path)
    assert {key[1]: cell["status"] for key, cell in cells(run).items()} == {8: "ok", 12: "OOM"}
    message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        curve(run.path, [12], protocols=["sliding"], nulls=[])


def test_a_diverged_run_has_diverged_cells(tmp_path, fake):
    fake(lambda inputs, wanted: np.nan)
    run = written(tmp_path / "run", experiment(tmp_path), alive=False, step=2)
    evaluate_run(run.path)
    assert {(cell["status"], cell["tokens"]) for cell in run.cells()} == {("diverged", 0)}
    assert all(math.isnan(cell["nats"]) for cell in run.cells())


def test_nan_from_a_run_that_did_not_diverge_is_an_error(tmp_path, fake):
    fake(lambda inputs, wanted: np.where(np.arange(inputs.shape[1]) == 9, np.nan, 1.0))
    run = written(tmp_path / "run", experiment(tmp_path))
    with pytest.raises(EvaluationError, match=r"run: NaN at evaluation length 12"):
        evaluate_run(run.path)
    assert [cell["length"] for cell in run.cells()] == [8]


def test_nan_where_nothing_is_scored_is_none(tmp_path, fake):
    fake(lambda inputs, wanted: np.where((wanted == EOS) | (wanted == 0), np.nan, 1.0))
    run = scored(tmp_path, eval__protocols=["blocks", "targets", "sliding"])
    assert {(cell["status"], cell["nats"]) for cell in run.cells()} == {("ok", 1.0)}


# Compiles, stored cells, and the rows of a curve


@pytest.mark.usefixtures("usual_compilation")
def test_one_compile_a_length_and_none_on_a_second_pass(tmp_path):
    asked = experiment(
        tmp_path,
        model__model_dim=12,  # a model of no other test
        eval__lengths=[8, 10, 12],
        eval__protocols=["blocks", "targets", "sliding"],
    )
    runs = [written(tmp_path / f"seed_{seed}", asked, seed=seed) for seed in range(2)]
    jax.jit(lambda x: x + 1)(1.0)  # what jax itself compiles once a process
    before = evaluate.scoring_program.cache_info().misses
    with compiles() as first:
        evaluate_run(runs[0].path)
    assert first == ["jit(score)"] * 3
    with compiles() as second:
        evaluate_run(runs[1].path)
        evaluate_run(runs[0].path)
        curve(runs[0].path, [8, 10, 12], protocols=["targets"])
        curve(runs[0].path, [10, 12], protocols=["blocks"], nulls=[])
    assert second == []
    assert evaluate.scoring_program.cache_info().misses - before == 3
    assert len(runs[1].cells()) == len(runs[0].cells()) == 15
    assert {cell["key"] for cell in runs[1].cells()} == {cell["key"] for cell in runs[0].cells()}
    assert all(a["nats"] != b["nats"] for a, b in zip(runs[0].cells(), runs[1].cells(), strict=True))


def test_stored_cells_are_not_scored_again_and_a_longer_longest_has_its_own(tmp_path, fake):
    program = fake(lambda inputs, wanted: 1.0)
    run = scored(tmp_path)
    files = {path: path.read_bytes() for path in (run.path / "evaluation").iterdir()}
    program.nats, done = (lambda inputs, wanted: 2.0), len(program.calls)
    evaluate_run(run.path)
    curve(run.path, [12])
    assert len(program.calls) == done
    assert {path: path.read_bytes() for path in (run.path / "evaluation").iterdir()} == files
    (run.path / "evaluation" / f"{cells(run)['targets', 12, 'none']['key']}.json").write_text('{"torn')
    evaluate_run(run.path)
    assert {key[1:]: cell["nats"] for key, cell in cells(run).items()} == {
        (8, "none"): 1.0, (12, "none"): 2.0, (12, "window_mask"): 1.0,
    }  # fmt: skip
    rows = curve(run.path, [12, 16], nulls=[])
    assert rows.eval_length.tolist() == [8, 12, 16] and (rows.nats == 2.0).all()
    longest = collections.Counter(cell["settings"]["longest"] for cell in run.cells())
    assert longest == {12: 3, 16: 3}


@pytest.mark.parametrize("change", [
    {"split": "test"}, {"last_k": 3}, {"spacing": 7}, {"max_windows": 2}, {"max_documents": 1},
])  # fmt: skip
def test_what_decides_the_targets_is_in_the_key(tmp_path, fake, change):
    fake(lambda inputs, wanted: 1.0)
    overrides = {f"eval__{name}": value for name, value in change.items()}
    asked = [experiment(tmp_path, data__text__test=str(tmp_path / "text"), **each) for each in ({}, overrides)]
    run = written(tmp_path / "run", asked[0])
    evaluate_run(run.path)
    Run.plan(run.path, asked[1], None, None)
    evaluate_run(run.path)
    assert len(run.cells()) == 6


def test_a_curve_has_the_rows_that_were_asked_and_no_others(tmp_path, fake):
    fake(lambda inputs, wanted: 1.0)
    run = written(tmp_path / "run", experiment(tmp_path, eval__lengths=[8, 12, 20], eval__protocols=["blocks"]))
    evaluate_run(run.path)

    def rows(*args, **kwargs):
        frame = curve(run.path, *args, **kwargs)
        assert set(zip(frame.status, frame.split, strict=True)) == {("ok", "validation")}
        return sorted(zip(frame.protocol, frame.null, frame.eval_length, strict=True))

    masked, fresh = ("targets", "window_mask", 16), ("targets", "window_recompute", 16)
    plain = [("targets", "none", 8), ("targets", "none", 16)]
    assert rows([16]) == [*plain, masked, fresh]
    assert rows([16], nulls=[]) == plain
    assert rows([16], nulls=["window_recompute"]) == [*plain, fresh]
    assert rows([12], protocols=["sliding", "blocks"], nulls=["window_mask"]) == [
        (protocol, *kind)
        for protocol in ("blocks", "sliding")
        for kind in (("none", 8), ("none", 12), ("window_mask", 12))
    ]
    assert rows([4], nulls=["window_mask"]) == [("targets", "none", 4), ("targets", "none", 8)]


def test_a_curve_has_a_null_that_the_run_did_not_plan(tmp_path, fake):
    fake(lambda inputs, wanted: 1.0)
    run = written(tmp_path / "run", experiment(tmp_path, eval__nulls=[]))
    frame = curve(run.path, [12])
    assert set(frame.null) == {"none", "window_mask", "window_recompute"}


# Far past the training length


LONG = tuple(text(520 + each, each) for each in range(2))


@pytest.mark.parametrize("encoding", encodings.names())
def test_64_times_the_training_length(tmp_path, encoding):
    fields = {"eval__lengths": [512], "eval__spacing": 64, "eval__batch_tokens": 1024, "eval__nulls": []}
    run = scored(tmp_path, LONG, encoding__name=encoding, **fields)
    cell = cells(run)["targets", 512, "none"]
    if encoding == "learned":
        assert cell["status"] == "n/a"
        return
    asked = run.experiment
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(asked.gpt(VOCABULARY), rngs=nnx.Rngs(0))))
    model = jax.jit(lambda params, ids: nnx.merge(graph, params)(ids))
    ids = np.asarray([[BOS, *document[:512]] for document in LONG], np.int32)
    logits = np.asarray(model(parameters(asked.gpt(VOCABULARY)), ids[:, :-1]), np.float64)[:, -4:]
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(chances, ids[:, -4:, None], axis=-1)).mean()
    assert (cell["status"], cell["tokens"]) == ("ok", 8)
    assert cell["nats"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize("encoding", ["t5", "transformer_xl"])
def test_memory_is_linear_in_the_evaluation_length(tmp_path, encoding):
    """Two heads take blocks of queries from 4,096 tokens on; scores of a whole 8,192 would be 512 MiB."""

    def temporary(length, **fields):
        gpt = experiment(tmp_path, encoding__name=encoding, **fields).gpt(VOCABULARY)
        return evaluate.scoring_program(gpt, 1, length, config.PositionsConfig()).memory_analysis().temp_size_in_bytes

    at = {length: temporary(length) for length in (4096, 8192)}
    assert at[8192] <= 2.2 * at[4096]
    assert at[8192] < 2 * 4 * 8192**2 / 8
    assert temporary(1024, model__implementation="dense") > at[4096]


# Refused


def test_an_evaluation_length_of_zero_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.lengths\[1\]: 0 is not a length"):
        experiment(tmp_path, eval__lengths=[8, 0])
    run = written(tmp_path / "run", experiment(tmp_path))
    with pytest.raises(ConfigError, match=r"eval\.lengths\[0\]: 0 is not a length"):
        curve(run.path, [0])


def test_a_length_past_every_document_is_refused_with_both_numbers(tmp_path):
    """47 bytes, BOS and EOS: 49 tokens, so 48 inputs have a target each."""
    evaluate.check(experiment(tmp_path, eval__lengths=[48]))
    with pytest.raises(ConfigError, match=r"eval\.lengths: 49 needs a document of at least 50 tokens; .* has 49"):
        evaluate.check(experiment(tmp_path, eval__lengths=[8, 49]))
    run = written(tmp_path / "run", experiment(tmp_path))
    with pytest.raises(ConfigError, match=r"50 tokens; the longest of the validation split has 49"):
        curve(run.path, [49])
    assert run.cells() == []


def test_a_run_that_is_not_trained_to_its_end_is_refused(tmp_path):
    asked = experiment(tmp_path)
    planned = Run.plan(tmp_path / "planned", asked, None, None)
    with pytest.raises(NotTrained, match="planned: has no checkpoint"):
        evaluate_run(planned.path)
    half = written(tmp_path / "half", asked, step=2)
    with pytest.raises(NotTrained, match="half: trained to step 2 of 4 only"):
        curve(half.path, [8])
    with pytest.raises(record.RecordError, match="nowhere: not a run directory"):
        curve(tmp_path / "nowhere", [8])


@pytest.mark.parametrize("asked, match", [
    ({"protocols": ["target"]}, r"eval\.protocols\[0\]: 'target' is not allowed \(did you mean targets\?\)"),
    ({"split": "valid"}, r"eval\.split: 'valid' is not allowed \(did you mean validation\?\)"),
    ({"nulls": ["window"]}, r"eval\.nulls\[0\]: 'window' is not allowed"),
    ({"lengths": [3]}, r"eval\.last_k: 4 exceeds the shortest evaluation length 3"),
    ({"lengths": [2], "protocols": ["sliding"]}, r"eval\.stride: 3 exceeds the shortest evaluation length 2"),
    ({"lengths": ["16"]}, r"eval\.lengths\[0\]: expected int, got '16'"),
])  # fmt: skip
def test_what_cannot_be_scored_is_refused_by_name(tmp_path, asked, match):
    run = written(tmp_path / "run", experiment(tmp_path))
    with pytest.raises(ConfigError, match=match):
        curve(run.path, asked.pop("lengths", [8]), **asked)


def test_ids_past_the_vocabulary_are_refused(tmp_path, monkeypatch):
    """The token file refuses them; an evaluator that met one all the same would not give a number."""
    run = written(tmp_path / "run", experiment(tmp_path))
    ids = np.r_[VOCABULARY, np.full(40, 97), EOS]
    with pytest.raises(TokenFileError, match=r"ids reach from 97 to 258; the vocabulary has 0 to 257"):
        TokenFile(ids, np.array([0, len(ids)]), ("0.txt",), "digest", VOCABULARY)
    wide = TokenFile(ids, np.array([0, len(ids)]), ("0.txt",), "digest", VOCABULARY + 1, "other")
    monkeypatch.setattr(data, "load", lambda *_: wide)
    with pytest.raises(EvaluationError, match="NaN at evaluation length 8"):
        curve(run.path, [8], protocols=["blocks"])
    assert run.cells() == []
