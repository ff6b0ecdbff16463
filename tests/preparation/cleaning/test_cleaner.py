# tests: wings/preparation/cleaning/cleaner.py, wings/preparation/cleaning/all_rules.py
# tests: data/sources/row.py
"""Tests cleaning: each reason by example, and the counts."""

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.data.sources.report import CleaningReport
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation.cleaning import (
    all_rules,
    markup,
    near_duplicates,
    normalization,
)
from lingvo_gshard.wings.preparation.cleaning.cleaner import Cleaner
from lingvo_gshard.wings.preparation.cleaning.report_notes import about_limits, merge

_WRONG_SCRIPT = "is not in a script of its language"


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
    assert report.dropped == {near_duplicates.DUPLICATE: 1}
    assert report.rewritten == {normalization.REWRITTEN_NFC: 1, normalization.REWRITTEN_SPACE: 1}


@pytest.mark.parametrize(
    ("settings", "source", "target", "reason"),
    [
        ({}, "Hallo \ufffd", "Hello", all_rules.DAMAGED),
        ({}, "Привет", "Hello", "the source is not in a script of its language"),
        (
            {"target_language": "en"},
            "Hallo",
            "Привет",
            "the target is not in a script of its language",
        ),
        ({"markup": "equal"}, "<b>Ja</b>", "Yes", markup.MARKUP.unequal),
        ({"placeholders": "drop"}, "Hallo %s", "Hello %s", markup.PLACEHOLDERS.present),
    ],
)
def test_rules_that_can_be_switched_off(settings, source, target, reason):
    row = Row("de", source, target, "f", 7)
    _, report = cleaner(**settings).clean([row], "train")
    assert report.dropped == {reason: 1}
    assert report.examples == {reason: f"f:7: {source!r}"}
    off = {"drop_damaged": False, "max_foreign_letters": 1.0}
    assert cleaner(**off).clean([row], "train")[0] == [row]
    assert cleaner(**settings).clean([row], "test")[0] == [row]


def test_rows_one_by_one_are_those_in_memory():
    rows = [Row("de", f"Haus {i}", f"{'x' * i} house", "f", i) for i in range(40)]
    made = cleaner(max_characters=30)
    kept, whole = made.clean(rows, "train")
    parts, clean = [], []
    for part in (rows[:17], rows[17:]):
        report = CleaningReport("train")
        one = made.rules("train", report)
        clean += [row for row in map(one, part) if row]
        one.finish()
        parts.append(report)
    merge(parts[0], parts[1])
    parts[0].keep(clean)
    assert clean == kept and parts[0] == whole
    assert about_limits(parts[0]) == about_limits(whole) != []


def test_switches():
    rows = [Row("de", "Berlin", "berlin")] * 2
    kept, _ = cleaner(drop_duplicates=False, drop_identical=False).clean(rows, "train")
    assert len(kept) == 2


def test_held_out_rows_are_normalized_but_never_dropped():
    rows = [Row("de", "Berlin\u00a0", "Berlin")] * 2 + [Row("de", "", "x")]
    kept, report = cleaner(max_characters=3).clean(rows, "test")
    assert [row[:3] for row in kept] == [("de", "Berlin", "Berlin")] * 2
    assert report.dropped == {all_rules.EMPTY: 1}


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
