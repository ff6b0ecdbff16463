"""Reader of gettext catalogs: messages of translated programs."""

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

import polib

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.data.sources import mo, readers
from lingvo_gshard.data.sources.report import excerpt
from lingvo_gshard.data.sources.row import Row

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


class _Entry(NamedTuple):
    """An entry of a catalog: where it is, its message, its translation, and its marks."""

    line: int
    singular: str
    plural: str
    forms: list[str]
    is_fuzzy: bool = False
    is_obsolete: bool = False


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

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "target_language",
            "en",
            "Language of the messages themselves. Catalogs in it, or in a variant such as en_GB, "
            "are left out.",
        )
        return p

    def _expand(self, pattern: str) -> list[str]:
        paths = []
        for path in super()._expand(pattern):
            if os.path.isdir(path):
                paths += _catalogs_below(path)
            else:
                paths.append(path)
        return paths

    def _none_found(self, pattern: str) -> str:
        is_directory = os.path.isdir(os.path.expanduser(pattern))
        no_catalog = "there is no .po or .mo file in this directory"
        return no_catalog if is_directory else super()._none_found(pattern)

    def _read_file(self, path: str) -> Iterator[Row]:
        catalog = self._parse(path)
        if catalog is None:
            return
        headers, entries = catalog
        language = _language(path, headers)
        if not language:
            self._bad(f"{path}:1", "the catalog's language is neither in its path nor its header")
            return
        is_target = re.split("[_@-]", language)[0] == self.p.target_language
        for entry in entries:
            pairs = _pairs(entry)
            reason = _unused(entry, pairs, is_target)
            if reason:
                self._leave_out(reason, f"{path}:{entry.line}: {excerpt(entry.singular)}")
                continue
            for source, target in pairs:
                yield Row(language, source, target, path, entry.line)

    def _parse(self, path: str) -> tuple[dict[str, str], list[_Entry]] | None:
        """Returns the headers and entries of a catalog; None for one that is left out."""
        content = self._content(path)
        if content is None:
            return None
        try:
            return _parse_mo(content) if path.endswith(".mo") else _parse_po(path, content)
        except UnicodeDecodeError as error:
            line = 0 if path.endswith(".mo") else content.count(b"\n", 0, error.start) + 1
            self._bad(f"{path}:{line}", f"not {error.encoding.upper()}", f"byte {error.start}")
        except (OSError, mo.DamagedCatalogError) as error:
            found = re.search(r"\(line (\d+)\)", str(error))
            detail = re.sub(r" in po file .* \(line \d+\)| \(line \d+\)", "", str(error))
            self._bad(f"{path}:{found[1] if found else 0}", DAMAGED, detail)
        return None


def _parse_mo(content: bytes) -> tuple[dict[str, str], list[_Entry]]:
    catalog = mo.parse(content)
    return catalog.headers, [_Entry(*message) for message in catalog.messages]


def _parse_po(path: str, content: bytes) -> tuple[dict[str, str], list[_Entry]]:
    declared = _CONTENT_TYPE.search(content)
    charset = mo.charset_of({"Content-Type": declared[1].decode("utf-8")} if declared else {})
    _check_strings(content.decode(charset))
    catalog = polib.pofile(path, encoding=charset)
    entries = [
        _Entry(
            entry.linenum or 0,
            entry.msgid,
            entry.msgid_plural,
            [entry.msgstr_plural[index] for index in sorted(entry.msgstr_plural)]
            if entry.msgid_plural
            else [entry.msgstr],
            entry.fuzzy,
            bool(entry.obsolete),
        )
        for entry in catalog
    ]
    return catalog.metadata, entries


def _check_strings(text: str) -> None:
    """Checks a .po file for damage that polib ignores.

    Raises:
      DamagedCatalogError: a string or an entry has no end, or the text has NUL bytes.
    """
    keyword = ""
    for number, line in enumerate(re.split("\r\n|\r|\n", text), start=1):
        if "\0" in line:
            raise mo.DamagedCatalogError(f"NUL bytes (line {number})")
        if not _STARTS_STRING.match(line):
            continue
        if not _WHOLE_STRING.match(line):
            raise mo.DamagedCatalogError(f"a string without an end (line {number})")
        if found := _KEYWORD.match(line):
            keyword = found[1]
    if keyword not in ("", "msgstr"):
        raise mo.DamagedCatalogError(f"it ends after a {keyword} without msgstr (line {number})")


def _catalogs_below(directory: str) -> list[str]:
    return sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(directory)
        for name in names
        if name.endswith((".po", ".mo"))
    )


def _language(path: str, headers: dict[str, str]) -> str:
    path = os.path.abspath(path).replace(os.sep, "/")
    if match := _DIRECTORY.search(path):
        return match[1] or match[2]
    match = _FILE.search(path)
    return headers.get("Language", "").strip() or (match[1] if match else "")


def _unused(entry: _Entry, pairs: list[tuple[str, str]], is_target: bool) -> str:
    """Returns why an entry is left out; "" if it is used."""
    if is_target:
        return TARGET_LANGUAGE
    if entry.is_obsolete:
        return OBSOLETE
    # msgfmt leaves fuzzy entries out of .mo files.
    if entry.is_fuzzy:
        return FUZZY
    return "" if pairs else UNTRANSLATED


def _pairs(entry: _Entry) -> list[tuple[str, str]]:
    if not entry.plural:
        pairs = [(entry.forms[0], entry.singular)]
    else:
        pairs = [(form, entry.plural) for form in entry.forms[-1:]]
        if len(entry.forms) > 1:
            pairs.insert(0, (entry.forms[0], entry.singular))
    return [(source, target) for source, target in pairs if source]
