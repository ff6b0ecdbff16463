"""Saves programs as zips of exported functions, and loads them."""

from __future__ import annotations

import os

import msgspec

from lingvo_gshard.core import UserError, explained
from lingvo_gshard.core.lazy import jax_export
from lingvo_gshard.runtime import PROGRAM_FILES, Program
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.saved_programs import program_file
from lingvo_gshard.wings.saved_programs.platforms import platforms_of
from lingvo_gshard.wings.saved_programs.program_file import ProgramRecord


class ZipFiles:
    """Programs in the files of `program_file`."""

    def write(self, program: Program, path: str | os.PathLike) -> None:
        """Writes a program, with a body for each platform with kernels."""
        exported = program.exported()
        bodies = {each: bytes(program.exported(each).serialize()) for each, _ in program.bodies}
        record = ProgramRecord(
            **program.description(),
            digest=program.digest,
            work=program.work,
            layers=program.layers or msgspec.UNSET,
            platforms=platforms_of(exported.mlir_module()),
        )
        program_file.write(path, record, bytes(exported.serialize()), bodies)

    def read(self, path: str | os.PathLike) -> Program:
        """Returns the program of a file. UserErrors name the file and the problem."""
        record, content, own = program_file.read(path)
        exported = _deserialized(content, path)
        bodies = {platform: _deserialized(body, path) for platform, body in own.items()}
        with explained(f"{path} is not a saved program", ValueError):
            for each in (exported, *bodies.values()):
                _check_types(record, each)
            return Program(
                name=record.name,
                module=exported.mlir_module_serialized,
                bodies=tuple((name, each.mlir_module_serialized) for name, each in bodies.items()),
                inputs=record.inputs,
                outputs=record.outputs,
                donated=record.donated,
                mesh=Mesh.parse(record.mesh, record.device_order),
                partitioner=record.partitioner,
                strategy=record.strategy,
                flags=record.flags,
                versions=tuple(sorted(record.versions.items())),
                work=record.work,
                layers=None if record.layers is msgspec.UNSET else record.layers,
            )


PROGRAM_FILES.register("zip")(ZipFiles())


def _deserialized(content: bytes, path: str | os.PathLike) -> jax_export.Exported:
    """Returns the exported function of a program's file; ValueError if there is none."""
    try:
        return jax_export.deserialize(bytearray(content))
    except Exception as error:  # jax checks nothing: any type may be raised.
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"{path} is not a saved program: jax cannot read it: {reason}") from None


def _check_types(record: ProgramRecord, exported: jax_export.Exported) -> None:
    """Checks that a record has the function's shapes and types. Raises ValueError."""
    for what, arrays, types in (
        ("input", record.inputs, exported.in_avals),
        ("output", record.outputs, exported.out_avals),
    ):
        if len(arrays) != len(types):
            raise UserError(f"it states {len(arrays)} {what}s, but the function has {len(types)}")
        for array, found in zip(arrays, types, strict=True):
            if (array.shape, array.dtype) != (tuple(found.shape), found.dtype.name):
                raise UserError(
                    f"it states that {what} {array.path} is {array.dtype}{list(array.shape)}, but "
                    f"the function has {found.dtype.name}{list(found.shape)}"
                )
