"""Measures of repetition against sets and plain loops, and against values counted by hand."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pe_ablation import repetition
from pe_ablation.repetition import Loop, after_eviction, find_loop, rep_n

NAN = pytest.approx(math.nan, nan_ok=True)
SEQUENCES = st.lists(st.integers(0, 2), max_size=24)


def letters(text):
    return [ord(each) for each in text]


def grams(tokens, n):
    return [tuple(tokens[at : at + n]) for at in range(len(tokens)) if at + n <= len(tokens)]


def rep_by_sets(tokens, n):
    every = grams(tokens, n)
    return 1 - len(set(every)) / len(every) if every else math.nan


def loop_by_definition(tokens, repeats=3, longest=512):
    """Every period and every onset, tried one by one on the definition."""

    def periodic(start, period):
        return all(tokens[at] == tokens[at + period] for at in range(start, len(tokens) - period))

    for period in range(1, longest + 1):
        if repeats * period <= len(tokens) and periodic(len(tokens) - repeats * period, period):
            return Loop(min(start for start in range(len(tokens)) if periodic(start, period)), period)
    return None


@given(SEQUENCES, st.integers(1, 5))
def test_rep_n_is_what_sets_count(tokens, n):
    assert rep_n(np.array(tokens, np.int32), n) == pytest.approx(rep_by_sets(tokens, n), nan_ok=True)


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [("ababab", 2, 0.6), ("abc", 2, 0), ("abc", 3, 0), ("aaaaa", 1, 0.8), ("aaaaa", 4, 0.5), ("aabb", 1, 0.5)],
)
def test_rep_n_counted_by_hand(text, n, expected):
    assert rep_n(letters(text), n) == pytest.approx(expected)


def test_all_n_grams_count():
    assert [len(grams("abc", n)) for n in (2, 3, 4)] == [2, 1, 0]
    assert [len(repetition._ngrams(letters("abc"), n)) for n in (2, 3, 4)] == [2, 1, 0]


@pytest.mark.parametrize(("period", "length", "printed"), [(5, 100, 0.9485), (1, 100, 0.9897), (64, 512, 0.8743)])
def test_rep_4_of_a_pure_loop(period, length, printed):
    tokens = np.arange(length) % period
    assert rep_n(tokens, 4) == pytest.approx(1 - period / (length - 3))
    assert rep_n(tokens, 4) == pytest.approx(printed, abs=5e-5)
    assert find_loop(tokens) == (0, period)


def test_too_short_is_nan_and_skipped_by_means():
    assert rep_n([], 1) == NAN
    assert rep_n([1, 2], 3) == NAN
    assert repetition.mean_rep_n([[], [1], letters("ababab")], 2) == pytest.approx(0.6)
    assert repetition.mean_rep_n([[], [1]], 2) == NAN
    assert repetition.mean_rep_n([], 2) == NAN
    assert repetition.diversity([[1, 2, 3], [1, 2, 3, 4]]) == 1
    assert repetition.diversity([[1, 2, 3]]) == NAN
    assert repetition.distinct_n([[1]], 2) == NAN
    assert repetition.distinct_n([], 1) == NAN


@given(st.lists(SEQUENCES, max_size=4), st.integers(1, 4))
def test_distinct_n_pools_and_rep_n_does_not(sequences, n):
    pooled = [gram for each in sequences for gram in grams(each, n)]
    expected = len(set(pooled)) / len(pooled) if pooled else math.nan
    assert repetition.distinct_n(sequences, n) == pytest.approx(expected, nan_ok=True)
    known = [rep_by_sets(each, n) for each in sequences if len(each) >= n]
    expected = sum(known) / len(known) if known else math.nan
    assert repetition.mean_rep_n(sequences, n) == pytest.approx(expected, nan_ok=True)


def test_no_n_gram_spans_two_sequences():
    assert repetition.distinct_n([[1, 2], [1, 2]], 2) == 0.5
    assert repetition.distinct_n([[1, 2], [3]], 2) == 1


@given(st.lists(SEQUENCES, max_size=4))
def test_diversity_is_a_mean_of_products(sequences):
    products = []
    for each in sequences:
        if len(each) >= 4:
            products.append((1 - rep_by_sets(each, 2)) * (1 - rep_by_sets(each, 3)) * (1 - rep_by_sets(each, 4)))
    expected = sum(products) / len(products) if products else math.nan
    assert repetition.diversity(sequences) == pytest.approx(expected, nan_ok=True)


def test_diversity_by_hand():
    """aaaaa: 1/4 * 1/3 * 1/2; ababab: 2/5 * 2/4 * 2/3."""
    assert repetition.diversity([letters("aaaaa")]) == pytest.approx(1 / 24)
    assert repetition.diversity([letters("aaaaa"), letters("ababab")]) == pytest.approx((1 / 24 + 2 / 15) / 2)


@given(SEQUENCES, st.integers(1, 4), st.integers(0, 14), st.integers(3, 4), st.sampled_from([1, 2, 3, 512]))
def test_loops_are_those_of_the_definition(noise, period, more, repeats, longest):
    """Noise, then its own last tokens over and over: most have a loop, many whose onset lies inside the noise."""
    tokens = list(noise)
    for _ in range(more):
        tokens.append(tokens[-period] if len(tokens) >= period else 0)
    assert find_loop(tokens, repeats, longest) == loop_by_definition(tokens, repeats, longest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("a", None),
        ("aa", None),
        ("aaa", (0, 1)),
        ("aaaaaaa", (0, 1)),
        ("abcdefgh", None),
        ("ababa", None),
        ("ababab", (0, 2)),
        ("abababa", (0, 2)),
        ("qwexabcabcabc", (4, 3)),
        ("qwecabcabcabc", (3, 3)),  # the onset lies inside a cycle
        ("abcabcabcabcxyz", None),  # a loop in the middle only
        ("aaaaaxbcbcbc", (6, 2)),  # one in the middle, another at the end
        ("abababababab", (0, 2)),  # periods 2 and 4: the divisor
        ("aaabaaabaaab", (0, 4)),  # a, then a, aa, aaa: no shorter period
        ("xaaaxaaaxaaa", (9, 1)),  # the shorter period, as documented
    ],
)
def test_loops_by_hand(text, expected):
    assert find_loop(letters(text)) == expected == loop_by_definition(letters(text))


def test_limits_of_a_loop():
    tokens = np.r_[np.arange(100, 107), np.tile(np.arange(20), 4)]
    assert find_loop(tokens, longest=20) == find_loop(tokens, repeats=4) == (7, 20)
    assert find_loop(tokens, longest=19) is None
    assert find_loop(tokens, repeats=5) is None
    assert find_loop(letters("xaaaxaaaxaaa"), repeats=4) is None


def test_onset_lies_before_the_repeats_that_were_asked_for():
    tokens = np.r_[np.full(11, 99), np.tile(np.arange(4), 50)]
    assert find_loop(tokens) == (11, 4)


@pytest.mark.parametrize("kind", ["loop", "no loop", "almost constant"])
def test_100_000_tokens_take_no_second(kind):
    """Almost constant is the worst case: every period has to be compared to its end."""
    tokens = np.random.default_rng(0).integers(0, 50, 100_000)
    if kind == "loop":
        tokens[1000:] = np.resize(np.arange(500), 99_000)
    if kind == "almost constant":
        tokens[:], tokens[-2] = 1, 2
    start = time.process_time()
    found = find_loop(tokens)
    assert time.process_time() - start < 1
    assert found == ((1000, 500) if kind == "loop" else None)


def test_a_third_of_the_sequence_is_the_longest_period():
    tokens = np.random.default_rng(0).integers(0, 50, 100_000)
    tokens[1000:] = np.resize(np.arange(33_000), 99_000)
    assert find_loop(tokens, longest=len(tokens)) == (1000, 33_000)
    assert find_loop(tokens) is None


def test_after_eviction():
    loop = Loop(onset=40, period=3)
    assert after_eviction(loop, [30, 31, 50]) == after_eviction(loop, np.int64(30)) == after_eviction(loop, 30) == 10
    assert after_eviction(loop, np.array([40])) == 0
    assert after_eviction(loop, -5) == 45
    assert after_eviction(loop, [41, 42]) is None
    assert after_eviction(loop, []) is None
    assert after_eviction(None, [30]) is None
    assert type(after_eviction(loop, np.array([30]))) is int


def test_summary():
    sequences = [np.array(letters(each), np.int32) for each in ("ababab", "abcdefg", "qaaa", "")]
    found = repetition.summary(sequences)
    assert all(type(each) is float for each in found.values())
    tokens = [each.tolist() for each in sequences]
    for n in range(1, 5):
        pooled = [gram for each in tokens for gram in grams(each, n)]
        assert found.pop(f"distinct_{n}") == pytest.approx(len(set(pooled)) / len(pooled))
        assert found.pop(f"rep_{n}") == pytest.approx(np.mean([rep_by_sets(each, n) for each in tokens[:3]]))
    assert found.pop("diversity") == pytest.approx((2 / 15 + 1 + 2 / 3 * 1 * 1) / 3)
    assert found == {"loops": 0.5}


def test_summary_of_nothing_is_nan():
    assert all(math.isnan(each) for each in repetition.summary([]).values())
    empty = repetition.summary([[]])
    assert empty.pop("loops") == 0
    assert all(math.isnan(each) for each in empty.values())


def test_a_batch_is_several_sequences():
    batch = np.array([[1, 1, 1, 1], [1, 2, 3, 4]], np.uint16)
    assert repetition.summary(batch) == repetition.summary(batch.tolist())


@pytest.mark.parametrize("sequence", [[[1, 2]], 3, [0.5, 1.0], ["a", "b"]])
def test_what_is_no_sequence_is_refused(sequence):
    for call in (lambda: rep_n(sequence, 1), lambda: find_loop(sequence)):
        with pytest.raises(ValueError, match="a sequence is integers"):
            call()


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="n: 0; at least 1"):
        rep_n([1], 0)
    for arguments in ({"repeats": 2}, {"longest": 0}):
        with pytest.raises(ValueError, match="at least 3 and 1"):
            find_loop([1], **arguments)
