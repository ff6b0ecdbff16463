"""Plan: the memory, communication, arithmetic and time of one step, as data for every report."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import msgspec

from lingvo_gshard.core import UserError, atomic, objects
from lingvo_gshard.wings.planning.loads.file import RouterLoads
from lingvo_gshard.wings.planning.roofline import Budget
from lingvo_gshard.wings.planning.training.goodput_record import Goodput

FORMAT = 2
# Follows the kind of a collective whose groups span TPU slices.
ACROSS_SLICES = " across slices"
MEMORY_CLASSES = ("weights", "moments", "activations", "inputs", "program")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a plan's file. Its attributes are the names of the JSON's fields."""

    def to_json(self) -> str:
        """Returns the record as JSON text. `planning.plan.file.load` reads a Plan's text back."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


class MemoryBytes(Record, frozen=True, kw_only=True):
    """Bytes of one device.

    Attributes:
      activations: all temporaries, gradients included, and outputs that reuse no input's memory.
      inputs: the batch and other arguments.
      program: code.
      peak: maximum in use at any time.
      capacity: bytes that a program may use.
      host: bytes in the memory of the device's host. They do not count in the classes.
    """

    weights: int
    moments: int
    activations: int
    inputs: int
    program: int
    peak: int
    capacity: int
    host: int = 0


class ParameterCounts(Record, frozen=True, kw_only=True):
    """Number of parameters: in total, and used by one token ("active")."""

    total: int
    active: int


class FlopCounts(Record, frozen=True, kw_only=True):
    """Floating-point operations of matrix products, of one device in one step.

    Attributes:
      useful: operations of the model's formulas, forward and backward. In a program that is not a
        training step: all operations that are neither dispatch nor rematerialization. What several
        devices compute alike counts once.
      executed: all operations of the compiled program.
      rematerialized: forward operations that are recomputed for the backward pass.
      dispatch: operations that move tokens to experts and back.
      optimizer: operations of the optimizer, such as Muon's.
      padding: the remaining executed operations.
    """

    useful: int
    executed: int
    rematerialized: int
    dispatch: int
    optimizer: int = 0
    padding: int


class TensorRow(Record, frozen=True, kw_only=True):
    """The storage of one weight or one optimizer moment.

    Attributes:
      split: the sharding in words, such as "E over data (8)".
      bytes: size of the unsharded tensor.
      kind: "weights" or "moments".
      layer: name scope of the layer that owns the tensor.
      note: dimensions that the strategy would split but that do not divide evenly.
    """

    path: str
    layout: str
    shape: list[int]
    dtype: str
    split: str
    bytes: int
    bytes_per_device: int
    kind: str
    layer: str
    note: str = ""


class TemporaryRow(Record, frozen=True, kw_only=True):
    """A large array that an operation of the compiled program writes to memory.

    Attributes:
      shape: size of each dimension on one device.
      bytes: size on one device, padding included.
    """

    name: str
    layer: str
    shape: list[int]
    dtype: str
    bytes: int


class CollectiveRow(Record, frozen=True, kw_only=True):
    """All calls of one collective in a step that agree in everything but their times.

    Attributes:
      kind: as in HLO, such as "all-to-all". " across slices" follows if the device groups span TPU
        slices, so that the collective communicates over the data-center network.
      axis: mesh axes of its device groups, separated by commas; "all" if they follow no axes.
      phase: one of `hlo.operation.PHASES`.
      bytes: the larger of operand and result of one call on one device.
      seconds_bound: lower bound for all calls together.
      seconds: estimate for all calls together of the exposed time, which the step waits for.
      hidden_seconds: estimate for all calls together of the time that computation hides.
      share: part of the bound of all collectives.
      line: the line of code that the calls are for, such as "my_layer.py:12"; empty if it is
        unknown, and in plans of earlier versions.
    """

    kind: str
    axis: str
    layer: str
    phase: str
    dtype: str
    bytes: int
    count: int
    seconds_bound: float
    seconds: float
    hidden_seconds: float = 0.0
    share: float
    line: str = ""


class HostTransferRow(Record, frozen=True, kw_only=True):
    """All copies of a layer, in one direction and phase, between device and host in a step.

    Attributes:
      to_host: whether they copy from the device to the host.
      bytes: size of all copies of one device.
      seconds_bound: lower bound for all copies; 0 if the rate is not published.
      seconds: estimate of the exposed time, which the step waits for.
      hidden_seconds: estimate of the time that computation hides.
    """

    to_host: bool
    layer: str
    phase: str
    bytes: int
    count: int
    seconds_bound: float
    seconds: float
    hidden_seconds: float


class LayerRow(Record, frozen=True, kw_only=True):
    """The operations of one layer in one phase of a step, of one device.

    Attributes:
      layer: name scope of the operations; empty for operations outside of all layers.
      times: executions in a step; more than 1 inside a loop.
      flops: operations of matrix products in all executions.
      bytes: bytes read and written in all executions.
      compute_seconds: lower bound for arithmetic.
      memory_seconds: lower bound for reading and writing memory.
      communication_seconds: lower bound for collectives.
      seconds_bound: lower bound for all operations, one after another.
      seconds: estimate for all operations; of collectives the exposed time.
    """

    layer: str
    phase: str
    times: int
    flops: int
    bytes: int
    compute_seconds: float
    memory_seconds: float
    communication_seconds: float
    seconds_bound: float
    seconds: float


class WorkKindRow(Record, frozen=True, kw_only=True):
    """The time of all operations of one kind, one of `operation_rows.KINDS`.

    The bound is for one operation after another. Of collectives, `seconds` is the exposed time.
    """

    kind: str
    flops: int
    seconds_bound: float
    seconds: float


class Remedy(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A change that was tried because the step does not fit.

    Numbers are None if the step could not be planned, and `reason` says why.

    Attributes:
      change: settings of this change and of those tried before it, each in backquotes.
      price: price of training on a billion tokens; None if no price is published.
    """

    change: str
    fits: bool
    peak: int | None
    seconds_per_step: float | None
    reason: str = ""
    tokens_per_second: float | None = None
    price: float | None = None


