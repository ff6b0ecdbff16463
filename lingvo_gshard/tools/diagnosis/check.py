"""Check: what gshard-doctor found out about one thing."""

from __future__ import annotations

import dataclasses
import enum


class State(enum.StrEnum):
    """The results that a check can have.

    Attributes:
      OK: nothing needs to be done.
      WARNING: training works, but may be slow, or differ from what was tested.
      FAILURE: training does not work, or computes wrong results.
    """

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclasses.dataclass(frozen=True)
class Check:
    """A finding on one thing.

    Attributes:
      name: what was checked.
      state: how the check ended.
      found: what was found.
      advice: what to do; "" if nothing needs to be done.
    """

    name: str
    state: State
    found: str
    advice: str = ""
