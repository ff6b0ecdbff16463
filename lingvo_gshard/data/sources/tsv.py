"""Readers of tab-separated rows of language, source and target: files, and the own corpus."""

import importlib.resources
import re
from collections.abc import Iterator, Sequence

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.data.sources import readers
from lingvo_gshard.data.sources.row import Row

_COLUMNS = 3
# Codes of any convention, but no text: one word without white space.
_CODE = re.compile(r"\S{1,40}")
# Names of the column of languages in a row that names columns. None is a code of a language.
_HEADERS = frozenset(("lang", "language", "language_code", "locale", "source_language", "src_lang"))
_SIDES = frozenset(("source", "src", "target", "tgt", "trg"))
HEADER = "a row with the names of columns"


class _TsvLines(readers.Reader):
    """Reads rows of three columns and reports rows that have another number of them.

    Attributes:
      language: language of rows of two columns; "": no row has two.
    """

    language = ""

    def _read_file(self, path: str) -> Iterator[Row]:
        # Most rows have the code of a row before, so that each code is checked once.
        codes: set[str] = set()
        for number, line in enumerate(self._lines(path), self.first_line):
            if line is None:
                continue
            columns = line.split("\t")
            if number == 1 and names_columns(columns):
                self._leave_out(HEADER, f"{path}:1: {line[:80]!r}")
                continue
            if self.language and len(columns) == _COLUMNS - 1:
                columns.insert(0, self.language)
            if len(columns) != _COLUMNS:
                self._bad(f"{path}:{number}", "wrong number of columns", _columns(line))
                continue
            language = columns[0]
            if language not in codes:
                if not _CODE.fullmatch(language):
                    self._bad(
                        f"{path}:{number}",
                        "no language code",
                        f"the first column is {language[:40]!r}, expected a code such as de, pt_BR "
                        "or sr@latin; the second is the source, the third the target",
                    )
                    continue
                codes.add(language)
            language, source, target = columns
            yield Row(language, source, target, path, number)


def names_columns(columns: Sequence[str]) -> bool:
    """Returns whether a row has the names of columns, as spreadsheets write them first."""
    found = [column.strip().casefold() for column in columns]
    return found[0] in _HEADERS or len(found) > 1 and _HEADERS.union(_SIDES).issuperset(found)


def _columns(line: str) -> str:
    """Returns what is wrong with a line without three columns."""
    if "\r" in line:
        return "the line has carriage returns in it: convert line ends by `tr '\\r' '\\n'`"
    if "\t" not in line and "," in line:
        return "no tab, but commas: the QuotedReader as input.corpus reads CSV, or format=csv"
    return (
        f"{line.count(chr(9)) + 1}, expected {_COLUMNS} (language, source, target) set apart by "
        "tabs. Files of two columns need language=CODE of their source, or input.corpus.language"
    )


class TsvReader(_TsvLines, readers.FileReader):
    """Rows `language<TAB>source<TAB>target` of UTF-8 text, plain or .bz2, .gz, .xz or .zst.

    Text is never quoted or escaped: everything between two tabs is taken as it is. A first row such
    as `language<TAB>source<TAB>target` is left out and counted.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("language", "", "Language of rows `source<TAB>target`; '': all rows name theirs.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self.language = self.p.language


class EmbeddedCorpus(_TsvLines):
    """The corpus in the package: software messages in 99 languages, translated to English.

    The translations are by people. embedded/NOTICE lists sources and licenses.
    """

    @property
    def splits(self) -> tuple[str, ...]:
        return readers.SPLITS

    def _read(self, split: str) -> Iterator[Row]:
        directory = importlib.resources.files("lingvo_gshard.data") / "embedded"
        with importlib.resources.as_file(directory / f"{split}.tsv.xz") as path:
            yield from self._read_all([str(path)])
