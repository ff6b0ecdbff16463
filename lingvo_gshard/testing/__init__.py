"""Tests of layers, routers and optimizers of your own, and of functions on many devices.

    import lingvo_gshard.testing as testing
    from my_layer import Gated


    class GatedTest(testing.LayerTest):
        PARAMS = Gated.params()


    if __name__ == "__main__":
        testing.main()

`TestCase` is a tf.test.TestCase with eight virtual devices, comparisons of trees and of sharded
arrays, and counts of the collectives in a compiled function. `LayerTest`, `RouterTest` and
`OptimizerTest` test a class by the same rules as the library's own classes. docs/extending.md shows
examples. The tests run by pytest, by `python -m unittest` and by Bazel.

Importing this package imports TensorFlow.
"""

import tensorflow as tf

from lingvo_gshard.testing.layers import LayerTest, RouterTest
from lingvo_gshard.testing.optimizers import OptimizerTest
from lingvo_gshard.testing.test_case import TestCase

main = tf.test.main

__all__ = ["LayerTest", "OptimizerTest", "RouterTest", "TestCase", "main"]
