"""Counts the matrix products in the body of a kernel that Pallas wrote.

The body is a module of MLIR, in Mosaic's dialects for TPUs and in Triton's for GPUs. It says what
one cell of the kernel's grid computes. Integers are evaluated for all cells at once. Which
blocks are skipped is therefore known where it depends on the position in the grid, or on small
arrays that the program states, such as the blocks of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_gshard.core.lazy import ir, mlir, mosaic, triton

# Grids of more cells, and loops of more iterations of all cells, are counted by a sample.
_MOST_CELLS = 2**20
# Mosaic writes this prefix before the names of operations in files.
_STABLE = "stable_mosaic."
_PRODUCTS = frozenset(("tpu.matmul", "vector.contract", "tt.dot"))
_EXPONENTIALS = frozenset(("math.exp", "math.exp2"))
_LIBRARY_EXPONENTIAL = "__nv_exp"
_FUNCTIONS = frozenset(("func.func", "tt.func"))
_UNKNOWN_SIZE = -(2**63)


class Products(NamedTuple):
    """The products of all cells of a grid.

    Attributes:
      flops: their FLOPs; a multiply-add counts as two.
      dtype: MLIR's type of the factors of the largest product; "" without products.
      count: number of products in the body.
      has_exponentials: whether the body computes exponentials, as a softmax does.
      is_exact: whether all conditions and loops around products are known. If not, every block
        counts.
      is_whole: whether the number of iterations of all loops and of the grid is known.
    """

    flops: int
    dtype: str
    count: int
    has_exponentials: bool
    is_exact: bool
    is_whole: bool


class KernelBody:
    """The program of one cell of a kernel's grid.

    Attributes:
      grid: sizes of the grid of a kernel for TPUs; None for sizes that are arguments of the call.
        Calls of kernels for GPUs state the grid.
      prefetched: number of a TPU kernel's arguments that are whole arrays of scalars. They follow
        the position in the grid.
    """

    def __init__(self, body: bytes):
        """Reads the bytecode of a kernel's module."""
        context = mlir.make_ir_context()
        mosaic.register_dialect(context)
        triton.register_dialect(context)
        context.allow_unregistered_dialects = True
        with context, ir.Location.unknown():
            self._module = ir.Module.parse(body)
        operations = (each.operation for each in self._module.body.operations)
        # The other functions say where the blocks of the arguments begin.
        self._function = next(
            each for each in operations if each.name.removeprefix(_STABLE) in _FUNCTIONS
        )
        attributes = dict(self._function.attributes)
        sizes = attributes.get("iteration_bounds", ())
        self.grid = tuple(
            None if size == _UNKNOWN_SIZE else size
            for size in (ir.DenseI64ArrayAttr(sizes) if sizes else ())
        )
        count = attributes.get("scalar_prefetch")
        self.prefetched = ir.IntegerAttr(count).value if count else 0
        self.name = ir.StringAttr(attributes["sym_name"]).value

    def count(self, grid: Sequence[int], arrays: Mapping[int, np.ndarray]) -> Products:
        """Returns the products of all cells of a grid. `arrays` are known arguments, by number."""
        cells = math.prod(grid)
        sample = np.arange(0, cells, max(-(-cells // _MOST_CELLS), 1))
        indices = np.unravel_index(sample, tuple(grid)) if grid else ()
        (block,) = self._function.regions[0].blocks
        scope = _Scope(arrays={hash(block.arguments[at]): array for at, array in arrays.items()})
        if self._function.name.startswith(_STABLE):
            for argument, index in zip(block.arguments, indices, strict=False):
                scope[argument] = index
        run = _Run(indices)
        run.block(block, scope, np.full(len(sample), cells / max(len(sample), 1)))
        return run.products()


class _Scope:
    """Integer values of all cells; a loop's body has its own cells, one for each iteration."""

    def __init__(
        self,
        outer: _Scope | None = None,
        rows: np.ndarray | None = None,
        arrays: Mapping[int, np.ndarray] | None = None,
    ):
        self._values: dict[int, np.ndarray | None] = {}
        self._outer, self._rows = outer, rows
        self.arrays: Mapping[int, np.ndarray] = outer.arrays if outer else arrays or {}

    def __setitem__(self, value: ir.Value, known: np.ndarray | None) -> None:
        self._values[hash(value)] = known

    def __getitem__(self, value: ir.Value) -> np.ndarray | None:
        key = hash(value)
        if key in self._values or self._outer is None:
            return self._values.get(key)
        found = self._outer[value]
        return found if found is None or not found.ndim else found[self._rows]

    def all(self, values: Iterable[ir.Value]) -> list[np.ndarray] | None:
        """Returns several values; None if one of them is unknown."""
        found = [self[value] for value in values]
        known = [value for value in found if value is not None]
        return known if len(known) == len(found) else None


class _Run:
    """Runs a body on integers, and adds up its products."""

    def __init__(self, indices: Sequence[np.ndarray]):
        self._indices = indices
        self._flops = 0.0
        self._largest = (0, "")
        self._count = 0
        self._has_exponentials = False
        self._is_exact = self._is_whole = True

    def products(self) -> Products:
        """Returns what was counted."""
        return Products(
            *(round(self._flops), self._largest[1], self._count, self._has_exponentials),
            *(self._is_exact, self._is_whole),
        )

    def block(self, block: ir.Block, scope: _Scope, weights: np.ndarray) -> list[np.ndarray | None]:
        """Runs a block, in each cell `weights` times, and returns the values that it yields."""
        last = None
        for each in block.operations:
            last = each.operation
            self._operation(last, scope, weights)
        return [scope[operand] for operand in last.operands] if last else []

    def _operation(self, operation: ir.Operation, scope: _Scope, weights: np.ndarray) -> None:
        name = operation.name.removeprefix(_STABLE)
        self._has_exponentials |= name in _EXPONENTIALS or (
            name == "tt.extern_elementwise"
            and _LIBRARY_EXPONENTIAL in str(operation.attributes["symbol"])
        )
        if name in _PRODUCTS:
            flops = _product_flops(operation)
            dtype = str(ir.ShapedType(operation.operands[0].type).element_type)
            self._largest = max(self._largest, (flops, dtype))
            self._count += 1
            self._flops += flops * float(weights.sum())
        elif name == "scf.if":
            self._branches(operation, scope, weights)
        elif name == "scf.for":
            self._loop(operation, scope, weights)
        elif name == "scf.while":
            self._unknown_loop(operation, scope, weights)
        elif len(operation.regions):
            for region in operation.regions:
                for block in region.blocks:
                    self.block(block, scope, weights)
        elif len(operation.results) == 1:
            scope[operation.results[0]] = self._value(name, operation, scope)

    def _branches(self, operation: ir.Operation, scope: _Scope, weights: np.ndarray) -> None:
        condition = scope[operation.operands[0]]
        regions = [list(region.blocks) for region in operation.regions]
        yielded, before, flops = [], self._flops, []
        for blocks, is_taken in zip(regions, (1, 0), strict=True):
            self._flops = before
            of_branch = weights if condition is None else weights * (condition == is_taken)
            yielded += [self.block(block, scope, of_branch) for block in blocks]
            flops.append(self._flops - before)
        if condition is None:
            self._is_exact &= not any(flops)
            self._flops = before + max(flops)
            return
        self._flops = before + sum(flops)
        for result, *values in zip(operation.results, *yielded, strict=False):
            if not any(value is None for value in values):
                scope[result] = np.where(condition, *values)

    def _loop(self, operation: ir.Operation, scope: _Scope, weights: np.ndarray) -> None:
        bounds = scope.all(list(operation.operands)[:3])
        if bounds is None:
            self._unknown_loop(operation, scope, weights)
            return
        low, high, step = (np.broadcast_to(bound, weights.shape) for bound in bounds)
        trips = np.maximum(-(-(high - low) // np.maximum(step, 1)), 0) * (weights > 0)
        (block,) = operation.regions[0].blocks
        if trips.sum() > _MOST_CELLS:
            self.block(block, _Scope(scope, np.arange(len(weights))), weights * trips)
            return
        rows = np.repeat(np.arange(len(weights)), trips)
        within = _Scope(scope, rows)
        iterations = np.arange(len(rows)) - np.repeat(np.cumsum(trips) - trips, trips)
        within[block.arguments[0]] = low[rows] + iterations * step[rows]
        self.block(block, within, weights[rows])

    def _unknown_loop(self, operation: ir.Operation, scope: _Scope, weights: np.ndarray) -> None:
        """Counts one iteration."""
        before = self._flops
        for region in operation.regions:
            for block in region.blocks:
                self.block(block, scope, weights)
        self._is_whole &= self._flops == before

    def _value(self, name: str, operation: ir.Operation, scope: _Scope) -> np.ndarray | None:
        if name == "arith.constant":
            attribute = operation.attributes["value"]
            is_integer = isinstance(attribute, (ir.IntegerAttr, ir.BoolAttr))
            return np.asarray(int(attribute.value)) if is_integer else None
        if name == "tt.get_program_id":
            axis = ir.IntegerAttr(operation.attributes["axis"]).value
            return self._indices[axis] if axis < len(self._indices) else np.asarray(0)
        if name == "memref.load":
            source, *positions = operation.operands
            array, indices = scope.arrays.get(hash(source)), scope.all(positions)
            if array is None or indices is None:
                return None
            sizes = zip(indices, array.shape, strict=True)
            return array[tuple(np.clip(index, 0, size - 1) for index, size in sizes)]
        operands = scope.all(operation.operands)
        if operands is None:
            return None
        if name == "arith.cmpi":
            return _COMPARE[ir.IntegerAttr(operation.attributes["predicate"]).value](*operands) * 1
        if name == "arith.extsi" and str(operation.operands[0].type) == "i1":
            return -operands[0]
        compute = _INTEGERS.get(name)
        return None if compute is None else compute(*operands)


def _product_flops(operation: ir.Operation) -> int:
    """Returns the FLOPs of [..., M, K] x [..., K, N] -> [..., M, N], or of transposed factors."""
    left, right = (ir.ShapedType(operand.type).shape for operand in operation.operands[:2])
    out = ir.ShapedType(operation.results[0].type).shape
    batch = math.prod(out[:-2])
    return 2 * batch * math.isqrt(math.prod([*left, *right, *out]) // batch**3)


def _truncated(a: Any, b: Any) -> Any:
    """Returns a quotient that is rounded toward zero."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))


def _floor(a: Any, b: Any) -> Any:
    return a // np.where(b == 0, 1, b)


# By the number of the predicate: eq, ne, four signed and four unsigned comparisons.
_COMPARE = (*(np.equal, np.not_equal), *(np.less, np.less_equal, np.greater, np.greater_equal) * 2)
_INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.minsi": np.minimum,
    "arith.minui": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.maxui": np.maximum,
    "arith.divsi": _truncated,
    "arith.divui": _floor,
    "arith.floordivsi": _floor,
    "arith.ceildivsi": lambda a, b: -_floor(-a, b),
    "arith.remsi": lambda a, b: a - b * _truncated(a, b),
    "arith.remui": lambda a, b: a - b * _floor(a, b),
    "arith.shli": np.left_shift,
    "arith.shrsi": np.right_shift,
    "arith.select": np.where,
    **dict.fromkeys(
        (
            *("arith.index_cast", "arith.index_castui", "arith.extsi", "arith.extui"),
            *("arith.trunci", "tpu.assume_multiple"),
        ),
        lambda value: value,
    ),
}
