"""Digests of the shards that each device holds of the arrays of a state.

A shard is read as unsigned words w_i in C order. Its digest is the sum of w_i (2 i + 1) mod 2^32,
computed on its device. A change of a single word always changes it, because 2 i + 1 is odd.

metrics.jsonl has the loss, the norm of the gradient and all other metrics of each step as the exact
float32 that the step computed, and a digest of its batch. A checkpoint has digests of all arrays.

A device whose memory or arithmetic is defective goes on computing, and nobody notices until the
model is bad. A step is a function of the state and the batch, so two computations of it are equal
to the bit. Where they differ, the device and the tensors that differ are known.

A training step donates the memory of the state. A step that is computed twice begins with a copy of
the state on the devices, so it takes the memory of a second state, and the time of a second step.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lingvo_gshard.core import Device, NestedMap, jax, jnp, processes, signals
from lingvo_gshard.data import Batch, PackedBatch
from lingvo_gshard.training import (
    BATCH_DIGEST,
    IN_RUN_RECORD,
    Metrics,
    MetricsRow,
    ObservedRun,
    RunRecord,
    StepObserver,
)
from lingvo_gshard.training import arrays as checkpoint_arrays
from lingvo_gshard.wings.services.roll_back import BatchesWithoutSkipped
from lingvo_gshard.wings.services.runtime import DeviceRuntime

# The device of arrays that are on the host.
HOST = "the device"
# Path of an array -> device -> digest of the device's shard.
Digests: TypeAlias = "dict[str, dict[str, int]]"


@dataclasses.dataclass(frozen=True)
class ShardDifference:
    """A tensor that is not on a device what it should be."""

    path: str
    device: str


def shard_digests(state: NestedMap) -> Digests:
    """Returns the digests of a tree of NumPy arrays or jax.Arrays. All processes make this call."""
    own: Digests = {}
    on_mesh: dict[Any, dict[str, jax.Array]] = {}
    for path, array in state.flatten_items():
        mesh = getattr(getattr(array, "sharding", None), "mesh", None)
        if mesh is not None:
            on_mesh.setdefault(mesh, {})[path] = array
        elif processes.is_main():
            own[path] = {HOST: _on_host(np.asarray(array))}
    for mesh, arrays in on_mesh.items():
        own.update(_on_devices(mesh, arrays))
    found: Digests = {}
    for part in processes.gather(own):
        for path, digests in part.items():
            found.setdefault(path, {}).update(digests)
    return found


def differences(one: Digests, other: Digests) -> list[ShardDifference]:
    """Returns the shards whose digests differ between two states."""
    return [
        ShardDifference(path, device)
        for path, digests in one.items()
        for device, value in digests.items()
        if other[path][device] != value
    ]


def unequal_copies(state: NestedMap, found: Digests) -> list[ShardDifference]:
    """Returns the copies of a part of an array that differ from most of the others."""
    wrong = []
    for path, array in state.flatten_items():
        for devices in _devices_of_parts(array):
            copies = {device: found[path][device] for device in devices}
            values = list(copies.values())
            usual = max(values, key=values.count)
            wrong += [
                ShardDifference(path, device) for device in devices if copies[device] != usual
            ]
    return wrong


def words(found: Sequence[ShardDifference], device_count: int) -> str:
    """Returns differences in words, by device."""
    by_device: dict[str, list[str]] = {}
    # Weights say more than moments.
    for one in sorted(found, key=lambda one: not one.path.startswith("theta.")):
        by_device.setdefault(one.device, []).append(one.path)
    parts = []
    for device, paths in list(by_device.items())[:4]:
        more = f" and {len(paths) - 3:,} more tensors" if len(paths) > 3 else ""
        parts.append(f"{device}: {', '.join(paths[:3])}{more}")
    if len(by_device) > 4:
        parts.append(f"and {len(by_device) - 4:,} more devices")
    if 1 < device_count == len(by_device):
        parts.append("these are all devices, so a collective may have passed a wrong value on")
    return "; ".join(parts)


def _devices_of_parts(array: Any) -> list[list[str]]:
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        return []
    parts: dict[Any, list[str]] = {}
    for device, index in sharding.devices_indices_map(array.shape).items():
        key = tuple((part.start, part.stop) for part in index)
        parts.setdefault(key, []).append(_name(device))
    return list(parts.values())


def _on_devices(mesh: jax.sharding.Mesh, arrays: Mapping[str, Any]) -> Digests:
    """Returns the digests of the shards on this process's devices."""
    specs = tuple(array.sharding.spec for array in arrays.values())
    rows = _digest_program(mesh, specs)(*arrays.values())
    found: Digests = {path: {} for path in arrays}
    for shard in rows.addressable_shards:
        for path, value in zip(arrays, np.asarray(shard.data)[0].tolist(), strict=True):
            found[path][_name(shard.device)] = value
    return found


