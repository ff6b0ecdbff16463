"""The common part of caches on disk: a digest that shows damage, and the time of the last use."""

from __future__ import annotations

import hashlib
import os
import pathlib

from lingvo_gshard.core.errors import UserError

_DIGEST_BYTES = hashlib.sha256().digest_size


def with_digest(content: bytes) -> bytes:
    """Returns what a file holds: the SHA-256 of its content, then the content."""
    return hashlib.sha256(content).digest() + content


def checked_content(file: bytes) -> bytes:
    """Returns the content of a file that `with_digest` made.

    Raises:
      UserError: the file is damaged.
    """
    digest, content = file[:_DIGEST_BYTES], file[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise UserError("its digest differs")
    return content


def last_used(path: pathlib.Path) -> float:
    """Returns when a file or directory was used last, by its modification time; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def directory(name: str, given: str | None = None) -> str:
    """Returns the cache directory of one kind of files.

    Args:
      name: Name of the directory below lingvo_gshard/ in $XDG_CACHE_HOME or ~/.cache.
      given: A directory that replaces it.
    """
    if given:
        return os.path.expanduser(given)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "lingvo_gshard", name)
