"""The web application: routes, the page, and what every request passes through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Send

from lingvo_gshard.wings.serving import border, openapi, page
from lingvo_gshard.wings.serving.errors import RequestError
from lingvo_gshard.wings.serving.origins import Origins
from lingvo_gshard.wings.serving.service import Service


def make_app(service: Service, origins: Origins | None = None) -> ASGIApp:
    """Returns the application of a model. `origins` is None if only this process uses it."""
    # The name of a model may have slashes.
    routes = [
        Route(
            path.replace("}", ":path}"),
            _answering(service, each.respond, is_protected=not each.is_open),
            methods=[each.method.upper()],
        )
        for path, each in openapi.OPERATIONS.items()
    ]
    routes.append(Route("/", _answering(service, _page), methods=["GET"]))
    paths = f"{openapi.PATH} describes {', '.join(openapi.OPERATIONS)}"
    app = border.make_app(routes, paths, origins)
    app = _stopping(service, app)
    return service.metrics.measured(app, frozenset((*openapi.OPERATIONS, "/")))


def _answering(
    service: Service, respond: openapi.Respond, is_protected: bool = False
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
