"""Reads the graph that a wrong tensor is computed from: operations that can be wrong on a mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec

from lingvo_gshard.core import known_sizes, tf
from lingvo_gshard.sharding import Mesh, xla
from lingvo_gshard.wings.tracing.source_lines import line_of_operation
from lingvo_gshard.wings.verification.findings import REGION_END, sources

# Beginnings of the types of stateful operations, such as RandomUniformInt.
_STATEFUL = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Random",
    "StatefulRandom",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "TruncatedNormal",
)
_STATELESS = ("StatelessMultinomial", "StatelessRandom", "StatelessTruncatedNormal")
# Operations on keys draw no random numbers. The operations that they are computed from may.
_KEYS = ("StatelessRandomGetAlg", "StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg")


class RandomOperation(msgspec.Struct, frozen=True):
    """A random operation that ignores the keys of the step."""

    kind: str
    is_stateless: bool
    source: str

    def __str__(self) -> str:
        how = "a fixed seed of its own" if self.is_stateless else "a generator of its own"
        at = f" at {self.source}" if self.source else ""
        return f"{self.kind}{at} draws from {how}"


def nearest_random_operation(
    tensor: tf.Tensor, equal: Collection[tf.Operation] = ()
) -> RandomOperation | None:
    """Returns the nearest random operation without a key that a tensor is computed from.

    A key of the step is computed from one of its inputs. A fixed seed gives equal numbers on all
    meshes, except in a manual region, where each device draws numbers for its own shard.
    """
    in_region = False
    for operation in sources(tensor.op, equal):
        in_region |= operation.type == REGION_END
        if operation.type.startswith(_STATEFUL):
            return RandomOperation(operation.type, False, line_of_operation(operation))
        is_stateless = operation.type.startswith(_STATELESS) and operation.type not in _KEYS
        if is_stateless and in_region:
            # After the shape come the seed, or the key and the counter.
            seeds = [x for x in operation.inputs[1:3] if x.dtype.is_integer]
            if not any(each.type == "Placeholder" for x in seeds for each in sources(x.op)):
                return RandomOperation(operation.type, True, line_of_operation(operation))
    return None


# Operations along a dimension that need more than a sum of the devices' parts.
_ALONG = {
    "Mean": "averages",
    "Max": "takes the maximum",
    "Min": "takes the minimum",
    "Prod": "multiplies",
    "Softmax": "normalizes",
    "LogSoftmax": "normalizes",
    "Cumsum": "adds up",
    "Cumprod": "multiplies up",
    "CumulativeLogsumexp": "adds up",
    "ArgMax": "takes the maximum",
    "ArgMin": "takes the minimum",
    "TopKV2": "takes the largest",
    "StridedSlice": "takes a part",
    "GatherV2": "gathers",
}
# These are wrong only along a dimension that a collective has joined.
_OF_JOINED = ("StridedSlice", "GatherV2")
_OF_LAST = ("Softmax", "LogSoftmax", "TopKV2")
_PRODUCTS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
_QUOTIENTS = ("RealDiv", "DivNoNan")
_MOST_FACTS = 2


def facts_of_region(
    operations: Iterable[tf.Operation], names: Collection[str], mesh: Mesh
) -> list[str]:
    """Returns what operations, the nearest first, do along dimensions that mesh axes cut."""
    facts = []
    for operation in operations:
        if fact := _fact(operation, names, mesh):
            facts.append(f"{operation.type}{_at(operation)} {fact}")
    return list(dict.fromkeys(facts))[:_MOST_FACTS]


def _at(operation: tf.Operation) -> str:
    line = line_of_operation(operation)
    return f" at {line}" if line else ""


def _fact(operation: tf.Operation, names: Collection[str], mesh: Mesh) -> str:
    """Returns what an operation does along a dimension that devices have parts of; "" if none."""
    if operation.type in _QUOTIENTS:
        _, over = (_summed_axes(x, mesh) for x in operation.inputs)
        if set(over) & set(names) and over == _summed_axes(operation.inputs[0], mesh):
            axes = " and ".join(over)
            return (
                f"divides a sum of one shard along {axes} by another: a mean of the devices' means "
                f"is not the mean of all. Sum both over {axes} (psum) before"
            )
        return ""
    how = _ALONG.get(operation.type, "")
    for dimension in _dimensions(operation) if how else ():
        axes, is_joined = _axes_of_dimension(operation.inputs[0], dimension, mesh)
        if set(axes) & set(names) and (is_joined or operation.type not in _OF_JOINED):
            over = " and ".join(axes)
            if is_joined:
                return (
                    f"{how} along dimension {dimension}, which joins the parts of devices along "
                    f"{over}: psum is meant if these are partial sums"
                )
            return f"{how} along dimension {dimension} of one shard along {over}"
    return ""


def _dimensions(operation: tf.Operation) -> list[int]:
    """Returns the dimensions that an operation works along."""
    rank = operation.inputs[0].shape.rank
    if rank is None:
        return []
    if operation.type in _OF_LAST:
        return [rank - 1]
    if operation.type == "StridedSlice":
        return [0] if _takes_one_index(operation) else []
    given = tf.get_static_value(operation.inputs[2 if operation.type == "GatherV2" else 1])
    return [] if given is None else [int(d) % rank for d in given.ravel()]


def _takes_one_index(operation: tf.Operation) -> bool:
    """Returns whether an operation is x[i]."""
    if operation.type != "StridedSlice" or operation.get_attr("shrink_axis_mask") != 1:
        return False
    return operation.outputs[0].shape == operation.inputs[0].shape[1:]


def _summed_axes(tensor: tf.Tensor, mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of the shards whose elements a tensor is the sum of; () if none."""
    for each in _origins(tensor):
        if each.op.type in ("Sum", "Mean"):
            source = each.op.inputs[0]
            found = (_axes_of_dimension(source, d, mesh) for d in _dimensions(each.op))
            return next((axes for axes, is_joined in found if axes and not is_joined), ())
    return ()


