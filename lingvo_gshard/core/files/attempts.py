"""Repeats requests to buckets that fail for a while, with growing pauses and a limit."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files.problems import BucketError, problem_of

# The setting of the environment that limits how long a request is repeated.
LIMIT = "GSHARD_BUCKET_SECONDS"
_DEFAULT_SECONDS = 120.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 16.0

_Result = TypeVar("_Result")


def attempt(path: str, request: Callable[[], _Result], writes: bool = False) -> _Result:
    """Returns what a request to a bucket returns.

    A request that fails because the service does not answer, or answers that it is busy, is
    repeated. The user is told once per bucket.

    Args:
      path: the file or folder of the request.
      request: makes it.
      writes: whether it writes.

    Raises:
      FileNotFoundError: there is no such file.
      BucketError: the bucket is missing, refuses access, or did not answer in time.
    """
    deadline, pause = time.monotonic() + limit_seconds(), _FIRST_PAUSE
    while True:
        try:
            return request()
        except Exception as error:
            problem = problem_of(error, path, writes)
            is_transient = isinstance(problem, BucketError) and problem.is_transient
            if not is_transient or time.monotonic() + pause > deadline:
                raise problem from error
            _tell_once(path.partition("://")[2].partition("/")[0], str(problem.strerror))
        # Many processes that failed together do not come back together.
        time.sleep(pause * (0.5 + random.random() / 2))
        pause = min(2 * pause, _LONGEST_PAUSE)


def limit_seconds() -> float:
    """Returns for how long a request is repeated.

    Raises:
      UserError: the setting is no number.
    """
    given = os.environ.get(LIMIT, "")
    try:
        return float(given or _DEFAULT_SECONDS)
    except ValueError:
        raise UserError(f"{LIMIT}={given}: expected a number of seconds, such as 120") from None


class _Told:
    """The buckets that the user was told of."""

    buckets: set[str] = set()


def _tell_once(bucket: str, words: str) -> None:
    if bucket not in _Told.buckets:
        _Told.buckets.add(bucket)
        what = words.partition(";")[0]
        print(f"Warning: {what}; trying again for up to {limit_seconds():.0f} s", file=sys.stderr)
