"""Tests the table of letters, their traits, and the validation of layouts."""

import pytest

from lingvo_gshard.core import letters
from lingvo_gshard.core.letters import LETTERS, check_layout


def test_every_letter_has_a_meaning():
    assert set(LETTERS) == set("BLKGSTECMHUNDVRPW")
    meanings = [letter.meaning for letter in LETTERS.values()]
    assert all(meanings) and len(set(meanings)) == len(LETTERS)


def test_traits_select_letters():
    assert (letters.ROWS, letters.POSITIONS, letters.HIDDEN) == ("BG", "LK", "H")
    assert (letters.STACKS, letters.WEIGHT_BATCH) == ("RP", "EURP")
    assert set(letters.TOKENS) == set("BLKGSTC") and set(letters.INNER) == set("HNV")


@pytest.mark.parametrize(("layout", "rank"), [("GSEC", 4), ("", 0), ("BLM", None), ("BrM", 3)])
def test_accepts_valid_layouts(layout, rank):
    check_layout(layout, rank)


@pytest.mark.parametrize(
    ("layout", "rank", "message"),
    [
        ("GSE", 4, "'GSE' has 3 letters for a tensor of rank 4"),
        ("GXE", 3, "'X' names no dimension. Valid: "),
        ("GSG", 3, "'GSG' repeats the letter 'G'"),
    ],
)
def test_rejects_invalid_layouts(layout, rank, message):
    with pytest.raises(ValueError, match=message):
        check_layout(layout, rank)


def test_dimensions_without_a_name_may_be_repeated():
    letters.check_layout("B___", 4)
    with pytest.raises(ValueError, match="every dimension needs a letter"):
        letters.check_layout("B_", 2, may_be_unnamed=False)
    with pytest.raises(ValueError, match="4 letters for a tensor of rank 3"):
        letters.check_layout("B___", 3)
