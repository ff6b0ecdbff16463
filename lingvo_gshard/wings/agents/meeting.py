"""Meeting: the directory or bucket where the agents of a job leave each other messages.

    PLACE/secret                 what agents and workers of the job share
    PLACE/hosts/<host>.json      the sign of life of each agent
    PLACE/rounds/<number>.json   what they agreed on

A record is created exclusively. If two agents write the same number, all agents see the one that
was first. So agents agree although any of them may lead, and two may do so at once.

Every message is signed with the job's secret for the name that its file has (`Envelope`). Whoever
can write here without the secret can destroy messages. Any other file of theirs, of whatever kind
and under whatever name, is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import TypeVar

import msgspec

from lingvo_gshard.core import UserError, atomic, is_bucket, objects, regular, whole_number
from lingvo_gshard.wings.agents.border import Border
from lingvo_gshard.wings.agents.records import Beat, Record
from lingvo_gshard.wings.cluster.envelope import RECORD, SIGN, ForeignError, pack, sign, unpack
from lingvo_gshard.wings.cluster.rendezvous import SECRET
from lingvo_gshard.wings.object_stores.buckets import CompareAndSwapFile

_HOSTS, _ROUNDS, _SECRET, _JSON = "hosts", "rounds", "secret", ".json"
_TICK_SECONDS = 0.5
# A sign of the agent that leads names every host, in some 50 bytes each.
_LONGEST_MESSAGE = 2**22
# Signs that are read at once: a request to a bucket takes tens of milliseconds.
_AT_ONCE = 32
_LONGEST_SECRET = 4096
_LONGEST_HOST = 200
# Errors of a file that a stranger has put there. Any other error is about the whole place.
_STRANGE = {errno.EINVAL, errno.EISDIR, errno.EACCES, errno.ELOOP}
# Numbers that one attempt to agree finds taken by strangers.
_MOST_TAKEN = 100
_Message = TypeVar("_Message", Beat, Record)


def shared_secret(place: str) -> str:
    """Returns the secret of a job: from the environment, else from its file, which may be made.

    Jobs in different places have different secrets although the environment gives one to all of
    them. A message of another job is therefore a stranger's.

    Raises:
      UserError: the file cannot be read or written, or somebody else has made it.
    """
    given = os.environ.get(SECRET)
    if given:
        return sign(given, "job", place)
    path = f"{place}/{_SECRET}"
    try:
        objects.make_folder(place)
        create(path, secrets.token_hex(16).encode(), mode=0o600)
        if not is_bucket(path) and os.lstat(path).st_uid != _owner_of_new_files(place):
            raise OSError(errno.EPERM, "another user has made it")
        secret = _read(path, _LONGEST_SECRET).decode("ascii").strip()
        if not secret:
            raise OSError(errno.EINVAL, "it is empty")
        return secret
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"`meeting_place={place}`: {path} cannot be used ({reason})") from None


@functools.lru_cache(2**14)
def is_host_name(name: str) -> bool:
    """Returns whether a host may have a name. Its sign is a file of that name."""
    is_file_name = name.isprintable() and "/" not in name and not name.startswith(".")
    return is_file_name and 0 < len(name.encode()) <= _LONGEST_HOST


class Meeting:
    """The messages of one job.

    Attributes:
      tells_losses: whether a host without a sign is certainly lost. A network file system may show
        a sign late.
      is_in_bucket: whether the place is a bucket.
      is_disturbed: whether somebody else has replaced the sign of this host since it was written.
    """

    tells_losses = False

    def __init__(self, place: str, secret: str, say: Callable[[str], None]):
        """Opens the place, which is created if it is new.

        Args:
          place: a directory or a bucket.

        Raises:
          UserError: the place cannot be written.
        """
        self._place, self._secret, self._border = place, secret, Border(say)
        # Files that are no messages of this job.
        self._refused: set[str] = set()
        self.is_in_bucket, self.is_disturbed = is_bucket(place), False
        # The file of this host's sign; 0 before the first.
        self._own_file = 0
        self._pool = futures.ThreadPoolExecutor(_AT_ONCE)
        try:
            for folder in (_HOSTS, _ROUNDS):
                objects.make_folder(f"{place}/{folder}")
        except OSError as error:
            reason = f"{place}/{folder} cannot be used ({error.strerror})"
            raise UserError(f"`meeting_place={place}`: {reason}") from None

    def hosts(self) -> list[str]:
        """Returns the names of all hosts that may have left a sign, sorted."""
        names = objects.names(f"{self._place}/{_HOSTS}")
        stems = (name.removesuffix(_JSON) for name in names if name.endswith(_JSON))
        return list(filter(is_host_name, stems))

    def beat(self, host: str) -> Beat | None:
        """Returns the sign of a host; None if there is none. It may be an old one."""
        beat = self._find(_HOSTS, host, SIGN, Beat)
        return beat if beat is not None and beat.host == host else None

    def write_beat(self, beat: Beat) -> None:
        """Replaces the sign of this host. Raises OSError if it cannot be written."""
        path = f"{self._place}/{_HOSTS}/{beat.host}{_JSON}"
        content = pack(self._secret, SIGN, beat.host, msgspec.json.encode(beat))
        if is_bucket(path):
            objects.write_bytes(path, content)
            return
        # Signs come often, and are worth nothing after a loss of power: nothing waits for the disk.
        with _new_file(path, content) as new:
            self._note_disturbance(path)
            if os.path.isdir(path) and not os.path.islink(path):
                os.rename(path, f"{path}.{secrets.token_hex(4)}.not-a-sign")
            self._own_file = new.stat().st_ino
            os.replace(new, path)

    def _note_disturbance(self, path: str) -> None:
        """Compares the file of this host's sign with the one that it has written."""
        try:
            found = os.lstat(path).st_ino
        except FileNotFoundError:
            found = 0
        self.is_disturbed = found != self._own_file != 0
        if self.is_disturbed:
            self._border.tell(f"Warning: somebody else has replaced or removed {path}")

    def remove_beat(self, host: str) -> None:
        """Removes the sign of this host."""
        objects.remove(f"{self._place}/{_HOSTS}/{host}{_JSON}")

    def beats(self, hosts: Iterable[str]) -> dict[str, Beat]:
        """Returns host -> its sign, for those that have one. Reads some at once."""
        named = list(hosts)
        found = zip(named, self._pool.map(self.beat, named), strict=True)
        return {host: beat for host, beat in found if beat is not None}

    def newest(self, known: int = 0, told: int = 0) -> Record | None:
        """Returns the record with the highest number; None if none is new.

        Args:
          known: records up to this number are not new, and none of them is read.
          told: a number that another agent knows, although the folder may not show it yet.
        """
        names = objects.names(f"{self._place}/{_ROUNDS}")
        numbers = {told, *(whole_number(name.removesuffix(_JSON)) or 0 for name in names)}
        for number in sorted((one for one in numbers if one > known), reverse=True):
            record = self._record(number)
            if record is not None:
                return record
        return None

    def agree(self, record: Record) -> Record | None:
        """Writes a record unless there is one of its number. Returns the one that is there.

        Files of strangers stay where they are, since of two agents that replace such a file, each
        could replace the other's record. The record then has the next number without one.

        Returns:
          None if strangers have taken many numbers. The next call then goes on behind them.
        """
        for _ in range(_MOST_TAKEN):
            path = f"{self._place}/{_ROUNDS}/{record.number}{_JSON}"
            while path in self._refused:
                record = msgspec.structs.replace(record, number=record.number + 1)
                path = f"{self._place}/{_ROUNDS}/{record.number}{_JSON}"
            content = pack(self._secret, RECORD, str(record.number), msgspec.json.encode(record))
            create(path, content)
            found = self._record(record.number)
            if found is not None or path not in self._refused:
                return found
        return None

    def _record(self, number: int) -> Record | None:
        record = self._find(_ROUNDS, str(number), RECORD, Record)
        return record if record is not None and record.number == number else None

    def _find(self, folder: str, name: str, kind: str, type_: type[_Message]) -> _Message | None:
        """Returns a message; None if it is missing, incomplete or of a stranger."""
        path = f"{self._place}/{folder}/{name}{_JSON}"
        try:
            packed = _read(path, _LONGEST_MESSAGE)
            return atomic.decode(unpack(self._secret, kind, name, packed), type_)
        except FileNotFoundError:
            return None
        except (ForeignError, msgspec.DecodeError):
            self._refuse(path, "is not signed by this job for its name")
        except OSError as error:
            if error.errno not in _STRANGE or is_bucket(path):
                raise
            self._refuse(path, f"cannot be read ({error.strerror})")
        except Exception:
            self._refused.add(path)
            self._border.tell_error(f"{path} was read")
        return None

    def _refuse(self, path: str, reason: str) -> None:
        """Says once that a file is no message of this job."""
        if path not in self._refused:
            self._refused.add(path)
            self._border.tell(f"Warning: {path} {reason} and is ignored")


