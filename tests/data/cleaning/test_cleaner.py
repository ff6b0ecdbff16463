"""Tests cleaning: each reason by example, and the counts."""

import unicodedata

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.data.cleaning import duplicates, normalization
from lingvo_gshard.data.cleaning.cleaner import Cleaner
from lingvo_gshard.data.cleaning.rules import all_rules
from lingvo_gshard.data.sources.row import Row


def cleaner(**values):
    return Cleaner.params().set(**values).instantiate()


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("", "Yes", all_rules.EMPTY),
        ("Ja", " \x00\u200b ", all_rules.EMPTY),
        ("a", "Yes", all_rules.SHORT),
        ("Ja" * 30, "Yes" * 20, all_rules.LONG),
        ("Ja", "Yes, of course", all_rules.RATIO),
        ("Berlin", "BERLIN", all_rules.IDENTICAL),
    ],
)
def test_reasons(source, target, reason):
    c = cleaner(min_characters=2, max_characters=50, max_length_ratio=5.0)
    kept, report = c.clean([Row("de", source, target)], "train")
    assert (kept, report.dropped, report.read, report.kept) == ([], {reason: 1}, 1, 0)


def test_duplicates_are_detected_after_normalization_within_a_language():
    rows = [
        Row("de", "schön", "fine", "f", 1),
        Row("de", "scho\u0308n", " fine", "f", 2),
        Row("nds", "schön", "fine", "f", 3),
    ]
    kept, report = cleaner().clean(rows, "train")
    assert [row.line for row in kept] == [1, 3]
    assert report.dropped == {duplicates.REASON: 1}
    assert report.rewritten == {normalization.REWRITTEN_NFC: 1, normalization.REWRITTEN_SPACE: 1}


def test_switches():
    rows = [Row("de", "Berlin", "berlin")] * 2
    kept, _ = cleaner(drop_duplicates=False, drop_identical=False).clean(rows, "train")
    assert len(kept) == 2


def test_held_out_rows_are_normalized_but_never_dropped():
    rows = [Row("de", "Berlin\u00a0", "Berlin")] * 2 + [Row("de", "", "x")]
    kept, report = cleaner(max_characters=3).clean(rows, "test")
    assert [row[:3] for row in kept] == [("de", "Berlin", "Berlin")] * 2
    assert report.dropped == {all_rules.EMPTY: 1}


def test_zero_width_joiners_are_preserved():
    persian, hindi = "می\u200cخواهم", "क्\u200dष"
    assert normalization.Normalizer()(persian) == persian
    assert normalization.Normalizer()(hindi) == unicodedata.normalize("NFC", hindi)
    assert normalization.Normalizer()("a\u00adb\tc\ufeff") == "ab c"


def _normal_by_definition(text):
    """Normalizes character by character, without the shortcuts of Normalizer."""
    kept = []
    for character in unicodedata.normalize("NFC", text):
        category = unicodedata.category(character)
        if category == "Cc":
            kept.append(" ")
        elif category != "Cf" or character in "\u200c\u200d":
            kept.append(character)
    return unicodedata.normalize("NFC", " ".join("".join(kept).split()))


@hypothesis.given(st.text() | st.text("a \u00ad\u200b\u200d\t\u0301\u3000\u0085", max_size=8))
def test_unicode_is_normalized(text):
    normal = normalization.Normalizer()(text)
    assert normal == _normal_by_definition(text)
    assert unicodedata.normalize("NFC", normal) == normal
    assert normalization.Normalizer()(normal) == normal
    assert normal == " ".join(normal.split())
    assert not any(unicodedata.category(c) == "Cc" for c in normal)


@hypothesis.given(
    st.lists(
        st.builds(
            Row,
            st.sampled_from(["de", "fr"]),
            st.text(max_size=12),
            st.text("abC \u0301\x00", max_size=12),
        ),
        max_size=40,
    ),
    st.sampled_from(["train", "dev"]),
)
def test_counts_add_up(rows, split):
    kept, report = cleaner(max_characters=8, max_length_ratio=3.0).clean(rows, split)
    assert report.read == len(rows)
    assert report.kept == len(kept) == report.read - report.dropped.total()
    table = dict(report.to_table())
    dropped = sum(n for what, n in table.items() if what.startswith("dropped: "))
    assert table["read"] == table["kept"] + dropped


@pytest.mark.parametrize(
    "values",
    [{"min_characters": 0}, {"min_characters": 9, "max_characters": 8}, {"max_length_ratio": 0.5}],
)
def test_option_errors(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        cleaner(**values)


# Letters, marks of several classes, letters that are marks when decomposed, and Hangul.
_COMPOSED = "ae é\u1ed7\u0301\u0323\u0327\u0344\u0f73\u1100\u1161\u11a8\ud55c\u05b0\u05bc"


@hypothesis.given(st.text(_COMPOSED, max_size=40))
def test_marks_of_long_texts_are_composed_as_unicode_says(text):
    repeated = text * (normalization._MANY_CHARACTERS // max(len(text), 1) + 2)
    assert normalization._composed(repeated) == unicodedata.normalize("NFC", repeated)
