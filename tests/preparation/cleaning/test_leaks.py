"""Tests leaks between splits, against a search that compares all texts."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from lingvo_gshard.data.held_out import fold
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation.cleaning.leaks import (
    SOURCE_IN_TRAIN,
    TARGET_OVERLAPS,
    hashes_of,
    reasons,
    reasons_against,
)

_TEXT = st.lists(st.sampled_from("the a red green cat 3 sees STRASSE".split()), max_size=8)
_ROWS = st.lists(
    st.builds(
        lambda language, source, target: Row(language, " ".join(source), " ".join(target)),
        st.sampled_from(["de", "fr"]),
        _TEXT,
        _TEXT,
    ),
    max_size=30,
)


def four_grams(text):
    words = fold(text).split()
    return {tuple(words[i : i + 4]) for i in range(len(words) - 3)}


def expected(row, train):
    sources = {(other.language, fold(other.source)) for other in train if other.source}
    if row.source and (row.language, fold(row.source)) in sources:
        return SOURCE_IN_TRAIN
    seen = set().union(*(four_grams(other.target) for other in train))
    grams = four_grams(row.target)
    return TARGET_OVERLAPS if grams and 2 * len(grams & seen) >= len(grams) else ""


@hypothesis.given(_ROWS, _ROWS, st.integers(0, 30), st.integers(0, 30))
def test_parts_in_any_order_find_what_comparing_all_finds(train, held_out, cut, train_cut):
    wanted = np.union1d(hashes_of(held_out[cut:]), hashes_of(held_out[:cut]))
    assert np.array_equal(wanted, hashes_of(held_out))
    in_train = np.union1d(hashes_of(train[train_cut:]), hashes_of(train[:train_cut]))
    found = np.intersect1d(wanted, in_train)
    by_hand = [expected(row, train) for row in held_out]
    assert reasons_against(held_out, found) == by_hand == reasons(train, held_out)


def test_no_rows():
    row = Row("de", "a", "b c d e")
    assert len(hashes_of([])) == 0
    assert reasons([row], []) == [] and reasons([], [row]) == [""]
