"""Measures how fast prepared data becomes batches, and how long training steps wait for them."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import rich.console

from lingvo_gshard.api.training import share_filled
from lingvo_gshard.core import Params, Progress
from lingvo_gshard.core.config import registry
from lingvo_gshard.data import Input, PackedBatch, TrainBatches
from lingvo_gshard.runtime import SingleDeviceRuntime
from lingvo_gshard.tools.console.tables import print_rows as print_cells
from lingvo_gshard.tools.console.units import in_bytes
from lingvo_gshard.training import make_trainer
from lingvo_gshard.training.experiments import with_vocabulary_sizes
from lingvo_gshard.wings.preparation.prepared.translation_input import PreparedTranslationInput
from lingvo_gshard.wings.services.memory import resident_bytes

LANGUAGES = 50
_WORDS = 20_000
_ROWS_AT_A_TIME = 1 << 15
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
# One row in `_COPY_EVERY` is a copy of another row. One in `_EMPTY_EVERY` is empty on one side.
_COPY_EVERY, _EMPTY_EVERY = 20, 1000


def write_tsv(path: str | os.PathLike, rows: int) -> None:
    """Writes a TSV file of sentence pairs.

    Words and languages are as frequent as in Zipf's law, with lengths of 4 to 16 words. A
    twentieth of the rows are duplicates, and a thousandth have an empty side.
    """
    with open(path, "w", encoding="utf-8") as file:
        for lines in _lines(rows):
            file.writelines(lines)


def _lines(rows: int) -> Iterator[list[str]]:
    draw = np.random.default_rng(0)
    words = _words(draw)
    # ISO 639-2 keeps these codes for local use, so no script is known for them.
    codes = [f"q{a}{b}" for a in "abcde" for b in "abcdefghij"]
    assert len(codes) == LANGUAGES
    share = 1 / np.arange(1, LANGUAGES + 1)
    for begin in range(0, rows, _ROWS_AT_A_TIME):
        count = min(_ROWS_AT_A_TIME, rows - begin)
        lengths = draw.integers(4, 17, count)
        ends = np.cumsum(lengths).tolist()
        # Zipf's law by an inverse of its cumulative distribution.
        ranks = (_WORDS ** draw.random((2, ends[-1])) - 1).astype(np.int64).tolist()
        languages = draw.choice(LANGUAGES, count, p=share / share.sum()).tolist()
        lines, start = [], 0
        for row, (end, language) in enumerate(zip(ends, languages, strict=True)):
            source = " ".join([words[i] for i in ranks[0][start:end]])
            target = " ".join([words[i] for i in ranks[1][start:end]])
            start = end
            if row % _EMPTY_EVERY == 1:
                source = ""
            lines.append(f"{codes[language]}\t{source}\t{target}\n")
        for row in range(_COPY_EVERY, count, _COPY_EVERY):
            lines[row] = lines[row - _COPY_EVERY // 2]
        yield lines


def _words(draw: np.random.Generator) -> list[str]:
    lengths = draw.integers(1, 5, _WORDS).tolist()
    return ["".join(draw.choice(_SYLLABLES, length)) for length in lengths]


# Source length, target length and rows of a batch.
_SHAPES = ((128, 128, 64), (512, 512, 16))
# Batches of one measurement: some blocks of rows.
_BATCHES = 200
_STEPS = 20
_OF_STEPS, _SHAPE_OF_STEPS = "translation.quickstart", (96, 80, 24)


@dataclasses.dataclass(frozen=True)
class ReadingTiming:
    """One measurement.

    Attributes:
      measure: "read" for batches alone, "train" for training steps on them.
      rows: training rows of the data.
      source_length: source positions of a batch's row.
      target_length: target positions of a batch's row.
      filled: share of positions that hold tokens.
      tokens_per_second: tokens of both sides.
      tokens_per_cpu_second: tokens by the processor time, which other programs hardly change; 0 for
        "train".
      rows_per_second: rows of the data.
      first_seconds: time to the first batch.
      wait_share: share of the time that steps waited for batches; 0 for "read".
      memory_bytes: memory of the process at the end.
    """

    measure: str
    rows: int
    source_length: int
    target_length: int
    filled: float
    tokens_per_second: float
    tokens_per_cpu_second: float
    rows_per_second: float
    first_seconds: float
    wait_share: float
    memory_bytes: int


def measure(directory: str, progress: Progress) -> list[ReadingTiming]:
    """Measures reading alone with rows of 128 and 512, and training steps of the quickstart.

    Raises:
      UserError: the directory cannot be read.
    """
    rows = []
    for source_length, longest_target, batch_rows in _SHAPES:
        progress.begin(f"reading rows of {source_length}")
        rows.append(_read(_input(directory, source_length, longest_target, batch_rows)))
    progress.begin("training")
    rows.append(_train(_input(directory, *_SHAPE_OF_STEPS)))
    return rows


def print_rows(console: rich.console.Console, rows: list[ReadingTiming]) -> None:
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
    print_cells(console, ("",), numbers, cells)


def _input(directory: str, source_length: int, longest_target: int, rows: int) -> Params:
    """Returns Params with the data's ratio of target to source tokens."""
    p = PreparedTranslationInput.params().set(
        directory=directory, batch_rows=rows, source_length=source_length
    )
    groups = p.instantiate().table("train").groups
    source, target = (sum(group.tokens[side] for group in groups) for side in range(2))
    target_length = 4 * round(source_length * target / source / 4)
    return p.set(target_length=min(longest_target, max(4, target_length)))


