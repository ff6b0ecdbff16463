"""Metrics of the server for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Send

from lingvo_gshard.wings.serving.errors import CLIENT_GONE

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_OTHER = "other"
_LABELS = ("path", "status")


class Metrics:
    """Counts requests, errors and tokens, and measures latency."""

    def __init__(self, waiting: Callable[[], float]):
        """Makes the metrics of a server; `waiting` returns how many texts or plans wait."""
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry}

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"gshard_{name}", about, labels, **made)

        self._requests = counter("requests", "Requests answered, by path and status.", *_LABELS)
        self.errors = counter(
            "errors",
            "Requests that failed, also after their answer had begun, by path and status.",
            *_LABELS,
        )
        self.gone = counter(
            "clients_gone",
            "Requests whose client left before it had the answer, also during the upload, by path.",
            "path",
        )
        self.refused = counter(
            "refused",
            "Requests refused before their path was known: too large, too slow, not HTTP.",
            "status",
        )
        self.tokens = counter("tokens", "Generated tokens that were returned.")
        self._seconds = Histogram(
            "gshard_request_seconds",
            "Seconds from a request to the end of its answer, by path.",
            ("path",),
            buckets=_SECONDS,
            **made,
        )
        self._under_way = Gauge(
            "gshard_requests_under_way", "Requests that are not answered yet.", **made
        )
        length = Gauge("gshard_queue_length", "Texts or plans that wait for their turn.", **made)
        length.set_function(waiting)

    def text(self) -> tuple[bytes, str]:
        """Returns all metrics in Prometheus's text format, and its media type."""
        return prometheus_client.generate_latest(self.registry), (
            prometheus_client.CONTENT_TYPE_LATEST
        )

    def measured(self, app: ASGIApp, paths: frozenset[str]) -> ASGIApp:
        """Returns an application with the requests of each path measured."""

        async def run(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            path = scope["path"] if scope["path"] in paths else _OTHER
            status, started = "500", time.monotonic()

            async def note(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = str(message["status"])
                await send(message)

            try:
                with self._under_way.track_inprogress():
                    await app(scope, receive, note)
            finally:
                self._requests.labels(path, status).inc()
                if int(status) == CLIENT_GONE:
                    self.gone.labels(path).inc()
                elif int(status) >= 400:
                    self.errors.labels(path, status).inc()
                self._seconds.labels(path).observe(time.monotonic() - started)

        return run
