"""Every number of `stats` against another way to it: enumeration, a plain loop, a closed form, scipy, simulation."""

import itertools
import math
import statistics

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_ablation import stats


def sample(top, bottom=None, resamples=stats.RESAMPLES, first=0) -> stats.Sample:
    """Seeds `first`, ... and documents "d0", ...; a bottom of ones makes values means of sums."""
    top = np.asarray(top, np.float64)
    bottom = np.ones_like(top) if bottom is None else np.broadcast_to(np.asarray(bottom, np.float64), top.shape)
    seeds = tuple(range(first, first + len(top)))
    return stats.Sample(seeds, tuple(f"d{at}" for at in range(top.shape[1])), top, bottom, resamples)


def noisy(seeds, documents, rng=None, seed_sd=0.1, document_sd=0.2, shift=0.0):
    """top, bottom [S,D] of a metric whose true value is 2 + shift, and the two parts that arms share."""
    rng = rng or np.random.default_rng(0)
    bottom = np.broadcast_to(rng.integers(50, 150, documents).astype(float), (seeds, documents))
    common = rng.normal(0, seed_sd, (seeds, 1)) + rng.normal(0, document_sd, documents)
    own = rng.normal(0, 0.1, (2, seeds, documents))
    return [bottom * (2 + extra + common + each) for extra, each in zip((0.0, shift), own, strict=True)], bottom


def test_moments_are_the_samples():
    values = [2.0, 2.3, 2.9]
    found = stats.moments(np.array(values))
    assert found == (3, pytest.approx(statistics.mean(values)), pytest.approx(statistics.stdev(values)))
    assert stats.moments(np.array([2.0])) == (1, 2.0, pytest.approx(math.nan, nan_ok=True))
    assert math.isnan(stats.moments(np.array([1.0, math.inf])).sd)


def test_a_value_is_a_ratio_of_sums_not_a_mean_of_ratios():
    found = sample([[1.0, 30.0], [2.0, 40.0]], [1.0, 10.0])
    assert found.values.tolist() == pytest.approx([31 / 11, 42 / 11])
    assert stats.interval(found).mean == pytest.approx(73 / 22)


def test_replicates_have_the_distribution_of_all_resamples_enumerated():
    """2 seeds, 3 documents: 4 x 27 equally likely resamples, every one computed from its indices."""
    top, bottom = np.array([[1.0, 5.0, 3.0], [2.0, 9.0, 4.0]]), np.array([1.0, 2.0, 4.0])
    every = [
        np.mean([top[seed, list(documents)].sum() / bottom[list(documents)].sum() for seed in seeds])
        for seeds in itertools.product(range(2), repeat=2)
        for documents in itertools.product(range(3), repeat=3)
    ]
    found = sample(top, bottom, 40000)
    means = (stats._draws(stats._SEEDS, 2, 40000) * found.replicates).mean(axis=1)
    for value in every:
        share = np.mean([math.isclose(value, each) for each in every])
        assert np.isclose(means, value).mean() == pytest.approx(share, abs=0.01)
    got = stats.interval(found)
    assert (got.low, got.high) == pytest.approx(np.quantile(every, [0.025, 0.975], method="inverted_cdf"), abs=1e-9)


def test_replicates_equal_a_loop_that_repeats_documents_and_seeds():
    (top, _), bottom = noisy(4, 7)
    found, draws = sample(top, bottom, 50), [stats._draws(kind, count, 50) for kind, count in ((1, 4), (2, 7))]
    looped = []
    for seeds, documents in zip(*draws, strict=True):
        assert (seeds.sum(), documents.sum()) == (4, 7)
        picked = np.repeat(np.arange(7), documents)
        ratios = [top[seed, picked].sum() / bottom[seed, picked].sum() for seed in np.repeat(np.arange(4), seeds)]
        looped.append(statistics.mean(ratios))
    got = stats.interval(found)
    assert (got.low, got.high) == pytest.approx(np.quantile(looped, [0.025, 0.975]), rel=1e-12)


