"""Training that starts with another run's weights: what is copied, dropped and new, and what is refused."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from written_runs import VOCABULARY, experiment, parameters, written

from pe_ablation import cli, config, start, sweep, train, trained, transforms
from pe_ablation.checkpoint import last_step, named
from pe_ablation.config import ConfigError
from pe_ablation.record import Run

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of rope, one of learned, one of t5, and a point of alibi with two seeds."""
    folder = tmp_path_factory.mktemp("start")
    for name in ("rope", "learned", "t5"):
        written(folder / name, experiment(folder, encoding__name=name))
    for seed in (0, 1):
        asked = experiment(folder, encoding__name="alibi", encoding__options={"learned": True}, seed=seed)
        written(folder / "alibi" / f"seed_{seed}", asked, seed=seed)
    return folder


def asked(folder, run, **overrides):
    """An experiment that starts with a run of `folder`, as a launch reads it."""
    name = {"encoding__name": run.partition("/")[0]} if "encoding__name" not in overrides else {}
    return start.resolved(experiment(folder, start__run=str(folder / run), **name, **overrides))


def begun(found, *seeds):
    """(fresh parameters, those that training starts with) of these seeds."""
    each = [parameters(found.gpt(VOCABULARY), 90 + seed) for seed in seeds]
    fresh = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    return named(fresh), named(start.parameters(found, seeds, fresh))


def of(folder, run):
    return named(trained.load(Run(folder / run)).params)


def test_the_same_encoding_is_taken_over_to_the_bit(folder):
    _, found = begun(asked(folder, "t5"), 0)
    for name, leaf in of(folder, "t5").items():
        np.testing.assert_array_equal(found[name][0], leaf, err_msg=name)


def test_another_encoding_is_dropped_and_the_new_one_is_fresh(folder):
    change = start.check(asked(folder, "t5", encoding__name="learned"))
    assert change is not None
    assert (change.before, change.after) == ("t5()", "learned()")
    assert change.dropped == {"encodings/0/table": (32, 2)} and change.new == {"encodings/0/table": (8, 8)}
    assert "t5() -> learned()" in str(
        change
    ) and "dropped: encodings/0/table [32, 2]; new: encodings/0/table [8, 8]" in str(change)
    fresh, found = begun(asked(folder, "t5", encoding__name="learned"), 0)
    source = of(folder, "t5")
    for name, leaf in found.items():
        expected = fresh[name][0] if name.startswith("encodings/") else source[name]
        np.testing.assert_array_equal(leaf[0], expected, err_msg=name)
    assert len(change.copied) == len(source) - 1


def test_same_names_of_other_encodings_are_no_match(folder):
    """kerple_log and kerple_power both have a `scale` of one number a head, which means another thing."""
    written(folder / "log", experiment(folder, encoding__name="kerple_log"))
    change = start.check(asked(folder, "log", encoding__name="kerple_power"))
    assert change is not None
    assert change.dropped == {"encodings/0/rate": (2,), "encodings/0/scale": (2,)}
    assert change.new == {"encodings/0/power": (2,), "encodings/0/scale": (2,)}


def test_a_rotation_dropped_leaves_everything_else(folder):
    found = asked(folder, "rope", encoding__name="none")
    change = start.check(found)
    assert change is not None and not change.dropped and not change.new
    model = trained.load(Run(folder / "rope"))
    assert set(change.copied) == set(named(model.params))


def test_each_seed_of_a_point_goes_on_from_its_own(folder):
    found = asked(folder, "alibi", encoding__options={"learned": True})
    _, both = begun(found, 0, 1)
    for row in (0, 1):
        for name, leaf in of(folder, f"alibi/seed_{row}").items():
            np.testing.assert_array_equal(both[name][row], leaf)
    other = dataclasses.replace(found, seed=1)
    assert config.point_identity(other) == config.point_identity(found)


