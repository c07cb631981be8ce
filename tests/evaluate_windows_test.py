"""Which targets a window scores, and with which context: the index arithmetic of every protocol, without a model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_ablation.evaluate import Windows, blocks, sliding, targets

documents = st.lists(st.integers(1, 90), min_size=1, max_size=5)
lengths = st.integers(1, 40)


def scored(windows: Windows) -> list[tuple[int, int, int]]:
    """(document, token, inputs in its context) of every scored target, in order."""
    rows = zip(windows.document, windows.start, windows.first, windows.stop, strict=True)
    return [(int(d), int(at + place + 1), place + 1) for d, at, first, stop in rows for place in range(first, stop)]


def every_target(sizes: list[int]) -> list[tuple[int, int]]:
    return [(document, token) for document, size in enumerate(sizes) for token in range(1, size)]


@given(documents, lengths)
@settings(deadline=None)
def test_blocks_score_every_target_once_with_what_is_before_it_in_its_block(sizes, length):
    found = scored(blocks(sizes, length))
    assert [each[:2] for each in found] == every_target(sizes)
    assert all(context == (token - 1) % length + 1 for _, token, context in found)


@given(documents, lengths, st.data())
@settings(deadline=None)
def test_sliding_scores_every_target_once_with_a_context_of_at_least_length_minus_stride(sizes, length, data):
    stride = data.draw(st.integers(1, length))
    windows = sliding(sizes, length, stride)
    found = scored(windows)
    assert [each[:2] for each in found] == every_target(sizes)
    for _, token, context in found:
        assert context == token if token <= length else length - stride < context <= length
    assert (windows.start % stride == 0).all()
    assert all(np.all(np.diff(windows.start[windows.document == each]) == stride) for each in range(len(sizes)))


@given(documents, lengths)
@settings(deadline=None)
def test_a_stride_of_one_gives_every_target_past_the_first_window_the_whole_length(sizes, length):
    assert all(context == min(token, length) for _, token, context in scored(sliding(sizes, length, 1)))


@given(st.data())
@settings(deadline=None)
def test_targets_are_the_same_at_every_length_and_none_is_scored_twice(data):
    asked = sorted(data.draw(st.lists(lengths, min_size=1, max_size=4, unique=True)))
    longest = asked[-1]
    sizes = data.draw(st.lists(st.integers(longest + 1, longest + 90), min_size=1, max_size=4))
    last_k = data.draw(st.integers(1, asked[0]))
    spacing = data.draw(st.integers(last_k, last_k + 30))
    found = {each: targets(sizes, each, longest=longest, spacing=spacing, last_k=last_k) for each in asked}
    ends = [(document, end) for document, size in enumerate(sizes) for end in range(longest, size, spacing)]
    expected = [(document, end - back) for document, end in ends for back in reversed(range(last_k))]
    for length, windows in found.items():
        kept = scored(windows)
        assert [each[:2] for each in kept] == expected
        assert len(set(expected)) == len(expected)
        assert all(length - last_k < context <= length for *_, context in kept)
        assert (windows.start >= 0).all()
        assert (windows.start + length < np.asarray(sizes)[windows.document]).all()


@pytest.mark.parametrize(
    "size, length, stride, count", [(10, 4, 2, 4), (9, 4, 4, 2), (1000, 256, 64, 13), (5, 8, 8, 1)]
)
def test_windows_are_counted_by_hand(size, length, stride, count):
    windows = sliding([size], length, stride)
    assert len(windows) == count
    assert int((windows.stop - windows.first).sum()) == size - 1


def test_a_slice_keeps_the_rows_and_the_length():
    windows = sliding([20, 9], 4, 2)[1:3]
    assert (windows.length, len(windows)) == (4, 2)
    assert (windows.start.tolist(), windows.first.tolist(), windows.stop.tolist()) == ([2, 4], [2, 2], [4, 4])
