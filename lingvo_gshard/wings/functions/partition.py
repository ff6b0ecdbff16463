"""partition: runs any annotated TensorFlow function on the devices of a mesh."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from lingvo_gshard.core import Device, UserError, jax, known_sizes, tf
from lingvo_gshard.runtime import (
    Array,
    Executable,
    Program,
    Tracing,
    chosen_for,
    devices_for,
    lower,
    platform_of,
)
from lingvo_gshard.sharding import Mesh, Partitioning, Split, recording

_log = logging.getLogger(__name__)

# The layout of an argument that the function's own annotations decide.
INFERRED = None


class Partitioned:
    """A TensorFlow function over a mesh, compiled once for each combination of argument shapes.

    Arguments and results are nested structures of arrays. Results are jax.Arrays, which can be
    passed to the next call without leaving the devices.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        partitioning: Partitioning,
        devices: Sequence[Device],
        layouts: Sequence[Any] | None = None,
        donate: Sequence[int] = (),
        partitioner: str = "gspmd",
        tracing: Tracing = contextlib.nullcontext,
        platform: str | None = None,
        compile_options: Sequence[str] = (),
    ):
        """Makes the callable; for the arguments see `partition`.

        Args:
          partitioning: the mesh, and what is split over its axes.
          devices: as many as the mesh has places.
          tracing: as in `lower`.
          platform: the platform whose kernels the function uses. By default the devices' platform.
          compile_options: changes to the options of `runtime/compile_options.py`.
        """
        self._function = function
        self._devices = list(devices)
        first = self._devices[0]
        used = platform_of(first) if platform is None else platform
        self._partitioning = partitioning.on(used, first.device_kind if platform is None else "")
        self._mesh = jax.sharding.Mesh(
            partitioning.mesh.arrange(self._devices), partitioning.mesh.names
        )
        self._layouts = layouts
        self._donate = tuple(donate)
        self._partitioner, self._tracing = partitioner, tracing
        self._compile_options = tuple(compile_options)
        self._name = getattr(function, "__name__", "function").strip("<>")
        self._compiled: dict[str, tuple[Executable, Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Runs the function on the mesh. Returns before the computation ends."""
        executable, structure = self._find(arguments)
        program = executable.program
        arrays = [
            array.put(_array(value), self._mesh, is_donated=index in program.donated)
            for index, (array, value) in enumerate(
                zip(program.inputs, tf.nest.flatten(list(arguments)), strict=True)
            )
        ]
        results = iter(executable(*arrays))
        return tf.nest.map_structure(
            lambda is_tensor: next(results) if is_tensor else None, structure
        )

    def lower(self, *arguments: Any) -> Program:
        """Returns the program for arguments of these shapes, given as arrays or tf.TensorSpecs."""
        return self._lower(arguments)[0]

    def compile(self, *arguments: Any) -> Executable:
        """Returns the compiled program for arguments of these shapes."""
        return self._find(arguments)[0]

    @property
    def compile_count(self) -> int:
        """Number of programs compiled so far."""
        return len(self._compiled)

    def _find(self, arguments: tuple) -> tuple[Executable, Any]:
        key = repr(tf.nest.map_structure(_spec, list(arguments)))
        if key not in self._compiled:
            program, structure = self._lower(arguments)
            options = chosen_for(self._devices[0], self._compile_options, program=program)
            self._compiled[key] = (Executable(program, self._devices, options), structure)
        return self._compiled[key]

    def _lower(self, arguments: tuple) -> tuple[Program, Any]:
        """Returns the program and the structure of its results, with False for each None."""
        structures: list[Any] = []

        def flat(*tensors: tf.Tensor) -> list:
            result = self._function(*tf.nest.pack_sequence_as(list(arguments), list(tensors)))
            structures[:] = [tf.nest.map_structure(lambda x: x is not None, result)]
            found = [tf.convert_to_tensor(x) for x in tf.nest.flatten(result) if x is not None]
            return [(f"result[{index}]", x, INFERRED) for index, x in enumerate(found)]

        inputs, donated = self._inputs(arguments)
        with recording.noting_axes() as used:
            program = lower(
                self._name,
                flat,
                inputs,
                self._partitioning,
                donated,
                self._partitioner,
                self._tracing,
            )
        self._warn_of_unused_axes(used, inputs)
        return program, structures[0]

    def _warn_of_unused_axes(self, used: Set[str], inputs: Sequence[Array]) -> None:
        """Warns of mesh axes that no annotation, manual region or layout splits a tensor over."""
        if recording.ANY_AXIS in used:
            return
        found = {axis for array in inputs for axes in array.split or () for axis in axes} | used
        mesh, strategy = self._partitioning.mesh, self._partitioning.strategy
        for axis, size in mesh.axes:
            if size > 1 and axis not in found:
                letters = strategy.letters_over(axis)
                remedy = (
                    f"Annotate tensors with one of the letters {letters}, or give `layouts`"
                    if letters
                    else f"The strategy {strategy.name} has no letter for it"
                )
                _log.warning(
                    f"{self._name}: nothing is split over axis {axis} of `mesh={mesh}`: its {size} "
                    f"devices all do the same work, and hold the same weights. {remedy}"
                )

    def _inputs(self, arguments: tuple) -> tuple[list[Array], list[int]]:
        """Returns the flat inputs, and the indices of the donated inputs."""
        if self._layouts and len(self._layouts) != len(arguments):
            raise UserError(
                f"layouts: {self._name} has {len(arguments)} arguments, but there are "
                f"{len(self._layouts)} layouts. Use None for an argument without one"
            )
        inputs: list[Array] = []
        donated: list[int] = []
        for position, argument in enumerate(arguments):
            leaves = tf.nest.flatten(argument)
            layouts = self.layouts_of(position, argument)
            if position in self._donate:
                donated += range(len(inputs), len(inputs) + len(leaves))
            for index, (value, layout) in enumerate(zip(leaves, layouts, strict=True)):
                path = f"argument[{position}]" + (f"[{index}]" if len(leaves) > 1 else "")
                spec = _spec(value)
                shape = tuple(known_sizes(spec.shape))
                inputs.append(Array(path, shape, spec.dtype.name, self._split(layout, shape, path)))
        return inputs, donated

    def layouts_of(self, position: int, argument: Any) -> list:
        """Returns the given layout of each array of an argument; None for an inferred one."""
        layout = self._layouts[position] if self._layouts else INFERRED
        try:
            return _flatten_like(argument, layout)
        except ValueError:
            raise UserError(
                f"layouts: {layout!r} does not have the structure of argument[{position}] of "
                f"{self._name}"
            ) from None

    def _split(self, layout: str | Split | None, shape: tuple[int, ...], path: str) -> Split | None:
        if layout is None:
            return None
        kind, letters = "", layout
        if isinstance(layout, str):
            kind, _, letters = (part.strip() for part in layout.rpartition(":"))
        if len(letters) != len(shape):
            raise UserError(
                f"layouts: {layout!r} has {len(letters)} dimensions, but {path} of {self._name} "
                f"has shape {shape}"
            )
        if isinstance(letters, str):
            letters = self._partitioning.split(letters, kind or "activations")
        return self._partitioning.storage_split(shape, letters)


def partition(
    function: Callable[..., Any],
    mesh: Mesh | str,
    strategy: str = "replicated",
    *,
    layouts: Sequence[str | Split | None] | None = None,
    donate: Sequence[int] = (),
    overrides: Mapping[str, str] | None = None,
    partitioner: str = "gspmd",
    devices: Sequence[Device] | None = None,
    compile_options: Sequence[str] = (),
) -> Partitioned:
    """Returns a callable that runs a TensorFlow function on the devices of a mesh.

    The function's sharding annotations, letters under a strategy or the paper's calls, decide how
    it is partitioned.

        >>> double = gshard.partition(lambda x: 2 * x, "data=2", "data", layouts=["BM"])
        >>> y = double(np.ones((4, 3), np.float32))
        >>> y.shape, y.sharding.spec[0]
        ((4, 3), 'data')

    Args:
      function: takes and returns nested structures of tensors. tf.function traces it.
      mesh: axes and sizes, such as "data=4,model=2".
      strategy: maps letters to axes.
      layouts: one entry per argument, for all arrays of the argument or, as a list or dict with the
        argument's structure, for each array. An entry is a string of letters, such as "BLM" or, for
        a weight, "weights: MH"; a split; or None, which uses the function's annotation of the
        argument and replicates an argument without one.
      donate: positions of the arguments whose memory the results may reuse.
      overrides: as in Partitioning.make.
      partitioner: "gspmd" or "shardy".
      devices: as many as the mesh needs by default, virtual CPU devices if there are too few.
      compile_options: options of XLA's compiler as "name=value", or "none" for none of those that
        it has by default, which `gshard-inspect --compiler` lists.

    Raises:
      UserError: an axis, letter or strategy is unknown, or the devices do not fill the mesh. Calls
        raise it for layouts that do not fit the arguments, and for an option that the compiler
        refuses.
    """
    partitioning = Partitioning.make(mesh, strategy, overrides)
    devices = devices_for(partitioning.mesh.size) if devices is None else devices
    return Partitioned(
        function,
        partitioning,
        devices,
        layouts,
        donate,
        partitioner,
        compile_options=compile_options,
    )


def _flatten_like(argument: Any, layout: Any) -> list:
    """Returns the layout of each array. Raises ValueError if the structures differ."""
    leaves = tf.nest.flatten(argument)
    if not isinstance(layout, (list, dict)) or not tf.nest.is_nested(argument):
        return [layout] * len(leaves)
    keys = sorted(argument) if isinstance(argument, dict) else range(len(argument))
    if isinstance(argument, dict) != isinstance(layout, dict) or len(layout) != len(keys):
        raise ValueError
    if isinstance(layout, dict) and sorted(layout) != keys:
        raise ValueError
    return [each for key in keys for each in _flatten_like(argument[key], layout[key])]


def _array(value: Any) -> np.ndarray | jax.Array:
    """Returns the value as an array. Python numbers become 32-bit, as in TensorFlow."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, (bool, int, float, complex)):
        number: Any = value
        return tf.convert_to_tensor(number).numpy()
    return np.asarray(value)


def _spec(value: Any) -> tf.TensorSpec:
    if isinstance(value, tf.TensorSpec):
        return tf.TensorSpec(value.shape, value.dtype)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        value = _array(value)
    return tf.TensorSpec(value.shape, tf.as_dtype(value.dtype))
