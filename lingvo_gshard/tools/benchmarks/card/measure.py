"""Measures the step that fills a card, and compares it with its plan.

Needs neither TensorFlow nor a model:

    python -m lingvo_gshard.tools.benchmarks.card.measure FOLDER

prints the JSON of `gshard-bench card FOLDER --json`.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Sequence

import msgspec

from lingvo_gshard.core import SILENT, Device, Progress, UserError, jax
from lingvo_gshard.runtime import LayerNames
from lingvo_gshard.tools.benchmarks import exported
from lingvo_gshard.tools.benchmarks.card import folder as card_folder
from lingvo_gshard.tools.benchmarks.card.folder import CardFolder, CardRecord
from lingvo_gshard.tools.benchmarks.exported import SavedStep
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.hlo.messages import HloModuleProto, HloProto
from lingvo_gshard.wings.planning.machines import chips, topologies
from lingvo_gshard.wings.planning.operation_rows import ROUTING
from lingvo_gshard.wings.profiling import xspace
from lingvo_gshard.wings.profiling.comparison import Comparison, compare
from lingvo_gshard.wings.profiling.profile import HOST, PAUSES, Profile, Rate
from lingvo_gshard.wings.profiling.summary import StepFacts, Summary
from lingvo_gshard.wings.profiling.timeline import StepRange
from lingvo_gshard.wings.profiling.trace import JaxTracer, Recorder, Trace

# Shares of the product's rate that a step should reach (docs/accelerators.md).
GOALS = {"dense": 0.5, "experts": 0.4}
_SHOWN = 10


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Time that a part of a step takes beyond its plan.

    Attributes:
      part: a kind of work, a layer in a phase, or a part of the step that no plan has.
      predicted: seconds by the plan.
      measured: measured seconds.
      seconds: measured less predicted.
      share: `seconds` by the measured seconds of the step.
    """

    part: str
    predicted: float
    measured: float
    seconds: float
    share: float


def goal_gap(comparison: Comparison) -> float:
    """Returns the MFU that the step should reach; models with experts have a goal of their own."""
    is_sparse = any(row.part == ROUTING and row.predicted for row in comparison.kinds)
    return GOALS["experts" if is_sparse else "dense"]


def kind_gaps(comparison: Comparison, profile: Profile) -> list[Gap]:
    """Returns the gap of each kind of work, largest first, and what no plan has."""
    rows = [(row.part, row.predicted, row.measured) for row in comparison.kinds]
    rows += [(part, 0.0, profile.seconds_of(part)) for part in (PAUSES, HOST)]
    return _gaps(rows, comparison.measured)


def of_layers(comparison: Comparison) -> list[Gap]:
    """Returns the largest gaps of layers and phases."""
    rows = [
        (f"{row.part or '(no layer)'}, {row.phase}", row.predicted, row.measured)
        for row in comparison.layers
    ]
    return _gaps(rows, comparison.measured)[:_SHOWN]


def in_words(gaps: Sequence[Gap], mfu: float, wanted: float) -> list[str]:
    """Returns sentences on the largest gaps and on the goal."""
    reached = "reaches" if mfu >= wanted else "misses"
    said = [f"The step {reached} the goal: MFU {mfu:.1%} of the product's rate, goal {wanted:.0%}."]
    slower = [gap for gap in gaps if gap.share >= 0.01][:3]
    said += [
        f"{gap.part}: {gap.share:.1%} of the step is time beyond the plan "
        f"({gap.measured * 1e3:,.2f} ms, {gap.predicted * 1e3:,.2f} ms planned)."
        for gap in slower
    ]
    if not slower:
        said.append("No kind of work takes noticeably longer than planned.")
    return said


def _gaps(rows: Sequence[tuple[str, float, float]], step: float) -> list[Gap]:
    gaps = [
        Gap(
            part=part,
            predicted=predicted,
            measured=measured,
            seconds=measured - predicted,
            share=(measured - predicted) / step,
        )
        for part, predicted, measured in rows
        if predicted or measured
    ]
    return sorted(gaps, key=lambda gap: -gap.seconds)


_STEPS = StepRange(1, 3)
# Kernels that a CUDA graph starts do not say which operation they belong to.
_WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
# The key of the program in a trace.
_PROGRAM = "the measured step"


def profiled_step(step: SavedStep, name: str, attainable: Rate) -> tuple[Profile, bytes]:
    """Returns where the time of some steps goes, and their trace as a serialized XSpace.

    On a GPU the step is compiled again, without CUDA graphs. The state of the step moves on.

    Raises:
      UserError: the trace has no operations of devices.
    """
    if step.devices[0].platform == "gpu":
        step.recompile(_WITHOUT_GRAPHS)
    step()()
    tracer = JaxTracer()
    recorder = Recorder(tracer)
    for number in range(_STEPS.first, _STEPS.last + 1):
        recorder.begin(number)
        recorder.start_step()
        step()()
    serialized = recorder.end()
    trace = xspace.read(serialized)
    facts = _facts(step, name, recorder, tracer.chip_key(), attainable)
    add_program(trace, hlo.read_proto(step.compiled))
    return Summary(trace, facts).profile(), serialized