@functools.cache
def _digest_program(mesh: jax.sharding.Mesh, specs: tuple) -> Any:
    """Returns a program that maps arrays to uint32 [devices, arrays]."""

    def on_device(*shards: jax.Array) -> jax.Array:
        return jnp.stack([_digest(shard) for shard in shards])[None]

    rows = jax.sharding.PartitionSpec(mesh.axis_names)
    # Copies that differ are what is looked for, so nothing may be assumed to be replicated.
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    return jax.jit(mapped)


def _digest(shard: jax.Array) -> jax.Array:
    if shard.dtype == bool:
        shard = shard.astype(jnp.uint8)
    width = shard.dtype.itemsize * 8
    bits = jax.lax.bitcast_convert_type(shard, jnp.dtype(f"uint{width}"))
    flat = bits.astype(jnp.uint32).reshape(-1)
    weights = 2 * jax.lax.iota(jnp.uint32, flat.size) + 1
    return jnp.sum(flat * weights, dtype=jnp.uint32)


def _on_host(array: np.ndarray) -> int:
    width = min(array.dtype.itemsize, 4)
    flat = np.ascontiguousarray(array).reshape(-1).view(f"<u{width}").astype(np.uint32)
    weights = 2 * np.arange(flat.size, dtype=np.uint32) + np.uint32(1)
    return int(np.sum(flat * weights, dtype=np.uint32))


def _name(device: Device) -> str:
    kind = device.platform.upper() if device.platform != "gpu" else "GPU"
    return f"{kind} device {device.id} (process {device.process_index})"


def batch_digest(batch: Batch) -> int:
    """Returns a CRC-32 of names, shapes, types and values of a batch's arrays.

    A process may hold only its own rows of a `PackedBatch`. The batch then carries a digest that is
    equal in all processes, and this digest is returned.
    """
    if isinstance(batch, PackedBatch) and batch.digest is not None:
        return batch.digest
    digest = 0
    for name, value in sorted(batch.items()):
        array = np.ascontiguousarray(value)
        digest = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), digest)
        digest = zlib.crc32(array.reshape(-1).view(np.uint8).data, digest)
    return digest


class BatchDigests(StepObserver):
    """Adds the digest of its batch to the metrics of each step."""

    def __init__(self, run: ObservedRun):
        """Begins without batches; the run does not matter."""
        del run
        self._batch: Batch = {}
        self._digests: dict[int, int] = {}

    def before_step(self, step: int, batch: Batch) -> None:
        """Keeps the batch until the step has started."""
        self._batch = batch

    def after_start(self, step: int) -> None:
        """Computes the digest while the devices are busy."""
        self._digests[step] = batch_digest(self._batch)
        self._batch = {}

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Adds the digest."""
        row[BATCH_DIGEST] = float(self._digests.pop(step))


# Shown first, since they are the step's result.
_FIRST = ("loss", "gradient_norm")


@dataclasses.dataclass
class Replayed:
    """The result of a replay.

    Attributes:
      checkpoint: the step of the checkpoint that it began from.
      differs_at: the first step that differs from what was recorded; None if all are equal.
      differences: how it differs, in words; empty if all are equal.
      compared: what was compared for `step`, in words.
    """

    step: int
    checkpoint: int
    differs_at: int | None = None
    differences: list[str] = dataclasses.field(default_factory=list)
    compared: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether everything that was compared is equal."""
        return self.differs_at is None


