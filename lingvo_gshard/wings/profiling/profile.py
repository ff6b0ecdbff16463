"""Profile: where the time of training steps went, as data for every report.

All seconds are for one step on one device: means over the profiled steps and over the devices of
this process.
"""

from __future__ import annotations

from lingvo_gshard.wings.planning.operation_rows import KINDS
from lingvo_gshard.wings.planning.plan.plan import Record

FORMAT = 1

OTHER_PROGRAMS = "other programs"
PAUSES = "between operations"
INPUT_WAIT = "input wait"
HOST = "host"
# All parts of a step's time, in the order of the tables.
PARTS = (*KINDS, OTHER_PROGRAMS, PAUSES, INPUT_WAIT, HOST)


class PartTime(Record, frozen=True, kw_only=True):
    """The time of one kind of work.

    Attributes:
      part: one of `PARTS`.
      flops: floating-point operations of matrix products, of all devices in a step.
      flops_per_second: `flops` by `seconds`; None without products.
    """

    part: str
    seconds: float
    share: float
    flops: int
    flops_per_second: float | None


class LayerTime(Record, frozen=True, kw_only=True):
    """The time of one layer in one phase.

    Attributes:
      layer: name scope; empty for operations outside of all layers.
      phase: one of `hlo.PHASES`.
      flops: floating-point operations of matrix products, of all devices in a step.
    """

    layer: str
    phase: str
    seconds: float
    share: float
    flops: int


class OperationTime(Record, frozen=True, kw_only=True):
    """The time of one operation of the compiled program.

    Attributes:
      name: name of the HLO instruction.
      seconds: the operation's share of a step's time.
      active_seconds: time from start to end, of all executions of the operation in a step. This is
        longer than `seconds` if other operations run at the same time.
      executions: executions in a step on one device.
      flops: floating-point operations of matrix products, of one device in a step.
      op_name: TensorFlow's name of the operation.
      source: file and line of the model's code; empty if unknown.
    """

    name: str
    opcode: str
    kind: str
    layer: str
    phase: str
    seconds: float
    active_seconds: float
    executions: float
    flops: int
    op_name: str
    source: str


class CollectiveTime(Record, frozen=True, kw_only=True):
    """The time of all collectives of one kind over the same axes.

    Attributes:
      kind: HLO's opcode, such as "all-to-all".
      axis: mesh axes, separated by commas; "all" if the groups follow no axes.
      count: collectives in a step.
      bytes: bytes of one device in a step.
      seconds: time from start to end, including waiting for the other devices.
      hidden_seconds: the part of `seconds` while the device computed.
      exposed_seconds: the part of the step's time while the device did nothing else.
    """

    kind: str
    axis: str
    count: int
    bytes: int
    seconds: float
    hidden_seconds: float
    exposed_seconds: float


class DeviceTime(Record, frozen=True, kw_only=True):
    """The time of one device in a step, by each of `PARTS`."""

    device: int
    seconds: dict[str, float]


class Rate(Record, frozen=True, kw_only=True):
    """Floating-point operations per second of all devices of this process, and their source."""

    flops_per_second: float
    source: str


class Profile(Record, frozen=True, kw_only=True):
    """The time of training steps, by layer, kind and operation.

    Attributes:
      chip: key of the devices' chip in planning/machines, such as "cpu" or "v5p"; "" if unknown.
      devices: number of devices of this process.
      seconds_per_step: time of a step by the host's clock.
      tokens_per_step: target positions of a batch; None if unknown.
      busy_cores: cores that the process kept busy, on average.
      cores: cores that the process may use.
      useful_flops: floating-point operations of the model's formulas, of all devices of this
        process in a step.
      executed_flops: floating-point operations of the matrix products that the compiled program
        executes, of all devices of this process in a step.
      attainable: the rate that large products reach; None if unknown.
      parts: the time of each of `PARTS` that took any time. The times add up to the step.
      slowest: the ten operations that take the most time.
    """

    format: int = FORMAT
    name: str
    first_step: int
    last_step: int
    device_summary: str
    chip: str
    devices: int
    mesh: str
    seconds_per_step: float
    tokens_per_step: int | None
    busy_cores: float
    cores: int
    useful_flops: int
    executed_flops: int
    attainable: Rate | None
    parts: list[PartTime]
    layers: list[LayerTime]
    slowest: list[OperationTime]
    collectives: list[CollectiveTime]
    per_device: list[DeviceTime]
    findings: list[str]

    def seconds_of(self, part: str) -> float:
        """Returns the seconds of one of `PARTS`."""
        return sum(each.seconds for each in self.parts if each.part == part)

    @property
    def useful_rate(self) -> float:
        """Useful floating-point operations per second."""
        return self.useful_flops / self.seconds_per_step
