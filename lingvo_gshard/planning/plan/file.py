"""Reads plans from files and validates them."""

from __future__ import annotations

import pathlib

import msgspec

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import json_text
from lingvo_gshard.planning.plan.plan import FORMAT, Plan


class _Header(msgspec.Struct):
    """The field of every format, read before the others are known to be valid."""

    format: int


def load(path: str | pathlib.Path) -> Plan:
    """Returns the plan that `gshard-plan --json` wrote.

    Raises:
      UserError: names the file, the field and the reason if the file is missing, is not JSON, has
        another format, or has a missing, unknown or mistyped field.
    """
    try:
        text = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        found = json_text.decode(text, _Header).format
        if found != FORMAT:
            raise UserError(
                f"{path}: plan format {found}, but this version reads format {FORMAT}. Plan again "
                "with this version"
            )
        return json_text.decode(text, Plan)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: not a plan: {error}") from error
    except msgspec.DecodeError as error:
        raise UserError(
            f"{path}: not JSON ({error}). Expected a file written by gshard-plan --json"
        ) from error
