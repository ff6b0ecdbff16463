"""Keeper: holds snapshots in the memory of a host, and copies of its partners' parts.

Workers write parts of snapshots to a folder in memory. The keeper serves the parts to the agents of
other hosts, and copies the parts of some of them, its partners. When a host is lost, another one
still has the lost part, and the host that replaces the lost one fetches the part from there.

Both sides prove that they know the job's secret before a byte of a part is sent. The signature of
all bytes follows them, so that a part that was changed on its way is no part. A copy has a deadline
as a whole, so that a partner that hardly answers does not keep workers from starting.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from lingvo_gshard.core import regular
from lingvo_gshard.wings.agents import leftovers
from lingvo_gshard.wings.agents.border import Border
from lingvo_gshard.wings.cluster.envelope import PART, Envelope, are_equal, sign
from lingvo_gshard.wings.cluster.rendezvous import read_line, send_line
from lingvo_gshard.wings.services.snapshot_parts import Part

# Longest wait for the other side to begin, and for each of its messages.
_SECONDS = 20.0
# A copy may take so long for each byte besides; a network for training is much faster.
_SECONDS_PER_BYTE = 1 / 2**23
_BLOCK = 2**20
# Connections that are served at once. Strangers take no more than these.
_MOST = 64


class _Challenge(msgspec.Struct):
    """The first message of the side that serves: a random text for the other to sign."""

    nonce: str


class _Request(msgspec.Struct):
    """The answer: the name of a file, a text to sign in turn, and the proof of the secret."""

    name: str
    nonce: str
    proof: str


class _Reply(msgspec.Struct):
    """The size of the file, whose bytes follow, and the proof of the secret."""

    size: int
    proof: str


class _End(msgspec.Struct):
    """The last message: the signature of the file's bytes."""

    signature: str


class Keeper:
    """The parts on one host."""

    def __init__(self, folder: str, address: str, secret: str, say: Callable[[str], None]):
        """Opens the folder, which may have parts of an agent that was killed, and serves it.

        Args:
          folder: in memory; created if it is new.
          address: where the other hosts reach this one.

        Raises:
          OSError: the folder cannot be made, or is another agent's or another user's.
        """
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = leftovers.hold(self.folder)
        self._secret, self._border = secret, Border(say)
        self._copying: threading.Thread | None = None
        self._may_serve = threading.Semaphore(_MOST)
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="keeper", daemon=True).start()

    def parts(self) -> tuple[Part, ...]:
        """Returns the complete parts that this host has, its partners' included."""
        return tuple(Part.within(self.folder))

    def replicate(self, partner: Sequence[Part], address: str, port: int) -> None:
        """Copies the newest part of the partner in the background, and drops older copies.

        Args:
          partner: the parts that the partner's worker has written, in order.
        """
        if not partner or (self._copying is not None and self._copying.is_alive()):
            return
        newest = partner[-1]
        copies = [one for one in self.parts() if one.index == newest.index]
        if newest in copies:
            for one in copies:
                if one not in partner:
                    self._path(one).unlink(missing_ok=True)
            return
        self._copying = threading.Thread(
            target=self.fetch, args=[newest, address, port], daemon=True
        )
        self._copying.start()

    def fetch(self, part: Part, address: str, port: int) -> pathlib.Path | None:
        """Returns the file of a part, copied from another host if it is not here.

        Returns:
          None if the other host does not have it, or does not answer.
        """
        path = self._path(part)
        if path.exists():
            return path
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            with socket.create_connection((address, port), timeout=_SECONDS) as connection:
                self._receive(connection, part.name, new)
            os.replace(new, path)
            return path
        except (OSError, ValueError) as error:
            reason = f"a part of a snapshot cannot be copied from {address} ({error})"
            self._border.tell(f"Warning: {reason}")
        except Exception:
            self._border.tell_error(f"a part of a snapshot was copied from {address}")
        new.unlink(missing_ok=True)
        return None

    def tidy(self, is_new: bool) -> None:
        """Removes folders beside this one whose agents were killed for good; see `leftovers`."""
        for line in leftovers.tidy(self.folder, is_new):
            self._border.tell(line)

    def clear(self) -> None:
        """Deletes all parts."""
        self.drop(self.parts())

    def drop(self, parts: Iterable[Part]) -> None:
        """Deletes some parts."""
        for part in parts:
            self._path(part).unlink(missing_ok=True)

    def drop_before(self, round_: int, index: int) -> None:
        """Deletes parts of earlier rounds when the newest snapshots of a round replace them.

        Args:
          index: number of this host's worker in the round.
        """
        parts = self.parts()
        # When one process has written its second snapshot, all have written their first.
        if any((one.round, one.index) == (round_, index) and one.serial > 1 for one in parts):
            self.drop(one for one in parts if one.round < round_)

    def close(self) -> None:
        """Stops serving and deletes the folder."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _path(self, part: Part) -> pathlib.Path:
        return self.folder / part.name

    def _receive(self, connection: socket.socket, name: str, path: pathlib.Path) -> None:
        """Asks for a file and writes it. Raises ValueError for an answer that is none."""
        challenge = read_line(connection, _Challenge, _SECONDS)
        if challenge is None:
            raise ValueError("no keeper answers there")
        nonce = secrets.token_hex(16)
        proof = sign(self._secret, "ask", challenge.nonce, name)
        send_line(connection, _Request(name, nonce, proof))
        reply = read_line(connection, _Reply, _SECONDS)
        if reply is None or not are_equal(
            reply.proof, sign(self._secret, "give", nonce, name, str(reply.size))
        ):
            raise ValueError("it does not have the part, or another secret")
        envelope, left = Envelope(self._secret, PART, nonce, name), reply.size
        deadline = _Deadline(reply.size)
        with path.open("wb") as file:
            while left:
                connection.settimeout(deadline.left)
                block = connection.recv(min(_BLOCK, left))
                if not block:
                    raise ValueError("the copy ended early")
                envelope.add(block)
                file.write(block)
                left -= len(block)
        end = read_line(connection, _End, _SECONDS)
        if end is None or not are_equal(end.signature, envelope.signature):
            raise ValueError("the copy differs from the part")

    def _accept(self) -> None:
        while True:
            self._may_serve.acquire()
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answers one connection, whatever it sends."""
        try:
            with connection:
                self._answer(connection)
        except OSError:
            # The other side is gone, or the part was replaced by a newer one.
            return
        except Exception:
            self._border.tell_error("a part of a snapshot was asked for")
        finally:
            self._may_serve.release()

    def _answer(self, connection: socket.socket) -> None:
        """Sends the file that an agent of this job asks for; refuses everybody else."""
        nonce = secrets.token_hex(16)
        send_line(connection, _Challenge(nonce))
        asked = read_line(connection, _Request, _SECONDS)
        if asked is None or not are_equal(
            asked.proof, sign(self._secret, "ask", nonce, asked.name)
        ):
            self._border.tell("Warning: a stranger asked for a part of a snapshot and was refused")
            return
        part = Part.parse(asked.name)
        if part is None:
            return
        with regular.open_regular(self._path(part)) as file:
            size = os.fstat(file.fileno()).st_size
            proof = sign(self._secret, "give", asked.nonce, asked.name, str(size))
            send_line(connection, _Reply(size, proof))
            envelope = Envelope(self._secret, PART, asked.nonce, asked.name)
            deadline = _Deadline(size)
            while block := file.read(_BLOCK):
                envelope.add(block)
                connection.settimeout(deadline.left)
                connection.sendall(block)
            send_line(connection, _End(envelope.signature))


