"""Measures memory and time of each technique for training larger models, one at a time.

    python -m benchmarks choices --num_layers=6

measures steps of an experiment with --num_layers layers on each side and Adam at a rate of 0.004,
and each technique for training larger models (docs/training.md) by itself. ratio is relative to the
step without any technique. The state is the step's arguments: weights, optimizer moments and the
batch. loss is the loss of one batch after 31 steps on this batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
from absl import flags

from benchmarks import common
from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.progress import Progress
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tools.benchmarks import step
from lingvo_gshard.tools.benchmarks.timing import in_turns
from lingvo_gshard.tools.console import Console, make_table, transient_stages
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.wings.optimizers.lion import Lion
from lingvo_gshard.wings.optimizers.momentum import Momentum
from lingvo_gshard.wings.repeat.loop import Repeat

# Applies a technique to an experiment's Params.
Choice = Callable[[Params], None]

AS_IT_IS = "layers one by one"

# Steps on one batch before its loss is compared.
_LOSS_STEPS = 30


@dataclasses.dataclass
class TechniqueTiming:
    """A measured step with one technique.

    Attributes:
      name: the technique.
      state_bytes: bytes of the step's arguments: weights, optimizer moments and the batch.
      temporary_bytes: bytes that the step needs in addition.
      seconds: median time of a step.
      ratio: median of the time relative to the step with layers one by one.
      compile_seconds: time of the first step.
      loss: loss of the batch after the warm-up steps, whose number is equal for all techniques.
    """

    name: str
    state_bytes: int
    temporary_bytes: int
    seconds: float
    ratio: float
    compile_seconds: float
    loss: float


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = common.define_flags()
    common.define_integer(values, "num_layers", 2, "Layers of the encoder and of the decoder.")
    return values


def run(values: flags.FlagValues, console: Console) -> int:
    """Measures, prints the table, writes the rows, and returns the exit code."""
    experiment, rows = registry.get(values.experiment), []
    # Other optimizers and moments are compared with Adam's.
    experiment.step.optimizer = Adam.params()
    experiment.step.schedule.learning_rate = 4e-3
    with transient_stages(console, "starting") as progress:
        for row in measure(experiment, values.num_layers, values.repeats, progress):
            console.print(f"{row.name}: {row.seconds:.3f} s")
            rows.append(row)
    caption = f"ratio: to {AS_IT_IS}; MiB: of the state, and of temporaries"
    numbers = ("state", "temporaries", "seconds", "ratio", "compile", "loss")
    table = make_table("training step", right=numbers, caption=caption)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.state_bytes / 2**20:,.1f}",
            f"{row.temporary_bytes / 2**20:,.1f}",
            f"{row.seconds:.3f}",
            f"{row.ratio:.2f}",
            f"{row.compile_seconds:.1f}",
            f"{row.loss:.3f}",
        )
    console.print_table(table)
    return common.write(values, rows)


def choices() -> dict[str, Choice]:
    """Returns the techniques to measure, by name."""
    return {
        AS_IT_IS: lambda p: None,
        "a loop": _loops("none"),
        "a loop, rematerialize products": _loops("products"),
        "a loop, rematerialize products_but_hidden": _loops("products_but_hidden"),
        "a loop, rematerialize full": _loops("full"),
        "2 micro-batches": _in_step(micro_batches=2),
        "4 micro-batches": _in_step(micro_batches=4),
        "bfloat16": _in_step(precision="bfloat16"),
        "bfloat16_weights": _in_step(precision="bfloat16_weights"),
        "averaged weights": _in_step(average_decay=0.999),
        "Adam, moments in bfloat16": _in_step(optimizer=Adam.params().set(moment_dtype="bfloat16")),
        "Adam, moments in int8": _in_step(optimizer=Adam.params().set(moment_dtype="int8")),
        "Adafactor": _in_step(optimizer=Adafactor.params()),
        "Lion": _in_step(optimizer=Lion.params()),
        "SGD with momentum": _in_step(optimizer=Momentum.params()),
    }


def measure(
    experiment: Params, layers: int, repeats: int, progress: Progress
) -> Iterator[TechniqueTiming]:
    """Measures each technique; its steps alternate with steps without any technique.

    Args:
      experiment: Params of the experiment.
      layers: number of layers of the encoder and of the decoder.
      repeats: number of measurements.
      progress: is told each stage as it begins.

    Yields:
      A row for each technique, with medians of all measurements.
    """
    plain = None
    for name, choose in choices().items():
        progress.begin(f"compiling {name}")
        runtime, batch, compile_seconds = _compiled(experiment, layers, choose)
        plain = plain or runtime
        loss = _loss(runtime, batch)
        clocks = [functools.partial(step.step_seconds, each, batch) for each in (runtime, plain)]
        mine, base = in_turns(clocks, repeats, progress, f"measuring {name}")
        memory = runtime.executable().memory()
        ratio = float(np.median(mine / base)) if runtime is not plain else 1.0
        yield TechniqueTiming(
            name,
            memory["arguments"],
            memory["temporaries"],
            float(np.median(mine)),
            ratio,
            compile_seconds,
            loss,
        )


def _loss(runtime: SpmdRuntime, batch: step.Batch) -> float:
    """Returns the loss after some steps on one batch."""
    metrics = [runtime.train_step(batch) for _ in range(_LOSS_STEPS)]
    return metrics[-1].read()["loss"]


def _compiled(
    experiment: Params, layers: int, choose: Choice
) -> tuple[SpmdRuntime, step.Batch, float]:
    """Returns the runtime after its first step, its batch, and the seconds of this step."""
    params = experiment.copy()
    for stack in _stacks(params):
        stack.num_layers = layers
    choose(params)
    case = step.experiment_cases(params)[0]
    partitioning = Partitioning.make("data=1", "replicated")
    runtime = SpmdRuntime(case.trainer, partitioning, devices_for(1))
    runtime.init_state()
    return runtime, case.batch, step.step_seconds(runtime, case.batch)


def _loops(policy: str) -> Choice:
    """Runs all stacks as loops with a rematerialization policy."""

    def choose(params: Params) -> None:
        for stack in _stacks(params):
            stack.execution = Repeat.params().set(rematerialize=policy)

    return choose


def _stacks(params: Params) -> list[Params]:
    """Returns the Params of all stacks of a model; a language model has only a decoder."""
    return [params.task.get(name) for name in ("encoder", "decoder") if name in params.task]


def _in_step(**values: object) -> Choice:
    return lambda params: params.step.set(**values)
