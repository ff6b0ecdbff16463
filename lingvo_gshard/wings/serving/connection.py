"""Connection: one client's connection, with limits on what it may send and how slowly."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections.abc import Callable

import msgspec
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.server import ServerState

from lingvo_gshard.wings.serving.errors import RequestError

# Bytes that are parsed at once, so that a head is refused soon after its limit.
_PIECE = 2**14
# Requests that may wait behind one on the same connection.
_MOST_PIPELINED = 16
# Seconds that a refused client may go on sending. If the server closed the connection earlier, the
# client could miss the answer that says why.
_LINGER_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a connection.

    Attributes:
      head_bytes: bytes of all headers of a request.
      head_seconds: longest time from the first byte of a request, or from the connection, to the
        last header.
      idle_seconds: longest time from an answer to the next request. Proxies keep connections for
        60 s.
      send_seconds: longest time that a client may read nothing of an answer.
    """

    url_bytes: int = 2**16
    head_bytes: int = 2**16
    head_seconds: float = 10.0
    idle_seconds: float = 75.0
    send_seconds: float = 30.0


class Phase(enum.IntEnum):
    """The states of a connection. To make room, connections in the first state are closed first."""

    IDLE = 0
    HEAD = 1
    BODY = 2
    ANSWER = 3


class Connection(httptools_impl.HttpToolsProtocol):
    """A connection that ends when its limits are passed.

    The body has limits of its own, which the application knows; see `bodies.read_bytes`.

    Attributes:
      last_received: when the client has last sent something, in the event loop's time.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        config: uvicorn.Config,
        state: ServerState,
        on_change: Callable[[Connection], None],
        on_refusal: Callable[[int], None],
    ):
        """Prepares a connection.

        Args:
          on_change: called when an answer is complete, and when the connection has ended.
          on_refusal: called with the status of a request that never reaches the application.
        """
        super().__init__(config, state, {})
        self.timeout_keep_alive = limits.idle_seconds
        self.is_over = False
        self.last_received = self.loop.time()
        self._limits, self._on_change, self._on_refusal = limits, on_change, on_refusal
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._is_in_head = self._is_receiving = self._is_refused = False
        # Bytes of the headers that are complete, and all of the head so far in whole pieces.
        self._head_bytes = self._fed_bytes = 0
        self._refusal: RequestError | None = None

    @property
    def phase(self) -> Phase:
        """The state of the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            return Phase.BODY if self._is_receiving and not self.pipeline else Phase.ANSWER
        return Phase.HEAD if self._is_in_head or self._timer else Phase.IDLE

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self._limits.head_seconds, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disarm()
        self._unset_keepalive_if_required()
        if self._sending:
            self._sending.cancel()
        self.is_over = True
        self._on_change(self)

    def data_received(self, data: bytes) -> None:
        self.last_received = self.loop.time()
        for start in range(0, len(data), _PIECE):
            if self._is_refused or self.transport.is_closing():
                return
            piece = data[start : start + _PIECE]
            super().data_received(piece)
            if self._is_in_head:
                self._fed_bytes += len(piece)
                # Of a header that is not complete, the parser does not tell.
                if self._fed_bytes > self._limits.head_bytes + _PIECE:
                    self._refuse(_large_head(self._limits.head_bytes))
        if not self._timer and self.phase is Phase.IDLE and not self._is_receiving:
            # Between requests there may be line breaks, which are no request.
            self._arm(self._limits.head_seconds, self._on_late_head)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes, self._fed_bytes = True, 0, 0
        if not self._timer:
            self._arm(self._limits.head_seconds, self._on_late_head)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.url_bytes:
            most = f"{self._limits.url_bytes:,}"
            self._refusal = RequestError(414, f"the URL has more than {most} bytes")
            raise ValueError

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + len(": \r\n")
        if self._head_bytes > self._limits.head_bytes:
            self._refusal = _large_head(self._limits.head_bytes)
            raise ValueError

    def on_headers_complete(self) -> None:
        self._disarm()
        self._is_in_head, self._is_receiving = False, True
        super().on_headers_complete()
        if len(self.pipeline) > _MOST_PIPELINED:
            self.hang_up()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_receiving = False
        if self.cycle.response_complete and not self._is_refused:
            self._disarm()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        elif self._is_receiving and self.cycle.response_complete:
            self._arm(_LINGER_SECONDS, self.hang_up)
        self._on_change(self)

    def timeout_keep_alive_handler(self) -> None:
        self.hang_up()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending:
            self._sending.cancel()
            self._sending = None

    def send_400_response(self, msg: str) -> None:
        """Answers what the parser does not take; called by it."""
        del msg
        refusal = self._refusal or RequestError(400, "this is not a valid HTTP request")
        self._refuse(refusal)

    def hang_up(self) -> None:
        """Closes the connection; what the client has not read by now is lost."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def evict(self) -> None:
        """Closes the connection in favor of others."""
        self._give_up("the server has too many connections, and this one was slow", "slow")

    def shutdown(self) -> None:
        """Closes the connection after the request that is being answered; called by the server."""
        if self.phase is Phase.ANSWER:
            super().shutdown()
        else:
            self._give_up("the server stops, and has not received all of the request", "stopped")

    def cut_off(self) -> None:
        """Closes the connection if an answer is under way, so that the client notices the end."""
        if self.cycle and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()

    def _give_up(self, message: str, code: str) -> None:
        """Closes the connection. A request that has begun to arrive is told so."""
        has_begun = self._is_in_head or self.phase is Phase.BODY
        has_answer = self._is_refused or (self.cycle and self.cycle.response_started)
        if has_begun and not has_answer:
            self._answer(RequestError(503, message, code=code, headers={"Retry-After": "1"}))
        self.hang_up()

    def _on_late_head(self) -> None:
        if self._is_in_head:
            seconds = self._limits.head_seconds
            self._refuse(RequestError(408, f"the headers took longer than {seconds:g} s"))
        else:
            self.hang_up()

    def _refuse(self, error: RequestError) -> None:
        """Answers a request that does not reach the application, and ends the connection."""
        self._disarm()
        self._is_refused = True
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy and (self._is_in_head or self.pipeline or self.cycle.response_started):
            # The answer to an earlier request is under way, and nothing may come before it.
            self.hang_up()
            return
        self._answer(error)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._arm(_LINGER_SECONDS, self.hang_up)

    def _answer(self, error: RequestError) -> None:
        """Writes an answer that does not come from the application, which learns of the end."""
        self._on_refusal(error.status)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = msgspec.json.encode(error.body())
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        status = httptools_impl.STATUS_LINE[error.status]
        self.transport.write(status + lines.encode("ascii") + b"\r\n" + body)

    def _abort_later(self) -> None:
        """Ends the connection unless the client reads what was sent."""
        if not self._sending and not self.is_over:
            self._sending = self.loop.call_later(self._limits.send_seconds, self.transport.abort)

    def _arm(self, seconds: float, act: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, act)

    def _disarm(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


def _large_head(most: int) -> RequestError:
    return RequestError(431, f"the headers have more than {most:,} bytes")
