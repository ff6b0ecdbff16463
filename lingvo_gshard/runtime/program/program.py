"""Program: a step as data, StableHLO with the names, types and layouts of its inputs and outputs.

A runtime compiles it for devices and runs it; the planner compiles it for a topology and reads the
result. A saved program runs where only jax is installed, see docs/programs.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import lingvo_gshard
from lingvo_gshard.core.config import names
from lingvo_gshard.runtime.program import program_file
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

PARTITIONERS = ("gspmd", "shardy")


@dataclasses.dataclass(frozen=True)
class Array:
    """An input or output: its dotted path, global shape, dtype, and the axes over each dimension.

    split None leaves the layout to the partitioner; only an output's may be.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    split: Split | None

    def sharding(self, mesh: jax.sharding.Mesh) -> NamedSharding | None:
        """Returns the layout over a mesh of devices."""
        if self.split is None:
            return None
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in self.split)))

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype, as jax has them."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    def sharded_struct(self, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
        """Returns shape, dtype and layout over a mesh of devices."""
        return jax.ShapeDtypeStruct(self.shape, self.struct.dtype, sharding=self.sharding(mesh))

    def stacked(self, count: int, axes: tuple[str, ...] = ()) -> Array:
        """Returns the array of `count` such arrays, stacked along a first dimension over `axes`."""
        return dataclasses.replace(self, shape=(count, *self.shape), split=(axes, *self.split))

    def put(
        self, value: np.ndarray | jax.Array, mesh: jax.sharding.Mesh, is_donated: bool = False
    ) -> jax.Array:
        """Returns a value in this layout. Of a NumPy array each process copies its own shards.

        Args:
          value: returned itself if it is a jax.Array with this layout.
          mesh: the devices.
          is_donated: whether the result will be donated to a call; then it shares no memory with
            `value` unless it is `value`.

        Raises:
          ValueError: the value has another shape or dtype.
        """
        value = value if isinstance(value, jax.Array) else np.asarray(value)
        if (tuple(value.shape), value.dtype.name) != (self.shape, self.dtype):
            raise ValueError(
                f"{self.path} is {self.dtype}{list(self.shape)}, but the value for it is "
                f"{value.dtype.name}{list(value.shape)}"
            )
        sharding = self.sharding(mesh)
        if isinstance(value, jax.Array) and value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        with jax.enable_x64(True):
            if isinstance(value, np.ndarray):
                # A copy: jax would go on reading the memory of what the caller may write to.
                return jax.make_array_from_callback(
                    self.shape, sharding, lambda index: np.array(value[index])
                )
            resharded = jax.device_put(value, sharding)
            return _copy_of_shards(resharded) if is_donated else resharded


