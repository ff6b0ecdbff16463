"""Sums over the iterations of a loop, reduced over devices once after the loop.

A training step with micro-batches adds up the gradients of its parts in a loop. Each gradient is a
product over rows that are split over devices, and XLA's partitioner reduces every term of the sum.
XLA's WhileLoopAllReduceCodeMotion would move the reduction behind the loop, but not out of two
loops: the gradients of stacked layers come from a loop over layers within the loop over parts.

This module writes the partial sums out (see partial_operations.py). A carried tensor that starts at
zero and is only added to gets a first dimension that is split over the devices, so that each device
adds up its own terms, and is summed over this dimension after the loop. An inner loop that stacks
terms, or adds them up, gets the same dimension. A device holds as much as before, the whole sum.
Sums that are themselves split over the devices stay as they are: a device would hold more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gshard.core.lazy import ir, stablehlo
from lingvo_gshard.runtime import annotation_of, maker_of, shape_of
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.spmd_passes import builders
from lingvo_gshard.wings.spmd_passes.partial_operations import (
    SLICE,
    Partial,
    moved,
    partial_of,
    passes,
)
from lingvo_gshard.wings.spmd_passes.value_splits import ValueSplits

_WHILE, _ADD, _UPDATE = "stablehlo.while", "stablehlo.add", "stablehlo.dynamic_update_slice"
_CONVERT, _BROADCAST = "stablehlo.convert", "stablehlo.broadcast_in_dim"
_MULTIPLY, _DIVIDE = "stablehlo.multiply", "stablehlo.divide"
_CALL, _RETURN = "func.call", "stablehlo.return"


def reduce_after_loops(module: ir.Module, mesh: Mesh) -> None:
    """Rewrites the sums of outermost loops whose terms each need a reduction over devices."""
    if mesh.size == 1:
        return
    loops: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name != _WHILE:
            return ir.WalkResult.ADVANCE
        loops.append(operation)
        return ir.WalkResult.SKIP

    main = ir.SymbolTable(module.operation)["main"]
    main.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    for loop in loops:
        paths = _Paths(module, mesh)
        if sums := paths.sums_of(loop):
            _Rewriting(paths, mesh, sums).run()


@dataclasses.dataclass(frozen=True)
class _Carried:
    """A tensor that a loop carries, starts at zero, and changes by adding or writing one term."""

    loop: ir.Operation
    index: int
    update: ir.Operation
    term: ir.Value
    movers: tuple[ir.Operation, ...]

    @property
    def result(self) -> ir.Value:
        """The tensor after the loop."""
        return self.loop.results[self.index]

    @property
    def returned(self) -> ir.Value:
        """The tensor after an iteration."""
        return self.movers[-1].results[0] if self.movers else self.update.results[0]


class _Paths:
    """Finds how values are computed from partial sums by operations that keep sums."""

    def __init__(self, module: ir.Module, mesh: Mesh):
        self._functions = ir.SymbolTable(module.operation)
        self._mesh = mesh
        self.splits = ValueSplits(mesh)
        self._axes: dict[ir.Value, builders.Axes | None] = {}
        self.partials: dict[ir.Value, Partial] = {}

    def sums_of(self, loop: ir.Operation) -> list[_Carried]:
        """Returns the sums of a loop that can be reduced after it."""
        found = [self._carried(loop, index) for index in range(len(loop.results))]
        sums = [one for one in found if one and one.update.name == _ADD and self._is_whole(one)]
        while True:
            paths = {one.index: set(self.between(one)) for one in sums}
            every = {operation for path in paths.values() for operation in path}
            kept = [one for one in sums if self._is_closed(paths[one.index], every, one)]
            if len(kept) == len(sums):
                return sums
            sums = kept

    def axes_of(self, value: ir.Value) -> builders.Axes | None:
        """Returns the mesh axes that a value's partial sums are split over; None without any."""
        if value not in self._axes:
            self._axes[value] = self._find_axes(value)
        return self._axes[value]

    def carried_by(self, value: ir.Value) -> _Carried | None:
        """Returns what a result of a loop is the last value of; None for other values."""
        maker = maker_of(value)
        if maker is None or maker.name != _WHILE:
            return None
        return self._carried(maker, ir.OpResult(value).result_number)

    def operations(self, value: ir.Value) -> Iterator[ir.Operation]:
        """Yields the operations between a value and the partial sums it is computed from."""
        if carried := self.carried_by(value):
            yield from self.between(carried)
            return
        maker = maker_of(value)
        assert maker is not None, "a value without an operation has no partial sums"
        yield maker
        if value not in self.partials:
            for operand in summed_operands(maker):
                yield from self.operations(operand)

    def between(self, carried: _Carried) -> Iterator[ir.Operation]:
        """Yields the operations between a carried tensor and the partial sums it adds up."""
        yield from (carried.update, *carried.movers)
        yield from self.operations(carried.term)

    def _find_axes(self, value: ir.Value) -> builders.Axes | None:
        maker = maker_of(value)
        if maker is None:
            return None
        if partial := partial_of(maker, self.splits, self._mesh):
            self.partials[value] = partial
            return partial.axes
        if carried := self.carried_by(value):
            return self.axes_of(carried.term)
        found = {self.axes_of(operand) for operand in summed_operands(maker)}
        return found.pop() if len(found) == 1 else None

    def _is_whole(self, carried: _Carried) -> bool:
        """Returns whether each device holds the whole sum, over the axes it is reduced over."""
        axes = self.axes_of(carried.term)
        split = self.splits.of(carried.returned) if shape_of(carried.returned) else ()
        if not axes or split is None:
            return False
        return not {axis for each in split for axis in each} & set(axes)

    def _is_closed(
        self, path: Iterable[ir.Operation], every: set[ir.Operation], root: _Carried
    ) -> bool:
        """Returns whether the operations of a path are used by operations of paths only."""
        for operation in path:
            for result in operation.results:
                for use in result.uses:
                    user = use.owner.operation
                    if user.name != _RETURN and user not in every:
                        return False
        return all(
            use.owner.operation in every
            for inner in self.inner(root.term)
            for use in inner.result.uses
        )

    def inner(self, value: ir.Value) -> Iterator[_Carried]:
        """Yields the carried tensors of inner loops that a value is computed from."""
        if carried := self.carried_by(value):
            yield carried
            yield from self.inner(carried.term)
        elif value not in self.partials and (maker := maker_of(value)):
            for operand in summed_operands(maker):
                yield from self.inner(operand)

    def _carried(self, loop: ir.Operation, index: int) -> _Carried | None:
        condition, body = (region.blocks[0] for region in loop.regions)
        argument = body.arguments[index]
        if not builders.is_float(argument) or not builders.is_zero(loop.operands[index]):
            return None
        movers, update = [], maker_of(body.operations[-1].operands[index])
        while update and passes(update) and len(list(update.results[0].uses)) == 1:
            movers.insert(0, update)
            update = maker_of(update.operands[0])
        users = [use.owner.operation for use in argument.uses]
        if update is None or users != [update] or update.name not in (_ADD, _UPDATE):
            return None
        is_first = update.operands[0] == argument
        if update.name == _UPDATE and not is_first:
            return None
        if not self._is_ignored(condition.arguments[index]):
            return None
        return _Carried(loop, index, update, update.operands[1 if is_first else 0], tuple(movers))

    def _is_ignored(self, argument: ir.Value) -> bool:
        """Returns whether no operation but calls uses an argument, and their functions do not."""
        for use in argument.uses:
            user = use.owner.operation
            if user.name != _CALL:
                return False
            callee = self._functions[ir.FlatSymbolRefAttr(user.attributes["callee"]).value]
            if not self._is_ignored(callee.regions[0].blocks[0].arguments[use.operand_number]):
                return False
        return True


