"""What the benchmark measures is what it says; how fast it is, no test asks."""

import json

import pytest

from pe_ablation import bench, model
from pe_ablation.bench import Way

pytestmark = pytest.mark.usefixtures("quick_compilation", "rolled_layers")


def test_ways_take_turns_after_a_call_that_does_not_count():
    calls = []
    ways = [Way(name, tokens, lambda name=name: calls.append(name)) for name, tokens in (("a", 10), ("b", 1))]
    rates = bench.taken_in_turns(ways, rounds=3)
    assert calls == ["a", "b"] * 4 and {name: len(each) for name, each in rates.items()} == {"a": 3, "b": 3}
    assert all(rate > 0 for each in rates.values() for rate in each)


def test_a_text_too_short_to_measure_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tokens: 300 is too short a text to measure; at least 1024"):
        list(bench.write(tmp_path / "out", tokens=300))
    assert not (tmp_path / "out").exists()


def test_a_table_has_ratios_of_medians():
    rates = {"in parallel": [90.0, 100.0, 500.0], "recompute": [4.0, 5.0, 6.0]}
    about = {"encoding": "rope", "size": "nano", "parameters": 7, "tokens": 9, "window": 5, "sinks": 2}
    lines = list(bench.table(about | {"tokens_per_second": rates}))
    assert lines[-2] == "| recompute | 5 | 4 to 6 | 20.0x |" and "W = 5, S = 2" in lines[0]


def test_it_is_written_with_the_machine(tmp_path, monkeypatch):
    monkeypatch.setitem(model.SIZES, "tiny", {"num_layers": 1, "model_dim": 8, "num_heads": 2, "mlp_dim": None})
    monkeypatch.setattr(bench, "ROUNDS", 1)
    lines = list(bench.write(tmp_path, tokens=1200, cases=[("tiny", "alibi", 7, 2)]))
    stored = json.loads((tmp_path / "streaming.json").read_text())
    [found] = stored["streams"]
    assert found["parameters"] == model.count_parameters(
        model.GPTConfig(vocab_size=258, num_layers=1, num_heads=2, model_dim=8, train_length=8, encoding="alibi")
    )
    assert set(found["tokens_per_second"]) == {
        "in parallel", "token by token, a loop on the device", "token by token, a call each", "recompute",
    }  # fmt: skip
    assert stored["machine"]["cores"] >= 1 and (tmp_path / "streaming.md").read_text().startswith(lines[0])
