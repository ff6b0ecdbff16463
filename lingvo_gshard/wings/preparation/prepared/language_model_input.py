"""PreparedLanguageModelInput: packed batches of text that gshard-prepare has tokenized."""

from __future__ import annotations

import functools

from lingvo_gshard.core import Params
from lingvo_gshard.data import TextInput, Vocabulary
from lingvo_gshard.wings.preparation.prepared import manifest
from lingvo_gshard.wings.preparation.prepared.base_input import PreparedInput


class PreparedLanguageModelInput(TextInput, PreparedInput):
    """Mixes and packs texts."""

    content = manifest.TEXT

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.set(packing_window=1024)
        p.define("vocabulary_size", 0, "Ids that plans assume without the directory.", minimum=0)
        return p

    @classmethod
    def configured_vocabulary_sizes(cls, params: Params) -> dict[str, int]:
        """Returns the size that the manifest or else the Params have."""
        found = manifest.described_vocabularies(params.directory)
        return {"text": found[0].size if found else params.vocabulary_size}

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The vocabulary."""
        return self._prepared_vocabularies["target"]
