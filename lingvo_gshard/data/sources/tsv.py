"""Readers of tab-separated rows of language, source and target: files, and the own corpus."""

import importlib.resources
from collections.abc import Iterator

from lingvo_gshard.data.sources import readers
from lingvo_gshard.data.sources.row import Row

_COLUMNS = 3


class _TsvLines(readers.Reader):
    """Reads rows of three columns and reports rows that have another number of them."""

    def _read_file(self, path: str) -> Iterator[Row]:
        for number, line in enumerate(self._lines(path), start=1):
            if line is None:
                continue
            columns = line.split("\t")
            if len(columns) == _COLUMNS:
                yield Row(*columns, path, number)
            else:
                self._bad(
                    f"{path}:{number}",
                    "wrong number of columns",
                    f"{len(columns)}, expected {_COLUMNS} (language, source, target) set apart "
                    "by tabs",
                )


class TsvReader(_TsvLines, readers.FileReader):
    """Rows `language<TAB>source<TAB>target` of UTF-8 text, plain or compressed (.gz, .xz).

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
            yield from self._read_file(str(path))
