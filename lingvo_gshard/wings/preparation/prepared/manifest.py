"""Manifest: what a directory of prepared data holds, and how it came about.

A directory has `manifest.json`, the vocabularies, and for each split, language and source the
shards `SPLIT/LANGUAGE/SOURCE-00000-of-00004.array_record`, each with its lengths in a `.npy` file
beside it.

A record is a row of little-endian unsigned integers: the number of source ids, the source ids, the
target ids. The record of a language model has no source ids. Integers have two bytes if all ids of
the vocabularies fit, else four.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lingvo_gshard.core import UserError, atomic, explained, objects, stores
from lingvo_gshard.data import Vocabulary, load_vocabulary, packing

_LARGEST_OF_TWO_BYTES = 0xFFFF


def id_bytes(vocabulary_size: int) -> int:
    """Returns the bytes of an integer of a record, 2 or 4, by the larger vocabulary's size."""
    return 2 if vocabulary_size <= _LARGEST_OF_TWO_BYTES + 1 else 4


def decode(records: Sequence[bytes], width: int) -> tuple[packing.Tokens, packing.Tokens]:
    """Returns the sources and the targets of records, whose integers have `width` bytes.

    Raises:
      UserError: the bytes are no record; the message has its place in `records`.
    """
    bytes_of_record = np.fromiter(map(len, records), np.int64, len(records))
    damaged = (bytes_of_record == 0) | (bytes_of_record % width != 0)
    if damaged.any():
        place = int(damaged.argmax())
        raise UserError(
            f"record {place} has {bytes_of_record[place]} bytes; a positive multiple of {width} "
            "was expected"
        )
    values = np.frombuffer(b"".join(records), f"<u{width}")
    sizes = bytes_of_record // width
    begins = np.cumsum(sizes) - sizes
    source_lengths = values[begins].astype(np.int64)
    target_lengths = sizes - 1 - source_lengths
    if (target_lengths < 0).any():
        place = int(target_lengths.argmin())
        raise UserError(
            f"record {place} has {sizes[place] - 1} tokens, and begins with a number of source "
            f"tokens of {source_lengths[place]}"
        )
    column = np.arange(len(values)) - np.repeat(begins, sizes)
    limits = np.repeat(source_lengths, sizes)
    sources = values[(column > 0) & (column <= limits)]
    targets = values[column > limits]
    return (
        packing.Tokens.of(sources.astype(np.int32), source_lengths),
        packing.Tokens.of(targets.astype(np.int32), target_lengths),
    )


FILE = "manifest.json"
# Changes with every change that makes older programs misread a directory.
FORMAT = 1
# The language of text whose language is not known (ISO 639-2).
NO_LANGUAGE = "und"
PAIRS, TEXT = "pairs", "text"


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was read, with its size and the digest of its bytes as stored."""

    path: str
    bytes: int
    sha256: str


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Files that belong together, such as one corpus. Shards and weights have its name."""

    name: str
    files: list[SourceFile]


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A file of records.

    Attributes:
      split: the split, such as "train".
      language: language of the rows; NO_LANGUAGE if unknown.
      file: path within the directory.
      lengths: path of the lengths within the directory.
    """

    split: str
    language: str
    source: str
    file: str
    rows: int
    source_tokens: int
    target_tokens: int
    bytes: int
    sha256: str
    lengths: str
    lengths_bytes: int
    lengths_sha256: str


class Rejection(msgspec.Struct, kw_only=True):
    """Rows that were left out for one reason. The examples are "file:line: text"."""

    reason: str
    rows: int
    examples: list[str] = []


class SplitCopies(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of dev or test that a user gave and that also stand in another split. They are kept.

    Attributes:
      other: the split that they also stand in.
      exact: rows with the same language, source and target there.
      folded: such rows, but for case, digits and punctuation.
      source: rows whose source, but for these, is there in the same language.
      target: rows whose target, but for these, is there in any language.
      examples: some of the folded rows, as "file:line: text".
    """

    split: str
    other: str
    rows: int
    exact: int
    folded: int
    source: int
    target: int
    examples: list[str] = []


class LanguageCounts(msgspec.Struct, kw_only=True):
    """Counts of the rows of a language: read, kept by split, and rejected by reason."""

    read: int = 0
    kept: dict[str, int] = {}
    rejected: dict[str, int] = {}


