"""Where the user's computer keeps what can be made again."""

from __future__ import annotations

import os


def directory(name: str, given: str | None = None) -> str:
    """Returns `given`, or else lingvo_gshard/<name> in $XDG_CACHE_HOME or ~/.cache."""
    if given:
        return os.path.expanduser(given)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "lingvo_gshard", name)
