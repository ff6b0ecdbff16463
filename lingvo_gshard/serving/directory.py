"""DirectoryWatch: notices that the directory of a served model was replaced or removed."""

from __future__ import annotations

import logging

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.training.run.checkpoint.choice import BEST, preferred
from lingvo_gshard.training.run.logdir import Logdir

_log = logging.getLogger(__name__)

UNCHANGED = "unchanged"


class DirectoryWatch:
    """Compares a run's directory with what it was when its model was loaded."""

    def __init__(self, logdir: Logdir, step: int, choice: str | int = BEST):
        """Remembers the directory.

        Args:
          logdir: the directory.
          step: the step of the checkpoint that was loaded.
          choice: which checkpoint that was, as in `preferred`.
        """
        self._logdir, self._step, self._choice = logdir, step, choice
        self._identity = self._logdir.identity()
        self._last = UNCHANGED

    def state(self) -> str:
        """Returns UNCHANGED, or in words what happened; logs a warning when that changes."""
        found = self._look()
        if found != self._last and found != UNCHANGED:
            _log.warning(
                f"{self._logdir.place}: {found}. The server goes on with the model of step "
                f"{self._step:,}; restart it to load another one"
            )
        self._last = found
        return found

    def _look(self) -> str:
        identity = self._logdir.identity()
        if identity is None:
            return "removed"
        if identity != self._identity:
            return "replaced"
        newer = self._newer()
        return UNCHANGED if newer is None else f"has a newer checkpoint, of step {newer}"

    def _newer(self) -> int | None:
        """Returns the step of the checkpoint to load now, if it is of a later step."""
        try:
            first = preferred(self._logdir.checkpoints, self._choice)[:1]
        except (UserError, OSError):  # The chosen one was deleted, or a bucket is in trouble.
            return None
        return first[0] if first and first[0] > self._step else None
