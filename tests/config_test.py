import dataclasses
import inspect
import json
from typing import Any

import numpy as np
import pytest
import yaml
from ml_collections import ConfigDict, config_dict

from pe_ablation import config, encodings, sweep
from pe_ablation.config import ConfigError, Experiment, from_flag
from pe_ablation.model import SIZES

DEFAULTS = config.to_dict(Experiment())

# Every field: its default, and another value. A new field is added here, which decides its part in the identity.
FIELDS = {
    "encoding.name": ("none", "rope"),
    "encoding.options": ({}, {"base": 500.0}),
    "model.num_layers": (2, 3),
    "model.num_heads": (4, 2),
    "model.model_dim": (64, 128),
    "model.mlp_dim": (None, 100),
    "model.pattern": (None, (("none", 8),)),
    "model.sharing": ("paper", "none"),
    "model.embed_scale": ("1", "sqrt_d"),
    "model.logit_scale": ("none", "log_n"),
    "model.dropout_embed": (0.0, 0.1),
    "model.dropout_attention": (0.0, 0.1),
    "model.dropout_residual": (0.0, 0.1),
    "model.dtype": ("float32", "bfloat16"),
    "model.remat": (False, True),
    "model.implementation": ("auto", "dense"),
    "data.source": ("sotu", "text"),
    "data.text.train": (None, "a/*.txt"),
    "data.text.validation": (None, "b/*.txt"),
    "data.text.test": (None, "c/*.txt"),
    "data.text.file": (None, "all.txt"),
    "data.text.separator": (None, "\n\n"),
    "data.text.field": (None, "text"),
    "data.text.train_bytes": (None, (0, 10)),
    "data.text.validation_bytes": (None, (10, 20)),
    "data.text.test_bytes": (None, (20, 30)),
    "data.tfds.name": (None, "lm1b"),
    "data.tfds.text_field": ("text", "content"),
    "data.tfds.data_dir": (None, "elsewhere"),
    "data.tfds.train": ("train", "train[:99%]"),
    "data.tfds.validation": ("validation", "train[99%:]"),
    "data.tfds.test": ("test", None),
    "data.tokenizer": ("byte", "other"),
    "data.vocab_size": (4096, 8192),
    "data.bos": ("document", "none"),
    "data.block": (64, 128),
    "data.train_bytes": (None, 1000),
    "data.cache_dir": (None, "elsewhere"),
    "positions.name": ("contiguous", "documents"),
    "positions.maximum": (None, 2048),
    "positions.evaluation": ("spread", "random"),
    "train.length": (64, 32),
    "train.steps": (1000, 2000),
    "train.batch_tokens": (4096, 8192),
    "train.accumulation": (1, 2),
    "train.learning_rate": (0.001, 0.002),
    "train.warmup_steps": (100, 50),
    "train.final_fraction": (0.1, 0.0),
    "train.weight_decay": (0.1, 0.0),
    "train.beta1": (0.9, 0.8),
    "train.beta2": (0.95, 0.99),
    "train.epsilon": (1e-08, 1e-07),
    "train.clip_norm": (1.0, 2.0),
    "train.log_every": (10, 1),
    "train.checkpoint_every": (500, 7),
    "start.run": (None, "runs/a"),
    "start.transform": ("none", "pi"),
    "start.identity": (None, "0123@4"),
    "eval.lengths": ((64, 128, 256), (64,)),
    "eval.protocols": (("targets",), ("blocks",)),
    "eval.nulls": (("window_mask", "window_recompute"), ()),
    "eval.split": ("validation", "test"),
    "eval.last_k": (32, 16),
    "eval.spacing": (256, 128),
    "eval.stride": (64, 32),
    "eval.max_windows": (None, 4),
    "eval.max_documents": (None, 2),
    "eval.batch_tokens": (4096, 1024),
    "eval.transforms": (("none",), ("none", "yarn")),
    "stream.window": (None, 63),
    "stream.sinks": ((0, 1, 2, 4), (8,)),
    "stream.tokens": (16384, None),
    "stream.reset": (False, True),
    "stream.baselines": (("dense", "recompute"), ()),
    "stream.dense_tokens": (8192, 100),
    "stream.recompute_targets": (512, 64),
    "stream.evict": ("after", "before"),
    "stream.positions": ("in_cache", "original"),
    "stream.limit": (None, 64),
    "stream.absolute": (None, "ring"),
    "wandb.project": (None, "mine"),
    "wandb.entity": (None, "us"),
    "wandb.group": (None, "first"),
    "wandb.tags": ((), ("a",)),
    "wandb.mode": (None, "offline"),
    "seed": (0, 1),
    "label": ("", "mine"),
    "imported": (None, "0" * 64),
}
OPTIONS = {
    "none": {},
    "sinusoidal": {"scale": 1.0, "interleaved": True},
    "learned": {"rows": None},
    "rope": {"base": 10000.0, "fraction": 1.0, "interleaved": False, "frequencies": None, "magnitude": 1.0},
    "alibi": {"learned": False, "heads": None},
    "t5": {"num_buckets": 32, "max_distance": 128},
    "transformer_xl": {"clamp": None},
    "p_rope": {"p": 0.75, "reversed": False, "partial": False, "base": 10000.0, "interleaved": False},
    "xpos": {"scale_base": 512.0, "base": 10000.0, "interleaved": False},
    "shaw": {"clip": 16, "values": True},
    "cope": {"count": None, "gate_scale": True, "after_scale": False},
    "fox": {"bias": 0.0},
    "kerple_log": {},
    "kerple_power": {},
    "fire": {"hidden_layers": 1, "width": 32, "threshold": 512},
    "sandwich": {"dbar": 128, "first": 1},
    "sum": {"first": "rope", "second": "alibi", "first_options": None, "second_options": None},
    "dape": {"base": "alibi", "base_options": None, "width": 32},
}


