"""The planner: compiles a program for a topology and reports its memory, work and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import SILENT, VERSION, Progress, jax, kernel_use
from lingvo_gshard.runtime import (
    Program,
    chosen_for,
    offloading,
    options_in_words,
    platform_of,
    traits_of,
)
from lingvo_gshard.sharding import Partitioning
from lingvo_gshard.tasks import BatchSpecs
from lingvo_gshard.training import Trainer
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.compiler_options.table import (
    has_parallel_collectives,
    notes_on_ragged_exchanges,
)
from lingvo_gshard.wings.functions.partition import Partitioned
from lingvo_gshard.wings.hlo.names import PRODUCT_NAMES
from lingvo_gshard.wings.planning import memory, operation_rows, overlap, planned_program, roofline
from lingvo_gshard.wings.planning.calibration import Calibration, calibrated
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.compiling.compilation import OptimizedHlo
from lingvo_gshard.wings.planning.machines import compilers, cuda, interconnect
from lingvo_gshard.wings.planning.machines import topologies as topologies_lib
from lingvo_gshard.wings.planning.machines.chips import PLATFORMS
from lingvo_gshard.wings.planning.machines.gpu_targets import HOPPER
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import FlopCounts, MemoryBytes, Plan
from lingvo_gshard.wings.planning.planned_program import PlannedProgram
from lingvo_gshard.wings.planning.roofline import StepTime, TimedOperation
from lingvo_gshard.wings.services.run_records import installed_versions

# In these phases a layer should not communicate over data-parallel axes: these axes only sum
# gradients.
_PHASES = ("forward", "rematerialized")
# Layers also sum counts of tokens and losses. These sums take a smaller share of a step than this.
_LEAST_SHARE = 0.01


def data_center_notes(timed: Sequence[TimedOperation], topology: Topology) -> tuple[str, ...]:
    """Returns notes for the plan of a step on several slices."""
    if topology.slices == 1:
        return ()
    chip = topology.chip
    rate = interconnect.network_rate(chip) * chip.partitions * 8 / 1e9
    return (
        f"{topology.slices} slices, joined by the data-center network at {rate:g} Gbit/s for each "
        f"chip: {chip.sources['network_bandwidth']}. Its latency and the copies to and from the "
        "hosts are not published and are left out",
        *_notes_on_layers(timed),
    )


def _notes_on_layers(timed: Sequence[TimedOperation]) -> list[str]:
    """Returns a note for each mesh axis that carries layers' activations across slices."""
    seconds: dict[str, float] = {}
    for each in timed:
        collective = each.operation.collective
        if collective and collective.slices > 1 and each.operation.phase in _PHASES:
            axes = ",".join(collective.axes) or "all"
            seconds[axes] = seconds.get(axes, 0.0) + each.seconds
    return [
        f"axis {axes} crosses slices, and layers communicate over it in the forward pass: "
        f"{amount * 1e3:.3g} ms a step over the data-center network. The leading axes of `mesh` "
        "cross slices: put one first that only sums gradients, such as a replicated data axis"
        for axes, amount in seconds.items()
        if amount >= _LEAST_SHARE * sum(each.seconds for each in timed)
    ]


_PACKAGES = ("jax", "jaxlib", "tensorflow")
# Stands for the name of a strategy in plans of programs that were partitioned without one.
_OWN_SHARDINGS = "its own"


