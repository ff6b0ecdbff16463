"""Base classes of readers: splits, and the handling of rows that cannot be read."""

import abc
import collections
import glob
import gzip
import lzma
import os
from collections.abc import Iterator, Sequence

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.data import held_out
from lingvo_gshard.data.sources.row import Row

SPLITS = ("train", "dev", "test")
_EXAMPLES_KEPT = 20


class Reader(Configurable, abc.ABC):
    """Reads the rows of a split. Rows that cannot be read are refused, or skipped and counted.

    Attributes:
      left_out: reason -> number of rows of the last split read that were left out: skipped with
        on_bad_row="skip", marked as unusable by their format, or removed because they leak
        between splits.
      examples: messages about the first rows left out, each with its file and line.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "on_bad_row",
            "refuse",
            "What to do with a file or row that cannot be read: 'refuse' raises an error with file "
            "and line, 'skip' leaves it out and counts it.",
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        choices = ("refuse", "skip")
        if self.p.on_bad_row not in choices:
            raise ValueError(
                f"input.corpus.on_bad_row must be 'refuse' or 'skip', not {self.p.on_bad_row!r}. "
                f"{names.nearest(self.p.on_bad_row, choices)}"
            )
        self.left_out: collections.Counter[str] = collections.Counter()
        self.examples: list[str] = []

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The splits that exist: some of train, dev and test."""

    @abc.abstractmethod
    def _read(self, split: str) -> Iterator[Row]:
        """Yields the rows of a split that exists."""

    def rows(self, split: str) -> list[Row]:
        """Returns the rows of a split and sets `left_out` and `examples`.

        Raises:
          ValueError: the split is unknown. With on_bad_row="refuse" also: a file is missing,
            damaged or not UTF-8, a row has wrong columns, or sides differ in length. The message
            names file and line.
        """
        if split not in self.splits:
            raise ValueError(f"Unknown split {split!r}. {names.nearest(split, self.splits)}")
        self.left_out.clear()
        self.examples.clear()
        return list(self._read(split))

    def _bad(self, place: str, reason: str, detail: str = "", count: int = 1) -> None:
        message = f"{place}: {reason}{': ' if detail else ''}{detail}"
        if self.p.on_bad_row == "refuse":
            raise ValueError(
                f"{message}. Set input.corpus.on_bad_row='skip' to leave such rows out, counted."
            )
        self._leave_out(reason, message, count)

    def _leave_out(self, reason: str, message: str, count: int = 1) -> None:
        self.left_out[reason] += count
        if len(self.examples) < _EXAMPLES_KEPT:
            self.examples.append(message)

    def _lines(self, path: str) -> Iterator[str | None]:
        """Yields the lines of a text file, plain or compressed, without line ends.

        A line that is not UTF-8 is counted and yielded as None.
        """
        number = 0
        try:
            with _open(path) as file:
                for number, line in enumerate(file, start=1):  # noqa: B007 - read after a failure
                    try:
                        text = line.decode("utf-8")
                    except UnicodeDecodeError as error:
                        self._bad(f"{path}:{number}", "not UTF-8", f"byte {error.start}")
                        yield None
                        continue
                    text = text.removesuffix("\n").removesuffix("\r")
                    yield text.removeprefix("\ufeff") if number == 1 else text
        except FileNotFoundError:
            self._bad(f"{path}:0", "no such file")
        except (OSError, EOFError, lzma.LZMAError) as error:
            self._bad(f"{path}:{number + 1}", "the file cannot be read", str(error))


class FileReader(Reader):
    """Reads the user's files, given for each split, or only for train and then divided."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        for split in SPLITS:
            p.define(split, (), f"Files for {split}: {cls.files_help}")
        p.define(
            "held_out_per_mille",
            10,
            "Thousandths of the target sentences of `train` that are held out for dev and as many "
            "for test, if neither is given; see held_out.py.",
            above=0,
            below=500,
        )
        return p

    files_help = "a path or glob, or a list of them."

    def __init__(self, params: Params):
        super().__init__(params)
        if not _patterns(self.p.train):
            raise ValueError(f"input.corpus.train of the {type(self).__name__} names no file")
        self._whole: held_out.Split | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        given = tuple(split for split in SPLITS if _patterns(getattr(self.p, split)))
        return SPLITS if given == ("train",) else given

    def _read(self, split):
        if _patterns(self.p.dev) or _patterns(self.p.test):
            yield from self._read_files(getattr(self.p, split))
            return
        if self._whole is None:
            rows = list(self._read_files(self.p.train))
            self._whole = held_out.divide(rows, self.p.held_out_per_mille)
            self._whole_left_out = dict(self.left_out), list(self.examples)
            self.left_out.clear()
            self.examples.clear()
        if split == "train":
            self.left_out.update(self._whole_left_out[0])
            self.examples.extend(self._whole_left_out[1])
        for reason, count in self._whole.dropped[split].items():
            self._leave_out(reason, f"{split}: {reason}", count)
        yield from self._whole.rows[split]

    def _read_files(self, given: str | Sequence[str]) -> Iterator[Row]:
        for pattern in _patterns(given):
            paths = self._expand(os.path.expanduser(pattern))
            if not paths:
                self._bad(f"{pattern}:0", "no such file")
            for path in paths:
                yield from self._read_file(path)

    def _expand(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]

    @abc.abstractmethod
    def _read_file(self, path: str) -> Iterator[Row]:
        """Yields the rows of one file."""


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(filter(None, (given,) if isinstance(given, str) else tuple(given)))


def _open(path: str):
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".xz"):
        return lzma.open(path, "rb")
    return open(path, "rb")
