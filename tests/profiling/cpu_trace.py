"""Synthetic traces in the format of XProf, written from lists of events."""

from jaxlib import _hlo
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from lingvo_gshard.wings.profiling.trace import INPUT, STEP

PROGRAM, NUMBER = "jit_call", 5
# Picoseconds of a microsecond, the unit of the events below.
UNIT = 10**6

# One step of a program with a product in a feed-forward layer, a product of an attention layer, an
# all-reduce, and an update of weights.
HLO = """
HloModule jit_call, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

ENTRY %main (a: f32[64,32], b: f32[32,16], w: f32[64,16]) -> f32[64,16] {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  %w = f32[64,16]{1,0} parameter(2)
  %dot.1 = f32[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0},
      metadata={op_name="jit(call)/call_exported/ffn/einsum/Einsum"}
  %dot.2 = f32[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0},
      metadata={op_name="jit(call)/call_exported/attention/einsum/Einsum"}
  %all-reduce.1 = f32[64,16]{1,0} all-reduce(%dot.1), replica_groups={{0,1}}, to_apply=%add,
      metadata={op_name="jit(call)/call_exported/gradient_tape/ffn/psum"}
  %exp.1 = f32[64,16]{1,0} exponential(%dot.2),
      metadata={op_name="jit(call)/call_exported/norm/Exp"}
  %add.1 = f32[64,16]{1,0} add(%all-reduce.1, %exp.1),
      metadata={op_name="jit(call)/call_exported/optimizer/w/add"}
  ROOT %sub.1 = f32[64,16]{1,0} subtract(%w, %add.1),
      metadata={op_name="jit(call)/call_exported/optimizer/w/sub"}
}
"""
LAYERS = frozenset({"ffn", "attention", "norm"})
# Operations of one of the two products.
PRODUCT_FLOPS = 2 * 64 * 32 * 16


class Plane:
    """Builds one plane of an XSpace."""

    def __init__(self, space, name):
        self.plane = space.planes.add(name=name)
        self._kinds, self._stats, self._lines = {}, {}, {}

    def event(self, line, name, start, end, display_name="", **stats):
        """Adds an event to a line.

        Args:
          line: name of the line.
          name: name of the kind of event.
          start: start in microseconds.
          end: end in microseconds.
          display_name: a short name, which some profilers write.
          stats: values of the event.
        """
        if line not in self._lines:
            self._lines[line] = self.plane.lines.add(id=len(self._lines) + 1, name=line)
        event = self._lines[line].events.add(
            metadata_id=self._kind(name, display_name),
            offset_ps=start * UNIT,
            duration_ps=(end - start) * UNIT,
        )
        self.add_stats(event, stats)

    def program(self, key, text):
        """Adds a compiled program, given as HLO text."""
        serialized = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
        module = hlo_pb2.HloModuleProto.FromString(serialized)
        serialized = hlo_pb2.HloProto(hlo_module=module).SerializeToString()
        self.add_stats(self.plane.event_metadata[self._kind(key)], {"Hlo Proto": serialized})

    def add_stats(self, holder, stats):
        """Adds named values to an event or its metadata."""
        for name, value in stats.items():
            stat = holder.stats.add(metadata_id=self._stat(name))
            if isinstance(value, bytes):
                stat.bytes_value = value
            elif isinstance(value, int):
                stat.int64_value = value
            else:
                # XProf stores texts once and refers to them.
                stat.ref_value = self._stat(value)

    def _kind(self, name, display_name=""):
        if name not in self._kinds:
            self._kinds[name] = len(self._kinds) + 1
            metadata = self.plane.event_metadata[self._kinds[name]]
            metadata.id, metadata.name = self._kinds[name], name
            metadata.display_name = display_name
        return self._kinds[name]

    def _stat(self, name):
        if name not in self._stats:
            self._stats[name] = len(self._stats) + 1
            metadata = self.plane.stat_metadata[self._stats[name]]
            metadata.id, metadata.name = self._stats[name], name
        return self._stats[name]


class CpuTrace:
    """Builds the trace of CPU devices. All times are in microseconds."""

    def __init__(self):
        self._space = xplane_pb2.XSpace()
        self._host = Plane(self._space, "/host:CPU")
        self._number = 0

    def step(self, step, start, there, end):
        """Adds a step that waits for its input until `there`."""
        self._host.event("python", STEP, start, end, step_num=step)
        self._host.event("python", INPUT, start, there, step_num=step)

    def operation(
        self, name, start, end, thread="pool", device=0, run=1, ready=None, number=NUMBER
    ):
        """Adds an executed operation.

        Args:
          name: name of the instruction.
          start: when the thread began it.
          end: when the thread went on with something else.
          thread: name of the thread.
          device: number of the device.
          run: number of the execution of the program.
          ready: when other threads had its result; None: at `end`.
          number: number of the program.
        """
        self._number += 1
        stats = {"hlo_op": name, "hlo_module": PROGRAM, "program_id": number, "run_id": run}
        stats |= {"device_ordinal": device, "_p": self._number}
        self._host.event(thread, name, start, end, **stats)
        if ready is not None:
            self._host.event("other", f"end: {name}", ready, ready, _c=self._number)

    def other_program(self, start, end):
        """Adds an operation of a program that is no training step."""
        stats = {"hlo_op": "copy.1", "hlo_module": "jit_other", "program_id": 9, "run_id": 7}
        self._host.event("pool", "copy.1", start, end, device_ordinal=0, **stats)

    def write(self, key=f"{PROGRAM}({NUMBER})"):
        """Returns the serialized trace with its program."""
        Plane(self._space, "/host:metadata").program(key, HLO)
        return self._space.SerializeToString()
