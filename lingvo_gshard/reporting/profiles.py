"""Profiles of a run: where the time of its steps went, beside a plan if there was one."""

from __future__ import annotations

import contextlib
import pathlib
from typing import TypeVar

import msgspec

from lingvo_gshard.core.files import json_text
from lingvo_gshard.profiling import files
from lingvo_gshard.profiling.comparison import Comparison
from lingvo_gshard.profiling.profile import Profile

_Record = TypeVar("_Record")

# More rows of layers than these are only in the profile's own file.
_MOST_LAYERS = 60


class ProfileReport(msgspec.Struct, frozen=True):
    """One profile of a run.

    Attributes:
      path: its folder, within the run's directory.
      profile: where the time went; the layers that took the most time.
      comparison: predicted beside measured time; None without a plan.
    """

    path: str
    profile: Profile
    comparison: Comparison | None


def read_profiles(logdir: pathlib.Path) -> list[ProfileReport]:
    """Returns the profiles of a run, the first steps first. Damaged ones are left out."""
    found = []
    for path in (logdir / files.FOLDER).glob(f"plugins/profile/*/{files.SUMMARY}"):
        profile = _read(path, Profile)
        if profile is None:
            continue
        compared = _read(path.with_name(files.COMPARISON), Comparison)
        short = msgspec.structs.replace(profile, layers=profile.layers[:_MOST_LAYERS])
        if compared:
            layers = compared.layers[:_MOST_LAYERS]
            compared = msgspec.structs.replace(compared, layers=layers)
        found.append(ProfileReport(str(path.parent.relative_to(logdir)), short, compared))
    return sorted(found, key=lambda row: row.profile.first_step)


def _read(path: pathlib.Path, record: type[_Record]) -> _Record | None:
    """Returns a record in a file; None if the file is missing or damaged."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return json_text.decode(path.read_bytes(), record)
    return None