def replay(
    runtime: DeviceRuntime,
    batches: BatchesWithoutSkipped,
    recorded: Mapping[int, MetricsRow],
    found: Replayed,
    saved: RunRecord | None,
) -> None:
    """Repeats the steps from a checkpoint to the requested step, and compares them.

    Args:
      runtime: has the state of the checkpoint.
      recorded: step -> the metrics that the run recorded.
      found: names the steps; receives what was found.
      saved: the record of the checkpoint of the step, if there is one. Without it, the loss of the
        step after it tells whether the weights are equal.
    """
    for step in range(found.checkpoint + 1, found.step + 1):
        row = _take_step(runtime, batches)
        found.differences = _row_differences(row, recorded.get(step, {}))
        if found.differences:
            found.differs_at = step
            return
    found.compared = _words(row, recorded[found.step])
    if saved is not None:
        wrong = _state_differences(runtime, saved)
        found.compared.append(f"the digests of all arrays of the checkpoint of step {found.step:,}")
    else:
        wrong = _differences_of_next(runtime, batches, recorded, found)
    if wrong:
        found.differs_at, found.differences = found.step, wrong


def _differences_of_next(
    runtime: DeviceRuntime,
    batches: BatchesWithoutSkipped,
    recorded: Mapping[int, MetricsRow],
    found: Replayed,
) -> list[str]:
    """Returns how the loss of the next step differs, which its weights alone decide."""
    after = recorded.get(found.step + 1)
    if after is None:
        return []
    row = _take_step(runtime, batches)
    found.compared.append(f"the weights, by the loss of step {found.step + 1:,}")
    wrong = _row_differences(row, {name: after[name] for name in _FIRST})
    return [f"of step {found.step + 1:,}, the {text}" for text in wrong]


def _take_step(runtime: DeviceRuntime, batches: BatchesWithoutSkipped) -> MetricsRow:
    batch = next(batches)
    row = runtime.train_step(batch).read()
    return {**row, BATCH_DIGEST: float(batch_digest(batch))}


def _row_differences(row: MetricsRow, recorded: MetricsRow) -> list[str]:
    """Returns how a step differs from its record, the batch first."""
    names = [BATCH_DIGEST, *_FIRST, *row]
    wrong = [
        name
        for name in dict.fromkeys(names)
        if name in recorded and name in row and not _is_as_recorded(row[name], recorded[name])
    ]
    if BATCH_DIGEST in wrong:
        return ["its batch is another one"]
    shown = [f"{name} is {row[name]!r}, and {recorded[name]!r} was recorded" for name in wrong[:2]]
    return [*shown, f"{len(wrong) - 2:,} more metrics differ"] if len(wrong) > 2 else shown


def _state_differences(runtime: DeviceRuntime, saved: RunRecord) -> list[str]:
    """Returns which arrays of the state have other digests than the checkpoint's."""
    wrong = []
    for part, tree in runtime.state().items():
        if part in IN_RUN_RECORD or part not in saved.digests:
            continue
        found = checkpoint_arrays.digests(dict(tree.flatten_items()))
        expected = saved.digests[part]
        wrong += [f"{part}.{path}" for path in found if found[path] != expected.get(path)]
    if not wrong:
        return []
    more = f" and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
    return [f"other digests than in the checkpoint: {', '.join(wrong[:3])}{more}"]


def _words(row: MetricsRow, recorded: MetricsRow) -> list[str]:
    common = [name for name in row if name in recorded and name != BATCH_DIGEST]
    others = [name for name in common if name not in _FIRST]
    words = ["batch"] if BATCH_DIGEST in recorded else []
    words += [f"{name.replace('_', ' ')} {row[name]:.7g}" for name in _FIRST]
    return [*words, f"{len(others):,} more metrics"] if others else words


def _is_as_recorded(one: float, other: float | None) -> bool:
    # A value that is not finite is recorded as null.
    if other is None:
        return one - one != 0
    return one == other


_MACHINE = (
    "Take the machine of this device out of use, and continue with the same command from the last "
    "checkpoint"
)
_PROGRAM = (
    "As most tensors differ, the program may not be deterministic: a layer may draw random numbers "
    "of its own, or a GPU may need XLA_FLAGS=--xla_gpu_deterministic_ops=true"
)


