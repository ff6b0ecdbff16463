"""SyncedFolder: a local copy of a folder in a bucket, whose changes go back there.

Code that appends to files, maps them into memory or lets libraries write them works on the local
folder. A thread copies what changed to the bucket, and `push` does so at once.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection

from lingvo_gshard.core import atomic, stores
from lingvo_gshard.wings.object_stores import buckets, scratch

# Changed files are copied at this interval.
_PERIOD_SECONDS = 30.0
# Copying a large file that grows takes at most this share of the time.
_SHARE = 0.02
# Beginnings of the names of files that are not finished.
_UNFINISHED = (".partial-", ".shared-")


class SyncedFolder:
    """A local folder whose changes go to a folder of a bucket.

    Attributes:
      folder: the local folder; empty before `pull`.
    """

    def __init__(self, place: stores.GivenPath, left_out: Callable[[str], bool]):
        """Makes an empty local folder for one of a bucket.

        `left_out` says whether a file or folder at the top, by name, stays in the bucket alone.
        """
        self._place, self._left_out = os.fspath(place), left_out
        self.folder = scratch.new_folder("synced") / (self._place.rpartition("/")[2] or "run")
        self.folder.mkdir()
        # Name -> size and time of change of the local file when it was last copied.
        self._copied: dict[str, tuple[int, int]] = {}
        # Name -> tag of the bucket's file when it was last read.
        self._tags: dict[str, str] = {}
        self._due: dict[str, float] = {}
        self._copying = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def pull(self) -> None:
        """Copies what is new in the bucket to the local folder. Raises OSError if it cannot."""
        found: dict[str, stores.Entry] = {}
        for name, entry in buckets.children(self._place).items():
            if self._left_out(name):
                continue
            if entry is not None:
                found[name] = entry
                continue
            inside = buckets.find(f"{self._place}/{name}")
            found |= {f"{name}/{below}": one for below, one in inside.items()}
        new = [name for name, entry in found.items() if self._tags.get(name) != entry.tag]
        buckets.download_all(self._place, self.folder, new)
        for name in new:
            self._tags[name] = found[name].tag
            self._copied[name] = _state(self.folder / name)

    def start(self, say: Callable[[str], None]) -> None:
        """Begins to copy what changes to the bucket; says if that fails."""
        self._thread = threading.Thread(
            target=self._keep, args=(say,), name="copies to the bucket", daemon=True
        )
        self._thread.start()

    def push(self, names: Collection[str] | None = None) -> None:
        """Copies what changed locally to the bucket: files of some names, or all.

        Files that were deleted here are deleted there with all. Raises OSError if that fails.
        """
        with self._copying:
            local = self._local()
            for name, state in local.items():
                if self._copied.get(name) == state or (names is not None and name not in names):
                    continue
                began = time.monotonic()
                # A file that grows meanwhile is copied as it was: the rest follows.
                with open(self.folder / name, "rb") as file:
                    buckets.write_bytes(f"{self._place}/{name}", file.read(state[0]))
                self._copied[name] = state
                ended = time.monotonic()
                self._due[name] = ended + max(_PERIOD_SECONDS, (ended - began) / _SHARE)
            for name in self._copied.keys() - local.keys() if names is None else ():
                buckets.remove(f"{self._place}/{name}")
                del self._copied[name]

    def stop(self, say: Callable[[str], None]) -> None:
        """Copies what is left and ends. Keeps the local folder if that fails, and says where."""
        if self._ended.is_set():
            return
        self._ended.set()
        try:
            self.push()
        except OSError as error:
            kept = pathlib.Path(tempfile.mkdtemp(prefix="gshard-unsent-"))
            with contextlib.suppress(OSError):
                shutil.copytree(self.folder, kept, dirs_exist_ok=True)
            say(f"Warning: {error}. What {self._place} lacks of the run's files is in {kept}")

    def _keep(self, say: Callable[[str], None]) -> None:
        is_told = False
        while not self._ended.wait(_PERIOD_SECONDS / 3):
            now = time.monotonic()
            due = [name for name in self._local() if self._due.get(name, 0.0) <= now]
            try:
                self.push(due)
                is_told = False
            except OSError as error:
                if not is_told and not self._ended.is_set():
                    say(f"Warning: {error}. The run goes on, and its files wait in {self.folder}")
                is_told = True

    def _local(self) -> dict[str, tuple[int, int]]:
        """Returns path below the folder -> size and time of change of each finished file."""
        found = {}
        for path in self.folder.rglob("*"):
            if path.name.startswith(_UNFINISHED) or path.name.endswith(atomic.NEW):
                continue
            # Files may be renamed meanwhile.
            with contextlib.suppress(OSError):
                if path.is_file():
                    found[path.relative_to(self.folder).as_posix()] = _state(path)
        return found


def _state(path: pathlib.Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
