"""Tests weighted means of metrics over batches."""

import math

import pytest

from lingvo_gshard.tasks.evaluation import MeanMetrics, WeightedMeans, perplexity


def test_weighted_means():
    means = WeightedMeans()
    means.add({"loss": (1.0, 3.0), "empty": (0.0, 0.0)})
    means.add({"loss": (5.0, 1.0), "empty": (0.0, 0.0)})
    found = means.means()
    assert found["loss"] == pytest.approx(2.0)
    assert math.isnan(found["empty"])


def test_perplexity_does_not_overflow():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf


class ConstantRuntime:
    def eval_step(self, batch):
        return {"loss": (batch["loss"], 1.0), "cross_entropy": (1.0, 2.0)}


def test_evaluation_averages_the_metrics_of_any_task():
    found = MeanMetrics.measure(ConstantRuntime(), [{"loss": 1.0}, {"loss": 3.0}])
    assert found.to_record() == {
        "batches": 2,
        "loss": 2.0,
        "cross_entropy": 1.0,
        "perplexity": pytest.approx(math.e),
    }
    assert found.size == "2 batches"
    assert list(found.table().rows[0]) == ["loss", "2.0000"]


def test_rejects_a_split_without_batches():
    with pytest.raises(ValueError, match="the split has no batches"):
        MeanMetrics.measure(ConstantRuntime(), [])
