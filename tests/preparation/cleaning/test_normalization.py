"""Tests the normal form of texts, against definitions that go character by character."""

import collections
import unicodedata

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.wings.preparation.cleaning import normalization
from lingvo_gshard.wings.preparation.cleaning.cleaner import Cleaner


def test_zero_width_joiners_are_preserved():
    persian, hindi = "می\u200cخواهم", "क्\u200dष"
    assert normalization.Normalizer()(persian) == persian
    assert normalization.Normalizer()(hindi) == unicodedata.normalize("NFC", hindi)
    assert normalization.Normalizer()("a\u00adb\tc\ufeff") == "ab c"


def _normal_by_definition(text, form="NFC"):
    """Normalizes character by character, without the shortcuts of Normalizer."""
    kept = []
    for character in unicodedata.normalize(form, text):
        category = unicodedata.category(character)
        if category == "Cc":
            kept.append(" ")
        elif category != "Cf" or character in "\u200c\u200d":
            kept.append(character)
    return unicodedata.normalize(form, " ".join("".join(kept).split()))


@hypothesis.given(st.text() | st.text("a \u00ad\u200b\u200d\t\u0301\u3000\u0085", max_size=8))
def test_unicode_is_normalized(text):
    normal = normalization.Normalizer()(text)
    assert normal == _normal_by_definition(text)
    assert unicodedata.normalize("NFC", normal) == normal
    assert normalization.Normalizer()(normal) == normal
    assert normal == " ".join(normal.split())
    assert not any(unicodedata.category(c) == "Cc" for c in normal)


# Letters, marks of several classes, letters that are marks when decomposed, and Hangul.
_COMPOSED = "ae é\u1ed7\u0301\u0323\u0327\u0344\u0f73\u1100\u1161\u11a8\ud55c\u05b0\u05bc"


@hypothesis.given(st.text(_COMPOSED, max_size=40))
def test_marks_of_long_texts_are_composed_as_unicode_says(text):
    repeated = text * (normalization._MANY_CHARACTERS // max(len(text), 1) + 2)
    assert normalization._composed(repeated) == unicodedata.normalize("NFC", repeated)


@hypothesis.given(st.text() | st.text("ａ１ﬁ①e\u0301\u3000\u00ad", max_size=8))
def test_nfkc_also_replaces_compatible_characters(text):
    counts = collections.Counter()
    normal = normalization.Normalizer(counts, "NFKC")(text)
    assert unicodedata.is_normalized("NFKC", normal)
    assert normal == _normal_by_definition(text, "NFKC")
    assert bool(counts) == (normal != text)


_NON_JOINER, _JOINER = "\u200c", "\u200d"


@pytest.mark.parametrize(
    "text",
    [
        f"می{_NON_JOINER}خواهم",
        f"क्{_JOINER}ष",
        f"ක්{_JOINER}ර",
        f"👩{_JOINER}👧",
        f"❤\ufe0f{_JOINER}🔥",
        f"من\u064b{_NON_JOINER}ا",
    ],
)
def test_joiners_stay_where_they_join(text):
    assert normalization.Normalizer(drop_stray_joiners=True)(text) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"a{_JOINER}b", "ab"),
        (f"{_NON_JOINER}word{_NON_JOINER}{_JOINER}", "word"),
        (f"слово {_JOINER}два", "слово два"),
        (f"👩{_NON_JOINER}x", "👩x"),
        (f"e{_JOINER}\u0301", "é"),
    ],
)
def test_stray_joiners_are_taken_out(text, clean):
    counts = collections.Counter()
    assert normalization.Normalizer(counts, drop_stray_joiners=True)(text) == clean
    assert counts[normalization.REWRITTEN_JOINERS] == 1
    assert normalization.Normalizer()(text) != clean


@hypothesis.given(st.text(f"aб中ي\u0915\u094d👩\u0301 {_NON_JOINER}{_JOINER}", max_size=12))
def test_taking_out_stray_joiners_twice_changes_nothing(text):
    normal = normalization.Normalizer(drop_stray_joiners=True)
    assert normal(normal(text)) == normal(text)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="unicode_form is 'nfkc'; expected 'NFC' or 'NFKC'"):
        Cleaner.params().set(unicode_form="nfkc")
