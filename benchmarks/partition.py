"""Measures the overhead of partitioning: a training step on a mesh of one device.

    python -m benchmarks partition --json=partition.json

measures training steps of an experiment by the spmd runtime on a mesh of one device, where there is
nothing to partition. They alternate with steps of the same program compiled by JAX without mesh and
annotations, and with steps of the single-device runtime. ratio is the time relative to the program
without annotations: 1.00 means that partitioning costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from absl import flags

from benchmarks import common
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.progress import Progress
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program.step_programs import init_program, train_program
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdOptions, SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tools.benchmarks import step as step_bench
from lingvo_gshard.tools.benchmarks.step import StepCase
from lingvo_gshard.tools.benchmarks.timing import in_turns, pipelined_seconds
from lingvo_gshard.tools.console import Console, make_table, transient_stages
from lingvo_gshard.training.step.trainer import Trainer

Batch = dict[str, np.ndarray]

ONE_DEVICE = "data=1"
YARDSTICK = "without annotations"
_PARTITIONER = "gspmd"
_RUN = 5
# Name of annotations in a StableHLO module.
_ANNOTATION = b"Sharding"


@dataclasses.dataclass
class PartitionTiming:
    """A measured step.

    Attributes:
      name: how the step was compiled.
      seconds: time of one step.
      ratio: time relative to the same program without annotations.
      compile_seconds: time of the first step.
    """

    name: str
    seconds: float
    ratio: float
    compile_seconds: float


define_flags = common.define_flags


def run(values: flags.FlagValues, console: Console) -> int:
    """Measures, prints the table, writes the rows, and returns the exit code."""
    case = step_bench.experiment_cases(registry.get(values.experiment))[0]
    with transient_stages(console, "starting") as progress:
        rows = measure(case, values.repeats, progress)
    caption = "ratio: to the same program without annotations"
    table = make_table("training step", right=("seconds", "ratio", "compile"), caption=caption)
    for row in rows:
        cells = f"{row.seconds:.4f}", f"{row.ratio:.3f}", f"{row.compile_seconds:.1f}"
        table.add_row(row.name, *cells)
    console.print_table(table)
    return common.write(values, rows)


class Unannotated:
    """A trainer's step, compiled by JAX for one device without annotations, mesh or layouts."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._partitioning = Partitioning.make(ONE_DEVICE, "replicated")
        self._state: list[jax.Array] = []
        self._step: Callable | None = None

    def init_state(self) -> None:
        """Initializes the weights."""
        program = init_program(self._trainer, self._partitioning, _PARTITIONER)
        self._state = list(jax.jit(program.exported().call)())

    def train_step(self, batch: Batch) -> Callable[[], object]:
        """Starts a step, compiled on first use; returns a function that waits for its metrics."""
        self._step = self._step or self._compiled(batch)
        *self._state, metrics = self._step(*self._state, *(batch[name] for name in sorted(batch)))
        return lambda: np.asarray(metrics)

    def _compiled(self, batch: Batch) -> Callable:
        specs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in batch.items()}
        program, _ = train_program(self._trainer, self._partitioning, _PARTITIONER, specs)
        assert _ANNOTATION not in program.module, "a step with annotations is no yardstick"
        return jax.jit(program.exported().call, donate_argnums=program.donated)


def measure(case: StepCase, repeats: int, progress: Progress) -> list[PartitionTiming]:
    """Measures a step without annotations, by the spmd runtime and by the single-device runtime.

    The three alternate. Each time is the best of `repeats` runs of `_RUN` steps; metrics are read
    one step late, as in training.

    Args:
      case: the step.
      repeats: number of runs.
      progress: is told each stage as it begins.
    """
    partitioning = Partitioning.make(ONE_DEVICE, "expert")
    local = SingleDeviceRuntime(case.trainer)
    options = SpmdOptions(partitioner=_PARTITIONER)
    spmd = SpmdRuntime(case.trainer, partitioning, devices_for(1), options)
    unannotated = Unannotated(case.trainer)
    steps = {
        YARDSTICK: (unannotated, lambda: unannotated.train_step(case.batch)),
        f"spmd, {ONE_DEVICE}": (spmd, lambda: spmd.train_step(case.batch).read),
        f"local, {local.device_summary}": (local, lambda: local.train_step(case.batch).read),
    }
    compile_seconds = {}
    for name, (runtime, step) in steps.items():
        progress.begin(f"compiling {name}")
        runtime.init_state()
        compile_seconds[name] = pipelined_seconds(step, 1)
    clocks = [lambda step=step: pipelined_seconds(step, _RUN) for _, step in steps.values()]
    best = dict(zip(steps, in_turns(clocks, repeats, progress).min(1).tolist(), strict=True))
    return [
        PartitionTiming(name, seconds, seconds / best[YARDSTICK], compile_seconds[name])
        for name, seconds in best.items()
    ]
