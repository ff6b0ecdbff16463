"""Imports modules that users name, and says which line is wrong where that fails."""

from __future__ import annotations

import importlib
import pathlib
import sysconfig
import traceback
import types

_PACKAGE = str(pathlib.Path(__file__).parents[2])
_NOT_THE_USERS = (
    _PACKAGE,
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


def import_module(name: str) -> types.ModuleType:
    """Returns a module by its name, such as "my_package.my_module".

    Raises:
      ModuleNotFoundError: there is no such module.
      ValueError: the module exists, but running it fails; names the file, the line and the error.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise
        failure = error
    except (Exception, SystemExit) as error:
        failure = error
    raise ValueError(
        f"the module {name} cannot be imported: {_place(failure)}: {_in_words(failure)}"
    ) from failure


def _place(error: BaseException) -> str:
    """Returns the last line of the user's files that an error passed, as "file:line"."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    # The first frame is that of this file.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in frames if not frame.filename.startswith("<")]
    own = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "unknown line"


def _in_words(error: BaseException) -> str:
    """Returns an error as one line."""
    if isinstance(error, SystemExit):
        return f"it ends the program (exit code {error.code})"
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
