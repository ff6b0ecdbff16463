"""Reads, writes, lists and deletes files of local disks and of buckets.

Buckets have no folders of their own: a folder is there while a file in it is. A file appears in a
bucket all at once, when it is complete.

Buckets have no appends and no files that are created exclusively. Buckets have conditional writes:
a write succeeds only if the file has not changed since it was read.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar, cast

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import regular
from lingvo_gshard.core.files.atomic import write_atomically
from lingvo_gshard.core.files.problems import attempt
from lingvo_gshard.core.files.stores import (
    GivenPath,
    file_system,
    is_bucket,
    key_value_store,
    split,
)

_Result = TypeVar("_Result")

# Bytes that reading ahead in a bucket loads at a time.
_BLOCK_BYTES = 2**22


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file of a listing.

    Attributes:
      size: its size in bytes.
      tag: differs between any two contents that the file had.
    """

    size: int
    tag: str


def read_bytes(path: GivenPath) -> bytes:
    """Returns the content of a file.

    Raises:
      OSError: FileNotFoundError if there is no such file; IrregularFileError if it is no regular
        file; BucketError if a bucket is in trouble.
    """
    if not is_bucket(path):
        return regular.read_regular(path)
    return _call(path, lambda fs, url: fs.cat_file(url))


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


def write_bytes(path: GivenPath, content: bytes) -> None:
    """Writes a file so that others see all of it or none of it.

    Raises:
      OSError: it cannot be written.
    """
    if is_bucket(path):
        _call(path, lambda fs, url: fs.pipe_file(url, content), writes=True)
    else:
        write_atomically(os.fspath(path), content)


def open_to_read(path: GivenPath) -> BinaryIO:
    """Opens a file to read its bytes from the beginning, as a stream.

    Reads of a bucket are repeated like all requests, from where they were.

    Raises:
      OSError: there is no such file, it is no regular file, or the bucket is in trouble.
    """
    if not is_bucket(path):
        return regular.open_regular(path)
    return cast(BinaryIO, io.BufferedReader(_ObjectReader(os.fspath(path)), _BLOCK_BYTES))


def exists(path: GivenPath) -> bool:
    """Returns whether there is a file or a folder.

    Raises:
      BucketError: the bucket is missing, refuses access or does not answer.
    """
    if not is_bucket(path):
        return pathlib.Path(path).exists()
    return is_file(path) or bool(names(path))


def is_file(path: GivenPath) -> bool:
    """Returns whether there is a file. Raises BucketError as `exists` does."""
    return size_of(path) is not None


def size_of(path: GivenPath) -> int | None:
    """Returns the size of a file in bytes; None if there is no such file."""
    if not is_bucket(path):
        found = pathlib.Path(path)
        return found.stat().st_size if found.is_file() else None
    try:
        info = _call(path, lambda fs, url: fs.info(url))
    except FileNotFoundError:
        return None
    return info["size"] if info["type"] == "file" else None


def names(path: GivenPath) -> list[str]:
    """Returns the names of the files and folders in a folder, sorted; none if it is not there."""
    if not is_bucket(path):
        found = pathlib.Path(path)
        return sorted(os.listdir(found)) if found.is_dir() else []
    return sorted(children(path))


def children(path: GivenPath) -> dict[str, Entry | None]:
    """Returns name -> Entry for the files in a folder of a bucket, and name -> None for folders."""
    try:
        rows = _call(path, lambda fs, url: fs.ls(url, detail=True))
    except FileNotFoundError:
        return {}
    prefix = _prefix(path)
    return {
        row["name"].removeprefix(prefix).strip("/"): _entry(row) if row["type"] == "file" else None
        for row in rows
        if row["name"].startswith(prefix) and row["name"] != prefix
    }


def find(path: GivenPath) -> dict[str, Entry]:
    """Returns the path below a folder -> Entry, for all files below it; empty if there are none."""
    if not is_bucket(path):
        top = pathlib.Path(path)
        files = (one for one in sorted(top.rglob("*")) if one.is_file())
        return {str(one.relative_to(top)): _entry_of(one.stat()) for one in files}
    try:
        rows = _call(path, lambda fs, url: fs.find(url, detail=True))
    except FileNotFoundError:
        return {}
    prefix = _prefix(path)
    return {
        name.removeprefix(prefix): _entry(row)
        for name, row in sorted(rows.items())
        if name.startswith(prefix) and not name.endswith("/")
    }


def glob(pattern: GivenPath) -> list[str]:
    """Returns the files and folders that match a pattern with *, ? and [], sorted, as text."""
    if not is_bucket(pattern):
        import glob as local

        return sorted(local.glob(os.path.expanduser(os.fspath(pattern)), recursive=True))
    scheme = split(pattern)[0]
    return [f"{scheme}://{name}" for name in sorted(_call(pattern, lambda fs, url: fs.glob(url)))]


def make_folder(path: GivenPath) -> None:
    """Creates a local folder and those above it. In a bucket, files alone make folders."""
    if not is_bucket(path):
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)


def remove(path: GivenPath) -> None:
    """Deletes a file, if it is there."""
    if not is_bucket(path):
        pathlib.Path(path).unlink(missing_ok=True)
        return
    try:
        _call(path, lambda fs, url: fs.rm_file(url))
    except FileNotFoundError:
        return


