"""Writes and reads the vocabulary files of runs, and reads files of others that a user names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lingvo_gshard.core.config.names import listed
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.data.vocabularies.json_vocabulary import JsonVocabulary
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

_KINDS = (Vocabulary, JsonVocabulary)


def save_pair(directory: str, source: Vocabulary, target: Vocabulary) -> None:
    """Writes the vocabularies of source and target; one file if they are the same object."""
    if source is target:
        source.save(directory, "joint")
    else:
        source.save(directory, "source")
        target.save(directory, "target")


def load_pair(directory: str) -> tuple[Vocabulary, Vocabulary]:
    """Reads what `save_pair` wrote; a joint vocabulary is returned twice as one object."""
    if any(os.path.exists(_path(directory, "joint", kind)) for kind in _KINDS):
        joint = load(directory, "joint")
        return joint, joint
    return load(directory, "source"), load(directory, "target")


def load(directory: str, name: str = "vocabulary") -> Vocabulary:
    """Reads what `save` of a vocabulary wrote; ValueError if it is missing or damaged."""
    kind = JsonVocabulary if os.path.exists(_path(directory, name, JsonVocabulary)) else Vocabulary
    return kind.load(directory, name)


def _path(directory: str, name: str, kind: type[Vocabulary]) -> str:
    return os.path.join(directory, f"{name}{kind.suffix}")


def of_others(files: str | Sequence[str]) -> tuple[Vocabulary, ...]:
    """Returns the vocabularies in files of others, used as they are.

    Args:
      files: one file or several: SentencePiece models, or tokenizer.json of the tokenizers package.

    Raises:
      UserError: a file is missing, or is no vocabulary.
    """
    return tuple(map(_of_others, paths_of(files)))


def paths_of(files: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the paths of a setting that names one file or several."""
    return tuple(map(os.path.expanduser, listed(files)))


def _of_others(path: str) -> Vocabulary:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise UserError(
            f"input.vocabulary.files: {path}: {error.strerror}; a SentencePiece model or a "
            "tokenizer.json was expected"
        ) from None
    kind = JsonVocabulary if JsonVocabulary.is_json(content) else Vocabulary
    try:
        return kind(content)
    except ValueError as error:
        raise UserError(f"input.vocabulary.files: {path}: {error}") from None
