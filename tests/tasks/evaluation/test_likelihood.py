"""Compares the likelihood of references, by language, with sums over their tokens."""

import math

import numpy as np
import pytest

from lingvo_gshard.data.prepared.translation_input import PreparedTranslationInput
from lingvo_gshard.tasks.evaluation import evaluation
from lingvo_gshard.tasks.evaluation.evaluation import Likelihood
from tests.data.prepared import corpora


class NatsOfIds:
    """A model that gives token i a cross-entropy of i / 100 nats, and guesses even ids right."""

    def eval_step(self, batch):
        labels = batch["target_labels"][batch["target_segments"] > 0]
        return {
            "cross_entropy": (float(labels.mean()) / 100, float(labels.size)),
            "accuracy": (float((labels % 2 == 0).mean()), float(labels.size)),
        }


@pytest.fixture(scope="module")
def input_(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared")
    corpora.prepare(path)
    shape = {"batch_rows": 4, "source_length": 12, "target_length": 8}
    return PreparedTranslationInput.params().set(directory=str(path), **shape).instantiate()


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


def test_each_language_has_the_mean_over_its_own_tokens(input_):
    rows, done = input_.rows("dev"), []
    found = evaluation.measure_by_language(NatsOfIds(), input_, rows, done.append)
    assert list(found) == ["de", "fr"]
    for language, measured in found.items():
        labels, too_long = labels_of(input_, [row for row in rows if row.language == language])
        assert (measured.tokens, measured.rows_too_long) == (labels.size, too_long)
        assert measured.cross_entropy == pytest.approx(labels.mean() / 100)
        assert measured.accuracy == pytest.approx((labels % 2 == 0).mean())
        assert measured.perplexity == pytest.approx(math.exp(labels.mean() / 100))
    assert done == sorted(done) and done[-1] == len(rows)
    labels, too_long = labels_of(input_, rows)
    assert too_long > 0
    everything = evaluation.combined(found.values())
    assert (everything.tokens, everything.rows_too_long) == (labels.size, too_long)
    assert everything.cross_entropy == pytest.approx(labels.mean() / 100)
    assert everything.accuracy == pytest.approx((labels % 2 == 0).mean())


def test_languages_without_a_row_that_fits_do_not_count():
    empty = Likelihood(math.nan, math.nan, 0, 3)
    found = evaluation.combined([empty, Likelihood(2.0, 0.5, 10, 1)])
    assert found == Likelihood(2.0, 0.5, 10, 4)
    assert math.isnan(evaluation.combined([empty]).perplexity)
