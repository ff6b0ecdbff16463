"""Collects what gshard-inspect shows: how a trainer's state is split, and how its step compiles."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from lingvo_gshard.core import Device, Layer, Params, kernel_use, scope_name
from lingvo_gshard.runtime import (
    Program,
    devices_for,
    eval_program,
    init_program,
    platform_of,
    train_program,
)
from lingvo_gshard.sharding import (
    Mesh,
    Partitioning,
    Replicated,
    Split,
    WeightRow,
    recording,
    sharding_tables,
    weight_patterns,
    weight_rows,
)
from lingvo_gshard.training import Trainer, experiments
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.pipeline import pipeline
from lingvo_gshard.wings.planning.planned_program import layer_names
from lingvo_gshard.wings.propagation.activations import Activation, activations
from lingvo_gshard.wings.propagation.propagated import (
    Resharding,
    Traced,
    compile_with_shardings,
    reshardings,
)
from lingvo_gshard.wings.saved_programs.platforms import with_bodies


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a tensor: (first, end) of each dimension, and the positions of its devices."""

    ranges: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]


def weight_parts(shape: Sequence[int], split: Split, mesh: Mesh) -> list[Part]:
    """Returns the different parts of a stored, evenly split tensor, the first elements first."""
    counts = [mesh.parts(axes) for axes in split]
    found = []
    for numbers in itertools.product(*map(range, counts)):
        index: list[int | slice] = [slice(None)] * len(mesh.names)
        for number, axes in zip(numbers, split, strict=True):
            # The first axis of a dimension is the outer one.
            sizes = [mesh.axis_size(axis) for axis in axes]
            for axis, place in zip(
                axes, np.unravel_index(number, sizes) if axes else (), strict=True
            ):
                index[mesh.names.index(axis)] = int(place)
        ranges = tuple(
            (number * (size // count), (number + 1) * (size // count))
            for number, size, count in zip(numbers, shape, counts, strict=True)
        )
        devices = np.ravel(mesh.ids[tuple(index)])
        found.append(Part(ranges, tuple(int(device) for device in devices)))
    return found


FUNCTIONS = ("train_step", "eval_step", "init_state")
# The value of --kernels for the platform of this machine.
HERE = "here"
# The compiler may combine collectives of several layers, and adds some that belong to none.
NO_SINGLE_LAYER = "no single layer"


@dataclasses.dataclass(frozen=True)
class StateSharding:
    """The storage of a trainer's weights and optimizer moments on the devices.

    Attributes:
      replicated_weights: weights that every device holds in full although the strategy splits
        one of their dimensions, with the reasons.
    """

    weights: list[WeightRow]
    moments: list[WeightRow]
    replicated_weights: list[Replicated]
    replicated_moments: list[Replicated]


class CollectiveTotal(msgspec.Struct, frozen=True):
    """The collectives of one kind in one layer and phase.

    Attributes:
      layer: path of the layer, or NO_SINGLE_LAYER.
      phase: one of hlo.PHASES.
      count_in_program: number of collectives in the program. One in a loop counts once.
      count_per_step: number of collectives that one step executes, all iterations included.
      bytes_per_step: bytes that they move on each device in one step; of each collective, the
        larger of operand and result counts.
    """

    layer: str
    phase: str
    kind: str
    count_in_program: int
    count_per_step: int
    bytes_per_step: int


class CompiledFunction(msgspec.Struct, frozen=True):
    """A compiled function of the trainer.

    Attributes:
      memory_per_device: bytes by class, as Executable.memory returns them.
      collectives: rows by phase, layer and kind.
      full_replications: tensors that the partitioner replicates in full to reshard them.
      reshardings: collectives that only move data, with their causes.
      activations: activations of the forward pass with their shardings; None if nothing is
        partitioned, or if the compiler does not say what it decides.
    """

    function: str
    compile_seconds: float
    memory_per_device: dict[str, int]
    collectives: list[CollectiveTotal]
    full_replications: list[hlo.FullReplication]
    reshardings: list[Resharding]
    activations: list[Activation] | None


def pipelines(trainer: Trainer) -> list[dict]:
    """Returns the schedule of each pipeline of a trainer's task, with the share of idle time."""
    return [
        {
            "layer": layer.path,
            **dataclasses.asdict(layer.schedule),
            "ticks": layer.schedule.ticks,
            "idle_share": layer.schedule.idle_share,
        }
        for layer in pipeline.pipelines(trainer.task)
    ]


def state_sharding(trainer: Trainer, partitioning: Partitioning) -> StateSharding:
    """Returns how a trainer's state is split under a partitioning."""
    partitioning = partitioning.with_padded_state()
    specs = trainer.state_specs()
    weights, moments = specs.theta.flatten(), specs.moments.flatten()
    kind = trainer.sharded_parts["theta"]
    return StateSharding(
        weights=weight_rows(weights, partitioning, kind),
        moments=weight_rows(moments, partitioning, "moments"),
        replicated_weights=sharding_tables.replicated(weights, partitioning, kind),
        replicated_moments=sharding_tables.replicated(moments, partitioning, "moments"),
    )


def placements(trainer: Trainer, partitioning: Partitioning, pattern: str) -> list[dict]:
    """Returns matching weights with parts and devices. Raises UserError if none matches."""
    specs = trainer.theta_specs
    weight_patterns.check("--placement", [pattern], specs)
    found = []
    for spec in specs.flatten():
        if not weight_patterns.matches(pattern, spec):
            continue
        split = partitioning.spec_storage_split(spec, trainer.sharded_parts["theta"])
        parts = weight_parts(spec.shape, split, partitioning.mesh)
        found.append(
            {
                "path": spec.path,
                "layout": spec.layout,
                "shape": list(spec.shape),
                "parts": [dataclasses.asdict(part) for part in parts],
            }
        )
    return found


def lower(
    function: str, params: Params, trainer: Trainer, partitioning: Partitioning, partitioner: str
) -> Program:
    """Returns a function of the trainer, one of FUNCTIONS, as a program."""
    if function == "init_state":
        return init_program(trainer, partitioning, partitioner)
    make = {"train_step": train_program, "eval_step": eval_program}[function]
    program, _ = make(trainer, partitioning, partitioner, experiments.batch_specs(params))
    return dataclasses.replace(program, layers=layer_names(trainer.task))


def for_all_platforms(
    program: Program, params: Params, trainer: Trainer, partitioning: Partitioning
) -> Program:
    """Returns a program of `lower` with a body for each platform whose kernels it can use."""

    def make(on_platform: Partitioning) -> Program:
        return lower(program.name, params, trainer, on_platform, program.partitioner)

    return with_bodies(program, make, partitioning)


def kernel_uses(
    function: str, platform: str, params: Params, trainer: Trainer, partitioning: Partitioning
) -> tuple[str, tuple[kernel_use.KernelUse, ...]]:
    """Returns the platform, and whether each layer of a function uses its kernels."""
    device_kind = ""
    if platform == HERE:
        # More devices than one could be virtual, of another platform.
        device = devices_for(None)[0]
        platform, device_kind = platform_of(device), device.device_kind
    on_platform = partitioning.on(platform, device_kind)
    return platform, lower(function, params, trainer, on_platform, "gspmd").kernels


def compile_program(
    program: Program, recorded: recording.Recorded, task: Layer, devices: Sequence[Device]
) -> CompiledFunction:
    """Compiles a program, whose lowering was `recorded`, for as many devices as its mesh has."""
    started = time.monotonic()
    executable, module = compile_with_shardings(program, devices)
    seconds = time.monotonic() - started
    paths = task.layer_paths()
    calls = executable.collectives(map(scope_name, paths))
    traced = Traced(recorded, paths, program.mesh)
    mesh, inputs = program.mesh, program.inputs
    return CompiledFunction(
        function=program.name,
        compile_seconds=seconds,
        memory_per_device=executable.memory(),
        collectives=collective_rows(calls, paths),
        full_replications=executable.full_replications(),
        reshardings=reshardings(calls, module, traced, mesh) if module else [],
        activations=activations(module, inputs, traced, mesh) if module else None,
    )


def collective_rows(
    calls: Iterable[hlo.CollectiveCall], paths: Sequence[str]
) -> list[CollectiveTotal]:
    """Returns collectives summed by phase, layer and kind, in the order of `paths`."""
    layers = {scope_name(path): path for path in paths if path}
    rows = _sums(
        CollectiveTotal(
            layers.get(call.layer, NO_SINGLE_LAYER),
            call.phase,
            call.kind,
            1,
            call.times,
            call.times * call.bytes,
        )
        for call in calls
    )
    order = [*paths, NO_SINGLE_LAYER]
    return sorted(
        rows, key=lambda row: (hlo.PHASES.index(row.phase), order.index(row.layer), row.kind)
    )


def total_by_kind(rows: Iterable[CollectiveTotal]) -> list[CollectiveTotal]:
    """Returns the sum of the rows of each kind, sorted by kind; layer and phase are empty."""
    plain = (msgspec.structs.replace(row, layer="", phase="") for row in rows)
    return sorted(_sums(plain), key=lambda row: row.kind)


def _sums(rows: Iterable[CollectiveTotal]) -> list[CollectiveTotal]:
    """Returns a row for each layer, phase and kind, with the sums of the numbers."""
    sums: dict[tuple, tuple[int, ...]] = {}
    for row in rows:
        *key, count, per_step, size = msgspec.structs.astuple(row)
        before = sums.get(tuple(key), (0, 0, 0))
        sums[tuple(key)] = before[0] + count, before[1] + per_step, before[2] + size
    return [CollectiveTotal(*key, *numbers) for key, numbers in sums.items()]


def sharding_record(
    partitioning: Partitioning, sharding: StateSharding, with_moments: bool
) -> dict:
    """Returns how a state is split as values for JSON.

    The optimizer's moments are listed only on request. Their totals are always included.
    """
    record = {
        "mesh": str(partitioning.mesh),
        "strategy": partitioning.strategy.name,
        "table": partitioning.strategy.to_text(),
        "overrides": {pattern: table.to_text() for pattern, table in partitioning.overrides},
        "unused_axes": partitioning.unused_axes,
    }
    for kind, rows in (("weights", sharding.weights), ("moments", sharding.moments)):
        record[f"{kind}_bytes"] = sum(row.bytes for row in rows)
        record[f"{kind}_bytes_per_device"] = sum(row.bytes_per_device for row in rows)
    record["replicated"] = [*sharding.replicated_weights]
    record["weights"] = sharding.weights
    if with_moments:
        record["replicated"] += sharding.replicated_moments
        record["moments"] = sharding.moments
    return msgspec.to_builtins(record)
