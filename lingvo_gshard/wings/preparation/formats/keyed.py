"""Readers of messages with a file for each language: .arb of Flutter, .properties of Java, .sgm.

.arb: https://github.com/google/app-resource-bundle/wiki. .properties:
https://docs.oracle.com/en/java/javase/21/docs/api/java.base/java/util/Properties.html.
.sgm is the format of the test sets of WMT until 2020; units.py reads those since.
"""

from __future__ import annotations

import abc
import html
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lingvo_gshard.core import UserError, atomic
from lingvo_gshard.data import compression
from lingvo_gshard.wings.preparation.formats import units
from lingvo_gshard.wings.preparation.formats.units import Unit

BRANCHES = "a message that depends on a number or a choice"
_CODE = re.compile(r"[a-z]{2,3}(?:[_-][A-Za-z0-9]{2,8})*")
_SEPARATOR = re.compile(r"[._-]")
# Translators find explanations of the messages under this code.
_NO_LANGUAGES = ("qqq",)


class Message(NamedTuple):
    """A message of one language at `line`. `unusable` says why it is left out; "": it is used."""

    line: int
    text: str
    unusable: str = ""


class NamedFile(NamedTuple):
    """A file whose name says its language, "" for none, and `stem`, which all languages share."""

    stem: str
    language: str


class KeyedReader(units.BaseUnitReader):
    """Base of readers of files that give each message a key. Each file is of one language.

    Messages are paired by key with the messages of the file in the target language, which has the
    same name but for the language. A file in the target language gives no rows.
    """

    files_help = "a file or a directory of them, a glob, or a list of them."

    def named(self, path: str) -> list[NamedFile]:
        """Returns what the name of a file may say, the longest language first.

        The name alone does not tell whether app_de is in German, or in a dialect of "app".
        """
        plain = compression.without_suffix(path)
        ending = next((ending for ending in self.endings if plain.endswith(ending)), None)
        if ending is None:
            return []
        plain = plain.removesuffix(ending)
        first = plain.rfind("/") + 1
        starts = [found.end() for found in _SEPARATOR.finditer(plain) if found.start() > first]
        splits = [(plain[:first], plain[first:])] + [(plain[: at - 1], plain[at:]) for at in starts]
        found = [NamedFile(stem, code) for stem, code in splits if _CODE.fullmatch(code)]
        return [*found, NamedFile(plain, "")]

    @abc.abstractmethod
    def messages(self, path: str, content: bytes) -> dict[str, Message]:
        """Returns key -> message of a file; ValueError if it is damaged."""

    def pair(self, path: str, siblings: Sequence[str] | None = None) -> tuple[str, str] | None:
        """Returns the language of a file and the file of its targets; None if it gives no rows.

        The targets are among `siblings`, by default all files in its directory; UserError if they
        are not.
        """
        wanted, splits = self.p.target_language, self.named(path)
        languages = [named.language for named in splits if named.language]
        if not languages or any(units.matches(code, wanted) for code in languages):
            return None
        targets = self._targets(_beside(path) if siblings is None else siblings)
        pairs = [(code, targets[stem]) for stem, code in splits if code and stem in targets]
        if not pairs:
            raise UserError(
                f"{path}: there is no file of its targets: the same name in the target language "
                f"{wanted!r} was expected"
            )
        language, target = pairs[0]
        is_read = not self.p.language or units.matches(language, self.p.language)
        return (language, target) if is_read and language not in _NO_LANGUAGES else None

    def _targets(self, files: Sequence[str]) -> dict[str, str]:
        """Returns the stem of a name -> the file of the targets.

        That is the file in the target language, or else one without a language, or else in a region
        of the target language.
        """
        wanted = self.p.target_language
        found: dict[str, tuple[tuple[bool, bool, str], str]] = {}
        for path in sorted(files):
            for stem, code in self.named(path):
                if not code or units.matches(code, wanted):
                    rank = code != wanted, bool(code), code
                    if stem not in found or rank < found[stem][0]:
                        found[stem] = rank, path
        return {stem: path for stem, (_, path) in found.items()}

    def _expand(self, pattern: str) -> list[str]:
        found = super()._expand(pattern)
        if found == [pattern]:
            if os.path.exists(pattern) and not self.pair(pattern):
                raise UserError(
                    f"{pattern}: it gives no rows: its name should end in a language and "
                    f"{' or '.join(self.endings)}, and not in the target language "
                    f"{self.p.target_language!r}, whose file is found by itself"
                )
            return found
        read, problems = [], {}
        for path in found:
            try:
                if self.pair(path):
                    read.append(path)
            except UserError as error:
                problems[path] = error
        if problems and not read:
            raise next(iter(problems.values()))
        for path, error in problems.items():
            self._file_notes[path] = f"not read: {error}"
        return read

    def _units(self, path: str) -> Iterator[Unit]:
        pair = self.pair(path)
        if pair is not None:
            yield from self.pair_units(path, *pair)

    def pair_units(self, path: str, language: str, target: str) -> Iterator[Unit]:
        """Yields the units of a file in a language, with the texts of the file of its targets."""
        sources, targets = self._parse(path), self._parse(target)
        if sources is None or targets is None:
            return
        for key, message in sources.items():
            unit = Unit(message.line, {language: message.text} if message.text.strip() else {})
            other = targets.get(key)
            if other is not None and other.text.strip():
                unit.texts[self.p.target_language] = other.text
                unit.unusable = message.unusable or other.unusable
            yield unit

    def _parse(self, path: str) -> dict[str, Message] | None:
        """Returns the messages of a file; None for one that is left out."""
        content = self._content(path)
        if content is None:
            return None
        try:
            return self.messages(path, content)
        except ValueError as error:
            # Its message says the line, if the format has one.
            self._bad(f"{path}:0", f"the file is no {self.endings[0]}", str(error))
            return None


