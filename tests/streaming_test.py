"""Streams under every policy against float64 lists and fresh contexts, their bands, and what is kept of them."""

import functools
import json
import math

import encodings_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from streaming_oracle import stream
from tiny_models import by_path, for_gpt2
from written_runs import BOS, EOS, experiment, text, written

from pe_ablation import cli, config, data, encodings, evaluate, launch, record, streaming, streaming_tables, trained
from pe_ablation.config import ConfigError
from pe_ablation.eviction import Policy
from pe_ablation.streaming import Scored, StreamError
from pe_ablation.sweep import Point
from pe_ablation.trained import NotTrained

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")

DOCUMENTS = (text(30, 1), text(17, 2), text(25, 3))
TOKENS = 60  # of 72 bytes, 3 BOS and 3 EOS
W = 5


def asked(folder, name="rope", **overrides):
    fields = {"stream__window": W, "stream__tokens": TOKENS, "stream__sinks": (0, 2), "eval__protocols": ["stream"]}
    return experiment(folder, DOCUMENTS, encoding__name=name, model__num_layers=3, **{**fields, **overrides})


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A run of each encoding, its stream scored."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def made(name, **overrides):
        one = asked(folder, name, **overrides)
        run = written(folder / f"{name}-{overrides}".replace("/", ""), one)
        streaming.score(run, one)
        return run

    return made


def cells(run):
    """Stored cells by policy and sinks."""
    return {(cell["policy"]["name"], cell["policy"]["sinks"]): cell for cell in run.cells("streaming")}


def nats(run, cell):
    """Scored nats by place; one stream."""
    found = Scored(**run.arrays(cell, Scored._fields, "streaming"))
    assert not found.stream.any()
    return dict(zip(found.place.tolist(), found.nats.tolist(), strict=True))


def ids_of(run):
    return data.load(run.experiment.data, "validation").stored[:TOKENS].astype(np.int64)


@functools.cache
def for_oracle(path):
    """Weights, number of heads and the formula of each layer."""
    loaded = trained.load(record.Run(path))
    gpt = loaded.config
    flat = {path: value.astype(np.float64) for path, value in by_path(loaded.params).items()}
    own = encodings.find(gpt.encoding).per_layer
    named = {path.removeprefix("encodings/0/"): value for path, value in flat.items() if "encodings" in path}
    formulas = [
        oracle.FORMULAS[gpt.encoding]({key: value[n] if key in own else value for key, value in named.items()})
        for n in range(gpt.num_layers)
    ]
    return for_gpt2(gpt, loaded.params), gpt.num_heads, formulas


def logits(run, ids, **how):
    """The oracle's logits of a text read token by token."""
    weights, heads, formulas = for_oracle(run.path)
    return stream(weights, ids, heads, formulas, **how)[0]


def nats_of(rows, targets):
    """By place, of targets that are no special tokens."""
    return {
        place: float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[target])
        for place, (row, target) in enumerate(zip(rows, targets, strict=False))
        if target not in (BOS, EOS)
    }


def close(found, wanted):
    assert found.keys() == wanted.keys() and len(found) > 30
    np.testing.assert_allclose([found[at] for at in wanted], list(wanted.values()), rtol=1e-4, atol=1e-4)


# Against the oracle


@pytest.mark.parametrize("name", ["none", "rope", "transformer_xl"])
def test_windows_and_sinks_are_read_as_lists_token_by_token(scored, name):
    run = scored(name)
    ids = ids_of(run)
    for sinks in (0, 2):
        cell = cells(run)["sink" if sinks else "window", sinks]
        assert cell["method"] == "in parallel" and cell["status"] == "ok"
        close(nats(run, cell), nats_of(logits(run, ids, sinks=sinks, recent=W - sinks), ids[1:]))


def test_dense_is_the_whole_text_at_once_up_to_its_limit(scored):
    run = scored("rope", stream__dense_tokens=40)
    ids = ids_of(run)[:41]
    close(nats(run, cells(run)["full", 0]), nats_of(logits(run, ids), ids[1:]))


@pytest.mark.parametrize("name", ["learned", "rope"])
def test_fresh_contexts_are_those_of_their_definition(scored, name):
    """`recompute`: W + 1 tokens, the last one's logits; `block_recompute`: from half of them on; before, all."""
    run = scored(name, stream__baselines=("recompute", "block_recompute"), stream__recompute_targets=1000)
    ids = ids_of(run)
    seen, stride = W + 1, W + 1 - (W + 1) // 2
    fresh, block = [], []
    for place in range(TOKENS - 1):
        fresh.append(logits(run, ids[max(0, place + 1 - seen) : place + 1])[-1])
        start = stride * max(0, math.ceil((place + 1 - seen) / stride))
        block.append(logits(run, ids[start : place + 1])[-1])
    close(nats(run, cells(run)["recompute", 0]), nats_of(fresh, ids[1:]))
    close(nats(run, cells(run)["block_recompute", 0]), nats_of(block, ids[1:]))