class WrongResultError(signals.TrainingFailedError):
    """Two computations of a step, or two copies of a tensor, differ."""


class ReadMetrics:
    """The metrics of a step that were read before, in the form that the training loop expects."""

    def __init__(self, row: dict[str, float]):
        self._row = row

    def read(self) -> dict[str, float]:
        """Returns name -> value."""
        return dict(self._row)


class CheckedRuntime:
    """A runtime that computes every K-th step twice. Everything else it leaves to the runtime."""

    def __init__(self, runtime: DeviceRuntime, every: int):
        """Wraps a runtime. With `every` = K, every K-th step is computed twice."""
        self._runtime = runtime
        self._every = every
        self._step: int | None = None
        self._messages: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def init_state(self) -> None:
        """Draws the initial weights."""
        self._runtime.init_state()
        self._step = None

    def load_state(self, state: NestedMap) -> None:
        """Replaces the state."""
        self._runtime.load_state(state)
        self._step = None

    def pop_messages(self) -> list[str]:
        """Returns the messages for the user that arose since the last call."""
        messages, self._messages = self._messages, []
        return [*self._runtime.pop_messages(), *messages]

    def train_step(self, batch: Batch) -> Metrics:
        """Takes one training step. Raises WrongResultError if two results or two copies differ."""
        self._step = (self._runtime.step if self._step is None else self._step) + 1
        if self._step % self._every:
            return self._runtime.train_step(batch)
        return self._take_twice(batch)

    def _take_twice(self, batch: Batch) -> Metrics:
        started = time.monotonic()
        before = self._digests("before")
        saved = self._runtime.state().transform(_copy)
        first_row = self._runtime.train_step(batch).read()
        first = self._digests("after")
        self._runtime.load_state(saved)
        # The next step donates the memory of the copy, which nothing else may hold.
        del saved
        row = self._runtime.train_step(batch).read()
        second = self._digests("after")
        self._compare(first, second, first_row, row)
        if not self._messages and self._step == self._every:
            self._messages.append(self._words(before, time.monotonic() - started))
        return ReadMetrics(row)

    def _digests(self, when: str) -> Digests:
        """Returns the digests of the state. Raises WrongResultError if copies differ."""
        state = self._runtime.state()
        found = shard_digests(state)
        wrong = unequal_copies(state, found)
        if wrong:
            text = words(wrong, _device_count(found))
            what = f"devices hold different copies of a tensor {when} it: {text}"
            raise self._error(what, _MACHINE)
        return found

    def _compare(
        self,
        first: Digests,
        second: Digests,
        first_row: dict[str, float],
        second_row: dict[str, float],
    ) -> None:
        found = differences(first, second)
        metrics = [
            name
            for name, value in first_row.items()
            if not np.array_equal(value, second_row[name], equal_nan=True)
        ]
        if not found and not metrics:
            return
        text = words(found, _device_count(first)) or "none of its tensors"
        also = f"; of its metrics {', '.join(metrics[:3])}" if metrics else ""
        what = f"it was computed twice from the same state, and differs on {text}{also}"
        is_everywhere = len({one.path for one in found}) > len(first) / 2
        raise self._error(what, _PROGRAM if is_everywhere else _MACHINE)

    def _error(self, what: str, advice: str) -> WrongResultError:
        return WrongResultError(f"step {self._step:,}: {what}. {advice}")

    def _words(self, found: Digests, seconds: float) -> str:
        devices = _device_count(found)
        where = f"on {devices:,} devices" if devices > 1 else "on one device"
        return (
            f"step {self._step:,}: computed twice in {seconds:.1f} s, equal in every bit {where}; "
            f"again every {self._every:,} steps"
        )


def checked(runtime: DeviceRuntime, every: int) -> DeviceRuntime:
    """Returns a runtime that computes every `every`-th step twice; 0 returns it as it is."""
    wrapped: Any = CheckedRuntime(runtime, every)
    return wrapped if every else runtime


def _copy(value: Any) -> Any:
    """Returns a copy of a jax array on its devices, and a NumPy array as it is."""
    return jnp.copy(value) if isinstance(value, jax.Array) else value


def _device_count(found: Digests) -> int:
    return len({device for digests in found.values() for device in digests})
