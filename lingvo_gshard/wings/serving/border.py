"""The border of a web server: whatever goes wrong inside becomes an answer, in a sentence as JSON.

A mistake of the client is answered with a status below 500. Any other exception is a fault of this
program: the client gets status 500, and the server's log the traceback, once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lingvo_gshard.wings.serving.errors import CLIENT_GONE, ClientGoneError, RequestError
from lingvo_gshard.wings.serving.origins import Origins

# The log of the web server, which also gets the exceptions that leave the application.
_log = logging.getLogger("uvicorn.error")


def make_app(routes: Sequence[Route], paths: str, origins: Origins | None) -> ASGIApp:
    """Returns an application that answers every request, whatever its parts raise."""
    handlers: dict[Any, Any] = {
        RequestError: _on_request_error,
        ClientGoneError: _on_client_gone,
        HTTPException: functools.partial(_on_http_exception, paths),
        Exception: _on_bug,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    # To another path one is sent only after the token was checked, and no path needs that.
    app.router.redirect_slashes = False
    return ServerErrorMiddleware(origins.guarding(app) if origins else app, handler=_on_bug)


def told(error: Exception, doing: str) -> RequestError:
    """Returns what a client is told of an exception after its answer has begun."""
    if isinstance(error, RequestError):
        return error
    _log.error("%s failed", doing, exc_info=error)
    return _bug()


def _bug() -> RequestError:
    return RequestError(500, "the server failed; its log says why")


async def _on_request_error(request: Request, error: RequestError) -> Response:
    del request
    return error.response()


async def _on_client_gone(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=CLIENT_GONE)


async def _on_http_exception(paths: str, request: Request, error: HTTPException) -> Response:
    """Answers requests for an unknown path, or with a method that the path does not take."""
    # The URL of a request has its header Host, which may be none.
    path, taken = request.scope["path"], (error.headers or {}).get("Allow", "another method")
    said = {
        404: (f"there is no {path}; {paths}", "unknown_path"),
        405: (f"{path} does not take {request.method}, but {taken}", "unknown_method"),
    }
    message, code = said.get(error.status_code, (error.detail, None))
    return RequestError(error.status_code, message, code=code, headers=error.headers).response()


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answers where this program is wrong. The web server logs the exception, which goes on."""
    del request, error
    return _bug().response()
