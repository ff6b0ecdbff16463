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
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from lingvo_gshard.core import VERSION, Seam, UserError, jax, jnp, memory_kinds, names
from lingvo_gshard.core.kernel_use import KernelUse
from lingvo_gshard.core.lazy import ir, jax_config, jax_export
from lingvo_gshard.runtime.devices import platform_of
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.options import PARTITIONERS


@dataclasses.dataclass(frozen=True)
class Work:
    """The useful work of one call of a program, to compute its efficiency.

    Attributes:
      flops: useful floating-point operations; 0 if no feature counts them.
      tokens: tokens of a batch, padding included.
      vocabularies: (path of an input, number of different ids in it).
    """

    flops: int
    tokens: int
    vocabularies: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class LayerNames:
    """The layers of a step, to find the layer of each compiled operation.

    Attributes:
      kinds: (name scope, kind of work) of the layers that have a kind; None leaves the kind to each
        operation of the layer.
    """

    scopes: tuple[str, ...]
    kinds: tuple[tuple[str, str | None], ...] = ()


class ProgramFiles(Protocol):
    """Writes programs to files, and reads them; see `Program.save` and `Program.load`."""

    def write(self, program: Program, path: str | os.PathLike) -> None:
        """Writes a program as one file."""
        ...

    def read(self, path: str | os.PathLike) -> Program:
        """Returns the program of a file."""
        ...


PROGRAM_FILES: Seam[ProgramFiles] = Seam("program_files")
_ZIP = "zip"


@dataclasses.dataclass(frozen=True)
class Program:
    """A partitioned function of a flat list of arrays.

    Attributes:
      name: name of the function, such as `train_step`.
      module: the function as a portable StableHLO artifact.
      bodies: (platform, the same function with kernels of this platform as a portable StableHLO
        artifact), sorted. Other platforms run `module`.
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
        names.check(self.partitioner, PARTITIONERS, f"`partitioner={self.partitioner}` is unknown")
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
        # Digests of saved programs cover these fields of a file, without their values.
        unsaved = {"work": None, "digest": "", "format": 1, "stamp": ""}
        content.update(msgspec.json.encode(self.description() | unsaved))
        for body in encoded_bodies(dict(self.bodies)):
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
        PROGRAM_FILES[_ZIP].write(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike, mesh: Mesh | None = None) -> Program:
        """Reads a saved program.

        Args:
          mesh: the mesh that the program must have been made for; None accepts any.

        Raises:
          UserError: names the file and the problem: its format, content, mesh or version of jax.
        """
        program = PROGRAM_FILES[_ZIP].read(path)
        if mesh is not None and mesh != program.mesh:
            raise UserError(
                f"{path} was made for `mesh={_describe(program.mesh)}`, not for {_describe(mesh)}"
            )
        return program

    def description(self) -> dict[str, Any]:
        """Returns all that a compiler is given besides the module, in the order of a file."""
        return {
            "name": self.name,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "donated": self.donated,
            "mesh": str(self.mesh),
            "device_order": self.mesh.device_order,
            "partitioner": self.partitioner,
            "strategy": self.strategy,
            "flags": self.flags,
            "versions": dict(sorted(self.versions)),
        }


def encoded_bodies(bodies: Mapping[str, bytes]) -> list[bytes]:
    """Returns the platforms' bodies as bytes to hash; none without bodies."""
    return [f"{platform} {len(body)} ".encode() + body for platform, body in sorted(bodies.items())]


def using_partitioner(partitioner: str) -> contextlib.AbstractContextManager[None]:
    """Makes jax partition with "gspmd" or "shardy" inside the context, on this thread only."""
    return jax_config.use_shardy_partitioner(partitioner == "shardy")


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
