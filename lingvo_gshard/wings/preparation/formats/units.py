"""Readers of XML: translation memories of TMX 1.4 and XLIFF 1.2 and 2, and test sets of WMT.

TMX: https://www.gala-global.org/tmx-14b. XLIFF: https://docs.oasis-open.org/xliff. WMT since 2021:
https://github.com/wmt-conference/wmt-format-tools.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import NoReturn
from xml.parsers import expat

from lingvo_gshard.core import Params
from lingvo_gshard.data import Row, readers

NO_TARGET = "a unit without a text in the target language"
NO_SOURCE = "a unit without a text in another language"
UNFINISHED = "a translation that is marked as unfinished"
_DAMAGED = "the file is no TMX or XLIFF"
_NO_WMT = "the file is no test set of WMT"
TEST_SUITE = "a segment of a test suite"
_LANGUAGE = "http://www.w3.org/XML/1998/namespace lang"
# Elements that are a unit: in TMX, in XLIFF 1.2 and in XLIFF 2.
_UNITS = frozenset(("tu", "trans-unit", "segment"))
# Kind of the unit that has a catalog's header (https://docs.translatehouse.org, po2xliff).
_HEADER = "x-gettext-domain-header"
# Elements whose content is codes of a document, no text.
_CODES = frozenset(("bpt", "ept", "it", "ph", "ut", "x", "bx", "ex", "sc", "ec", "sm", "em"))
# States of a translation that nobody has finished.
_UNFINISHED = ("new", "needs-", "initial")


@dataclasses.dataclass
class Unit:
    """A sentence in several languages.

    `line` is where it begins, `texts` has language -> text. `unusable` says why the file advises
    against the translation; "": it may be used.
    """

    line: int
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    unusable: str = ""


class XmlParser(abc.ABC):
    """Parses XML that is fed in blocks, and collects units. Only one unit is in memory.

    Entities that a file defines itself are refused: they may stand for more text than there is
    memory.
    """

    def __init__(self):
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._add
        parser.EntityDeclHandler = self._refuse_entity
        self._parser = parser
        self._found: list[Unit] = []

    def feed(self, block: bytes, is_last: bool = False) -> list[Unit]:
        """Returns the units that end within a block of the file.

        Raises:
          expat.ExpatError: the file is damaged, or is no XML.
        """
        self._parser.Parse(block, is_last)
        found, self._found = self._found, []
        return found

    @abc.abstractmethod
    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Takes the start of an element, whose name follows its namespace and a space."""

    @abc.abstractmethod
    def _end(self, name: str) -> None:
        """Takes the end of an element."""

    @abc.abstractmethod
    def _add(self, text: str) -> None:
        """Takes text."""

    def _refuse_entity(self, name: str, *_: object) -> None:
        self._refuse(f"it defines the entity {name}, which is not supported")

    def _refuse(self, message: str) -> NoReturn:
        error = expat.ExpatError(message)
        error.lineno = self._parser.CurrentLineNumber
        raise error


class UnitParser(XmlParser):
    """Parses TMX, and XLIFF 1.2 and 2."""

    def __init__(self):
        super().__init__()
        # Local names of the elements that are open.
        self._open: list[str] = []
        self._languages = {"source": "", "target": "", "seg": ""}
        self._unit: Unit | None = None
        # The pieces of the text that is read; None between texts.
        self._pieces: list[str] | None = None
        self._depth = self._codes = 0

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        local = name.rpartition(" ")[2]
        parent = self._open[-1] if self._open else ""
        self._open.append(local)
        if self._pieces is not None:
            self._codes += local in _CODES
            return
        if local in _UNITS and attributes.get("restype") != _HEADER:
            self._unit = Unit(self._parser.CurrentLineNumber)
            self._note_state(attributes)
        elif local == "tuv":
            self._languages["seg"] = attributes.get(_LANGUAGE) or attributes.get("lang", "")
        elif local in ("xliff", "file"):
            self._note_languages(attributes)
        is_text = local == "seg" or (local in ("source", "target") and parent in _UNITS)
        if is_text and self._unit is not None:
            self._note_state(attributes)
            self._pieces, self._depth = [], len(self._open)

    def _note_languages(self, attributes: Mapping[str, str]) -> None:
        """Takes the languages of XLIFF: of a file in version 1.2, of the whole in version 2."""
        for side, names in (
            ("source", ("source-language", "srcLang")),
            ("target", ("target-language", "trgLang")),
        ):
            given = next((attributes[name] for name in names if name in attributes), "")
            self._languages[side] = given or self._languages[side]

    def _note_state(self, attributes: Mapping[str, str]) -> None:
        if self._unit is not None and attributes.get("state", "").startswith(_UNFINISHED):
            self._unit.unusable = UNFINISHED

    def _end(self, name: str) -> None:
        local = self._open.pop()
        if self._pieces is not None and len(self._open) + 1 == self._depth:
            text, self._pieces, self._codes = "".join(self._pieces), None, 0
            if self._unit is not None and text.strip():
                self._unit.texts.setdefault(self._languages[local], text.strip())
        elif self._pieces is not None:
            self._codes -= local in _CODES
        elif local in _UNITS and self._unit is not None:
            self._found.append(self._unit)
            self._unit = None

    def _add(self, text: str) -> None:
        if self._pieces is not None and not self._codes:
            self._pieces.append(text)


