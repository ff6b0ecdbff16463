"""Tests the translator: order, buckets, limits, and empty or long sentences."""

import pytest

from lingvo_gshard.decoding import Translator
from tests.data import corpora
from tests.decoding import tiny_model

SENTENCES = [row.source for row in corpora.rows(23)]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    rows = corpora.rows(200)
    return corpora.trainer(tmp_path_factory.mktemp("cache")).train(rows, 1.0)[0]


def make(vocabulary, lengths=(16, 64), batch_tokens=128):
    task = tiny_model.task(vocabulary_size=vocabulary.size, num_layers=1)
    runtime = tiny_model.runtime(task, 1)
    return Translator(task, runtime, vocabulary, vocabulary, lengths, batch_tokens)


@pytest.fixture(scope="module")
def translator(vocabulary):
    return make(vocabulary)


@pytest.mark.slow
def test_translations_do_not_depend_on_the_batch(translator):
    together = translator.translate(SENTENCES).texts
    assert len(set(together)) > 3
    assert together == [translator.translate([sentence]).texts[0] for sentence in SENTENCES]


def test_a_bucket_compiles_once(vocabulary):
    translator = make(vocabulary, lengths=(8, 16, 32))
    counts = []
    short, long = ["der Hund"], ["der Hund sieht le chat"]
    for sentences in (short, [], short * 40, long + short, long * 7):
        translator.translate(sentences)
        counts.append(translator.compile_count)
    assert 8 <= len(vocabulary.encode(short[0])) < 16 <= len(vocabulary.encode(long[0])) < 32
    assert counts == [1, 1, 1, 2, 2]


def test_empty_sentences_stay_empty(translator):
    sentences = ["", "der Hund", " \t", "le chat", "\n"]
    texts = translator.translate(sentences).texts
    alone = translator.translate(["der Hund", "le chat"]).texts
    assert texts == ["", alone[0], "", alone[1], ""]
    assert translator.translate([]).texts == []
    assert translator.translate(["", ""]).texts == ["", ""]


def test_long_sentences_are_truncated_and_reported(translator):
    long = "der Hund sieht " * 40
    found = translator.translate(["der Hund", long, "", long + long, "le chat"])
    assert found.cut == (1, 3)
    assert len(found.texts) == 5
    assert found.texts[1] == found.texts[3]
    assert translator.longest == 64


def test_sentences_are_normalized_as_in_training(translator):
    plain = translator.translate(["groß der Hund"]).texts
    assert translator.translate(["  groß\tder \u00ad Hund \n"]).texts == plain


def test_translations_are_single_lines(translator):
    assert all(text == " ".join(text.split()) for text in translator.translate(SENTENCES).texts)


def test_progress_counts_sentences(translator):
    seen = []
    translator.translate([*SENTENCES, ""], seen.append)
    assert seen == sorted(seen) and seen[-1] == len(SENTENCES) + 1 and len(seen) > 2


def test_buckets_are_at_most_the_maximum_length(vocabulary):
    task = tiny_model.task(vocabulary_size=vocabulary.size)
    runtime = tiny_model.runtime(task, 1)
    translator = Translator(task, runtime, vocabulary, vocabulary, (512, 4096))
    assert translator.longest == 512
    assert Translator(task, runtime, vocabulary, vocabulary, (4096,)).longest == 1024


@pytest.mark.parametrize("beam_size", [0, -1, 100_000])
def test_a_beam_without_or_beyond_tokens_is_refused(vocabulary, beam_size):
    task = tiny_model.task(vocabulary_size=vocabulary.size)
    runtime = tiny_model.runtime(task, 1)
    words = f"--beam_size={beam_size}: 1 to {vocabulary.size} was expected"
    with pytest.raises(ValueError, match=words):
        Translator(task, runtime, vocabulary, vocabulary, beam_size=beam_size)
