"""The cache of decoders: where its entries are, and which of them stay."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil

from lingvo_gshard.core.files.cached import last_used
from lingvo_gshard.inference.startup.entry import CacheEntry
from lingvo_gshard.inference.startup.fingerprint import fingerprint

# Entries used longest ago are removed when all together have more bytes.
MOST_BYTES = 8 * 2**30
# Nothing else in the directory is touched.
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")


def find_entry(directory: str, owner: object, content: object) -> CacheEntry:
    """Returns the entry of a model, which may not exist yet.

    Args:
      directory: the cache.
      owner: JSON values that name the run and how it is decoded. An owner has one entry.
      content: JSON values that all of the entry depends on.
    """
    name = f"{fingerprint(owner)}-{fingerprint(content)}"
    return CacheEntry(pathlib.Path(directory) / name)


def prune(entry: CacheEntry, most_bytes: int = MOST_BYTES) -> None:
    """Removes entries that nobody needs: older ones of the same owner, and those of deleted runs.

    If the others have too many bytes together, those used longest ago are removed, too.

    Args:
      entry: stays in any case.
      most_bytes: the largest size of all entries together.
    """
    owner = entry.path.name.partition("-")[0]
    others = []
    with contextlib.suppress(OSError):
        others = [p for p in entry.path.parent.iterdir() if _NAME.fullmatch(p.name)]
    total = _size(entry.path)
    for path in sorted(others, key=last_used, reverse=True):
        if path == entry.path:
            continue
        is_replaced = path.name.startswith(f"{owner}-")
        size = _size(path)
        if is_replaced or total + size > most_bytes or CacheEntry(path).is_stale:
            shutil.rmtree(path, ignore_errors=True)
        else:
            total += size


def _size(path: pathlib.Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in path.rglob("*"))
    return 0