@dataclasses.dataclass(frozen=True)
class Work:
    """The useful work of one call of a program, for measuring how fast it runs.

    Attributes:
      flops: useful floating-point operations; see core/flops.py.
      tokens: positions of a batch without padding.
      vocabularies: (path of an input, number of its valid ids) for inputs that hold ids.
    """

    flops: int
    tokens: int
    vocabularies: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A partitioned function of arrays: module is a StableHLO portable artifact.

    donated: indices of the inputs whose memory the outputs may take over.
    strategy: what split the tensors, as a table of letters; for the record, as `flags` is: what
        XLA_FLAGS held when it was made.
    work: None where nobody counted it.
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

    def __post_init__(self):
        if self.partitioner not in PARTITIONERS:
            hint = names.nearest(self.partitioner, PARTITIONERS)
            raise ValueError(f"--partitioner={self.partitioner} is unknown. {hint}")

    @property
    def digest(self) -> str:
        """SHA-256 of the module and of everything else that a compiler is given."""
        content = hashlib.sha256(self.module)
        content.update(json.dumps(self._description(), sort_keys=True).encode())
        return content.hexdigest()

    def exported(self) -> jax.export.Exported:
        """Returns it as jax's own exported function, for whatever platform.

        That is an exported stub of the same types with its module replaced by ours, so that only
        public names of jax.export are used.
        """
        outputs = [array.struct for array in self.outputs]
        stub = jax.jit(
            lambda *_: tuple(jnp.zeros(o.shape, o.dtype) for o in outputs), keep_unused=True
        )
        any_platform = [jax.export.DisabledSafetyCheck.platform()]
        export = jax.export.export(stub, platforms=("cpu",), disabled_checks=any_platform)
        # Without it jax makes 32 bits of 64, without a word.
        with jax.enable_x64(True):
            exported = export(*[a.struct for a in self.inputs])
        return dataclasses.replace(exported, fun_name=self.name, mlir_module_serialized=self.module)

    def lower(self, devices: Sequence) -> jax.stages.Lowered:
        """Lowers for a sequence of jax devices, real or of a topology, that fill the mesh.

        Raises ValueError if they are not as many as the mesh needs.
        """
        self.mesh.check_devices(len(devices))
        mesh = jax.sharding.Mesh(self.mesh.arrange(devices), self.mesh.names)
        arguments = [array.sharded_struct(mesh) for array in self.inputs]
        jitted = jax.jit(
            self.exported().call,
            donate_argnums=self.donated,
            out_shardings=tuple(a.sharding(mesh) for a in self.outputs),
        )
        with using_partitioner(self.partitioner), jax.enable_x64(True):
            return jitted.lower(*arguments)

    def save(self, path: str | os.PathLike) -> None:
        """Writes one zip: `exported`, as jax.export reads it, and program.json, which stamps it."""
        exported = bytes(self.exported().serialize())
        record = {"digest": self.digest, **self._description()}
        if self.work:
            record["work"] = {
                **dataclasses.asdict(self.work),
                "vocabularies": dict(self.work.vocabularies),
            }
        program_file.write(path, record, exported)

    @classmethod
    def load(cls, path: str | os.PathLike, mesh: Mesh | None = None) -> Program:
        """Reads a saved program.

        mesh: where given, the mesh the program must have been made for. Raises ValueError naming
        the file and what does not match: format, content, mesh, or a jax older than the writer's.
        """
        record, exported = program_file.read(path)
        program = cls(
            name=record["name"],
            module=jax.export.deserialize(bytearray(exported)).mlir_module_serialized,
            inputs=tuple(_array(a) for a in record["inputs"]),
            outputs=tuple(_array(a) for a in record["outputs"]),
            donated=tuple(record["donated"]),
            mesh=Mesh.parse(record["mesh"], record["device_order"]),
            partitioner=record["partitioner"],
            strategy=record["strategy"],
            flags=record["flags"],
            versions=tuple(sorted(record["versions"].items())),
            work=_work(record.get("work")),
        )
        if mesh is not None and mesh != program.mesh:
            raise ValueError(
                f"{path}: made for --mesh={_in_words(program.mesh)}, not for {_in_words(mesh)}"
            )
        return program

    def _description(self) -> dict:
        return {
            "name": self.name,
            "inputs": [dataclasses.asdict(a) for a in self.inputs],
            "outputs": [dataclasses.asdict(a) for a in self.outputs],
            "donated": list(self.donated),
            "mesh": str(self.mesh),
            "device_order": self.mesh.device_order,
            "partitioner": self.partitioner,
            "strategy": self.strategy,
            "flags": self.flags,
            "versions": dict(self.versions),
        }


@contextlib.contextmanager
def using_partitioner(partitioner: str) -> Iterator[None]:
    """Within it, jax partitions with "gspmd" or "shardy"."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", partitioner == "shardy")
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def writers_versions(**others: str) -> tuple[tuple[str, str], ...]:
    """Returns (package, version) of what made a program, sorted."""
    ours = {"lingvo_gshard": lingvo_gshard.__version__, "jax": jax.__version__}
    return tuple(sorted({**ours, **others}.items()))


def _array(record: dict) -> Array:
    split = record["split"]
    if split is not None:
        split = tuple(tuple(axes) for axes in split)
    return Array(record["path"], tuple(record["shape"]), record["dtype"], split)


def _work(record: dict | None) -> Work | None:
    if record is None:
        return None
    vocabularies = tuple(sorted(record["vocabularies"].items()))
    return Work(record["flops"], record["tokens"], vocabularies)


def _copy_of_shards(array: jax.Array) -> jax.Array:
    """Returns a copy that shares no memory. The result of device_put may, even with donation."""
    shards = [jax.device_put(np.array(s.data), s.device) for s in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _in_words(mesh: Mesh) -> str:
    return f"{mesh} ({mesh.device_order})"


def memory_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns bytes per device of a compiled program: arguments, outputs, temporaries, code, peak.

    Outputs that took over an argument's memory count once, under arguments.
    """
    analysis = compiled.memory_analysis()
    arguments = analysis.argument_size_in_bytes
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temporaries = analysis.temp_size_in_bytes
    code = analysis.generated_code_size_in_bytes
    return {
        "arguments": arguments,
        "outputs": outputs,
        "temporaries": temporaries,
        "code": code,
        "peak": arguments + outputs + temporaries + code,
    }


def bytes_of(array: Array, mesh: Mesh) -> int:
    """Returns the bytes of an array on one device of the mesh."""
    pieces = int(np.prod([mesh.axis_size(x) for axes in array.split or () for x in axes] or [1]))
    return int(np.prod(array.shape, dtype=np.int64)) * array.struct.dtype.itemsize // pieces
