"""Readers of tab-separated rows of language, source and target: files, and the own corpus."""

import importlib.resources
import re
from collections.abc import Iterator

from lingvo_gshard.data.sources import readers
from lingvo_gshard.data.sources.row import Row

_COLUMNS = 3
# Codes of any convention, but no text: one word without white space.
_CODE = re.compile(r"\S{1,40}")


class _TsvLines(readers.Reader):
    """Reads rows of three columns and reports rows that have another number of them."""

    def _read_file(self, path: str) -> Iterator[Row]:
        # Most rows have the code of a row before, so that each code is checked once.
        codes: set[str] = set()
        for number, line in enumerate(self._lines(path), self.first_line):
            if line is None:
                continue
            columns = line.split("\t")
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
                        "or sr@latin",
                    )
                    continue
                codes.add(language)
            language, source, target = columns
            yield Row(language, source, target, path, number)


def _columns(line: str) -> str:
    """Returns what is wrong with a line without three columns."""
    if "\r" in line:
        return "the line has carriage returns in it: convert line ends by `tr '\\r' '\\n'`"
    return (
        f"{line.count(chr(9)) + 1}, expected {_COLUMNS} (language, source, target) set apart by "
        "tabs"
    )


class TsvReader(_TsvLines, readers.FileReader):
    """Rows `language<TAB>source<TAB>target` of UTF-8 text, plain or compressed (.gz, .xz, .zst).

    Text is never quoted or escaped: everything between two tabs is taken as it is.
    """


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
