"""Reader of the translations of Qt programs: .ts, which people edit, and .qm, which programs read.

.ts: https://doc.qt.io/qt-6/linguist-ts-file-format.html. .qm: qttools, linguist/shared/qm.cpp.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping

from lingvo_gshard.core import UserError
from lingvo_gshard.data import compression
from lingvo_gshard.wings.preparation.formats import units
from lingvo_gshard.wings.preparation.formats.gettext import OBSOLETE
from lingvo_gshard.wings.preparation.formats.units import Unit

NO_MESSAGE = "a message whose text is not in the file"
_NO_TS = "the file is no .ts file of Qt"
_DAMAGED = "damaged .qm file"
# Language of messages if a file does not say it, and is itself in the language of the targets.
_USUAL = "en"
_CODE = re.compile(r"[_.-]([a-z]{2,3}(?:[_-][A-Za-z0-9]{2,8})*(?:@[A-Za-z]+)?)\.(?:ts|qm)$")
# Between variants of a translation that have different lengths.
_VARIANT = "\x9c"


class DamagedQmError(UserError):
    """A .qm file is truncated or breaks the rules of its format."""


class QtReader(units.BaseUnitReader):
    """Reads .ts and .qm files, plain or .bz2, .gz, .xz or .zst, of programs that use Qt.

    A message and its translation are a row in one direction or the other, as `target_language`
    says. Of a plural, the last form is taken; of variants of different lengths, the first. Messages
    are in the language that a .ts file names, else in the language of the targets. Unfinished,
    obsolete and untranslated messages are left out and counted. The line of a row of a .qm file is
    the number of its message.
    """

    files_help = "a .ts or .qm file or a directory of them, a glob, or a list of them."
    endings = (".ts", ".qm")

    def _units(self, path: str) -> Iterator[Unit]:
        named = _CODE.search(compression.without_suffix(path))
        language = named[1] if named else ""
        if compression.without_suffix(path).endswith(".qm"):
            yield from self._qm_units(path, language)
        else:
            parser = _TsParser(language, self.p.target_language)
            yield from self._xml_units(path, parser, _NO_TS)

    def _qm_units(self, path: str, language: str) -> Iterator[Unit]:
        content = self._content(path)
        if content is None:
            return
        try:
            stated, messages = parse_qm(content)
        except DamagedQmError as error:
            self._bad(f"{path}:0", _DAMAGED, str(error))
            return
        language = stated or language
        if not language:
            self._bad(f"{path}:0", "neither the file nor its name says its language")
            return
        of_messages = _language_of_messages(language, self.p.target_language)
        for number, (text, translation) in enumerate(messages, start=1):
            if not text:
                self._leave_out(NO_MESSAGE, f"{path}:{number}")
                continue
            unit = Unit(number, {of_messages: text})
            if translation:
                unit.texts.setdefault(language, translation)
            yield unit


def _language_of_messages(language: str, target: str) -> str:
    """Returns the language of messages whose file says only the language of their translations."""
    return _USUAL if units.matches(language, target) else target


class _TsParser(units.XmlParser):
    """Parses .ts files."""

    def __init__(self, language: str, target: str):
        super().__init__()
        self._language, self._target = language, target
        self._of_messages = ""
        self._unit: Unit | None = None
        # The element that is read: "source" or "translation"; "" for neither.
        self._side = ""
        self._pieces: list[str] = []
        # The forms of a plural, and the variants of different lengths of a form.
        self._forms: list[str] = []
        self._variants: list[str] = []

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        if name == "TS":
            self._language = attributes.get("language") or self._language
            usual = _language_of_messages(self._language, self._target)
            self._of_messages = attributes.get("sourcelanguage") or usual
        elif name == "message":
            self._unit = Unit(self._parser.CurrentLineNumber)
        elif self._unit is None:
            return
        elif name in ("source", "translation"):
            self._side, self._pieces, self._forms, self._variants = name, [], [], []
            kind = attributes.get("type", "")
            if kind:
                self._unit.unusable = units.UNFINISHED if kind == "unfinished" else OBSOLETE
        elif name in ("numerusform", "lengthvariant"):
            self._pieces = []
        elif name == "byte" and self._side:
            # A character that XML cannot have.
            self._pieces.append(_character(attributes.get("value", "")))

    def _end(self, name: str) -> None:
        if name == "message" and self._unit is not None:
            self._found.append(self._unit)
            self._unit = None
        elif name == "lengthvariant":
            self._variants.append("".join(self._pieces))
        elif name == "numerusform":
            self._forms.append(self._text())
        elif name in ("source", "translation") and self._side and self._unit is not None:
            text = self._forms[-1] if self._forms else self._text()
            language = self._of_messages if name == "source" else self._language
            if text.strip():
                self._unit.texts.setdefault(language, text.strip())
            self._side = ""

    def _text(self) -> str:
        """Returns the text of a form: the first of its variants."""
        variants, self._variants = self._variants, []
        return variants[0] if variants else "".join(self._pieces).split(_VARIANT)[0]

    def _add(self, text: str) -> None:
        if self._side:
            self._pieces.append(text)


def _character(value: str) -> str:
    """Returns the character of a number such as "27" or "x1b"; "" if it is none."""
    digits, base = (value[1:], 16) if value.startswith("x") else (value, 10)
    try:
        return chr(int(digits, base))
    except (ValueError, OverflowError):
        return ""


_MAGIC = bytes.fromhex("3cb86418caef9c95cd211cbf60a1bddd")
_HASHES, _MESSAGES, _LANGUAGE = 0x42, 0x69, 0xA7
# Fields of a message: a byte says which, and all but _END and _HASH begin with their length.
_END, _WIDE_SOURCE, _TRANSLATION, _WIDE_CONTEXT, _HASH, _SOURCE, _CONTEXT, _COMMENT = range(1, 9)
_ABSENT = 0xFFFFFFFF


def parse_qm(content: bytes) -> tuple[str, list[tuple[str, str]]]:
    """Returns the language that a .qm file names, or "", and its (message, translation) pairs.

    Either of a pair is "" if the file does not have it.

    Raises:
      DamagedQmError: the file is truncated, or no .qm file.
    """
    if not content.startswith(_MAGIC):
        raise DamagedQmError(f"it starts with {content[:8]!r}" if content else "the file is empty")
    sections: dict[int, bytes] = {}
    place = len(_MAGIC)
    while place + 5 <= len(content):
        tag, size = struct.unpack_from(">BI", content, place)
        place += 5
        if place + size > len(content):
            raise DamagedQmError(f"truncated: a part ends at byte {place + size:,}")
        sections.setdefault(tag, content[place : place + size])
        place += size
    # Files such as qt_de.qm only name other files, and have no messages.
    hashes = sections.get(_HASHES, b"")
    if len(hashes) % 8:
        raise DamagedQmError("its table of messages ends within an entry")
    # The table is ordered by hash; the messages themselves are ordered by their texts.
    begins = sorted({offset for _, offset in struct.iter_unpack(">II", hashes)})
    messages = sections.get(_MESSAGES, b"")
    language = sections.get(_LANGUAGE, b"").decode("ascii", "replace")
    try:
        return language, [_message(messages, begin) for begin in begins]
    except (struct.error, IndexError):
        raise DamagedQmError("a message points past the end of the file") from None


def _message(content: bytes, place: int) -> tuple[str, str]:
    """Returns the message and the translation that begin at a place.

    Raises:
      IndexError, struct.error: it ends after the file.
      DamagedQmError: a field is unknown, or no text.
    """
    source, forms = "", []
    while (tag := content[place]) != _END:
        place += 1
        if tag == _HASH:
            place += 4
            continue
        if tag not in range(_END, _COMMENT + 1):
            raise DamagedQmError(f"a message has the unknown field {tag}")
        (size,) = struct.unpack_from(">I", content, place)
        place += 4
        size = 0 if size == _ABSENT else size
        if place + size > len(content):
            raise IndexError
        value = content[place : place + size]
        place += size
        if tag in (_TRANSLATION, _WIDE_SOURCE):
            text = _decoded(value, "utf-16-be")
            source, forms = (text, forms) if tag == _WIDE_SOURCE else (source, [*forms, text])
        elif tag == _SOURCE:
            source = _decoded(value, "utf-8")
    translation = forms[-1].split(_VARIANT)[0] if forms else ""
    return source.strip(), translation.strip()


def _decoded(value: bytes, encoding: str) -> str:
    try:
        return value.decode(encoding)
    except UnicodeDecodeError as error:
        raise DamagedQmError(f"a text is not {encoding.upper()}: byte {error.start}") from None
