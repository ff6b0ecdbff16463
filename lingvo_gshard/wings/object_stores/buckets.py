"""The files of buckets: read, written, listed, deleted and copied.

Small files go through fsspec, and conditional writes through TensorStore: a write succeeds only if
the file has not changed since it was read.
"""

from __future__ import annotations

import concurrent.futures
import io
import os
import pathlib
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar, cast

from lingvo_gshard.core import stores
from lingvo_gshard.wings.object_stores import connections, scratch
from lingvo_gshard.wings.object_stores.problems import attempt

_Result = TypeVar("_Result")

# Bytes that reading ahead in a bucket loads at a time.
_BLOCK_BYTES = 2**22
# Requests at a time. Each waits for the network most of its time.
_REQUESTS = 16


def path_of(path: str) -> pathlib.Path:
    """Returns a URL as etils' epath.Path, which has the methods of pathlib.Path; or UserError."""
    connections.split(path)
    connections.prepare(path)
    from etils import epath

    return cast(pathlib.Path, epath.Path(path))


def read_bytes(path: stores.GivenPath) -> bytes:
    """Returns the content of a file."""
    return _call(path, lambda fs, url: fs.cat_file(url))


def write_bytes(path: stores.GivenPath, content: bytes) -> None:
    """Writes a file, which appears when it is complete."""
    _call(path, lambda fs, url: fs.pipe_file(url, content), writes=True)


def append(path: stores.GivenPath, line: bytes) -> None:
    """Adds bytes to the end of a file, which is created if it is not there."""
    file = CompareAndSwapFile(path)
    while True:
        content, generation = file.read()
        if file.write((content or b"") + line, generation):
            return


def open_to_read(path: stores.GivenPath) -> BinaryIO:
    """Opens a file to read its bytes from the beginning, as a stream.

    Reads are repeated like all requests, from where they were.
    """
    from fsspec.spec import AbstractBufferedFile

    # Reading a missing file raises its error.
    size = size_of(path) or len(read_bytes(path))

    class Reader(AbstractBufferedFile):
        """Reads block by block."""

        def _fetch_range(self, start: int, end: int) -> bytes:
            last = min(end, size)
            return _call(path, lambda fs, url: fs.cat_file(url, start=start, end=last))

    raw: Any = Reader(None, os.fspath(path), cache_type="none", size=size)
    return cast(BinaryIO, io.BufferedReader(raw, _BLOCK_BYTES))


def size_of(path: stores.GivenPath) -> int | None:
    """Returns the size of a file in bytes; None if there is no such file."""
    try:
        info = _call(path, lambda fs, url: fs.info(url))
    except FileNotFoundError:
        return None
    return info["size"] if info["type"] == "file" else None


def children(path: stores.GivenPath) -> dict[str, stores.Entry | None]:
    """Returns name -> Entry for the files in a folder, and name -> None for its folders."""
    rows = _listed(path, lambda fs, url: {row["name"]: row for row in fs.ls(url, detail=True)})
    return {
        name.strip("/"): _entry(row) if row["type"] == "file" else None
        for name, row in rows.items()
        if name
    }


def find(path: stores.GivenPath) -> dict[str, stores.Entry]:
    """Returns the path below a folder -> Entry, for all files below it; empty if there are none."""
    rows = _listed(path, lambda fs, url: fs.find(url, detail=True))
    return {name: _entry(row) for name, row in sorted(rows.items()) if name and name[-1] != "/"}