def summed_operands(operation: ir.Operation) -> Sequence[ir.Value]:
    """Returns the operands whose partial sums an operation turns into partial sums of its result.

    The operations are linear: f(x + y) = f(x) + f(y), except for rounding.
    """
    operands = list(operation.operands)
    if operation.name == _CONVERT:
        return (
            operands
            if builders.is_float(operands[0]) and builders.is_float(operation.results[0])
            else ()
        )
    if passes(operation) or operation.name in (SLICE, "stablehlo.negate", _ADD):
        return operands
    if operation.name == _MULTIPLY and _number(operands[0]) is not None:
        return operands[1:]
    if operation.name in (_MULTIPLY, _DIVIDE) and _number(operands[1]) is not None:
        return operands[:1]
    return ()


def _number(value: ir.Value) -> ir.Value | None:
    """Returns the scalar that all elements of a tensor are equal to; None if they may differ."""
    maker = maker_of(value)
    if maker is None or maker.name != _BROADCAST or shape_of(maker.operands[0]):
        return None
    return maker.operands[0]


class _Rewriting:
    """The rewriting of the sums of one outermost loop."""

    def __init__(self, paths: _Paths, mesh: Mesh, sums: Sequence[_Carried]):
        self._paths, self._mesh, self._sums = paths, mesh, sums
        self._built: dict[ir.Value, ir.Value] = {}
        self._by_loop: dict[ir.Operation, dict[int, _Carried]] = {}
        self._replaced: list[ir.Operation] = []
        for one in sums:
            self._replaced += paths.between(one)
            for carried in (one, *paths.inner(one.term)):
                self._by_loop.setdefault(carried.loop, {})[carried.index] = carried
                self._replaced.append(carried.loop)

    def run(self) -> None:
        """Rewrites the loop, and sums over devices after it."""
        loop = self._sums[0].loop
        with loop.location:
            self._rewrite(loop)
            for one in self._sums:
                self._reduce(one)
        assert not builders.erase_unused(self._replaced), "a replaced operation is in use"

    def _rewrite(self, loop: ir.Operation) -> None:
        """Makes a loop carry partial sums."""
        carried = self._by_loop[loop]
        condition, body = (region.blocks[0] for region in loop.regions)
        operands = list(loop.operands)
        for index, one in carried.items():
            term = self._build(one.term)
            axes = self._paths.axes_of(one.term)
            assert axes is not None
            if one in self._sums:
                with ir.InsertionPoint(one.update), one.update.location:
                    term = _converted(term, one.result)
            kind = builders.type_like(term, [self._mesh.parts(axes), *shape_of(one.result)])
            split = self._paths.splits.of(one.returned) or self._paths.splits.of(one.term)
            split = builders.with_first(axes, split or ((),) * len(shape_of(one.result)))
            body.arguments[index].set_type(kind)
            with ir.InsertionPoint(one.update), one.update.location:
                changed = self._updated(one, body.arguments[index], term)
                body.operations[-1].operation.operands[index] = builders.split_over(
                    changed, split, self._mesh
                )
            with ir.InsertionPoint(loop), loop.location:
                operands[index] = builders.split_over(
                    builders.constant(0.0, kind), split, self._mesh
                )
        for index, one in carried.items():
            argument = condition.arguments[index]
            with ir.InsertionPoint.at_block_begin(condition), loop.location:
                argument.replace_all_uses_with(builders.constant(0.0, one.result.type))
            argument.set_type(operands[index].type)
        with ir.InsertionPoint(loop), loop.location:
            new = ir.Operation.create(
                _WHILE,
                results=[each.type for each in operands],
                operands=operands,
                attributes={name: loop.attributes[name] for name in loop.attributes},
                regions=2,
            )
        condition.append_to(new.regions[0])
        body.append_to(new.regions[1])
        for index, (old, result) in enumerate(zip(loop.results, new.results, strict=True)):
            if index in carried:
                self._built[old] = result
            else:
                old.replace_all_uses_with(result)

    def _updated(self, one: _Carried, argument: ir.Value, term: ir.Value) -> ir.Value:
        """Returns the carried partial sums after an iteration."""
        if one.update.name == _ADD:
            return stablehlo.add(argument, term)
        starts = list(one.update.operands)[2:]
        zero = ir.IntegerAttr.get(ir.RankedTensorType(starts[0].type).element_type, 0)
        first = stablehlo.constant(ir.DenseElementsAttr.get_splat(starts[0].type, zero))
        return stablehlo.dynamic_update_slice(argument, term, [first, *starts])

    def _build(self, value: ir.Value) -> ir.Value:
        if value not in self._built:
            maker = maker_of(value)
            assert maker is not None
            if value in self._paths.partials:
                self._built[value] = self._start(value, maker)
            elif maker.name == _WHILE:
                self._rewrite(maker)
            else:
                operands = [self._build(operand) for operand in summed_operands(maker)]
                with ir.InsertionPoint(maker), maker.location:
                    self._built[value] = self._computed(maker, operands)
        return self._built[value]

    def _start(self, value: ir.Value, maker: ir.Operation) -> ir.Value:
        partial = self._paths.partials[value]
        split = self._paths.splits.of(value) or ((),) * len(shape_of(value))
        built = partial.build()
        with ir.InsertionPoint(maker), maker.location:
            return builders.split_over(built, builders.with_first(partial.axes, split), self._mesh)

    def _computed(self, maker: ir.Operation, operands: Sequence[ir.Value]) -> ir.Value:
        """Returns the result of an operation on partial sums.

        Partial sums are not rounded to a narrower type: the program would round their sum only.
        """
        x, result = max(operands, key=_bits), maker.results[0]
        if passes(maker) or maker.name == SLICE:
            axes = self._paths.axes_of(result)
            assert axes is not None
            return moved(x, [maker], axes, self._mesh)
        if maker.name == _CONVERT:
            return x if _bits(result) < _bits(x) else _converted(x, result)
        kind = builders.type_like(x, [shape_of(x)[0], *shape_of(result)])
        if maker.name in (_MULTIPLY, _DIVIDE):
            numbers = [_number(operand) for operand in reversed(maker.operands)]
            number = next(each for each in numbers if each is not None)
            operands = [x, stablehlo.broadcast_in_dim(kind, _converted(number, x), [])]
        converted = [_converted(operand, x) for operand in operands]
        return ir.Operation.create(maker.name, results=[kind], operands=converted).results[0]

    def _reduce(self, one: _Carried) -> None:
        """Replaces a sum by the sum of its partial sums over devices.

        If the program rounds the sum to a narrower type, the partial sums are rounded, so that
        fewer bytes are reduced.
        """
        value, partial = one.result, self._built[one.result]
        last, rounding = value, None
        while (user := _only_user(last)) and (passes(user) or user.name == _CONVERT):
            last = user.results[0]
            if user.name == _CONVERT and _bits(last) < _bits(value):
                rounding = user
                break
        with ir.InsertionPoint(one.loop), one.loop.location:
            if rounding is not None:
                partial = _converted(partial, rounding.results[0])
            total = builders.summed(partial, [0])
            if annotations := [mover for mover in one.movers if annotation_of(mover)]:
                total = moved(total, annotations[-1:])
            total = _converted(total, value)
        value.replace_all_uses_with(total)


def _only_user(value: ir.Value) -> ir.Operation | None:
    users = [use.owner.operation for use in value.uses]
    return users[0] if len(users) == 1 else None


def _converted(value: ir.Value, like: ir.Value) -> ir.Value:
    """Returns a value with the type of element of another value."""
    kind = builders.type_like(like, shape_of(value))
    return value if kind == value.type else stablehlo.convert(kind, value)


def _bits(value: ir.Value) -> int:
    element = ir.RankedTensorType(value.type).element_type
    return element.width if isinstance(element, ir.FloatType) else 0
