"""Stages of an input in memory that features bring: cleaning and vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lingvo_gshard.core import Configurable, Params, Progress, Seam
from lingvo_gshard.data.sources.report import CleaningReport
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

# Name of a stage -> its class: PAIRS and DOCUMENTS are `RowCleaner`s, VOCABULARIES is a
# `VocabularyMaker`. An input that is not told otherwise has the Params of these classes.
INPUT_STAGES: Seam[type[Configurable]] = Seam("input_stages")
PAIRS, DOCUMENTS, VOCABULARIES = "pairs", "documents", "vocabularies"


class RowCleaner(Protocol):
    """Normalizes rows to `unicode_form`, and drops rows that would only add noise to training."""

    @property
    def unicode_form(self) -> str: ...

    def clean(
        self, rows: Sequence[Row], split: str, progress: Progress
    ) -> tuple[list[Row], CleaningReport]: ...


class VocabularyMaker(Protocol):
    """Trains or reads vocabularies: of the sides of pairs, or of documents.

    The vocabularies of both sides may be the same object. Languages are sampled with a temperature.

    Attributes:
      unicode_form: Unicode's normal form of the rows.
      notes: lines about vocabularies that are not as the Params ask for.
    """

    unicode_form: str
    progress: Progress
    notes: list[str]

    @classmethod
    def configured_sizes(cls, params: Params) -> tuple[int, int]: ...

    def train(self, rows: Sequence[Row], temperature: float) -> tuple[Vocabulary, Vocabulary]: ...

    def train_on_documents(self, rows: Sequence[Row], temperature: float) -> Vocabulary: ...

    def coverage_notes(
        self, rows: Sequence[Row], source: Vocabulary, target: Vocabulary
    ) -> list[str]: ...
