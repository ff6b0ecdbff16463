"""A row of the hard knocks: what a user does wrong, or what the world does, and what is right then.

A row reads like a line in a terminal:

    Case(
        "an unknown mesh axis",
        "gshard-train --experiment=test.tiny --logdir=run --mesh=dta=8",
        error="--strategy=expert needs axis 'data', which --mesh=dta=8 lacks. ...",
    )

Rows stand in `cases/`, one file for each room, in a tuple named CASES. To add one, add it there:
test_hard_knocks.py finds it. Each command runs in an empty directory of its own, whose files
`given` makes first (`prepare.py` has the words: trained, write, damage, ...). Every row is also
held to this, unless it says otherwise:

- Standard error is what the row says and nothing more: no traceback, no prefix of a log, no noise.
- Nothing is lost: each file of the directory is as before, and no file is left behind.

The experiment test.tiny trains in a second; translation.from_files with `corpus` takes ten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from tests.hard_knocks.sandbox import Sandbox

Step = Callable[[Sandbox], None]

# Names of streams, next to paths.
CLOSED = "closed"
FULL = "/dev/full"
EMPTY = "/dev/null"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """The fields of a Case that have names.

    Attributes:
      error: what the command says on standard error after its name and "error: ". "..." stands for
        any text, here and below.
      says: all of standard error, or what stands before an error.
      prints: texts that standard output contains, in this order.
      code: the exit code; None is 1 with an error, else 0.
      given: steps that prepare the directory, in order.
      stdin: bytes of standard input, or CLOSED.
      stdout: a path such as FULL, or CLOSED; None is a file that `prints` reads.
      stderr: like `stdout`, for standard error.
      environment: variables set beside those of the test.
      limits: resource limits by name, such as "RLIMIT_FSIZE".
      changes: patterns of the paths that the command may write, such as "run/*".
      signal: name of a signal that is sent during training, such as "SIGHUP".
      meanwhile: a training in the same directory, from before the command until after it.
      then: steps that check the directory afterwards.
      needs: a package without which the row is skipped.
      new_process: whether a new interpreter runs it, since imports matter. It takes seconds.
      seconds: the longest time that the command may take.
      slow: whether only `make test-all` runs it.
    """

    error: str = ""
    says: str = ""
    prints: tuple[str, ...] = ()
    code: int | None = None
    given: tuple[Step, ...] = ()
    stdin: bytes | str = b""
    stdout: str | None = None
    stderr: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    changes: tuple[str, ...] = ()
    signal: str = ""
    meanwhile: str = ""
    then: tuple[Step, ...] = ()
    needs: str = ""
    new_process: bool = False
    seconds: float = 120.0
    slow: bool = False


@dataclasses.dataclass(frozen=True)
class Case(_Options):
    """One row.

    Attributes:
      name: what is wrong, as part of a sentence.
      command: the command line, as typed in a shell without variables.
    """

    name: str
    command: str

    @property
    def exit_code(self) -> int:
        if self.code is None:
            return 1 if self.error else 0
        return self.code

    @property
    def standard_error(self) -> str:
        """All of standard error, with "..." for any text."""
        if not self.error:
            return self.says
        program = self.command.split()[0]
        if program == "python":
            program = "gshard-" + self.command.split()[3]
        return f"{self.says}{program}: error: {self.error}\n"
