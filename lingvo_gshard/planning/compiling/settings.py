"""How the planner compiles: whether code is generated, and where compiled programs are kept."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

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


_settings = contextvars.ContextVar[Settings | None]("settings", default=None)


def current() -> Settings:
    """Returns the settings that hold here."""
    return _settings.get() or Settings()


@contextlib.contextmanager
def using(settings: Settings) -> Iterator[None]:
    """Has plans inside a `with` block compile with these settings."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)
