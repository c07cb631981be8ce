"""Runs that differ by learning rate and seed, trained in one program: each as if it were alone."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_runs
from compiles import compiles
from tiny_runs import differing, saved

from pe_ablation import config, estimate, launch, sweep, train
from pe_ablation.checkpoint import Checkpoints
from pe_ablation.record import Run

STEPS = 10
HIGH, LOW, EXPLODING = 1e-2, 3e-3, 1e30
ASKED = ((HIGH, 0), (LOW, 0), (LOW, 1))
OVERRIDES = {"train.steps": STEPS, "train.checkpoint_every": 4, "train.warmup_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pack")


def experiments(folder, asked=ASKED, **fields):
    given = {f"train.{name}": value for name, value in fields.items()}
    return [
        tiny_runs.experiment(folder, {**OVERRIDES, "train.learning_rate": rate, **given}, seed=seed)
        for rate, seed in asked
    ]


def plan(folder, asked):
    """Run directories below `folder`, those of a learning rate in one of its own."""
    return [Run.plan(folder / f"{each.train.learning_rate}" / f"seed_{each.seed}", each, None).path for each in asked]


def steps(path):
    with Checkpoints(path / "checkpoints") as checkpoints:
        return checkpoints.steps()


def assert_alike(path, other):
    """The same logs to float tolerance, and the very learning rates."""
    rows, expected = Run(path).rows("metrics"), Run(other).rows("metrics")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, like in zip(rows, expected, strict=True):
        assert row == pytest.approx(like, rel=1e-5) and row["learning_rate"] == like["learning_rate"]


@pytest.fixture(scope="module")
def packed(folder):
    """Run directories of the pack, what it saw, and the programs that it compiled."""
    asked = experiments(folder)
    paths = plan(folder / "packed", asked)
    with compiles() as names:
        trained = tiny_runs.fit(asked, paths)
    return paths, trained, names


@pytest.fixture(scope="module")
def alone(folder):
    """The same, each trained on its own: by learning rate and seed."""
    found, names = {}, []
    for key, asked in zip(ASKED, experiments(folder), strict=True):
        [path] = plan(folder / "alone", [asked])
        with compiles() as own:
            found[key] = path, tiny_runs.fit([asked], [path])
        names += own
    return found, names


def test_a_packed_run_equals_one_that_trains_alone(packed, alone):
    paths, together, _ = packed
    for row, (key, path) in enumerate(zip(ASKED, paths, strict=True)):
        other, own = alone[0][key]
        assert all(np.array_equal(together.seen[step][row], own.seen[step][0]) for step in range(1, STEPS + 1))
        assert_alike(path, other)
        assert steps(path) == steps(other) == [8, STEPS]
        summary, expected = ({**each, "memory_bytes": 0} for each in (together.summaries[row], own.summaries[0]))
        assert summary == {**expected, "last": pytest.approx(expected["last"], rel=1e-5)}
    nats = [each["last"]["nats"] for each in together.summaries]
    assert len(set(nats)) == 3


def test_runs_of_a_seed_differ_by_their_learning_rate_alone(packed):
    """The first step has a rate of 0, and so the second one's loss is the last that they share."""
    high, low, other = (Run(path).rows("metrics") for path in packed[0])
    nats = [[row["nats"] for row in rows] for rows in (high, low, other)]
    assert nats[0][:2] == nats[1][:2] and not set(nats[0][:2]) & set(nats[2])
    assert not set(nats[0][2:]) & set(nats[1])
    peaks = [max(row["learning_rate"] for row in rows) for rows in (high, low, other)]
    assert peaks == pytest.approx([HIGH, LOW, LOW])


def test_a_pack_is_one_program_and_so_are_all_rates_alone(packed, alone):
    assert packed[2].count("jit(train_step)") == 1
    assert alone[1].count("jit(train_step)") == 1


def test_a_program_does_not_hold_the_learning_rate(folder):
    """So that one kept on disk serves every rate."""
    texts = set()
    for asked in experiments(folder, ((HIGH, 0), (LOW, 0))):
        loop = train._Fit([asked], [])
        seeds, peaks = np.uint32([0]), np.float32([asked.train.learning_rate])
        state = jax.eval_shape(loop.init, seeds)
        texts.add(loop.step.jitted.lower(state, loop._next(), seeds, peaks).as_text())
    assert len(texts) == 1


