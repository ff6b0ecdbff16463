"""Envelope: the signature on what agents and processes of a job tell each other.

A signature covers the kind of a message, the name that it has, and its content. A stranger who
copies a message to another name, or shows it as one of another kind, is therefore refused. So is
who changes a byte. The name and the content say the order: a round, a number of a sign or a record,
a part of a snapshot.

The key is the job's secret, which is never sent.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

# Kinds of messages.
SIGN, RECORD, PART = "sign", "record", "part"


class ForeignError(ValueError):
    """A message is not signed by this job for the name that it has."""


class Envelope:
    """Signs a content block by block."""

    def __init__(self, secret: str, kind: str, *names: str):
        """Begins with an empty content.

        Args:
          kind: SIGN, RECORD or PART, or a step of a handshake.
          names: texts that the signature covers besides the content, such as the name of a file.
        """
        # As JSON, so that no two lists of texts are signed alike.
        self._digest = hmac.new(
            secret.encode(), msgspec.json.encode([kind, *names]), hashlib.sha256
        )

    def add(self, block: bytes | memoryview) -> None:
        """Adds the next bytes of the content."""
        self._digest.update(block)

    @property
    def signature(self) -> str:
        """The signature of the content so far."""
        return self._digest.hexdigest()


def sign(secret: str, kind: str, *texts: str) -> str:
    """Returns a signature of texts that only those who know the secret can make."""
    return Envelope(secret, kind, *texts).signature


def are_equal(given: str, expected: str) -> bool:
    """Compares signatures in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def pack(secret: str, kind: str, name: str, content: bytes) -> bytes:
    """Returns a content with its signature, as a file has it.

    Args:
      kind: SIGN or RECORD.
      name: what tells the message from others of its kind.
    """
    envelope = Envelope(secret, kind, name)
    envelope.add(content)
    return content + b"\n" + envelope.signature.encode() + b"\n"


def unpack(secret: str, kind: str, name: str, packed: bytes) -> bytes:
    """Returns the content of a file that `pack` made with the same arguments.

    Raises:
      ForeignError: it was made with others, or not by `pack`.
    """
    content, _, signature = packed.removesuffix(b"\n").rpartition(b"\n")
    envelope = Envelope(secret, kind, name)
    envelope.add(content)
    if not hmac.compare_digest(signature, envelope.signature.encode()):
        raise ForeignError(f"no {kind} of {name} that this job has signed")
    return content
