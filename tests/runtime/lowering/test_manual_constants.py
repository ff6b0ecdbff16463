# tests: runtime/lowering/folding.py
"""Checks that constants around manual regions move into functions, which XLA does not merge."""

import numpy as np
import tensorflow as tf
from jax.interpreters import mlir
from jaxlib.mlir import ir

from lingvo_gshard.runtime.lowering.folding import separate_constants
from lingvo_gshard.sharding.manual import full_to_shard, manual, shard_to_full
from lingvo_gshard.wings.functions.partition import partition

OUTSIDE = """
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %two = stablehlo.constant dense<2.0> : tensor<2xf32>
  %y = stablehlo.multiply %x, %two : tensor<2xf32>
  return %y : tensor<2xf32>
}
"""
WITH_A_REGION = """
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %two = stablehlo.constant dense<2.0> : tensor<2xf32>
  %y = stablehlo.multiply %x, %two : tensor<2xf32>
  %part = stablehlo.custom_call @SPMDFullToShardShape(%y) : (tensor<2xf32>) -> tensor<1xf32>
  %places = stablehlo.iota dim = 0 : tensor<1xf32>
  %sum = stablehlo.add %part, %places : tensor<1xf32>
  %z = stablehlo.custom_call @SPMDShardToFullShape(%sum) : (tensor<1xf32>) -> tensor<2xf32>
  return %z : tensor<2xf32>
}
"""


def _operations_of_main(text: str) -> list[str]:
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        separate_constants(module)
        assert module.operation.verify()
        main = ir.SymbolTable(module.operation)["main"]
        return [operation.operation.name for operation in main.regions[0].blocks[0].operations]


def test_program_without_manual_regions_is_unchanged():
    names = _operations_of_main(OUTSIDE)
    assert names == ["stablehlo.constant", "stablehlo.multiply", "func.return"]


def test_constants_around_a_region_become_function_calls():
    names = _operations_of_main(WITH_A_REGION)
    assert names.count("func.call") == 2
    assert not {"stablehlo.constant", "stablehlo.iota"} & set(names)


def test_constant_can_be_used_inside_and_outside_a_region():
    """The region and the rest use equal scalars, zeros and tensors."""
    replicated = ((), ())

    def function(x):
        outside = tf.reduce_sum(x) * 2.0 + tf.range(6.0)
        inside = manual(
            lambda x: tf.reduce_sum(x) * 2.0 + tf.range(6.0) + x, [replicated], replicated
        )(x)
        return (
            tf.square(shard_to_full(tf.square(full_to_shard(x, replicated)), replicated)),
            outside,
            inside,
        )

    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    squared, outside, inside = partition(function, "data=4")(x)
    np.testing.assert_allclose(squared, x**4, rtol=1e-5)
    np.testing.assert_allclose(outside, 2 * x.sum() + np.arange(6), atol=1e-5)
    np.testing.assert_allclose(inside, 2 * x.sum() + np.arange(6) + x, atol=1e-5)
