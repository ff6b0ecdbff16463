# tests: wings/preparation/cleaning/cleaner.py, wings/preparation/cleaning/leaks.py
# tests: wings/preparation/cleaning/near_duplicates.py, wings/preparation/cleaning/normalization.py
"""Tests cleaning of documents and its counts."""

import pytest

from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation.cleaning import leaks, near_duplicates, normalization
from lingvo_gshard.wings.preparation.cleaning.leaks import DocumentCleaner


def clean(texts, split="train", **values):
    cleaner = DocumentCleaner.params().set(**values).instantiate()
    rows, report = cleaner.clean([Row("", "", text) for text in texts], split)
    return [row.target for row in rows], report


def test_lines_are_normalized_and_not_joined():
    texts, report = clean(["\n a  b \n\n\nc\x07\n", "e\u0301"])
    assert texts == ["a b\n\nc", "\u00e9"]
    assert report.rewritten[normalization.REWRITTEN_NFC] == 1
    assert report.rewritten[normalization.REWRITTEN_CONTROL] == 1
    assert report.rewritten[normalization.REWRITTEN_SPACE] > 0


def test_dropped_documents_are_counted():
    texts = ["abc", " ", "a", "abc ", "abcdefgh"]
    kept, report = clean(texts, min_characters=2, max_characters=5)
    assert kept == ["abc"]
    assert report.dropped == {
        leaks.EMPTY: 1,
        leaks.SHORT: 1,
        near_duplicates.DUPLICATE: 1,
        leaks.LONG: 1,
    }
    assert report.read == 5 and report.kept == 1


def test_duplicates_can_be_allowed_and_held_out_documents_are_never_dropped():
    assert clean(["a", "a"], drop_duplicates=False)[0] == ["a", "a"]
    assert clean(["a", "a", "", "b"], "test", min_characters=5)[0] == ["a", "a", "b"]


def test_rejects_empty_size_ranges():
    with pytest.raises(ValueError, match="input.cleaning.min_characters.*not 3 with"):
        clean([], min_characters=3, max_characters=2)


def test_documents_are_in_the_language_of_the_setting_or_of_the_row():
    rows = [Row("ru", "", "Open the file"), Row("", "", "Откройте файл")]
    reason = "the text is not in a script of its language"
    for language, kept in (("", rows[1:]), ("en", rows[:1])):
        cleaner = DocumentCleaner.params().set(language=language).instantiate()
        assert cleaner.clean(rows, "train")[0] == kept
        assert cleaner.clean(rows, "train")[1].dropped == {reason: 1}


def test_documents_have_one_side_only():
    assert clean(["a <b>", "c"], markup="drop")[0] == ["c"]
    with pytest.raises(ValueError, match="markup is 'equal'; expected 'keep' or 'drop'"):
        clean([], markup="equal")
