"""Rendezvous: process 0 hears from every process of a cluster before jax connects them.

If a process is missing, jax.distributed aborts the others without naming it, and it takes a process
of another run for one of this run. Here each process opens a connection to process 0 and sends its
number and its options. All processes then hear that the cluster is complete, or what is wrong. The
connections stay open for `PeerMonitor`.
"""

from __future__ import annotations

import hashlib
import socket
import time
from typing import TypeVar

import msgspec

from lingvo_gshard.runtime.cluster.place import Place

_PROTOCOL = "lingvo_gshard 2"
_LONGEST_LINE = 2**16
_LONGEST_SHOWN = 200
_POLL_SECONDS = 0.2
# How long process 0 waits for what a new connection has to say.
_HELLO_SECONDS = 5.0

_Message = TypeVar("_Message", bound=msgspec.Struct)


class Hello(msgspec.Struct):
    """What a process tells process 0.

    Attributes:
      protocol: version of this protocol.
      process: number of the process.
      options: options that all processes must share, by flag; long ones as a hash.
    """

    protocol: str
    process: int
    options: dict[str, str]


class Reply(msgspec.Struct):
    """What process 0 answers once all have come or something is wrong.

    Attributes:
      protocol: version of this protocol.
      error: what is wrong; None if the cluster is complete.
    """

    protocol: str
    error: str | None


def meet(place: Place, options: dict[str, str], timeout: float) -> dict[int, socket.socket]:
    """Waits for all processes and returns the connections to them.

    Args:
      place: this process.
      options: options that all processes must share, by flag.
      timeout: seconds to wait for the others.

    Returns:
      Process -> connection. Process 0 has one to each other process, the others have one to
      process 0.

    Raises:
      ValueError: a process did not come or has other options. Every process that came raises it.
    """
    shared = {"--num_processes": str(place.count), **options}
    hello = Hello(_PROTOCOL, place.index, {name: _short(text) for name, text in shared.items()})
    if place.index == 0:
        return _receive_all(place, hello, timeout)
    return {0: _report(place, hello, timeout)}


def send_line(connection: socket.socket, message: msgspec.Struct) -> None:
    """Sends one message as a line of JSON; it is lost if the other process is gone."""
    try:
        connection.sendall(msgspec.json.encode(message) + b"\n")
    except OSError:
        return


def read_line(
    connection: socket.socket, message: type[_Message], timeout: float
) -> _Message | None:
    """Returns the next message, or None if none of this type comes within `timeout` seconds."""
    line, deadline = b"", time.monotonic() + timeout
    try:
        while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            # Byte by byte: what follows the line belongs to the connection's next reader.
            byte = connection.recv(1)
            if not byte:
                return None
            line += byte
        return msgspec.json.decode(line, type=message)
    except (OSError, msgspec.DecodeError):
        return None


def _short(text: str) -> str:
    """Returns a text, or its hash if it is long, such as all Params."""
    if len(text) <= _LONGEST_SHOWN:
        return text
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _receive_all(place: Place, own: Hello, timeout: float) -> dict[int, socket.socket]:
    """Process 0's side of `meet`."""
    arrived: dict[int, socket.socket] = {}
    unknown: list[socket.socket] = []
    deadline = time.monotonic() + timeout
    try:
        with _listen(place) as listener:
            while len(arrived) < place.count - 1:
                connection = _accept(listener, deadline)
                if connection is None:
                    raise ValueError(_missing_processes(place, arrived, timeout))
                unknown.append(connection)
                hello = read_line(connection, Hello, _HELLO_SECONDS)
                if not hello or hello.protocol != _PROTOCOL:
                    unknown.pop().close()
                    continue
                _check(hello, own, arrived)
                arrived[hello.process] = unknown.pop()
    except ValueError as error:
        for connection in (*arrived.values(), *unknown):
            send_line(connection, Reply(_PROTOCOL, str(error)))
            connection.close()
        raise
    for connection in arrived.values():
        send_line(connection, Reply(_PROTOCOL, None))
    return arrived


def _listen(place: Place) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            return socket.create_server(("", place.port), family=family, dualstack_ipv6=True)
        return socket.create_server(("", place.port))
    except OSError as error:
        raise ValueError(
            f"--coordinator={place.address}: process 0 cannot open port {place.port} here "
            f"({error.strerror}); choose a free port of process 0's machine"
        ) from None


def _accept(listener: socket.socket, deadline: float) -> socket.socket | None:
    listener.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        return listener.accept()[0]
    except TimeoutError:
        return None


def _missing_processes(place: Place, arrived: dict[int, socket.socket], timeout: float) -> str:
    missing = [str(k) for k in range(1, place.count) if k not in arrived]
    shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    return (
        f"--num_processes={place.count} processes were expected at --coordinator={place.address}, "
        f"but within {timeout:.0f} s none came with --process_id {shown}"
    )


def _check(other: Hello, own: Hello, arrived: dict[int, socket.socket]) -> None:
    """Raises ValueError naming the first option in which a process differs from process 0."""
    process = other.process
    for name, mine in own.options.items():
        theirs = other.options.get(name, "nothing")
        if theirs == mine:
            continue
        if mine.startswith("sha256:") or theirs.startswith("sha256:"):
            raise ValueError(f"process {process} has other {name} than process 0")
        raise ValueError(f"process {process} has {name}={theirs}, but process 0 has {name}={mine}")
    if process == 0 or process in arrived:
        raise ValueError(f"two processes were started with --process_id={process}")


def _report(place: Place, hello: Hello, timeout: float) -> socket.socket:
    """The side of the other processes: tries until process 0 answers, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        connection, problem = _try_to_connect(place, deadline)
        if connection is not None:
            send_line(connection, hello)
            # Process 0 may start to wait only now.
            reply = read_line(connection, Reply, timeout + _HELLO_SECONDS)
            if reply and reply.protocol == _PROTOCOL:
                if reply.error:
                    raise ValueError(reply.error)
                return connection
            connection.close()
            problem = "another program answers there"
        if time.monotonic() >= deadline:
            raise ValueError(
                f"--coordinator={place.address} could not be reached within {timeout:.0f} s "
                f"({problem}); process 0 is expected there"
            )
        time.sleep(_POLL_SECONDS)


def _try_to_connect(place: Place, deadline: float) -> tuple[socket.socket | None, str]:
    timeout = min(max(deadline - time.monotonic(), 0.1), 5.0)
    try:
        return socket.create_connection((place.host, place.port), timeout=timeout), ""
    except OSError as error:
        return None, error.strerror or str(error)
