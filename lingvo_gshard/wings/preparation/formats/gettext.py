"""Reader of gettext catalogs: messages of translated programs.

Format: https://www.gnu.org/software/gettext/manual/html_node/MO-Files.html
"""

from __future__ import annotations

import codecs
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import polib

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.data import Row, excerpt, readers

_BYTE_ORDERS = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_HEADER_BYTES = 28
_MAJOR_REVISIONS = (0, 1)
_CHARSET = re.compile(r"charset=([\w.:-]+)")
# Templates of catalogs have this word in place of a character set.
_NO_CHARSET = "CHARSET"


class DamagedCatalogError(UserError):
    """A catalog is truncated or breaks the rules of its format."""


# Headers of a catalog, name -> value, and its other entries. In a .mo file, the number of an entry
# after the header, counted from 1, stands in place of a line.
Catalog: TypeAlias = tuple[Mapping[str, str], Sequence[polib.POEntry]]


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
        lines = translations[0].decode("utf-8", "replace").split("\n")
        parts = (line.partition(":") for line in lines if line)
        headers = {name: value.strip() for name, _, value in parts}
    charset = charset_of(headers)
    entries: list[polib.POEntry] = []
    for original, translation in zip(originals, translations, strict=True):
        if not original:
            continue
        text, translated = original.decode(charset), translation.decode(charset)
        # The context comes first, ended by U+0004.
        singular, _, plural = text[text.find("\x04") + 1 :].partition("\0")
        forms = dict(enumerate(translated.split("\0"))) if plural else {}
        entries.append(
            polib.POEntry(
                msgid=singular,
                msgid_plural=plural,
                msgstr=translated,
                msgstr_plural=forms,
                linenum=len(entries) + 1,
            )
        )
    return headers, entries


def charset_of(headers: Mapping[str, str]) -> str:
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


_END = r"(?:[_-][A-Za-z0-9]{2,8})*(?:@[A-Za-z]+)?"
_CODE = rf"([a-z]{{2,3}}{_END})"
# Nothing but languages has a directory LC_MESSAGES, so longer codes are codes there.
_DIRECTORY = re.compile(
    rf"/([a-z]{{2,8}}{_END})/LC_MESSAGES/[^/]+$|/(?:po|locales?)/{_CODE}/[^/]+$"
)
_FILE = re.compile(rf"/{_CODE}\.[mp]o$")
# A line of a .po file that starts a string, and one whose string ends in the same line.
_STARTS_STRING = re.compile(r'\s*(?:#~\s*)?(?:msg[a-z_]+(?:\[\d+\])?\s*)?"')
_WHOLE_STRING = re.compile(_STARTS_STRING.pattern + r'(?:[^"\\]|\\.)*"\s*$')
_CONTENT_TYPE = re.compile(rb'"Content-Type:([\x20-\x7e]*?)(?:\\n)?"')
_KEYWORD = re.compile(r"\s*(?:#~\s*)?(msg[a-z_]+)")

FUZZY = "a fuzzy catalog entry"
OBSOLETE = "an obsolete catalog entry"
UNTRANSLATED = "an untranslated catalog entry"
TARGET_LANGUAGE = "an entry of a catalog in the target language"
DAMAGED = "damaged catalog"


