"""Reads files of programs: those of `Program.save` and those of `jax.export`."""

from __future__ import annotations

import os
import pathlib
import zipfile

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import jax, jax_export
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.planned_program import PlannedProgram
from lingvo_gshard.planning.programs.planned import ProgramFacts, jax_program, saved_program
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
