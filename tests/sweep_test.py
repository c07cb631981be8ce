from typing import Any

import pytest

from pe_ablation import only, sweep
from pe_ablation.config import ConfigError, from_flag, from_flags
from pe_ablation.sweep import chain, param, prod, zipit

SOURCE = """
from ml_collections import ConfigDict
from pe_ablation.sweep import chain, param, prod, zipit

def get_config(arg="full"):
    if arg not in ("full", "quick"):
        raise ValueError(f"argument {arg!r}; allowed: full, quick")
    return ConfigDict({"train": {"steps": 1000 if arg == "full" else 200}, "eval": {"last_k": 16}})

def sweep(arg="full"):
    for seed in (0, 1):
        for name in ("rope", "alibi"):
            yield {"encoding.name": name, "seed": seed}

def sweep_rates(arg="full"):
    return [{"train.learning_rate": rate} for rate in (1e-3, 1e-4, 1e-3)]

def sweep_bases(arg="full"):
    for base in (500.0, 1e4):
        yield {"encoding": {"name": "rope", "options": {"base": base}}}

def sweep_empty(arg="full"):
    return []

def sweep_broken(arg="full"):
    yield {"train.stepz": 3}

def sweep_pairs(arg="full"):
    yield ("seed", 1)

def sweep_twins(arg="full"):
    yield {"label": "a"}
    yield {"label": "b", "seed": 1}

def sweep_lengths(arg="full"):
    return param("train.length", [16, 32, 64])

def sweep_grid(arg="full"):
    return prod(param("train.learning_rate", [1e-3, 3e-3]), param("encoding.name", ["rope", "alibi"]))

def sweep_tied(arg="full"):
    return zipit(param("train.learning_rate", [1e-3, 3e-3]), param("train.weight_decay", [0.1, 0.2]))

def sweep_some(arg="full"):
    return chain([{"encoding.name": "none"}], prod([{"encoding.name": "rope"}], sweep_halves()))

def sweep_halves(arg="full"):
    return param("encoding.options.base", [500.0, 1e4])

def sweep_scored(arg="full"):
    return param("eval.lengths", [(64, 128)])

def sweep_sizes(arg="full"):
    return param("model", ["nano", "micro"])

def sweep_unequal(arg="full"):
    yield from zipit(param("seed", [1, 2]), param("train.steps", [200]))

def sweep_wrong(arg="full"):
    yield {"seed": 1 // 0}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "study.py"
    file.write_text(SOURCE)
    return file


def test_a_file_is_loaded_with_its_argument(path):
    file = sweep.load(f"{path}:quick")
    assert file.config.train.steps == 200 and file.name == "study-quick" and file.spec == f"{path}:quick"
    assert list(file.sweeps)[:7] == ["default", "rates", "bases", "empty", "broken", "pairs", "twins"]
    assert sweep.load(str(path)).config.train.steps == 1000 and sweep.load(str(path)).name == "study"


def test_what_cannot_be_loaded_says_what_is_allowed(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nope\.py: no such config file"):
        sweep.load(f"{tmp_path}/nope.py:quick")
    with pytest.raises(ConfigError, match="'fast'; allowed: full, quick"):
        sweep.load(f"{path}:fast")
    with pytest.raises(ConfigError, match=r"FILE\.py or FILE\.py:ARGUMENT"):
        sweep.load("study")
    (tmp_path / "bare.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="no get_config"):
        sweep.load(f"{tmp_path}/bare.py")


@pytest.mark.parametrize(
    ("signature", "spec", "message"), [("", ":quick", "takes no argument"), ("arg", "", "needs an argument")]
)
def test_an_argument_too_many_or_too_few_is_refused(tmp_path, signature, spec, message):
    (tmp_path / "x.py").write_text(f"def get_config({signature}):\n    return {{}}\n")
    with pytest.raises(ConfigError, match=message):
        sweep.load(f"{tmp_path}/x.py{spec}")


def test_points_group_the_seeds_in_order(path):
    points = sweep.points(sweep.load(f"{path}:quick"), "default", {})
    assert [point.arm for point in points] == ["rope", "alibi"]
    for point in points:
        assert [each.seed for each in point.experiments] == [0, 1]
        assert point.train_length == 64 and point.experiments[0].train.steps == 200
        assert point.directory_name == f"{point.arm}-L64-{point.identity[:8]}"
    assert points[0].identity != points[1].identity


def test_equal_experiments_are_one(path):
    points = sweep.points(sweep.load(str(path)), "rates", {"seed": from_flag("3")})
    assert [point.experiments[0].train.learning_rate for point in points] == [1e-3, 1e-4]
    assert all([each.seed for each in point.experiments] == [3] for point in points)


def test_without_a_sweep_the_config_is_the_point(path):
    [point] = sweep.points(sweep.load(str(path)), None, {"label": "a b/c"})
    assert point.directory_name.startswith("a_b_c-L64-")


def test_an_override_holds_for_every_point(path):
    points = sweep.points(sweep.load(str(path)), "default", {"train.steps": from_flag("300")})
    assert {each.train.steps for point in points for each in point.experiments} == {300}


@pytest.mark.parametrize(
    ("name", "override", "swept"),
    [
        ("default", "seed", "seed"),
        ("rates", "train.learning_rate", "train.learning_rate"),
        ("bases", "encoding.options.base", "encoding"),
        ("rates", "train", "train.learning_rate"),
    ],
)
def test_a_swept_field_is_not_overridden(path, name, override, swept):
    with pytest.raises(ValueError) as refusal:
        sweep.points(sweep.load(str(path)), name, {override: from_flag("7")})
    assert (
        override in str(refusal.value) and f"{name!r}" in str(refusal.value) and f"sets {swept}" in str(refusal.value)
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rate", r"no sweep 'rate' \(did you mean rates\?\); allowed: default, rates"),
        ("empty", "empty"),
        ("broken", r"train\.stepz"),
        ("pairs", "not {dotted path: value}"),
        ("twins", "label: two points"),
        ("unequal", "sweep 'unequal': zipit: parts of unequal lengths 2, 1"),
        ("wrong", "sweep 'wrong': line [0-9]+: ZeroDivisionError"),
        ("rates,grid", "sweep 'rates' and sweep 'grid' both set train.learning_rate"),
        ("bases,default", "sweep 'bases' sets encoding, and sweep 'default' sets encoding.name"),
        ("rates,rates", "both set train.learning_rate"),
        ("rates,", "no sweep ''"),
    ],
)
def test_faulty_sweeps_are_refused(path, name, message):
    with pytest.raises(ConfigError, match=message):
        sweep.points(sweep.load(str(path)), name, {})


def test_the_default_sweep_is_the_plain_one_or_none_or_must_be_named(path, tmp_path):
    assert sweep.default_sweep(sweep.load(str(path))) == "default"
    (tmp_path / "bare.py").write_text("def get_config():\n    return {}\n")
    assert sweep.default_sweep(sweep.load(f"{tmp_path}/bare.py")) is None
    (tmp_path / "named.py").write_text("def get_config():\n    return {}\n\ndef sweep_rates():\n    return [{}]\n")
    with pytest.raises(ConfigError, match="name one of: rates"):
        sweep.default_sweep(sweep.load(f"{tmp_path}/named.py"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = (", "line 1: SyntaxError"),
        ("\nimport no_such_module", "line 2: ModuleNotFoundError"),
        ("def get_config():\n    return 1 / 0", "line 2: ZeroDivisionError"),
    ],
)
def test_a_config_file_that_fails_is_refused_with_its_line(tmp_path, source, message):
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=message) as refusal:
        sweep.load(str(file))
    assert str(file) in str(refusal.value)


# Algebra


def test_prod_has_every_combination_the_last_factor_fastest():
    assert prod(param("a", [1, 2]), param("b", [3, 4])) == [
        {"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 2, "b": 4},
    ]  # fmt: skip
    assert prod() == [{}] and prod(param("a", [1])) == [{"a": 1}]


def test_zipit_pairs_and_chain_follows():
    assert zipit(param("a", [1, 2]), param("b", [3, 4])) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    assert chain(param("a", [1]), [], param("b", [3])) == [{"a": 1}, {"b": 3}]


def test_generators_serve_as_well_as_lists():
    def each():
        yield {"a": 1}
        yield {"a": 2}

    assert prod(each(), param("b", iter([3]))) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert zipit(each(), param("b", range(2))) == [{"a": 1, "b": 0}, {"a": 2, "b": 1}]
    assert chain(each(), each()) == [{"a": 1}, {"a": 2}, {"a": 1}, {"a": 2}]


def test_the_algebra_leaves_its_parts_as_they_were():
    part = [{"a": 1}]
    for made in (prod(part, param("b", [2])), zipit(part, param("b", [2])), chain(part)):
        made[0]["a"] = 5
    assert part == [{"a": 1}]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: prod(param("a.b", [1]), param("a.b", [2])), "factor 1 of prod and factor 2 of prod both set a.b"),
        (
            lambda: prod([{"c": 1}], [{"a": {}}], [{"d": 1}, {"a.b": 1}]),
            "factor 2 of prod sets a, and factor 3 of prod",
        ),
        (lambda: prod(param("model", ["nano"]), param("model.num_layers", [1])), "both set model.num_layers"),
        (lambda: prod(param("a", [1]), []), "factor 2 of prod is empty"),
        (lambda: zipit(param("a", [1]), param("a", [2])), "part 1 of zipit and part 2 of zipit both set a"),
        (lambda: zipit(param("a", [1, 2]), param("b", [1, 2, 3])), "unequal lengths 2, 3"),
        (lambda: param("encoding.name", "rope"), "encoding.name are the text 'rope'"),
    ],
)
def test_what_the_algebra_cannot_combine_is_refused(build, message):
    with pytest.raises(ValueError) as refusal:
        build()
    assert message in str(refusal.value)


def test_fields_that_only_look_alike_are_combined():
    assert prod([{"train.steps": 1}], [{"train.steps_more": 2}]) == [{"train.steps": 1, "train.steps_more": 2}]
    sizes = prod(param("model", ["nano"]), param("model.dropout_embed", [0.1]))
    assert sizes == [{"model": "nano", "model.dropout_embed": 0.1}]


# Sweeps from the command line


def made(path, name, overrides=None, axes=None):
    texts = {field: from_flags(field, text) for field, text in (axes or {}).items()}
    return sweep.points(sweep.load(str(path)), name, overrides or {}, texts)


def values(points, path):
    found = []
    for each in (experiment for point in points for experiment in point.experiments):
        at: Any = each
        for name in path.split("."):
            at = getattr(at, name)
        found.append(at)
    return found


def test_several_sweeps_are_their_product(path):
    points = made(path, "rates,default")
    assert [(point.arm, point.experiments[0].train.learning_rate, point.seeds) for point in points] == [
        ("rope", 1e-3, "0,1"), ("alibi", 1e-3, "0,1"), ("rope", 1e-4, "0,1"), ("alibi", 1e-4, "0,1"),
    ]  # fmt: skip
    assert len({point.identity for point in points}) == 4


def test_the_values_of_a_swept_field_are_replaced(path):
    points = made(path, "grid", axes={"train.learning_rate": "1e-4, 2"})
    assert values(points, "train.learning_rate") == [1e-4, 2.0, 1e-4, 2.0]
    assert [point.arm for point in points] == ["rope", "rope", "alibi", "alibi"]
    assert {type(value) for value in values(points, "train.learning_rate")} == {float}


def test_two_axes_are_replaced_whatever_their_order(path):
    axes = {"train.learning_rate": "1e-4", "encoding.name": "t5,none"}
    for each in (axes, dict(reversed(axes.items()))):
        points = made(path, "grid", axes=each)
        assert {(point.arm, point.experiments[0].train.learning_rate) for point in points} == {
            ("t5", 1e-4),
            ("none", 1e-4),
        }


def test_seeds_are_an_axis_like_any_other(path):
    points = made(path, "default", axes={"seed": "5,6,7,6"})
    assert [(point.arm, point.seeds) for point in points] == [("rope", "5,6,7"), ("alibi", "5,6,7")]


def test_overlays_without_the_field_stay(path):
    points = made(path, "some", axes={"encoding.options.base": "7"})
    assert [(point.arm, point.experiments[0].encoding.options) for point in points] == [
        ("none", {}),
        ("rope", {"base": 7.0}),
    ]


def test_lists_are_separated_by_semicolons(path):
    points = made(path, "scored", axes={"eval.lengths": "64,256;"})
    assert values(points, "eval.lengths") == [(64, 256)]
    assert from_flags("eval.lengths", "64,128;256") == ["64,128", "256"]
    assert from_flags("train.learning_rate", "1e-4;1") == from_flags("train.learning_rate", "1e-4, 1")


@pytest.mark.parametrize(
    ("name", "axes", "message"),
    [
        ("default", {"train.learning_rate": "1"}, "not swept, the sweep 'default'"),
        ("default", {"train.learning_rate": "1"}, "for all points alike: --config.train.learning_rate="),
        (None, {"seed": "1"}, "without a sweep sets nothing"),
        ("tied", {"train.learning_rate": "1,2"}, "ties its values to those of other fields"),
        ("bases", {"encoding.name": "none"}, "sets encoding as a whole"),
        ("rates", {"train": "none"}, "sets train.learning_rate, not its group"),
        ("rates", {"train.learning_rte": "1"}, "did you mean learning_rate?"),
        ("rates", {"train.learning_rate": "fast"}, "train.learning_rate: expected float, got 'fast'"),
        ("rates", {"train.learning_rate": "0"}, "train.learning_rate: 0.0 trains nothing"),
        ("rates", {"train.learning_rate": "1e-3,,1"}, "an empty value in '1e-3,,1'"),
        ("rates", {"train.learning_rate": ""}, "an empty value in ''"),
        ("scored", {"eval.lengths": "64,128"}, "'64,128' is ambiguous for a list"),
        ("scored", {"eval.lengths": "64;64.5"}, "eval.lengths: expected int, got '64.5'"),
        ("sizes", {"model": "nano,small"}, "no size 'small' (did you mean gpt2_small?)"),
        ("sizes", {"model.num_layers": "1"}, "sets model as a whole"),
    ],
)
def test_an_axis_that_cannot_be_replaced_is_refused(path, name, axes, message):
    with pytest.raises(ConfigError) as refusal:
        made(path, name, axes=axes)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("rates", "train.learning_rate", "replaced by --sweep.train.learning_rate="),
        ("sizes", "model.num_layers", "sets model; its values are replaced by --sweep.model="),
        ("default,rates", "seed", "the sweep 'default,rates' of"),
    ],
)
def test_an_override_of_a_swept_field_names_the_way(path, name, override, message):
    with pytest.raises(ConfigError) as refusal:
        made(path, name, {override: from_flag("7")})
    assert message in str(refusal.value)


def test_sizes_are_swept_beside_other_fields_of_the_model(path):
    points = made(path, "sizes", {"model.dropout_embed": 0.1}, {"model": "micro,gpt2_small"})
    assert values(points, "model.num_layers") == [4, 12] and set(values(points, "model.dropout_embed")) == {0.1}


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"train.stepz": 3}, "train.stepz: no such field (did you mean steps?)"),
        ({"trian.steps": 3}, "trian: no such field (did you mean train?)"),
        ({"model.num_layers": 3}, "model.num_layers: model is a value, not a group of fields"),
        ({"data.text.file.name": "x"}, "data.text.file is a value, not a group of fields"),
        ({"train.steps": 12.5}, "train.steps: expected int, got 12.5"),
        ({"train.learning_rate": "1e-4"}, "train.learning_rate: expected float, got '1e-4'"),
        ({"encoding.name": None}, "encoding.name: expected str, got None"),
    ],
)
def test_overlays_are_strict(tmp_path, overlay, message):
    file = tmp_path / "strict.py"
    config = {"data": {"text": {"file": None}}} | ({"model": None} if "model.num_layers" in overlay else {})
    file.write_text(f"def get_config():\n    return {config}\n\ndef sweep():\n    return [{overlay}]\n")
    with pytest.raises(ConfigError) as refusal:
        made(file, "default")
    assert message in str(refusal.value)


# Some of the points


def chosen(path, *conditions, name="grid,lengths"):
    return only.select(made(path, name), conditions)


@pytest.mark.parametrize(
    ("conditions", "count"),
    [
        ((), 12),
        (("arm=rope",), 6),
        (("arm=ro*", "train_length=32"), 2),
        (("encoding.name=alibi", "train.learning_rate=0.003", "train.length=16"), 1),
        (("train.learning_rate=3e-3",), 6),
        (("train_length=16,64",), 8),
        (("rope-L*",), 6),
        (("*-L16-*", "seed=0"), 4),
        (("model.dtype=float*", "model.mlp_dim=None", "model.remat=false"), 12),
    ],
)
def test_only_keeps_what_meets_every_condition_in_order(path, conditions, count):
    everything, kept = chosen(path), chosen(path, *conditions)
    assert len(kept) == count and kept == [point for point in everything if point in kept]


def test_only_keeps_some_seeds_of_a_point(path):
    points = made(path, "default")
    kept = only.select(points, ["seed=1", "arm=rope"])
    assert [(point.arm, point.seeds) for point in kept] == [("rope", "1")]
    assert kept[0].directory_name == points[0].directory_name


def test_only_reads_options_of_the_encodings_that_have_them(path):
    assert [point.arm for point in chosen(path, "encoding.options.base=10000", name="some")] == ["rope"]
    assert len(chosen(path, "encoding.options.base=1e4", name="default")) == 1, "a default counts"


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("arm=rop", "--only arm=rop: matches nothing; there are rope, alibi"),
        ("seed=3", "there are 0"),
        ("train.learning_rate=1", "there are 0.001, 0.003"),
        ("rope", "matches nothing; there are rope-L16-"),
        ("rope", ", ... (12 in all)"),
        ("train.stepz=3", "did you mean steps?"),
        ("train=3", "a group; name one of its fields: train.length"),
        ("train.steps=many", "train.steps: expected int, got 'many'"),
        ("encoding.options.bas=3", "no points with encoding.options.bas"),
        ("model=nano", "model.num_layers"),
        ("eval.lengths=64,128", "ambiguous"),
    ],
)
def test_only_that_matches_nothing_or_cannot_be_read_is_refused(path, condition, message):
    with pytest.raises(ConfigError) as refusal:
        chosen(path, condition)
    assert message in str(refusal.value)


def test_a_list_has_a_line_per_point_in_the_order_of_the_points(path):
    points = made(path, "default")
    assert list(sweep.listing(sweep.packs(points, False))) == [
        f"0  {points[0].directory_name}  seeds 0,1",
        f"1  {points[1].directory_name}  seeds 0,1",
    ]
