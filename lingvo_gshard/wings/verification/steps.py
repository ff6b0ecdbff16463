"""Runs one training step with all that it computes: outputs of layers, gradients, new state."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from lingvo_gshard.core import Device, NestedMap, jax, kernel_use, known_sizes, tf
from lingvo_gshard.core.lazy import ir, mlir, stablehlo
from lingvo_gshard.data import Batch
from lingvo_gshard.runtime import (
    Array,
    Executable,
    Program,
    annotated_state,
    batch_arrays,
    batch_specs,
    check_layers,
    lower,
    state_arrays,
)
from lingvo_gshard.sharding import Mesh, Partitioning
from lingvo_gshard.training import Trainer, metric_vector
from lingvo_gshard.wings.verification import findings
from lingvo_gshard.wings.verification.observation import Observation, Observed
from lingvo_gshard.wings.verification.unfolded import unfolded_constants

# (kind, name, difference) of tensors.
TensorDifferences: TypeAlias = "Iterable[tuple[str, str, findings.TensorDifference]]"


@dataclasses.dataclass(frozen=True)
class ObservedStep:
    """All that one training step, or one function, computed.

    Attributes:
      outputs: results of layers in their order, each whole or, inside of loops, as a digest.
      gradients: path of a weight -> the traced tensor and its value.
      state: path of an array of the state -> its new value.
      results: result of a function -> the traced tensor and its value.
    """

    executable: Executable
    outputs: list[tuple[Observed, Any]]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    gradients: dict[str, tuple[tf.Tensor, jax.Array]] = dataclasses.field(default_factory=dict)
    state: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    results: dict[str, tuple[tf.Tensor, jax.Array]] = dataclasses.field(default_factory=dict)


def judged(differences: TensorDifferences, tolerance: float) -> list[findings.Compared]:
    """Returns the comparisons of tensors, which are equal if no further apart than a tolerance."""
    return [findings.Compared(*each, each[2].relative <= tolerance) for each in differences]


def output_differences(
    partitioned: ObservedStep, whole: ObservedStep, mesh: Mesh
) -> TensorDifferences:
    """Yields the differences of the results of layers that have one shape in both places."""
    others = {observed.name: (observed, value) for observed, value in whole.outputs}
    for observed, value in partitioned.outputs:
        if observed.name not in others:
            continue
        other, its_value = others[observed.name]
        if other.tensor.shape != observed.tensor.shape:
            continue
        if observed.is_digest:
            yield "output", observed.name, findings.compare_digests(value, its_value)
        else:
            ordered = observed.like(other, np.asarray(its_value))
            yield "output", observed.name, findings.compare(value, ordered, mesh)


def notes(partitioned: ObservedStep, whole: ObservedStep) -> tuple[str, ...]:
    """Returns notes on kernels, and on outputs that have no or another shape on one device."""
    found = kernel_use.uses_in_words(partitioned.executable.program.kernels)
    places = [
        {seen.name: known_sizes(seen.tensor.shape) for seen, _ in step.outputs}
        for step in (partitioned, whole)
    ]
    for name in {**places[0], **places[1]}:
        mesh, one = (shapes.get(name, "not computed") for shapes in places)
        if mesh != one:
            found.append(
                f"not compared: the output {name} is {mesh} over the mesh and {one} on one device, "
                "so its shape depends on the mesh. What is computed from it is compared"
            )
    return tuple(found)


def run_step(
    trainer: Trainer,
    partitioning: Partitioning,
    devices: Sequence[Device],
    state: NestedMap,
    batch: Batch,
    partitioner: str = "gspmd",
    gradients: Sequence[np.ndarray] | None = None,
) -> ObservedStep:
    """Compiles and runs one training step, in float64 wherever it computes in float32.

    The optimizer gets `gradients` if they are given. Two optimizers can only be compared on equal
    gradients: some divide by values close to 0.
    """
    lowered = _Lowered(trainer, partitioning, batch, partitioner, gradients is not None)
    executable = Executable(lowered.program, devices)
    values = [*state.flatten(), *(batch[name] for name in sorted(batch)), *(gradients or ())]
    return lowered.unpack(executable, run_on_arrays(executable, values, devices))


def run_on_arrays(
    executable: Executable, values: Iterable[Any], devices: Sequence[Device]
) -> tuple[jax.Array, ...]:
    """Runs a program on arrays, converted to the types of its inputs."""
    mesh = executable.program.mesh
    arranged = jax.sharding.Mesh(mesh.arrange(devices), mesh.names)
    pairs = zip(executable.program.inputs, values, strict=True)
    return executable(*(a.put(np.asarray(value, a.dtype), arranged) for a, value in pairs))


class _Lowered:
    """A lowered step and the meaning of its results."""

    def __init__(
        self,
        trainer: Trainer,
        partitioning: Partitioning,
        batch: Batch,
        partitioner: str,
        takes_gradients: bool,
    ):
        self._trainer, self._specs = trainer, batch_specs(batch)
        self._arrays = state_arrays(trainer, partitioning)
        self._weights = [
            dataclasses.replace(a, path=a.path.removeprefix("theta."))
            for a in self._arrays
            if a.path.startswith("theta.")
        ]
        inputs = [*self._arrays, *batch_arrays(self._specs, partitioning)]
        inputs += self._weights if takes_gradients else []
        check_layers(trainer.task, partitioning.mesh, partitioner)
        self.program = in_float64(
            lower(
                "verified_step",
                self._step,
                inputs,
                partitioning,
                partitioner=partitioner,
                tracing=unfolded_constants,
            )
        )

    def _step(self, *tensors: tf.Tensor) -> list[tuple[str, tf.Tensor, Any]]:
        self._observation = Observation()
        values = iter(tensors)
        structure = self._trainer.state_specs()
        state = annotated_state(structure.pack(next(values) for _ in self._arrays), self._trainer)
        batch = {name: next(values) for name in sorted(self._specs)}
        given = list(values)
        loss, metrics, gradients = self._trainer.step_gradients(
            state, batch, self._observation.on_result
        )
        self._gradients = gradients.flatten()
        metrics, digests = self._observation.split_metrics(metrics)
        if given:
            pairs = zip(given, self._gradients, strict=True)
            gradients = gradients.pack(tf.cast(value, g.dtype) for value, g in pairs)
        state, metrics = self._trainer.apply(state, loss, metrics, gradients)
        self._metric_names, metric_values = metric_vector(metrics.items())
        self._digest_names, digest_values = metric_vector((n, v) for n, (v, _) in digests.items())
        state = annotated_state(state, self._trainer)
        return [
            ("metrics", metric_values, ((),)),
            ("digests", digest_values, ((),)),
            *_described(self._weights, [tf.cast(g, tf.float32) for g in self._gradients]),
            *_described(self._arrays, state.flatten()),
            *((observed.name, observed.tensor, None) for observed in self._observation.whole),
        ]

    def unpack(self, executable: Executable, results: Sequence[jax.Array]) -> ObservedStep:
        """Returns the results of the program by their meaning."""
        metrics, digests, *rest = results
        values = iter(rest)
        gradients = {
            a.path: (tensor, next(values))
            for a, tensor in zip(self._weights, self._gradients, strict=True)
        }
        state = {a.path: next(values) for a in self._arrays}
        whole = [(observed, next(values)) for observed in self._observation.whole]
        named = dict(zip(self._digest_names, _floats(digests), strict=True))
        outputs = [*whole, *self._observation.digests(named)]
        return ObservedStep(
            executable=executable,
            outputs=sorted(outputs, key=lambda each: each[0].order),
            metrics=dict(zip(self._metric_names, _floats(metrics), strict=True)),
            gradients=gradients,
            state=state,
        )


def _described(arrays: Sequence[Array], tensors: Sequence[tf.Tensor]) -> list:
    """Returns outputs as `lower` takes them."""
    return [(a.path, x, a.split) for a, x in zip(arrays, tensors, strict=True)]


def _floats(vector: jax.Array) -> list[float]:
    return [float(x) for x in np.asarray(vector.addressable_data(0))]


_CONSTANT = re.compile(r'dense<("0x[0-9A-Fa-f]*"|[^">]*)>( : tensor<(?:\d+x)*)f32>')
_BITS = re.compile(r"\b0x([0-9A-Fa-f]{8})\b")
_DECIMAL = re.compile(r"[-+]?\d+\.\d*(?:[eE][-+]?\d+)?")
_BITCAST = re.compile(
    r"^(\s*)(%\S+) = stablehlo\.bitcast_convert (%\S+) :"
    r" \((tensor<(?:\d+x)*\w+>)\) -> (tensor<(?:\d+x)*\w+>)(.*)$",
    re.MULTILINE,
)


# Stands for float32 where it must stay.
_KEPT = "f<32>"


def in_float64(program: Program) -> Program:
    """Returns the program with float64 in place of float32, in its arguments and results, too."""
    with mlir.make_ir_context() as made:
        module = stablehlo.deserialize_portable_artifact(made, program.module)
        # The names of layers are debug information.
        text: Any = module.operation.get_asm(enable_debug_info=True)
        module = ir.Module.parse(to_float64(text))
        version = stablehlo.get_minimum_version()
        portable = bytes(stablehlo.serialize_portable_artifact(module, version, True))
    return dataclasses.replace(
        program,
        module=portable,
        inputs=tuple(map(_widened, program.inputs)),
        outputs=tuple(map(_widened, program.outputs)),
    )


def to_float64(text: str) -> str:
    """Returns the text of a StableHLO module with float64 in place of float32."""
    text = _BITCAST.sub(_with_casts, text)
    text = _CONSTANT.sub(lambda found: f"dense<{_wide(found[1])}>{found[2]}f64>", text)
    return re.sub(r"(?<=[x<( ])f32\b", "f64", text).replace(_KEPT, "f32")


def _with_casts(found: re.Match[str]) -> str:
    """Returns a bitcast that keeps float32 on one side, with a conversion on that side."""
    indent, result, operand, source, target, rest = found.groups()
    if "f32>" not in source and "f32>" not in target:
        return found[0]
    kept_source, kept_target = (x.replace("f32>", f"{_KEPT}>") for x in (source, target))
    name = "%narrow_" + re.sub(r"\W", "_", result)
    if "f32>" in source:
        return (
            f"{indent}{name} = stablehlo.convert {operand} : ({source}) -> {kept_source}\n"
            f"{indent}{result} = stablehlo.bitcast_convert {name} : "
            f"({kept_source}) -> {target}{rest}"
        )
    return (
        f"{indent}{name} = stablehlo.bitcast_convert {operand} : ({source}) -> {kept_target}\n"
        f"{indent}{result} = stablehlo.convert {name} : ({kept_target}) -> {target}{rest}"
    )


def _wide(content: str) -> str:
    """Returns the content of a dense float32 constant for float64."""
    if content.startswith('"0x'):
        values = np.frombuffer(bytes.fromhex(content[3:-1]), np.float32)
        return f'"0x{values.astype(np.float64).tobytes().hex().upper()}"'
    # In float32 0.1 is another number than in float64.
    content = _DECIMAL.sub(lambda number: f"{float(np.float32(number[0])):.16e}", content)
    return _BITS.sub(lambda bits: f"0x{_wide_bits(bits[1])}", content)


def _wide_bits(bits: str) -> str:
    value = np.frombuffer(bytes.fromhex(bits)[::-1], np.float32).astype(np.float64)
    return value.tobytes()[::-1].hex().upper()


def _widened(array: Array) -> Array:
    return dataclasses.replace(array, dtype="float64") if array.dtype == "float32" else array
