"""Tests a vectorized function of slices: equal to a loop, and split along the stack."""

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from lingvo_gshard import testing
from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.autodiff.custom_gradient import optimization_barrier
from lingvo_gshard.runtime.partition import partition
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.wings.pipeline.vectorize import vectorize

P, B, M, H = 4, 2, 3, 5


def slice_of(key: tf.Tensor, x_BM: tf.Tensor, w_MH: tf.Tensor) -> list[tf.Tensor]:
    """Computes a product, its sum, sums by index, and random numbers from the slice's own key."""
    h_BH = einsum("BM,MH->BH", annotate(x_BM, "BM"), w_MH)
    (h_BH,), _ = optimization_barrier([h_BH], [])
    added = tf.tensor_scatter_nd_add(tf.zeros([H]), [[1], [key]], x_BM[0, :2])
    seed = random_numbers.hashed_fold_in_word(tf.constant([1, 2]), key)
    return [h_BH, tf.reduce_sum(h_BH), added, random_numbers.hashed_uniform([B], seed)]


def stacks() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(P, *shape)).astype(np.float32) for shape in ((B, M), (M, H)))
    return [np.arange(P, dtype=np.int32), x, w]


class VectorizeTest(testing.TestCase):
    def test_a_stack_equals_its_slices_and_needs_no_collectives(self):
        split = partition(
            lambda *given: vectorize("P", slice_of, *given),
            "stage=4,data=2",
            "P->stage; B->data; M->stage",
        )
        by_slice = zip(*(slice_of(*slices) for slices in zip(*stacks(), strict=True)), strict=True)
        for stack, results in zip(split(*stacks()), by_slice, strict=True):
            self.assertAllClose(stack, np.stack(results), rtol=1e-5, atol=1e-6)
        self.assertCollectives(split, *stacks(), expected={"all-reduce": 1})

    def test_an_unsupported_operation_raises_and_converters_are_restored(self):
        before = dict(pfor._pfor_converter_registry)

        @tf.function
        def unknown(x):
            return vectorize("P", lambda row: [tf.unique(row)[0]], x)

        with self.assertRaisesRegex(ValueError, "Unique is an operation 'Unique', .* at once"):
            unknown(tf.ones([P, B]))
        self.assertEqual(before, pfor._pfor_converter_registry)


if __name__ == "__main__":
    testing.main()
