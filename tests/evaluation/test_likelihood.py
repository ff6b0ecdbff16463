# tests: wings/evaluation/likelihood.py, wings/evaluation/translation_scores.py
"""Compares the likelihood of references, by language, with sums over their tokens."""

import math
import pathlib

import numpy as np

from lingvo_gshard import testing
from lingvo_gshard.wings.evaluation import likelihood
from lingvo_gshard.wings.evaluation.likelihood import Likelihood
from lingvo_gshard.wings.preparation.prepared.translation_input import PreparedTranslationInput
from tests.preparation.prepared import corpora
from tests.told import Told


class NatsOfIds:
    """A model that gives token i a cross-entropy of i / 100 nats, and guesses even ids right."""

    def eval_step(self, batch):
        labels = batch["target_labels"][batch["target_segments"] > 0]
        return {
            "cross_entropy": (float(labels.mean()) / 100, float(labels.size)),
            "accuracy": (float((labels % 2 == 0).mean()), float(labels.size)),
        }


def labels_of(input_, rows):
    """Returns the ids of the references that fit, and how many rows do not fit."""
    found, too_long = [], 0
    for row in rows:
        target = [*input_.target_vocabulary.encode(row.target), input_.target_vocabulary.eos_id]
        source = [*input_.source_vocabulary.encode(row.source), input_.source_vocabulary.eos_id]
        if len(source) > 12 or len(target) > 8:
            too_long += 1
        else:
            found += target
    return np.array(found), too_long


class LikelihoodTest(testing.TestCase):
    def test_each_language_has_the_mean_over_its_own_tokens(self):
        folder = pathlib.Path(self.get_temp_dir())
        corpora.prepare(folder)
        params = PreparedTranslationInput.params().set(directory=str(folder), batch_rows=4)
        input_ = params.set(source_length=12, target_length=8).instantiate()
        rows, told = input_.rows("dev"), Told()
        found = likelihood.measure_by_language(NatsOfIds(), input_, rows, told)
        self.assertEqual(list(found), ["de", "fr"])
        for language, measured in found.items():
            labels, too_long = labels_of(input_, [row for row in rows if row.language == language])
            self.assertEqual((measured.tokens, measured.rows_too_long), (labels.size, too_long))
            self.assertAllClose(measured.cross_entropy, labels.mean() / 100, rtol=1e-6, atol=0)
            self.assertAllClose(measured.accuracy, (labels % 2 == 0).mean(), rtol=1e-6, atol=0)
            self.assertAllClose(
                measured.perplexity, math.exp(labels.mean() / 100), rtol=1e-6, atol=0
            )
        self.assertEqual(told.done, sorted(told.done))
        self.assertEqual(told.done[-1], len(rows))
        labels, too_long = labels_of(input_, rows)
        self.assertGreater(too_long, 0)
        everything = likelihood.combined(found.values())
        self.assertEqual((everything.tokens, everything.rows_too_long), (labels.size, too_long))
        self.assertAllClose(everything.cross_entropy, labels.mean() / 100, rtol=1e-6, atol=0)
        self.assertAllClose(everything.accuracy, (labels % 2 == 0).mean(), rtol=1e-6, atol=0)

    def test_languages_without_a_row_that_fits_do_not_count(self):
        empty = Likelihood(math.nan, math.nan, 0, 3)
        found = likelihood.combined([empty, Likelihood(2.0, 0.5, 10, 1)])
        self.assertEqual(found, Likelihood(2.0, 0.5, 10, 4))
        self.assertTrue(math.isnan(likelihood.combined([empty]).perplexity))


if __name__ == "__main__":
    testing.main()
