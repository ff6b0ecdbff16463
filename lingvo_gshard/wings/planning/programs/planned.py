"""Makes PlannedPrograms of saved programs and of jax functions.

A jax program does not state the classes of its arguments. The arguments' names usually show them,
as Flax, Optax, Keras and Equinox name arguments. A user's patterns override this.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import (
    LOSS_SCOPE,
    SILENT,
    Progress,
    UserError,
    explained,
    jax,
    objects,
    scope_name,
)
from lingvo_gshard.core.lazy import jax_export
from lingvo_gshard.runtime import Array, Program
from lingvo_gshard.sharding import REPLICATED, Mesh
from lingvo_gshard.wings.planning import memory, planner
from lingvo_gshard.wings.planning.machines.chips import PLATFORMS
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import ParameterCounts, Plan, TensorRow
from lingvo_gshard.wings.planning.planned_program import PlannedProgram, memory_class, row_of
from lingvo_gshard.wings.planning.programs.exported_function import export, narrowing_notes
from lingvo_gshard.wings.planning.programs.jax_program import to_program
from lingvo_gshard.wings.planning.programs.stated import stated_flops

# Parts of names, between dots and brackets. The first of them in a name decides.
_NAMES = {
    memory.WEIGHTS: frozenset(
        "params weights theta model batch_stats trainable_variables non_trainable_variables".split()
    ),
    memory.MOMENTS: frozenset(
        "opt_state opt_states optimizer optimizer_state optimizer_variables moments averages "
        "mu nu m v momentum velocity ema".split()
    ),
}
# The number of arguments that a message names.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class MemoryPatterns:
    """Regular expressions that are searched in the paths of arguments.

    Attributes:
      weights: matches weights; None recognizes weights by their usual names.
      moments: matches optimizer state; None recognizes optimizer state by its usual names. An
        argument that both patterns match is optimizer state.

    Raises:
      UserError: a pattern is no regular expression; names `weights` or `moments`.
    """

    weights: str | None = None
    moments: str | None = None

    def __post_init__(self):
        for flag in ("weights", "moments"):
            pattern = getattr(self, flag)
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise UserError(
                    f"`{flag}={pattern}` is no regular expression: {error}; expected such as "
                    f"'{flag}.*'"
                ) from None


def memory_classes(
    inputs: Sequence[Array], donated: Sequence[int], patterns: MemoryPatterns
) -> tuple[tuple[str, ...], str]:
    """Returns the memory class of each argument, and a note for the plan on how it was found.

    Without any weight by name, the donated arguments of one dimension or more are the weights: a
    training step returns its state in the memory of the old one.

    Raises:
      UserError: a pattern matches no argument; names it and the first arguments.
    """
    for flag in ("weights", "moments"):
        pattern = getattr(patterns, flag)
        if pattern and not any(re.search(pattern, array.path) for array in inputs):
            shown = ", ".join(array.path for array in inputs[:_SHOWN])
            more = f" and {len(inputs) - _SHOWN} more" if len(inputs) > _SHOWN else ""
            raise UserError(f"`{flag}={pattern}` matches none of its arguments: {shown}{more}")
    classes = [_class_of(array.path, patterns) for array in inputs]
    ways = [
        f"by `{flag}={pattern}`" if pattern else "by name"
        for flag, pattern in (("weights", patterns.weights), ("moments", patterns.moments))
    ]
    if patterns.weights is None and memory.WEIGHTS not in classes:
        for index in donated:
            if inputs[index].shape and classes[index] == memory.INPUTS:
                classes[index] = memory.WEIGHTS
                ways[0] = "because their memory is donated"
    counts = [classes.count(kind) for kind in (memory.WEIGHTS, memory.MOMENTS, memory.INPUTS)]
    note = (
        f"arguments: {counts[0]} of weights ({ways[0]}), {counts[1]} of moments ({ways[1]}), "
        f"{counts[2]} of inputs; "
        "`weights` and `moments` say it by patterns of their names"
    )
    return tuple(classes), note


def layer_of(path: str) -> str:
    """Returns the layer that a weight's or a moment's path names, such as `block_0/dense`.

    These are the parts of the path after those that name the kind of state.
    """
    parts = _parts(path)
    names = frozenset().union(*_NAMES.values())
    start = next((at + 1 for at, part in enumerate(parts) if part.lower() in names), 0)
    if start and _kind_of_part(parts[start - 1]) == memory.MOMENTS:
        # Optax nests its state: `opt_state[0].mu`.
        nested = [at for at, part in enumerate(parts) if part.lower() in names and at < start + 2]
        start = nested[-1] + 1
    return "/".join(parts[start:-1])


def _class_of(path: str, patterns: MemoryPatterns) -> str:
    for kind, pattern in ((memory.MOMENTS, patterns.moments), (memory.WEIGHTS, patterns.weights)):
        if pattern and re.search(pattern, path):
            return kind
    kinds = filter(None, map(_kind_of_part, _parts(path)))
    kind = next(kinds, memory.INPUTS)
    is_decided = patterns.weights if kind == memory.WEIGHTS else patterns.moments
    return memory.INPUTS if is_decided else kind


def _kind_of_part(part: str) -> str:
    return next((kind for kind, names in _NAMES.items() if part.lower() in names), "")


def _parts(path: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]/]+", path) if part]


_TOKENS_NOTE = "tokens are all positions of a batch, those of a source included"
_ACTIVE_NOTE = "all parameters count as active: a saved program does not say what a token uses"
# The beginning of the note on a program that was exported for other platforms.
EXPORTED_FOR = "exported for"


@dataclasses.dataclass(frozen=True)
class ProgramFacts:
    """Facts that a program of another library does not state.

    Attributes:
      mesh: the program's mesh, such as "data=4,model=2", which must equal the exported mesh. If the
        program only numbers its devices, this mesh names the axes.
      step_tokens: tokens of a batch; None if unknown.
      kernel_flops: regular expression for the names of kernels -> FLOPs of one call on one device.
    """

    mesh: str | None = None
    patterns: MemoryPatterns = MemoryPatterns()
    step_tokens: int | None = None
    kernel_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)


def saved_program(program: Program, facts: ProgramFacts) -> PlannedProgram:
    """Returns a program that `Program.save` wrote, to be planned.

    The file may name the layers. If it does not, the layers are read from the paths of the weights,
    which contain the layers.

    Raises:
      UserError: the facts have patterns, which these programs do not need; names the option.
    """
    for flag in ("weights", "moments"):
        if getattr(facts.patterns, flag):
            raise UserError(
                f"`{flag}={getattr(facts.patterns, flag)}` applies to what jax.export wrote; a "
                "program of gshard-inspect says itself what its arguments are"
            )
    classes = tuple(memory_class(array.path) for array in program.inputs)
    tensors = tensor_rows(program, classes, _layer_in_state)
    tokens = program.work.tokens if program.work else None
    return PlannedProgram(
        program=program,
        name=program.name,
        classes=classes,
        layers=_layers(program, tensors),
        kinds=dict(program.layers.kinds) if program.layers else {},
        tensors=tensors,
        parameters=parameters_of(tensors),
        useful_flops=program.work.flops if program.work else None,
        tokens=facts.step_tokens or tokens,
        kernel_flops=facts.kernel_flops,
        notes=(_ACTIVE_NOTE, *([_TOKENS_NOTE] if tokens and not facts.step_tokens else [])),
    )


def jax_program(
    exported: jax_export.Exported, where: str, topology: Topology, facts: ProgramFacts
) -> PlannedProgram:
    """Returns a function that `jax.export` exported, to be planned on a topology.

    Raises:
      UserError: the function cannot be planned, its mesh is not the given one, or a pattern
        matches nothing; names `where`.
    """
    mesh = Mesh.parse(facts.mesh) if facts.mesh else None
    platform = PLATFORMS[topology.compiler]
    program = to_program(exported, where, platform, mesh)
    with explained(where, UserError):
        classes, note = memory_classes(program.inputs, program.donated, facts.patterns)
    notes = [note]
    if platform not in exported.platforms:
        platforms = " and ".join(exported.platforms)
        notes.append(
            f"{EXPORTED_FOR} {platforms}, not for {platform}: operations that jax writes "
            "differently for each platform are the former's"
        )
    tensors = tensor_rows(program, classes, layer_of)
    return PlannedProgram(
        program=program,
        name=program.name,
        classes=classes,
        layers=None,
        tensors=tensors,
        parameters=parameters_of(tensors),
        stated_flops=stated_flops(program, facts.kernel_flops),
        tokens=facts.step_tokens,
        notes=tuple(notes),
        kernel_flops=facts.kernel_flops,
    )


def is_jax_function(function: Any, specs: Any) -> bool:
    """Returns whether a function is jitted by jax, or has arrays or specs of jax as arguments."""
    if isinstance(function, jax.stages.Wrapped):
        return True
    kinds = (jax.ShapeDtypeStruct, jax.Array)
    return any(isinstance(leaf, kinds) for leaf in jax.tree_util.tree_leaves(specs))


def _layers(program: Program, tensors: Sequence[TensorRow]) -> frozenset[str] | None:
    """Returns the name scopes of the layers: as the file lists them, or else of weights' owners."""
    if program.layers:
        return frozenset(program.layers.scopes)
    layers = {row.layer for row in tensors if row.layer}
    layers |= {layer[:at] for layer in layers for at, sign in enumerate(layer) if sign == "/"}
    return frozenset(layers | {LOSS_SCOPE}) if layers else None