def add_program(trace: Trace, module: bytes) -> None:
    """Adds a compiled program to a trace, since traces of GPUs may lack it."""
    proto = HloProto(hlo_module=HloModuleProto.FromString(module))
    trace.programs.setdefault(_PROGRAM, proto.SerializeToString())


def _facts(
    step: SavedStep, name: str, recorder: Recorder, chip: str, attainable: Rate
) -> StepFacts:
    layers = step.program.layers or LayerNames(())
    return StepFacts(
        name=name,
        steps=_STEPS,
        device_summary=f"{len(step.devices)} x {step.devices[0].device_kind}",
        chip=chip,
        mesh=step.program.mesh,
        layers=frozenset(layers.scopes),
        kinds=dict(layers.kinds),
        busy_cores=recorder.core_seconds / recorder.seconds,
        cores=len(os.sched_getaffinity(0)),
        useful_flops=step.work.flops,
        tokens_per_step=step.work.tokens,
        attainable=attainable,
        source_of=lambda _: "",
    )


TRACE = "measured.xplane.pb"


class CardRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step that fills a card: measured, and as planned.

    Attributes:
      card: how the step was chosen.
      measured: the step time, the rate and the memory, as `gshard-bench exported` measures them.
      goal: the MFU that the step should reach.
      planned_seconds_bound: a lower bound by the plan.
      planned_peak: peak bytes by the plan.
      memory_by_plan: measured bytes by planned ones; None if jax does not count bytes here.
      comparison: predicted and measured seconds by kind of work and by layer.
      kind_gaps: time beyond the plan by kind of work, largest first.
      layer_gaps: the largest gaps of layers and phases.
      profile: where the time of the traced steps went. They run one at a time, on a GPU without
        CUDA graphs, so they may take longer than the measured ones.
    """

    card: CardRecord
    measured: exported.ProgramTiming
    goal: float
    planned_seconds: float
    planned_seconds_bound: float
    planned_peak: int
    memory_by_plan: float | None
    seconds_by_plan: float
    comparison: Comparison
    kind_gaps: list[Gap]
    layer_gaps: list[Gap]
    findings: list[str]
    profile: Profile


def measure(folder: str, repeats: int, gemm_size: int | None, progress: Progress) -> CardRow:
    """Measures the step of a folder on the devices of this machine.

    Also writes the trace of some steps to the folder.

    Raises:
      UserError: names the folder or file that cannot be read, or that is for another card.
    """
    read = card_folder.read(folder)
    _check_card(folder, read.card, jax.devices()[0])
    step = SavedStep(read.step, progress, options=read.card.options)
    row = exported.measure_step(step, repeats, gemm_size, progress)
    progress.begin("tracing")
    source = f"{row.gemm_dtype} products of {row.gemm_size} x {row.gemm_size}, timed here"
    rate = Rate(flops_per_second=row.gemm_rate, source=source)
    profile, trace = profiled_step(step, read.card.experiment, rate)
    (pathlib.Path(folder) / TRACE).write_bytes(trace)
    return _row(read, row, profile)


def _row(read: CardFolder, row: exported.ProgramTiming, profile: Profile) -> CardRow:
    plan, found = read.plan, compare(profile, read.plan)
    kinds, goal = kind_gaps(found, profile), goal_gap(found)
    peak = plan.bytes_per_device.peak
    return CardRow(
        card=read.card,
        measured=row,
        goal=goal,
        planned_seconds=plan.seconds_per_step,
        planned_seconds_bound=plan.seconds_per_step_bound,
        planned_peak=peak,
        memory_by_plan=row.memory_in_use / peak if row.memory_in_use else None,
        seconds_by_plan=row.step_seconds / plan.seconds_per_step,
        comparison=found,
        kind_gaps=kinds,
        layer_gaps=of_layers(found),
        findings=in_words(kinds, row.mfu, goal),
        profile=profile,
    )


def _check_card(folder: str, card: CardRecord, device: Device) -> None:
    """Raises ValueError unless the device is the card that the folder is for."""
    wanted = topologies.get(card.topology).chip
    found = chips.of_device(device.platform, device.device_kind)
    key = found.key if found else device.platform
    if key == wanted.key or (found is None and device.platform == wanted.kind):
        return
    here = f"gpu:{key}:1x1" if device.platform == "gpu" else f"{key}:1"
    raise UserError(
        f"{folder} was filled for {wanted.name} ({card.topology}), but this machine has "
        f"{device.device_kind}; fill it again with --topology={here}"
    )


def main() -> None:
    """Prints the result for one folder as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="the folder that gshard-bench fill wrote")
    parser.add_argument("--repeats", type=int, default=exported.REPEATS, help="how many runs")
    parser.add_argument("--gemm_size", type=int, help="rows and columns of the product's matrices")
    given = parser.parse_args()
    row = measure(given.folder, given.repeats, given.gemm_size, SILENT)
    print(msgspec.json.encode({"device": exported.device(), "rows": [row]}).decode())


if __name__ == "__main__":
    main()