def plan(
    function: Callable[..., Any],
    specs: Sequence[Any],
    topology: str,
    *,
    mesh: str | None = None,
    strategy: str = "replicated",
    layouts: Sequence[Any] | None = None,
    donate: Sequence[int] = (),
    overrides: Mapping[str, str] | None = None,
    partitioner: str = "gspmd",
    progress: Progress = SILENT,
) -> Plan:
    """Returns the plan of any TensorFlow function on a topology.

    Args:
      function: traced with `specs` as arguments.
      specs: nested structures of `tf.TensorSpec`, one for each argument.
      topology: the machine, such as "v3:32x32".
      mesh: axes and sizes; by default data=N over all N devices.
      strategy: name or table of a strategy.
      layouts: as in `lingvo_gshard.partition`. The prefixes "weights:" and "moments:" say what the
        memory of an argument is for; all other arguments count as inputs.
      donate: positions of the arguments whose memory the outputs may reuse.
      overrides: tables for single layers, as in `lingvo_gshard.partition`.

    Raises:
      UserError: if the topology is unknown, the mesh does not fit it, or `partition` rejects the
        function.
    """
    machine = topologies_lib.get(topology)
    partitioning = Partitioning.make(mesh or f"data={machine.devices}", strategy, overrides)
    compilation.check_mesh(partitioning.mesh, machine)
    devices = machine.compile_devices()
    progress.begin("tracing and lowering")
    partitioned = Partitioned(function, partitioning, devices, layouts, donate, partitioner)
    program = planned_program.lower_function(partitioned, specs, partitioning)
    return plan_program(program, partitioning, machine, progress=progress)


def plan_step(
    trainer: Trainer,
    batch: BatchSpecs,
    partitioning: Partitioning,
    topology: Topology,
    name: str,
    partitioner: str = "gspmd",
    tokens: float | None = None,
    progress: Progress = SILENT,
    calibration: Calibration | None = None,
    compile_options: Sequence[str] = (),
) -> Plan:
    """Returns the plan of a trainer's training step, compiled with the options of a training.

    Args:
      compile_options: changes to the options of `runtime/compile_options.py`.

    Raises:
      UserError: if the mesh does not fit the topology, its chip lacks the products of
        `step.precision`, or the compiler rejects the program or an option.
    """
    compilation.check_mesh(partitioning.mesh, topology)
    progress.begin("tracing and lowering")
    # Tracing takes long, so a missing compiler and wrong options are reported first.
    device = topology.compile_devices()[0]
    platform = platform_of(device)
    trainer.check_device(PLATFORMS[topology.kind], topology.chip.name)
    # `lower_step` pads the state.
    traits = traits_of(trainer, partitioning.with_padded_state())
    chosen_for(device, compile_options, traits)
    partitioning = partitioning.on(platform, device.device_kind)
    program = planned_program.lower_step(trainer, batch, partitioning, name, partitioner)
    options = chosen_for(device, compile_options, traits, program.program)
    simulated = (
        *trainer.device_notes(platform),
        *offloading.notes(trainer, platform),
        *notes_on_ragged_exchanges(program.program, device, options),
    )
    program = dataclasses.replace(program, notes=(*program.notes, *simulated))
    return plan_program(program, partitioning, topology, tokens, progress, calibration, options)


def plan_program(
    planned: PlannedProgram,
    partitioning: Partitioning | None,
    topology: Topology,
    tokens: float | None = None,
    progress: Progress = SILENT,
    calibration: Calibration | None = None,
    options: Mapping[str, str] | None = None,
    compiled: OptimizedHlo | None = None,
) -> Plan:
    """Returns the plan of a lowered program on a topology.

    Args:
      partitioning: what split the program; None if the program brings its own shardings.
      tokens: total tokens to train on; the plan then has a budget.
      calibration: corrects the estimates; None keeps the estimates from published efficiencies.
      options: compiler options, added to the topology's own.
      compiled: the program as the topology's devices run it; None compiles it.

    Raises:
      UserError: if the mesh does not fit the topology or the compiler rejects the program.
    """
    program = planned.program
    compiled = compiled or compilation.compile_for(program, topology, progress, options)
    progress.begin("reading the compiled program")
    found = _operations(compiled, planned, topology)
    timed, step = _timed(found.operations, planned, topology, calibration, options or {})
    sizes = memory.bytes_by_class(program, planned.classes, compiled.memory, compiled.module)
    packages = (*_PACKAGES, *filter(None, [compilers.PACKAGES.get(topology.compiler)]))
    stated, useful = planned.stated_flops, planned.useful_flops
    flops = operation_rows.flop_counts(timed, useful, topology.devices, stated)
    notes = _operation_notes(timed, flops, planned, topology, calibration, options or {})
    return Plan(
        name=planned.name,
        topology=topology.name,
        chip=topology.chip.name,
        devices=topology.devices,
        compiler=topology.compiler,
        mesh=str(program.mesh),
        strategy=program.strategy,
        strategy_name=partitioning.strategy.name if partitioning else _OWN_SHARDINGS,
        partitioner=program.partitioner,
        fits=_fits(compiled, sizes["peak"], topology),
        bytes_per_device=MemoryBytes(**sizes, capacity=topology.chip.usable_bytes),
        parameters=planned.parameters,
        tensors=list(planned.tensors),
        largest_temporaries=memory.largest_temporaries(compiled.module, planned.layers),
        collectives=operation_rows.collective_rows(timed, planned.lines),
        host_transfers=operation_rows.host_rows(timed),
        flops=flops,
        layers=operation_rows.layer_rows(timed),
        kinds=operation_rows.kind_rows(timed, planned.kinds),
        is_calibrated=calibration is not None,
        **_speeds(step, planned.tokens, flops.useful, tokens, topology),
        remedies=[],
        compile_seconds=compiled.seconds,
        has_code=compiled.has_code,
        versions={"lingvo_gshard": VERSION} | installed_versions(packages),
        notes=[*planned.notes, *notes, *_notes(compiled, found, program, partitioning, topology)],
    )


