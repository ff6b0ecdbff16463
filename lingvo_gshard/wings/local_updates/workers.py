"""Workers: a mesh with an axis `worker`, as one mesh per worker and one mesh of all devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core import Device, Params, UserError, jax, letters, processes
from lingvo_gshard.runtime import Array
from lingvo_gshard.sharding import Mesh, Partitioning, Strategy
from lingvo_gshard.training import StepMetrics
from lingvo_gshard.wings.optimizers.local_updates import AXIS

# The metric that is summed over workers. It weights the others, which are averaged.
_TOKENS = "tokens"
_EVERY = "step.local_updates.every"
# The axes of a worker with one device.
_ONE = (("data", 1),)


def check(trainer: Params, partitioning: Partitioning | None, rows: int | None) -> None:
    """Checks that step.local_updates, the mesh and the batch fit together.

    Without local updates, `worker` is an ordinary axis if the strategy uses it.

    Args:
      partitioning: the mesh and the strategy; None without a mesh.
      rows: rows of a batch; None if unknown.

    Raises:
      UserError: names the option or hyperparameter that does not fit.
    """
    every = trainer.local_updates.every
    mesh = partitioning.mesh if partitioning else None
    has_workers = mesh is not None and AXIS in mesh.names
    is_unused = partitioning is not None and AXIS in partitioning.unused_axes
    if every and not has_workers:
        given = f"`mesh={mesh}` has none" if mesh else "there is no `mesh`"
        raise UserError(
            f"{_EVERY}={every} needs an axis {AXIS} of `mesh`, as in `mesh={AXIS}=4,data=2`; "
            f"{given}"
        )
    if has_workers and not every and is_unused:
        raise UserError(
            f"`mesh={mesh}` has an axis {AXIS}, which the strategy does not use. Set {_EVERY} to "
            "the number of steps that workers train alone, or remove the axis"
        )
    if every and rows is not None and mesh is not None:
        _share(rows, mesh)


class MeanMetrics:
    """Metrics of the workers of all processes: means weighted by tokens, and the sum of tokens."""

    def __init__(self, metrics: Sequence[StepMetrics]):
        """Takes the metrics of this process's workers; `read` combines them over all processes."""
        self._metrics = metrics

    def read(self) -> dict[str, float]:
        """Waits for the workers and returns name -> value. All processes must make this call."""
        local = [metrics.read() for metrics in self._metrics]
        rows = [row for rows in processes.gather(local) for row in rows]
        tokens = np.array([row.get(_TOKENS, 1.0) for row in rows])
        weights = tokens / tokens.sum() if tokens.sum() > 0 else np.full(len(rows), 1 / len(rows))
        means = {name: float(weights @ [row[name] for row in rows]) for name in rows[0]}
        return {**means, _TOKENS: float(tokens.sum())} if _TOKENS in means else means


class Workers:
    """The workers of a mesh with an axis `worker`.

    Attributes:
      partitioning: the partitioning over one worker's mesh.
      together: the mesh of all devices, with the axis `worker` first.
      everywhere: the partitioning over `together`. Rows are split over workers, weights are not.
      mesh: the jax mesh of all devices.
    """

    def __init__(self, partitioning: Partitioning, devices: Sequence[Device]):
        """Raises ValueError if the strategy splits a letter over the axis `worker`."""
        mesh = partitioning.mesh
        self.count = mesh.axis_size(AXIS)
        tables = [partitioning.strategy, *(table for _, table in partitioning.overrides)]
        if any(AXIS in table.axes for table in tables):
            raise UserError(
                f"`strategy={partitioning.strategy.name}` and sharding.overrides may split nothing "
                f"over axis {AXIS} with {_EVERY}: each worker has all weights"
            )
        rest = tuple(axis for axis in mesh.axes if axis[0] != AXIS) or _ONE
        self.partitioning = dataclasses.replace(partitioning, mesh=Mesh(rest))
        self.together = Mesh(((AXIS, self.count), *rest))
        self.everywhere = dataclasses.replace(
            partitioning, mesh=self.together, strategy=with_rows_over_workers(partitioning.strategy)
        )
        arranged = np.moveaxis(mesh.arrange(devices), mesh.names.index(AXIS), 0)
        rows = arranged.reshape(self.count, -1)
        self.devices: list[list[Device]] = [list(own) for own in rows]
        self.mesh = jax.sharding.Mesh(self.together.arrange(self.all_devices), self.together.names)
        self.meshes = [
            jax.sharding.Mesh(self.partitioning.mesh.arrange(own), self.partitioning.mesh.names)
            for own in self.devices
        ]

    @property
    def all_devices(self) -> list[Device]:
        """The devices of all workers, in the order of the workers."""
        return [device for own in self.devices for device in own]

    @functools.cached_property
    def local(self) -> list[int]:
        """The workers of this process.

        Raises:
          UserError: the devices of a worker belong to several processes.
        """
        owners = [{device.process_index for device in own} for own in self.devices]
        for worker, holders in enumerate(owners):
            if len(holders) > 1:
                raise UserError(
                    f"`mesh={self.together}`: the devices of worker {worker} belong to "
                    f"{len(holders)} processes; each worker must fit into one process"
                )
        return [w for w, holders in enumerate(owners) if jax.process_index() in holders]

    def stacked(self, array: Array) -> Array:
        """Returns the array that stacks one array of each worker along a first dimension."""
        return stacked(array, self.count)

    def stack(self, array: Array, shares: dict[int, jax.Array]) -> jax.Array:
        """Returns this process's shares of an array as one array. Moves and copies nothing.

        Args:
          array: describes the array of one worker.
          shares: for each worker of this process its array, with a first dimension of 1.
        """
        stacked = self.stacked(array)
        shards = [shard.data for share in shares.values() for shard in share.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            stacked.shape, stacked.known_sharding(self.mesh), shards
        )

    def unstack(self, array: Array, stacked: jax.Array) -> dict[int, jax.Array]:
        """Returns the share of each worker of this process: the inverse of `stack`."""
        shards = {shard.device: shard.data for shard in stacked.addressable_shards}
        share = array.stacked(1)
        return {
            worker: jax.make_array_from_single_device_arrays(
                share.shape,
                share.known_sharding(self.meshes[worker]),
                [shards[device] for device in self.devices[worker]],
            )
            for worker in self.local
        }

    def rows_of(self, batch: dict[str, np.ndarray], worker: int) -> dict[str, np.ndarray]:
        """Returns a worker's rows of a batch. Raises ValueError if they do not divide equally."""
        share = _share(len(next(iter(batch.values()))), self.together)
        return {name: x[worker * share : (worker + 1) * share] for name, x in batch.items()}


def stacked(array: Array, count: int) -> Array:
    """Returns the array that stacks one array of each of `count` workers."""
    return array.stacked(count, (AXIS,))


def _share(rows: int, mesh: Mesh) -> int:
    count = mesh.axis_size(AXIS)
    if rows % count:
        raise UserError(
            f"input.batch_rows={rows} is no multiple of the {count} workers of `mesh={mesh}`"
        )
    return rows // count


def with_rows_over_workers(strategy: Strategy) -> Strategy:
    """Returns a strategy that splits rows over the workers, too."""
    table = dict(strategy.activations)
    for letter in letters.ROWS:
        table[letter] = (AXIS, *table.get(letter, ()))
    return dataclasses.replace(strategy, activations=table)