def leaves(tree, prefix=""):
    paths = {}
    for name, value in tree.items():
        group = isinstance(value, dict) and prefix + name != "encoding.options"
        paths |= leaves(value, f"{prefix}{name}.") if group else {prefix + name: value}
    return paths


def replaced(experiment, path, value):
    """A copy with one field replaced, without the checks of `read`."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(
        experiment, **{name: replaced(getattr(experiment, name), rest, value) if rest else value}
    )


def read_flag(path, text):
    experiment = config.read({}, {path: from_flag(text)})
    for name in path.split("."):
        experiment = experiment[name] if isinstance(experiment, dict) else getattr(experiment, name)
    return experiment


def is_exactly(value, expected):
    return value == expected and type(value) is type(expected)


# Types


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("train.learning_rate", "1e-4", 1e-4),
        ("train.learning_rate", "3", 3.0),
        ("train.steps", "200", 200),
        ("model.remat", "False", False),
        ("model.remat", "true", True),
        ("model.remat", "0", False),
        ("model.mlp_dim", "None", None),
        ("model.mlp_dim", "null", None),
        ("model.mlp_dim", "96", 96),
        ("model.embed_scale", "1", "1"),
        ("encoding.name", "none", "none"),
        ("data.text.file", "None", None),
        ("label", "None", "None"),
        ("label", "1e-4", "1e-4"),
        ("eval.lengths", "64,128", (64, 128)),
        ("eval.lengths", "(64, 128,)", (64, 128)),
        ("eval.lengths", "256", (256,)),
        ("eval.nulls", "()", ()),
        ("eval.protocols", "targets,blocks", ("targets", "blocks")),
    ],
)
def test_text_of_a_flag_becomes_the_type_of_its_field(path, text, value):
    assert is_exactly(read_flag(path, text), value)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("train.learning_rate", "fast"),
        ("train.learning_rate", "None"),
        ("train.steps", "12.5"),
        ("train.steps", "12.0"),
        ("train.steps", "1e3"),
        ("train.steps", "true"),
        ("model.remat", "no"),
        ("model.remat", "2"),
        ("model.mlp_dim", "abc"),
        ("eval.lengths", "64,x"),
        ("encoding.options", "base=3"),
    ],
)
def test_text_that_is_not_of_its_field_is_refused_with_the_path(path, text):
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        read_flag(path, text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.learning_rate", "1e-4"),
        ("train.learning_rate", True),
        ("train.steps", 12.5),
        ("train.steps", 200.0),
        ("train.steps", True),
        ("train.steps", "200"),
        ("model.remat", 1),
        ("model.remat", "False"),
        ("model.mlp_dim", "abc"),
        ("model.mlp_dim", False),
        ("encoding.name", None),
        ("encoding.name", False),
        ("eval.lengths", 64),
        ("eval.lengths", "64,128"),
        ("eval.lengths", (64, 128.0)),
        ("data.source", "Text"),
        ("model", 3),
    ],
)
def test_values_of_a_wrong_type_are_refused_with_the_path(path, value):
    with pytest.raises(ConfigError, match=f"^{path}".replace(".", r"\.")):
        config.read({}, {path: value})


def test_values_that_mean_the_same_are_converted():
    experiment = config.read(
        {}, {"train.weight_decay": 1, "train.learning_rate": np.float64(1e-4), "eval.lengths": [64]}
    )
    assert is_exactly(experiment.train.weight_decay, 1.0)
    assert is_exactly(experiment.train.learning_rate, 1e-4)
    assert is_exactly(experiment.eval.lengths, (64,))


def test_an_option_becomes_the_type_its_class_says():
    experiment = config.read({"encoding": {"name": "rope"}}, {"encoding.options.base": from_flag("5e2")})
    assert is_exactly(experiment.encoding.options["base"], 500.0)
    with pytest.raises(ConfigError, match=r"encoding\.options\.base"):
        config.read({"encoding": {"name": "rope", "options": {"base": "5e2"}}})


def test_options_of_an_encoding_inside_another_are_read_as_strictly():
    asked = {"encoding.name": "sum", "encoding.options.first_options": {"base": 500}}
    flags = {"encoding.name": "sum", "encoding.options.first_options.base": from_flag("500")}
    whole = {"encoding.name": "sum", "encoding.options.first_options": from_flag("{'base': 500}")}
    for each in (asked, flags, whole):
        assert is_exactly(config.read({}, each).encoding.options["first_options"]["base"], 500.0)
    assert config.type_of("encoding.options.first_options.base") is Any
    for path, value, message in (
        ("first_options.bse", 3, "encoding.options.first_options.bse: rope has no such option (did you mean base?)"),
        ("first_options.base", "x", "encoding.options.first_options.base: expected float, got 'x'"),
        ("first_options.fraction", 0.3, "encoding.options.first_options.fraction: 0.3"),
        ("first_options", 3, "encoding.options.first_options: expected a group of options, got 3"),
        ("first", "rop", "encoding.options.first: unknown encoding 'rop'"),
        ("second", "rope", "encoding.options.second: rope and rope both change"),
    ):
        with pytest.raises(ConfigError) as refusal:
            config.read({"encoding": {"name": "sum"}}, {f"encoding.options.{path}": value})
        assert str(refusal.value).startswith(message)


# Names and ranges


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("train.learning_rte", "train.learning_rte: no such field (did you mean learning_rate?)"),
        ("trian.steps", "trian: no such field (did you mean train?)"),
        ("zzz", "allowed: encoding, model, data, positions, train, start, eval, stream, seed, label"),
        ("train.steps.more", "train.steps"),
        ("encoding.options.bse", "encoding.options.bse: rope has no such option (did you mean base?)"),
        ("encoding.options.num_buckets", "allowed: base, fraction, interleaved"),
    ],
)
def test_unknown_fields_are_refused_with_what_is_allowed(path, message):
    base = {"encoding": {"name": "rope"}, "train": {"steps": 500}}
    with pytest.raises(ConfigError) as refusal:
        config.read(base, {path: 3})
    assert message in str(refusal.value)
    nested: Any = 3
    for name in reversed(path.split(".")):
        nested = {name: nested}
    if path != "train.steps.more" and not path.startswith("encoding"):
        with pytest.raises(ConfigError) as refusal:
            config.read(nested)
        assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("encoding.name", "rop", "rope"),
        ("model.num_heads", 0, "model.num_heads"),
        ("model.num_heads", 3, "model"),
        ("model.dropout_residual", 1.5, "model.dropout_residual"),
        ("model.dtype", "float16", "'float32', 'bfloat16'"),
        ("train.length", 0, "train.length"),
        ("train.learning_rate", float("nan"), "train.learning_rate"),
        ("train.learning_rate", float("inf"), "train.learning_rate"),
        ("train.epsilon", -1.0, "train.epsilon"),
        ("train.warmup_steps", 1000, "train.steps = 1000"),
        ("train.batch_tokens", 100, "multiple of data.block"),
        ("data.block", 100, "multiple of train.length = 64"),
        ("eval.lengths", (), "eval.lengths"),
        ("eval.lengths", (64, 0), "eval.lengths[1]: 0"),
        ("eval.last_k", 65, "shortest evaluation length 64"),
        ("seed", -1, "seed"),
        ("seed", 2**32, "seed"),
        ("train.clip_norm", 0.0, "train.clip_norm"),
        ("train.learning_rate", 0, "train.learning_rate: 0.0 trains nothing"),
        ("train.learning_rate", -1e-3, "train.learning_rate: -0.001"),
        ("train.steps", 10**20, f"train.steps: {10**20} is out of range; below 2^31"),
        ("train.steps", 2**31, "train.steps"),
        ("model.num_layers", 10**20, "model.num_layers"),
        ("model.model_dim", 2**31, "model.model_dim"),
        ("eval.lengths", (64, 10**20), "eval.lengths[1]"),
        ("eval.stride", 10**20, "eval.stride"),
        ("eval.lengths", (64, 128, 64), "eval.lengths: 64 twice in (64, 128, 64)"),
        ("eval.protocols", ("blocks", "blocks"), "eval.protocols: 'blocks' twice"),
        ("eval.nulls", ("window_mask", "window_mask"), "eval.nulls: 'window_mask' twice"),
        ("eval.protocols", (), "eval.protocols: empty"),
    ],
)
def test_values_out_of_range_are_refused_with_both_sides(path, value, message):
    with pytest.raises(ConfigError) as refusal:
        config.read({}, {path: value})
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "model"),
    [("rope", {"model_dim": 12, "num_heads": 4}), ("sinusoidal", {"model_dim": 9, "num_heads": 3})],
)
def test_odd_dimensions_are_refused_where_the_encoding_pairs_them(name, model):
    config.read({"encoding": {"name": "none"}, "model": model})
    with pytest.raises(ConfigError, match="model"):
        config.read({"encoding": {"name": name}, "model": model})


def test_options_are_checked_after_all_overrides_whatever_their_order():
    for order in (("encoding.name", "encoding.options.base"), ("encoding.options.base", "encoding.name")):
        values = {"encoding.name": "rope", "encoding.options.base": 500.0}
        experiment = config.read({"encoding": {"name": "t5"}}, {path: values[path] for path in order})
        assert experiment.encoding.options == {"base": 500.0}


def test_the_largest_counts_are_read():
    assert config.read({}, {"train.steps": 2**31 - 1}).train.steps == 2**31 - 1
    assert config.read({}, {"data.train_bytes": 10**20}).data.train_bytes == 10**20


# Model sizes


@pytest.mark.parametrize("order", [("model", "model.num_layers"), ("model.num_layers", "model")])
def test_a_size_by_name_is_laid_before_its_fields_whatever_the_order(order):
    texts = {"model": from_flag("nano"), "model.num_layers": from_flag("3")}
    experiment = config.read({"model": {"model_dim": 8, "mlp_dim": 12}}, {path: texts[path] for path in order})
    assert (experiment.model.num_layers, experiment.model.model_dim, experiment.model.mlp_dim) == (3, 64, None)


def test_a_size_leaves_what_it_does_not_set():
    experiment = config.read({"model": {"dtype": "bfloat16", "dropout_embed": 0.1}}, {"model": "gpt2_small"})
    assert (experiment.model.dtype, experiment.model.dropout_embed) == ("bfloat16", 0.1)
    assert (experiment.model.num_layers, experiment.model.model_dim, experiment.model.num_heads) == (12, 768, 12)
    assert config.read({"model": "gpt2_small"}).model == config.ModelConfig(**SIZES["gpt2_small"])


def test_a_size_is_its_fields_in_the_identity():
    named, written = config.read({}, {"model": "micro"}), config.read({"model": SIZES["micro"]})
    assert config.training_identity(named) == config.training_identity(written)


@pytest.mark.parametrize("tree", [{"model": "gpt2_smal"}, {}])
def test_an_unknown_size_is_refused_with_the_sizes(tree):
    with pytest.raises(ConfigError) as refusal:
        config.read(tree, {} if tree else {"model": from_flag("gpt2_smal")})
    message = "model: no size 'gpt2_smal' (did you mean gpt2_small?); allowed: nano, micro, gpt2_small, gpt2_medium"
    assert message in str(refusal.value)


# ConfigDicts


def test_a_configdict_and_its_json_and_yaml_read_as_the_same_experiment():
    file: Any = ConfigDict({"encoding": {"name": "rope", "options": {"base": 500.0}}, "eval": {"lengths": (64, 128)}})
    file.train = ConfigDict({"learning_rate": 1e-5, "weight_decay": 1})
    file.model = ConfigDict({"mlp_dim": config_dict.placeholder(int)})
    experiment = config.read(file)
    assert experiment.model.mlp_dim is None and experiment.eval.lengths == (64, 128)
    back = config.read(json.loads(json.dumps(config.to_dict(experiment))))
    assert back == experiment and config.training_identity(back) == config.training_identity(experiment)
    assert config.read(json.loads(file.to_json())) == experiment
    assert config.read(yaml.safe_load(yaml.safe_dump(config.to_dict(experiment)))) == experiment
    for path, value in leaves(config.to_dict(experiment)).items():
        assert type(value) is type(leaves(config.to_dict(back))[path]), path


def test_a_rate_is_the_same_float_from_file_flag_and_sweep():
    """YAML 1.1 reads 1e-4 as text, and some parsers read 1.0e-4 as something else again."""
    [swept] = sweep.param("train.learning_rate", [1e-4])
    [flagged] = config.from_flags("train.learning_rate", "1e-4")
    read = [
        config.read({"train": {"learning_rate": 1e-4}}),
        config.read({}, {"train.learning_rate": from_flag("1e-4")}),
        config.read({}, {"train.learning_rate": from_flag("0.0001")}),
        config.read({}, swept),
        config.read({}, {"train.learning_rate": flagged}),
    ]
    assert all(is_exactly(each.train.learning_rate, 0.0001) for each in read)
    assert len({config.training_identity(each) for each in read}) == 1


def test_none_is_an_encoding_wherever_it_is_written():
    [swept] = sweep.param("encoding.name", ["none"])
    [flagged] = config.from_flags("encoding.name", "none")
    for tree, overlay in (
        ({"encoding": {"name": "none"}}, {}),
        ({"encoding": {"name": "rope"}}, swept),
        ({"encoding": {"name": "rope"}}, {"encoding.name": flagged}),
    ):
        assert is_exactly(config.read(tree, overlay).encoding.name, "none")


@pytest.mark.parametrize(("text", "values"), [("true,0", (True, False)), ("False;1", (False, True))])
def test_booleans_of_an_axis_are_booleans(text, values):
    read = [config.read({}, {"model.remat": each}).model.remat for each in config.from_flags("model.remat", text)]
    assert all(is_exactly(*each) for each in zip(read, values, strict=True))


def test_values_of_an_axis_that_are_not_of_their_field_are_refused_with_the_path():
    for path, text in (("train.steps", "12.5"), ("model.remat", "no"), ("model.mlp_dim", "abc"), ("seed", "-1")):
        [value] = config.from_flags(path, text)
        with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
            config.read({}, {path: value})


def test_an_optional_field_keeps_its_type_through_none():
    assert config.read({}, {"model.mlp_dim": 5}).model.mlp_dim == 5
    assert config.read({"model": {"mlp_dim": 5}}, {"model.mlp_dim": None}).model.mlp_dim is None
    with pytest.raises(ConfigError, match=r"model\.mlp_dim: expected int"):
        config.read({"model": {"mlp_dim": None}}, {"model.mlp_dim": "abc"})


def test_a_required_field_is_filled_or_asked_for():
    file: Any = ConfigDict({"seed": config_dict.required_placeholder(int)})
    assert config.read(file, {"seed": from_flag("3")}).seed == 3
    with pytest.raises(ConfigError, match=r"seed: required, and not set; set it: --config\.seed=VALUE"):
        config.read(file)


@pytest.mark.parametrize("overrides", [{}, {"seed": 1}])
def test_a_config_that_is_none_is_refused(overrides):
    nothing: Any = None
    with pytest.raises(ConfigError, match="config: expected a group of fields, got None"):
        config.read(nothing, overrides)


def test_reading_leaves_the_config_as_it_was():
    file: Any = ConfigDict({"train": {"steps": 500}})
    config.read(file, {"train.steps": 700, "eval.lengths": (64,)})
    assert file.to_dict() == {"train": {"steps": 500}}


# Identity


def test_defaults_are_the_ones_that_identities_were_made_with():
    """An identity holds what differs from defaults: once a default changes, an old identity means another run."""
    known = {path: list(default) if isinstance(default, tuple) else default for path, (default, _) in FIELDS.items()}
    assert leaves(DEFAULTS) == known, "a changed default needs a new IDENTITY_FORMAT; a new field only a line here"
    for name, options in OPTIONS.items():
        parameters = inspect.signature(encodings.find(name).__init__).parameters
        found = {option: parameters[option].default for option in options}
        assert found == options, f"{name}: a changed default needs a new IDENTITY_FORMAT"


@pytest.mark.parametrize("path", FIELDS)
def test_the_identity_changes_with_what_trains_and_nothing_else(path):
    base = replaced(Experiment(), "encoding.name", "rope") if path == "encoding.options" else Experiment()
    other = replaced(base, path, FIELDS[path][1])
    named = (
        "data.cache_dir", "data.tfds.data_dir", "label", "model.implementation", "start.run", "train.checkpoint_every",
        "train.log_every",
    )  # fmt: skip
    unchanged = path.startswith(("eval.", "stream.", "wandb.")) or path in named
    assert (config.training_identity(other) == config.training_identity(base)) == unchanged
    assert (config.point_identity(other) == config.point_identity(base)) == (unchanged or path == "seed")


def test_a_default_that_is_written_out_changes_nothing():
    plain = config.read({"encoding": {"name": "rope"}})
    written = config.read({**DEFAULTS, "encoding": {"name": "rope", "options": {"base": 10000.0}}})
    assert config.training_identity(written) == config.training_identity(plain)


def test_the_file_of_a_users_own_encoding_is_in_the_identity(tmp_path):
    file = tmp_path / "mine.py"
    source = "from pe_ablation.encodings import Encoding\n\n\nclass Mine(Encoding):\n    pass\n"
    file.write_text(source)
    experiment = config.read({"encoding": {"name": f"{file}:Mine"}})
    before = config.training_identity(experiment)
    file.write_text(source + "# changed\n")
    assert config.training_identity(experiment) != before


def test_an_encoding_inside_another_is_in_the_identity_as_it_would_be_alone(tmp_path):
    def identity(**options):
        return config.training_identity(config.read({"encoding": {"name": "sum", "options": options}}))

    plain = identity()
    assert plain == identity(first="rope", first_options={}) == identity(first_options={"base": 10000.0})
    changed = identity(first_options={"base": 500.0})
    assert plain != changed == identity(first_options={"base": 500, "fraction": 1})
    file = tmp_path / "mine.py"
    source = "from pe_ablation.encodings import Encoding\n\n\nclass Mine(Encoding):\n    pass\n"
    file.write_text(source)
    before = identity(second=f"{file}:Mine")
    file.write_text(source + "# changed\n")
    assert identity(second=f"{file}:Mine") != before


GOLDEN = {"rope": "c7fe224528c2", "none": "8fd9330c7023"}
GPT2_GOLDEN = {"document": "468598e85dc5", "window": "879c5d42baea", "none": "2c8ba8309526"}


def test_golden_identities():
    """Update the values together with IDENTITY_FORMAT only: finished runs of every user are found by them."""
    rope = config.read(
        {"encoding": {"name": "rope", "options": {"base": 500.0}}, "train": {"learning_rate": 3e-3}, "seed": 2}
    )
    message = "identities moved: stored runs would be trained again; if that is meant, bump IDENTITY_FORMAT and update"
    assert {"rope": config.training_identity(rope), "none": config.training_identity(Experiment())} == GOLDEN, message


def test_golden_identities_of_gpt2s_vocabulary():
    """Without BOS it lost an id once, and with it the identity 636e720e156c: the embedding has another size."""
    asked = {bos: config.read({"data": {"tokenizer": "gpt2", "bos": bos}}) for bos in GPT2_GOLDEN}
    assert {bos: config.training_identity(each) for bos, each in asked.items()} == GPT2_GOLDEN
