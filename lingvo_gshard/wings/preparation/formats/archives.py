"""Members of zip and tar archives as files: `corpus.zip/train.tsv` is a path within an archive."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import tarfile
import zipfile
from collections.abc import Iterator
from typing import BinaryIO, cast

from lingvo_gshard.core import UserError, is_bucket, objects

_ZIP = (".zip",)
_TAR = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
_MACOS = "__MACOSX"
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, NotImplementedError, RuntimeError)


def split(path: str) -> tuple[str, str] | None:
    """Returns the archive on a path, and the rest of the path; None without an archive."""
    if is_bucket(path):
        return None
    parts = path.split("/")
    for count in range(1, len(parts)):
        archive = "/".join(parts[:count])
        if archive.lower().endswith((*_ZIP, *_TAR)) and os.path.isfile(archive):
            return archive, "/".join(parts[count:])
    return None


def is_archive(path: str) -> bool:
    """Returns whether a path is an archive as a whole."""
    return path.lower().endswith((*_ZIP, *_TAR))


def members(archive: str) -> dict[str, int]:
    """Returns name -> size of the files in an archive; UserError if it cannot be read."""
    try:
        if archive.lower().endswith(_ZIP):
            with zipfile.ZipFile(archive) as found:
                infos = [info for info in found.infolist() if not info.is_dir()]
                return {info.filename: info.file_size for info in infos}
        with tarfile.open(archive) as found:
            return {info.name: info.size for info in found if info.isfile()}
    except (*_DAMAGED, OSError, EOFError) as error:
        raise UserError(f"{archive} cannot be read as an archive: {error}") from None


def glob(archive: str, pattern: str) -> list[str]:
    """Returns the paths of the members whose names match a pattern, sorted.

    A beginning of "**/" also matches no folder. Files in the folder __MACOSX, which macOS
    adds, have no content. They are left out unless the pattern names the folder.
    """
    patterns = (pattern, pattern.removeprefix("**/"))
    found = sorted(
        name
        for name in members(archive)
        if any(fnmatch.fnmatchcase(name, each) for each in patterns)
        and (_MACOS in pattern or _MACOS not in name.split("/"))
    )
    return [f"{archive}/{name}" for name in found]


def state(path: str) -> tuple[int, int]:
    """Returns the size of a member, -1 if it is gone, and when its archive was last changed."""
    inside = split(path)
    if inside is None:
        return -1, 0
    archive, name = inside
    return members(archive).get(name, -1), os.stat(archive).st_mtime_ns


@contextlib.contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Opens a file, or a member of an archive, to read it from the beginning; or OSError."""
    inside = split(path)
    if inside is None:
        with objects.open_to_read(path) as file:
            yield file
        return
    archive, name = inside
    try:
        if archive.lower().endswith(_ZIP):
            with zipfile.ZipFile(archive) as found, found.open(name) as file:
                yield cast(BinaryIO, file)
        else:
            with tarfile.open(archive) as found, _member(found, name) as file:
                yield file
    except (*_DAMAGED, KeyError) as error:
        raise OSError(f"{archive}: {name} cannot be read: {error}") from None


def _member(archive: tarfile.TarFile, name: str) -> BinaryIO:
    file = archive.extractfile(name)
    if file is None:
        raise tarfile.ReadError("it is no file")
    return cast(BinaryIO, file)
