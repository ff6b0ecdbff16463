"""Writes a command's results: tables for people, JSON and pages for files or standard output."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

import msgspec
import rich.console
import rich.table
from absl import flags

from lingvo_gshard.api import tables as api_tables
from lingvo_gshard.core import UserError, atomic, explained
from lingvo_gshard.tools.console import tables
from lingvo_gshard.tools.console.libraries import harmless, warn
from lingvo_gshard.tools.console.spelling import with_flags

# The path that stands for standard output.
STANDARD_OUTPUT = "-"

# Tables are this wide where standard output is not a terminal, so that no cell is wrapped.
_WIDTH_OF_FILES = 240


def json_flag(what: str = "the result") -> str:
    """Returns the help of --json, the file for a command's result, such as "the plan"."""
    return f"Writes {what} as JSON to this file; - or no value writes to standard output."


class Console(rich.console.Console):
    """Prints what people read of a result. Leaves a closed standard output to its caller."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls this while it handles the BrokenPipeError.

    def say(self, text: str, style: str | None = None) -> None:
        """Prints text without markup, colors or line breaks of rich. Options are spelled as flags.

        Characters that command a terminal are escaped on one.
        """
        text = with_flags(text)
        if self.is_terminal:
            text = harmless(text)
        self.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def print_table(self, table: rich.table.Table) -> None:
        """Prints an empty line and a table."""
        self.say("")
        api_tables.print_table(self, table)

    def print_rows(
        self,
        left: Sequence[str],
        right: Sequence[str],
        rows: Iterable[Sequence[str]],
        caption: str | None = None,
        below: Sequence[Sequence[str]] = (),
        last: str | None = None,
    ) -> None:
        """Prints rows below the headings of left-aligned, then of right-aligned columns.

        Rows `below` stand under a line, such as sums. `last` is the heading of a left-aligned
        column after the others.
        """
        table = tables.make_table(*left, right=right, caption=caption)
        if last is not None:
            table.add_column(last, overflow="fold")
        for row in rows:
            table.add_row(*row)
        if below:
            table.add_section()
        for row in below:
            table.add_row(*row)
        self.print_table(table)

    def say_hidden(
        self,
        hidden: Sequence[Any],
        size: Callable[[Any], float] | None = None,
        in_words: Callable[[float], str] = str,
        where: str = "--json",
    ) -> None:
        """Prints how many rows are hidden and where all are; with `size`, also the sum of sizes."""
        if hidden:
            total = f", {in_words(sum(map(size, hidden)))}" if size else ""
            self.say(f"and {len(hidden):,} more{total}; {where} has them all")


def make_console(*paths: str | None) -> Console:
    """Returns the console for tables: standard error if one of `paths` is standard output."""
    stream = sys.stderr if STANDARD_OUTPUT in paths else sys.stdout
    width = None if stream.isatty() else _WIDTH_OF_FILES
    return Console(file=stream, width=width, highlight=False)


def copy_of_standard_error() -> tuple[TextIO, bool]:
    """Returns a stream that survives the redirection of descriptor 2, and whether it is new."""
    try:
        descriptor = os.dup(sys.stderr.fileno())
    except (io.UnsupportedOperation, OSError, ValueError):
        return sys.stderr, False
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="replace", buffering=1), True


def write_json(path: str | None, record: Any) -> None:
    """Writes a record as JSON to a file or to standard output; does nothing if `path` is None.

    A record has dicts, lists, dataclasses or msgspec structs of plain values. Numbers that are not
    finite become null. Raises UserError if the file cannot be written.
    """
    if path is not None:
        text = msgspec.json.format(msgspec.json.encode(record), indent=1)
        write_text(path, text.decode() + "\n", "json")


@contextlib.contextmanager
def open_json_lines(path: str | None) -> Iterator[TextIO | None]:
    """Opens the file that --json names; None for standard output or without the flag."""
    if path is None or path == STANDARD_OUTPUT:
        yield None
        return
    with open(path, "w", encoding="utf-8") as file:
        yield file


def write_text(path: str | None, text: str, flag: str) -> None:
    """Writes text to a file or to standard output; does nothing if `path` is None.

    Raises UserError, which names the flag that gave `path`, if the file cannot be written.
    """
    if path is None:
        return
    if path == STANDARD_OUTPUT:
        print(text, end="")
        return
    with explained(f"--{flag}={path} cannot be written", OSError):
        atomic.write_atomically(path, text.encode())


def check_writable(values: flags.FlagValues, *names: str) -> None:
    """Raises ValueError if an output file cannot be written, so that no long work is done in vain.

    A missing directory is refused and not created, since it is most often a typing error. `names`
    are flags, such as "json", with a path, `STANDARD_OUTPUT` or None.
    """
    taken: dict[str, str] = {}
    for name in names:
        path = values[name].value
        if not path:
            continue
        problem = None if path == STANDARD_OUTPUT else _problem_of(path)
        if problem:
            raise UserError(f"--{name}={path} cannot be written: {problem}")
        other = taken.setdefault(os.path.realpath(path), name)
        if other != name:
            what = "standard output" if path == STANDARD_OUTPUT else "the file"
            raise UserError(f"--{other}={path} and --{name}={path}: {what} takes one of them")


def _problem_of(path: str) -> str | None:
    """Returns why a file cannot be written; None if it can."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        return "it is a directory; a file was expected"
    if not os.path.isdir(folder):
        if os.path.exists(folder):
            return f"{folder} is no directory"
        return f"there is no directory {folder}; create it first, or name another one"
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            return None if os.access(path, os.W_OK) else "permission denied"
        # Network file systems may refuse what os.access allows.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def announce(values: flags.FlagValues, port: int, what: str = "") -> None:
    """Says where a server is that has started to listen, and writes its port to --port_file."""
    if values.port_file:
        write_text(values.port_file, f"{port}\n", "port_file")
    host = f"[{values.host}]" if ":" in values.host else values.host
    warn(f"{what}http://{host}:{port}/  Ctrl-C stops")
