"""The letters: which there are, and layouts made of them."""

import pytest

from lingvo_gshard.sharding.letters import LETTERS, check_layout


def test_letters_are_single_capitals_with_a_meaning():
    assert set(LETTERS) == set("BLKGSECMHNDVRPW")
    assert all(LETTERS.values())
    assert len(set(LETTERS.values())) == len(LETTERS)


@pytest.mark.parametrize(("layout", "rank"), [("GSEC", 4), ("", 0), ("BLM", None)])
def test_good_layouts_pass(layout, rank):
    check_layout(layout, rank)


@pytest.mark.parametrize(
    ("layout", "rank", "message"),
    [
        ("GSE", 4, "'GSE' has 3 letters for a tensor of rank 4"),
        ("GXE", 3, "'X' names no dimension. Valid: "),
        ("GSG", 3, "letter 'G' stands more than once"),
    ],
)
def test_bad_layouts_are_refused(layout, rank, message):
    with pytest.raises(ValueError, match=message):
        check_layout(layout, rank)
