"""Tests that dividing rows into splits leaks nothing from dev and test into train."""

import hypothesis
from hypothesis import strategies as st

from lingvo_gshard.data import held_out
from lingvo_gshard.data.held_out import fold
from lingvo_gshard.data.sources.row import Row

_WORDS = st.lists(st.sampled_from("the a red green cat 3 sees STRASSE straße".split()), max_size=8)
_ROWS = st.lists(
    st.builds(
        lambda language, source, target, end: Row(language, " ".join(source), target + end),
        st.sampled_from(["de", "fr"]),
        _WORDS,
        _WORDS.map(" ".join),
        st.sampled_from(["", ".", " 3", "!!"]),
    ),
    max_size=120,
)


def four_grams(text):
    words = fold(text).split()
    return {" ".join(words[i : i + 4]) for i in range(len(words) - 3)}


@hypothesis.given(_ROWS)
def test_rows_are_divided_into_splits(rows):
    split = held_out.divide(rows, 200)
    kept = [row for part in split.rows.values() for row in part]
    dropped = sum(sum(counts.values()) for counts in split.dropped.values())
    assert len(kept) + dropped == len(rows)
    assert set(kept) <= set(rows)
    train = split.rows["train"]
    seen = set().union(*(four_grams(row.target) for row in train))
    for row in split.rows["dev"] + split.rows["test"]:
        assert all(fold(row.target) != fold(other.target) for other in train)
        for other in train:
            same = fold(row.source) == fold(other.source)
            # Rows of plain text have no source, which two of them may share.
            assert not (row.source and same and row.language == other.language)
        grams = four_grams(row.target)
        assert not grams or len(grams & seen) / len(grams) < 0.5
    # Nothing is dropped without a reason.
    sources = {(row.language, fold(row.source)) for row in train if row.source}
    for row in set(rows) - set(kept):
        assert held_out.split_of(row.target, 200) in ("dev", "test")
        grams = four_grams(row.target)
        is_near = bool(grams) and len(grams & seen) / len(grams) >= 0.5
        assert is_near or (row.language, fold(row.source)) in sources


def test_near_copies_are_in_the_same_split():
    for per_mille in (10, 100, 400):
        copies = ("Open the 2 files.", "open the files", "OPEN: the (13) files!")
        assert len({held_out.split_of(text, per_mille) for text in copies}) == 1


def test_share_held_out():
    splits = [
        held_out.split_of(f"sentence {chr(97 + i % 26) * (i // 26 + 1)}", 100) for i in range(4000)
    ]
    assert abs(splits.count("test") - 400) < 80
    assert abs(splits.count("dev") - 400) < 80


def test_text_without_words_has_a_key():
    assert fold(" 12! ") == "12!"