def _beside(path: str) -> list[str]:
    directory = os.path.dirname(path)
    if directory and not os.path.isdir(directory):
        return []
    return [os.path.join(directory, name) for name in os.listdir(directory or ".")]


# Finds messages of ICU's MessageFormat that choose between texts.
_ICU_BRANCH = re.compile(r"\{[^{}]*,\s*(?:plural|select|selectordinal)\s*,")


class ArbReader(KeyedReader):
    """Reads .arb files of Flutter, such as app_de.arb beside app_en.arb.

    Messages that choose between texts by a number, such as plurals, are left out and counted.
    """

    endings = (".arb",)

    def messages(self, path: str, content: bytes) -> dict[str, Message]:
        del path
        text = content.decode("utf-8-sig")
        values = atomic.loads(text)
        if not isinstance(values, dict):
            raise ValueError("expected an object of JSON")
        lines = _lines_of_keys(text)
        return {
            key: Message(lines.get(key, 1), value, BRANCHES if _ICU_BRANCH.search(value) else "")
            for key, value in values.items()
            if isinstance(value, str) and not key.startswith("@")
        }


def _lines_of_keys(text: str) -> dict[str, int]:
    """Returns key -> the line of its first mention at the beginning of a line."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        match = re.match(r'[\s{]*"([^"\\]+)"\s*:', line)
        if match:
            found.setdefault(match[1], number)
    return found


_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_KEY = re.compile(r"((?:[^\\=:\s]|\\.)*)[ \t\f]*[=:]?[ \t\f]*", re.DOTALL)


class PropertiesReader(KeyedReader):
    r"""Reads .properties files of Java, such as messages_de.properties beside messages.properties.

    A file without a language in its name has the targets, unless there is one that names the target
    language. Files are UTF-8 or, if they are not, ISO-8859-1, as Java has it since version 9.
    """

    endings = (".properties",)

    def messages(self, path: str, content: bytes) -> dict[str, Message]:
        del path
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = content.decode("iso-8859-1")
        found: dict[str, Message] = {}
        for number, line in _logical_lines(text):
            match = _KEY.match(line)
            assert match is not None
            key, value = _unescaped(match[1], number), _unescaped(line[match.end() :], number)
            found[key] = Message(number, value)
        return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields (number, line) without comments, blank lines, and line ends after a backslash."""
    pieces: list[str] = []
    first = 0
    for number, line in enumerate(re.split("\r\n|\r|\n", text), start=1):
        line = line.lstrip(" \t\f")
        if not pieces and (not line or line[0] in "#!"):
            continue
        first = first if pieces else number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            pieces.append(line[:-1])
            continue
        yield first, "".join([*pieces, line])
        pieces = []
    if any(pieces):
        yield first, "".join(pieces)


def _unescaped(text: str, line: int) -> str:
    r"""Returns a text with its escapes, such as \u00e9, replaced; ValueError for a wrong one."""
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(lambda found: _escaped(found[1], line), text)
    # Characters beyond 16 bits are two escapes.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escaped(escape: str, line: int) -> str:
    if escape == "u":
        raise ValueError(f"line {line}: \\u without four hexadecimal digits")
    if len(escape) > 1:
        return chr(int(escape[1:], 16))
    return _ESCAPED.get(escape, escape)


# The end of a stem that says the side of a pair.
_SIDE = re.compile(r"-(?:src|ref)$")
_TAG = re.compile(r"<(/?)(doc|seg)\b([^>]*)>", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")


class SgmReader(KeyedReader):
    """Reads .sgm files of WMT, such as test-src.de.sgm, whose targets are in test-ref.en.sgm.

    Segments are paired by document and number.
    """

    endings = (".sgm", ".sgml")

    def named(self, path: str) -> list[NamedFile]:
        found = [one for one in super().named(path) if one.language]
        return [one._replace(stem=_SIDE.sub("", one.stem)) for one in found]

    def messages(self, path: str, content: bytes) -> dict[str, Message]:
        del path
        text = content.decode("utf-8-sig")
        found: dict[str, Message] = {}
        document, segment, begin = "", "", 0
        line, counted = 1, 0
        for tag in _TAG.finditer(text):
            line += text.count("\n", counted, tag.start())
            counted = tag.start()
            closes, name = tag[1], tag[2].lower()
            values = {each[1].lower(): each[2] or each[3] for each in _ATTRIBUTE.finditer(tag[3])}
            if name == "doc":
                document = "" if closes else values.get("docid", "")
            elif not closes:
                segment, begin = values.get("id", ""), tag.end()
            elif segment:
                key = f"{document}\n{segment}"
                # Segments of one translator only: the first one.
                inside = html.unescape(text[begin : tag.start()])
                found.setdefault(key, Message(line, " ".join(inside.split())))
                segment = ""
        if not found:
            raise ValueError("it has no segment <seg id=...>")
        return found
