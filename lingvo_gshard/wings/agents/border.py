"""Border: where bytes of other machines are read, and no error may end the job."""

from __future__ import annotations

import collections
import traceback
from collections.abc import Callable


class Border:
    """Tells of errors that bytes of others have caused, each kind of error a few times."""

    def __init__(self, say: Callable[[str], None]):
        """Has counted nothing yet."""
        self._say = say
        self.counts: collections.Counter[str] = collections.Counter()

    def tell(self, text: str) -> None:
        """Counts an event. Says it the first time, the 10th, the 100th and so on."""
        self.counts[text] += 1
        count = self.counts[text]
        if str(count).rstrip("0") == "1":
            self._say(text + f" ({count:,} times so far)" * (count > 1))

    def tell_error(self, what: str) -> None:
        """Counts the exception that is being handled, and says it with its traceback.

        Args:
          what: a clause that says what was being done.
        """
        text = f"Warning: {what}; an error was passed over, which is a bug:"
        self.tell(f"{text}\n{traceback.format_exc()}")
