"""Counts the products of kernels that other libraries wrote: calls of Pallas, Triton and cuDNN.

The kernels of this package name the share of their products (core/scopes.py); costs.py counts them.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from lingvo_gshard.core import UserError, scopes
from lingvo_gshard.core.lazy import ir, mlir
from lingvo_gshard.wings.hlo.kernel_body import KernelBody, Products
from lingvo_gshard.wings.hlo.loops import Values, constant_of
from lingvo_gshard.wings.hlo.module import Instruction, Shape
from lingvo_gshard.wings.hlo.operations import FusedAttention

MOSAIC, TRITON = "tpu_custom_call", "__gpu$xla.gpu.triton"
_CUDNN_ATTENTION = "__cudnn$fmha"
# Calls of code that only a library or the user knows, by target or by the name of jax's operation.
_OPAQUE = re.compile(r"mosaic_gpu|triton_kernel_call")
_OPAQUE_OPERATION = re.compile(r"/(ffi_call|pallas_call|triton_kernel_call)$")
# MLIR's names of types of integers begin with another letter than HLO's.
_INTEGER = re.compile(r"^i(?=\d)")
# A softmax has a product before and after it.
_PRODUCTS_OF_ATTENTION = 2


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """The products of one call of a kernel on one device.

    Attributes:
      flops: FLOPs of its products; None if they are unknown.
      dtype: HLO's type of the factors of its largest product; "" without products.
      attention: the attention that it computes, if it is one.
      note: what a plan must say about the count; empty if it is exact.
    """

    name: str
    flops: int | None
    dtype: str = ""
    attention: FusedAttention | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A call of a kernel in a program.

    Attributes:
      target: the target of XLA's custom call.
      operation: the name of the operation; may be empty.
      values: the operands' values where they are known.
    """

    target: str
    config: bytes
    operation: str
    operands: Sequence[Shape]
    values: Sequence[np.ndarray | None]


class Kernels:
    """The kernels of other libraries in a program, and notes about their counts.

    Args:
      estimates: regular expression for kernels' names -> FLOPs of one call on one device, which a
        user gives.
    """

    def __init__(self, estimates: Mapping[str, float] | None = None):
        self._estimates = dict(estimates or {})
        self._used: set[str] = set()
        self._calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self._names: dict[str, None] = {}

    def of_instruction(
        self, instruction: Instruction, values: Values, times: int
    ) -> KernelWork | None:
        """Returns the work of a call of a kernel; None for all other instructions.

        Args:
          values: the values of the computation that has the instruction.
          times: number of calls per step.
        """
        target = instruction.proto.custom_call_target
        is_kernel = instruction.opcode == "custom-call" and _is_kernel(target, instruction.op_name)
        if not is_kernel or scopes.FusedCall.of(instruction.op_name):
            return None
        # Blocks of a mask for long rows are a large constant.
        known = [
            values.of(operand) if constant is None else constant
            for operand in instruction.operands
            for constant in [constant_of(operand)]
        ]
        call = KernelCall(
            target=target,
            config=instruction.proto.backend_config,
            operation=instruction.op_name,
            operands=[operand.shape for operand in instruction.operands],
            values=[value if isinstance(value, np.ndarray) else None for value in known],
        )
        return self.work(call, times)

    def work(self, call: KernelCall, times: int = 1) -> KernelWork | None:
        """Returns the work of a call of a kernel; None for other custom calls."""
        if not _is_kernel(call.target, call.operation):
            return None
        found = _work(call)
        self._names[found.name] = None
        for pattern, flops in self._estimates.items():
            if re.search(pattern, found.name) or re.search(pattern, call.operation):
                self._used.add(pattern)
                note = f"counts {flops:.4g} FLOPs a call, as `kernel_flops` says"
                found = dataclasses.replace(found, flops=round(flops), note=note)
                break
        if found.note:
            self._calls[found.name, found.note] += times
        return found

    def notes(self) -> list[str]:
        """Returns notes on inexact counts. Raises UserError for an estimate of no kernel."""
        for pattern in self._estimates:
            if pattern not in self._used:
                names = ", ".join(self._names) or "none"
                raise UserError(
                    f"`kernel_flops={pattern}` matches no kernel of the compiled program; its "
                    f"kernels are: {names}"
                )
        return [
            f"kernel {name} ({calls:,} call{'s'[: calls != 1]} a step): {note}"
            for (name, note), calls in self._calls.items()
        ]


def _is_kernel(target: str, operation: str) -> bool:
    """Returns whether a custom call is one of another library's kernels."""
    is_known = target in (MOSAIC, TRITON) or target.startswith(_CUDNN_ATTENTION)
    return is_known or bool(_OPAQUE.search(target) or _OPAQUE_OPERATION.search(operation))


def _work(call: KernelCall) -> KernelWork:
    if call.target == MOSAIC:
        return _named(_of_mosaic(call.config, _hashable(call.values)), call)
    if call.target == TRITON:
        return _named(_of_triton(call.config), call)
    if call.target.startswith(_CUDNN_ATTENTION):
        return _of_cudnn(call)
    return KernelWork(call.target, None, note=_not_counted(call.target))


def _not_counted(name: str) -> str:
    return (
        "its products are not counted, so the step takes longer than planned. Give the FLOPs of "
        f"one call on one device as `kernel_flops={name}=...`"
    )


