"""Relay: carries the connections of jax's own service, which asks nobody for a secret.

Whoever reaches that service can join a run or end it. So the service of process 0 listens at a
socket in a folder that only this user can open, and a relay carries jax's connections:

    jax, process 1 -> socket -> its relay ==> relay of process 0 -> socket -> service, process 0

The relay of process 0 listens at the coordinator's port, and lets in only who proves the secret and
the token of the run, which process 0 gave to all processes at the rendezvous.

A relay is a process of its own. In a thread, it would stop while a library blocks the interpreter,
and jax would take that for the end of the process. When its parent ends, however that happens, it
removes the folder and ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from typing import TypeAlias

import msgspec

from lingvo_gshard.core import UserError, atomic
from lingvo_gshard.wings.cluster.child_process import answer_stream, start_module
from lingvo_gshard.wings.cluster.envelope import are_equal, sign
from lingvo_gshard.wings.cluster.member import ClusterMember
from lingvo_gshard.wings.cluster.rendezvous import SECRET, listen

_HANDSHAKE_SECONDS = 5.0
_CONNECT_SECONDS, _POLL_SECONDS = 30.0, 0.1
_BLOCK = 2**16
_STANDARD_ERROR = 2
# Connections that have not proved the secret yet; more are closed, and jax tries again.
_MOST_PENDING = 256
# Paths of sockets have at most 104 bytes.
_LONGEST_FOLDER = 60


# Both directions of a connection.
_Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Order(msgspec.Struct):
    """Tells a relay what to do.

    Attributes:
      token: text that all processes of the run know.
      socket: path of the socket to jax.
    """

    member: ClusterMember
    token: str
    socket: str


class _Ready(msgspec.Struct):
    """The answer to an order: what is wrong; None if the relay listens."""

    error: str | None


class _Challenge(msgspec.Struct):
    """The first message to who connects: a random text to sign."""

    nonce: str


class _Entry(msgspec.Struct):
    """The answer: the proof, and a text to sign in turn."""

    nonce: str
    proof: str


class _Admission(msgspec.Struct):
    """The last message before jax's bytes: the proof of the other side."""

    proof: str


class Relay:
    """The relay of this process.

    Attributes:
      address: where jax finds its service, in the form of gRPC.
    """

    def __init__(self, member: ClusterMember, token: str):
        """Starts the relay and waits until it listens.

        Args:
          token: text that all processes of the run know, and nobody else.

        Raises:
          UserError: it cannot listen.
        """
        temporary = tempfile.gettempdir()
        parent = temporary if len(temporary) <= _LONGEST_FOLDER else "/tmp"
        socket = f"{tempfile.mkdtemp(prefix='gshard-relay-', dir=parent)}/jax"
        self.address = f"unix:{socket}"
        self._process = start_module(__name__, stderr=_STANDARD_ERROR)
        assert self._process.stdin is not None and self._process.stdout is not None
        order = msgspec.json.encode(_Order(member, token, socket))
        self._process.stdin.write(order + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        ready = atomic.decode(line, _Ready) if line else _Ready("the relay to jax has ended")
        if ready.error is not None:
            self.close()
            raise UserError(ready.error)

    def close(self) -> None:
        """Ends the relay and removes its socket."""
        self._process.communicate()


class _Carrier:
    """The relay's own process."""

    def __init__(self, order: _Order):
        self._order, self._key = order, os.environ.get(SECRET, "")
        self._pending = 0

    async def open(self) -> asyncio.Server:
        """Listens. Raises UserError or OSError if that is not possible."""
        if self._order.member.index == 0:
            listener = listen(self._order.member)
            return await asyncio.start_server(self._admit, sock=listener)
        return await asyncio.start_unix_server(self._tunnel, self._order.socket)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards a connection to jax's service if it comes from this run; else closes it."""
        self._pending += 1
        try:
            if self._pending <= _MOST_PENDING:
                await asyncio.wait_for(self._check(reader, writer), _HANDSHAKE_SECONDS)
                inner = await asyncio.open_unix_connection(self._order.socket)
        except Exception:
            # A stranger, or a process that has ended meanwhile.
            inner = None
        finally:
            self._pending -= 1
        if inner is None:
            writer.close()
            return
        await _carry((reader, writer), inner)

    async def _check(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises ValueError if the other side does not prove that it belongs to the run."""
        challenge = _Challenge(secrets.token_hex(16))
        _write(writer, challenge)
        entry = atomic.decode(await reader.readline(), _Entry)
        if not are_equal(entry.proof, self._sign("enter", challenge.nonce, entry.nonce)):
            raise ValueError("a stranger")
        _write(writer, _Admission(self._sign("admit", entry.nonce)))

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards a connection of jax to the relay of process 0."""
        try:
            outer = await asyncio.wait_for(self._enter(), _CONNECT_SECONDS)
        except Exception:
            # jax tries again, and says what it could not do.
            writer.close()
            return
        await _carry((reader, writer), outer)

    async def _enter(self) -> _Streams:
        """Connects to the relay of process 0, which may start to listen only now."""
        member = self._order.member
        while True:
            try:
                reader, writer = await asyncio.open_connection(member.host, member.port)
                break
            except OSError:
                await asyncio.sleep(_POLL_SECONDS)
        challenge = atomic.decode(await reader.readline(), _Challenge)
        nonce = secrets.token_hex(16)
        _write(writer, _Entry(nonce, self._sign("enter", challenge.nonce, nonce)))
        admission = atomic.decode(await reader.readline(), _Admission)
        if not are_equal(admission.proof, self._sign("admit", nonce)):
            writer.close()
            raise ValueError("a stranger")
        return reader, writer

    def _sign(self, kind: str, *texts: str) -> str:
        return sign(self._key, kind, self._order.token, *texts)


def _write(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    writer.write(msgspec.json.encode(message) + b"\n")


async def _carry(one: _Streams, other: _Streams) -> None:
    """Carries bytes in both directions until one side closes its connection."""
    await asyncio.gather(_pump(one[0], other[1]), _pump(other[0], one[1]))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while block := await reader.read(_BLOCK):
            writer.write(block)
            await writer.drain()
    except OSError:
        pass
    finally:
        # The other direction then ends, too.
        writer.close()


async def _run(order: _Order) -> None:
    answers = answer_stream()
    try:
        server = await _Carrier(order).open()
    except (UserError, OSError) as error:
        answers.write(msgspec.json.encode(_Ready(str(error))) + b"\n")
        return
    answers.write(msgspec.json.encode(_Ready(None)) + b"\n")
    async with server:
        await server.serve_forever()


def main() -> None:
    """Takes the order from standard input, and carries until that is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # A scheduler sends it to all processes. The parent decides when it ends.
        signal.signal(number, signal.SIG_IGN)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Order)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        end()

    def end() -> None:
        shutil.rmtree(os.path.dirname(order.socket), ignore_errors=True)
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(_run(order))
    end()


if __name__ == "__main__":
    main()
