"""Imports modules that users name, and says which line is wrong where that fails.

A module is a program. Files such as the params.txt of a run may name classes of this package and of
modules that the user has named in this process, and of no others: whoever reads the run of a
stranger must not run the stranger's programs.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
import sysconfig
import traceback
import types

from lingvo_gshard.core.errors import UserError

_PACKAGE = str(pathlib.Path(__file__).parents[2])
_PACKAGE_NAME = __name__.partition(".")[0]
_LIBRARIES = tuple(str(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))

# Top-level names of the modules that the user has named.
_named: set[str] = set()


def is_trusted(name: str) -> bool:
    """Returns whether a file may name classes of a module.

    It may if the module is this package's, if the user has named it or another of its package, or
    if the user's program has imported it. Python's own modules are imported by everybody.
    """
    top = name.partition(".")[0]
    if top in (_PACKAGE_NAME, *_named):
        return True
    return top in sys.modules and top not in sys.stdlib_module_names


def import_module(name: str) -> types.ModuleType:
    """Returns a module that the user names, such as "my_package.my_module", and trusts it.

    Raises:
      ModuleNotFoundError: there is no such module.
      UserError: the module exists, but running it fails; names the file, the line and the error.
    """
    try:
        module = importlib.import_module(name)
        _named.add(name.partition(".")[0])
        return module
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise
        failure = error
    except (Exception, SystemExit) as error:
        failure = error
    raise UserError(
        f"the module {name} cannot be imported: {_place(failure)}: {_in_words(failure)}"
    ) from failure


def raised_in(error: BaseException) -> str | None:
    """Returns the line of a user's module that raised an error, as "file:line".

    None if this package raised it, or a library that this package called.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if not _is_of_a_library(f.filename)]
    if not frames or frames[-1].filename.startswith(_PACKAGE):
        return None
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _is_of_a_library(file: str) -> bool:
    # The package itself may be installed among the libraries.
    return file.startswith(("<", *_LIBRARIES)) and not file.startswith(_PACKAGE)


def _place(error: BaseException) -> str:
    """Returns the last line of the user's files that an error passed, as "file:line"."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    # The first frame is that of this file.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in frames if not frame.filename.startswith("<")]
    own = [f for f in frames if not f.filename.startswith((_PACKAGE, *_LIBRARIES))] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "unknown line"


def _in_words(error: BaseException) -> str:
    """Returns an error as one line."""
    if isinstance(error, SystemExit):
        return f"it ends the program (exit code {error.code})"
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