class GettextReader(readers.FileReader):
    """Reads .po and .mo catalogs: a message is the target, its translation is the source.

    The language is taken from the directory (`de/LC_MESSAGES/x.po`, `po/de/x.mo`), else from the
    catalog's Language header, else from the file's name (`de.po`).

    Fuzzy, obsolete and untranslated entries are left out and counted. An entry with a plural gives
    two rows, one of the singulars and one of the plurals' last forms. `Row.line` is the entry's
    line in a .po file and its number in a .mo file. A catalog that is truncated or damaged is bad
    as a whole.
    """

    files_help = "a catalog or a directory of catalogs, a glob, or a list of them."
    endings = (".po", ".mo")

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "target_language",
            "en",
            "Language of the messages themselves. Catalogs in it, or in a variant such as en_GB, "
            "are left out.",
        )
        p.define("language", "", "Language of catalogs that name none; '': they are bad rows.")
        return p

    def _read_file(self, path: str) -> Iterator[Row]:
        catalog = self._parse(path)
        if catalog is None:
            return
        headers, entries = catalog
        language = _language(path, headers) or self.p.language
        if not language:
            self._bad(f"{path}:1", "the catalog's language is neither in its path nor its header")
            return
        is_target = re.split("[_@-]", language)[0] == self.p.target_language
        for entry in entries:
            pairs, line = _pairs(entry), entry.linenum or 0
            reason = _unused(entry, pairs, is_target)
            if reason:
                self._leave_out(reason, f"{path}:{line}: {excerpt(entry.msgid)}")
                continue
            for source, target in pairs:
                yield Row(language, source, target, path, line)

    def _parse(self, path: str) -> Catalog | None:
        """Returns the content of a file; None for one that is left out."""
        content = self._content(path)
        if content is None:
            return None
        try:
            return parse(content) if path.endswith(".mo") else _parse_po(path, content)
        except UnicodeDecodeError as error:
            line = 0 if path.endswith(".mo") else content.count(b"\n", 0, error.start) + 1
            self._bad(f"{path}:{line}", f"not {error.encoding.upper()}", f"byte {error.start}")
        except (OSError, DamagedCatalogError) as error:
            found = re.search(r"\(line (\d+)\)", str(error))
            detail = re.sub(r" in po file .* \(line \d+\)| \(line \d+\)", "", str(error))
            self._bad(f"{path}:{found[1] if found else 0}", DAMAGED, detail)
        return None


def _parse_po(path: str, content: bytes) -> Catalog:
    declared = _CONTENT_TYPE.search(content)
    charset = charset_of({"Content-Type": declared[1].decode("utf-8")} if declared else {})
    _check_strings(content.decode(charset))
    catalog = polib.pofile(path, encoding=charset)
    return catalog.metadata, catalog


def _check_strings(text: str) -> None:
    """Raises DamagedCatalogError for damage of a .po file that polib ignores."""
    keyword = ""
    for number, line in enumerate(re.split("\r\n|\r|\n", text), start=1):
        if "\0" in line:
            raise DamagedCatalogError(f"NUL bytes (line {number})")
        if not _STARTS_STRING.match(line):
            continue
        if not _WHOLE_STRING.match(line):
            raise DamagedCatalogError(f"a string without an end (line {number})")
        if found := _KEYWORD.match(line):
            keyword = found[1]
    if keyword not in ("", "msgstr"):
        raise DamagedCatalogError(f"it ends after a {keyword} without msgstr (line {number})")


def _language(path: str, headers: Mapping[str, str]) -> str:
    path = os.path.abspath(path).replace(os.sep, "/")
    if match := _DIRECTORY.search(path):
        return match[1] or match[2]
    match = _FILE.search(path)
    return headers.get("Language", "").strip() or (match[1] if match else "")


def _unused(entry: polib.POEntry, pairs: list[tuple[str, str]], is_target: bool) -> str:
    """Returns why an entry is left out; "" if it is used."""
    if is_target:
        return TARGET_LANGUAGE
    if entry.obsolete:
        return OBSOLETE
    # msgfmt leaves fuzzy entries out of .mo files.
    if entry.fuzzy:
        return FUZZY
    return "" if pairs else UNTRANSLATED


def _pairs(entry: polib.POEntry) -> list[tuple[str, str]]:
    if not entry.msgid_plural:
        pairs = [(entry.msgstr, entry.msgid)]
    else:
        forms = [form for _, form in sorted(entry.msgstr_plural.items())]
        pairs = [(form, entry.msgid_plural) for form in forms[-1:]]
        if len(forms) > 1:
            pairs.insert(0, (forms[0], entry.msgid))
    return [(source, target) for source, target in pairs if source]
