"""Errors that a client gets as an answer, in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

UNPROCESSABLE = 422
# nginx's status for a client that is gone; only logs and metrics show it.
CLIENT_GONE = 499
_LONGEST_TEXT = 1_000


class RequestError(Exception):
    """A request that cannot be answered, with the path of the wrong field and a code, if any."""

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.field, self.code = status, field, code
        self.headers = dict(headers or {})

    def body(self) -> dict:
        """Returns the error as a JSON value."""
        is_server = self.status >= 500
        return {
            "error": {
                "message": _shortened(str(self)),
                "type": "server_error" if is_server else "invalid_request_error",
                "param": self.field and _shortened(self.field),
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """Returns the error as an HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def unprocessable(field: str, message: str) -> RequestError:
    """Returns the error of a request with a wrong field."""
    return RequestError(UNPROCESSABLE, message, field)


def _shortened(text: str) -> str:
    """Returns a text that repeats no more than the beginning of what a client has sent."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


class ClientGoneError(Exception):
    """The client closed the connection before the server answered."""


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a JSON value as an HTTP response."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