def _layer_in_state(path: str) -> str:
    """Returns the layer of a path such as `theta.encoder.w` or `moments.encoder.w.row_moment`."""
    part, *names = path.split(".")
    return scope_name(".".join(names[: -2 if part == "moments" else -1]))


def tensor_rows(
    program: Program, classes: Sequence[str], layer_of: Callable[[str], str]
) -> tuple[TensorRow, ...]:
    """Returns a row for each weight and moment. Its dimensions have no letters."""
    return tuple(
        _tensor_row(array, kind, layer_of(array.path), program.mesh)
        for array, kind in zip(program.inputs, classes, strict=True)
        if kind != memory.INPUTS
    )


def _tensor_row(array: Array, kind: str, layer: str, mesh: Mesh) -> TensorRow:
    split = [
        f"dimension {index} over {' and '.join(axes)} "
        f"({' x '.join(str(mesh.axis_size(axis)) for axis in axes)})"
        for index, axes in enumerate(array.split or ())
        if axes
    ]
    return row_of(array, mesh, kind, layer, ", ".join(split) or REPLICATED)


def parameters_of(tensors: Sequence[TensorRow]) -> ParameterCounts:
    """Returns the number of all weights, all of them active."""
    total = sum(math.prod(row.shape) for row in tensors if row.kind == memory.WEIGHTS)
    return ParameterCounts(total=total, active=total)


