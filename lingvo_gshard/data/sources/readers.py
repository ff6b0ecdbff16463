"""Base classes of readers: splits, and the handling of rows that cannot be read."""

import abc
import collections
import contextlib
import glob
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import IO, BinaryIO, NoReturn

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.names import listed
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError, explained
from lingvo_gshard.core.files import objects, regular
from lingvo_gshard.core.files.lines import LONGEST_LINE, bounded_lines
from lingvo_gshard.core.files.stores import BucketError
from lingvo_gshard.core.progress import SILENT, Progress
from lingvo_gshard.data import held_out
from lingvo_gshard.data.sources.compression import READ_ERRORS, decompressed
from lingvo_gshard.data.sources.row import Row

SPLITS = ("train", "dev", "test")
ON_BAD_ROW = ("refuse", "skip")
LONG_LINE = "a line is too long"
_ROWS_BETWEEN_UPDATES = 4096
_BLOCK = 1 << 16
# Catalogs of messages are read whole.
_LARGEST_CATALOG = 1 << 28
# First bytes of files that are no plain UTF-8 text -> what they are, and what to do.
_FORMATS = {
    b"\x1f\x8b": "the file is compressed by gzip: its name must end in .gz",
    b"\xfd7zXZ": "the file is compressed by xz: its name must end in .xz",
    b"\x28\xb5\x2f\xfd": "the file is compressed by zstd: its name must end in .zst",
    b"BZh": "the file is compressed by bzip2: its name must end in .bz2",
    b"PK\x03\x04": "the file is a zip archive: unpack it",
    b"\xff\xfe": "the file is in UTF-16: convert it by `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "the file is in UTF-16: convert it by `iconv -f UTF-16 -t UTF-8`",
}


