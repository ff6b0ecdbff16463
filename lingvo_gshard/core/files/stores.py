"""Stores of files beyond local disks, which features bring: a store has the files of a scheme.

The path of a file in a store is a URL, such as gs://bucket/runs/small. `objects` reads and writes
the files of local disks and of stores alike.

Stores have no folders of their own: a folder is there while a file in it is. A file appears all at
once, when it is complete. Stores have no appends and no files that are created exclusively.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable
from typing import BinaryIO, Protocol, TypeAlias

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.seams import Seam

# A path as users give it.
GivenPath: TypeAlias = "str | os.PathLike[str]"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file of a listing.

    Attributes:
      size: its size in bytes.
      tag: differs between any two contents that the file had.
    """

    size: int
    tag: str


class BucketError(OSError):
    """A bucket is missing, refuses access, or does not answer.

    `strerror` says what happened and what to check; `filename` is the path.

    Attributes:
      is_transient: whether the same request may succeed later.
    """

    def __init__(self, code: int, words: str, path: str, is_transient: bool = False):
        super().__init__(code, words, path)
        self.is_transient = is_transient

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class Store(Protocol):
    """The files of one scheme.

    Functions of `objects` with the same names say what most functions do. `path_of` returns a URL
    as an object with the methods of pathlib.Path. `upload` copies a local file to the store, and
    `download` copies a file of the store. `children` returns name -> Entry for the files in a
    folder, and name -> None for its folders. All raise BucketError if the store is in trouble.
    """

    path_of: Callable[[str], pathlib.Path]
    read_bytes: Callable[[GivenPath], bytes]
    write_bytes: Callable[[GivenPath, bytes], None]
    append: Callable[[GivenPath, bytes], None]
    upload: Callable[[GivenPath, GivenPath], None]
    download: Callable[[GivenPath, GivenPath], None]
    open_to_read: Callable[[GivenPath], BinaryIO]
    size_of: Callable[[GivenPath], int | None]
    children: Callable[[GivenPath], dict[str, Entry | None]]
    find: Callable[[GivenPath], dict[str, Entry]]
    glob: Callable[[GivenPath], list[str]]
    remove: Callable[[GivenPath], None]
    remove_tree: Callable[[GivenPath], None]
    local_file: Callable[[GivenPath], pathlib.Path]
    local_folder: Callable[[GivenPath], pathlib.Path]


# Scheme of URLs, such as "gs" -> its store.
OBJECT_STORES: Seam[Store] = Seam("object_stores")


def store_of(path: GivenPath) -> Store | None:
    """Returns the store of a path; None for a local one."""
    scheme = scheme_of(path)
    return OBJECT_STORES[scheme] if scheme in OBJECT_STORES else None


def scheme_of(path: GivenPath) -> str:
    """Returns the scheme of a URL, such as "gs"; "" for a local path."""
    found = _SCHEME.match(os.fspath(path))
    return found[1] if found else ""


def is_bucket(path: GivenPath) -> bool:
    """Returns whether a path is in a store, such as gs://... or s3://..."""
    return store_of(path) is not None


def path_of(path: GivenPath) -> pathlib.Path:
    """Returns a path as an object.

    Args:
      path: a local path, or a URL such as gs://bucket/runs/small.

    Returns:
      A pathlib.Path; for a store an object with the same methods. The functions of `objects` take
      both, retry, and raise OSErrors in words.

    Raises:
      UserError: the URL names no bucket, its kind of storage is unknown, or a package is missing.
    """
    text = os.fspath(path)
    if store := store_of(path):
        return store.path_of(text)
    if scheme := scheme_of(path):
        known = " and ".join(f"{scheme}://" for scheme, _ in OBJECT_STORES.items())
        raise UserError(f"{text}: {scheme}:// is not supported; give a local path, {known}")
    return pathlib.Path(text)


def absolute(path: GivenPath) -> pathlib.Path:
    """Returns `path_of` a path, with the current directory before a relative one."""
    found = path_of(path)
    return found if is_bucket(path) else found.absolute()
