"""Evaluation: the scores of a model on a split, ready to be printed and saved."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from lingvo_gshard.core.bound_function import WeightsHolder


class EvaluationRuntime(WeightsHolder, Protocol):
    """Holds a model's weights, decodes with them and computes metrics with them."""

    def eval_step(self, batch: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
        """Returns the metrics of one batch without training: name -> (value, weight)."""
        ...


class ProgressBar(Protocol):
    """Shows how much of some work is done."""

    def update(self, done: int) -> None:
        """Shows that `done` units are done."""
        ...


class ShowProgress(Protocol):
    """Opens a progress bar for as long as a `with` block lasts."""

    def __call__(
        self, what: str, unit: str, total: int
    ) -> contextlib.AbstractContextManager[ProgressBar]:
        """Opens a bar.

        Args:
          what: the work, such as "Translating".
          unit: the unit that is counted, such as "rows".
          total: number of units in all.
        """
        ...


class _NoProgressBar:
    def update(self, done: int) -> None:
        del done


@contextlib.contextmanager
def no_progress(what: str, unit: str, total: int) -> Iterator[ProgressBar]:
    """Opens a progress bar that shows nothing."""
    del what, unit, total
    yield _NoProgressBar()


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of scores to be printed.

    Attributes:
      columns: the head of each column; "" for none.
      rows: cells of each row, as many as columns.
      summary: cells of a separate last row, such as an average; None for no such row.
      text_columns: indices of the columns that are aligned to the left; the others are numbers.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    summary: Sequence[str] | None = None
    text_columns: Sequence[int] = (0,)


class Evaluation(abc.ABC):
    """The scores of a model on one split."""

    @property
    @abc.abstractmethod
    def size(self) -> str:
        """The amount of data scored, such as "1,000 rows"."""

    @abc.abstractmethod
    def to_record(self) -> dict[str, Any]:
        """Returns all scores by name: numbers, strings, and lists and dicts of them."""

    @abc.abstractmethod
    def table(self) -> Table:
        """Returns the main scores for a reader."""

    def notes(self) -> list[str]:
        """Returns further lines for a reader, printed below the table."""
        return []

    def output_rows(self) -> Iterator[Sequence[str]]:
        """Yields the cells of each row of the file that gshard-evaluate --output writes."""
        yield from ()
