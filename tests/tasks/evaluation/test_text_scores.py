"""Tests bits per byte and perplexities of a language model."""

import math

import numpy as np
import pytest

from lingvo_gshard.data.language_model_input import LanguageModelInput, TextSize
from lingvo_gshard.data.sources.text import TextReader
from lingvo_gshard.tasks.evaluation import text_scores
from tests.data import corpora

TEXTS = ["the cat sees the dog", "le chien voit\nle chat", "ça", "the dog"]
# 20 + 21 + 3 + 7 bytes, including newlines; the c with cedilla has two.
BYTES, WORDS = 51, 13


class Unigrams:
    """A runtime whose probability of a token is its share of the given counts, in any context."""

    def __init__(self, counts):
        self.probabilities = np.asarray(counts, np.float64) / np.sum(counts)

    def eval_step(self, batch):
        labels = batch["target_labels"][batch["target_segments"] > 0]
        nats = -np.log(self.probabilities[labels]).mean()
        return {"cross_entropy": (nats, len(labels)), "accuracy": (0.5, len(labels))}


def input_of(directory, size, **values):
    lines = [f"{row.source}\n{row.target}" for row in corpora.rows(200)]
    (directory / "train.txt").write_text("\n".join(lines), encoding="utf-8")
    (directory / "test.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    corpus = TextReader.params()
    corpus.set(train=f"{directory}/train.txt", test=f"{directory}/test.txt", document="paragraph")
    params = LanguageModelInput.params().set(corpus=corpus, batch_rows=2, length=8).set(**values)
    params.vocabulary.set(size=size, cache_directory=f"{directory}/cache")
    return params.instantiate()


def scores_of(input_, counts):
    return text_scores.measure(Unigrams(counts), input_, "test")


def test_scores_of_a_uniform_model_match_the_computation_by_hand():
    """With 256 tokens, each byte and each end of a text costs 8 bits."""
    found = text_scores.TextScores.from_means(math.log(256), 0.0, 30 + 2, TextSize(2, 30, 8))
    assert found.bits_per_byte == pytest.approx(8 * 32 / 30)
    assert found.perplexity == pytest.approx(256)
    assert found.perplexity_per_word == pytest.approx(256**4)
    assert [row[0] for row in found.table().rows][:2] == ["bits per byte", "perplexity per token"]
    assert found.notes() and "above a million" in found.notes()[0]


def test_perplexity_per_word_is_shown_once_a_model_knows_words():
    found = text_scores.TextScores.from_means(math.log(8), 0.5, 32, TextSize(2, 30, 8))
    assert found.table().rows[1] == ("perplexity per word", f"{8**4:,.1f}", "8 words")
    assert not found.notes()


@pytest.mark.parametrize("size", [290, 320])
def test_bits_per_byte_of_a_uniform_model_on_text(size, tmp_path):
    """Expects tokens * log2(V) / bytes, counting only the tokens of the texts."""
    input_ = input_of(tmp_path, size)
    tokens = sum(len(input_.vocabulary.encode(text)) + 1 for text in TEXTS)
    found = scores_of(input_, np.ones(size))
    assert (found.tokens, found.documents) == (tokens, 4)
    assert (found.bytes, found.words) == (BYTES, WORDS)
    assert found.bits_per_byte == pytest.approx(tokens * math.log2(size) / BYTES)
    assert found.perplexity_per_word == pytest.approx(size ** (tokens / WORDS))


def test_bits_per_byte_do_not_depend_on_the_vocabulary(tmp_path):
    """Models that assign the same probability to the texts have the same bits per byte.

    With each vocabulary the model assigns 40 nats to each text, divided evenly over its tokens.
    The cross-entropy per token differs, but bits per byte do not.
    """
    found = []
    for size in (290, 320):
        input_ = input_of(tmp_path, size)
        tokens = sum(len(input_.vocabulary.encode(text)) + 1 for text in TEXTS)
        runtime = Unigrams(np.ones(1))
        runtime.probabilities = np.full(size, math.exp(-40 * len(TEXTS) / tokens))
        found.append(text_scores.measure(runtime, input_, "test"))
    assert found[0].tokens != found[1].tokens
    assert found[0].perplexity != pytest.approx(found[1].perplexity)
    for scores in found:
        assert scores.bits_per_byte == pytest.approx(160 / math.log(2) / BYTES)
        assert scores.perplexity_per_word == pytest.approx(math.exp(160 / WORDS))


@pytest.mark.parametrize("values", [{"length": 4}, {"batch_rows": 5}])
def test_scores_of_a_context_free_model_do_not_depend_on_windows(values, tmp_path):
    counts = np.arange(1, 291)
    usual, other = input_of(tmp_path, 290), input_of(tmp_path, 290, **values)
    expected = scores_of(usual, counts).bits_per_byte
    assert scores_of(other, counts).bits_per_byte == pytest.approx(expected)
