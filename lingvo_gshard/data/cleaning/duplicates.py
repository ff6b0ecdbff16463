"""Exact duplicates: rows with the same language and texts."""

import hashlib

from lingvo_gshard.data.sources.row import Row

REASON = "a duplicate"
_KEY_BYTES = 16


def key(row: Row) -> bytes:
    """Returns a hash of 16 bytes. Exact duplicates share it; in practice, different rows do not.

    Rows can be compared in parts: each part takes the rows whose keys are in one range.
    """
    text = f"{row.language}\0{row.source}\0{row.target}"
    # Lone surrogates cannot be written as UTF-8 otherwise.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()


class Seen:
    """Remembers rows, by their keys."""

    def __init__(self):
        self._keys: set[bytes] = set()

    def has(self, row: Row) -> bool:
        """Returns whether an equal row was asked about before, and remembers this one."""
        before = len(self._keys)
        self._keys.add(key(row))
        return len(self._keys) == before
