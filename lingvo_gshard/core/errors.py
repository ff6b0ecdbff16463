"""The error of a user's mistake. Any other exception of this package is a bug of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """A user's mistake, told in one sentence.

    A command prints the sentence alone. It prints any other exception with its traceback and asks
    for a report.

    The sentence spells an option in backquotes, as a caller of the API sets it: "`mesh=data=3`
    needs 3 devices". It spells Params as a gin file does: "`run.steps = 5`". A command spells both
    as its flags.
    """

    @property
    def option(self) -> str:
        """Path of the option that the sentence is about, such as "mesh"; "" if it names none.

        The option is the first text in backquotes, or else a path of Params at the beginning.
        """
        first, *quoted = str(self).split("`")
        if len(quoted) > 1:
            return quoted[0].partition("=")[0].strip()
        path = first.partition(" ")[0].rstrip(":").partition("=")[0]
        is_path = "." in path and all(part.isidentifier() for part in path.split("."))
        return path if is_path else ""


@contextlib.contextmanager
def explained(problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Makes exceptions of some kinds UserErrors: a problem, and what the exception says.

    Args:
      problem: what could not be done, such as "`html=a.html` cannot be written".
      *kinds: the exceptions. Of an OSError only the reason is told, without the file.
    """
    try:
        yield
    except kinds as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UserError(f"{problem}: {reason or error}") from None