def test_a_transform_becomes_options_of_the_encoding(folder):
    found = asked(folder, "rope", start__transform="yarn", train__length=16, data__block=16, train__batch_tokens=16)
    assert found.start.transform == "yarn:factor=2:original=8"
    asked_for = config.transform("yarn:factor=2")
    assert asked_for is not None
    model = trained.load(Run(folder / "rope"))
    expected = transforms.apply(asked_for, model, 16).config
    assert dict(found.encoding.options) == dict(expected.encoding_options) != {}
    assert found.gpt(VOCABULARY).distinct == expected.distinct
    again = config.read(config.to_dict(found))
    assert config.training_identity(again) == config.training_identity(found)
    ours = found.gpt(VOCABULARY)
    assert ours.encoding_options["magnitude"] == pytest.approx(0.1 * np.log(2) + 1)


def test_what_started_scaled_goes_on_scaled(folder, tmp_path):
    scaled = asked(folder, "rope", start__transform="yarn:factor=4")
    written(tmp_path / "scaled", scaled)
    found = asked(tmp_path, "scaled", encoding__name="rope", data__cache_dir=str(folder / "cache"))
    assert found.encoding == scaled.encoding and found.encoding.options
    assert "rope(frequencies=[2], magnitude=1.138" in str(start.check(found))
    plain = asked(tmp_path, "scaled", encoding__name="rope", encoding__options={"frequencies": None, "magnitude": 1.0})
    assert "-> rope(frequencies=None, magnitude=1.0);" in str(start.check(plain))


def test_a_transform_that_changes_nothing_is_refused(folder):
    with pytest.raises(ConfigError, match=r"start\.transform: 'yarn' changes nothing at train\.length 8, .* having 8"):
        asked(folder, "rope", start__transform="yarn")


def test_the_rows_of_a_table_are_made_of_the_trained_ones(folder):
    sizes = {"train__length": 16, "data__block": 16, "train__batch_tokens": 16}
    found = asked(folder, "learned", start__transform="interpolate", **sizes)
    table = np.asarray(of(folder, "learned")["encodings/0/table/value"], np.float64)
    _, started = begun(found, 0)
    places = np.minimum(np.arange(16) / 2, 7)
    low = np.floor(places).astype(int)
    expected = table[low] + (places - low)[:, None] * (table[np.minimum(low + 1, 7)] - table[low])
    np.testing.assert_allclose(started["encodings/0/table/value"][0], expected, atol=1e-6)
    assert "made of the trained ones: encodings/0/table [16, 8]; dropped: none; new: none" in str(start.check(found))
    with pytest.raises(
        ConfigError, match=r"start\.run: .*encodings/0/table \(8, 8\) there, \(16, 8\) here.*interpolate"
    ):
        start.check(asked(folder, "learned", **sizes))


def test_logits_scaled_from_now_on(folder):
    found = asked(folder, "rope", start__transform="log_n")
    assert found.model.logit_scale == "log_n_beyond" and not found.encoding.options
    assert "under log_n: rope() -> rope() with logit_scale log_n_beyond; 15" in str(start.check(found))
    change = start.check(asked(folder, "rope", model__logit_scale="learned"))
    assert change is not None and list(change.new) == ["blocks/0/logit_scale"] and not change.dropped


REFUSED = [
    ({"model__num_heads": 4}, r"model\.num_heads: 4, but .*rope was trained with 2"),
    ({"model__num_layers": 4}, r"model\.num_layers: 4, but .* trained with 2"),
    ({"model__embed_scale": "sqrt_d"}, r"model\.embed_scale: sqrt_d"),
    ({"model__pattern": (("rope", None), ("none", None))}, r"model\.pattern: of 2 layers, but .* with one of 1"),
    ({"data__tokenizer": "bpe", "data__vocab_size": 260}, r"data\.tokenizer: bpe of \d+ ids, but .* byte of 258"),
    ({"start__transform": "rerope"}, r"start\.transform: 'rerope' is for reading alone"),
    ({"start__transform": "wrap"}, r"start\.transform: wrap: makes rows for a learned table"),
    ({"start__transform": "yarm"}, r"start\.transform: no transform 'yarm'"),
    (
        {"start__transform": "pi", "encoding__name": "none"},
        r"start\.transform: 'pi' changes the encoding of .*rope\(\)",
    ),
    ({"start__transform": "pi", "encoding__options": {"base": 500.0}}, r"has rope\(base=500\.0\)"),
]


