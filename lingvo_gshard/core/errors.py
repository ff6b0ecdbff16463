"""The error of a user's mistake. Any other exception of this package is a bug of ours."""

from __future__ import annotations


class UserError(ValueError):
    """A user's mistake, told in one sentence.

    A command prints the sentence alone. It prints any other exception with its traceback and asks
    for a report.
    """
