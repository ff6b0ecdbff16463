# tests: data/sources/report.py, wings/preparation/cleaning/report_notes.py
"""Tests CleaningReport: languages, examples, and advice about lengths."""

import collections

from lingvo_gshard.data.sources.report import CleaningReport, Limit
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.preparation.cleaning import all_rules
from lingvo_gshard.wings.preparation.cleaning.cleaner import Cleaner
from lingvo_gshard.wings.preparation.cleaning.report_notes import (
    about_languages,
    about_limits,
    advice_of,
)


def report_of(rows, **values):
    return Cleaner.params().set(**values).instantiate().clean(rows, "train")[1]


def test_languages_and_one_example_of_each_reason():
    rows = [Row("de", f"Haus {i}", f"house {i}", "a.tsv", i) for i in range(1, 6)]
    rows += [Row("ja", "家", "a house with a long description", "b.tsv", i) for i in range(1, 4)]
    rows += [Row("ja", "猫", "a cat", "b.tsv", 4)]
    report = report_of(rows)
    assert report.kept_by_language == {"de": 5, "ja": 1}
    assert report.examples == {all_rules.RATIO: "b.tsv:1: '家'"}
    assert about_languages(report) + about_limits(report) == [
        "2 languages: de 5, ja 1",
        f"Warning: ja lost 3 of 4 rows, 3 because of: {all_rules.RATIO}",
    ]


def test_a_language_without_any_row_left_is_named():
    rows = [Row("de", "Haus", "house"), Row("tlh", "x", "y" * 20)]
    assert any("tlh lost 1 of 1 rows" in note for note in about_languages(report_of(rows)))


def test_advice_names_a_value_that_keeps_what_it_promises():
    lengths = collections.Counter(range(1, 1001))
    advice = advice_of(Limit("input.source_length", "source tokens", 96, lengths))
    assert advice == (
        "904 rows have more source tokens than input.source_length = 96. Of 1,000 rows, half have "
        "at most 501, 90% at most 901, 99% at most 991; the longest has 1,000. "
        "input.source_length = 992 keeps 99% of them."
    )
    assert sum(length <= 992 for length in lengths) >= 990
    nearly = Limit("input.source_length", "source tokens", 996, lengths)
    assert advice_of(nearly).endswith("input.source_length = 1000 keeps all.")


def test_rows_dropped_later_are_taken_from_those_kept():
    rows = [Row("de", "Haus", "house", "a", 1), Row("fr", "la maison", "the house", "a", 2)]
    report = report_of([*rows, Row("de", "", "No", "a", 3)])
    limits = [
        Limit("input.source_length", "source tokens", 1, collections.Counter([1, 2])),
        Limit("input.target_length", "target tokens", 2, collections.Counter([1, 2])),
    ]
    later = report.without(rows[1:], "late", limits)
    assert (later.read, later.kept, later.dropped) == (3, 1, {"late": 1, all_rules.EMPTY: 1})
    assert later.kept_by_language == {"de": 1} and later.examples["late"] == "a:2: 'la maison'"
    (advice,) = about_limits(later)
    assert "input.source_length" in advice
    assert report.kept == 2 and about_limits(report) == [] and "late" not in report.examples


def test_an_empty_report_has_no_notes():
    assert about_languages(CleaningReport()) == about_limits(CleaningReport()) == []