class Reader(Configurable, abc.ABC):
    """Reads the rows of a split. Rows that cannot be read are refused, or skipped and counted.

    Attributes:
      left_out: reason -> number of rows of the last split read that were left out: skipped with
        on_bad_row="skip", marked as unusable by their format, or removed because they leak
        between splits.
      examples: reason -> a message about the first row left out for it, with its file and line.
      first_line: number of the first line of what is read of a file; 1 for whole files.
      skip_setting: how a user asks for bad rows to be skipped, for messages.
    """

    skip_setting = "input.corpus.on_bad_row='skip'"

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "on_bad_row",
            "refuse",
            "What to do with a damaged file or a bad row: 'refuse' raises an error with file and "
            "line, 'skip' leaves it out and counts it. A missing file is always an error.",
            choices=ON_BAD_ROW,
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self.left_out: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, str] = {}
        self.progress: Progress = SILENT
        self.first_line = 1
        self._opened: BinaryIO | None = None
        # By what they are about, so that files that are looked for again are told of once.
        self._file_notes: dict[str, str] = {}

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The splits that exist: some of train, dev and test."""

    @property
    def notes(self) -> list[str]:
        """Lines about the splits that a user should know; complete once a split has been read."""
        return []

    @property
    def file_notes(self) -> list[str]:
        """Lines about files that are not read; complete once the files have been looked for."""
        return list(self._file_notes.values())

    def check_files(self) -> None:
        """Raises ValueError if a file of any split is missing, before long reading starts."""

    @abc.abstractmethod
    def _read(self, split: str) -> Iterator[Row]:
        """Yields the rows of a split that exists."""

    def rows(self, split: str) -> list[Row]:
        """Returns the rows of a split and sets `left_out` and `examples`.

        Raises:
          UserError: the split is unknown, or a file is missing. With on_bad_row="refuse" also: a
            file is damaged or not UTF-8, a row has wrong columns, or sides differ in length. The
            message names file and line.
        """
        names.check(split, self.splits, f"Unknown split {split!r}")
        self.left_out.clear()
        self.examples.clear()
        return list(self._read(split))

    def _bad(self, place: str, reason: str, detail: str = "", count: int = 1) -> None:
        message = f"{place}: {reason}{': ' if detail else ''}{detail}"
        if self.p.on_bad_row == "refuse":
            raise UserError(f"{message}. Set {self.skip_setting} to leave such rows out, counted.")
        self._leave_out(reason, f"{place}: {detail}" if detail else place, count)

    def _cannot_read(self, path: str, line: int, error: Exception) -> None:
        """Leaves out the rest of a damaged file. Bytes that were not given are no damage."""
        if isinstance(error, PermissionError):
            _refuse_unreadable(path)
        if isinstance(error, BucketError):
            raise error
        self._bad(f"{path}:{line}", "the file cannot be read", str(error))

    def _leave_out(self, reason: str, message: str, count: int = 1) -> None:
        self.left_out[reason] += count
        self.examples.setdefault(reason, message)

    def _read_all(self, paths: Sequence[str]) -> Iterator[Row]:
        """Yields the rows of files and reports its progress by bytes."""
        sizes = [os.path.getsize(path) for path in paths]
        total, before, count = max(sum(sizes), 1), 0, 0
        for path, size in zip(paths, sizes, strict=True):
            for row in self._read_file(path):
                count += 1
                if count % _ROWS_BETWEEN_UPDATES == 0:
                    position = self._opened.tell() if self._opened else 0
                    self.progress.update(count, min(before + min(position, size), total) / total)
                yield row
            before += size
            self.progress.update(count, before / total)

    @abc.abstractmethod
    def _read_file(self, path: str) -> Iterator[Row]:
        """Yields the rows of one file that exists."""

    def _content(self, path: str) -> bytes | None:
        """Returns the bytes of a file, decompressed; None if it cannot be read and is left out."""
        found, size = [], 0
        try:
            for block in self._raw_blocks(path):
                found.append(block)
                size += len(block)
                if size > _LARGEST_CATALOG:
                    self._bad(
                        f"{path}:0",
                        "the file is too large",
                        f"more than {_LARGEST_CATALOG:,} bytes",
                    )
                    return None
        except READ_ERRORS as error:
            self._cannot_read(path, 0, error)
            return None
        return b"".join(found)

    def _lines(self, path: str) -> Iterator[str | None]:
        """Yields the lines of a text file, plain or compressed, without line ends.

        A line that is not UTF-8 or has NUL bytes is counted and yielded as None.
        """
        number = self.first_line - 1
        try:
            for number, line in enumerate(self._raw_lines(path), start=self.first_line):
                yield self._text(f"{path}:{number}", number, line)
        except READ_ERRORS as error:
            self._cannot_read(path, number + 1, error)

    def _raw_lines(self, path: str) -> Iterator[bytes | None]:
        """Yields the lines of a file, plain or compressed; None for one that is too long."""
        with self._open(path) as file:
            yield from bounded_lines(file)

    def _blocks(self, path: str) -> Iterator[bytes]:
        """Yields the content of a file, plain or compressed, in blocks."""
        try:
            yield from self._raw_blocks(path)
        except READ_ERRORS as error:
            self._cannot_read(path, 0, error)

    def _raw_blocks(self, path: str) -> Iterator[bytes]:
        with self._open(path) as file:
            while block := file.read(_BLOCK):
                yield block

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[IO[bytes]]:
        """Opens a file, plain or compressed, as the one whose position tells the progress."""
        try:
            with (
                objects.open_to_read(path) as self._opened,
                decompressed(path, self._opened) as file,
            ):
                yield file
        finally:
            self._opened = None

    def _longest_in_words(self) -> str:
        return f"{LONGEST_LINE:,} bytes"

    def _text(self, place: str, number: int, line: bytes | None) -> str | None:
        """Returns the text of a line without its end; None for one that is bad, and counted."""
        if line is None:
            self._bad(place, LONG_LINE, f"more than {self._longest_in_words()}")
            return None
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            what = _format_of(number, line)
            about = f"byte {error.start} of the line is 0x{line[error.start]:02x}"
            self._bad(place, "not UTF-8", what or about)
            return None
        if "\0" in text:
            self._bad(place, "NUL bytes", _format_of(number, line) or "no text has any")
            return None
        text = text.removesuffix("\n").removesuffix("\r")
        return text.removeprefix("\ufeff") if number == 1 else text


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
    # Ends of the names of the files that are read of a directory; none: directories are refused.
    endings: tuple[str, ...] = ()

    def __init__(self, params: Params):
        super().__init__(params)
        if not _patterns(self.p.train):
            kind, example = type(self).__name__, '`input.corpus.train = "my_file"`'
            raise UserError(f"input.corpus.train of the {kind} names no file. Set {example}")
        self._whole: held_out.Split | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        given = tuple(split for split in SPLITS if _patterns(getattr(self.p, split)))
        if given != ("train",):
            return given
        return tuple(split for split in SPLITS if split not in self._empty)

    @property
    def notes(self) -> list[str]:
        if self._whole is None:
            return []
        kept = " and ".join(f"{len(self._whole.rows[s]):,} for {s}" for s in SPLITS[1:])
        if not self._empty:
            return [f"Rows of input.corpus.train that are held out: {kept}."]
        lost = sum(sum(self._whole.dropped[split].values()) for split in self._empty)
        why = "too few targets differ in more than case, digits and punctuation. More text, files "
        why += "of their own, or input.corpus.held_out_per_mille would help."
        if "document" in self.p:
            why += " With input.corpus.document = 'line', each line is a document."
        if lost:
            why = f"{lost:,} were, and are dropped as near copies. Files of their own would help."
        return [f"No row of input.corpus.train is held out for {' or '.join(self._empty)}: {why}"]

    @property
    def _empty(self) -> tuple[str, ...]:
        """Splits that no row is held out for; none before rows are read."""
        if self._whole is None:
            return ()
        return tuple(split for split in ("dev", "test") if not self._whole.rows[split])

    def check_files(self) -> None:
        for split in SPLITS:
            self.files(split)

    def _read(self, split: str) -> Iterator[Row]:
        if _patterns(self.p.dev) or _patterns(self.p.test):
            yield from self._read_all(self.files(split))
            return
        if self._whole is None:
            rows = list(self._read_all(self.files("train")))
            self._whole = self._divide(rows)
            self._whole_left_out = self.left_out, self.examples
            self.left_out, self.examples = collections.Counter(), {}
        if split == "train":
            self.left_out.update(self._whole_left_out[0])
            self.examples.update(self._whole_left_out[1])
        for part in SPLITS if split == "train" else (split,):
            for reason, count in self._whole.dropped[part].items():
                self._leave_out(reason, f"{part}: {self._whole.examples[part][reason]}", count)
        yield from self._whole.rows[split]

    def _divide(self, rows: list[Row]) -> held_out.Split:
        return held_out.divide(rows, self.p.held_out_per_mille)

    def files(self, split: str, setting: str = "") -> list[str]:
        """Returns the files of a split.

        Args:
          setting: where the user named them, for messages; "": the hyperparameter.

        Raises:
          UserError: a file is missing, or a glob matches none.
        """
        setting = setting or f"input.corpus.{split}"
        found = []
        for pattern in _patterns(getattr(self.p, split)):
            paths = self._expand(os.path.expanduser(pattern))
            if not paths:
                raise UserError(f"{setting}: {pattern}: {self._none_found(pattern)}")
            for path in paths:
                _check_is_file(setting, path)
            found += self._without_links(pattern, paths)
        return found

    def _without_links(self, pattern: str, paths: Sequence[str]) -> Sequence[str]:
        """Returns the paths but for links to other ones, and notes how many links there are."""
        kept: dict[str, str] = {}
        # Files themselves come first.
        for path in sorted(paths, key=os.path.islink):
            kept.setdefault(os.path.realpath(path), path)
        read = set(kept.values())
        left = [path for path in paths if path not in read]
        if left:
            self._file_notes[pattern] = (
                f"{pattern}: {len(left):,} of {len(paths):,} files are links to others of them and "
                f"are not read again, such as {left[0]}"
            )
        return [path for path in paths if path in read]

    def _expand(self, pattern: str) -> list[str]:
        """Returns the files that one of the user's paths or globs stands for."""
        is_glob = glob.has_magic(pattern)
        found = sorted(glob.glob(pattern, recursive=True)) if is_glob else [pattern]
        if not self.endings:
            return found
        whole = [
            _files_below(path, self.endings) if os.path.isdir(path) else [path] for path in found
        ]
        return [path for paths in whole for path in paths]

    def _none_found(self, pattern: str) -> str:
        """Returns what is wrong with a pattern that stands for no file."""
        if self.endings and os.path.isdir(os.path.expanduser(pattern)):
            return f"there is no {' or '.join(self.endings)} file in this directory"
        none = "no file matches this glob" if glob.has_magic(pattern) else "no such file"
        return _inside_a_file(pattern) or none