def test_the_interval_agrees_with_another_generators_index_by_index_bootstrap():
    (top, _), bottom = noisy(5, 30)
    rng, means = np.random.default_rng(7), []
    for _ in range(6000):
        seeds, documents = rng.integers(0, 5, 5), rng.integers(0, 30, 30)
        drawn = np.ix_(seeds, documents)
        means.append((top[drawn].sum(axis=1) / bottom[drawn].sum(axis=1)).mean())
    got = stats.interval(sample(top, bottom))
    low, high = np.quantile(means, [0.025, 0.975])
    assert (got.low, got.high) == pytest.approx((low, high), abs=0.08 * (high - low))


def test_documents_of_one_seed_have_the_variance_of_a_mean():
    values = np.arange(10.0)
    replicates = sample([values], resamples=40000).replicates[:, 0]
    assert replicates.var() == pytest.approx(values.var() / 10, rel=0.03)


def test_pieces_of_a_large_product_are_put_together():
    drawn, sums = stats._draws(stats._DOCUMENTS, 50, 200), np.random.default_rng(0).normal(size=(50, 3))
    pieces = stats._weighted(np.tile(drawn, (1, 2000)), np.tile(sums, (2000, 1)))  # 100,000 documents: 41 rows a piece
    np.testing.assert_allclose(pieces, 2000 * (drawn.astype(float) @ sums), rtol=1e-9, atol=1e-6)


def test_the_same_interval_every_time():
    (top, _), bottom = noisy(3, 20)
    first = stats.interval(sample(top, bottom))
    stats._draws.cache_clear()
    assert stats.interval(sample(top, bottom)) == first
    assert first.low < first.mean < first.high


def coverage(seeds, documents, repeats, **noise) -> tuple[float, float]:
    """How often the true value 2 and the true difference 0.05 lie in their intervals."""
    rng, hits = np.random.default_rng(1), np.zeros(2)
    for _ in range(repeats):
        (one, other), bottom = noisy(seeds, documents, rng, shift=0.05, **noise)
        a, b = sample(one, bottom, 400), sample(other, bottom, 400)
        level, gap = stats.interval(a), stats.difference(b, a)
        hits += [level.low <= 2 <= level.high, gap.low <= 0.05 <= gap.high]
    return tuple(hits / repeats)


def test_coverage_of_many_seeds_and_documents():
    level, gap = coverage(20, 50, 300)
    assert 0.90 <= level <= 0.98
    assert 0.93 <= gap <= 1.0  # both draws count what a seed does on a document: wide where that is all there is


def test_three_seeds_are_too_few_and_the_docstring_says_how_much():
    level, _ = coverage(3, 50, 400, seed_sd=0.3, document_sd=0.05)
    assert 0.68 <= level <= 0.82
    assert "covers about 75 %" in stats.__doc__


@pytest.mark.parametrize(
    "shape, said",
    [((3, 5), "seeds and documents"), ((1, 5), "documents only"), ((3, 1), "seeds only"), ((1, 1), "nothing")],
)
def test_an_interval_says_what_it_is_over(shape, said):
    (top, _), bottom = noisy(*shape)
    found = stats.interval(sample(top, bottom))
    assert found.over == said
    if said == "nothing":
        assert math.isnan(found.low) and math.isnan(found.high)
    else:
        assert found.low < found.mean < found.high


def test_one_seed_resamples_documents_and_one_document_seeds():
    values = np.array([1.0, 2.0, 4.0, 8.0])
    along = stats.interval(sample([values]))
    across = stats.interval(sample(values[:, None]))
    assert along[:2] == pytest.approx((3.75, 1.5), abs=0.3) and across[0] == 3.75
    assert (along.low, along.high) == pytest.approx((across.low, across.high), abs=0.3)


def test_pairing_takes_out_what_two_arms_share():
    (one, other), bottom = noisy(5, 40, seed_sd=0.5, document_sd=1.0, shift=0.05)
    a, b = sample(one, bottom), sample(other, bottom)
    gap = stats.difference(b, a)
    assert gap.by_seed.tolist() == pytest.approx((b.values - a.values).tolist())
    assert gap.mean == pytest.approx(b.values.mean() - a.values.mean())
    assert 0 < gap.low < 0.05 < gap.high
    assert gap.high - gap.low < 0.1 * (stats.interval(a).high - stats.interval(a).low)
    back = stats.difference(a, b)
    assert (back.low, back.high) == pytest.approx((-gap.high, -gap.low))
    assert stats.difference(a, a)[:3] == (0, 0, 0)