def test_a_run_of_a_pack_that_diverges_is_frozen_and_the_others_go_on(folder, packed, tmp_path):
    asked = experiments(folder, ((HIGH, 0), (EXPLODING, 0), (LOW, 1)))
    paths = plan(tmp_path, asked)
    ended = tiny_runs.fit(asked, paths)
    assert [each["status"] for each in ended.summaries] == ["ok", "diverged", "ok"]
    for path, whole in ((paths[0], packed[0][0]), (paths[2], packed[0][2])):
        assert differing(saved(path, STEPS), saved(whole, STEPS)) == []
        assert (path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    rows = Run(paths[1]).rows("metrics")
    assert rows[-1]["diverged"] and rows[-1]["step"] == 3 and math.isnan(rows[-1]["nats"])


@pytest.mark.parametrize("first", ["packed", "alone"])
def test_what_was_broken_off_packed_goes_on_alone_and_the_reverse(folder, packed, tmp_path, first):
    asked = experiments(folder)
    paths = plan(tmp_path, asked)
    groups = [[0, 1, 2]], [[0], [1], [2]]
    before, after = groups if first == "packed" else groups[::-1]
    for rows in before:
        tiny_runs.fit_until(6, [asked[row] for row in rows], [paths[row] for row in rows])
    assert [steps(path) for path in paths] == [[4]] * 3
    for rows in after:
        assert tiny_runs.fit([asked[row] for row in rows], [paths[row] for row in rows]).start == 4
    for path, whole in zip(paths, packed[0], strict=True):
        assert_alike(path, whole)


def test_a_killed_pack_goes_on_bit_for_bit(folder, packed, tmp_path):
    asked = experiments(folder)
    paths = plan(tmp_path, asked)
    tiny_runs.fit_until(6, asked, paths)
    assert tiny_runs.fit(asked, paths).start == 4
    for path, whole in zip(paths, packed[0], strict=True):
        assert differing(saved(path, STEPS), saved(whole, STEPS)) == []
        assert (path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


# Which points are packed


def points(folder, *overrides, seeds=(0,), **fields):
    return [
        sweep.Point(tuple(tiny_runs.experiment(folder, {**OVERRIDES, **fields, **each}, seed=seed) for seed in seeds))
        for each in overrides
    ]


def rates(*values):
    return [{"train.learning_rate": each} for each in values]


@pytest.mark.parametrize(
    ("other", "together"),
    [
        ({"train.learning_rate": LOW}, True),
        ({"train.learning_rate": LOW, "label": "low"}, True),
        ({"train.learning_rate": LOW, "eval.lengths": (8, 16)}, True),
        ({"train.learning_rate": LOW, "wandb.tags": ("x",)}, True),
        ({"train.learning_rate": LOW, "train.steps": 99}, False),
        ({"train.learning_rate": LOW, "train.weight_decay": 0.0}, False),
        ({"train.learning_rate": LOW, "train.checkpoint_every": 3}, False),
        ({"train.learning_rate": LOW, "model.implementation": "dense"}, False),
        ({"train.learning_rate": LOW, "encoding.options.num_buckets": 16}, False),
        ({"train.learning_rate": LOW, "positions.name": "documents"}, False),
        ({"train.learning_rate": LOW, "data.train_bytes": 300}, False),
    ],
)
def test_points_are_packed_that_differ_by_learning_rate_and_by_what_names_and_scores_them(folder, other, together):
    [one, another] = both = points(folder, *rates(HIGH), other)
    assert (config.pack(one.experiments[0]) == config.pack(another.experiments[0])) == together
    assert len(sweep.packs(both, True)) == (1 if together else 2) and len(sweep.packs(both, False)) == 2
    if not together:
        with pytest.raises(ValueError, match=r"fit_pack: a, b differ in more than may .*train\.learning_rate"):
            train.fit_pack([one.experiments[0], another.experiments[0]], [Path("a"), Path("b")])


def test_a_pack_keeps_the_order_of_its_points_and_has_an_index(folder):
    none = {"encoding": {"name": "none"}}
    found = points(folder, *rates(HIGH), none, *rates(LOW, HIGH * 2), seeds=(0, 1))
    [first, second] = sweep.packs(found, True)
    assert first.points == (found[0], found[2], found[3]) and second.points == (found[1],)
    assert str(first) == "3 points, 6 runs in one program, train.learning_rate 0.01, 0.003, 0.02"
    assert first.name == f"{found[0].directory_name} and 2 more" and second.name == found[1].directory_name
    lines = list(sweep.listing([first, second]))
    assert [line.split("  ")[:2] for line in lines] == [
        [str(index), found[each].directory_name] for index, each in ((0, 0), (0, 2), (0, 3), (1, 1))
    ]
    assert launch.at(found, 0, pack=True) == list(first.points) and launch.at(found, 1) == [found[1]]
    with pytest.raises(ValueError, match=r"--index 2: 2 packs are selected, 0 to 1"):
        launch.at(found, 2, pack=True)


def test_a_dry_run_says_what_is_packed_and_needs_room_for_all_of_it_at_once(folder):
    none = {"encoding": {"name": "none"}}
    found = points(folder, *rates(HIGH, LOW), none, seeds=(0, 1), **{"eval.batch_tokens": 8})
    lines = list(launch.dry_run(found, pack=True))
    assert [line.split("  ")[0] for line in lines[:2]] == [each.directory_name for each in found[:2]]
    assert lines[2].startswith("  packed: 2 points, 4 runs in one program, train.learning_rate 0.01, 0.003; estimated")
    assert "estimated" not in lines[0] + lines[1] and "estimated" in lines[3]
    assert "to start each pack" in lines[4] and lines[5].startswith("3 points in 2 packs, 6 runs, 3,840 tokens; ")
    assert list(launch.dry_run(found))[-1].startswith("3 points, 6 runs, 3,840 tokens; ")
    costs = [
        launch._cost(each, estimate.Speed(None)) for each in sweep.packs(found[:2], True) + sweep.packs(found, False)
    ]
    assert costs[0].runs == 4 and (costs[0].memory - costs[1].memory) % (2 * 16 * costs[0].parameters) == 0
    assert costs[0].memory > costs[1].memory
    assert costs[0].seconds == pytest.approx(2 * costs[1].seconds - estimate.START_SECONDS)
