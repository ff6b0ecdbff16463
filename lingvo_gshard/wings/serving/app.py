"""The web application: routes, the page, and what every request passes through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Send

from lingvo_gshard.wings.serving import border, openapi, page
from lingvo_gshard.wings.serving.endpoints import chat, completions, generate, state, translate
from lingvo_gshard.wings.serving.errors import RequestError
from lingvo_gshard.wings.serving.origins import Origins
from lingvo_gshard.wings.serving.service import Service

Respond: TypeAlias = "Callable[[Service, Request], Awaitable[Response]]"

# Path -> (method, function that answers).
_PROTECTED: dict[str, tuple[str, Respond]] = {
    translate.PATH: ("POST", translate.respond),
    generate.PATH: ("POST", generate.respond),
    completions.PATH: ("POST", completions.respond),
    chat.PATH: ("POST", chat.respond),
    "/v1/models": ("GET", state.models),
    "/metrics": ("GET", state.metrics),
}
_OPEN: dict[str, Respond] = {
    "/healthz": state.health,
    "/healthz/live": state.live,
    openapi.PATH: openapi.respond,
}
# The name of a model may have slashes.
_MODEL = "/v1/models/{model:path}"


def make_app(service: Service, origins: Origins | None = None) -> ASGIApp:
    """Returns the application that serves a model.

    Args:
      service: the model being served.
      origins: who may use it from a browser; None if only this process uses it.
    """
    routes = [
        Route(path, _answering(service, respond, is_protected=True), methods=[method])
        for path, (method, respond) in _PROTECTED.items()
    ]
    routes += [
        Route(path, _answering(service, respond), methods=["GET"])
        for path, respond in _OPEN.items()
    ]
    routes.append(Route(_MODEL, _answering(service, state.one_model, is_protected=True)))
    routes.append(Route("/", _answering(service, _page), methods=["GET"]))
    paths = f"{openapi.PATH} describes {', '.join(openapi.OPERATIONS)}"
    app = border.make_app(routes, paths, origins)
    app = _stopping(service, app)
    return service.metrics.measured(app, frozenset((*_PROTECTED, *_OPEN, "/")))


def _answering(
    service: Service, respond: Respond, is_protected: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint of a route; a protected one needs the bearer token."""

    async def endpoint(request: Request) -> Response:
        if is_protected:
            service.check_token(request)
        return await respond(service, request)

    return endpoint


def _stopping(service: Service, app: ASGIApp) -> ASGIApp:
    """Returns an application whose requests are answered with 503 when the server cuts them off."""

    async def run(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        has_begun = False

        async def note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, note)
        except asyncio.CancelledError:
            if not service.is_draining:
                raise
            if not has_begun:
                stopping = RequestError(503, "the server has stopped", code="stopped")
                await stopping.response()(scope, receive, send)

    return run


async def _page(service: Service, request: Request) -> Response:
    """Answers with the page for people."""
    del service, request
    return page.response(page.to_html())
