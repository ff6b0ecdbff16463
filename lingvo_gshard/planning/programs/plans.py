"""Plans files of programs, those of `Program.save` and of `jax.export`, and functions of jax."""

from __future__ import annotations

import os
import pathlib
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import jax, jax_export
from lingvo_gshard.planning import planner
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.planning.planned_program import PlannedProgram
from lingvo_gshard.planning.programs.planned import (
    EXPORTED_FOR,
    ProgramFacts,
    export_function,
    jax_program,
    saved_program,
)
from lingvo_gshard.planning.progress import Progress, ignore_progress
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.sharding.mesh import Mesh

_UNREGISTERED = "unregistered type"


def read(path: str | os.PathLike, topology: Topology, facts: ProgramFacts) -> PlannedProgram:
    """Returns the program in a file, to be planned on a topology.

    Raises:
      UserError: names the file and the problem: it is missing or no program, or a newer jax wrote
        it.
    """
    try:
        content = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if zipfile.is_zipfile(path):
        program = Program.load(path, Mesh.parse(facts.mesh) if facts.mesh else None)
        return saved_program(program, facts)
    return jax_program(_deserialized(content, path), str(path), topology, facts)


def _deserialized(content: bytes, path: str | os.PathLike) -> jax_export.Exported:
    """Returns the function that the content of a file has."""
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
    progress: Progress = ignore_progress,
) -> Plan:
    """Returns the plan of a program in a file on a topology.

    Args:
      path: a file that `Program.save` or `jax.export.Exported.serialize` wrote.
      topology: the machine.
      facts: what the program does not say about itself.
      tokens: total tokens to train on; the plan then has a budget.
      progress: called with each stage as it begins.

    Raises:
      UserError: the file cannot be planned, or was made for another number of devices; names it.
    """
    progress("reading the program")
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
      function: a jax function, jitted or not.
      specs: nested structures of jax.ShapeDtypeStruct with shardings, one for each argument.
      topology: the machine.
      facts: what the program does not say about itself.
      tokens: total tokens to train on; the plan then has a budget.

    Raises:
      UserError: the function cannot be planned, or has another number of devices.
    """
    topology.compile_devices()
    exported = export_function(function, specs, topology)
    planned = jax_program(exported, exported.fun_name, topology, facts)
    return _plan(planned, exported.fun_name, topology, tokens, ignore_progress)


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
