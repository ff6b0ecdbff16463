# tests: data/batching/packing.py
"""Tests RowFiller: nothing is lost, rows hold their pieces, none waits forever, rows are full."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from lingvo_gshard.data.batching.packing import RowFiller

K, L = 24, 12


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, K), st.integers(1, L)), max_size=60),
    st.integers(0, 20),
    st.integers(0, 4),
)
def test_each_piece_is_in_one_row_that_holds_it(lengths, left, most):
    filler, lengths = RowFiller(K, L, most), np.array(lengths, np.int64).reshape(-1, 2)
    rows = []
    for begin in range(0, len(lengths), 20):
        part = lengths[begin : begin + 20]
        filler.add(np.arange(begin, begin + len(part)), part)
        rows += filler.fill(left)
        assert len(filler) <= left
    rows += filler.fill()
    assert len(filler) == 0
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    for row in rows:
        assert (lengths[row].sum(axis=0) <= (K, L)).all()
        assert len(row) <= (most or len(lengths))


def test_no_piece_waits_forever():
    """A piece that fits badly is the oldest at some time, and then begins a row."""
    filler, waited = RowFiller(K, L), 0
    filler.add(np.array([0]), np.array([[K, 1]]))
    for number in range(1, 1000, 10):
        filler.add(np.arange(number, number + 10), np.full((10, 2), (2, 1)))
        rows = filler.fill(5)
        waited += 1
        if any(0 in row for row in rows):
            break
    assert waited == 1


def test_rows_are_fuller_than_by_first_fit():
    """Both sides of rows of 128 become full, though ratios differ between languages."""
    rng = np.random.default_rng(0)
    source = np.clip(rng.lognormal(3.2, 0.7, 20_000), 2, 128).astype(np.int64)
    ratio = rng.choice([0.3, 0.5, 0.8], 20_000)
    target = np.clip(source * ratio * rng.lognormal(0, 0.2, 20_000), 1, 68).astype(np.int64)
    lengths = np.stack([source, target], axis=1)
    target_length = round(128 * target.sum() / source.sum())
    lengths = lengths[lengths[:, 1] <= target_length]
    filler, rows = RowFiller(128, target_length), []
    for begin in range(0, len(lengths), 5_000):
        part = lengths[begin : begin + 5_000]
        filler.add(np.arange(begin, begin + len(part)), part)
        rows += filler.fill(5_000)
    used = lengths[[number for row in rows for number in row]].sum()
    assert used / (len(rows) * (128 + target_length)) > 0.97