def _listed(
    path: stores.GivenPath, request: Callable[[Any, str], dict[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Returns what fsspec tells of names below a folder; empty without such a folder."""
    try:
        rows = _call(path, request)
    except FileNotFoundError:
        return {}
    # fsspec's names of files begin with the bucket.
    _, bucket, key = connections.split(path)
    prefix = f"{bucket}/{key}/" if key else f"{bucket}/"
    return {n.removeprefix(prefix): row for n, row in rows.items() if n.startswith(prefix)}


def glob(pattern: stores.GivenPath) -> list[str]:
    """Returns the URLs of the files and folders that match a pattern with *, ? and [], sorted."""
    scheme = connections.split(pattern)[0]
    return [f"{scheme}://{name}" for name in sorted(_call(pattern, lambda fs, url: fs.glob(url)))]


def remove(path: stores.GivenPath) -> None:
    """Deletes a file, if it is there."""
    try:
        _call(path, lambda fs, url: fs.rm_file(url))
    except FileNotFoundError:
        return


def remove_tree(path: stores.GivenPath) -> None:
    """Deletes a folder with all that is in it, if it is there."""
    inside = [f"{os.fspath(path)}/{name}" for name in find(path)]
    if inside:
        try:
            _call(path, lambda fs, _: fs.rm(inside))
        except FileNotFoundError:
            # The request was repeated, and the first attempt had deleted some files.
            for one in inside:
                remove(one)


def copy_tree(source: stores.GivenPath, target: stores.GivenPath) -> None:
    """Copies all files below a folder to another folder in the same bucket."""
    for name in find(source):
        one, other = f"{os.fspath(source)}/{name}", f"{os.fspath(target)}/{name}"
        _call(one, lambda fs, url, other=other: fs.cp_file(url, other), writes=True)


def download(path: stores.GivenPath, local: stores.GivenPath) -> None:
    """Copies a file of a bucket to a new local file, whose folder must exist; or OSError."""
    target = os.fspath(local)
    partial = f"{target}.partial-{os.getpid()}"
    try:
        _call(path, lambda fs, url: fs.get_file(url, partial))
        os.replace(partial, target)
    except BaseException:
        pathlib.Path(partial).unlink(missing_ok=True)
        raise


def upload(local: stores.GivenPath, path: stores.GivenPath) -> None:
    """Copies a local file to a bucket, where it appears when it is complete; or OSError."""
    source = os.fspath(local)
    # A local file that is missing is no trouble of the bucket.
    os.stat(source)
    _call(path, lambda fs, url: fs.put_file(source, url), writes=True)


def local_file(path: stores.GivenPath) -> pathlib.Path:
    """Returns a local copy of a file, which this process removes; or OSError."""
    name = os.fspath(path).rpartition("/")[2]
    target = scratch.new_folder("file") / name
    download(path, target)
    return target


def local_folder(path: stores.GivenPath) -> pathlib.Path:
    """Returns a local copy of a folder as `local_file` does of a file."""
    target = scratch.new_folder(os.fspath(path).rstrip("/").rpartition("/")[2])
    download_all(path, target, list(find(path)))
    return target


def download_all(path: stores.GivenPath, target: pathlib.Path, names: list[str]) -> None:
    """Copies named files below a folder of a bucket to a local folder, several at a time."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
    _several(lambda name: download(f"{os.fspath(path)}/{name}", target / name), names)


def upload_folder(source: pathlib.Path, path: stores.GivenPath) -> None:
    """Copies all files below a local folder to a folder of a bucket, several at a time."""
    files = (one for one in sorted(source.rglob("*")) if one.is_file())
    names = [one.relative_to(source).as_posix() for one in files]
    _several(lambda name: upload(source / name, f"{os.fspath(path)}/{name}"), names)


def _several(function: Callable[[str], None], names: list[str]) -> None:
    """Calls a function with each name; raises the first error after all calls have ended."""
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
        for _ in pool.map(function, names):
            pass


def _call(
    path: stores.GivenPath, request: Callable[[Any, str], _Result], writes: bool = False
) -> _Result:
    """Returns what a request returns; repeats it while the bucket is in trouble."""
    url = os.fspath(path).rstrip("/")
    return attempt(url, lambda: request(connections.file_system(url), url), writes)


def _entry(row: dict[str, Any]) -> stores.Entry:
    return stores.Entry(row["size"], str(row.get("generation") or row.get("ETag")))


# Identifies one write of a file. Two writes of equal bytes have different generations.
Generation = bytes


class CompareAndSwapFile:
    """A file of a bucket with conditional reads and writes."""

    def __init__(self, path: stores.GivenPath):
        """Names the file; it need not exist."""
        self._path = os.fspath(path)
        self._opened: Any = None

    def read(self) -> tuple[bytes | None, Generation]:
        """Returns the content and its generation; None, with a generation, if there is no file."""
        found = self._call(lambda store: store.read("").result())
        return (found.value if found.state == "value" else None), found.stamp.generation

    def write(self, content: bytes, expected: Generation) -> Generation | None:
        """Writes the file if its generation is still `expected`, as `read` or `write` returned it.

        Returns the new generation; None if the file has changed. A write whose answer was lost and
        that was repeated returns None, although it succeeded: read the file to find out.
        """
        stamp = self._call(
            lambda store: store.write("", content, if_equal=expected).result(), writes=True
        )
        return stamp.generation or None

    def delete(self, expected: Generation) -> None:
        """Deletes the file if it has not changed since it was read."""
        self._call(lambda store: store.write("", None, if_equal=expected).result(), writes=True)

    def _call(self, request: Callable[[Any], _Result], writes: bool = False) -> _Result:
        return attempt(self._path, lambda: request(self._store()), writes)

    def _store(self) -> Any:
        if self._opened is None:
            import tensorstore

            self._opened = tensorstore.KvStore.open(
                connections.key_value_store(self._path)
            ).result()
        return self._opened
