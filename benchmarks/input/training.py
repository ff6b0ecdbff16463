"""Measures how fast prepared data becomes batches, and how long training steps wait for them."""

from __future__ import annotations

import dataclasses
import math
import time

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.progress import Progress
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.tools.benchmarks import reading
from lingvo_gshard.tools.console import Console, in_bytes
from lingvo_gshard.training.experiments import make_trainer, with_vocabulary_sizes

_STEPS = 20
_OF_STEPS, _SHAPE_OF_STEPS = "translation.quickstart", (96, 80, 24)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputTiming(reading.ReadingTiming):
    """One measurement.

    Attributes:
      measure: "read" for batches alone, "train" for training steps on them.
      wait_share: share of the time that steps waited for batches; 0 for "read".
    """

    measure: str
    wait_share: float = 0.0


def measure(directory: str, progress: Progress) -> list[InputTiming]:
    """Measures reading alone with rows of 128 and 512, and training steps of the quickstart.

    Raises:
      UserError: the directory cannot be read.
    """
    rows = [
        InputTiming(**dataclasses.asdict(row), measure="read")
        for row in reading.measure(directory, progress)
    ]
    progress.begin("training")
    rows.append(_train(reading.make_input(directory, *_SHAPE_OF_STEPS)))
    return rows


def print_table(console: Console, rows: list[InputTiming]) -> None:
    """Prints measurements."""
    numbers = ("rows of", "filled", "tokens/s", "on a core", "first", "waits", "memory")
    cells = [
        (
            "reading alone" if row.measure == "read" else "training steps",
            f"{row.source_length} + {row.target_length}",
            f"{row.filled:.1%}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_cpu_second:,.0f}" if row.measure == "read" else "",
            f"{row.first_seconds:.1f} s",
            "" if row.measure == "read" else f"{row.wait_share:.2%}",
            in_bytes(row.memory_bytes),
        )
        for row in rows
    ]
    console.print_rows(("",), numbers, cells)


def _train(params: Params) -> InputTiming:
    """Measures training steps of the quickstart's model, and how long they wait for batches."""
    input_, experiment = params.instantiate(), registry.get(_OF_STEPS)
    task = experiment.task.set(
        share_embeddings=input_.source_vocabulary is input_.target_vocabulary
    )
    trainer = make_trainer(experiment, with_vocabulary_sizes(task, input_))
    runtime = SingleDeviceRuntime(trainer)
    runtime.init_state()
    batches, first = reading.after_the_first(input_)
    runtime.train_step(next(batches)).read()
    taken, waits, began = [], [], time.monotonic()
    for _ in range(_STEPS):
        asked = time.monotonic()
        taken.append(next(batches))
        waits.append(time.monotonic() - asked)
        runtime.train_step(taken[-1]).read()
    seconds = time.monotonic() - began
    batches.close()
    # Steps take the processor time, so no rate by it is known.
    row = reading.timing(input_, taken, seconds, math.inf, first)
    return InputTiming(**dataclasses.asdict(row), measure="train", wait_share=sum(waits) / seconds)
