"""Program: a partitioned function as StableHLO, with the names and layouts of its arrays.

A runtime compiles a program for devices and runs it. The planner compiles it for a topology and
reads the result. A saved program runs where only jax is installed: docs/programs.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from lingvo_gshard.core import memory_kinds
from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.kernel_use import KernelUse
from lingvo_gshard.core.lazy import Device, ir, jax, jax_export, jnp
from lingvo_gshard.core.version import VERSION
from lingvo_gshard.runtime.devices import platform_of
from lingvo_gshard.runtime.program import program_file
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program_file import LayerNames, ProgramRecord, Work
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.options import PARTITIONERS

ALL = ("cpu", "cuda", "rocm", "tpu")
# The platform that TensorFlow lowers for. Calls of its libraries are this platform's.
_LOWERED_FOR = "cpu"
# Kernels' bodies call functions whose names begin so, and run on this platform.
_CALLS_OF_KERNELS = (("tpu_custom_call", "tpu"), ("__gpu$", "cuda"), ("__cudnn$", "cuda"))

_CALL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")
# Calls that are part of every compiler of XLA.
_OF_ALL = {
    memory_kinds.MOVE,
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "xla.sdy.FuncResultSharding",
}


def calls_of_libraries(module: str) -> list[str]:
    """Returns the functions of platform libraries that a StableHLO module calls, sorted."""
    return sorted(set(_CALL.findall(module)) - _OF_ALL)


def platforms_of(module: str) -> tuple[str, ...]:
    """Returns the platforms that run a StableHLO module that was lowered from TensorFlow."""
    calls = calls_of_libraries(module)
    if not calls:
        return ALL
    found = {_platform_of_call(call) for call in calls}
    # No platform has the functions of two.
    return tuple(found) if len(found) == 1 else ()


def _platform_of_call(call: str) -> str:
    found = (platform for begin, platform in _CALLS_OF_KERNELS if call.startswith(begin))
    return next(found, _LOWERED_FOR)


def check_platform(path: str, record: ProgramRecord, device: Device) -> None:
    """Raises ValueError naming the file if a device's platform does not run the program."""
    if record.platforms is msgspec.UNSET:
        return
    found, named = platform_of(device), " and ".join(record.platforms) or "no platform"
    if found not in record.platforms:
        raise UserError(
            f"{path} was exported for {named}, but jax found {found} "
            f"({device.device_kind}) here; export it again without operations that only that "
            "platform has"
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """A partitioned function of a flat list of arrays.

    Attributes:
      name: name of the function, such as `train_step`.
      module: the function as a portable StableHLO artifact.
      bodies: (platform, the same function with kernels of this platform as a portable StableHLO
        artifact), sorted. Other platforms run `module`.
      inputs: the function's arguments, in order.
      outputs: the function's results, in order.
      donated: indices of the inputs whose memory the outputs may reuse.
      mesh: the devices it is partitioned over.
      partitioner: the partitioner in XLA, "gspmd" or "shardy".
      strategy: the table of letters that split the tensors. Recorded only.
      flags: XLA_FLAGS when the program was made. Recorded only.
      versions: (package, version) of the packages that made the program, sorted.
      work: the useful work of one call; None if it was not counted.
      layers: the layers that the function consists of; None if they are unknown.
      kernels: the layers that use kernels of the platform, or cannot. Not saved.
      tracing_seconds: seconds to run the function in Python. Not saved.
      lowering_seconds: seconds to lower the trace to StableHLO. Not saved.
    """

    name: str
    module: bytes
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    donated: tuple[int, ...]
    mesh: Mesh
    partitioner: str = "gspmd"
    strategy: str = ""
    flags: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    work: Work | None = None
    layers: LayerNames | None = None
    bodies: tuple[tuple[str, bytes], ...] = ()
    kernels: tuple[KernelUse, ...] = dataclasses.field(default=(), compare=False)
    tracing_seconds: float = dataclasses.field(default=0.0, compare=False)
    lowering_seconds: float = dataclasses.field(default=0.0, compare=False)

    def __post_init__(self):
        if self.partitioner not in PARTITIONERS:
            hint = names.nearest(self.partitioner, PARTITIONERS)
            raise UserError(f"`partitioner={self.partitioner}` is unknown. {hint}")
        for index in self.donated:
            if not 0 <= index < len(self.inputs):
                raise UserError(f"input {index} is donated, but there are {len(self.inputs)}")
        for array in (*self.inputs, *self.outputs):
            for axis in itertools.chain(*(array.split or ())):
                if axis not in self.mesh.names:
                    raise UserError(f"{array.path} is split over {axis!r}, no axis of {self.mesh}")

    @property
    def digest(self) -> str:
        """SHA-256 of the module and everything else that a compiler is given."""
        content = hashlib.sha256(self.module)
        content.update(program_file.encode(self._record()))
        for body in program_file.encoded_bodies(dict(self.bodies)):
            content.update(body)
        return content.hexdigest()

    def calls(self, name: str, platform: str) -> bool:
        """Returns whether the program for a platform calls an operation or function by its name."""
        return name.encode() in dict(self.bodies).get(platform, self.module)

    def exported(self, platform: str = "") -> jax_export.Exported:
        """Returns the program as an exported jax function.

        Exports a stub of the same types and replaces its module, which needs no private names of
        jax.export.

        Args:
          platform: takes this platform's body, if there is one, and then runs on no other. By
            default the function is for any platform.
        """
        module = dict(self.bodies).get(platform)
        outputs = [array.struct for array in self.outputs]
        stub = jax.jit(
            lambda *_: tuple(jnp.zeros(o.shape, o.dtype) for o in outputs), keep_unused=True
        )
        if module is None:
            any_platform = [jax_export.DisabledSafetyCheck.platform()]
            export = jax_export.export(stub, platforms=("cpu",), disabled_checks=any_platform)
        else:
            export = jax_export.export(stub, platforms=(platform,))
        # Without x64 jax silently truncates 64-bit types to 32 bits.
        with jax.enable_x64(True):
            exported = export(*[a.struct for a in self.inputs])
        module = module or self.module
        return dataclasses.replace(exported, fun_name=self.name, mlir_module_serialized=module)

    def lower(self, devices: Sequence) -> jax.stages.Lowered:
        """Lowers for jax devices, which are real or belong to a described topology.

        Raises:
          UserError: the number of devices is not the size of the mesh.
        """
        self.mesh.check_devices(len(devices))
        mesh = jax.sharding.Mesh(self.mesh.arrange(devices), self.mesh.names)
        arguments = [array.sharded_struct(mesh) for array in self.inputs]
        jitted = jax.jit(
            self.exported(platform_of(devices[0])).call,
            donate_argnums=self.donated,
            out_shardings=tuple(a.sharding(mesh) for a in self.outputs),
        )
        with using_partitioner(self.partitioner), jax.enable_x64(True):
            lowered = jitted.lower(*arguments)
        if any(array.is_on_host for array in (*self.inputs, *self.outputs)):
            _name_memory_kinds(lowered, self.inputs, self.outputs)
        return lowered

    def save(self, path: str | os.PathLike) -> None:
        """Writes the program as one file, which has a body for each platform with kernels."""
        exported = self.exported()
        bodies = {each: bytes(self.exported(each).serialize()) for each, _ in self.bodies}
        record = msgspec.structs.replace(
            self._record(),
            digest=self.digest,
            work=self.work,
            layers=self.layers or msgspec.UNSET,
            platforms=platforms_of(exported.mlir_module()),
        )
        program_file.write(path, record, bytes(exported.serialize()), bodies)

    @classmethod
    def load(cls, path: str | os.PathLike, mesh: Mesh | None = None) -> Program:
        """Reads a saved program.

        Args:
          path: the file.
          mesh: the mesh that the program must have been made for; None accepts any.

        Raises:
          UserError: names the file and the problem: its format, content, mesh or version of jax.
        """
        record, content, own = program_file.read(path)
        exported = _deserialized(content, path)
        bodies = {platform: _deserialized(body, path) for platform, body in own.items()}
        try:
            for each in (exported, *bodies.values()):
                _check_types(record, each)
            program = cls(
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
        except ValueError as error:
            raise UserError(f"{path} is not a saved program: {error}") from None
        if mesh is not None and mesh != program.mesh:
            raise UserError(
                f"{path} was made for `mesh={_describe(program.mesh)}`, not for {_describe(mesh)}"
            )
        return program

    def _record(self) -> ProgramRecord:
        """Returns all that a compiler is given besides the module."""
        return ProgramRecord(
            name=self.name,
            inputs=self.inputs,
            outputs=self.outputs,
            donated=self.donated,
            mesh=str(self.mesh),
            device_order=self.mesh.device_order,
            partitioner=self.partitioner,
            strategy=self.strategy,
            flags=self.flags,
            versions=dict(self.versions),
        )


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


@contextlib.contextmanager
def using_partitioner(partitioner: str) -> Iterator[None]:
    """Makes jax partition with "gspmd" or "shardy" inside the context."""
    before = jax.config.values["jax_use_shardy_partitioner"]
    jax.config.update("jax_use_shardy_partitioner", partitioner == "shardy")
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def writers_versions(**others: str) -> tuple[tuple[str, str], ...]:
    """Returns (package, version) of this package, jax and `others`, sorted."""
    ours = {"lingvo_gshard": VERSION, "jax": jax.__version__}
    return tuple(sorted({**ours, **others}.items()))


def _describe(mesh: Mesh) -> str:
    return f"{mesh} ({mesh.device_order})"


def _name_memory_kinds(
    lowered: jax.stages.Lowered, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    """Writes the memory kind of each argument and result into a lowered program.

    jax has written them, except for the GPUs of a described topology, whose memories it does not
    know.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        main = ir.SymbolTable(module.operation)["main"]
        for name, arrays in (("arg_attrs", inputs), ("res_attrs", outputs)):
            found = ir.ArrayAttr(main.attributes[name])
            pairs = zip(found, arrays, strict=True)
            main.attributes[name] = ir.ArrayAttr.get([_with_memory_kind(*pair) for pair in pairs])


def _with_memory_kind(attributes: ir.Attribute, array: Array) -> ir.Attribute:
    named = {each.name: each.attr for each in ir.DictAttr(attributes)}
    kind = memory_kinds.HOST if array.is_on_host else memory_kinds.DEVICE
    return ir.DictAttr.get({**named, "mhlo.memory_kind": ir.StringAttr.get(kind)})


def memory_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns bytes per device of a compiled program: arguments, outputs, temporaries, code, peak.

    An output that reuses an argument's memory counts as an argument only. What is in the memory of
    the host counts as `host` only.
    """
    analysis: Any = compiled.memory_analysis()
    arguments = analysis.argument_size_in_bytes
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temporaries = analysis.temp_size_in_bytes
    code = analysis.generated_code_size_in_bytes
    host = analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes
    host += analysis.host_output_size_in_bytes - analysis.host_alias_size_in_bytes
    return {
        "arguments": arguments,
        "outputs": outputs,
        "temporaries": temporaries,
        "code": code,
        "peak": arguments + outputs + temporaries + code,
        "host": host,
    }


def bytes_of(array: Array, mesh: Mesh) -> int:
    """Returns the bytes of an array on one device of the mesh."""
    pieces = mesh.parts(axis for axes in array.split or () for axis in axes)
    return int(np.prod(array.shape, dtype=np.int64)) * array.struct.dtype.itemsize // pieces
