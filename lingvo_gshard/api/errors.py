"""Errors of the public API, which name arguments where a command line names flags."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lingvo_gshard.core.errors import UserError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Commands that a message suggests stay as they are: they are matched first, flags and all.
_FLAG = re.compile(r"gshard-\w+(?: --\S+)*|--([a-z]\w*)")
# Arguments that are not spelled like their flag.
_ARGUMENTS = {"gin_param": "settings", "gin_file": "gin_files"}


class ArgumentError(UserError):
    """A wrong argument of the public API.

    Attributes:
      on_command_line: the message with flags, `--mesh=...`, where this one has arguments.
    """

    def __init__(self, on_command_line: str):
        super().__init__(_FLAG.sub(_as_argument, on_command_line))
        self.on_command_line = on_command_line


def names_arguments(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates a function of the public API: its ValueErrors become `ArgumentError`s.

    Below the API an option is written as its flag: `--mesh=data=3 needs 3 devices`. A caller of the
    API reads `mesh=data=3 needs 3 devices`, and a command line prints the original.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except ArgumentError:
            raise
        except ValueError as error:
            raise ArgumentError(str(error)).with_traceback(error.__traceback__) from None

    return call


def _as_argument(match: re.Match[str]) -> str:
    flag = match.group(1)
    return match.group(0) if flag is None else _ARGUMENTS.get(flag, flag)
