"""Tests suggestions of the nearest valid name."""

from lingvo_gshard.core.config import names


def test_suggests_the_nearest_name():
    assert names.nearest("learning_rat", ["steps", "learning_rate"]) == (
        "Did you mean 'learning_rate'?"
    )


def test_lists_the_valid_names_if_none_is_near():
    assert names.nearest("zzz", ["b", "a"]) == "Valid: a, b."
    assert names.nearest("zzz", []) == "There are none."


def test_long_lists_are_truncated():
    sentence = names.nearest("zzz", [f"name_{i:03d}" for i in range(100)])
    assert sentence.endswith(" and 60 more.") and len(sentence) < 500
