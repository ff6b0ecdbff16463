"""RayMeeting: the agents of a job on a Ray cluster meet in the memory of one of Ray's actors.

Only actors of the job can write there, so messages need no signature. If Ray has to start the actor
again, the agents go on from the newest record that they know.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.wings.agents.records import Beat, Record

# A request takes milliseconds, unless the actor has to be started again.
_SECONDS = 10.0


class Messages:
    """Holds the messages of a job, as `Meeting` does. Ray makes an actor of it."""

    def __init__(self):
        self._signs: dict[str, Beat] = {}
        self._records: dict[int, Record] = {}
        self._is_stopping = False

    def stop(self) -> None:
        """Has all hosts be asked to stop when they next write a sign."""
        self._is_stopping = True

    def forget(self, place: int) -> None:
        """Removes the signs of a place whose actor is gone, by what Ray says."""
        for host in [host for host in self._signs if host.endswith(f"-{place}")]:
            del self._signs[host]

    def hosts(self) -> list[str]:
        """Returns the names of the hosts that have a sign, sorted."""
        return sorted(self._signs)

    def beat(self, host: str) -> Beat | None:
        """Returns the sign of a host; None if it has none."""
        return self._signs.get(host)

    def beats(self, hosts: Sequence[str]) -> dict[str, Beat]:
        """Returns host -> its sign, for those that have one."""
        return {host: self._signs[host] for host in hosts if host in self._signs}

    def write_beat(self, beat: Beat) -> bool:
        """Replaces the sign of a host. Returns whether all hosts are asked to stop."""
        self._signs[beat.host] = beat
        return self._is_stopping

    def remove_beat(self, host: str) -> None:
        """Removes the sign of a host."""
        self._signs.pop(host, None)

    def newest(self, known: int = 0, told: int = 0) -> Record | None:
        """Returns the record with the highest number; None if that is not above a known one."""
        number = max((known, told, *self._records))
        return self._records.get(number) if number > known else None

    def agree(self, record: Record) -> Record:
        """Writes a record unless there is one of its number. Returns the one that is there."""
        return self._records.setdefault(record.number, record)


class RayMeeting:
    """Passes the calls of one agent to the actor `messages`. It has the methods of `Messages`."""

    is_in_bucket, is_disturbed, tells_losses = False, False, True

    def __init__(self, messages: Any):
        self._messages, self._is_asked = messages, False

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._ask, name)

    def beats(self, hosts: Any) -> dict[str, Beat]:
        """Returns host -> its sign, for those that have one."""
        return self._ask("beats", list(hosts))

    def write_beat(self, beat: Beat) -> None:
        """Replaces the sign of this host. Asks its agent to stop if all hosts are asked to."""
        if self._ask("write_beat", beat) and not self._is_asked:
            self._is_asked = True
            signal.raise_signal(signal.SIGUSR1)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Returns the answer of the actor to a call. Raises OSError if there is no answer."""
        import ray
        from ray import exceptions

        try:
            return ray.get(getattr(self._messages, name).remote(*arguments), timeout=_SECONDS)
        except exceptions.RayError as error:
            raise OSError(f"Ray's actor does not answer: {type(error).__name__}") from None