def _named(found: tuple[str, Products | None, int | None], call: KernelCall) -> KernelWork:
    """Returns the work of a kernel of Pallas from its name, products and declared FLOPs."""
    name, products, declared = found
    if products is None or not products.is_exact or not products.is_whole:
        if declared:
            dtype = _INTEGER.sub("s", products.dtype.lower()) if products else ""
            note = f"counts the {declared:.4g} FLOPs that it declares as its cost"
            return KernelWork(name, declared, dtype or _largest(call).dtype, note=note)
        if products is None or not products.is_whole:
            return KernelWork(name, None, note=_not_counted(name))
    flops, dtype = products.flops, _INTEGER.sub("s", products.dtype.lower())
    attention = None
    if products.has_exponentials and products.count >= _PRODUCTS_OF_ATTENTION:
        sizes = [max(shape.dimensions, default=1) for shape in call.operands]
        is_gradient = products.count > _PRODUCTS_OF_ATTENTION
        # The largest operand has the queries, or keys.
        head_dim = _largest(call).dimensions[-1]
        attention = FusedAttention(max(sizes), is_gradient, is_cudnn=False, head_dim=head_dim)
    exact = "" if products.is_exact else "which blocks it computes depends on data; all count"
    return KernelWork(name, flops, dtype, attention, exact)


def _largest(call: KernelCall) -> Shape:
    return max(call.operands, key=lambda shape: shape.size)


Arrays = tuple[tuple[bytes, tuple[int, ...], str] | None, ...]


def _hashable(arrays: Iterable[np.ndarray | None]) -> Arrays:
    return tuple(None if a is None else (a.tobytes(), a.shape, a.dtype.str) for a in arrays)


# Layers call the same kernels.
@functools.lru_cache(maxsize=256)
def _of_mosaic(config: bytes, arrays: Arrays) -> tuple[str, Products | None, int | None]:
    """Returns the name, the products and the declared FLOPs of a kernel for TPUs."""
    stated = msgspec.json.decode(config).get("custom_call_config", {})
    # XLA writes integers of 64 bits as texts.
    declared = int(stated.get("cost_estimate", {}).get("flops", 0)) or None
    body = _body(base64.b64decode(stated.get("body", "")))
    if body is None:
        return MOSAIC, None, declared
    # Sizes of the grid come first, then arrays of scalars.
    known = [
        None if a is None else np.frombuffer(a[0], a[2]).reshape(a[1]).astype(np.int64)
        for a in arrays
    ]
    sizes = iter(known)
    found = [next(sizes, None) if size is None else size for size in body.grid]
    grid = [int(size) for size in found if size is not None]
    if len(grid) < len(found):
        return body.name, None, declared
    prefetched = dict(enumerate(list(sizes)[: body.prefetched], len(grid)))
    whole = {at: array for at, array in prefetched.items() if array is not None}
    return body.name, _count(body, grid, whole), declared


@functools.lru_cache(maxsize=256)
def _of_triton(config: bytes) -> tuple[str, Products | None, int | None]:
    """Returns the name, the products and no declared FLOPs of a kernel of Triton."""
    with mlir.make_ir_context():
        stated = ir.DictAttr(ir.Attribute.parse(config.decode()))
        name = ir.StringAttr(stated["name"]).value
        content = ir.StringAttr(stated["ir"]).value_bytes
        grid = [ir.IntegerAttr(stated[f"grid_{axis}"]).value for axis in "xyz"]
    body = _body(content)
    return name, None if body is None else _count(body, grid, {}), None


def _count(
    body: KernelBody, grid: Sequence[int], arrays: Mapping[int, np.ndarray]
) -> Products | None:
    """Returns the products of a kernel; None if it is written in a way that is not known."""
    try:
        return body.count(grid, arrays)
    except (ir.MLIRError, ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _body(content: bytes) -> KernelBody | None:
    """Returns a kernel's body; None if this jax cannot read it."""
    try:
        return KernelBody(content)
    except (ir.MLIRError, ValueError, StopIteration, KeyError):
        return None


def _of_cudnn(call: KernelCall) -> KernelWork:
    """Returns the work of cuDNN's fused attention, as jax.nn.dot_product_attention calls it."""
    stated = msgspec.json.decode(call.config)["cudnn_fmha_backend_config"]
    sizes = [int(size) for size in stated["intermediate_tensor_shape"]["dimensions"]]
    batch, heads, queries, keys = sizes
    is_gradient = call.target.endswith("Backward")
    rows = np.arange(1, queries + 1)
    visible = np.full(queries, keys)
    if "CAUSAL" in stated.get("mask_type", ""):
        visible = np.minimum(rows, keys)
    window = int(stated.get("sliding_window_length", 0))
    if window > 0:
        visible = np.minimum(visible, window)
    pairs = batch * heads * int(visible.sum())
    query, _, values = call.operands[:3]
    # With D of the keys, and with D of the values.
    products = (3, 2) if is_gradient else (1, 1)
    flops = sum(
        2 * pairs * count * shape.dimensions[-1]
        for count, shape in zip(products, (query, values), strict=True)
    )
    attention = FusedAttention(keys, is_gradient, is_cudnn=True, head_dim=query.dimensions[-1])
    is_packed = "PADDING" in stated.get("mask_type", "")
    note = "the lengths of its rows depend on data; whole rows count" if is_packed else ""
    return KernelWork(call.target, flops, query.dtype, attention, note)
