"""Tests that functions which loops and reducers call are moved into them."""

import jax
import numpy as np
from jax.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from lingvo_gshard.wings.spmd_passes.inlining import inline_in_loops, inline_in_reducers

# Doubles and adds one, three times; `twice` has two callers, and nothing calls `other`.
MODULE = """
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %y = %x) : tensor<i32>, tensor<2xf32>
    cond {
      %three = stablehlo.constant dense<3> : tensor<i32>
      %1 = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    } do {
      %1:2 = func.call @tick(%i, %y)
        : (tensor<i32>, tensor<2xf32>) -> (tensor<i32>, tensor<2xf32>) loc("layers/while")
      stablehlo.return %1#0, %1#1 : tensor<i32>, tensor<2xf32>
    }
  %2 = func.call @twice(%0#1) : (tensor<2xf32>) -> tensor<2xf32>
  return %2 : tensor<2xf32>
}
func.func private @tick(%i: tensor<i32>, %y: tensor<2xf32>) -> (tensor<i32>, tensor<2xf32>) {
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0 = stablehlo.add %i, %one : tensor<i32>
  %1 = func.call @twice(%y) : (tensor<2xf32>) -> tensor<2xf32>
  %2 = func.call @more(%1) : (tensor<2xf32>) -> tensor<2xf32> loc("body")
  return %0, %2 : tensor<i32>, tensor<2xf32>
}
func.func private @twice(%y: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.add %y, %y : tensor<2xf32>
  return %0 : tensor<2xf32>
}
func.func private @more(%y: tensor<2xf32>) -> tensor<2xf32> {
  %one = stablehlo.constant dense<1.0> : tensor<2xf32>
  %0 = stablehlo.add %y, %one : tensor<2xf32> loc("add")
  return %0 : tensor<2xf32>
}
func.func private @other(%y: tensor<2xf32>) -> tensor<2xf32> {
  %0 = func.call @more(%y) : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
"""


def test_functions_with_one_caller_are_moved_into_the_loop():
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(MODULE)
        inline_in_loops(module)
        assert module.operation.verify()
        text = module.operation.get_asm(enable_debug_info=True)
        start = ir.DenseElementsAttr.get(np.array([1, 2], np.float32))
        (found,) = stablehlo.eval_module(module, [start])
        # 2 (2 (2 (2 x + 1) + 1) + 1)
        assert [*ir.DenseFPElementsAttr(found)] == [30, 46]
    assert "@tick" not in text and "@more" not in text and "@other" not in text
    assert text.count("call @twice") == 2
    assert '"layers/while/body/add"' in text


def test_functions_of_custom_calls_stay():
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse("""
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.custom_call @sort(%x) {called_computations = [@compare]}
    : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
func.func private @compare(%y: tensor<2xf32>) -> tensor<2xf32> {
  return %y : tensor<2xf32>
}
""")
        inline_in_loops(module)
        assert "@compare" in ir.SymbolTable(module.operation)["compare"].operation.get_asm()


# The largest number and its index, twice; nothing needs the first pair.
REDUCTIONS = """
func.func @main(%x: tensor<4xf32>, %i: tensor<4xi32>) -> tensor<i32> {
  %least = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %none = stablehlo.constant dense<4> : tensor<i32>
  %0:2 = stablehlo.reduce(%x init: %least), (%i init: %none) across dimensions = [0]
    : (tensor<4xf32>, tensor<4xi32>, tensor<f32>, tensor<i32>) -> (tensor<f32>, tensor<i32>)
    reducer(%a: tensor<f32>, %b: tensor<f32>) (%m: tensor<i32>, %n: tensor<i32>) {
      %1:2 = func.call @larger(%a, %m, %b, %n)
        : (tensor<f32>, tensor<i32>, tensor<f32>, tensor<i32>) -> (tensor<f32>, tensor<i32>)
      stablehlo.return %1#0, %1#1 : tensor<f32>, tensor<i32>
    }
  %2:2 = stablehlo.reduce(%x init: %least), (%i init: %none) across dimensions = [0]
    : (tensor<4xf32>, tensor<4xi32>, tensor<f32>, tensor<i32>) -> (tensor<f32>, tensor<i32>)
    reducer(%a: tensor<f32>, %b: tensor<f32>) (%m: tensor<i32>, %n: tensor<i32>) {
      %1:2 = func.call @larger(%a, %m, %b, %n)
        : (tensor<f32>, tensor<i32>, tensor<f32>, tensor<i32>) -> (tensor<f32>, tensor<i32>)
      stablehlo.return %1#0, %1#1 : tensor<f32>, tensor<i32>
    }
  return %2#1 : tensor<i32>
}
func.func private @larger(%a: tensor<f32>, %m: tensor<i32>, %b: tensor<f32>, %n: tensor<i32>)
    -> (tensor<f32>, tensor<i32>) {
  %0 = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
  %1 = stablehlo.select %0, %a, %b : tensor<i1>, tensor<f32>
  %2 = stablehlo.select %0, %m, %n : tensor<i1>, tensor<i32>
  return %1, %2 : tensor<f32>, tensor<i32>
}
"""


def test_reducers_have_copies_of_the_functions_that_they_call():
    """XLA ends the process at a reduction without users whose reducer has a call."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(REDUCTIONS)
        inline_in_reducers(module)
        assert module.operation.verify()
        assert "call @" not in str(module)
        compiled = jax.devices()[0].client.compile_and_load(
            str(module),
            xla_client.DeviceList(tuple(jax.devices()[:1])),
            xla_client.CompileOptions(),
        )
    given = [np.array([1, 7, 3, 5], np.float32), np.arange(4, dtype=np.int32)]
    (found,) = compiled.execute([jax.device_put(each, jax.devices()[0]) for each in given])
    assert int(found) == 1
