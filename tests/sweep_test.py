import pytest

from pe_ablation import sweep
from pe_ablation.config import ConfigError, from_flag

SOURCE = """
from ml_collections import ConfigDict

def get_config(arg="full"):
    if arg not in ("full", "quick"):
        raise ValueError(f"argument {arg!r}; allowed: full, quick")
    return ConfigDict({"train": {"steps": 1000 if arg == "full" else 200}})

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
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "study.py"
    file.write_text(SOURCE)
    return file


def test_a_file_is_loaded_with_its_argument(path):
    file = sweep.load(f"{path}:quick")
    assert file.config.train.steps == 200 and file.name == "study-quick" and file.spec == f"{path}:quick"
    assert list(file.sweeps) == ["default", "rates", "bases", "empty", "broken", "pairs", "twins"]
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