class Preparation:
    """Fetches what a worker restores, while its agent goes on giving signs of life.

    Attributes:
      paths: the files of all parts when they are there; empty if one cannot be had.
    """

    def __init__(
        self,
        keeper: Keeper,
        holders: Mapping[Part, Sequence[tuple[str, int]]],
        on_end: Callable[[], None],
    ):
        """Begins to fetch.

        Args:
          keeper: of this host.
          holders: part -> address and port of the keepers that have it; empty if the worker
            restores no snapshot.
          on_end: called in a thread when the parts are there, or cannot be had.
        """
        self.paths: list[pathlib.Path] = []
        self._keeper, self._holders, self._on_end = keeper, holders, on_end
        self._borrowed: list[Part] = []
        self._thread = threading.Thread(target=self._fetch, daemon=True)
        if holders:
            self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the parts are there, or cannot be had."""
        return not self._thread.is_alive()

    def give_back(self) -> None:
        """Deletes parts that other hosts keep, after the worker has read them."""
        self._keeper.drop(self._borrowed)
        self._borrowed = []

    def _fetch(self) -> None:
        paths, here = [], self._keeper.parts()
        for part, holders in self._holders.items():
            found = (self._keeper.fetch(part, address, port) for address, port in holders)
            path = next(filter(None, found), None)
            if path is None:
                # Newer snapshots need the memory.
                self.give_back()
                break
            paths.append(path)
            if len(self._holders) > 1 and part not in here:
                self._borrowed.append(part)
        else:
            self.paths = paths
        self._on_end()


class _Deadline:
    """The end of the time that a copy may take."""

    def __init__(self, size: int):
        """Begins now, for so many bytes."""
        self._at = time.monotonic() + _SECONDS + size * _SECONDS_PER_BYTE

    @property
    def left(self) -> float:
        """Seconds that are left. Raises TimeoutError if none are."""
        seconds = self._at - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the copy takes too long")
        return seconds


def _listen(address: str) -> socket.socket:
    """Listens at the address alone if it is one of this host, else at all of them."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[4][:2], family=found[0])
    except OSError:
        # The other hosts reach this one through another machine.
        return socket.create_server(("", 0))