def _operations(
    compiled: OptimizedHlo, planned: PlannedProgram, topology: Topology
) -> hlo.OperationList:
    """Returns what a device executes in a step."""
    slices = hlo.Slices(topology.slices, is_split=topology.compiler == "tpu")
    return hlo.read_operations(
        *(compiled.module, planned.program.mesh, planned.layers, slices),
        kernel_flops=planned.kernel_flops,
    )


def _timed(
    operations: Sequence[hlo.Operation],
    planned: PlannedProgram,
    topology: Topology,
    calibration: Calibration | None,
    options: Mapping[str, str],
) -> tuple[list[TimedOperation], StepTime]:
    mesh, has_streams = planned.program.mesh, has_parallel_collectives(options)

    def has_own_links(collective: hlo.Collective) -> bool:
        return has_streams and interconnect.spanned_hosts(collective, topology, mesh) > 1

    timed = overlap.hide(roofline.time_operations(operations, topology, mesh), has_own_links)
    if calibration is None:
        return timed, roofline.step_time(timed)
    timed = calibrated(timed, calibration, planned.kinds)
    step = roofline.step_time(timed)
    seconds = step.seconds + calibration.seconds_outside
    return timed, dataclasses.replace(step, seconds=seconds)


def _operation_notes(
    timed: Sequence[TimedOperation],
    flops: FlopCounts,
    planned: PlannedProgram,
    topology: Topology,
    calibration: Calibration | None,
    options: Mapping[str, str],
) -> list[str]:
    """Returns notes on repetition, times, slices, the host, recomputation on a GPU, and options."""
    notes = _notes_on_repetition(flops, planned)
    notes += [calibration.note] if calibration else []
    notes += _notes_on_count(timed, flops)
    notes += data_center_notes(timed, topology)
    notes += _notes_on_host(timed, topology)
    if topology.compiler == "gpu":
        notes += cuda.recomputation_notes({t.operation.name: t.seconds for t in timed})
        notes += _notes_on_schedule(timed, topology)
    if options:
        notes.append(f"compiled with {options_in_words(options)}; `compile_options` changes them")
    return notes


# Counts of a program's products differ by less: kernels round to tiles, compilers merge products.
_COUNTED = 0.98


def _notes_on_count(timed: Sequence[TimedOperation], flops: FlopCounts) -> list[str]:
    """Returns a note if the program computes fewer operations than its model needs."""
    # The compiler multiplies a single row by element, and keeps the product's name.
    by_element = sum(
        each.operation.times * each.operation.other_flops
        for each in timed
        if not each.operation.matmul_flops and each.operation.op_name.endswith(PRODUCT_NAMES)
    )
    counted = flops.executed + by_element - flops.rematerialized - flops.dispatch - flops.optimizer
    if counted >= _COUNTED * flops.useful:
        return []
    return [
        f"the program's products are {counted / 1e12:.4g}e12 operations where the model needs "
        f"{flops.useful / 1e12:.4g}e12: some are not counted, and the step takes longer than "
        "planned. This is an error of the planner unless a note says why; please report it"
    ]


