"""Measures gshard-prepare on made text: rows per second, and memory of all of its processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import rich.console

from benchmarks.input import made_text
from lingvo_gshard.api import tables
from lingvo_gshard.core.progress import Progress
from lingvo_gshard.tools.console import in_bytes

_SECONDS_BETWEEN_LOOKS = 0.2
_VOCABULARY = "Training the vocabulary"


@dataclasses.dataclass(frozen=True)
class PreparationTiming:
    """One measurement.

    Attributes:
      measure: "prepare".
      rows: rows of made text.
      kept: rows that were kept.
      workers: processes that work on them.
      seconds: time of the whole run.
      stage_seconds: time of each stage.
      cpu_seconds: processor time of all processes.
      rows_per_second: rows by the time of all stages but the vocabulary's, which is trained on a
        part of fixed size.
      rows_per_cpu_second: rows by the processor time of one worker, which other programs on the
        machine hardly change; it includes the vocabulary.
      peak_bytes: largest memory of all processes together. Pages that they share count once.
    """

    measure: str
    rows: int
    kept: int
    workers: int
    seconds: float
    stage_seconds: dict[str, float]
    cpu_seconds: float
    rows_per_second: float
    rows_per_cpu_second: float
    peak_bytes: int


def measure(rows: int, workers: int, folder: str, progress: Progress) -> PreparationTiming:
    """Makes text and prepares it in a process of its own.

    The prepared data is then in `prepared` in the folder, which must be empty.

    Raises:
      RuntimeError: preparation fails.
    """
    source = pathlib.Path(folder) / "made.tsv"
    progress.begin(f"making {rows:,} rows")
    made_text.write_tsv(source, rows)
    progress.begin(f"preparing {rows:,} rows")
    module = "benchmarks.input.prepare_run"
    command = [sys.executable, "-m", module, source, f"{folder}/prepared", str(workers)]
    before = os.times()
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = _peak(process)
        output = process.communicate()[0]
    seconds, after = time.monotonic() - began, os.times()
    if process.returncode:
        raise RuntimeError(f"preparation ended with exit code {process.returncode}")
    found = msgspec.json.decode(output.splitlines()[-1])
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    working = sum(s for stage, s in found["seconds"].items() if stage != _VOCABULARY)
    return PreparationTiming(
        measure="prepare",
        rows=rows,
        kept=found["kept"],
        workers=workers,
        seconds=seconds,
        stage_seconds=found["seconds"],
        cpu_seconds=cpu,
        rows_per_second=rows / working,
        rows_per_cpu_second=rows / cpu,
        peak_bytes=peak,
    )


def print_row(console: rich.console.Console, row: PreparationTiming) -> None:
    """Prints a measurement."""
    facts = (
        ("gshard-prepare", f"{row.rows:,} made rows, {row.workers} workers"),
        ("kept", f"{row.kept:,} rows"),
        ("whole run", f"{row.seconds:,.1f} s"),
        *((stage, f"{seconds:,.1f} s") for stage, seconds in row.stage_seconds.items()),
        ("without the vocabulary", f"{row.rows_per_second:,.0f} rows/s"),
        ("processor time", f"{row.cpu_seconds:,.1f} s"),
        ("memory", f"{in_bytes(row.peak_bytes)} at most, all processes together"),
    )
    tables.print_facts(console, facts)


def _peak(process: subprocess.Popen) -> int:
    """Returns the largest memory, in bytes, of a process and its children until it ends."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(_memory, _family(process.pid))))
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return peak


def _family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children = pathlib.Path(f"/proc/{pid}/task/{thread}/children").read_text()
            for child in children.split():
                yield from _family(int(child))


def _memory(pid: int) -> int:
    """Returns a process's own memory plus its part of shared memory, in bytes (Linux: Pss)."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0