def test_recompute_scores_the_onset_and_an_even_sample(scored):
    how = {"stream__baselines": ("recompute",)}
    few, whole = (scored("rope", **how, stream__recompute_targets=count) for count in (40, 1000))
    found, every = (nats(run, cells(run)["recompute", 0]) for run in (few, whole))
    onset_end = W + 1 + 32
    late = [place for place in found if place >= onset_end]
    assert {place for place in every if place < onset_end} == {place for place in found if place < onset_end}
    assert late[0] == onset_end and late[-1] in (TOKENS - 3, TOKENS - 2) and 6 <= len(late) <= 8
    np.testing.assert_allclose([found[place] for place in found], [every[place] for place in found], rtol=1e-5)


@pytest.mark.parametrize("absolute", ["saturate", "layer0_fix"])
def test_encodings_added_at_the_input_are_read_as_named(scored, absolute):
    run = scored("sinusoidal", stream__absolute=absolute)
    ids = ids_of(run)
    cell = cells(run)["sink", 2]
    assert cell["method"] == ("in parallel" if absolute == "saturate" else "token by token")
    how = {"embedded": lambda t: min(t, W), "first_layer": absolute == "layer0_fix"}
    close(nats(run, cell), nats_of(logits(run, ids, sinks=2, recent=W - 2, **how), ids[1:]))


def test_without_a_name_they_are_not_read_and_the_cell_says_why(scored):
    run = scored("learned")
    for policy in (("window", 0), ("sink", 2)):
        cell = cells(run)[policy]
        assert cell["status"] == "n/a" and "saturate, ring or layer0_fix" in cell["reason"]
    dense = nats(run, cells(run)["full", 0])
    assert max(dense) == 7  # the table's 8 positions
    assert cells(run)["recompute", 0]["status"] == "ok"


def test_many_chunks_and_longer_pieces_change_nothing(scored, monkeypatch, tmp_path):
    run = scored("rope", stream__window=20, stream__sinks=(0, 2))
    before = {key: nats(run, cell) for key, cell in cells(run).items()}
    monkeypatch.setattr(streaming, "CHUNK", 12)
    monkeypatch.setattr(streaming, "PIECE", 4)
    streaming.program.cache_clear()
    again = written(tmp_path / "again", run.experiment)
    streaming.score(again, run.experiment)
    for key, cell in cells(again).items():
        close(nats(again, cell), before[key])
    streaming.program.cache_clear()


def test_memory_does_not_grow_with_the_text(scored, monkeypatch, tmp_path):
    monkeypatch.setattr(streaming, "CHUNK", 12)
    run = scored("rope")
    reads = []
    for tokens in (30, 60):
        one = asked(tmp_path, stream__tokens=tokens, stream__baselines=())
        again = written(tmp_path / str(tokens), one)
        streaming.score(again, one)
        reads.append([(each["cache_bytes"], each["scratch_bytes"]) for each in cells(again).values()])
    assert reads[0] == reads[1] and reads[0][0][0] > 0 and run.path.exists()


# Bands


def test_bands_are_places_of_the_token_before():
    """W = 5, evicting after: places 0 to 4, 5 to 9, from 10 on; the first that misses one is 6."""
    reader = streaming._Reader.__new__(streaming._Reader)
    reader.window = W
    place = np.arange(50)
    made = Scored(np.zeros(50, int), place, place.astype(np.float32), np.full(50, 2))
    after = {name: place[where].tolist() for name, where in reader._bands(Policy("window", W), made).items()}
    assert (after["below_w"], after["below_2w"], after["beyond"][0]) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], 10)
    assert after["onset"] == list(range(6, 38))
    before = reader._bands(Policy("window", W, evict="before"), made)
    assert place[before["onset"]].tolist() == list(range(5, 37))
    found = streaming.sums(made, before["below_w"])
    assert found == {"nats": 2.0, "bits_per_byte": 10 / math.log(2) / 10, "tokens": 5, "bytes": 10}
    assert math.isnan(streaming.sums(made, place > 99)["nats"])


def test_stored_bands_are_the_sums_of_the_stored_tokens(scored):
    run = scored("rope")
    for cell in cells(run).values():
        own = nats(run, cell)
        for name, places in (("below_w", range(W)), ("below_2w", range(W, 2 * W)), ("beyond", range(2 * W, TOKENS))):
            kept = [own[place] for place in places if place in own]
            assert cell["bands"][name]["tokens"] == len(kept)
            assert cell["bands"][name]["nats"] == pytest.approx(np.mean(kept), rel=1e-6)


