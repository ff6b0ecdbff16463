"""Messages of agents, decoded once for all of them."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import atomic
from lingvo_gshard.wings.cluster.envelope import pack, unpack


class Messages:
    """Messages that were decoded once for all agents, which saves time of this process."""

    def __init__(self):
        """Knows none."""
        self._unpacked: dict[tuple[str, str, bytes], bytes] = {}
        self._decoded: dict[bytes, object] = {}

    def pack(self, secret: str, kind: str, name: str, content: bytes) -> bytes:
        """Returns what `envelope.pack` does."""
        packed = pack(secret, kind, name, content)
        self._forget(self._unpacked)
        self._unpacked[kind, name, packed] = content
        return packed

    def unpack(self, secret: str, kind: str, name: str, packed: bytes) -> bytes:
        """Returns what `envelope.unpack` does."""
        if (kind, name, packed) not in self._unpacked:
            self._forget(self._unpacked)
            self._unpacked[kind, name, packed] = unpack(secret, kind, name, packed)
        return self._unpacked[kind, name, packed]

    def decode(self, content: bytes, type_: type[Any]) -> object:
        """Returns what `atomic.decode` does."""
        if content not in self._decoded:
            self._forget(self._decoded)
            self._decoded[content] = atomic.decode(content, type_)
        return self._decoded[content]

    def _forget(self, known: dict) -> None:
        if len(known) > 20_000:
            known.clear()
