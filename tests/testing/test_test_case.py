"""Tests of TestCase itself: what it accepts, what it refuses, and what its messages say."""

import numpy as np
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate, einsum

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 12)).astype(np.float32)


def product(x_BM, w_MH):
    return einsum("BM,MH->BH", annotate(x_BM, "BM"), annotate(w_MH, "MH", "weights"))


class TestCaseTest(testing.TestCase):
    """The asserts pass where they must, and fail with a message that helps."""

    def fails(self, message, assertion, *args, **kwargs):
        with self.assertRaisesRegex(AssertionError, message):
            assertion(*args, **kwargs)

    def test_eight_devices_are_there(self):
        self.assertLen(self.devices(8), 8)

    def test_trees_of_sharded_arrays_are_compared_with_arrays(self):
        on_eight = lingvo_gshard.partition(product, "data=4,model=2", "data_tensor")
        y = on_eight(X, W)
        self.assertAllClose(y, X @ W, rtol=1e-5, atol=1e-5)
        tree = NestedMap(a=[tf.constant(X)], b=NestedMap(y=y))
        self.assertAllClose(tree, {"a": [X], "b": {"y": X @ W}}, rtol=1e-5, atol=1e-5)
        self.assertDistributed(y, "data", 0)
        self.assertDistributed(y, "model", 1)
        self.fails("dimension 1 .* split as", self.assertDistributed, y, "data", 1)

    def test_a_difference_names_its_path(self):
        wrong = {"a": {"w": X + 1}, "b": X}
        self.fails(r"a\.w", self.assertAllClose, {"a": {"w": X}, "b": X}, wrong)
        message = r"b is missing, c\[1\] was not expected"
        self.fails(message, self.assertAllClose, {"a": X, "c": [X, X]}, {"a": X, "b": X, "c": [X]})

    def test_collectives_are_counted_by_kind(self):
        forward = lingvo_gshard.partition(product, "data=8", "data", layouts=["BM", None])
        self.assertCollectives(forward, X, W, expected={})
        split = lingvo_gshard.partition(
            lambda h_BH, w_HM: einsum("BH,HM->BM", h_BH, annotate(w_HM, "HM", "weights")),
            "model=4",
            "tensor",
            layouts=["BH", "weights:HM"],
        )
        h, w = X, W[:, :8]
        self.assertCollectives(split, h, w, expected={"all-reduce": 1})
        self.assertCollectives(split.compile(h, w), expected={"all-reduce": 1})
        message = r"\{'all-reduce': 1\} in place of \{\}\n  all-reduce, 1 x 512 bytes: .*einsum"
        self.fails(message, self.assertCollectives, split, h, w, expected={})


if __name__ == "__main__":
    testing.main()
