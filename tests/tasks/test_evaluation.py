"""Tests weighted means of metrics over batches."""

import math

from lingvo_gshard import testing
from lingvo_gshard.tasks.evaluation import MeanMetrics, WeightedMeans, perplexity


class ConstantRuntime:
    def eval_step(self, batch):
        return {"loss": (batch["loss"], 1.0), "cross_entropy": (1.0, 2.0)}


class MeansTest(testing.TestCase):
    def test_weighted_means(self):
        means = WeightedMeans()
        means.add({"loss": (1.0, 3.0), "empty": (0.0, 0.0)})
        means.add({"loss": (5.0, 1.0), "empty": (0.0, 0.0)})
        found = means.means()
        self.assertAllClose(found["loss"], 2.0, rtol=1e-6, atol=0)
        self.assertTrue(math.isnan(found["empty"]))

    def test_perplexity_does_not_overflow(self):
        self.assertEqual(perplexity(0.0), 1.0)
        self.assertEqual(perplexity(1e4), math.inf)

    def test_evaluation_averages_the_metrics_of_any_task(self):
        found = MeanMetrics.measure(ConstantRuntime(), [{"loss": 1.0}, {"loss": 3.0}])
        record = found.to_record()
        self.assertAllClose(record.pop("perplexity"), math.e, rtol=1e-6, atol=0)
        self.assertEqual(record, {"batches": 2, "loss": 2.0, "cross_entropy": 1.0})
        self.assertEqual(found.size, "2 batches")
        self.assertEqual(list(found.table().rows[0]), ["loss", "2.0000"])

    def test_rejects_a_split_without_batches(self):
        with self.assertRaisesRegex(ValueError, "the split has no batches"):
            MeanMetrics.measure(ConstantRuntime(), [])


if __name__ == "__main__":
    testing.main()
