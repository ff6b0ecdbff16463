"""Place: a simulated file system or bucket, with the delays and limits of a real one."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import errno
import math
import random
from collections.abc import Callable, Iterable

from benchmarks.agents.clock import Clock

# As in wings/agents/meeting.py.
_AT_ONCE = 32
# Objects that a request for a list returns.
_PAGE = 1000


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of place, and its speed.

    Attributes:
      read_seconds: median latency of a read or a list.
      write_seconds: median latency of a write.
      reads: most reads and lists in a second.
      writes: most writes in a second.
      list_seconds: longest time until a list shows a new file.
      source: where the figures come from.
    """

    read_seconds: float
    write_seconds: float
    reads: float
    writes: float
    list_seconds: float
    source: str


KINDS = {
    "nfs": Kind(0.001, 0.003, 20_000, 10_000, 3.0, "assumed: a server with flash memory"),
    "gcs": Kind(
        0.03, 0.06, 5000, 1000, 0.0, "https://cloud.google.com/storage/docs/request-rate, at first"
    ),
}


class Troubles:
    """Faults of the place, each with its probability in one operation.

    Attributes:
      fails: of an error, before a write is done.
      forgets: of an error after a write is done.
      loses: that a sign is never written although no error is raised.
      late: that others see a sign only after some seconds.
    """

    def __init__(self, fails: float = 0, forgets: float = 0, loses: float = 0, late: float = 0):
        self.fails, self.forgets, self.loses, self.late = fails, forgets, loses, late


class Place:
    """Files, and the counts of what was done with them.

    Attributes:
      cut: names of hosts that cannot reach the place.
      user: name of the host that uses it.
      counts: interval of time -> counts of reads, writes and bytes read.
    """

    def __init__(self, clock: Clock, kind: Kind, troubles: Troubles, interval: float, seed: int):
        """Is empty."""
        self._clock, self._kind, self._troubles = clock, kind, troubles
        self._random = random.Random(seed)
        self._interval = interval
        self._reads: collections.Counter[str] = collections.Counter()
        # Path -> times of changes, and the new contents; None: removed.
        self._files: dict[str, tuple[list[float], list[bytes | None]]] = {}
        # Folder -> time of its last change, and the names in it since.
        self._lists: dict[str, tuple[float, list[str]]] = {}
        # Operation -> its median latency, the most in a second, and the count in each second.
        self._limits: dict[str, tuple[float, float, collections.Counter[int]]] = {
            "read": (kind.read_seconds, kind.reads, collections.Counter()),
            "write": (kind.write_seconds, kind.writes, collections.Counter()),
        }
        self._share = 1.0
        # When all that is written is seen.
        self._shown = 0.0
        self.cut: set[str] = set()
        self.user = ""
        self.counts: dict[int, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )

    @property
    def is_late(self) -> bool:
        """Whether a file is written that others do not see yet."""
        return self._shown > self._clock.time()

    def reads_of(self, user: str) -> int:
        """Returns how many reads and lists a host has asked for."""
        return self._reads[user]

    def names(self, folder: str) -> list[str]:
        """Returns the names in a folder, sorted."""
        now = self._clock.time() - self._random.uniform(0, self._kind.list_seconds)
        changed, found = self._lists.get(folder, (0.0, []))
        if now <= changed:
            start = folder + "/"
            paths = [path for path in self._files if path.startswith(start)]
            found = sorted(path.removeprefix(start) for path in paths if self._at(path, now))
        for _ in range(1 + len(found) // _PAGE):
            self._take("read", sum(map(len, found)))
        return found

    def read_bytes(self, path: str) -> bytes:
        """Returns the content of a file."""
        self._take("read")
        content = self._at(path, self._clock.time())
        if content is None:
            raise FileNotFoundError(errno.ENOENT, path)
        self._counts()["read_bytes"] += len(content)
        return content

    def write_bytes(self, path: str, content: bytes) -> None:
        """Replaces a file."""
        self._take("write")
        if self._random.random() >= self._troubles.loses:
            is_late = self._random.random() < self._troubles.late
            self._put(path, content, self._random.uniform(0, 5) if is_late else 0.0)
        self._forget()

    def remove(self, path: str) -> None:
        """Removes a file."""
        self._take("write")
        self._put(path, None)

    def make_folder(self, path: str) -> None:
        """Does nothing: folders are there."""

    def create(self, path: str, content: bytes) -> bool:
        """Creates a file unless it is there. Returns whether it was created."""
        self._take("write")
        if self._at(path, float("inf")) is not None:
            return False
        self._put(path, content)
        self._forget()
        return True

    def map(self, function: Callable, items: Iterable) -> list:
        """Returns the results of a function, as a pool of threads does."""
        self._share = 1 / _AT_ONCE
        try:
            return list(map(function, items))
        finally:
            self._share = 1.0

    def _take(self, what: str, size: int = 0) -> None:
        """Waits for the place to do one thing. Raises OSError if it does not."""
        if self.user in self.cut:
            self._clock.spend(1.0)
            raise OSError(errno.EIO, "out of reach")
        median, most, taken = self._limits[what]
        latency = math.exp(self._random.gauss(0, 0.5)) * median * self._share
        now = self._clock.time()
        second = int(now)
        while taken[second] >= most:
            second += 1
        taken[second] += 1
        counts = self._counts()
        counts[what] += 1
        if what == "read":
            counts["read_bytes"] += size
            self._reads[self.user] += 1
        self._clock.spend(max(0.0, second - now) + latency)
        if self._troubles.fails and self._random.random() < self._troubles.fails:
            raise OSError(errno.EIO, "failed")

    def _forget(self) -> None:
        if self._random.random() < self._troubles.forgets:
            raise OSError(errno.ETIMEDOUT, "no answer")

    def _counts(self) -> collections.Counter[str]:
        return self.counts[int(self._clock.awake() // self._interval)]

    def _put(self, path: str, content: bytes | None, delay: float = 0.0) -> None:
        times, contents = self._files.setdefault(path, ([], []))
        at = self._clock.time() + delay
        if delay:
            self._shown = max(self._shown, at)
        # A later write replaces one that comes late.
        while times and times[-1] > at and delay == 0.0:
            times.pop()
            contents.pop()
        if times and times[-1] > at:
            return
        del times[:-8], contents[:-8]
        is_change = not contents or content is None or contents[-1] is None
        times.append(at)
        contents.append(content)
        if is_change:
            folder, _, name = path.rpartition("/")
            names = {*self._lists.get(folder, (0.0, []))[1], name}
            self._lists[folder] = at, sorted(names - {name} if content is None else names)

    def _at(self, path: str, time: float) -> bytes | None:
        times, contents = self._files.get(path, ([], []))
        index = bisect.bisect_right(times, time)
        return contents[index - 1] if index else None


class SwapFile:
    """A file that is created only if it is not there, as `CompareAndSwapFile` is used."""

    def __init__(self, place: Place, path: str):
        """Names a file."""
        self._place, self._path = place, path

    def read(self) -> tuple[bytes | None, int]:
        """Returns the content and a number for `write`."""
        try:
            return self._place.read_bytes(self._path), 1
        except FileNotFoundError:
            return None, 0

    def write(self, content: bytes, _: int) -> int | None:
        """Creates the file. Returns None if it is there."""
        return 1 if self._place.create(self._path, content) else None