def _read(params: Params) -> ReadingTiming:
    """Measures batches that are taken as fast as they are made."""
    input_ = params.instantiate()
    batches, first = _first(input_)
    began, cpu = time.monotonic(), time.process_time()
    taken: list[Any] = [next(batches) for _ in range(_BATCHES)]
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    batches.close()
    return _row("read", input_, taken, seconds, cpu, first, 0.0)


def _train(params: Params) -> ReadingTiming:
    """Measures training steps of the quickstart's model, and how long they wait for batches."""
    input_, experiment = params.instantiate(), registry.get(_OF_STEPS)
    task = experiment.task.set(
        share_embeddings=input_.source_vocabulary is input_.target_vocabulary
    )
    trainer = make_trainer(experiment, with_vocabulary_sizes(task, input_))
    runtime = SingleDeviceRuntime(trainer)
    runtime.init_state()
    batches, first = _first(input_)
    runtime.train_step(next(batches)).read()
    taken, waits, began = [], [], time.monotonic()
    for _ in range(_STEPS):
        asked = time.monotonic()
        taken.append(next(batches))
        waits.append(time.monotonic() - asked)
        runtime.train_step(taken[-1]).read()
    seconds = time.monotonic() - began
    batches.close()
    return _row("train", input_, taken, seconds, 0.0, first, sum(waits) / seconds)


def _first(input_: Input) -> tuple[TrainBatches, float]:
    """Returns the batches after the first one, and the seconds that it took."""
    input_.check_split("train")
    began = time.monotonic()
    batches = input_.train_batches(1)
    next(batches)
    return batches, time.monotonic() - began


def _row(
    measure: str,
    input_: PreparedTranslationInput,
    batches: list[PackedBatch],
    seconds: float,
    cpu: float,
    first: float,
    wait_share: float,
) -> ReadingTiming:
    tokens = sum(
        np.count_nonzero(batch[f"{side}_segments"])
        for batch in batches
        for side in ("source", "target")
    )
    p = input_.p
    return ReadingTiming(
        measure=measure,
        rows=input_.manifest.rows("train"),
        source_length=p.source_length,
        target_length=p.target_length,
        filled=float(statistics.mean(share_filled(batch) or 0.0 for batch in batches)),
        tokens_per_second=float(tokens / seconds),
        tokens_per_cpu_second=float(tokens / cpu) if cpu else 0.0,
        rows_per_second=sum(int((batch.examples >= 0).sum()) for batch in batches) / seconds,
        first_seconds=first,
        wait_share=wait_share,
        memory_bytes=resident_bytes(),
    )
