"""Reads, writes, lists and deletes files of local disks and of stores, such as buckets."""

from __future__ import annotations

import glob as local_glob
import os
import pathlib
import shutil
from typing import BinaryIO, TypeVar

import msgspec

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import regular
from lingvo_gshard.core.files.atomic import write_atomically
from lingvo_gshard.core.files.stores import Entry, GivenPath, store_of

T = TypeVar("T")


def read_bytes(path: GivenPath) -> bytes:
    """Returns the content of a file.

    Raises:
      OSError: FileNotFoundError if there is no such file; IrregularFileError if it is no regular
        file; BucketError if a store is in trouble.
    """
    store = store_of(path)
    return store.read_bytes(path) if store else regular.read_regular(path)


def read_text(path: GivenPath) -> str:
    """Returns the text of a file in UTF-8.

    Raises:
      OSError: as `read_bytes`.
      UserError: it is not UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{os.fspath(path)} is not UTF-8: byte {error.start}") from None


def text_beside(module: str, name: str) -> str:
    """Returns the text of a file of the package, beside the module with this `__file__`."""
    return pathlib.Path(module).with_name(name).read_text(encoding="utf-8")


def table_beside(module: str, name: str, kind: type[T]) -> T:
    """Returns the content of a JSON or TOML file of the package; see `text_beside`."""
    codec = msgspec.toml if name.endswith(".toml") else msgspec.json
    return codec.decode(text_beside(module, name), type=kind)


def write_bytes(path: GivenPath, content: bytes) -> None:
    """Writes a file so that others see all of it or none of it.

    Raises:
      OSError: it cannot be written.
    """
    if store := store_of(path):
        store.write_bytes(path, content)
    else:
        write_atomically(os.fspath(path), content)


def append(path: GivenPath, line: bytes) -> None:
    """Adds bytes to the end of a file, which is created if it is not there.

    Raises:
      OSError: it cannot be written.
    """
    if store := store_of(path):
        store.append(path, line)
        return
    with os.fdopen(regular.open_to_append(path), "ab") as file:
        file.write(line)


def open_to_read(path: GivenPath) -> BinaryIO:
    """Opens a file to read its bytes from the beginning, as a stream.

    Raises:
      OSError: there is no such file, it is no regular file, or the store is in trouble.
    """
    store = store_of(path)
    return store.open_to_read(path) if store else regular.open_regular(path)


def exists(path: GivenPath) -> bool:
    """Returns whether there is a file or a folder.

    Raises:
      BucketError: the store is in trouble.
    """
    if not store_of(path):
        return pathlib.Path(path).exists()
    return is_file(path) or bool(names(path))


def is_file(path: GivenPath) -> bool:
    """Returns whether there is a file. Raises BucketError as `exists` does."""
    return size_of(path) is not None


def size_of(path: GivenPath) -> int | None:
    """Returns the size of a file in bytes; None if there is no such file."""
    if store := store_of(path):
        return store.size_of(path)
    found = pathlib.Path(path)
    return found.stat().st_size if found.is_file() else None


def names(path: GivenPath) -> list[str]:
    """Returns the names of the files and folders in a folder, sorted; none if it is not there."""
    if store := store_of(path):
        return sorted(store.children(path))
    found = pathlib.Path(path)
    return sorted(os.listdir(found)) if found.is_dir() else []


def find(path: GivenPath) -> dict[str, Entry]:
    """Returns the path below a folder -> Entry, for all files below it; empty if there are none."""
    if store := store_of(path):
        return store.find(path)
    top = pathlib.Path(path)
    files = (one for one in sorted(top.rglob("*")) if one.is_file())
    return {str(one.relative_to(top)): _entry_of(one.stat()) for one in files}


def glob(pattern: GivenPath) -> list[str]:
    """Returns the files and folders that match a pattern with *, ? and [], sorted, as text."""
    if store := store_of(pattern):
        return store.glob(pattern)
    return sorted(local_glob.glob(os.path.expanduser(os.fspath(pattern)), recursive=True))


def make_folder(path: GivenPath) -> None:
    """Creates a local folder and those above it. In a store, files alone make folders."""
    if not store_of(path):
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)


def remove(path: GivenPath) -> None:
    """Deletes a file, if it is there."""
    if store := store_of(path):
        store.remove(path)
    else:
        pathlib.Path(path).unlink(missing_ok=True)


def remove_tree(path: GivenPath) -> None:
    """Deletes a folder with all that is in it, if it is there."""
    if store := store_of(path):
        store.remove_tree(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def local_file(path: GivenPath) -> pathlib.Path:
    """Returns a file as it is on a local disk: itself, or a copy that this process removes.

    Raises:
      OSError: it cannot be read, or the disk is full.
    """
    store = store_of(path)
    return store.local_file(path) if store else pathlib.Path(path)


def local_folder(path: GivenPath) -> pathlib.Path:
    """Returns a folder as `local_file` returns a file."""
    store = store_of(path)
    return store.local_folder(path) if store else pathlib.Path(path)


def _entry_of(found: os.stat_result) -> Entry:
    return Entry(found.st_size, f"{found.st_ino}-{found.st_mtime_ns}")
