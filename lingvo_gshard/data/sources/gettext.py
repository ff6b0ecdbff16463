"""Reader of gettext catalogs: messages of translated programs."""

import os
import re
import struct
from collections.abc import Iterator

import polib

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.data.sources import readers
from lingvo_gshard.data.sources.row import Row

_CODE = r"([a-z]{2,3}(?:[_-][A-Za-z0-9]{2,8})*(?:@[A-Za-z]+)?)"
_DIRECTORY = re.compile(rf"/{_CODE}/LC_MESSAGES/[^/]+$|/(?:po|locales?)/{_CODE}/[^/]+$")
_FILE = re.compile(rf"/{_CODE}\.[mp]o$")

FUZZY = "a fuzzy catalog entry"
OBSOLETE = "an obsolete catalog entry"
UNTRANSLATED = "an untranslated catalog entry"
TARGET_LANGUAGE = "an entry of a catalog in the target language"


class GettextReader(readers.FileReader):
    """Reads .po and .mo catalogs: a message is the target, its translation is the source.

    The language is taken from the directory (`de/LC_MESSAGES/x.po`, `po/de/x.mo`), else from the
    catalog's Language header, else from the file's name (`de.po`).

    Fuzzy, obsolete and untranslated entries are left out and counted. An entry with a plural gives
    two rows, one of the singulars and one of the plurals' last forms. `Row.line` is the entry's
    line in a .po file and its number in a .mo file.
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

    def _read_file(self, path: str) -> Iterator[Row]:
        catalog = self._parse(path)
        if catalog is None:
            return
        language = _language(path, catalog)
        if not language:
            self._bad(f"{path}:1", "the catalog's language is neither in its path nor its header")
            return
        for number, entry in enumerate(catalog, start=1):
            line = getattr(entry, "linenum", number)
            reason = self._unused(entry, language)
            if reason:
                self._leave_out(reason, f"{path}:{line}: {reason}")
                continue
            for source, target in _pairs(entry):
                yield Row(language, source, target, path, line)

    def _unused(self, entry: polib.POEntry, language: str) -> str:
        if re.split("[_@-]", language)[0] == self.p.target_language:
            return TARGET_LANGUAGE
        if entry.obsolete:
            return OBSOLETE
        # msgfmt leaves fuzzy entries out of .mo files.
        if getattr(entry, "fuzzy", False):
            return FUZZY
        return "" if _pairs(entry) else UNTRANSLATED

    def _parse(self, path: str) -> polib.POFile | polib.MOFile | None:
        try:
            if path.endswith(".mo"):
                return polib.mofile(path, encoding="utf-8")
            with open(path, "rb") as file:
                content = file.read()
            content.decode("utf-8")
            return polib.pofile(path, encoding="utf-8")
        except FileNotFoundError:
            self._bad(f"{path}:0", "no such file")
        except UnicodeDecodeError as error:
            line = 0 if path.endswith(".mo") else content.count(b"\n", 0, error.start) + 1
            self._bad(f"{path}:{line}", "not UTF-8")
        except (OSError, struct.error) as error:
            found = re.search(r"\(line (\d+)\)", str(error))
            self._bad(f"{path}:{found[1] if found else 0}", "damaged catalog", str(error))
        return None


def _catalogs_below(directory: str) -> list[str]:
    return sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(directory)
        for name in names
        if name.endswith((".po", ".mo"))
    )


def _language(path: str, catalog: polib.POFile | polib.MOFile) -> str:
    path = os.path.abspath(path).replace(os.sep, "/")
    if match := _DIRECTORY.search(path):
        return match[1] or match[2]
    match = _FILE.search(path)
    return catalog.metadata.get("Language", "").strip() or (match[1] if match else "")


def _pairs(entry: polib.POEntry) -> list[tuple[str, str]]:
    if not entry.msgid_plural:
        pairs = [(entry.msgstr, entry.msgid)]
    else:
        forms = [entry.msgstr_plural[index] for index in sorted(entry.msgstr_plural)]
        pairs = [(form, entry.msgid_plural) for form in forms[-1:]]
        if len(forms) > 1:
            pairs.insert(0, (forms[0], entry.msgid))
    return [(source, target) for source, target in pairs if source]