class VocabularyFile(msgspec.Struct, frozen=True, kw_only=True):
    """A vocabulary of the directory.

    Attributes:
      side: "joint", "source" or "target".
      kind: what reads it: "sentencepiece", "tokenizers" or "published".
      files: paths within the directory.
      sha256: digest of the contents of the files, in their order.
      coverage: language -> how well the vocabulary writes it; "targets" for the targets of pairs.
    """

    side: str
    kind: str
    files: list[str]
    size: int
    sha256: str
    coverage: dict[str, dict[str, float]] = {}


class Manifest(msgspec.Struct, kw_only=True):
    """The content of a directory of prepared data.

    Attributes:
      format: FORMAT of the program that wrote it.
      content: PAIRS for sentence pairs, TEXT for text of language models.
      id_bytes: bytes of an integer of a record.
      file_notes: lines about files beside them that were not read.
      settings: the settings that determine the rows, by path.
      splits: split -> its shards, in the order of their files.
      languages: language -> what became of its rows.
      rejections: why rows were left out, the most frequent reason first.
      rewritten: kind of change -> number of texts changed.
      copies: rows of dev and test that were given and stand in another split.
    """

    format: int = FORMAT
    content: str = PAIRS
    id_bytes: int = 2
    sources: list[Source] = []
    file_notes: list[str] = []
    settings: dict[str, Any] = {}
    splits: dict[str, list[Shard]] = {}
    languages: dict[str, LanguageCounts] = {}
    rejections: list[Rejection] = []
    rewritten: dict[str, int] = {}
    copies: list[SplitCopies] = []
    vocabularies: list[VocabularyFile] = []

    def rows(self, split: str) -> int:
        """Returns the number of rows of a split; 0 if there is no such split."""
        return sum(shard.rows for shard in self.splits.get(split, []))


class _Format(msgspec.Struct):
    """The part of a manifest that every format has."""

    format: int


def read(directory: str | os.PathLike) -> Manifest:
    """Returns the manifest of a directory; UserError if missing, damaged, or of another format."""
    path = pathlib.Path(directory) / FILE
    try:
        content = objects.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path}: there is no such file. A directory that gshard-prepare has written, and "
            "finished, was expected"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: the manifest cannot be read: {error.strerror}") from None
    with explained(f"{path}: the manifest is damaged", msgspec.DecodeError):
        found = atomic.decode(content, _Format).format
        if found != FORMAT:
            raise UserError(
                f"{path}: the manifest has format {found}, and this program reads format {FORMAT}. "
                "Prepare the data again, or use the version that wrote it"
            )
        return atomic.decode(content, Manifest)


def write(manifest: Manifest, directory: str | os.PathLike) -> None:
    """Writes a manifest so that readers see all of it or none. Its bytes depend on it alone.

    Raises:
      OSError: the file cannot be written, or the directory does not exist.
    """
    content = msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1)
    atomic.write_atomically(os.fspath(pathlib.Path(directory) / FILE), content + b"\n")


def sha256_of(*paths: str | os.PathLike) -> str:
    """Returns the hexadecimal SHA-256 of the contents of files, one after another.

    Raises:
      OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in paths:
        with objects.open_to_read(path) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


JOINT = "joint"


def read_vocabularies(directory: str | os.PathLike, manifest: Manifest) -> dict[str, Vocabulary]:
    """Returns side -> vocabulary. If it is joint, both sides have the same object.

    Raises:
      UserError: a file is missing or damaged, or the manifest describes another file.
    """
    found: dict[str, Vocabulary] = {}
    for entry in manifest.vocabularies:
        vocabulary = _read(stores.path_of(directory), entry)
        sides = ("source", "target") if entry.side == JOINT else (entry.side,)
        found |= dict.fromkeys(sides, vocabulary)
    return found


def described_vocabularies(directory: str) -> list[VocabularyFile]:
    """Returns the vocabularies that a manifest lists; none if it cannot be read."""
    try:
        return read(directory).vocabularies if directory else []
    except ValueError:
        return []


def _read(root: pathlib.Path, entry: VocabularyFile) -> Vocabulary:
    path = root / entry.files[0]
    try:
        local = objects.local_file(path)
        if sha256_of(local) != entry.sha256:
            raise UserError(
                f"{path}: the vocabulary is not the one that the manifest describes (SHA-256)"
            )
        return load_vocabulary(str(local.parent), local.stem)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file, but the manifest names it") from None
    except OSError as error:
        raise UserError(f"{path}: the vocabulary cannot be read: {error}") from None
