"""Translates errors of buckets into a few types with messages for users.

gcsfs, s3fs and TensorStore raise many types. Here they become FileNotFoundError for a file that is
not there, and BucketError for everything else.
"""

from __future__ import annotations

import errno
import os
import random
import re
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from lingvo_gshard.core import BucketError, UserError

# Answers that may be better next time: too many requests, timeouts and errors of the service.
_TRANSIENT_CODES = {408, 429, 499, 500, 502, 503, 504}
_TRANSIENT_ERRNOS = {errno.EBUSY, errno.EREMOTEIO, errno.ECONNRESET, errno.ECONNREFUSED}
# Types by name: their packages may not be installed.
_TRANSIENT_TYPES = {
    *("ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError", "ClientOSError"),
    *("ConnectTimeoutError", "ReadTimeoutError", "EndpointConnectionError", "HTTPClientError"),
    *("FSTimeoutError", "ProxyError", "ConnectionClosedError", "IncompleteReadError"),
    *("ClientConnectorError", "ResponseParserError", "ChecksumError"),
}
_REFUSED_TYPES = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
    *("TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError"),
    *("RefreshError", "DefaultCredentialsError", "GoogleAuthError", "ProfileNotFound"),
}
_TRANSIENT_WORDS = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|SlowDown|ServiceUnavailable|InternalError"
    r"|http_response_code='(?:408|429|5\d\d)'|RESOURCE_EXHAUSTED"
)
_REFUSED_WORDS = re.compile(
    r"UNAUTHENTICATED|PERMISSION_DENIED|Forbidden|AccessDenied|Access Denied|ExpiredToken"
    r"|InvalidAccessKeyId|SignatureDoesNotMatch|Invalid Credentials|expired|Unauthorized"
    r"|http_response_code='40[13]'"
)
# The answer of S3 to a request for the size of a file with an expired token. It has no other words.
_S3_BAD_REQUEST = "Bad Request"
# The addresses of gcsfs' requests that fail only if the bucket is missing.
_NO_BUCKET_WORDS = re.compile(
    r"specified bucket does not exist|NoSuchBucket|(?:^|/)b/[^/]+/o$|(?:^|/)b/[^/]+$"
)
_LOGIN = {
    "gs": "`gcloud auth application-default login` or GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "`aws sts get-caller-identity`, AWS_PROFILE or AWS_ACCESS_KEY_ID",
}


def problem_of(error: Exception, path: str, writes: bool = False) -> OSError:
    """Returns the error that callers see.

    A missing file means a missing bucket if it was to be written.
    """
    if isinstance(error, BucketError):
        return error
    text, scheme = _line(error), path.partition("://")[0]
    bucket = f"{scheme}://{path.partition('://')[2].partition('/')[0]}"
    if isinstance(error, FileNotFoundError) or text.startswith("NOT_FOUND"):
        if writes or _NO_BUCKET_WORDS.search(text):
            words = f"there is no bucket {bucket}; check its name and project"
            return BucketError(errno.ENXIO, words, path)
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if _is_refused(error, text, scheme):
        words = f"{bucket} refuses access ({text}); check the credentials: {_LOGIN[scheme]}"
        return BucketError(errno.EACCES, words, path)
    if _is_transient(error, text):
        words = (
            f"{bucket} does not answer as it should ({text}); check the network and the state of "
            "the service, then run the same command again"
        )
        return BucketError(errno.EAGAIN, words, path, is_transient=True)
    return BucketError(errno.EIO, f"{bucket} failed ({text})", path)


def _is_refused(error: Exception, text: str, scheme: str) -> bool:
    if isinstance(error, PermissionError) or _types(error) & _REFUSED_TYPES:
        return True
    if scheme == "s3" and _S3_BAD_REQUEST in text:
        return True
    return getattr(error, "code", None) in (401, 403) or bool(_REFUSED_WORDS.search(text))


def _is_transient(error: Exception, text: str) -> bool:
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if _types(error) & _TRANSIENT_TYPES or getattr(error, "code", None) in _TRANSIENT_CODES:
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    return bool(_TRANSIENT_WORDS.search(text))


def _types(error: Exception) -> set[str]:
    return {one.__name__ for one in type(error).__mro__}


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    text = lines[0][:200].strip() or type(error).__name__
    # TensorStore appends the details of the answer in brackets.
    return text.partition(" [http_response_body")[0]


# The setting of the environment that limits how long a request is repeated.
LIMIT = "GSHARD_BUCKET_SECONDS"
_DEFAULT_SECONDS = 120.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 16.0

_Result = TypeVar("_Result")


def attempt(path: str, request: Callable[[], _Result], writes: bool = False) -> _Result:
    """Returns what a request to a bucket returns.

    A request that fails because the service does not answer, or answers that it is busy, is
    repeated. The user is told once per bucket.

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
    """Returns for how long a request is repeated; UserError if the setting is no number."""
    given = os.environ.get(LIMIT, "")
    try:
        return float(given or _DEFAULT_SECONDS)
    except ValueError:
        raise UserError(f"{LIMIT}={given}: expected a number of seconds, such as 120") from None


# The buckets that the user was told of.
_told: set[str] = set()


def _tell_once(bucket: str, words: str) -> None:
    if bucket not in _told:
        _told.add(bucket)
        what = words.partition(";")[0]
        print(f"Warning: {what}; trying again for up to {limit_seconds():.0f} s", file=sys.stderr)
