# tests: wings/verification/steps.py, wings/verification/unfolded.py
"""Tests the rewriting of StableHLO from float32 to float64."""

import jax
import numpy as np
import tensorflow as tf

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.verification.steps import in_float64, to_float64


def test_sums_have_the_precision_of_float64_and_bits_stay_those_of_float32():
    table = np.float32([0.1, -2.0, np.inf, 3e-5])

    def function(x):
        bits = tf.bitcast(x, tf.int32)
        halves = tf.bitcast(bits + 1, tf.float32)
        return tf.reduce_sum(x / 3.0), bits, halves, tf.constant(table) * 2.0

    x = np.float32([0.1, 0.7, 1e-3])
    program = in_float64(partition(function, "data=1").lower(x))
    assert [array.dtype for array in program.outputs] == ["float64", "int32", "float64", "float64"]
    with jax.enable_x64(True):
        run = Executable(program, devices_for(1))
        total, bits, halves, constant = run(jax.numpy.asarray(x.astype(np.float64)))
    assert abs(float(total) - np.sum(x.astype(np.float64) / 3)) < 1e-16
    np.testing.assert_array_equal(bits, x.view(np.int32))
    np.testing.assert_array_equal(halves, (x.view(np.int32) + 1).view(np.float32))
    np.testing.assert_array_equal(constant, table.astype(np.float64) * 2)


def test_constants_of_other_types_stay():
    text = 'dense<0x7F800000> : tensor<f32>, dense<0x7F800000> : tensor<i32>, "xf32 f32"'
    assert to_float64(text).startswith(
        "dense<0x7FF0000000000000> : tensor<f64>, dense<0x7F800000> : tensor<i32>"
    )
