"""Records a few steps of a saved program, and sums up the trace by kind of work and layer."""

from __future__ import annotations

import os

import msgspec

from lingvo_gshard import hlo
from lingvo_gshard.hlo.messages import HloModuleProto, HloProto
from lingvo_gshard.profiling import xspace
from lingvo_gshard.profiling.profile import Profile, Rate
from lingvo_gshard.profiling.steps import StepRange
from lingvo_gshard.profiling.summary import StepFacts, Summary
from lingvo_gshard.profiling.trace import Trace
from lingvo_gshard.profiling.tracer import JaxTracer, Recorder
from lingvo_gshard.runtime.program.program_file import LayerNames
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.tools.benchmarks.exported_step import SavedStep

_STEPS = StepRange(1, 3)
# Kernels that a CUDA graph starts do not say which operation they belong to.
_WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
# The key of the program in a trace.
_PROGRAM = "the measured step"


def profile(step: SavedStep, name: str, attainable: Rate) -> tuple[Profile, bytes]:
    """Returns where the time of some steps goes, and their trace as a serialized XSpace.

    On a GPU the step is compiled again, without CUDA graphs.

    Args:
      step: the step; its state moves on.
      name: the experiment.
      attainable: the rate that products reach on the same devices.

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
    """Adds a compiled program to a trace, since traces of GPUs may lack it.

    Args:
      trace: the trace.
      module: the program, a serialized HloModuleProto.
    """
    proto = HloProto(hlo_module=HloModuleProto.FromString(module))
    trace.programs.setdefault(_PROGRAM, proto.SerializeToString())


def _facts(
    step: SavedStep, name: str, recorder: Recorder, chip: str, attainable: Rate
) -> StepFacts:
    record = step.record
    layers = LayerNames(()) if record.layers is msgspec.UNSET else record.layers
    return StepFacts(
        name=name,
        steps=_STEPS,
        device_summary=f"{len(step.devices)} x {step.devices[0].device_kind}",
        chip=chip,
        mesh=Mesh.parse(record.mesh, record.device_order),
        layers=frozenset(layers.scopes),
        kinds=dict(layers.kinds),
        seconds_per_step=recorder.seconds / _STEPS.count,
        busy_cores=recorder.core_seconds / recorder.seconds,
        cores=len(os.sched_getaffinity(0)),
        useful_flops=step.work.flops,
        tokens_per_step=step.work.tokens,
        attainable=attainable,
        source_of=lambda _: "",
    )
