"""Writes a command's results: tables for people, JSON and pages for files or standard output."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import rich.console
from absl import flags

from lingvo_gshard.data.sources import files

# The path that stands for standard output.
STANDARD_OUTPUT = "-"

# Tables are this wide where standard output is not a terminal, so that no cell is wrapped.
_WIDTH_OF_FILES = 240


def define_json_flag(values: flags.FlagValues, what: str = "the result") -> None:
    """Defines --json, the file for a command's result. `parse_flags` reads `--json` as `--json=-`.

    Args:
      values: the command's flags.
      what: the result in the flag's help, such as "the plan".
    """
    text = f"Writes {what} as JSON to this file; - or no value writes to standard output."
    flags.DEFINE_string("json", None, text, flag_values=values)


def make_console(*paths: str | None) -> rich.console.Console:
    """Returns the console for tables: standard error if one of `paths` is standard output."""
    stream = sys.stderr if STANDARD_OUTPUT in paths else sys.stdout
    width = None if stream.isatty() else _WIDTH_OF_FILES
    return rich.console.Console(file=stream, width=width, highlight=False)


def say(console: rich.console.Console, text: str) -> None:
    """Prints text unchanged: rich adds no markup, colors or line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def write_json(path: str | None, record: Any, flag: str = "json") -> None:
    """Writes a record as JSON to a file or to standard output; does nothing if `path` is None.

    Args:
      path: the file, or `STANDARD_OUTPUT`.
      record: dicts, lists, dataclasses or msgspec structs of plain values. Numbers that are not
        finite become null.
      flag: name of the flag that gave `path`, for error messages.

    Raises:
      ValueError: the file cannot be written.
    """
    if path is not None:
        text = msgspec.json.format(msgspec.json.encode(record), indent=1)
        write_text(path, text.decode() + "\n", flag)


def write_text(path: str | None, text: str, flag: str) -> None:
    """Writes text to a file or to standard output; does nothing if `path` is None.

    Args:
      path: the file, or `STANDARD_OUTPUT`.
      text: the content.
      flag: name of the flag that gave `path`, for error messages.

    Raises:
      ValueError: the file cannot be written.
    """
    if path is None:
        return
    if path == STANDARD_OUTPUT:
        print(text, end="")
        return
    try:
        files.write_atomically(path, text.encode())
    except OSError as error:
        raise ValueError(f"--{flag}={path} cannot be written: {error.strerror}") from None


def check_writable(path: str | None, flag: str) -> None:
    """Raises ValueError if a file cannot be written, so that no long work is done in vain.

    Args:
      path: the file, `STANDARD_OUTPUT` or None.
      flag: name of the flag that gave `path`, for error messages.
    """
    if not path or path == STANDARD_OUTPUT:
        return
    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--{flag}={path} cannot be written: {error.strerror}") from None
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        reason = "it is a folder" if os.path.isdir(path) else "permission denied"
        raise ValueError(f"--{flag}={path} cannot be written: {reason}")
