"""Counts the products that a jax program states before it is partitioned.

A partitioned program may compute a product on several devices alike. The program itself states each
product once, so its count is what all devices together have to compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.lazy import ir, mlir, sdy, stablehlo
from lingvo_gshard.runtime import Program
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.hlo import KernelCall, Kernels, Shape, convolution_flops

_NAMED = re.compile(r'loc\("([^"]*)"')
# Part of jax's names of operations that are computed again for the backward pass.
_RECOMPUTED = "rematted_computation"
# GSPMD begins a region for one device with this call.
_MANUAL = "SPMDFullToShardShape"
# The same of Shardy.
_REGION = "sdy.manual_computation"
# jax.lax.ragged_dot.
_GROUPED = "chlo.ragged_dot"
# Larger constants are no positions of blocks.
_LARGEST_ARRAY = 2**16


class _UnknownCountError(Exception):
    """The program does not tell how often a product is computed."""


def stated_flops(program: Program, kernel_flops: Mapping[str, float]) -> int | None:
    """Returns the FLOPs of a program's products on all devices, without recomputation.

    Returns None if the program does not tell how often its loops run, or has regions of GSPMD that
    are written for one device.
    """
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, program.module)
        counter = _Counter(module, program.mesh, Kernels(kernel_flops))
        try:
            return counter.function("main", (), False)
        except _UnknownCountError:
            return None


class _Counter:
    """Counts the products of a module."""

    def __init__(self, module: ir.Module, mesh: Mesh, kernels: Kernels):
        functions = (each.operation for each in module.body.operations)
        self._functions = {
            ir.StringAttr(each.attributes["sym_name"]).value: each
            for each in functions
            if each.name == "func.func"
        }
        self._mesh, self._kernels = mesh, kernels
        self._arguments: Sequence[np.ndarray | None] = ()

    def function(self, name: str, arguments: Sequence[np.ndarray | None], is_again: bool) -> int:
        """Returns the FLOPs of a function. The values of unknown arguments are None."""
        before, self._arguments = self._arguments, arguments
        found = self._regions(self._functions[name], is_again)[0]
        self._arguments = before
        return found

    def _regions(self, operation: ir.Operation, is_again: bool) -> list[int]:
        return [
            sum(self._flops(each.operation, is_again) for b in region.blocks for each in b)
            for region in operation.regions
        ]

    def _flops(self, operation: ir.Operation, is_again: bool) -> int:
        name = operation.name
        is_again = is_again or _RECOMPUTED in _name(operation)
        if name == "func.call":
            callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
            return self.function(callee, [*map(self._array, operation.operands)], is_again)
        if name == "stablehlo.composite":
            return self._composite(operation, is_again)
        if name == "stablehlo.while":
            _, body = self._regions(operation, is_again)
            return body * _trips(operation) if body else 0
        if name in ("stablehlo.case", "stablehlo.if"):
            return max(self._regions(operation, is_again))
        if name == _REGION:
            return self._regions(operation, is_again)[0] * self._shares(operation)
        if len(operation.regions):
            return sum(self._regions(operation, is_again))
        return 0 if is_again else self._product(operation)

    def _composite(self, operation: ir.Operation, is_again: bool) -> int:
        """Returns the FLOPs of an operation that is written as a function of others.

        The function of grouped products multiplies all rows by the weights of every group.
        """
        attributes = operation.attributes
        callee = ir.FlatSymbolRefAttr(attributes["decomposition"]).value
        flops = self.function(callee, [*map(self._array, operation.operands)], is_again)
        if ir.StringAttr(attributes["name"]).value != _GROUPED:
            return flops
        return flops // math.prod(ir.ShapedType(operation.operands[2].type).shape)

    def _product(self, operation: ir.Operation) -> int:
        if operation.name == "stablehlo.dot_general":
            numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
            left = ir.ShapedType(operation.operands[0].type).shape
            inner = math.prod(left[at] for at in numbers.lhs_contracting_dimensions)
            return 2 * math.prod(ir.ShapedType(operation.results[0].type).shape) * inner
        if operation.name == "stablehlo.convolution":
            return _convolution_flops(operation)
        if operation.name == "stablehlo.custom_call":
            return self._kernel(operation)
        return 0

    def _kernel(self, operation: ir.Operation) -> int:
        attributes = dict(operation.attributes)
        target = ir.StringAttr(attributes["call_target_name"]).value
        if target == _MANUAL:
            raise _UnknownCountError
        config = attributes.get("mhlo.backend_config", attributes.get("backend_config"))
        is_text = isinstance(config, ir.StringAttr)
        call = KernelCall(
            target=target,
            config=config.value_bytes if is_text else str(config).encode(),
            operation=_name(operation),
            operands=[_shape(operand) for operand in operation.operands],
            values=[self._array(operand) for operand in operation.operands],
        )
        work = self._kernels.work(call)
        return (work.flops or 0) if work else 0

    def _array(self, value: ir.Value) -> np.ndarray | None:
        """Returns a small constant that may have passed through functions and regions, or None."""
        if not isinstance(value.owner, ir.Block):
            return _constant(value)
        around, at = value.owner.owner.operation, ir.BlockArgument(value).arg_number
        if around.name == "func.func" and at < len(self._arguments):
            return self._arguments[at]
        if around.name != _REGION:
            return None
        given = around.operands[at]
        if not isinstance(given.owner, ir.Block) and given.owner.name == _REGION:
            # A part that each device made and passes on.
            (block,) = given.owner.regions[0].blocks
            given = list(block)[-1].operands[ir.OpResult(given).result_number]
        return self._array(given) if given.type == value.type else None

    def _shares(self, operation: ir.Operation) -> int:
        """Returns how many devices compute different parts of a region for one device each."""
        manual: Any = sdy.ManualAxesAttr(operation.attributes["manual_axes"])
        axes = set(manual)
        used = set()
        for side in ("in_shardings", "out_shardings"):
            for sharding in sdy.TensorShardingPerValueAttr(operation.attributes[side]).shardings:
                for dimension in sdy.TensorShardingAttr(sharding).dimension_shardings:
                    found = sdy.DimensionShardingAttr(dimension).axes
                    used |= {sdy.AxisRefAttr(axis).name for axis in found}
        return math.prod(self._mesh.axis_size(axis) for axis in axes & used)


def _name(operation: ir.Operation) -> str:
    """Returns jax's name of an operation; "" if it has none."""
    found = _NAMED.match(str(operation.location))
    return found[1] if found else ""


