"""SaveBarrier: processes that save together wait for one another, but not for one that failed.

Orbax's threads wait for all processes before a checkpoint becomes complete. A process whose disk
fills while it writes would never come, and the others would wait until a time limit.
"""

from __future__ import annotations

import itertools
import sys
import threading
from typing import Any, ClassVar

from lingvo_gshard.core import processes
from lingvo_gshard.core.lazy import distributed, ocp
from lingvo_gshard.training import SAVE_BARRIERS


@SAVE_BARRIERS.register("cluster")
class SaveBarrier:
    """The barrier of the saves of one store, for `AsyncOptions` of Orbax.

    Barriers are matched by their order, not by Orbax's keys. A process that failed skips some of
    Orbax's barriers, and its next one is the barrier of the others. It tells them the reason in
    the key-value store of jax.distributed. Later barriers of the store hold no process up.
    """

    # All processes make their barriers in the same order.
    _numbers: ClassVar = itertools.count()

    def __init__(self):
        self._name = f"lingvo_gshard/saves/{next(self._numbers)}/"
        self._wait = ocp.multihost.get_barrier_sync_fn(processes=set(range(processes.count())))
        self._arrivals = 0
        self._is_broken = False

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the other processes. Orbax calls it.

        Raises:
          SharedError: another process failed.
        """
        if self._is_broken:
            return
        client: Any = distributed.global_state.client
        # Orbax's last thread of a save comes here while an error ends it.
        own = sys.exc_info()[1] if threading.current_thread() != threading.main_thread() else None
        self._arrivals += 1
        # Read after this barrier alone: others may still be about to leave the one before.
        told = f"{self._name}{self._arrivals}/"
        if own is not None:
            client.key_value_set(f"{told}{processes.index()}", processes.problem_of(own))
        self._wait(key=f"{self._name}{self._arrivals}", timeout_ms=timeout_ms)
        problems = client.key_value_dir_get(told)
        self._is_broken = bool(problems)
        if problems and own is None:
            raise processes.SharedError(problems[0][1])
