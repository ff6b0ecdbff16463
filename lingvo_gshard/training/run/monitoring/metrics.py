"""Writes metrics: a row of metrics.jsonl for every step, and curves for TensorBoard."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

from lingvo_gshard.core import UserError, regular, tf
from lingvo_gshard.core.files.atomic import replace_file

MetricsRow = dict[str, float]
# Name of a picture -> (uint8 [height, width, 3], description).
Pictures: TypeAlias = Mapping[str, tuple[np.ndarray, str]]

# Name of the file in the run's directory.
METRICS_FILE = "metrics.jsonl"
# Name of the digest of a step's batch, which is no curve.
BATCH_DIGEST = "batch_digest"
# Metrics of the machine: equal runs differ in them.
HOST_MEMORY, DEVICE_MEMORY = "host_memory_bytes", "peak_device_memory_bytes"
MEASURED = ("tokens_per_second", HOST_MEMORY, DEVICE_MEMORY)
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(dict[str, int | float | None])


class MetricsWriter:
    """Appends rows to <logdir>/metrics.jsonl and points to <logdir>/events.

    While the disk is full, rows wait in memory.
    """

    def __init__(self, logdir: pathlib.Path, step: int, say: Callable[[str], None] = print):
        """Opens the files of a run.

        Args:
          step: the step that the run resumes from. Rows of later steps are removed, so that the
            file has one row for each step.
        """
        self._say = say
        self._warned = False
        self._unwritten = b""
        self._path = logdir / METRICS_FILE
        kept = _drop_rows_after(self._path, step)
        self._last_line = kept[-1] if kept else b""
        events = logdir / "events"
        # A run that was made from another one has no rows of the steps of that one.
        first = _step_of(kept[0]) if kept else 1 if events.exists() else step + 1
        lost = step + 1 - first - len(kept)
        if lost > 0:
            self._say(
                f"Warning: {METRICS_FILE} lacks the rows of {lost:,} of the {step:,} steps so far; "
                "they were damaged or removed"
            )
        self._file = regular.open_to_append(self._path)
        self._events = tf.summary.create_file_writer(str(events))

    def resumed_row(self, step: int) -> MetricsRow | None:
        """Returns the row of the step that the run resumes from; None if the file lacks it."""
        row = msgspec.json.decode(self._last_line) if self._last_line else {}
        return row if row.pop("step", None) == step else None

    def amend_resumed_row(self, step: int, row: MetricsRow) -> None:
        """Replaces the row of the step that the run resumes from, before any other is written."""
        content = regular.read_regular(self._path).removesuffix(self._last_line)
        self._last_line = _encode(step, row)
        replace_file(self._path, content + self._last_line)
        os.close(self._file)
        self._file = regular.open_to_append(self._path)

    def write(self, step: int, row: MetricsRow) -> None:
        """Appends one row. Values that are not finite become null."""
        self._unwritten += _encode(step, row)
        self.flush()

    def flush(self) -> None:
        """Writes the rows that wait in memory, if the disk has space for them."""
        try:
            while self._unwritten:
                written = os.write(self._file, self._unwritten)
                self._unwritten = self._unwritten[written:]
            self._warned = False
        except OSError as error:
            self._warn(
                f"metrics.jsonl cannot be written ({error.strerror}); new rows wait in memory"
            )

    def curves(self, step: int, row: MetricsRow) -> None:
        """Adds one point to each TensorBoard curve."""
        try:
            with self._events.as_default(step=step):
                for name, value in row.items():
                    if name != BATCH_DIGEST:
                        tf.summary.scalar(name, value)
            self._events.flush()
        except tf.errors.OpError as error:
            self._warn(f"TensorBoard events cannot be written ({error.message})")

    def pictures(self, step: int, found: Pictures) -> None:
        """Adds pictures to TensorBoard."""
        try:
            with self._events.as_default(step=step):
                for name, (pixels, description) in found.items():
                    tf.summary.image(name, pixels[None], description=description)
            self._events.flush()
        except tf.errors.OpError as error:
            self._warn(f"TensorBoard events cannot be written ({error.message})")

    def close(self) -> None:
        """Closes both files. Says so if rows were lost, since the disk is still full."""
        self.flush()
        if self._unwritten:
            count = self._unwritten.count(b"\n")
            self._say(
                f"Warning: {METRICS_FILE} lacks the last {count:,} rows, which could not be written"
            )
        os.close(self._file)
        try:
            self._events.close()
        except tf.errors.OpError as error:
            self._warn(f"TensorBoard events cannot be written ({error.message})")

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._say(f"Warning: {message}")
        self._warned = True


class NoWriter:
    """Replaces MetricsWriter in processes that leave writing to the main one."""

    def __getattr__(self, name: str) -> Any:
        """Returns a function that does nothing, for any method of `MetricsWriter`."""
        if not hasattr(MetricsWriter, name):
            raise AttributeError(name)
        return lambda *_: None


def _encode(step: int, row: MetricsRow) -> bytes:
    return _ENCODER.encode({"step": step, **row}) + b"\n"


def _drop_rows_after(path: pathlib.Path, step: int) -> list[bytes]:
    """Rewrites the file without damaged rows and rows of later steps. Returns what is kept."""
    try:
        lines = regular.read_regular(path).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (IsADirectoryError, regular.IrregularFileError) as error:
        raise UserError(f"{path} cannot have the metrics of the run: {error.strerror}") from None
    kept = [line for line in lines if is_row_until(line, step)]
    replace_file(path, b"".join(kept))
    return kept


def _step_of(line: bytes) -> int:
    """Returns the step of a row. Raises what `is_row_until` catches if the row is damaged."""
    step = _DECODER.decode(line)["step"]
    if not isinstance(step, int):
        raise TypeError(f"step {step}")
    return step


def is_row_until(line: bytes, step: int) -> bool:
    """Returns whether a line of the file is a whole row, of a step up to `step`."""
    try:
        return line.endswith(b"\n") and _step_of(line) <= step
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return False
