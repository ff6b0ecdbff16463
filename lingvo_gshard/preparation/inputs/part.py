"""Part: what is read of raw files as one piece of work."""

from __future__ import annotations

import msgspec


class Span(msgspec.Struct, frozen=True):
    """Bytes of a file.

    Attributes:
      path: the file.
      begin: the first byte.
      end: the byte after the last one; None for the file's end.
    """

    path: str
    begin: int = 0
    end: int | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work for one reader. Parts are numbered in the order of the sources.

    Attributes:
      number: number of the part, from 0.
      source: number of the source.
      spans: what is read: of one file, or of the source and the target file of Moses pairs.
      first_line: number of the first line.
      language: language of Moses pairs.
      bytes: number of stored bytes.
    """

    number: int
    source: int
    spans: list[Span]
    first_line: int = 1
    language: str = ""
    bytes: int = 0