@pytest.mark.parametrize("overrides, message", REFUSED)
def test_what_cannot_go_on_is_refused(folder, overrides, message):
    with pytest.raises(ConfigError, match=message):
        start.check(asked(folder, "rope", **overrides))


@pytest.mark.parametrize("field, value", [("transform", "pi"), ("identity", "abc@4")])
def test_fields_of_a_start_without_a_run_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"start\.{field}: '{value}' goes with start\.run"):
        config.read({}, {f"start.{field}": value})


def test_a_run_without_an_end_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"start\.run: 'nowhere' is no run, nor a point with a run of seed 0"):
        start.resolved(experiment(folder, start__run="nowhere"))
    written(tmp_path / "gone", experiment(folder), alive=False)
    (Run.plan(tmp_path / "planned", experiment(folder), None, "digest"))
    for name, state in (("gone", "diverged"), ("planned", "missing")):
        with pytest.raises(ConfigError, match=rf"start\.run: .*{name} is not trained to its end \(.*{state}"):
            start.resolved(experiment(folder, start__run=str(tmp_path / name)))


def test_weights_that_changed_since_are_refused(folder, tmp_path):
    shutil.copytree(folder / "rope", tmp_path / "rope")
    found = start.resolved(experiment(folder, start__run=str(tmp_path / "rope")))
    moved = start.resolved(experiment(folder, start__run=str(folder / "rope")))
    assert config.training_identity(found) == config.training_identity(moved), "the same weights elsewhere"
    assert config.training_identity(found) != config.training_identity(experiment(folder))
    shutil.rmtree(tmp_path / "rope")
    written(tmp_path / "rope", experiment(folder, train__steps=5))
    with pytest.raises(ConfigError, match=r"start\.run: .* holds \w+@5, and held \w+@4"):
        start.check(found)


def test_a_launched_run_says_what_it_started_with_and_stands_without_it(folder, tmp_path, capsys):
    shutil.copytree(folder / "t5", tmp_path / "t5")
    found = start.resolved(experiment(folder, start__run=str(tmp_path / "t5"), encoding__name="none", train__steps=2))
    train.fit(found, tmp_path / "none")
    result = json.loads((tmp_path / "none" / "result.json").read_text())
    assert result["start"]["dropped"] == {"encodings/0/table": [32, 2]} and result["start"]["before"] == "t5()"
    first = Run(tmp_path / "none").rows("metrics")[0]["nats"]
    shutil.rmtree(tmp_path / "t5")
    run = Run(tmp_path / "none")
    assert last_step(run.path / "checkpoints") == 2
    assert trained.load(run).config.encoding == "none"
    assert trained.load(run).unread is None, "what no gradient reached here may have been trained before"
    assert first > 0


def test_a_sweep_reads_it_and_a_dry_run_lists_the_change(folder, tmp_path, capsys):
    file = tmp_path / "own.py"
    tree = config.to_dict(experiment(folder))
    file.write_text(f"import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict({tree!r})\n")
    fields = [f"--config.start.run={folder / 'rope'}", "--config.encoding.name=alibi"]
    assert cli.main(["launch", "--config", str(file), "--dry_run", *fields]) == 0
    assert ": rope() -> alibi(); " in capsys.readouterr().out
    [point] = sweep.points(sweep.load(str(file)), None, {"start.run": str(folder / "rope")})
    assert point.experiments[0].start.identity is not None
    with file.open("a") as end:
        end.write("def sweep():\n    return [{'encoding.name': name} for name in ('none', 'rope')]\n")
    fields = [f"--config.start.run={folder / 'rope'}", "--config.start.transform=pi:factor=2", "--list"]
    assert cli.main(["launch", "--config", str(file), "--only", "arm=rope", *fields]) == 0, "only what is kept is read"
    assert "rope-L8" in capsys.readouterr().out
    assert cli.main(["launch", "--config", str(file), *fields]) == 2
    assert "the experiment has none()" in capsys.readouterr().err
    assert cli.main(["launch", "--config", str(file), "--dry_run", "--config.start.run=nowhere"]) == 2
    assert "start.run: 'nowhere'" in capsys.readouterr().err
