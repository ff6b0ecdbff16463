"""Rendezvous: process 0 hears from every process of a cluster before jax connects them.

If a process is missing, jax.distributed aborts the other processes without naming it. If a process
of another run arrives, jax.distributed accepts that process. Here each process opens a connection
to process 0 and sends its number and its options. All processes then hear that the cluster is
complete, or what is wrong. The connections stay open for `PeerMonitor`.

Both sides prove that they know the secret in the environment variable `SECRET`, without sending it.
Process 0 ignores whoever does not. Without a secret, everybody who reaches the port is believed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import queue
import secrets
import socket
import threading
import time
from typing import TypeVar

import msgspec

from lingvo_gshard.core import UserError, atomic
from lingvo_gshard.wings.cluster.envelope import are_equal, sign
from lingvo_gshard.wings.cluster.member import ClusterMember

# The environment variable of the secret that all processes share.
SECRET = "GSHARD_CLUSTER_SECRET"

_PROTOCOL = "lingvo_gshard 4"
_LONGEST_LINE = 2**16
_LONGEST_SHOWN = 200
_POLL_SECONDS = 0.2
# Seconds that process 0 waits for the first message of a new connection.
_HELLO_SECONDS = 5.0
# Connections that process 0 listens to at once; more wait until one of them has spoken.
_MOST_LISTENERS = 256

_Message = TypeVar("_Message", bound=msgspec.Struct)


class NotMetError(UserError):
    """Other processes did not come. They, or the network, are the reason."""


class Challenge(msgspec.Struct):
    """The first message of process 0 to a new connection.

    Attributes:
      nonce: a random text, which the answer must sign.
    """

    protocol: str
    nonce: str


class Hello(msgspec.Struct):
    """The message that a process sends to join.

    Attributes:
      options: options that all processes must share, by name; long ones as a hash.
      nonce: a random text, which process 0's reply must sign.
      proof: signature of the challenge and of this message without its proof.
    """

    process: int
    options: dict[str, str]
    nonce: str
    proof: str = ""


class Reply(msgspec.Struct):
    """The message of process 0 once all have come or something is wrong.

    Attributes:
      error: what is wrong; None if the cluster is complete.
      token: random text that is told to the processes of the cluster only.
      proof: signature of the hello's nonce, the error and the token.
    """

    error: str | None
    token: str = ""
    proof: str = ""


def meet(
    member: ClusterMember, options: dict[str, str], timeout: float
) -> tuple[dict[int, socket.socket], str]:
    """Waits for all processes and returns the connections to them, and what only they know.

    Args:
      options: options that all processes must share, by name.
      timeout: seconds to wait for the others.

    Returns:
      Process -> connection, and a random text. Process 0 has a connection to each other process,
      the others have one to process 0. All have the same text.

    Raises:
      UserError: a process did not come or has other options. Every process that came raises it.
    """
    shared = {"num_processes": str(member.count), **options}
    shared = {name: _short(text) for name, text in shared.items()}
    if member.index == 0:
        return _Reception(member, shared).receive_all(timeout)
    connection, token = _report(member, shared, timeout)
    return {0: connection}, token


def bind_address(member: ClusterMember) -> str:
    """Returns the address where process 0 listens: the coordinator's, if possible.

    Many systems give a machine's own name a loopback address. Other machines reach the machine by
    another address. Process 0 then listens at all addresses.

    Raises:
      UserError: the coordinator's name is unknown; names `coordinator`.
    """
    if member.bind_address:
        return member.bind_address
    try:
        found = socket.getaddrinfo(member.host, member.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"`coordinator={member.address}`: process 0 does not know this host ({error.strerror})"
        ) from None
    address = str(found[0][4][0])
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if is_loopback and member.host not in ("localhost", address):
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return address


def is_open_to_strangers(member: ClusterMember) -> bool:
    """Returns whether other machines may reach process 0, and no secret keeps them out."""
    address = ipaddress.ip_address(bind_address(member).partition("%")[0])
    return not address.is_loopback and not os.environ.get(SECRET)


def listen(member: ClusterMember) -> socket.socket:
    """Opens the port where the others reach process 0.

    Raises:
      UserError: it cannot be opened.
    """
    address = bind_address(member)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    is_dual = address == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (address, member.port), family=family, backlog=_MOST_LISTENERS, dualstack_ipv6=is_dual
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise UserError(
            f"`coordinator={member.address}`: process 0 cannot open port {member.port} here at "
            f"{address} ({reason}); choose a free port of process 0's machine, or another "
            "`coordinator_bind_address`"
        ) from None


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
        return atomic.decode(line, message)
    except (OSError, msgspec.DecodeError):
        return None


def _short(text: str) -> str:
    """Returns a short text as is, and the hash of a long text, such as all Params."""
    if len(text) <= _LONGEST_SHOWN:
        return text
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


class _Reception:
    """Process 0's side of `meet`."""

    def __init__(self, member: ClusterMember, options: dict[str, str]):
        self._member, self._options = member, options
        self._arrived: dict[int, socket.socket] = {}
        self._nonces: dict[socket.socket, str] = {}
        # Connections that have said hello, and the number of connections with another secret.
        self._hellos: queue.SimpleQueue[tuple[socket.socket, Hello]] = queue.SimpleQueue()
        self._strangers, self._token = 0, secrets.token_hex(16)
        self._may_listen = threading.Semaphore(_MOST_LISTENERS)

    def receive_all(self, timeout: float) -> tuple[dict[int, socket.socket], str]:
        """Waits for a hello of every other process, and replies to all of them."""
        deadline = time.monotonic() + timeout
        with listen(self._member) as listener:
            threading.Thread(target=self._accept, args=[listener], daemon=True).start()
            try:
                while len(self._arrived) < self._member.count - 1:
                    self._admit(deadline, timeout)
            except ValueError as error:
                while not self._hellos.empty():
                    connection, hello = self._hellos.get()
                    self._nonces[connection] = hello.nonce
                for connection in self._nonces:
                    self._reply(connection, str(error))
                    connection.close()
                raise
            finally:
                # Wakes the thread that accepts.
                listener.shutdown(socket.SHUT_RDWR)
        for connection in self._arrived.values():
            self._reply(connection, None)
        return self._arrived, self._token

    def _admit(self, deadline: float, timeout: float) -> None:
        """Waits for the next hello, and checks it.

        Raises:
          UserError: none came in time, or the process differs from process 0.
        """
        try:
            connection, hello = self._hellos.get(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            raise NotMetError(self._missing(timeout)) from None
        self._nonces[connection] = hello.nonce
        self._check(hello)
        self._arrived[hello.process] = connection

    def _accept(self, listener: socket.socket) -> None:
        """Listens to each new connection in a thread of its own, until the listener is closed."""
        while True:
            self._may_listen.acquire()
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._listen_to, args=[connection], daemon=True).start()

    def _listen_to(self, connection: socket.socket) -> None:
        """Queues a connection with its hello. Closes connections from outside the cluster."""
        challenge = Challenge(_PROTOCOL, secrets.token_hex(16))
        send_line(connection, challenge)
        hello = read_line(connection, Hello, _HELLO_SECONDS)
        self._may_listen.release()
        if hello is None:
            connection.close()
        elif not are_equal(hello.proof, _proof_of_hello(challenge, hello)):
            self._strangers += 1
            send_line(connection, Reply(_OTHER_SECRET))
            connection.close()
        else:
            self._hellos.put((connection, hello))

    def _reply(self, connection: socket.socket, error: str | None) -> None:
        token = "" if error else self._token
        proof = _sign("reply", self._nonces[connection], error or "", token)
        send_line(connection, Reply(error, token, proof))

    def _missing(self, timeout: float) -> str:
        """Returns a sentence on the processes that did not come."""
        member = self._member
        missing = [str(k) for k in range(1, member.count) if k not in self._arrived]
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        others = f"; {self._strangers} with another {SECRET} were refused" * bool(self._strangers)
        return (
            f"`num_processes={member.count}` processes were expected at "
            f"`coordinator={member.address}`, but within {timeout:.0f} s none came with "
            f"`process_id` {shown}{others}"
        )

    def _check(self, hello: Hello) -> None:
        """Raises UserError if a process has a wrong number or other options than process 0."""
        process = hello.process
        for name, mine in self._options.items():
            theirs = hello.options.get(name, "nothing")
            if theirs == mine:
                continue
            if mine.startswith("sha256:") or theirs.startswith("sha256:"):
                raise UserError(f"process {process} has other {name} than process 0")
            raise UserError(
                f"process {process} has `{name}={theirs}`, but process 0 has `{name}={mine}`"
            )
        if not 0 <= process < self._member.count:
            raise UserError(
                f"a process came with `process_id={process}`; with "
                f"`num_processes={self._member.count}`, 1 to {self._member.count - 1} is expected"
            )
        if process == 0 or process in self._arrived:
            raise UserError(f"two processes were started with `process_id={process}`")


