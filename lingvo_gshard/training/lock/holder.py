"""Holder: the process that a lock names, and whether it still runs."""

from __future__ import annotations

import os
import pathlib
import secrets
import socket
import time

import msgspec

# Processes in these states have ended; only their parent has not noticed yet.
_ENDED_STATES = ("Z", "X", "x")


class Holder(msgspec.Struct, frozen=True):
    """The content of a lock file.

    Attributes:
      host: name of the machine.
      pid: number of the process.
      started: when the process took the lock, in words.
      ticks: when the process started, in clock ticks since the machine did; 0 if unknown. It tells
        the process from a later one with the same number.
      namespace: the machine since its last start, and the container, within which `pid` is unique;
        "" if unknown.
      token: random; differs between any two locks.
    """

    host: str
    pid: int
    started: str
    ticks: int
    namespace: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


def this_process() -> Holder:
    """Returns this process, with a new token."""
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        ticks=(_state_and_ticks(os.getpid()) or ("", 0))[1],
        namespace=_namespace(),
        token=secrets.token_hex(8),
    )


def is_running(holder: Holder) -> bool | None:
    """Returns whether the process of a lock still runs; None if that cannot be seen from here."""
    if not holder.namespace or holder.namespace != _namespace():
        return None
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    found = _state_and_ticks(holder.pid)
    if found is None:
        return True
    state, ticks = found
    return state not in _ENDED_STATES and holder.ticks in (0, ticks)


def _namespace() -> str:
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_and_ticks(pid: int) -> tuple[str, int] | None:
    """Returns a process's state and start, fields 3 and 22 of proc_pid_stat(5); None if hidden."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses and may contain anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
