"""Meeting: the directory or bucket where the agents of a job leave each other messages.

    PLACE/secret                 what agents and workers of the job share
    PLACE/hosts/<host>.json      the sign of life of each agent
    PLACE/rounds/<number>.json   what they agreed on

A record is created exclusively. If two agents write the same number, all agents see the one that
was first. So agents agree although any of them may lead, and two may do so at once.

Every message is signed with the job's secret. Messages of strangers are not read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pathlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from lingvo_gshard.agents.records import Beat, Record
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.stores import is_bucket
from lingvo_gshard.runtime.cluster.rendezvous import SECRET

_HOSTS, _ROUNDS, _SECRET, _JSON = "hosts", "rounds", "secret", ".json"
_TICK_SECONDS = 0.5
_Message = TypeVar("_Message", Beat, Record)


def shared_secret(place: str) -> str:
    """Returns the secret of a job: from the environment, else from its file, which may be made.

    Args:
      place: where the job's agents meet.

    Raises:
      UserError: the file cannot be read or written.
    """
    given = os.environ.get(SECRET)
    if given:
        return given
    path = f"{place}/{_SECRET}"
    try:
        objects.make_folder(place)
        create(path, secrets.token_hex(16).encode(), mode=0o600)
        return objects.read_bytes(path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"`meeting_place={place}`: {path} cannot be used ({reason})") from None


class Meeting:
    """The messages of one job."""

    def __init__(self, place: str, secret: str, say: Callable[[str], None]):
        """Opens the place, which is created if it is new.

        Args:
          place: a directory or a bucket.
          secret: the job's secret.
          say: shows a line to the user.

        Raises:
          OSError: the place cannot be written.
        """
        self._place, self._key, self._say = place, secret.encode(), say
        self._refused: set[str] = set()
        for folder in (_HOSTS, _ROUNDS):
            objects.make_folder(f"{place}/{folder}")

    def hosts(self) -> list[str]:
        """Returns the names of all hosts that have left a sign, sorted."""
        names = objects.names(f"{self._place}/{_HOSTS}")
        return [name.removesuffix(_JSON) for name in names if _is_message(name)]

    def beat(self, host: str) -> Beat | None:
        """Returns the last sign of a host; None if there is none."""
        return self._read(f"{_HOSTS}/{host}{_JSON}", Beat)

    def write_beat(self, beat: Beat) -> None:
        """Replaces the sign of this host. Raises OSError if it cannot be written."""
        path = f"{self._place}/{_HOSTS}/{beat.host}{_JSON}"
        content = self._signed(beat)
        if is_bucket(path):
            objects.write_bytes(path, content)
            return
        # Signs come often, and are worth nothing after a loss of power: nothing waits for the disk.
        new = pathlib.Path(f"{path}.{beat.life}")
        new.write_bytes(content)
        os.replace(new, path)

    def remove_beat(self, host: str) -> None:
        """Removes the sign of this host."""
        objects.remove(f"{self._place}/{_HOSTS}/{host}{_JSON}")

    def newest(self) -> Record | None:
        """Returns the record with the highest number; None if there is none."""
        names = objects.names(f"{self._place}/{_ROUNDS}")
        numbers = [int(stem) for name in names if (stem := name.partition(".")[0]).isdigit()]
        for number in sorted(numbers, reverse=True):
            record = self._read(f"{_ROUNDS}/{number}{_JSON}", Record)
            if record is not None and record.number == number:
                return record
        return None

    def agree(self, record: Record) -> Record | None:
        """Writes a record unless there is one of its number. Returns the one that is there."""
        name = f"{_ROUNDS}/{record.number}{_JSON}"
        create(f"{self._place}/{name}", self._signed(record))
        return self._read(name, Record)

    def _signed(self, message: Beat | Record) -> bytes:
        body = msgspec.json.encode(message)
        return body + b"\n" + self._signature(body) + b"\n"

    def _signature(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).hexdigest().encode()

    def _read(self, name: str, kind: type[_Message]) -> _Message | None:
        """Returns a message; None if it is missing, incomplete or of a stranger."""
        try:
            content = objects.read_bytes(f"{self._place}/{name}")
        except FileNotFoundError:
            return None
        body, _, signature = content.rstrip(b"\n").rpartition(b"\n")
        if not hmac.compare_digest(signature, self._signature(body)):
            self._refuse(name)
            return None
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError:
            self._refuse(name)
            return None

    def _refuse(self, name: str) -> None:
        """Says once that a file is not of this job."""
        if name not in self._refused:
            self._refused.add(name)
            self._say(
                f"Warning: {self._place}/{name} is not signed with this job's secret and is ignored"
            )


def create(path: str, content: bytes, mode: int = 0o644) -> bool:
    """Creates a file with all of its content, unless it is there. Returns whether it was created.

    Raises:
      OSError: it cannot be written.
    """
    if is_bucket(path):
        file = objects.CompareAndSwapFile(path)
        found, generation = file.read()
        return found is None and file.write(content, generation) is not None
    new = pathlib.Path(f"{path}.{secrets.token_hex(4)}.new")
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # A link is made only if there is no file, also on a network file system.
        os.link(new, path)
    except FileExistsError:
        return False
    finally:
        new.unlink(missing_ok=True)
    return True


def _is_message(name: str) -> bool:
    """Returns whether a file is a sign, and no unfinished one."""
    return name.endswith(_JSON)


class Reach:
    """Calls a function once when an agent has not met the others for some time.

    It has a thread of its own, since a request to a file server or a bucket may block for minutes.
    """

    def __init__(self, limit: float, on_loss: Callable[[], None]):
        """Prepares to watch.

        Args:
          limit: seconds without a meeting.
          on_loss: called in the thread.
        """
        self._limit, self._on_loss = limit, on_loss
        self._seconds, self._is_lost = 0.0, False
        self._closed = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._watch, name="reach", daemon=True).start()

    def met(self) -> None:
        """Notes that the agent has met the others."""
        self._seconds, self._is_lost = 0.0, False

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(_TICK_SECONDS):
            now = time.monotonic()
            # While this process was stopped, or the machine slept, nothing was out of reach.
            self._seconds += min(now - last, 2 * _TICK_SECONDS)
            last = now
            if self._seconds > self._limit and not self._is_lost:
                self._is_lost = True
                self._on_loss()