def _read(path: str, limit: int) -> bytes:
    """Returns the content of a file; OSError if it is longer than the limit, or no file."""
    if is_bucket(path):
        return objects.read_bytes(path)
    return regular.read_regular(path, limit)


@contextlib.contextmanager
def _new_file(
    path: str, content: bytes, mode: int = 0o644, syncs: bool = False
) -> Iterator[pathlib.Path]:
    """Writes a file beside `path`. It is gone after the block."""
    new = pathlib.Path(f"{path}.{secrets.token_hex(4)}{atomic.NEW}")
    try:
        # Exclusively, since somebody may have left a link or a pipe under any name.
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if syncs:
                os.fsync(file.fileno())
        yield new
    finally:
        new.unlink(missing_ok=True)


def create(path: str, content: bytes, mode: int = 0o644) -> bool:
    """Creates a file with all of its content, unless it is there. Returns whether it was created.

    Raises:
      OSError: it cannot be written.
    """
    if is_bucket(path):
        file = CompareAndSwapFile(path)
        found, generation = file.read()
        return found is None and file.write(content, generation) is not None
    with _new_file(path, content, mode, syncs=True) as new:
        try:
            # A link is made only if there is no file, also on a network file system.
            os.link(new, path)
        except FileExistsError:
            return False
    return True


def _owner_of_new_files(folder: str) -> int:
    """Returns whose this user's files are there; a file server may give them to another user."""
    with _new_file(f"{folder}/owner", b"") as new:
        return os.stat(new).st_uid


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
