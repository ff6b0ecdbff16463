# tests: runtime/lowering/lowering.py
"""Modules that differ in the numbers that TensorFlow gives to names become equal."""

from lingvo_gshard.core.lazy import ir, mlir
from lingvo_gshard.runtime.lowering.lowering import name_module

MODULE = """
module @{module} {{
  func.func private @{function}(%a: tensor<f32>) -> tensor<f32> {{
    %0 = stablehlo.constant dense<0.0> : tensor<f32> loc(fused["zeros_10/_{copy}", "body"])
    %1 = stablehlo.constant dense<1.0> : tensor<f32> loc("zeros_11/_{copy}")
    %2 = stablehlo.add %0, %1 : tensor<f32> loc("layer/_9")
    return %2 : tensor<f32>
  }}
  func.func public @main(%a: tensor<f32>) -> tensor<f32> {{
    %0 = func.call @{function}(%a) : (tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  }}
}}
"""


def named(**numbers: str) -> str:
    with mlir.make_ir_context():
        module = ir.Module.parse(MODULE.format(**numbers))
        name_module(module, "train_step")
        return module.operation.get_asm(enable_debug_info=True)


def test_numbers_of_functions_and_copies_are_taken_off():
    first = named(module="m_1", function="f_17", copy="5")
    second = named(module="m_2", function="f_23", copy="1")
    assert first == second
    assert '"zeros_10"' in first and '"zeros_11"' in first
    assert '"layer/_9"' in first and "@train_step" in first and "@function_0" in first
