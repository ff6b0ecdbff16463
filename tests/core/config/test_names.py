"""The nearest valid name."""

from lingvo_gshard.core.config import names


def test_a_near_miss_is_named():
    assert names.nearest("learning_rat", ["steps", "learning_rate"]) == (
        "Did you mean 'learning_rate'?"
    )


def test_otherwise_the_valid_names_are_listed():
    assert names.nearest("zzz", ["b", "a"]) == "Valid: a, b."
    assert names.nearest("zzz", []) == "There are none."


def test_a_long_list_is_cut():
    sentence = names.nearest("zzz", [f"name_{i:03d}" for i in range(100)])
    assert sentence.endswith(" and 60 more.") and len(sentence) < 500
