"""Measures compile time and step time of a stack of layers compiled as one loop.

    python -m benchmarks depth --depths=6,48

measures training steps of an encoder alone, with each of --depths layers compiled as one loop. The
smallest depth is also compiled layer by layer, and ratio is relative to that step. compile_seconds
should not grow with depth. --rematerialize applies to loops and to layers one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from absl import flags

from benchmarks import common
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.progress import Progress
from lingvo_gshard.layers.stacks.execution import Sequential
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.tools.benchmarks import step as step_bench
from lingvo_gshard.tools.benchmarks.step import StepCase
from lingvo_gshard.tools.benchmarks.timing import in_turns
from lingvo_gshard.tools.console import Console, make_table, transient_stages
from lingvo_gshard.tools.flags.definitions import define
from lingvo_gshard.wings.repeat.loop import Repeat


@dataclasses.dataclass
class DepthTiming:
    """A measured training step of an encoder.

    Attributes:
      name: number of layers and how they are compiled.
      layers: number of layers.
      repeat: whether the layers are one loop.
      compile_seconds: time of the first step minus time of the second step.
      seconds: time of one step.
      ratio: time relative to the step with layers one by one; None except for the smallest depth.
    """

    name: str
    layers: int
    repeat: bool
    compile_seconds: float
    seconds: float
    ratio: float | None = None


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = common.define_flags()
    define(values, **step_bench.STACK_FLAGS)
    flags.DEFINE_list("depths", ["6", "48"], "Numbers of layers.", flag_values=values)
    return values


def run(values: flags.FlagValues, console: Console) -> int:
    """Measures, prints the table, writes the rows, and returns the exit code."""
    depths = common.numbers("depths", values.depths)
    rows, length = step_bench.whole_rows(values)
    trainer = registry.get(values.experiment).step
    stack = step_bench.stack_params(values)
    with transient_stages(console, "starting") as progress:
        found = measure(stack, trainer, depths, rows, length, values.repeats, progress)
    caption = "ratio: to the same layers one by one"
    table = make_table("training step", right=("compile", "seconds", "ratio"), caption=caption)
    for row in found:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(row.name, f"{row.compile_seconds:.1f}", f"{row.seconds:.3f}", ratio)
    console.print_table(table)
    return common.write(values, found)


def measure(
    stack: Params,
    trainer: Params,
    depths: Sequence[int],
    rows: int,
    length: int,
    repeats: int,
    progress: Progress,
) -> list[DepthTiming]:
    """Measures every depth as a loop, and the smallest depth also layer by layer.

    At the smallest depth the two alternate; seconds and ratio are medians over `repeats` turns.
    `progress` is told each stage.
    """
    least, *deeper = sorted(depths)

    def compiled(layers: int, repeat: bool) -> tuple[DepthTiming, Callable[[], float]]:
        return _compiled(_case(stack, trainer, layers, repeat, rows, length), layers, repeat)

    progress.begin(f"compiling {least} layers one by one")
    one_by_one, plain_step = compiled(least, False)
    progress.begin(f"compiling {least} layers as a loop")
    loop, loop_step = compiled(least, True)
    plain, looped = in_turns([plain_step, loop_step], repeats, progress)
    one_by_one.seconds, one_by_one.ratio = float(np.median(plain)), 1.0
    loop.seconds, loop.ratio = float(np.median(looped)), float(np.median(looped / plain))
    found = [one_by_one, loop]
    for layers in deeper:
        progress.begin(f"compiling {layers} layers as a loop")
        found.append(compiled(layers, True)[0])
    return found


def _case(
    stack: Params, trainer: Params, layers: int, repeat: bool, rows: int, length: int
) -> StepCase:
    execution = (Repeat if repeat else Sequential).params()
    execution.rematerialize = stack.execution.rematerialize
    params = stack.copy().set(num_layers=layers, execution=execution)
    return step_bench.stack_cases(params, trainer, rows, length)[0]


def _compiled(case: StepCase, layers: int, repeat: bool) -> tuple[DepthTiming, Callable[[], float]]:
    """Returns the row of a step timed once, and a function that runs it and returns its seconds."""
    runtime = SingleDeviceRuntime(case.trainer)
    runtime.init_state()

    def step() -> float:
        return step_bench.step_seconds(runtime, case.batch)

    first, second = step(), step()
    way = "as a loop" if repeat else "one by one"
    return DepthTiming(f"{layers} layers {way}", layers, repeat, first - second, second), step