_UNREGISTERED = "unregistered type"


def read(path: str | os.PathLike, topology: Topology, facts: ProgramFacts) -> PlannedProgram:
    """Returns the program in a file, to be planned on a topology.

    Raises:
      UserError: names the file and the problem: it is missing or no program, or a newer jax wrote
        it.
    """
    with explained(f"{path}: cannot be read", OSError):
        content = objects.read_bytes(path)
    if zipfile.is_zipfile(path):
        program = Program.load(path, Mesh.parse(facts.mesh) if facts.mesh else None)
        return saved_program(program, facts)
    return jax_program(_deserialized(content, path), str(path), topology, facts)


def _deserialized(content: bytes, path: str | os.PathLike) -> jax_export.Exported:
    try:
        return jax_export.deserialize(bytearray(content))
    except ImportError:
        raise
    except Exception as error:  # jax checks nothing: any type may be raised.
        reason = str(error)
    if _UNREGISTERED in reason:
        raise UserError(
            f"{path}: {reason.split('. ')[0]}; only the program that registered the type can read "
            "it: export a function of dictionaries, lists and tuples"
        )
    raise UserError(
        f"{path} is no program: neither a zip of gshard-inspect --program nor what jax.export of "
        f"jax {jax.__version__} or older wrote"
    )


def plan_file(
    path: str | os.PathLike,
    topology: Topology,
    facts: ProgramFacts,
    tokens: float | None = None,
    progress: Progress = SILENT,
) -> Plan:
    """Returns the plan of a program in a file on a topology.

    `Program.save` or `jax.export.Exported.serialize` wrote the file. Raises UserError, which names
    it, if it cannot be planned, or was made for another number of devices.
    """
    progress.begin("reading the program")
    # A compiler that is missing is reported first, and jax's devices are made before jax starts.
    topology.compile_devices()
    planned = read(path, topology, facts)
    return _plan(planned, str(path), topology, tokens, progress)


def plan_function(
    function: Callable[..., Any],
    specs: Sequence[Any],
    topology: Topology,
    facts: ProgramFacts,
    tokens: float | None = None,
) -> Plan:
    """Returns the plan of a jax function on a topology.

    Args:
      specs: nested structures of jax.ShapeDtypeStruct with shardings, one for each argument.

    Raises:
      UserError: the function cannot be planned, or has another number of devices.
    """
    topology.compile_devices()
    exported = export(function, specs, PLATFORMS[topology.compiler])
    planned = jax_program(exported, exported.fun_name, topology, facts)
    notes = (*planned.notes, *narrowing_notes(specs, exported))
    planned = dataclasses.replace(planned, notes=notes)
    return _plan(planned, exported.fun_name, topology, tokens, SILENT)


def _plan(
    planned: PlannedProgram,
    where: str,
    topology: Topology,
    tokens: float | None,
    progress: Progress,
) -> Plan:
    mesh = planned.program.mesh
    if mesh.size != topology.devices:
        raise UserError(
            f"{where} was made for {mesh.size:,} device{'s'[: mesh.size != 1]}, {mesh}, but "
            f"`topology={topology.name}` has {topology.devices:,}"
        )
    if tokens and not planned.tokens:
        raise UserError(
            f"`tokens={tokens:g}` needs the tokens of a step, which {where} does not say; give "
            "`step_tokens`, too"
        )
    try:
        return planner.plan_program(planned, None, topology, tokens, progress)
    except UserError as error:
        others = [f"; it was {note}" for note in planned.notes if note.startswith(EXPORTED_FOR)]
        first, *_ = str(error).splitlines()
        raise UserError(f"{where}: {first}{''.join(others)}") from None
