"""PublishedTextInput: documents for a published model, tokenized as it was trained."""

from __future__ import annotations

import functools
import os
import pathlib

from lingvo_gshard.core import Params, UserError, names
from lingvo_gshard.data import LanguageModelInput, PairInput, TextIds, TranslationInput, Vocabulary
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import (
    PublishedVocabulary,
    ids_of,
    loaded,
    tokenizer_of,
)
from lingvo_gshard.wings.preparation.vocabularies.tokenizer_vocabulary import Tokenizer

# Stands in padding where every id may be a token.
_NO_ID = -1


def published_ids(vocabulary: Vocabulary) -> TextIds:
    """Returns the ids around the texts of a published model. Many have no id for padding."""
    around = (vocabulary.bos_id, *vocabulary.end_ids)
    pad = _NO_ID if vocabulary.pad_id in around else vocabulary.pad_id
    return TextIds((vocabulary.bos_id,), vocabulary.end_ids, pad)


class PublishedTextInput(LanguageModelInput):
    """Reads, cleans and packs documents. The tokenizer comes from the run's checkpoint.

    No vocabulary is trained, so `vocabulary` of the Params has no effect.
    """

    @property
    def vocabulary(self) -> PublishedVocabulary:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tokenizer of the published model; UserError if no checkpoint was loaded with it."""
        return loaded(self.__dict__.get("_published"))

    def load_vocabularies(self, directory: str | os.PathLike) -> None:
        """Replaces the tokenizer by one that was saved."""
        vars(self)["_published"] = PublishedVocabulary(pathlib.Path(directory))
        self._forget_tokens()

    @property
    def text_ids(self) -> TextIds:
        return published_ids(self.vocabulary)


_SIDES = ("source", "target")
# Keys of tokenizer_config.json that name the language of each side.
_SETTINGS = {"source": ("src_lang", "source_lang"), "target": ("tgt_lang", "target_lang")}


class PublishedSide(PublishedVocabulary):
    """The tokenizer of one side of a published encoder-decoder.

    M2M-100 and NLLB begin each text with the token of its language. Marian's models for several
    target languages begin the source with the token of the target language.
    """

    def __init__(self, directory: pathlib.Path, side: str, languages: dict[str, str]):
        """Reads the files of a published model.

        Raises:
          UserError: a file is missing or damaged, no id begins or ends a text, or a language is
            unknown.
        """
        self._side, self.languages = side, languages
        super().__init__(directory)
        names_target = (directory / "source.spm").is_file()
        if side == "source":
            self.source_start = self._language("target" if names_target else "source")
        else:
            self.target_start = self._start(() if names_target else self._language("target"))
        self.forbidden_ids = self._forbidden()

    def _read(self) -> Tokenizer:
        return tokenizer_of(self.directory, self._side)

    def _language(self, side: str) -> tuple[int, ...]:
        """Returns the id of a side's language, none without such tokens; UserError if unknown."""
        known, given = self._tokenizer.languages, self.languages[side]
        if not given:
            return self._published_language(side)
        if given not in known:
            nearest = names.nearest(given, known) if known else "It names none"
            raise UserError(f"{side}_language={given}: the model has no such language. {nearest}")
        return (known[given],)

    def _published_language(self, side: str) -> tuple[int, ...]:
        """Returns the id of the token of the language that the published settings name."""
        if side == "target" and (forced := ids_of(self.settings.get("forced_bos_token_id"))):
            return forced[:1]
        known = self._tokenizer.languages
        named = [self.tokenizer_settings.get(key) for key in _SETTINGS[side]]
        found = [name for name in named if isinstance(name, str) and name in known]
        return (known[found[0]],) if found else ()

    def _start(self, forced: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the ids before a translation; UserError if no setting says the first one."""
        settings = self.settings
        first = ids_of(settings.get("decoder_start_token_id", settings.get("bos_token_id")))
        if not first:
            raise UserError(
                f"{self.directory}: neither config.json nor generation_config.json has "
                "decoder_start_token_id, the id before a translation"
            )
        return (*first[:1], *forced)

    def _forbidden(self) -> tuple[int, ...]:
        """Returns the ids that the settings forbid; UserError if they forbid sequences of ids."""
        words = self.settings.get("bad_words_ids", [])
        if any(len(word) != 1 for word in words):
            raise UserError(
                f"{self.directory}: bad_words_ids in generation_config.json or config.json is "
                f"{words}; lists of one id were expected"
            )
        return tuple(sorted({*sum(words, [])}))

    @functools.cached_property
    def _unspoken(self) -> frozenset[int]:
        return super()._unspoken | {self.pad_id, *self.target_start}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublishedSide) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[object, ...]:
        return self.directory, self._side, *self.languages.values()


class PublishedTranslationInput(TranslationInput):
    """Reads, cleans and packs sentence pairs. The tokenizer comes from the run's checkpoint.

    No vocabulary is trained, so `vocabulary` of the Params has no effect.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "source_language",
            "",
            "Code of the language of all sources, as the model's tokenizer has it; empty: that of "
            "its settings.",
        )
        p.define(
            "target_language",
            "",
            "Code of the language of all translations; empty: that of the model's settings.",
        )
        return p

    @property
    def _vocabularies(self) -> tuple[Vocabulary, Vocabulary]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tokenizers of both sides; UserError if no checkpoint was loaded that has them."""
        return loaded(self.__dict__.get("_published"))

    def save_vocabularies(self, directory: str | os.PathLike) -> None:
        self.source_vocabulary.save(os.fspath(directory))

    def load_vocabularies(self, directory: str | os.PathLike) -> None:
        """Replaces the tokenizers by those that were saved."""
        languages = {side: self.p.get(f"{side}_language") for side in _SIDES}
        self._set_sides(pathlib.Path(directory), languages)

    def use_languages(self, source: str = "", target: str = "") -> None:
        """Changes the languages of texts; the tokenizers must be loaded.

        An empty code keeps a language. UserError if the model does not have one.
        """
        now = self._vocabularies[0]
        assert isinstance(now, PublishedSide)
        given = {"source": source, "target": target}
        languages = {side: given[side] or now.languages[side] for side in _SIDES}
        self._set_sides(now.directory, languages)

    def _set_sides(self, directory: pathlib.Path, languages: dict[str, str]) -> None:
        source, target = (PublishedSide(directory, side, languages) for side in _SIDES)
        vars(self)["_published"] = source, target
        self._forget_tokens()

    # The vocabularies were not trained here.
    text_ids = PairInput.text_ids
