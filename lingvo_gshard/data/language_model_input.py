"""LanguageModelInput: turns documents into packed batches."""

from __future__ import annotations

import functools

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.data import stages
from lingvo_gshard.data.corpus_input import CorpusInput, TokenizedRows
from lingvo_gshard.data.input import TextIds
from lingvo_gshard.data.packed_input import TextInput
from lingvo_gshard.data.sources import text
from lingvo_gshard.data.sources.report import CleaningReport
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary


class LanguageModelInput(TextInput, CorpusInput):
    """Reads, cleans, tokenizes and packs documents. Each stage runs on first use."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.set(
            corpus=text.EmbeddedEnglish.params(),
            cleaning=stages.INPUT_STAGES[stages.DOCUMENTS].params(),
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        vocabulary = self.p.vocabulary
        if not vocabulary.joint:
            raise UserError("input.vocabulary.joint is False: a language model has one side only")
        if not vocabulary.byte_fallback and not vocabulary.files:
            raise UserError(
                "input.vocabulary.byte_fallback is False, but bits per byte need a vocabulary that "
                "spells every text: True was expected"
            )

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The vocabulary, trained on the lines of the training documents."""
        return self._trainer.train_on_documents(self.rows("train"), self.temperature)

    @property
    def text_ids(self) -> TextIds:
        return super().text_ids if self.p.vocabulary.files else TextIds()

    def _tokenize(self, split: str, rows: list[Row], report: CleaningReport) -> TokenizedRows:
        del split
        self.progress.begin("Tokenizing", "documents")
        return TokenizedRows(self.tokenized(rows, self.progress), report)