def _origins(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields a shard, the first tensor it is computed from, and so on to the region's start."""
    yield tensor
    while tensor.op.type not in (xla.ENTER_REGION, xla.LEAVE_REGION):
        op = tensor.op
        of_op = [op.inputs[tensor.value_index]] if op.type == "IdentityN" else op.inputs
        tensors = [x for x in of_op if x.op.type != "Const"]
        if not tensors:
            return
        tensor = tensors[0]
        yield tensor


def _axes_of_dimension(
    tensor: tf.Tensor, dimension: int, mesh: Mesh
) -> tuple[tuple[str, ...], bool]:
    """Returns the axes whose devices have parts of a dimension, and whether they were joined.

    A shard's dimensions are known at the start of its region, and as long as operations keep them.
    """
    result = tensor
    for each in _origins(tensor):
        if each is not result and not _keeps(result, each, dimension):
            return (), False
        result = each
        if _takes_one_index(each.op):
            # Collectives stack shards along a first dimension, whose only index they take.
            dimension, result = dimension + 1, each.op.inputs[0]
        elif each.op.type == xla.ENTER_REGION:
            inside = _split(each.op, mesh)
            joined = [x.op for x in _origins(each.op.inputs[0]) if x.op.type == xla.LEAVE_REGION]
            kept = all(x.shape == each.op.inputs[0].shape for x in _origins(each.op.inputs[0]))
            outside = _split(joined[0], mesh) if joined and kept else ()
            if inside and inside[dimension]:
                return inside[dimension], False
            return (outside[dimension], True) if outside else ((), False)
    return (), False


def _keeps(result: tf.Tensor, source: tf.Tensor, dimension: int) -> bool:
    """Returns whether a dimension of a result is the same dimension of what it is computed from."""
    mine, its = known_sizes(result.shape), known_sizes(source.shape)
    if result.op.type in _PRODUCTS and dimension == len(mine) - 1:
        return False
    is_moved = result.op.type == "Transpose"
    # Slices, reductions and reshapes of later dimensions keep all dimensions before them.
    return not is_moved and mine[: dimension + 1] == its[: dimension + 1]


def _split(operation: tf.Operation, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Returns the axes that split the full tensor at the start or end of a region."""
    full = operation.inputs[0] if operation.type == xla.ENTER_REGION else operation.outputs[0]
    return xla.split_of(operation.get_attr("manual_sharding"), full.shape.rank, mesh) or ()


# The largest relative error of rounding to narrow types.
_ROUNDING = {
    "bfloat16": 2.0**-9,
    "float16": 2.0**-12,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
# Errors add up over so many roundings at most.
_ROUNDINGS = 8


def rounding(operations: Iterable[tf.Operation], relative: float) -> str:
    """Returns a sentence if a difference can be the rounding of a narrow type; otherwise ""."""
    for operation in operations:
        name = operation.outputs[0].dtype.name if operation.outputs else ""
        if relative <= _ROUNDINGS * _ROUNDING.get(name, 0.0):
            return (
                f"the difference has the size of rounding in {name}, the type{_at(operation)}: "
                "each device rounds its own part. Add in float32"
            )
    return ""
