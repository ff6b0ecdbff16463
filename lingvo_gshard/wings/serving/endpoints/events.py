"""Server-sent events: an answer that is sent while it grows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.responses import Response, StreamingResponse

from lingvo_gshard.wings.serving.border import told
from lingvo_gshard.wings.serving.errors import ClientGoneError
from lingvo_gshard.wings.serving.service import Service

# Proxies must not hold back events.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def server_sent(value: object, event: str = "") -> str:
    """Returns a server-sent event with a JSON value as its data."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n"


def stream(
    service: Service, path: str, events: AsyncGenerator[str], name_of_error: str = ""
) -> Response:
    """Returns the answer that sends events. An error ends them, in an event `name_of_error`."""
    guarded = _guarded(service, path, events, name_of_error)
    return StreamingResponse(guarded, 200, _HEADERS, "text/event-stream")


async def _guarded(
    service: Service, path: str, events: AsyncGenerator[str], name_of_error: str
) -> AsyncIterator[str]:
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                yield event
    except ClientGoneError:
        return
    except Exception as error:
        found = told(error, f"the streamed answer of {path}")
        service.metrics.errors.labels(path, str(found.status)).inc()
        yield server_sent(found.body(), name_of_error)
