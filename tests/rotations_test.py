"""How often pairs turn, held against the formula; what has no rotations, or no frequencies to change, is refused."""

import math

import pytest
from written_runs import experiment, written

from pe_ablation import cli, config, rotations
from pe_ablation.config import ConfigError

TREE = {"encoding": {"name": "rope"}, "model": {"model_dim": 64, "num_heads": 1}, "train": {"length": 512}}


def table(text):
    """The numbers of a markdown table below its rule."""
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in text.split("\n") if line.startswith("|")]
    return lines[0], [[float(each.replace(",", "")) for each in line] for line in lines[2:]]


def test_turns_of_each_pair_in_the_training_length():
    asked = config.read(TREE, {"data.block": 512, "train.batch_tokens": 512})
    header, rows = table(rotations.to_markdown(asked, 2048, ("pi", "ntk:factor=2", "yarn:ramp=paper")))
    assert header == [
        "pair",
        "radians a token",
        "tokens a turn",
        "turns in 512",
        "pi",
        "ntk:factor=2",
        "yarn:ramp=paper",
    ]
    assert len(rows) == 32
    for k, (pair, theta, wave, turns, pi, ntk, _) in enumerate(rows):
        expected = 10_000 ** (-k / 32)
        assert pair == k and theta == pytest.approx(expected, rel=1e-5)
        assert wave == pytest.approx(2 * math.pi / expected, abs=0.06)
        assert turns == pytest.approx(512 * expected / (2 * math.pi), rel=1e-3)
        assert pi == pytest.approx(turns / 4, rel=1e-3)
        assert ntk == pytest.approx(turns * 2 ** (-k / 31), rel=1e-3)
    paper = {3: 0.42169650, 8: 0.04229532, 15: 0.00336176}
    for k, theta in paper.items():
        assert rows[k][-1] == pytest.approx(512 * theta / (2 * math.pi), rel=1e-3)


@pytest.mark.parametrize("name, asked, message", [
    ("alibi", ("pi",), r"encoding\.name: alibi has no rotations of rope"),
    ("rope", ("clip",), "transforms: clip changes no frequencies; allowed: pi"),
    ("rope", ("none",), "transforms: none changes no frequencies"),
    ("rope", ("yarm",), "transforms: no transform 'yarm'"),
])  # fmt: skip
def test_what_does_not_turn_is_refused(name, asked, message):
    with pytest.raises(ConfigError, match=message):
        rotations.to_markdown(config.read({"encoding": {"name": name}}), 128, asked)


def test_the_command_reads_a_run(tmp_path, capsys):
    written(tmp_path / "run", experiment(tmp_path))
    assert (
        cli.main(["transforms", "--run", str(tmp_path / "run"), "--length", "32", "--transforms", "pi,base:base=50"])
        == 0
    )
    header, rows = table(capsys.readouterr().out)
    assert header[3:] == ["turns in 8", "pi", "base:base=50"] and len(rows) == 2
    assert cli.main(["transforms", "--length", "32"]) == 2
    assert "go with --run" in capsys.readouterr().err
    assert cli.main(["transforms", "--run", str(tmp_path / "run"), "--length", "0"]) == 2
