"""Parser of compiled gettext catalogs (.mo) that checks every offset against the file's size.

Format: https://www.gnu.org/software/gettext/manual/html_node/MO-Files.html
"""

from __future__ import annotations

import codecs
import re
import struct
from typing import NamedTuple

import numpy as np

from lingvo_gshard.core.errors import UserError

_BYTE_ORDERS = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_HEADER_BYTES = 28
_MAJOR_REVISIONS = (0, 1)
_CHARSET = re.compile(r"charset=([\w.:-]+)")
# Templates of catalogs have this word in place of a character set.
_NO_CHARSET = "CHARSET"


class DamagedCatalogError(UserError):
    """A catalog is truncated or breaks the rules of its format."""


class Message(NamedTuple):
    """An entry of a catalog.

    Attributes:
      number: number of the entry after the header, counted from 1.
      singular: the message.
      plural: its plural; "" if it has none.
      forms: the translation: one form, or one for each plural form of the language.
    """

    number: int
    singular: str
    plural: str
    forms: list[str]


class Catalog(NamedTuple):
    """The content of a catalog.

    Attributes:
      headers: name -> value of the lines of its header.
      messages: the entries but for the header.
    """

    headers: dict[str, str]
    messages: list[Message]


def parse(content: bytes) -> Catalog:
    """Returns the content of a .mo file of either byte order.

    Text is decoded by the character set that the header names, else as UTF-8.

    Raises:
      DamagedCatalogError: an offset or length points past the end of the file, or the file is no
        .mo file of a known revision.
      UnicodeDecodeError: text is not in the catalog's character set.
    """
    originals, translations = _strings(content)
    headers: dict[str, str] = {}
    if originals and not originals[0]:
        headers = parse_headers(translations[0].decode("utf-8", "replace"))
    charset = charset_of(headers)
    messages: list[Message] = []
    for original, translation in zip(originals, translations, strict=True):
        if not original:
            continue
        text = original.decode(charset)
        # The context comes first, ended by U+0004.
        singular, _, plural = text[text.find("\x04") + 1 :].partition("\0")
        forms = translation.decode(charset)
        messages.append(
            Message(len(messages) + 1, singular, plural, forms.split("\0") if plural else [forms])
        )
    return Catalog(headers, messages)


def parse_headers(text: str) -> dict[str, str]:
    """Returns name -> value of the lines `name: value` of a catalog's header."""
    lines = (line.partition(":") for line in text.split("\n") if line)
    return {name: value.strip() for name, _, value in lines}


def charset_of(headers: dict[str, str]) -> str:
    """Returns the character set that a catalog's header names, "utf-8" if it names none.

    Raises:
      DamagedCatalogError: the character set is unknown.
    """
    found = _CHARSET.search(headers.get("Content-Type", ""))
    if not found or found[1] == _NO_CHARSET:
        return "utf-8"
    try:
        # Codecs such as base64 are known, but no character sets.
        " ".encode(found[1])
        return codecs.lookup(found[1]).name
    except LookupError:
        raise DamagedCatalogError(f"its character set {found[1]!r} is unknown") from None


def _strings(content: bytes) -> tuple[list[bytes], list[bytes]]:
    """Returns the messages and their translations."""
    size = len(content)
    order = _BYTE_ORDERS.get(content[:4])
    if order is None:
        raise DamagedCatalogError(
            f"it is no .mo file: it starts with {content[:4]!r}" if size else "the file is empty"
        )
    if size < _HEADER_BYTES:
        raise DamagedCatalogError(f"truncated: {size} bytes, but its header has {_HEADER_BYTES}")
    header = struct.unpack(f"{order}6I", content[4:_HEADER_BYTES])
    revision, count, originals, translations, hash_size, hash_table = header
    if revision >> 16 not in _MAJOR_REVISIONS:
        raise DamagedCatalogError(f"its format has the unknown revision {revision >> 16}")
    _check_end(hash_table + 4 * hash_size if hash_size else 0, size, "the hash table")
    return (
        _table(content, order, count, originals, "message"),
        _table(content, order, count, translations, "translation"),
    )


def _table(content: bytes, order: str, count: int, begin: int, what: str) -> list[bytes]:
    """Returns the strings of one table of (length, offset)."""
    _check_end(begin + 8 * count, len(content), f"the table of {what}s")
    table = np.frombuffer(content, f"{order}u4", 2 * count, begin).reshape(count, 2)
    lengths, begins = table.astype(np.int64).T
    ends = begins + lengths
    if count:
        # A NUL that does not count towards the length follows each string.
        last = int(ends.argmax())
        _check_end(int(ends[last]) + 1, len(content), f"{what} {last + 1} of {count}")
        ended = np.frombuffer(content, np.uint8)[ends] == 0
        if not ended.all():
            wrong = int(ended.argmin()) + 1
            raise DamagedCatalogError(f"{what} {wrong} of {count} does not end with a NUL byte")
        if int(lengths.sum()) > len(content):
            raise DamagedCatalogError(f"its {what}s overlap: together they exceed the file")
    pairs = zip(begins.tolist(), ends.tolist(), strict=True)
    return [content[begin:end] for begin, end in pairs]


def _check_end(end: int, size: int, what: str) -> None:
    if end > size:
        raise DamagedCatalogError(
            f"truncated: {what} ends at byte {end:,}, but the file has {size:,} bytes"
        )
