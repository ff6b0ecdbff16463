"""PublishedVocabulary: the tokenizer of a published model, from the files it was published with."""

from __future__ import annotations

import functools
import pathlib
import shutil
from collections.abc import Sequence
from typing import TypeVar

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.published_tokenizers import (
    ADDED_TOKENS,
    FAIRSEQ_MODEL,
    SENTENCEPIECE_MODELS,
    SETTINGS,
    SPECIAL_TOKENS,
    TOKENIZER_JSON,
    VOCABULARY,
    Tokenizer,
    read_json,
    tokenizer_of,
)
from lingvo_gshard.data.vocabulary import Vocabulary

# File with an import's notes on the published tensors.
RECORD_FILE = "published.json"
# Files of a published model that are kept besides its weights.
KEPT_FILES = (
    RECORD_FILE,
    "config.json",
    "generation_config.json",
    TOKENIZER_JSON,
    *SENTENCEPIECE_MODELS,
    FAIRSEQ_MODEL,
    "source.spm",
    "target.spm",
    SETTINGS,
    SPECIAL_TOKENS,
    ADDED_TOKENS,
    VOCABULARY,
    "target_vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "README.md",
    "LICENSE",
)

_T = TypeVar("_T")


class PublishedVocabulary(Vocabulary):
    """The tokenizer of a published model, with the ids that it was trained with.

    Attributes:
      directory: the files.
      settings: the values of generation_config.json, over those of config.json.
      tokenizer_settings: the values of tokenizer_config.json.
      end_ids: ids that end a text; the first is `eos_id`.
    """

    can_sample = False

    def __init__(self, directory: pathlib.Path):
        """Reads the files of a published model.

        Args:
          directory: has tokenizer.json or tokenizer.model, and config.json.

        Raises:
          UserError: a file is missing or damaged, or no id ends a text.
        """
        self.directory = directory
        self.settings = read_json(directory / "config.json")
        self.settings |= read_json(directory / "generation_config.json")
        self.tokenizer_settings = read_json(directory / SETTINGS)
        self._tokenizer = self._read()
        self.before = self._tokenizer.before
        self.end_ids = ids_of(self.settings.get("eos_token_id"))
        if not self.end_ids:
            raise UserError(
                f"{directory}: neither config.json nor generation_config.json has eos_token_id, "
                "the id that ends a text"
            )
        self.eos_id = self.end_ids[0]
        # Without an id of their own, texts begin after the end of another.
        self.bos_id = next(
            iter((*self.before, *ids_of(self.settings.get("bos_token_id")))), self.eos_id
        )
        self.pad_id = next(iter(ids_of(self.settings.get("pad_token_id"))), self.eos_id)
        self.unk_id = self.eos_id

    def _read(self) -> Tokenizer:
        """Reads the tokenizer."""
        return tokenizer_of(self.directory)

    @property
    def size(self) -> int:
        """The number of ids, those of added tokens included."""
        return self._tokenizer.size

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without those before and after it."""
        return self._tokenizer.encode(text)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 2) -> list[list[int]]:
        """Returns the ids of many texts, each as `encode` does."""
        del num_threads
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids up to the first that ends a text, without special ones."""
        kept = []
        for index in map(int, ids):
            if index in self.end_ids and kept:
                break
            if self._has_text(index):
                kept.append(index)
        return self._tokenizer.decode(kept)

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of all ids. Special ones have none, such as those that end texts."""
        return self._tokenizer.decode([index for index in map(int, ids) if self._has_text(index)])

    def is_byte(self, index: int) -> bool:
        """Returns whether an id is one byte, whose text depends on all bytes beside it."""
        return index in self._tokenizer.bytes

    def _has_text(self, index: int) -> bool:
        return index < self.size and index not in self._unspoken

    @functools.cached_property
    def _unspoken(self) -> frozenset[int]:
        """The ids that are no part of a text."""
        return frozenset((*self.before, *self.end_ids))

    def piece(self, index: int) -> str:
        """Returns the text of one piece, `▁` for a space."""
        return self._tokenizer.piece(int(index)) if index < self.size else ""

    def save(self, directory: str, name: str = "") -> str:
        """Copies the files into a directory and returns its path; makes the directory."""
        del name
        target = pathlib.Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        copy_files(self.directory, target)
        return directory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublishedVocabulary) and self.directory == other.directory

    def __hash__(self) -> int:
        return hash(self.directory)


def loaded(tokenizers: _T | None) -> _T:
    """Returns what was loaded from a checkpoint.

    Raises:
      UserError: nothing was.
    """
    if tokenizers is None:
        raise UserError(
            "the tokenizer of a published model is in the checkpoint of an imported run; "
            "gshard-import makes one"
        )
    return tokenizers


def copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies KEPT_FILES, as far as there are such, from one directory to another."""
    for name in KEPT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def ids_of(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns the ids that a setting names: one, several, or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
