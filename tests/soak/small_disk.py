"""A small disk of its own for the run, so that filling it harms nobody."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

MEGABYTES = 64
# A run with its checkpoints has a few hundred.
_INODES = 2000
_OWN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


@contextlib.contextmanager
def mounted(directory: pathlib.Path) -> Iterator[bool]:
    """Mounts a file system in memory at a directory; yields whether that was permitted."""
    directory.mkdir(parents=True, exist_ok=True)
    limits = f"size={MEGABYTES}m,nr_inodes={_INODES}"
    options = ["-t", "tmpfs", "-o", limits, "soak", str(directory)]
    is_mounted = _succeeds(["mount", *options])
    try:
        yield is_mounted
    finally:
        if is_mounted:
            _succeeds(["umount", "--lazy", str(directory)])


def enter_own_namespace() -> None:
    """Starts this program again where an ordinary user may mount, if the system has such a place.

    Root may mount here already.
    """
    is_there = os.environ.get("SOAK_NAMESPACE") == "1"
    if os.geteuid() == 0 or is_there or not _succeeds([*_OWN_NAMESPACE, "true"]):
        return
    os.environ["SOAK_NAMESPACE"] = "1"
    command = [*_OWN_NAMESPACE, sys.executable, "-m", "tests.soak", *sys.argv[1:]]
    os.execvp(command[0], command)


@contextlib.contextmanager
def full(directory: pathlib.Path) -> Iterator[None]:
    """Fills the disk of a directory while the block runs."""
    filler = directory / "filler"
    try:
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))
        yield
    finally:
        filler.unlink(missing_ok=True)


@contextlib.contextmanager
def without_inodes(directory: pathlib.Path) -> Iterator[None]:
    """Uses up the files that the disk of a directory may have, while the block runs."""
    filler = directory / "files"
    filler.mkdir()
    try:
        with contextlib.suppress(OSError):
            for number in range(_INODES):
                (filler / str(number)).touch()
        yield
    finally:
        shutil.rmtree(filler)


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
