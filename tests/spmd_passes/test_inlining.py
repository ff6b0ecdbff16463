"""Tests that functions which loops call are moved into the loops."""

import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from lingvo_gshard.wings.spmd_passes.inlining import inline_in_loops

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