def remove_tree(path: GivenPath) -> None:
    """Deletes a folder with all that is in it, if it is there."""
    if not is_bucket(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    inside = [f"{os.fspath(path)}/{name}" for name in find(path)]
    if inside:
        try:
            _call(path, lambda fs, _: fs.rm(inside))
        except FileNotFoundError:
            # The request was repeated, and the first attempt had deleted some files.
            for one in inside:
                remove(one)


def copy_tree(source: GivenPath, target: GivenPath) -> None:
    """Copies all files below a folder of a bucket to another folder there, within the bucket."""
    for name in find(source):
        one, other = f"{os.fspath(source)}/{name}", f"{os.fspath(target)}/{name}"
        _call(one, lambda fs, url, other=other: fs.cp_file(url, other), writes=True)


def download(path: GivenPath, local: str | os.PathLike[str]) -> None:
    """Copies a file of a bucket to a new local file, whose folder must exist.

    Raises:
      OSError: it cannot be read or written.
    """
    target = os.fspath(local)
    partial = f"{target}.partial-{os.getpid()}"
    try:
        _call(path, lambda fs, url: fs.get_file(url, partial))
        os.replace(partial, target)
    except BaseException:
        pathlib.Path(partial).unlink(missing_ok=True)
        raise


def upload(local: str | os.PathLike[str], path: GivenPath) -> None:
    """Copies a local file to a bucket, where it appears when it is complete.

    Raises:
      OSError: it cannot be read or written.
    """
    source = os.fspath(local)
    # A local file that is missing is no trouble of the bucket.
    os.stat(source)
    _call(path, lambda fs, url: fs.put_file(source, url), writes=True)


class _ObjectReader(io.RawIOBase):
    """The bytes of an object, block by block."""

    def __init__(self, path: str):
        self._path, self._place = path, 0
        size = size_of(path)
        if size is None:
            # Raises the error of a missing file.
            read_bytes(path)
        self._size = size or 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns where the next read begins."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to an offset from the beginning, from here, or from the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = max(base + offset, 0)
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Reads the next bytes, as many as fit into the buffer."""
        view = memoryview(buffer).cast("B")
        start, end = self._place, min(self._place + len(view), self._size)
        if start >= end:
            return 0
        block = _call(self._path, lambda fs, url: fs.cat_file(url, start=start, end=end))
        view[: len(block)] = block
        self._place += len(block)
        return len(block)


def _call(path: GivenPath, request: Callable[[Any, str], _Result], writes: bool = False) -> _Result:
    """Returns what a request to a file system returns; repeats it while the bucket is in trouble.

    Args:
      path: the file or folder.
      request: takes the file system and the path as text.
      writes: whether the request writes.
    """
    url = os.fspath(path).rstrip("/")
    return attempt(url, lambda: request(file_system(url), url), writes)


def _prefix(path: GivenPath) -> str:
    """Returns how fsspec's names of the files in a folder of a bucket begin."""
    _, bucket, key = split(path)
    return f"{bucket}/{key}/" if key else f"{bucket}/"


def _entry(row: dict[str, Any]) -> Entry:
    return Entry(row["size"], str(row.get("generation") or row.get("ETag")))


def _entry_of(found: os.stat_result) -> Entry:
    return Entry(found.st_size, f"{found.st_ino}-{found.st_mtime_ns}")


# Identifies one write of a file. Two writes of equal bytes have different generations.
Generation = bytes


class CompareAndSwapFile:
    """A file of a bucket with conditional reads and writes."""

    def __init__(self, path: GivenPath):
        """Names the file; it need not exist."""
        self._path = os.fspath(path)
        self._opened: Any = None

    def read(self) -> tuple[bytes | None, Generation]:
        """Returns the content and its generation; None, with a generation, if there is no file."""
        found = self._call(lambda store: store.read("").result())
        return (found.value if found.state == "value" else None), found.stamp.generation

    def write(self, content: bytes, expected: Generation) -> Generation | None:
        """Writes the file if it has not changed since it was read.

        A write whose answer was lost and that was repeated returns None, although it succeeded:
        read the file to find out.

        Args:
          content: the new content.
          expected: the generation that `read` or `write` returned.

        Returns:
          The new generation; None if the file has changed.
        """
        stamp = self._call(
            lambda store: store.write("", content, if_equal=expected).result(), writes=True
        )
        return stamp.generation or None

    def delete(self, expected: Generation) -> None:
        """Deletes the file if it has not changed since it was read."""
        self._call(lambda store: store.write("", None, if_equal=expected).result(), writes=True)

    def append(self, line: bytes) -> None:
        """Adds bytes to the end of the file, which is created if it is not there."""
        while True:
            content, generation = self.read()
            if self.write((content or b"") + line, generation):
                return

    def _call(self, request: Callable[[Any], _Result], writes: bool = False) -> _Result:
        return attempt(self._path, lambda: request(self._store()), writes)

    def _store(self) -> Any:
        if self._opened is None:
            import tensorstore

            self._opened = tensorstore.KvStore.open(key_value_store(self._path)).result()
        return self._opened
