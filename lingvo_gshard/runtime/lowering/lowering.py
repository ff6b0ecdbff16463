"""Lowering: traces a TensorFlow function under a partitioning and makes a Program of it.

Caches find a compiled program by the digest of its bytes. A step must therefore lower to identical
bytes in every process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from lingvo_gshard.core import Layer, Seam, UserError, kernel_use, known_sizes, tf
from lingvo_gshard.core.autodiff import custom_gradient
from lingvo_gshard.core.lazy import ir, mlir, stablehlo
from lingvo_gshard.core.memory_kinds import MOVE
from lingvo_gshard.runtime.lowering import folding
from lingvo_gshard.runtime.lowering.operations import call_target, operations_of, shorten_shardings
from lingvo_gshard.runtime.lowering.variables import (
    Captured,
    HeldVariable,
    captured,
    remove_copies,
    remove_last_barriers,
    write_all,
)
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program import Program, writers_versions
from lingvo_gshard.sharding import Mesh, Partitioning, Split, recording, use_partitioning, xla
from lingvo_gshard.sharding.platforms import KERNEL_BODIES, PLATFORMS

# (path, tensor, split) of each output; a split of None leaves the layout to the partitioner.
ProgramOutputs: TypeAlias = "Sequence[tuple[str, tf.Tensor, Split | None]]"

# A feature rewrites a StableHLO module in place, as TensorFlow has made it.
FIRST_LOWERING_PASSES: Seam[Callable[[ir.Module], None]] = Seam("first_lowering_passes")
# A feature rewrites a StableHLO module in place before XLA partitions it over a mesh.
LOWERING_PASSES: Seam[Callable[[ir.Module, Mesh], None]] = Seam("lowering_passes")


class Partitioner(Protocol):
    """A partitioner of XLA that reads other annotations than GSPMD, which TensorFlow writes."""

    def check(self, model: Layer, mesh: Mesh) -> None:
        """Raises UserError if it cannot partition a model over a mesh."""
        ...

    def rewrite(self, module: ir.Module, mesh: Mesh) -> None:
        """Rewrites the annotations of a module. Raises UserError if it cannot partition it."""
        ...


PARTITIONERS: Seam[Partitioner] = Seam("partitioners")

# Rewrites a StableHLO module in place.
Rewrite: TypeAlias = "Callable[[ir.Module], None]"
# Makes a context to trace a function in. The context yields what the lowered module needs first.
Tracing: TypeAlias = "Callable[[], contextlib.AbstractContextManager[Rewrite | None]]"


def lower(
    name: str,
    function: Callable[..., ProgramOutputs],
    inputs: Sequence[Array],
    partitioning: Partitioning,
    donated: Sequence[int] = (),
    partitioner: str = "gspmd",
    tracing: Tracing = contextlib.nullcontext,
    variables: Sequence[HeldVariable] = (),
) -> Program:
    """Returns a function of flat tensors as a Program.

    Variables follow the inputs in the order of their first use. Their new values follow the outputs
    and take their memory. The path of an input names its variable.

    Args:
      function: takes one tensor per input and returns its outputs. Tensors that it captures become
        constants.
      inputs: the program's inputs. Inputs without a split get the one the function annotates.
      donated: indices of the inputs whose memory the outputs may reuse.
      variables: all variables that the function may use.

    Raises:
      UserError: the function uses another variable, or the shape of an output depends on values.
    """
    described: list[tuple[str, tf.Tensor, Split | None]] = []

    def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
        described[:] = function(*tensors)
        write_all(variables)
        return [tensor for _, tensor, _ in described]

    # Kernels need manual regions. TensorFlow has no operations for Shardy's.
    partitioning = partitioning if partitioner == "gspmd" else partitioning.on("")
    traced = tf.function(flat, jit_compile=True, autograph=False)
    specs = [tf.TensorSpec(a.shape, a.dtype, f"input_{i}") for i, a in enumerate(inputs)]
    started = time.monotonic()
    with _tracing(partitioning), tracing() as rewrite, kernel_use.recording() as kernels:
        concrete = traced.get_concrete_function(*specs)
        traced_at = time.monotonic()
        recording.set_graph(concrete.graph)
        outputs = [_output(name, *output) for output in described]
        found = captured(name, concrete, variables)
        module = _stablehlo(traced, specs)
    state, pairs = [each.array for each in found.held], zip(inputs, concrete.inputs, strict=False)
    return Program(
        name=name,
        module=_portable(name, module, found, partitioning, partitioner, rewrite),
        inputs=(*(_with_annotated_split(*pair, partitioning) for pair in pairs), *state),
        outputs=(*outputs, *state),
        donated=(*donated, *range(len(inputs), len(inputs) + len(state))),
        kernels=tuple(sorted(kernels)),
        mesh=partitioning.mesh,
        partitioner=partitioner,
        strategy=partitioning.strategy.to_text(),
        flags=os.environ.get("XLA_FLAGS", ""),
        versions=writers_versions(tensorflow=tf.__version__),
        tracing_seconds=traced_at - started,
        lowering_seconds=time.monotonic() - traced_at,
    )


def check_layers(model: Layer, mesh: Mesh, partitioner: str) -> None:
    """Raises UserError, before anything is traced, if a partitioner cannot partition a model."""
    if partitioner in PARTITIONERS:
        PARTITIONERS[partitioner].check(model, mesh)


@contextlib.contextmanager
def _tracing(partitioning: Partitioning) -> Iterator[None]:
    with (
        use_partitioning(partitioning),
        tf.device("/device:CPU:0"),
        custom_gradient.forgetting_gradients(),
    ):
        yield


def _stablehlo(traced: tf.types.experimental.PolymorphicFunction, specs: list) -> bytes:
    """Returns TensorFlow's StableHLO, whose size does not depend on the sizes of tensors.

    TensorFlow always lowers for "CPU". Only its TPU builds have the XlaSharding kernel for TPU, and
    at this stage StableHLO does not depend on the platform.

    Few operations that compute shapes can only be lowered with constant folding. A function that
    has one is lowered with it, and may have large literals.
    """

    def lowered() -> bytes:
        return traced.experimental_get_compiler_ir(*specs)(
            stage="stablehlo_serialized", platform_name="CPU"
        )

    try:
        with folding.without_folding():
            return lowered()
    except ValueError as error:
        if "must be a compile-time constant" not in str(error):
            raise
    return lowered()


def _with_annotated_split(array: Array, tensor: tf.Tensor, partitioning: Partitioning) -> Array:
    """Returns an input with a split. By default an input is split as its first annotation asks."""
    if array.split is not None:
        return array
    split = ((),) * len(array.shape)
    for consumer in tensor.consumers():
        if consumer.type == "XlaSharding":
            found = xla.split_of(consumer.get_attr("sharding"), len(array.shape), partitioning.mesh)
            split = partitioning.storage_split(array.shape, found or split)
            break
    return dataclasses.replace(array, split=split)


def _output(name: str, path: str, tensor: tf.Tensor, split: Split | None) -> Array:
    """Returns a program's output. Raises ValueError if its shape depends on values."""
    if not tensor.shape.is_fully_defined():
        raise UserError(
            f"{name}: {path} has the shape {tensor.shape}, which depends on values. XLA needs a "
            "fixed shape"
        )
    return Array(path, tuple(known_sizes(tensor.shape)), tensor.dtype.name, split)


