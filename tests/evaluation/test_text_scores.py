"""Tests bits per byte and perplexities of a language model."""

import itertools
import math
import pathlib

import numpy as np
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.data.language_model_input import LanguageModelInput
from lingvo_gshard.data.packed_input import TextSize
from lingvo_gshard.data.sources.text import TextReader
from lingvo_gshard.wings.evaluation import text_scores
from lingvo_gshard.wings.preparation.prepared import manifest
from lingvo_gshard.wings.preparation.prepared.language_model_input import PreparedLanguageModelInput
from tests.data import corpora
from tests.preparation.prepared import corpora as prepared

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


def scores_of(input_, counts):
    return text_scores.measure(Unigrams(counts), input_, "test")


class TextScoresTest(testing.TestCase, parameterized.TestCase):
    def input_of(self, size, **values):
        """Returns an input of TEXTS whose vocabulary has a size; values set its Params."""
        folder = pathlib.Path(self.get_temp_dir())
        lines = [f"{row.source}\n{row.target}" for row in corpora.rows(200)]
        (folder / "train.txt").write_text("\n".join(lines), encoding="utf-8")
        (folder / "test.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
        corpus = TextReader.params()
        corpus.set(train=f"{folder}/train.txt", test=f"{folder}/test.txt", document="paragraph")
        params = LanguageModelInput.params().set(corpus=corpus, batch_rows=2, length=8)
        params.set(**values)
        params.vocabulary.set(size=size, cache_directory=f"{folder}/cache")
        return params.instantiate()

    def test_scores_of_a_uniform_model_match_the_computation_by_hand(self):
        """Gives each byte and each end of a text one of 256 tokens, which costs 8 bits."""
        found = text_scores.TextScores.from_means(math.log(256), 0.0, 30 + 2, TextSize(2, 30, 8))
        self.assertAllClose(found.bits_per_byte, 8 * 32 / 30, rtol=1e-6, atol=0)
        self.assertAllClose(found.perplexity, 256, rtol=1e-6, atol=0)
        self.assertAllClose(found.perplexity_per_word, 256**4, rtol=1e-6, atol=0)
        self.assertEqual(
            [row[0] for row in found.table().rows][:2], ["bits per byte", "perplexity per token"]
        )
        self.assertTrue(found.notes())
        self.assertIn("above a million", found.notes()[0])

    def test_perplexity_per_word_is_shown_once_a_model_knows_words(self):
        found = text_scores.TextScores.from_means(math.log(8), 0.5, 32, TextSize(2, 30, 8))
        self.assertEqual(found.table().rows[1], ("perplexity per word", f"{8**4:,.1f}", "8 words"))
        self.assertFalse(found.notes())

    @parameterized.parameters(290, 320)
    def test_bits_per_byte_of_a_uniform_model_on_text(self, size):
        """Expects tokens * log2(V) / bytes, counting only the tokens of the texts."""
        input_ = self.input_of(size)
        tokens = sum(len(input_.vocabulary.encode(text)) + 1 for text in TEXTS)
        found = scores_of(input_, np.ones(size))
        self.assertEqual((found.tokens, found.documents), (tokens, 4))
        self.assertEqual((found.bytes, found.words), (BYTES, WORDS))
        self.assertAllClose(
            found.bits_per_byte, tokens * math.log2(size) / BYTES, rtol=1e-6, atol=0
        )
        self.assertAllClose(found.perplexity_per_word, size ** (tokens / WORDS), rtol=1e-6, atol=0)

    def test_scores_by_source_are_of_the_source_alone_and_add_up(self):
        folder = pathlib.Path(self.get_temp_dir()) / "prepared"
        sizes = {("und", "books"): (40, 0, 9), ("und", "news"): (40, 0, 5)}
        prepared.prepare(folder, sizes, content=manifest.TEXT)
        params = PreparedLanguageModelInput.params().set(directory=str(folder), length=16)
        input_ = params.set(batch_rows=2).instantiate()
        counts = np.random.default_rng(0).integers(1, 9, input_.vocabulary.size)
        model = Unigrams(counts)
        found = text_scores.measure(model, input_, "test", by_source=True)
        table = input_.table("test")
        for group in table.groups:
            targets = table.read(np.arange(group.begin, group.begin + group.rows)).targets
            own = [targets.ids[a:b] for a, b in itertools.pairwise(targets.offsets)]
            ids = np.concatenate(own[-group.rows :])
            one = found.sources[group.source]
            nats = -np.log(model.probabilities[ids]).mean()
            self.assertEqual(one.tokens, len(ids))
            self.assertAllClose(one.cross_entropy, nats)
        whole = text_scores.measure(model, input_, "test")
        self.assertEqual(whole.sources, {})
        self.assertEqual(found.tokens, whole.tokens)
        self.assertAllClose(found.cross_entropy, whole.cross_entropy)
        self.assertIn("perplexity of news", [row[0] for row in found.table().rows])

    def test_bits_per_byte_do_not_depend_on_the_vocabulary(self):
        """Compares models that assign the same probability to the texts.

        With each vocabulary the model assigns 40 nats to each text, divided evenly over its tokens.
        The cross-entropy per token differs, but bits per byte do not.
        """
        found = []
        for size in (290, 320):
            input_ = self.input_of(size)
            tokens = sum(len(input_.vocabulary.encode(text)) + 1 for text in TEXTS)
            runtime = Unigrams(np.ones(1))
            runtime.probabilities = np.full(size, math.exp(-40 * len(TEXTS) / tokens))
            found.append(text_scores.measure(runtime, input_, "test"))
        self.assertNotEqual(found[0].tokens, found[1].tokens)
        self.assertNotAllClose(found[0].perplexity, found[1].perplexity, rtol=1e-6, atol=0)
        for scores in found:
            self.assertAllClose(scores.bits_per_byte, 160 / math.log(2) / BYTES, rtol=1e-6, atol=0)
            self.assertAllClose(
                scores.perplexity_per_word, math.exp(160 / WORDS), rtol=1e-6, atol=0
            )

    @parameterized.parameters(({"length": 4},), ({"batch_rows": 5},))
    def test_scores_of_a_context_free_model_do_not_depend_on_windows(self, values):
        counts = np.arange(1, 291)
        usual, other = self.input_of(290), self.input_of(290, **values)
        expected = scores_of(usual, counts).bits_per_byte
        self.assertAllClose(scores_of(other, counts).bits_per_byte, expected, rtol=1e-6, atol=0)


if __name__ == "__main__":
    testing.main()