def test_each_document_may_be_a_stream_of_its_own(scored):
    run = scored("rope", stream__reset=True)
    found = Scored(**run.arrays(cells(run)["sink", 2], Scored._fields, "streaming"))
    starts = data.load(run.experiment.data, "validation").starts
    assert set(found.stream) == {0, 1, 2}
    ids = ids_of(run)
    for number, where in enumerate((slice(0, 32), slice(32, 51), slice(51, 60))):
        assert int(starts[number]) == where.start
        own = found.stream == number
        wanted = nats_of(logits(run, ids[where], sinks=2, recent=W - 2), ids[where][1:])
        assert found.place[own].tolist() == list(wanted)
        np.testing.assert_allclose(found.nats[own], list(wanted.values()), rtol=1e-4, atol=1e-4)


def test_windows_that_begin_with_bos_make_streams_that_do(scored):
    run = scored("none", data__bos="window")
    ids = ids_of(run)
    first = np.r_[BOS, ids[1:]]
    close(nats(run, cells(run)["window", 0]), nats_of(logits(run, first, recent=W), ids[1:]))


# Cells


def test_what_is_stored_is_not_read_again_and_more_sinks_are_new_cells(tmp_path, monkeypatch):
    one = asked(tmp_path, stream__baselines=())
    run = written(tmp_path / "run", one)
    first = streaming.score(run, one)
    read = []
    usual = streaming._Reader.cell
    monkeypatch.setattr(streaming._Reader, "cell", lambda self, policy: read.append(policy) or usual(self, policy))
    more = config.read(config.to_dict(one), {"stream.sinks": [0, 1, 2]})
    second = streaming.score(run, more)
    assert read == [Policy("sink", W, 1)] and [each in second for each in first] == [True, True]
    assert json.dumps(first) == json.dumps([second[0], second[2]])


def test_a_longer_stream_another_window_and_a_split_are_other_cells(scored):
    one = scored("rope")
    reader = streaming._Reader(trained.load(one), one.experiment)
    policies = (Policy("window", W), Policy("window", W, evict="before"), Policy("sink", W, 2))
    keys = {reader.key(policy) for policy in policies}
    for overrides in ({"stream.tokens": 50}, {"stream.reset": True}, {"stream.window": 6}):
        other = streaming._Reader(trained.load(one), config.read(config.to_dict(one.experiment), overrides))
        keys.add(other.key(Policy("window", other.window)))
    assert len(keys) == 6 and record.Run(one.path).cells() == []


def test_a_diverged_run_has_cells_without_numbers(tmp_path):
    one = asked(tmp_path)
    run = written(tmp_path / "run", one, alive=False)
    assert {cell["status"] for cell in streaming.score(run, one)} == {"diverged"}


def test_nan_is_an_error(tmp_path):
    one = asked(tmp_path)
    params = trained.load(written(tmp_path / "fine", one)).params
    run = written(tmp_path / "run", one, params=jax.tree.map(lambda p: p * jnp.nan, params))
    with pytest.raises(StreamError, match="run: NaN"):
        streaming.score(run, one)
    assert run.cells("streaming") == []


def test_what_is_not_trained_and_streams_past_the_split_are_refused(tmp_path):
    one = asked(tmp_path)
    with pytest.raises(NotTrained, match="trained to step 2 of 4"):
        streaming.score(written(tmp_path / "half", one, step=2), one)
    with pytest.raises(ConfigError, match=r"stream\.tokens: 100, but the validation split has 78"):
        streaming.check(asked(tmp_path, stream__tokens=100))
    with pytest.raises(ConfigError, match=r"stream\.window: 2 cached tokens"):
        streaming.check(asked(tmp_path, stream__window=2))
    streaming.check(asked(tmp_path, stream__tokens=None))


def test_a_window_is_by_default_what_training_saw():
    assert streaming.window(config.StreamConfig(), 64) == 63
    assert streaming.window(config.StreamConfig(evict="before"), 64) == 64
    assert streaming.window(config.StreamConfig(window=9), 64) == 9