def _inside_a_file(path: str) -> str:
    """Returns what to do about a path that leads into a file; "" if it does not."""
    archive = next((str(p) for p in pathlib.Path(path).parents if p.is_file()), "")
    way = f"unpack it, or give it to gshard-prepare: --source={path!r}"
    return f"{archive} is a file. If it is an archive, {way}" if archive else ""


def _files_below(directory: str, endings: tuple[str, ...]) -> list[str]:
    """Returns the files in a directory and those below it whose names have one of some endings."""
    return sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(directory)
        for name in names
        if name.endswith(endings)
    )


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(filter(None, listed(given)))


def _check_is_file(setting: str, path: str) -> None:
    if os.path.isdir(path):
        glob_of_files = os.path.join(path, "*")
        raise UserError(
            f"{setting}: {path}: a directory, but a file was expected; {glob_of_files!r} takes all "
            "files in it"
        )
    if not os.path.exists(path):
        directory = os.path.dirname(path)
        if inside := _inside_a_file(path):
            raise UserError(f"{setting}: {path}: {inside}")
        if directory and not os.path.isdir(directory):
            raise UserError(f"{setting}: {path}: no such file; there is no directory {directory}")
        raise UserError(f"{setting}: {path}: no such file{names.nearest_file(path)}")
    # A pipe, such as a process substitution of a shell, can be read once only.
    with explained(f"{setting}: {path}", OSError):
        regular.require_regular(path)
    if not os.access(path, os.R_OK):
        _refuse_unreadable(path)


def _refuse_unreadable(path: str) -> NoReturn:
    raise UserError(f"{path}: permission denied: this user may not read the file") from None


def _format_of(number: int, line: bytes) -> str:
    """Returns the format of a file, of a line that is no text; "" if it does not show it."""
    if number > 1:
        return ""
    for magic, what in _FORMATS.items():
        if line.startswith(magic):
            return what
    # Latin letters have a zero byte each, before or after the letter. Zeros on both sides are
    # what a crash leaves of a file.
    first, second = line[::2], line[1::2]
    for name, high, low in (("UTF-16BE", first, second), ("UTF-16LE", second, first)):
        if 2 * high.count(0) > len(high) and 2 * low.count(0) < len(low):
            return f"the file seems to be in {name}: convert it by `iconv -f {name} -t UTF-8`"
    return ""
