"""Stages of an input in memory that features bring: cleaning and vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.progress import Progress
from lingvo_gshard.core.seams import Seam
from lingvo_gshard.data.sources.report import CleaningReport
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

# Name of a stage -> its class: PAIRS and DOCUMENTS are `RowCleaner`s, VOCABULARIES is a
# `VocabularyMaker`. An input that is not told otherwise has the Params of these classes.
STAGES: Seam[type[Configurable]] = Seam("input_stages")
PAIRS, DOCUMENTS, VOCABULARIES = "pairs", "documents", "vocabularies"


class RowCleaner(Protocol):
    """Normalizes rows and drops rows that would only add noise to training.

    Attributes:
      unicode_form: Unicode's normal form of the rows that are kept.
    """

    @property
    def unicode_form(self) -> str: ...

    def clean(
        self, rows: Sequence[Row], split: str, progress: Progress
    ) -> tuple[list[Row], CleaningReport]:
        """Returns the rows kept and the report."""
        ...


class VocabularyMaker(Protocol):
    """Trains or reads the vocabularies of an input.

    Attributes:
      unicode_form: Unicode's normal form of the rows.
      progress: is told when training starts.
      notes: lines about vocabularies that are not as the Params ask for.
    """

    unicode_form: str
    progress: Progress
    notes: list[str]

    @classmethod
    def configured_sizes(cls, params: Params) -> tuple[int, int]:
        """Returns the sizes of the vocabularies of source and target that Params ask for."""
        ...

    def train(self, rows: Sequence[Row], temperature: float) -> tuple[Vocabulary, Vocabulary]:
        """Returns the vocabularies of source and target; the same object twice if they are joint.

        Args:
          rows: training rows.
          temperature: of the sampling of languages.
        """
        ...

    def train_on_documents(self, rows: Sequence[Row], temperature: float) -> Vocabulary:
        """Returns the vocabulary of documents, which are rows without a source."""
        ...

    def coverage_notes(
        self, rows: Sequence[Row], source: Vocabulary, target: Vocabulary
    ) -> list[str]:
        """Returns lines about the languages that the vocabularies write with most tokens."""
        ...
