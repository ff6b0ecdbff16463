"""Directories for files that can be recreated, such as compiled programs."""

from __future__ import annotations

import os


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