def test_a_launch_scores_no_streams(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.protocols: 'stream' .*pe-ablation evaluate RUNS --protocols stream"):
        launch.check([Point((asked(tmp_path),))])


# Tables


def test_the_collapse_is_over_the_targets_that_both_scored(scored):
    run = scored("rope", stream__recompute_targets=40)
    [row] = streaming_tables.rows([(run, {cells(run)["window", 0]["key"]})]).itertuples()
    window, fresh = (nats(run, cells(run)[key]) for key in (("window", 0), ("recompute", 0)))
    shared = [place for place in fresh if place > W]
    assert row.collapse_targets == len(shared) < len([place for place in window if place > W])
    assert row.collapse == pytest.approx(math.exp(np.mean([window[at] - fresh[at] for at in shared])))


def test_the_table_has_a_row_per_policy_and_says_why_one_is_missing(scored):
    runs = [(scored(name), None) for name in ("rope", "learned")]
    table = streaming_tables.to_markdown(streaming_tables.rows(runs))
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [[part.strip() for part in line.split("|")[1:6]] for line in lines[2:]]
    assert [row[4] for row in rows] == ["dense", "recompute", "dense", "window", "sink 2+3", "recompute"]
    assert [row[0] for row in rows] == ["learned"] * 2 + ["rope"] * 4
    assert table.count("n/a") == 1 and "- n/a: learned, window of W 5, sink 2+3 of W 5: absolute: the" in table
    wide = cells(scored("rope"))["sink", 2]["bands"]["beyond"]["nats"]
    assert f"{wide:.3f}" in lines[-2]


def test_seeds_of_a_point_are_averaged(tmp_path):
    runs = []
    for seed in (0, 1):
        one = asked(tmp_path, seed=seed, stream__baselines=())
        runs.append(written(tmp_path / f"seed_{seed}", one, seed=seed))
        streaming.score(runs[-1], one)
    found = streaming_tables.summary(streaming_tables.rows((run, None) for run in runs))
    each = [cells(run)["window", 0]["bands"]["beyond"]["nats"] for run in runs]
    assert found.seeds.tolist() == [2, 2] and found.nats_beyond[0] == pytest.approx(np.mean(each))
    assert found.nats_beyond_sd[0] == pytest.approx(np.std(each, ddof=1))


def test_a_cell_that_is_damaged_is_read_again_and_left_out_of_tables(tmp_path, caplog):
    one = asked(tmp_path, stream__baselines=())
    run = written(tmp_path / "run", one)
    first = streaming.score(run, one)
    [path] = (run.path / "streaming").glob("*window*.npz")
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert [cell["policy"]["name"] for cell in streaming.whole_cells(run)] == ["sink"] and "no readable" in caplog.text
    assert len(streaming_tables.rows([(run, None)])) == 1
    assert [cell["bands"] for cell in streaming.score(run, one)] == [cell["bands"] for cell in first]
    assert len(streaming.whole_cells(run)) == 2


def test_a_folder_that_is_none_is_refused(tmp_path):
    one = asked(tmp_path)
    run = written(tmp_path / "run", one)
    (run.path / "streaming").write_text("")
    with pytest.raises(record.RecordError, match=r"streaming/.*cannot write a cell here"):
        streaming.score(run, one)


# The command


def test_evaluate_prints_the_table_and_scores_nothing_else(tmp_path, capsys):
    one = asked(tmp_path, eval__protocols=["targets"])
    run = written(tmp_path / "run", one)
    flags = ["--protocols", "stream", "--stream.sinks", "0,1", f"--stream.window={W}", "--stream.tokens=50"]
    assert cli.main(["evaluate", str(run.path), *flags]) == 0
    out = capsys.readouterr().out
    assert "sink 1+4" in out and "50 tokens of the validation split, one stream" in out and run.cells() == []
    assert {cell["window"] for cell in run.cells("streaming")} == {W}


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--stream.window=4"], "--stream.window: goes with --protocols stream"),
        (["--protocols", "stream", "--stream.windows=4"], "did you mean window?"),
        (["--protocols", "stream", "--stream.sinks=-1"], "stream.sinks[0]: -1"),
        (["--protocols", "stream", "--stream.sinks=0,9"], "stream.window: 5 cached tokens leave none"),
        (["--protocols", "stream", "--stream.tokens=1"], "stream.tokens: 1 is out of range; at least 2"),
        (["--protocols", "stream", "--stream.recompute_targets=8"], "stream.recompute_targets: 8 is out of range"),
        (["--protocols", "stream", "--stream.sinks=1,1"], "stream.sinks: 1 twice"),
        (["--protocols", "stream", "--stream.tokens=5000"], "the validation split has 78"),
    ],
)
def test_evaluate_refuses_in_one_line(tmp_path, capsys, flags, message):
    run = written(tmp_path / "run", asked(tmp_path, eval__protocols=["targets"]))
    assert cli.main(["evaluate", str(run.path), *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_windows_and_streams_may_be_asked_for_together(tmp_path, capsys):
    run = written(tmp_path / "run", asked(tmp_path, eval__protocols=["targets"], stream__baselines=()))
    assert cli.main(["evaluate", str(run.path), "--protocols", "stream,blocks", "--lengths", "8,12"]) == 0
    assert "blocks" in (out := capsys.readouterr().out) and "sink 2+3" in out
    assert {cell["protocol"] for cell in run.cells()} == {"blocks"} and len(run.cells("streaming")) == 2
    stream_only = config.read(run.config["experiment"], {"eval.protocols": ["stream"]})
    assert evaluate.asked_rows(run, stream_only).empty