def _portable(
    name: str,
    module: bytes,
    found: Captured,
    partitioning: Partitioning,
    partitioner: str,
    first: Rewrite | None,
) -> bytes:
    """Returns TensorFlow's StableHLO as a portable artifact, which other versions can read."""
    mesh = partitioning.mesh
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        remove_copies(parsed)
        name_module(parsed, name)
        version = stablehlo.get_minimum_version()
        # The names of calls mark the operations of kernels, whose functions must not be inlined.
        for rewrite in FIRST_LOWERING_PASSES:
            rewrite(parsed)
        has_moves = _name_memory_kinds(parsed)
        has_kernels = partitioning.platform in PLATFORMS
        if has_kernels:
            for replace_marks in KERNEL_BODIES:
                replace_marks(parsed, partitioning.platform)
        if has_kernels or has_moves:
            # The oldest version has no custom calls with a dictionary, which kernels and moves are.
            weeks = stablehlo.StablehloCompatibilityRequirement.WEEK_12
            version = stablehlo.get_version_from_compatibility_requirement(weeks)
        folding.make_constants(parsed, found.constants)
        remove_last_barriers(parsed, len(found.held))
        if first:
            first(parsed)
        folding.make_iotas(parsed)
        shorten_shardings(parsed, mesh)
        for rewrite in LOWERING_PASSES:
            rewrite(parsed, mesh)
        folding.separate_constants(parsed)
        if partitioner in PARTITIONERS:
            PARTITIONERS[partitioner].rewrite(parsed, mesh)
        return bytes(stablehlo.serialize_portable_artifact(parsed, version, True))


