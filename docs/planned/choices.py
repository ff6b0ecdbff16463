"""What the flags of the commands that plan choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from lingvo_gshard.core.config import names

# The value of a flag that chooses everything.
ALL = "all"

_Choice = TypeVar("_Choice")


def chosen(flag: str, name: str, valid: Mapping[str, _Choice]) -> list[_Choice]:
    """Returns what a flag chooses: what has a name, or everything. Exits if nothing has it."""
    if name != ALL and name not in valid:
        raise SystemExit(f"--{flag}={name} is unknown. {names.nearest(name, (*valid, ALL))}")
    return list(valid.values()) if name == ALL else [valid[name]]
