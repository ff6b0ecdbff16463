"""Measures how fast prepared data becomes batches, and how full they are."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from lingvo_gshard.api.training import share_filled
from lingvo_gshard.core import Params, Progress, UserError
from lingvo_gshard.data import Input, PackedBatch, TrainBatches
from lingvo_gshard.tools.benchmarks import common
from lingvo_gshard.tools.console import in_bytes, output, transient_stages
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.wings.preparation.prepared.translation_input import PreparedTranslationInput
from lingvo_gshard.wings.services.memory import resident_bytes

# Source length, target length and rows of a batch.
_SHAPES = ((128, 128, 64), (512, 512, 16))
# Batches of one measurement: some blocks of rows.
_BATCHES = 200


@dataclasses.dataclass(frozen=True)
class ReadingTiming:
    """One measurement.

    Attributes:
      rows: training rows of the data.
      source_length: source positions of a batch's row.
      target_length: target positions of a batch's row.
      filled: share of positions that hold tokens.
      tokens_per_second: tokens of both sides.
      tokens_per_cpu_second: tokens by the processor time, which other programs hardly change.
      rows_per_second: rows of the data.
      first_seconds: time to the first batch.
      memory_bytes: memory of the process at the end.
    """

    rows: int
    source_length: int
    target_length: int
    filled: float
    tokens_per_second: float
    tokens_per_cpu_second: float
    rows_per_second: float
    first_seconds: float
    memory_bytes: int


define_flags = maker(prepared="The sentence pairs: a directory.", json=output.json_flag())


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Measures, prints the table, writes the rows, and returns the exit code."""
    if not values.prepared:
        raise UserError(
            "--prepared is missing: the directory that gshard-prepare wrote. The repository has "
            "python -m benchmarks input for made text"
        )
    with transient_stages(console, "starting") as progress:
        rows = measure(values.prepared, progress)
    headings = ("filled", "tokens/s", "on a core", "first", "memory")
    cells = [
        (
            f"{row.source_length} + {row.target_length}",
            f"{row.filled:.1%}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_cpu_second:,.0f}",
            f"{row.first_seconds:.1f} s",
            in_bytes(row.memory_bytes),
        )
        for row in rows
    ]
    console.print_rows(("rows of",), headings, cells)
    return common.write(values, rows, "CPU")


def measure(directory: str, progress: Progress) -> list[ReadingTiming]:
    """Measures batches taken as fast as they are made, with rows of 128 and of 512."""
    rows = []
    for source_length, longest_target, batch_rows in _SHAPES:
        progress.begin(f"reading rows of {source_length}")
        input_ = make_input(directory, source_length, longest_target, batch_rows).instantiate()
        batches, first = after_the_first(input_)
        began, cpu = time.monotonic(), time.process_time()
        taken: list[Any] = [next(batches) for _ in range(_BATCHES)]
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        batches.close()
        rows.append(timing(input_, taken, seconds, cpu, first))
    return rows


def make_input(directory: str, source_length: int, longest_target: int, rows: int) -> Params:
    """Returns Params with the data's ratio of target to source tokens."""
    p = PreparedTranslationInput.params().set(
        directory=directory, batch_rows=rows, source_length=source_length
    )
    groups = p.instantiate().table("train").groups
    source, target = (sum(group.tokens[side] for group in groups) for side in range(2))
    target_length = 4 * round(source_length * target / source / 4)
    return p.set(target_length=min(longest_target, max(4, target_length)))


def after_the_first(input_: Input) -> tuple[TrainBatches, float]:
    """Returns the batches after the first one, and the seconds that it took."""
    input_.check_split("train")
    began = time.monotonic()
    batches = input_.train_batches(1)
    next(batches)
    return batches, time.monotonic() - began


def timing(
    input_: PreparedTranslationInput,
    batches: Sequence[PackedBatch],
    seconds: float,
    cpu_seconds: float,
    first_seconds: float,
) -> ReadingTiming:
    """Returns the row of some batches that were taken in so many seconds."""
    tokens = sum(
        np.count_nonzero(batch[f"{side}_segments"])
        for batch in batches
        for side in ("source", "target")
    )
    return ReadingTiming(
        rows=input_.manifest.rows("train"),
        source_length=input_.p.source_length,
        target_length=input_.p.target_length,
        filled=float(statistics.mean(share_filled(batch) or 0.0 for batch in batches)),
        tokens_per_second=float(tokens / seconds),
        tokens_per_cpu_second=float(tokens / cpu_seconds),
        rows_per_second=sum(int((batch.examples >= 0).sum()) for batch in batches) / seconds,
        first_seconds=first_seconds,
        memory_bytes=resident_bytes(),
    )