# Attributes of the moves between device and host that core/memory_kinds.py marks.
_CONFIG, _PLACEMENT = "backend_config", "_xla_buffer_placement"
# XLA knows the call without the attributes that TensorFlow adds.
_TENSORFLOWS = ("api_version", "operand_layouts", "result_layouts")


def _name_memory_kinds(module: ir.Module) -> bool:
    """Rewrites the moves between device and host in place; returns whether there are any.

    XLA reads the memory kind from a frontend attribute, which TensorFlow's custom calls lack.
    """
    moves = [each for each in operations_of(module) if call_target(each) == MOVE]
    for move in moves:
        kind = move.attributes[_CONFIG]
        for name in _TENSORFLOWS:
            if name in move.attributes:
                del move.attributes[name]
        move.attributes[_CONFIG] = ir.StringAttr.get("")
        move.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({_PLACEMENT: kind})
    return bool(moves)


# TensorFlow copies constants into functions, and numbers the copies in an order that differs.
_COPY = re.compile(r"/_\d+$")
# Operations that such a copy is lowered to.
_CONSTANTS = ("stablehlo.constant", "stablehlo.broadcast_in_dim")


def name_module(module: ir.Module, name: str) -> None:
    """Names a module, its functions, and its copies of constants.

    TensorFlow numbers functions by how many the process has traced before. One walk renames all
    uses: MLIR's own `replace_all_symbol_uses` walks the module once for every function.
    """
    module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
    body: Any = module.body
    functions = [function for function in body if function.name.value != "main"]
    names = {function.name.value: f"function_{index}" for index, function in enumerate(functions)}
    for operation in operations_of(module):
        if operation.name == "func.call":
            callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
            operation.attributes["callee"] = ir.FlatSymbolRefAttr.get(names.get(callee, callee))
        elif operation.name in _CONSTANTS:
            _rename_copy(operation)
    for function in functions:
        ir.SymbolTable.set_symbol_name(function, names[function.name.value])


def _rename_copy(operation: ir.Operation) -> None:
    """Takes the number off the name of a constant that TensorFlow copied."""
    location: Any = operation.location
    found = location.locations if isinstance(location, ir.FusedLoc) else [location]
    if not any(isinstance(each, ir.NameLoc) and _COPY.search(each.name_str) for each in found):
        return
    renamed: list[Any] = [
        ir.Location.name(_COPY.sub("", each.name_str)) if isinstance(each, ir.NameLoc) else each
        for each in found
    ]
    operation.location = ir.Location.fused(renamed) if len(renamed) > 1 else renamed[0]