class WmtParser(XmlParser):
    """Parses test sets of WMT: documents of a source, references and outputs of systems.

    A segment of a source belongs to the first reference with a segment of the same number.
    """

    def __init__(self):
        super().__init__()
        self._has_root = self._is_suite = False
        # Of the document that is open: number of a segment -> its unit.
        self._units: dict[str, Unit] = {}
        # Language and kind, "src" or "ref", of the text that is open; empty between them.
        self._language = self._kind = ""
        self._segment = ""
        self._pieces: list[str] = []

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        if not self._has_root and name not in ("dataset", "collection"):
            self._refuse(f"it begins with <{name}>; <dataset> was expected")
        self._has_root = True
        if name == "doc":
            self._units, self._is_suite = {}, "testsuite" in attributes
        elif name in ("src", "ref"):
            self._kind, self._language = name, attributes.get("lang", "")
        elif name == "seg" and self._kind:
            self._segment, self._pieces = attributes.get("id", ""), []
            if self._kind == "src":
                unusable = TEST_SUITE if self._is_suite else ""
                unit = Unit(self._parser.CurrentLineNumber, unusable=unusable)
                self._units.setdefault(self._segment, unit)

    def _end(self, name: str) -> None:
        if name == "seg":
            text = "".join(self._pieces).strip()
            if text and self._segment in self._units:
                self._units[self._segment].texts.setdefault(self._language, text)
            self._segment = ""
        elif name in ("src", "ref"):
            self._kind = ""
        elif name == "doc":
            self._found += self._units.values()

    def _add(self, text: str) -> None:
        if self._segment:
            self._pieces.append(text)


class BaseUnitReader(readers.FileReader):
    """Base of readers of units, which give one row for each language but the target's.

    Units that a file marks as unusable are left out and counted. Codes of languages match by their
    first part, too: `de` finds `de-DE`.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("target_language", "en", "Language of the targets.")
        p.define("language", "", "The only source language to read; '': all that are found.")
        return p

    @abc.abstractmethod
    def _units(self, path: str) -> Iterator[Unit]:
        """Yields the units of a file."""

    def _read_file(self, path: str) -> Iterator[Row]:
        for unit in self._units(path):
            yield from self._rows(unit, path)

    def _xml_units(self, path: str, parser: XmlParser, damaged: str) -> Iterator[Unit]:
        """Yields the units of a file; `damaged` says what is wrong with one that is no such XML."""
        try:
            for block in self._blocks(path):
                yield from parser.feed(block)
            yield from parser.feed(b"", is_last=True)
        except expat.ExpatError as error:
            self._bad(f"{path}:{error.lineno}", damaged, str(error))

    def _rows(self, unit: Unit, path: str) -> Iterator[Row]:
        wanted, texts = self.p.target_language, unit.texts
        place = f"{path}:{unit.line}"
        target = next((text for code, text in texts.items() if matches(code, wanted)), None)
        if unit.unusable:
            self._leave_out(unit.unusable, place)
            return
        if target is None:
            self._leave_out(NO_TARGET, f"{place}: it has {', '.join(texts) or 'no text'}")
            return
        others = {code: text for code, text in texts.items() if not matches(code, wanted)}
        if self.p.language:
            others = {c: text for c, text in others.items() if matches(c, self.p.language)}
        if not others:
            self._leave_out(NO_SOURCE, f"{place}: it has {', '.join(texts)}")
        for code, text in others.items():
            yield Row(code, text, target, path, unit.line)


class UnitReader(BaseUnitReader):
    """Reads TMX, and XLIFF 1.2 and 2, plain or .bz2, .gz, .xz or .zst.

    Codes within a text, such as tags of a document, are left out.
    """

    def _units(self, path: str) -> Iterator[Unit]:
        yield from self._xml_units(path, UnitParser(), _DAMAGED)


class WmtReader(BaseUnitReader):
    """Reads test sets of WMT since 2021, .xml, plain or .bz2, .gz, .xz or .zst.

    Outputs of systems, and references after the first one of a segment, are not read. Documents of
    test suites are left out and counted.
    """

    files_help = "a .xml file or a directory of them, a glob, or a list of them."
    endings = (".xml",)

    def _units(self, path: str) -> Iterator[Unit]:
        yield from self._xml_units(path, WmtParser(), _NO_WMT)


def matches(code: str, wanted: str) -> bool:
    """Returns whether a language's code is the wanted one, or one of its regions."""
    code, wanted = (each.casefold().replace("_", "-") for each in (code, wanted))
    return code == wanted or code.startswith(f"{wanted}-")