_OTHER_SECRET = f"process 0 has another {SECRET}; set the same value for all processes"


def _report(
    member: ClusterMember, options: dict[str, str], timeout: float
) -> tuple[socket.socket, str]:
    """The side of the other processes: tries until process 0 answers, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        connection, problem = _try_to_connect(member, deadline)
        if connection is not None:
            hello = Hello(member.index, options, secrets.token_hex(16))
            challenge = read_line(connection, Challenge, _HELLO_SECONDS)
            if challenge and challenge.protocol == _PROTOCOL:
                hello.proof = _proof_of_hello(challenge, hello)
                send_line(connection, hello)
                # Process 0 may start to wait only now.
                reply = read_line(connection, Reply, timeout + _HELLO_SECONDS)
                if reply and _is_believed(reply, hello, member):
                    return connection, reply.token
            connection.close()
            problem = "another program answers there"
        if time.monotonic() >= deadline:
            raise NotMetError(
                f"`coordinator={member.address}` could not be reached within {timeout:.0f} s "
                f"({problem}); process 0 is expected there"
            )
        time.sleep(_POLL_SECONDS)


def _is_believed(reply: Reply, hello: Hello, member: ClusterMember) -> bool:
    """Returns whether process 0 says that the cluster is complete."""
    if are_equal(reply.proof, _sign("reply", hello.nonce, reply.error or "", reply.token)):
        if reply.error:
            raise UserError(reply.error)
        return True
    if reply.error == _OTHER_SECRET:
        raise UserError(f"`coordinator={member.address}`: {_OTHER_SECRET}")
    return False


def _try_to_connect(member: ClusterMember, deadline: float) -> tuple[socket.socket | None, str]:
    timeout = min(max(deadline - time.monotonic(), 0.1), 5.0)
    try:
        return socket.create_connection((member.host, member.port), timeout=timeout), ""
    except OSError as error:
        return None, error.strerror or str(error)


def _proof_of_hello(challenge: Challenge, hello: Hello) -> str:
    unsigned = Hello(hello.process, hello.options, hello.nonce)
    return _sign("hello", challenge.nonce, msgspec.json.encode(unsigned).decode())


def _sign(*texts: str) -> str:
    return sign(os.environ.get(SECRET, ""), *texts)
