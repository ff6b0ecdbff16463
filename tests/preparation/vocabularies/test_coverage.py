# tests: wings/preparation/vocabularies/vocabulary_trainer.py
"""Tests coverage by language, against counts made character by character."""

import pytest

from lingvo_gshard.wings.preparation.vocabularies.vocabulary_trainer import (
    TARGETS,
    coverage,
    of_rows,
    to_note,
)
from tests.data import corpora
from tests.preparation.vocabularies.test_json_vocabulary import JsonVocabulary, tokenizer

_TEXTS = {"de": ["der Hund sieht", "groß"], "ja": ["犬 is a dog", "家"], "": []}


@pytest.mark.parametrize("is_json", [False, True])
def test_coverage_is_that_of_each_character(tmp_path, is_json):
    if is_json:
        vocabulary = JsonVocabulary(tokenizer().to_str().encode())
        uncovered = set("ß犬家")
    else:
        vocabulary = corpora.trainer(tmp_path, size=320).train(corpora.rows(200), 1.0)[0]
        uncovered = set("犬家")
    found = coverage(vocabulary, _TEXTS)
    for language, lines in _TEXTS.items():
        text = "".join("".join(lines).split())
        counted = found[language]
        assert counted["characters"] == len(text)
        assert counted["words"] == len(" ".join(lines).split())
        assert counted["tokens"] == sum(len(vocabulary.encode(line)) for line in lines)
        kept = [character for character in text if character not in uncovered]
        assert counted["covered"] == round(len(kept) / max(len(text), 1), 4)
    assert found["ja"]["tokens_per_character"] > found["de"]["tokens_per_character"]
    assert to_note(found).split(": ")[1].startswith("ja ")
    assert found["de"]["tokens_per_word"] == round(found["de"]["tokens"] / 4, 4)


def test_sides_and_languages_of_rows(tmp_path):
    rows = corpora.rows(50)
    joint = corpora.trainer(tmp_path).train(rows, 1.0)[0]
    other = JsonVocabulary(tokenizer().to_str().encode())
    assert set(of_rows(rows, joint, joint)["joint"]) == {"de", "fr", TARGETS}
    apart = of_rows(rows, joint, other)
    assert apart["source"] == coverage(joint, _texts(rows, "source", "de", "fr"))
    assert apart["target"] == coverage(other, {TARGETS: [row.target for row in rows]})
    text = [row._replace(source="") for row in rows]
    assert set(of_rows(text, joint, joint)["joint"]) == {"de", "fr"}


def _texts(rows, side, *languages):
    return {
        language: [getattr(row, side) for row in rows if row.language == language]
        for language in languages
    }