def test_what_is_not_paired_is_refused_with_both_lists():
    one = sample(np.ones((2, 2)))
    with pytest.raises(stats.UnpairedError, match="not the same seeds, so nothing to pair: 0, 1 against 1, 2"):
        stats.difference(one, sample(np.ones((2, 2)), first=1))
    renamed = stats.Sample(one.seeds, ("d0", "x"), one.top, one.bottom)
    with pytest.raises(stats.UnpairedError, match="not the same documents, so nothing to pair: d0, d1 against d0, x"):
        stats.difference(one, renamed)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_number_that_is_not_finite_has_no_interval(bad):
    infinite, plain = sample([[1.0, bad], [1.0, 2.0]]), sample(np.ones((2, 2)))
    assert not infinite.finite and plain.finite
    found = stats.interval(infinite)
    assert math.isnan(found.low) and not math.isfinite(found.mean)
    assert all(math.isnan(each) for each in stats.difference(infinite, plain)[:3])


@pytest.mark.parametrize(
    "top, bottom, resamples, match",
    [
        (np.ones((2, 3)), np.ones((2, 2)), 10, r"bottom: shape \(2, 2\); expected \(2, 3\)"),
        (np.ones((2, 0)), np.ones((2, 0)), 10, "one at least"),
        (np.ones((2, 3)), np.zeros((2, 3)), 10, "without a scored target"),
        (np.ones((2, 3)), np.ones((2, 3)), 0, "resamples: 0; at least 1"),
    ],
)
def test_samples_that_are_none_are_refused(top, bottom, resamples, match):
    names = tuple(f"d{at}" for at in range(top.shape[1]))
    with pytest.raises(ValueError, match=match):
        stats.Sample((0, 1), names, top, bottom, resamples)


def test_paired_t_is_scipys():
    rng = np.random.default_rng(3)
    for n in (2, 3, 5, 12):
        one, other = rng.normal(0.3, 1, n), rng.normal(0, 1, n)
        expected: tuple[float, float] = scipy.stats.ttest_rel(one, other)  # type: ignore[assignment]
        assert stats.paired_t(one - other)[:2] == pytest.approx(tuple(expected))


def test_paired_t_by_hand():
    found = stats.paired_t(np.array([1.0, 2.0, 3.0]))  # t = 2 sqrt 3 with 2 degrees: p = 1 - t / sqrt(2 + t^2)
    assert found[:2] == pytest.approx((2 * math.sqrt(3), 1 - math.sqrt(12 / 14)))


@pytest.mark.parametrize("differences", [[0.5], [0.5, 0.5, 0.5], [0.0, 0.0], [1.0, math.inf], [0.3, 0.1 + 0.2, 0.3]])
def test_paired_t_without_spread_has_no_p(differences):
    found = stats.paired_t(np.array(differences))
    assert math.isnan(found.p) and found.note == f"no spread over seeds at n = {len(differences)}"


@given(st.lists(st.integers(-4, 4), min_size=6, max_size=9))
@settings(deadline=None, max_examples=60)
def test_sign_flip_counts_every_pattern(differences):
    """Integers, so that ties are exact; they are common here, and count as being as far from 0."""
    values = np.array(differences, np.float64)
    signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    expected = np.mean(np.abs((signs * values).sum(axis=1)) >= abs(values.sum()))
    found = stats.sign_flip(values * 0.1)
    assert (found.p, found.note) == (expected, "")
    assert found.statistic == pytest.approx(values.mean() * 0.1)


def test_sign_flip_is_scipys_permutation_test():
    values = np.random.default_rng(5).normal(0.5, 1, 8)
    expected = scipy.stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=False
    )
    assert stats.sign_flip(values).p == pytest.approx(expected.pvalue)


def test_the_smallest_p_of_a_sign_flip_halves_with_every_seed():
    assert [stats.sign_flip(np.arange(1.0, n + 1)).p for n in (6, 7, 10)] == [2 / 2**n for n in (6, 7, 10)]


@pytest.mark.parametrize("n", [1, 3, 5])
def test_too_few_seeds_for_a_sign_flip_give_no_p(n):
    found = stats.sign_flip(np.ones(n))
    assert math.isnan(found.p) and found.note == f"cannot reach .05 at n = {n}"


def test_too_many_seeds_to_enumerate_give_no_p():
    found = stats.sign_flip(np.ones(25))
    assert math.isnan(found.p) and "at most 24" in found.note
