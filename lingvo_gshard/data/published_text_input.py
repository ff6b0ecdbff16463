"""PublishedTextInput: documents for a published model, tokenized as it was trained."""

from __future__ import annotations

import os
import pathlib

from lingvo_gshard.data.input import TextIds
from lingvo_gshard.data.language_model_input import LanguageModelInput
from lingvo_gshard.data.published_vocabulary import PublishedVocabulary, loaded

# Stands in padding where every id may be a token.
_NO_ID = -1


class PublishedTextInput(LanguageModelInput):
    """Reads, cleans and packs documents. The tokenizer comes from the run's checkpoint.

    No vocabulary is trained, so `vocabulary` of the Params has no effect.
    """

    @property
    def vocabulary(self) -> PublishedVocabulary:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tokenizer of the published model.

        Raises:
          UserError: no checkpoint was loaded that has it.
        """
        return loaded(self.__dict__.get("_published"))

    def load_vocabularies(self, directory: str | os.PathLike) -> None:
        """Replaces the tokenizer by one that was saved."""
        vars(self)["_published"] = PublishedVocabulary(pathlib.Path(directory))
        self._forget_tokens()

    @property
    def text_ids(self) -> TextIds:
        """The ids around a text."""
        vocabulary = self.vocabulary
        around = (vocabulary.bos_id, *vocabulary.end_ids)
        # Many published models have no id of their own for padding.
        pad = _NO_ID if vocabulary.pad_id in around else vocabulary.pad_id
        return TextIds((vocabulary.bos_id,), vocabulary.end_ids, pad)
