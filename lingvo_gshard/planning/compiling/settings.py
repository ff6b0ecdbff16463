"""How the planner compiles: whether code is generated, and where compiled programs are kept."""

from __future__ import annotations

import contextlib
import dataclasses

from lingvo_gshard.core.scopes import Scope
from lingvo_gshard.planning.compiling.cache import CompilationCache


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the planner compiles.

    Attributes:
      cache: keeps compiled programs for later plans; None compiles every program.
      generates_code: whether libtpu generates a device's code. A plan reads the optimized program
        and its memory, which are ready before.
    """

    cache: CompilationCache | None = None
    generates_code: bool = False


_settings = Scope("settings", Settings())


def current() -> Settings:
    """Returns the settings that hold here."""
    return _settings.get()


def using(settings: Settings) -> contextlib.AbstractContextManager[Settings]:
    """Has plans inside a `with` block compile with these settings."""
    return _settings.use(settings)