class Plan(Record, frozen=True, kw_only=True):
    """The plan of a compiled step on a machine: memory, time and cost.

    Attributes:
      topology: the machine, such as "v3:32x32".
      devices: number of devices; some chips have two.
      compiler: "tpu" or "cpu"; XLA's CPU compiler stands in for compilers that are missing.
      largest_temporaries: largest first. They are not all alive at the same time.
      collectives: most seconds first.
      host_transfers: most exposed seconds first; empty in plans of earlier versions.
      layers: in the order of their first operation.
      kinds: time by kind of work; empty in plans of earlier versions.
      seconds_per_step: estimate: computation, and communication that the schedule does not hide
        behind it. In plans of earlier versions nothing is hidden.
      seconds_per_step_bound: lower bound, with full overlap.
      steps_per_second: estimate; None for a program without operations.
      steps_per_second_bound: upper bound; None for a program without operations.
      tokens_per_step: target positions of a batch; None if the program has no batch.
      mfu: model FLOPs utilization, estimate.
      budget: cost of a training; None if no number of tokens was given.
      change: settings, each in backquotes, that a plan has beside what was asked for, so that it
        fits.
      has_code: whether the compiler generated code. If not, the peak lacks the code's bytes, and
        compile_seconds the time to generate it.
      versions: version of each package that affects the plan.
      goodput: the whole training with its failures and checkpoints; None if it was not asked for.
      params: the experiment's Params with the plan's sharding, as in a run's params.txt. Empty in
        plans of other programs than training steps, and in plans of earlier versions.
    """

    format: int = FORMAT
    name: str
    topology: str
    chip: str
    devices: int
    compiler: str
    mesh: str
    strategy: str
    strategy_name: str
    partitioner: str
    fits: bool
    bytes_per_device: MemoryBytes
    parameters: ParameterCounts
    tensors: list[TensorRow]
    largest_temporaries: list[TemporaryRow]
    collectives: list[CollectiveRow]
    host_transfers: list[HostTransferRow] = []
    flops: FlopCounts
    layers: list[LayerRow]
    kinds: list[WorkKindRow] = []
    is_calibrated: bool = False
    seconds_per_step: float
    seconds_per_step_bound: float
    steps_per_second: float | None
    steps_per_second_bound: float | None
    tokens_per_step: int | None
    tokens_per_second: float | None
    mfu: float | None
    budget: Budget | None
    remedies: list[Remedy]
    change: str = ""
    compile_seconds: float
    has_code: bool = True
    versions: dict[str, str]
    notes: list[str]
    goodput: Goodput | None = None
    loads: RouterLoads | None = None
    params: str = ""

    def __str__(self) -> str:
        """Returns the main facts as a table."""
        memory, mfu = self.bytes_per_device, "-" if self.mfu is None else f"{self.mfu:.0%}"
        rows = {
            "program": self.name,
            "machine": f"{self.topology}: {self.devices:,} devices, {self.chip}",
            "mesh": self.mesh or "none",
            "strategy": self.strategy_name or "none",
            "fits": "yes" if self.fits else "no",
            "memory": f"{memory.peak / 2**30:,.2f} of {memory.capacity / 2**30:,.2f} GiB a device",
            "step": f"{1e3 * self.seconds_per_step:,.3f} ms, at least "
            f"{1e3 * self.seconds_per_step_bound:,.3f} ms",
            "tokens/s": "-" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}",
            "MFU": mfu,
            **{f"note {n}": note for n, note in enumerate(self.notes, start=1)},
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


class _Header(msgspec.Struct):
    """The format's number, which is read first: other fields depend on the format."""

    format: int


def load(path: str | pathlib.Path) -> Plan:
    """Returns the plan that `gshard-plan --json` wrote.

    Raises:
      UserError: names the file, the field and the reason if the file is missing, is not JSON, has
        another format, or has a missing, unknown or mistyped field.
    """
    with reading(path, "not a plan"):
        return decode(objects.read_bytes(path), path)


def decode(text: bytes, path: str | pathlib.Path) -> Plan:
    """Returns a plan from the content of its file.

    Raises:
      UserError: the plan has another format; names the file.
      msgspec.DecodeError: the content is no plan.
    """
    found = atomic.decode(text, _Header).format
    if found != FORMAT:
        raise UserError(
            f"{path}: plan format {found}, but this version reads format {FORMAT}. Plan again "
            "with this version"
        )
    return atomic.decode(text, Plan)


@contextlib.contextmanager
def reading(path: str | pathlib.Path, otherwise: str) -> Iterator[None]:
    """Reports what is wrong with a file of gshard-plan that a `with` block reads and decodes.

    Args:
      otherwise: says that JSON of other types is not what was expected, such as "not a plan".

    Raises:
      UserError: the file is missing, or is not JSON of the expected types; names the file.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {otherwise}: {error}") from error
    except msgspec.DecodeError as error:
        raise UserError(
            f"{path}: not JSON ({error}). Expected a file written by gshard-plan --json"
        ) from error
