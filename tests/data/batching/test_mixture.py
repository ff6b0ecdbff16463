# tests: data/batching/mixture_plan.py, wings/preparation/mixing.py
"""Tests shares and the order of rows against formulas and plain loops."""

import collections
import math
import types

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lingvo_gshard.data.batching.mixture_plan import Mixture, PlannedBatch, whole_rows
from lingvo_gshard.data.batching.table import Group
from lingvo_gshard.wings.preparation.mixing import Shares, temperature_probabilities, uses


def _groups(**rows):
    """Groups named language_source."""
    begin, groups = 0, []
    for name, count in rows.items():
        language, _, source = name.partition("_")
        groups.append(Group(language, source or "all", begin, count, (count, count)))
        begin += count
    return groups


def _shares(**values):
    return Shares.params().set(**values).instantiate()


def _mixture(groups, block_rows=100, seed=3, steps=1.0, **values):
    shares = _shares(**values).by_block(groups, lambda _: steps)
    return Mixture(groups, shares, block_rows, seed)


def test_shares_follow_the_formula():
    groups = _groups(de_a=60_000, de_b=20_000, fr_a=10_000, sw_b=10)
    shares = _shares(
        temperature=5.0,
        language_weights=(("fr", 2.0),),
        source_weights=(("b", 3.0),),
        most_rows=50_000,
    ).at(0, groups)
    parts = {"de": 50_000**0.2, "fr": 2 * 10_000**0.2, "sw": 10**0.2}
    total = sum(parts.values())
    assert shares == pytest.approx(
        [parts["de"] / total / 2, parts["de"] / total / 2, parts["fr"] / total, parts["sw"] / total]
    )
    assert shares.sum() == pytest.approx(1)


def test_weights_of_zero_leave_groups_out():
    shares, groups = _shares(source_weights=(("a", 0),)), _groups(de_a=5, de_b=6, fr_a=7)
    assert [(g.language, g.source) for g in shares.used(groups)] == [("de", "b")]
    with pytest.raises(ValueError, match="leave out all rows"):
        _shares(language_weights=(("de", 0), ("fr", 0))).used(groups)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"language_weights": (("dee", 1),)}, "no language 'dee'.*'de'"),
        ({"source_weights": (("de", -1),)}, "the weight of 'de' must be 0 or more"),
        ({"source_weights": (1, 2)}, "a tuple of pairs was expected"),
        ({"temperature_schedule": ((5, 1), (5, 2))}, "ascending steps"),
        ({"temperature_schedule": ((0, 0.5),)}, "0.5 is below 1"),
        ({"temperature": 0.5}, "temperature is 0.5"),
    ],
)
def test_wrong_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        _shares(**values).used(_groups(de=5))


def test_the_temperature_changes_linearly_between_steps():
    shares = _shares(temperature_schedule=((100, 1), (300, 5), (400, 2)))
    groups = _groups(de=1000, fr=10)
    for step, temperature in ((0, 1), (100, 1), (150, 2), (300, 5), (350, 3.5), (400, 2), (999, 2)):
        constant = _shares(temperature=float(temperature)).at(0, groups)
        assert shares.at(step, groups) == pytest.approx(constant)


def test_a_group_goes_through_all_rows_before_any_is_repeated():
    groups = _groups(de=5_000, fr_a=70, fr_b=30)
    mixture = _mixture(groups, temperature=2.0)
    rows = np.concatenate([mixture.block(number) for number in range(208)])
    for group in groups:
        own = rows[(rows >= group.begin) & (rows < group.begin + group.rows)]
        counts = collections.Counter(own.tolist())
        assert set(counts.values()) <= {len(own) // group.rows, len(own) // group.rows + 1}
    expected = _shares(temperature=2.0).at(0, groups) * 20_800
    found = [((rows >= g.begin) & (rows < g.begin + g.rows)).sum() for g in groups]
    np.testing.assert_allclose(found, expected, atol=2)
    pieces = whole_rows(np.array([3, 5_099]), np.ones((2, 2), np.int64))
    batches = [PlannedBatch(0, pieces, np.array([0, 0]))]
    planner = types.SimpleNamespace(mixture=mixture, blocks=lambda begin: iter([batches]))
    found_uses = {use.language: (use.rows, use.read) for use in uses(planner, 208, 1)}
    assert found_uses == {"de": (5_000, found[0] + 1), "fr": (100, found[1] + found[2] + 1)}


def test_blocks_need_no_blocks_before():
    groups = _groups(de=5_000, fr=100)
    schedule = ((0, 1.0), (40, 5.0))
    first = _mixture(groups, temperature_schedule=schedule)
    in_order = [first.block(number) for number in range(100)]
    for number in (99, 3, 57, 39, 41, 0):
        fresh = _mixture(groups, temperature_schedule=schedule)
        np.testing.assert_array_equal(fresh.block(number), in_order[number])
    assert not np.array_equal(_mixture(groups, seed=4).block(0), _mixture(groups).block(0))


def test_blocks_follow_the_schedule_by_estimated_steps():
    """The rows before a block are the sum of what a loop over all blocks draws."""
    groups = _groups(de=50_000, fr=100)
    schedule = ((20, 1.0), (60, 5.0))
    mixture = _mixture(groups, steps=2.0, temperature_schedule=schedule)
    shares, expected = _shares(temperature_schedule=schedule), np.zeros(2)
    for number in range(200):
        np.testing.assert_allclose(mixture.drawn(number), expected, atol=1)
        expected += 100 * shares.at(2.0 * number, groups)


def test_positions_are_exact_far_into_the_stream():
    mixture = _mixture(_groups(de=10**9, fr=10**6), block_rows=8192, temperature=2.0)
    far = 10**8
    assert len(mixture.block(far)) in range(8190, 8195)
    total = mixture.drawn(far).sum()
    assert abs(total - far * 8192) / (far * 8192) < 1e-9


def test_hundreds_of_millions_of_rows_take_no_memory():
    """One block of a language of 500 million rows: distinct rows, all over the language."""
    mixture = _mixture(_groups(de=500_000_000), block_rows=8192)
    rows = mixture.block(7)
    assert len(set(rows.tolist())) == 8192
    counts = np.bincount(rows // 50_000_000, minlength=10)
    # Chi-squared with 9 degrees of freedom exceeds 30 with probability 0.0005.
    assert ((counts - 819.2) ** 2 / 819.2).sum() < 30


@hypothesis.given(
    st.lists(st.integers(1, 10**7), min_size=1, max_size=20),
    st.sampled_from([1.0, 1.5, 5.0, 100.0, math.inf]),
)
def test_probabilities_follow_the_formula(counts, temperature):
    expected = [n ** (1 / temperature) for n in counts]
    expected = np.array(expected) / sum(expected)
    actual = temperature_probabilities(counts, temperature)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    if temperature < math.inf:
        groups = _groups(**{f"l{index:02d}": count for index, count in enumerate(counts)})
        shares = _shares(temperature=temperature).at(0, groups)
        np.testing.assert_allclose(shares, expected, rtol=1e-9)


def test_probability_errors():
    with pytest.raises(ValueError, match="temperature must be at least 1, not 0.5"):
        temperature_probabilities([1, 2], 0.5)
    with pytest.raises(ValueError, match="temperature"):
        temperature_probabilities([1, 2], math.nan)
    for counts in ([], [1, 0]):
        with pytest.raises(ValueError, match="at least one sentence"):
            temperature_probabilities(counts, 1.0)
