"""Metrics on disk: a row of metrics.jsonl for every step, and curves for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Callable

import tensorflow as tf

Row = dict[str, float]


class MetricsWriter:
    """Appends rows to <logdir>/metrics.jsonl and points to <logdir>/events.

    Opened with the step that a run goes on from, it drops the rows of later steps, so that the
    file has one row for each step. A full disk is reported once; rows wait in memory for room.
    """

    def __init__(self, logdir: pathlib.Path, step: int, say: Callable[[str], None] = print):
        self._say = say
        self._warned = False
        self._unwritten = b""
        path = logdir / "metrics.jsonl"
        _keep_rows(path, step)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._events = tf.summary.create_file_writer(str(logdir / "events"))

    def write(self, step: int, row: Row) -> None:
        """Appends one row; what is not finite becomes null."""
        values = {name: _finite_or_none(value) for name, value in row.items()}
        self._unwritten += json.dumps({"step": step, **values}).encode() + b"\n"
        try:
            while self._unwritten:
                written = os.write(self._file, self._unwritten)
                self._unwritten = self._unwritten[written:]
            self._warned = False
        except OSError as error:
            self._warn(f"metrics.jsonl cannot be written ({error.strerror}); its rows are held")

    def curves(self, step: int, row: Row) -> None:
        """Adds one point to each TensorBoard curve."""
        try:
            with self._events.as_default(step=step):
                for name, value in row.items():
                    tf.summary.scalar(name, value)
            self._events.flush()
        except tf.errors.OpError as error:
            self._warn(f"TensorBoard events cannot be written ({error.message})")

    def close(self) -> None:
        """Closes both files."""
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
    """Stands where MetricsWriter does in the processes that leave writing to the main one."""

    def write(self, step: int, row: Row) -> None:
        """Writes nothing."""

    def curves(self, step: int, row: Row) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Closes nothing."""


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _keep_rows(path: pathlib.Path, step: int) -> None:
    """Rewrites the file with the whole rows up to and including `step`."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            keep = line.endswith(b"\n") and json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            keep = False
        if keep:
            kept.append(line)
    shorter = path.with_suffix(".jsonl.new")
    shorter.write_bytes(b"".join(kept))
    os.replace(shorter, path)
