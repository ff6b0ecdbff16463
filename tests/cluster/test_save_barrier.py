"""Barriers of saves, with threads in place of processes; test_cluster.py has processes."""

import threading
import time
import types

import pytest

from lingvo_gshard.core import lazy, processes
from lingvo_gshard.core.processes import SharedError
from lingvo_gshard.wings.cluster import save_barrier
from lingvo_gshard.wings.cluster.save_barrier import SaveBarrier

_COUNT = 3


class FakeService:
    """The key-value store and the barriers of a cluster's coordinator."""

    def __init__(self):
        self.values: dict[str, str] = {}
        # Seconds that the processes 0 and 2 need to leave a barrier.
        self.seconds = 0.0
        self._barriers: dict[str, threading.Barrier] = {}
        self._lock = threading.Lock()

    def key_value_set(self, key: str, value: str) -> None:
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        time.sleep(self.seconds * (threading.current_thread().name != "1"))
        return sorted(item for item in self.values.items() if item[0].startswith(key))

    def wait(self, *, key: str, timeout_ms: int) -> None:
        with self._lock:
            barrier = self._barriers.setdefault(key, threading.Barrier(_COUNT))
        barrier.wait(timeout_ms / 1000)


@pytest.fixture
def service(monkeypatch):
    """Returns the service of three processes, which are threads named 0, 1 and 2."""
    service = FakeService()
    state = types.SimpleNamespace(client=service)
    monkeypatch.setattr(save_barrier, "distributed", types.SimpleNamespace(global_state=state))
    monkeypatch.setattr(lazy.ocp.multihost, "get_barrier_sync_fn", lambda processes: service.wait)
    monkeypatch.setattr(processes, "count", lambda: _COUNT)
    monkeypatch.setattr(processes, "index", lambda: int(threading.current_thread().name))
    return service


def run(save) -> list[str]:
    """Runs `save(process, barrier)` in all processes. Returns how each ended."""
    ends = [""] * _COUNT
    # Each process numbers its own barriers.
    barriers = [SaveBarrier() for _ in range(_COUNT)]
    for barrier in barriers:
        barrier._name = barriers[0]._name

    def work(process: int) -> None:
        try:
            save(process, barriers[process])
        except (SharedError, OSError) as error:
            ends[process] = str(error)

    threads = [threading.Thread(target=work, args=(k,), name=str(k)) for k in range(_COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return ends


def orbax_save(barrier, write, commit) -> None:
    """Saves as Orbax's threads do: its last barrier comes also after an error."""
    try:
        write()
        barrier(key="written", timeout_ms=10_000)
        commit()
        barrier(key="complete", timeout_ms=10_000)
    finally:
        barrier(key="ended", timeout_ms=10_000)


def test_a_good_save_waits_for_all_and_raises_nothing(service):
    written = []

    def save(process, barrier):
        for _ in range(2):
            orbax_save(barrier, lambda: written.append(process), lambda: None)

    assert run(save) == [""] * _COUNT
    assert len(written) == 2 * _COUNT and not service.values


@pytest.mark.parametrize(("where", "seconds"), [("write", 0.0), ("commit", 0.0), ("commit", 0.2)])
def test_all_hear_of_the_process_that_failed(service, where, seconds):
    """The others neither wait for it nor complete the checkpoint."""
    service.seconds = seconds
    complete = []

    def save(process, barrier):
        def fail():
            raise OSError("no room")

        write = fail if (process, where) == (1, "write") else lambda: None
        commit = fail if (process, where) == (1, "commit") else lambda: complete.append(process)
        orbax_save(barrier, write, commit)

    first, own, last = run(save)
    assert own == "no room"
    assert first == last and first.startswith("process 1 on ")
    assert first.endswith(": OSError: no room")
    assert sorted(complete) == ([0, 2] if where == "commit" else [])


def test_all_may_fail_at_once(service):
    def save(process, barrier):
        def fail():
            raise OSError(f"no room on {process}")

        orbax_save(barrier, fail, lambda: None)

    assert run(save) == ["no room on 0", "no room on 1", "no room on 2"]
