"""The roll call: before jax connects the processes of a cluster, process 0 hears from each of them.

jax.distributed ends a process whose peers do not come by an abort that names none of them, and
takes a process of another run for one of this. Here each process opens a connection to process 0
and says its number and what it was given; all hear together that they are complete, or what is
wrong. The connections stay open: they are the lifeline of the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
import time

_PROTOCOL = "lingvo_gshard 1"
_LONGEST_LINE = 2**16
_LONGEST_SHOWN = 200


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process stands in its cluster: the coordinator's host and port, and who it is."""

    host: str
    port: int
    count: int
    index: int

    @property
    def address(self) -> str:
        """The coordinator as the flag gives it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def call_roll(place: Place, facts: dict[str, str], seconds: float) -> dict[int, socket.socket]:
    """Returns the connections to the other processes: of process 0 to all, of the others to it.

    facts: what all processes must have been given alike, by the names of the flags.
    Raises ValueError, in all processes that came, naming what did not fit or who did not come.
    """
    card = {
        "protocol": _PROTOCOL,
        "process": place.index,
        "facts": {"--num_processes": str(place.count), **_short(facts)},
    }
    if place.index == 0:
        return _hear_all(place, card, seconds)
    return {0: _report(place, card, seconds)}


def send_line(connection: socket.socket, message: dict) -> None:
    """Sends one message; one to a process that is gone is lost."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return


def read_line(connection: socket.socket, seconds: float) -> dict | None:
    """Returns the next message, or None where none comes in time or it is of another kind."""
    line, deadline = b"", time.monotonic() + seconds
    try:
        while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            # Byte by byte: what follows the line belongs to whoever reads next.
            byte = connection.recv(1)
            if not byte:
                return None
            line += byte
        message = json.loads(line)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _short(facts: dict[str, str]) -> dict[str, str]:
    """Long facts, such as all Params, by their hash."""
    return {
        name: text
        if len(text) <= _LONGEST_SHOWN
        else "sha256:" + hashlib.sha256(text.encode()).hexdigest()
        for name, text in facts.items()
    }


def _hear_all(place: Place, card: dict, seconds: float) -> dict[int, socket.socket]:
    """Process 0's side."""
    came: dict[int, socket.socket] = {}
    strangers: list[socket.socket] = []
    deadline = time.monotonic() + seconds
    try:
        with _listen(place) as listener:
            while len(came) < place.count - 1:
                connection = _accept(listener, deadline)
                if connection is None:
                    raise ValueError(_who_is_missing(place, came, seconds))
                strangers.append(connection)
                other = read_line(connection, 5.0)
                if not other or other.get("protocol") != _PROTOCOL:
                    strangers.pop().close()
                    continue
                _check_card(other, card, came)
                came[other["process"]] = strangers.pop()
    except ValueError as error:
        for connection in (*came.values(), *strangers):
            send_line(connection, {"protocol": _PROTOCOL, "error": str(error)})
            connection.close()
        raise
    for connection in came.values():
        send_line(connection, {"protocol": _PROTOCOL, "error": None})
    return came


def _listen(place: Place) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            return socket.create_server(("", place.port), family=family, dualstack_ipv6=True)
        return socket.create_server(("", place.port))
    except OSError as error:
        raise ValueError(
            f"--coordinator={place.address}: process 0 cannot open port {place.port} here "
            f"({error.strerror}); give a free port of process 0's machine"
        ) from None


def _accept(listener: socket.socket, deadline: float) -> socket.socket | None:
    listener.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        return listener.accept()[0]
    except TimeoutError:
        return None


def _who_is_missing(place: Place, came: dict[int, socket.socket], seconds: float) -> str:
    missing = [str(k) for k in range(1, place.count) if k not in came]
    shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    return (
        f"--num_processes={place.count} processes were expected at --coordinator={place.address}, "
        f"but within {seconds:.0f} s there was none with --process_id {shown}"
    )


def _check_card(other: dict, card: dict, came: dict[int, socket.socket]) -> None:
    """Raises ValueError naming the first thing in which a process differs from process 0."""
    process = other["process"]
    for name, mine in card["facts"].items():
        theirs = other["facts"].get(name, "nothing")
        if theirs == mine:
            continue
        if mine.startswith("sha256:") or theirs.startswith("sha256:"):
            raise ValueError(f"process {process} was given other {name} than process 0")
        raise ValueError(f"process {process} was given {name}={theirs}, process 0 {name}={mine}")
    if process == 0 or process in came:
        raise ValueError(f"two processes were started with --process_id={process}")


def _report(place: Place, card: dict, seconds: float) -> socket.socket:
    """The side of the other processes: tries until process 0 answers, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        connection, problem = _try_to_connect(place, deadline)
        if connection is not None:
            send_line(connection, card)
            # Process 0 may have begun to wait only now.
            answer = read_line(connection, seconds + 5.0)
            if answer and answer.get("protocol") == _PROTOCOL and "error" in answer:
                if answer["error"]:
                    raise ValueError(answer["error"])
                return connection
            connection.close()
            problem = "what answers there is no process 0 of this program"
        if time.monotonic() >= deadline:
            raise ValueError(
                f"--coordinator={place.address} could not be reached within {seconds:.0f} s "
                f"({problem}); process 0 is expected there"
            )
        time.sleep(0.2)


def _try_to_connect(place: Place, deadline: float) -> tuple[socket.socket | None, str]:
    patience = min(max(deadline - time.monotonic(), 0.1), 5.0)
    try:
        return socket.create_connection((place.host, place.port), timeout=patience), ""
    except OSError as error:
        return None, error.strerror or str(error)