def _trips(operation: ir.Operation) -> int:
    """Returns the number of iterations of a loop that counts up by one, as jax's loops do."""
    (condition,) = operation.regions[0].blocks
    returned = list(condition)[-1].operation.operands[0].owner
    compare = getattr(returned, "operation", returned)
    if isinstance(compare, ir.Block) or compare.name != "stablehlo.compare":
        raise _UnknownCountError
    if "LT" not in str(compare.attributes["comparison_direction"]):
        raise _UnknownCountError
    counter, limit = (_initial(value, operation) for value in compare.operands)
    starts, ends = _constant(counter), _constant(limit)
    if starts is None or ends is None or starts.size != 1 or ends.size != 1:
        raise _UnknownCountError
    return max(int(ends.flat[0]) - int(starts.flat[0]), 0)


def _initial(value: ir.Value, loop: ir.Operation) -> ir.Value:
    """Returns what a value in a loop's condition is in the first iteration."""
    if isinstance(value.owner, ir.Block):
        return loop.operands[ir.BlockArgument(value).arg_number]
    return value


def _shape(value: ir.Value) -> Shape:
    if not isinstance(value.type, ir.RankedTensorType):
        return Shape("token")
    return Shape(str(value.type.element_type), tuple(value.type.shape))


def _constant(value: ir.Value) -> np.ndarray | None:
    """Returns the value of a small constant of integers; None for all other values."""
    if isinstance(value.owner, ir.Block) or value.owner.name != "stablehlo.constant":
        return None
    shape = ir.RankedTensorType(value.type)
    if math.prod(shape.shape) > _LARGEST_ARRAY or not isinstance(
        shape.element_type, ir.IntegerType
    ):
        return None
    dense = ir.DenseElementsAttr(value.owner.attributes["value"])
    if dense.is_splat:
        return np.full(shape.shape, int(ir.IntegerAttr(dense.get_splat_value()).value))
    return np.asarray(ir.DenseIntElementsAttr(dense)).reshape(shape.shape)


def _convolution_flops(operation: ir.Operation) -> int:
    attributes = dict(operation.attributes)
    numbers = stablehlo.ConvDimensionNumbers(attributes["dimension_numbers"])
    left, right, out = (
        ir.ShapedType(value.type).shape for value in (*operation.operands, operation.results[0])
    )
    count = len(numbers.input_spatial_dimensions)
    ones = np.ones(count, np.int64)

    def stated(name: str) -> np.ndarray:
        return np.asarray(ir.DenseI64ArrayAttr(attributes[name])) if name in attributes else ones

    padding = np.zeros((count, 2), np.int64)
    if "padding" in attributes:
        dense = ir.DenseElementsAttr(attributes["padding"])
        padding = np.asarray(ir.DenseIntElementsAttr(dense)).reshape(count, 2)
    columns = [stated("window_strides"), padding[:, 0], stated("lhs_dilation")]
    windows = np.stack([*columns, stated("rhs_dilation")], 1).tolist()
    groups = ir.IntegerAttr(attributes["batch_group_count"]).value
    return convolution_flops(numbers, left, right, out, windows) // groups
