"""Writes and reads the vocabulary files of runs."""

from __future__ import annotations

import os

from lingvo_gshard.core.seams import Seam
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary

# Kinds of vocabularies other than SentencePiece's, which differ in the `suffix` of their files.
VOCABULARY_KINDS: Seam[type[Vocabulary]] = Seam("vocabulary_kinds")


def save_pair(directory: str, source: Vocabulary, target: Vocabulary) -> None:
    """Writes the vocabularies of source and target; one file if they are the same object."""
    if source is target:
        source.save(directory, "joint")
    else:
        source.save(directory, "source")
        target.save(directory, "target")


def load_pair(directory: str) -> tuple[Vocabulary, Vocabulary]:
    """Reads what `save_pair` wrote; a joint vocabulary is returned twice as one object."""
    if any(_exists(directory, "joint", kind) for kind in (Vocabulary, *VOCABULARY_KINDS)):
        joint = load_vocabulary(directory, "joint")
        return joint, joint
    return load_vocabulary(directory, "source"), load_vocabulary(directory, "target")


def load_vocabulary(directory: str, name: str = "vocabulary") -> Vocabulary:
    """Reads what `save` of a vocabulary wrote; ValueError if it is missing or damaged."""
    found = (kind for kind in VOCABULARY_KINDS if _exists(directory, name, kind))
    return next(found, Vocabulary).load(directory, name)


def _exists(directory: str, name: str, kind: type[Vocabulary]) -> bool:
    return os.path.exists(os.path.join(directory, f"{name}{kind.suffix}"))
