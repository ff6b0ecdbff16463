"""Reads the vocabularies of prepared data."""

from __future__ import annotations

import os
import pathlib

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import copies, paths
from lingvo_gshard.data.prepared import manifest as manifests
from lingvo_gshard.data.prepared.manifest import Manifest, VocabularyFile, sha256_of
from lingvo_gshard.data.vocabularies import files
from lingvo_gshard.data.vocabulary import Vocabulary

JOINT = "joint"


def read(directory: str | os.PathLike, manifest: Manifest) -> dict[str, Vocabulary]:
    """Returns side -> vocabulary. If it is joint, both sides have the same object.

    Args:
      directory: the directory of prepared data.
      manifest: its manifest.

    Raises:
      UserError: a file is missing or damaged, or not the one that the manifest describes.
    """
    found: dict[str, Vocabulary] = {}
    for entry in manifest.vocabularies:
        vocabulary = _read(paths.path_of(directory), entry)
        sides = ("source", "target") if entry.side == JOINT else (entry.side,)
        found |= dict.fromkeys(sides, vocabulary)
    return found


def described(directory: str) -> list[VocabularyFile]:
    """Returns the vocabularies that a manifest lists; none if the manifest cannot be read.

    Args:
      directory: the directory of prepared data; "" for none.
    """
    try:
        return manifests.read(directory).vocabularies if directory else []
    except ValueError:
        return []


def _read(root: pathlib.Path, entry: VocabularyFile) -> Vocabulary:
    path = root / entry.files[0]
    try:
        local = copies.local_file(path)
        if sha256_of(local) != entry.sha256:
            raise UserError(
                f"{path}: the vocabulary is not the one that the manifest describes (SHA-256)"
            )
        return files.load(str(local.parent), local.stem)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file, but the manifest names it") from None
    except OSError as error:
        raise UserError(f"{path}: the vocabulary cannot be read: {error}") from None
