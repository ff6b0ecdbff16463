"""Paths of local files and of objects in buckets."""

from __future__ import annotations

import os
import pathlib
import re
from typing import TypeAlias, cast

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import stores

# A path as users give it.
GivenPath: TypeAlias = "str | os.PathLike[str]"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_bucket(path: GivenPath) -> bool:
    """Returns whether a path is in a bucket: gs://... or s3://..."""
    return os.fspath(path).startswith(stores.PREFIXES)


def path_of(path: GivenPath) -> pathlib.Path:
    """Returns a path as an object.

    Args:
      path: a local path, or a URL such as gs://bucket/runs/small.

    Returns:
      A pathlib.Path; for a bucket etils' epath.Path, which has the same methods. The functions of
      `objects` take both, retry, and raise OSErrors in words.

    Raises:
      UserError: the URL names no bucket, its kind of storage is unknown, or a package is missing.
    """
    text = os.fspath(path)
    found = _SCHEME.match(text)
    if found is None:
        return pathlib.Path(text)
    if found[0] not in stores.PREFIXES:
        known = " and ".join(stores.PREFIXES)
        raise UserError(f"{text}: {found[0]} is not supported; give a local path, {known}")
    split(text)
    stores.prepare(text)
    from etils import epath

    return cast(pathlib.Path, epath.Path(text))


def absolute(path: GivenPath) -> pathlib.Path:
    """Returns `path_of` a path, with the current directory before a relative one."""
    found = path_of(path)
    return found if is_bucket(path) else found.absolute()


def split(path: GivenPath) -> tuple[str, str, str]:
    """Returns the scheme ("gs" or "s3"), the bucket and the key of a path in a bucket.

    Raises:
      UserError: the path names no bucket.
    """
    text = os.fspath(path)
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise UserError(f"{text}: the name of a bucket is missing, as in {scheme}://bucket/run")
    return scheme, bucket, key.strip("/")