# A program whose products pad and repeat less needs no advice.
_MOST_REPEATED = 0.02


def _notes_on_repetition(flops: FlopCounts, planned: PlannedProgram) -> list[str]:
    """Returns a note if devices compute more than a share of what the program states."""
    if planned.stated_flops is None or flops.padding <= _MOST_REPEATED * flops.executed:
        return []
    return [
        f"{flops.padding / flops.executed:.0%} of the operations of products are computed by "
        "several devices alike, pad shapes or multiply by zeros, and do not count as useful: the "
        f"program states {planned.stated_flops / 1e12:.4g}e12 operations for all devices"
    ]


def _notes_on_schedule(timed: Sequence[TimedOperation], topology: Topology) -> list[str]:
    """Returns a note on what may hide more of the communication between hosts of GPUs."""
    target = topology.chip.target
    # XLA schedules for older GPUs without its tables of measured products and networks.
    if target is None or target.architecture.capability < HOPPER.capability or topology.hosts == 1:
        return []
    waiting = sum(t.seconds for t in timed if t.communication_seconds)
    return cuda.schedule_notes(waiting / sum(t.seconds for t in timed))


def _notes_on_host(timed: Sequence[TimedOperation], topology: Topology) -> list[str]:
    """Returns a note on the rate of transfers to and from the host, if there are any."""
    if not any(each.operation.host for each in timed):
        return []
    chip = topology.chip
    source = chip.sources["host_bandwidth"]
    if chip.host_bandwidth is None:
        return [
            f"the rate between {chip.name} and its host is unknown ({source}): copies to and from "
            "the host take no time in the estimate"
        ]
    return [
        f"{chip.host_bandwidth / 1e9:g} GB/s in each direction between a device and its host: "
        f"{source}"
    ]


def _fits(compiled: OptimizedHlo, peak: int, topology: Topology) -> bool:
    """Returns the TPU compiler's own verdict, elsewhere whether the peak is within capacity."""
    if topology.compiler == "tpu":
        return not compiled.refused
    return peak <= topology.chip.usable_bytes


def _speeds(
    step: StepTime, tokens: int | None, useful_flops: int, total: float | None, topology: Topology
) -> dict[str, Any]:
    """Returns the fields of a plan that say how fast steps are, and what `total` tokens cost."""
    budget = None
    if total and tokens:
        budget = roofline.budget(total, step.seconds / tokens, topology)
    return {
        "budget": budget,
        "seconds_per_step": step.seconds,
        "seconds_per_step_bound": step.seconds_bound,
        "steps_per_second": _rate(1, step.seconds),
        "steps_per_second_bound": _rate(1, step.seconds_bound),
        "tokens_per_step": tokens,
        "tokens_per_second": _rate(tokens, step.seconds),
        "mfu": roofline.utilization(useful_flops, step.seconds, topology) if step.seconds else None,
    }


def _rate(amount: int | None, seconds: float) -> float | None:
    return amount / seconds if amount and seconds else None


def _notes(
    compiled: OptimizedHlo,
    found: hlo.OperationList,
    program: Program,
    partitioning: Partitioning | None,
    topology: Topology,
) -> list[str]:
    notes = [
        *kernel_use.uses_in_words(program.kernels),
        *filter(None, [compiled.note]),
        *topology.notes,
        f"capacity: {topology.chip.capacity_reason}",
    ]
    effort = jax.config.values["jax_exec_time_optimization_effort"]
    if effort:
        notes.append(f"compiled with jax_exec_time_optimization_effort={effort:g}")
    if not compiled.has_code and topology.compiler == "tpu":
        notes.append(
            "the peak lacks the bytes of the program's code, usually 1% to 2% of a device: libtpu "
            "stopped before it generated code. `generate_code` adds them, in about ten times the "
            "compile time"
        )
    notes += found.notes
    if partitioning:
        name = partitioning.strategy.name
        notes += [
            f"strategy {name} shards nothing over axis {axis}" for axis in partitioning.unused_axes
        ]
    return notes + [str(replication) for replication in compiled.full_replications]
