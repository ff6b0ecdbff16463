"""Reader of tab-separated files: language, source, target; also the corpus in the package."""

import importlib.resources
from collections.abc import Iterator

from lingvo_gshard.data import readers
from lingvo_gshard.data.row import Row

_COLUMNS = 3


class TsvReader(readers.FileReader):
    """Rows `language<TAB>source<TAB>target` of UTF-8 text, plain or compressed (.gz, .xz).

    There is no quoting: what stands between two tabs is the text itself.
    """

    def _read_file(self, path: str) -> Iterator[Row]:
        yield from _rows(self, path)


class EmbeddedCorpus(readers.Reader):
    """The corpus in the package: 99 languages -> English, software messages by real translators.

    See embedded/NOTICE for its sources and licences.
    """

    @property
    def splits(self) -> tuple[str, ...]:
        return readers.SPLITS

    def _read(self, split: str) -> Iterator[Row]:
        directory = importlib.resources.files("lingvo_gshard.data") / "embedded"
        with importlib.resources.as_file(directory / f"{split}.tsv.xz") as path:
            yield from _rows(self, str(path))


def _rows(reader: readers.Reader, path: str) -> Iterator[Row]:
    for number, line in reader._lines(path):
        columns = line.split("\t")
        if len(columns) == _COLUMNS:
            yield Row(*columns, path, number)
        else:
            reader._bad(
                f"{path}:{number}",
                "wrong number of columns",
                f"{len(columns)}, expected {_COLUMNS} (language, source, target) set apart by tabs",
            )
