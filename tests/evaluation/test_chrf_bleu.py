# tests: wings/evaluation/text_scores.py
"""Compares scores with direct calls of sacrebleu."""

import collections
import dataclasses

import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gshard import testing
from lingvo_gshard.wings.evaluation import text_scores
from tests.data import corpora

ROWS = corpora.rows(120, languages=("de", "fr")) + corpora.rows(3, languages=("de",))
LANGUAGES = [row.language for row in ROWS[:120]] + ["nl"] * 3
SOURCES = [row.source for row in ROWS]
REFERENCES = [row.target for row in ROWS]
TRANSLATIONS = [
    " ".join(row.target.split()[: 3 + number % 5]) + " bread" for number, row in enumerate(ROWS)
]


class ChrfBleuTest(testing.TestCase):
    def test_scores_of_languages_equal_sacrebleu(self):
        scores = text_scores.score_languages(LANGUAGES, SOURCES, REFERENCES, TRANSLATIONS)
        self.assertEqual(list(scores), ["de", "fr", "nl"])
        for language, found in scores.items():
            rows = [row for row, name in enumerate(LANGUAGES) if name == language]
            references = [[REFERENCES[row] for row in rows]]
            self.assertEqual(found.rows, len(rows))
            self.assertEqual(found.unique_references, len(set(references[0])))
            for texts, score in ((TRANSLATIONS, found.translated), (SOURCES, found.copied)):
                hypotheses = [texts[row] for row in rows]
                self.assertEqual(score.bleu, sacrebleu.corpus_bleu(hypotheses, references).score)
                self.assertEqual(score.chrf, sacrebleu.corpus_chrf(hypotheses, references).score)
            self.assertLess(found.shuffled.chrf, found.translated.chrf)

    def test_shuffled_scores_equal_scores_of_shuffled_translations(self):
        partners = text_scores.shuffled_partners(LANGUAGES)
        scores = text_scores.score_languages(LANGUAGES, SOURCES, REFERENCES, TRANSLATIONS)
        rows = [row for row, name in enumerate(LANGUAGES) if name == "fr"]
        hypotheses = [TRANSLATIONS[partners[row]] for row in rows]
        expected = sacrebleu.corpus_chrf(hypotheses, [[REFERENCES[row] for row in rows]]).score
        self.assertEqual(scores["fr"].shuffled.chrf, expected)
        without = text_scores.score_languages(LANGUAGES, SOURCES, REFERENCES, TRANSLATIONS, False)
        self.assertEqual(without["fr"], dataclasses.replace(scores["fr"], shuffled=None))

    @settings(deadline=None)
    @given(st.lists(st.sampled_from(["de", "fr", "nl"]), max_size=60))
    def test_shuffling_stays_within_the_language(self, languages):
        partners = text_scores.shuffled_partners(languages)
        self.assertEqual(sorted(partners), list(range(len(languages))))
        counts = collections.Counter(languages)
        for row, partner in enumerate(partners):
            self.assertEqual(languages[row], languages[partner])
            self.assertEqual(row != partner, counts[languages[row]] > 1)
        self.assertEqual(partners, text_scores.shuffled_partners(languages))

    def test_the_average_excludes_small_languages(self):
        scores = text_scores.score_languages(LANGUAGES, SOURCES, REFERENCES, TRANSLATIONS)
        mean, names = text_scores.average(scores)
        self.assertEqual(names, ("de", "fr"))
        for kind in ("translated", "copied", "shuffled"):
            for name in ("chrf", "bleu"):
                values = [getattr(getattr(scores[language], kind), name) for language in names]
                self.assertAllClose(
                    getattr(getattr(mean, kind), name), sum(values) / 2, rtol=1e-6, atol=0
                )
        self.assertEqual(mean.rows, 120)
        self.assertEqual(text_scores.average({"nl": scores["nl"]}), (None, ()))

    def test_one_row_has_no_shuffled_score(self):
        scores = text_scores.score_languages(["de"], ["Hund"], ["dog"], ["dog"])
        self.assertIsNone(scores["de"].shuffled)
        self.assertAllClose(scores["de"].translated.chrf, 100, rtol=1e-6, atol=0)

    def test_signatures_name_the_settings_of_a_score(self):
        signatures = text_scores.signatures()
        self.assertStartsWith(
            signatures["bleu"], "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:"
        )
        self.assertStartsWith(
            signatures["chrf"], "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:"
        )


if __name__ == "__main__":
    testing.main()
