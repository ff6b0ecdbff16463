"""Compares scores with direct calls of sacrebleu."""

import collections
import dataclasses

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from lingvo_gshard.tasks.evaluation import text_scores
from tests.data import corpora

ROWS = corpora.rows(120, languages=("de", "fr")) + corpora.rows(3, languages=("de",))
LANGUAGES = [row.language for row in ROWS[:120]] + ["nl"] * 3
SOURCES = [row.source for row in ROWS]
REFERENCES = [row.target for row in ROWS]
TRANSLATIONS = [
    " ".join(row.target.split()[: 3 + number % 5]) + " bread" for number, row in enumerate(ROWS)
]


def test_scores_of_languages_equal_sacrebleu():
    scores = text_scores.score_languages(LANGUAGES, SOURCES, REFERENCES, TRANSLATIONS)
    assert list(scores) == ["de", "fr", "nl"]
    for language, found in scores.items():
        rows = [row for row, name in enumerate(LANGUAGES) if name == language]
        references = [[REFERENCES[row] for row in rows]]
        assert found.rows == len(rows)
        assert found.unique_references == len(set(references[0]))
        for texts, score in ((TRANSLATIONS, found.translated), (SOURCES, found.copied)):
            hypotheses = [texts[row] for row in rows]
            assert score.bleu == sacrebleu.corpus_bleu(hypotheses, references).score
            assert score.chrf == sacrebleu.corpus_chrf(hypotheses, references).score
        assert found.shuffled.chrf < found.translated.chrf


def test_shuffled_scores_equal_scores_of_shuffled_translations():
    partners = text_scores.shuffled_partners(LANGUAGES)
    scores = text_scores.score_languages(LANGUAGES, SOURCES, REFERENCES, TRANSLATIONS)
    rows = [row for row, name in enumerate(LANGUAGES) if name == "fr"]
    hypotheses = [TRANSLATIONS[partners[row]] for row in rows]
    expected = sacrebleu.corpus_chrf(hypotheses, [[REFERENCES[row] for row in rows]]).score
    assert scores["fr"].shuffled.chrf == expected
    without = text_scores.score_languages(LANGUAGES, SOURCES, REFERENCES, TRANSLATIONS, False)
    assert without["fr"] == dataclasses.replace(scores["fr"], shuffled=None)


@given(st.lists(st.sampled_from(["de", "fr", "nl"]), max_size=60))
def test_shuffling_stays_within_the_language(languages):
    partners = text_scores.shuffled_partners(languages)
    assert sorted(partners) == list(range(len(languages)))
    counts = collections.Counter(languages)
    for row, partner in enumerate(partners):
        assert languages[row] == languages[partner]
        assert (row != partner) == (counts[languages[row]] > 1)
    assert partners == text_scores.shuffled_partners(languages)


def test_the_average_excludes_small_languages():
    scores = text_scores.score_languages(LANGUAGES, SOURCES, REFERENCES, TRANSLATIONS)
    mean, names = text_scores.average(scores)
    assert names == ("de", "fr")
    for kind in ("translated", "copied", "shuffled"):
        for name in ("chrf", "bleu"):
            values = [getattr(getattr(scores[language], kind), name) for language in names]
            assert getattr(getattr(mean, kind), name) == pytest.approx(sum(values) / 2)
    assert mean.rows == 120
    assert text_scores.average({"nl": scores["nl"]}) == (None, ())


def test_one_row_has_no_shuffled_score():
    scores = text_scores.score_languages(["de"], ["Hund"], ["dog"], ["dog"])
    assert scores["de"].shuffled is None and scores["de"].translated.chrf == pytest.approx(100)


def test_signatures_name_the_settings_of_a_score():
    signatures = text_scores.signatures()
    assert signatures["bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert signatures["chrf"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
