"""The scores of a run's evaluations, as a file in its directory."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec

from lingvo_gshard.training.run.records import json_lines

# The file in a log directory that has a row for each evaluation.
EVALUATIONS_FILE = "evaluations.jsonl"


class EvaluationRow(msgspec.Struct, frozen=True):
    """One evaluation of a checkpoint.

    Attributes:
      time: seconds since 1970.
      step: step of the checkpoint.
      split: the split that was scored.
      precision: how weights were stored and multiplied to decode.
      size: the amount of data in words, such as "1,000 rows".
      options: what was asked of the evaluation, such as its languages or a beam size.
      scores: what the task's evaluation returns as its record.
    """

    time: float
    step: int
    split: str
    precision: str
    size: str
    options: dict[str, Any]
    scores: dict[str, Any]


def append(logdir: pathlib.Path, row: EvaluationRow) -> None:
    """Appends an evaluation to evaluations.jsonl. Raises OSError if it cannot be written."""
    json_lines.append(logdir / EVALUATIONS_FILE, row)


def read(logdir: pathlib.Path) -> list[EvaluationRow]:
    """Returns a run's evaluations, the first one first; none if the file is missing."""
    return json_lines.read(logdir / EVALUATIONS_FILE, EvaluationRow)
