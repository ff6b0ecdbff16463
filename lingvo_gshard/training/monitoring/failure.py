"""The error of a run that cannot go on. Imports nothing that is slow."""

from __future__ import annotations


class TrainingFailedError(RuntimeError):
    """Training cannot go on. The message says at which step, why, and what helps.

    Checkpoints that were saved before remain. In a cluster all processes raise it.
    """
