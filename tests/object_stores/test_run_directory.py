# tests: wings/object_stores/run_directory.py, wings/object_stores/buckets.py
"""Tests that one run at a time holds a lock in a bucket."""

import concurrent.futures
import os
import pathlib

import msgspec
import pytest

from lingvo_gshard.core.files import objects, stores
from lingvo_gshard.training.run.logdir import LockedError
from lingvo_gshard.wings.object_stores import run_directory
from lingvo_gshard.wings.object_stores.run_directory import BucketLock
from lingvo_gshard.wings.services import run_lock
from lingvo_gshard.wings.services.run_lock import LostLockError, this_process


@pytest.fixture
def path(folder):
    """Gives the path of a lock."""
    return stores.path_of(folder) / "run.lock"


@pytest.fixture
def fast(monkeypatch):
    """Makes locks stale soon."""
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.6)
    monkeypatch.setattr(run_directory, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "REFRESH_SECONDS", 0.1)


def leave(path: pathlib.Path, **fields: object) -> None:
    """Leaves the lock of another process."""
    holder = msgspec.structs.replace(this_process(), **fields)
    objects.write_bytes(path, msgspec.json.encode({"holder": holder, "count": 7}))


def ended_process() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_a_second_lock_is_refused_until_the_first_is_released(path):
    first = BucketLock(path, print)
    with pytest.raises(LockedError, match=f"in use by process {os.getpid()} on "):
        BucketLock(path, print)
    first.release()
    first.release()
    assert not objects.exists(path)
    BucketLock(path, print).release()


@pytest.mark.slow
def test_the_lock_of_a_process_that_ended_is_taken_over_at_once(path):
    leave(path, pid=ended_process())
    said: list[str] = []
    lock = BucketLock(path, said.append)
    assert "was stale and is taken over" in said[0]
    lock.check()
    lock.release()


@pytest.mark.slow
def test_a_process_that_cannot_be_seen_has_a_minute(path, fast):
    leave(path, namespace="another machine")
    said: list[str] = []
    lock = BucketLock(path, said.append)
    assert "for a sign of its life" in said[0] and "taken over" in said[1]
    lock.release()


@pytest.mark.slow
def test_a_process_that_cannot_be_seen_but_refreshes_keeps_the_lock(path, fast, monkeypatch):
    lock = BucketLock(path, print)
    monkeypatch.setattr(run_lock, "is_running", lambda holder: None)
    with pytest.raises(LockedError, match="in use by"):
        BucketLock(path, print)
    lock.check()
    lock.release()


@pytest.mark.slow
def test_a_damaged_lock_is_taken_over(path, fast):
    objects.write_bytes(path, b"{")
    BucketLock(path, print).release()


@pytest.mark.slow
def test_who_was_not_seen_to_live_learns_that_it_lost_the_lock(path, fast):
    lock = BucketLock(path, print)
    leave(path, namespace="another machine")
    with pytest.raises(LostLockError, match="was taken over"):
        while True:
            lock.check()
    lock.release()
    assert objects.exists(path)


@pytest.mark.slow
def test_a_lock_that_somebody_deleted_comes_back(path, fast):
    lock = BucketLock(path, print)
    objects.remove(path)
    while not objects.exists(path):
        lock.check()
    lock.release()


@pytest.mark.slow
def test_one_of_many_processes_gets_a_stale_lock(path):
    leave(path, pid=ended_process())

    def take() -> BucketLock | None:
        try:
            return BucketLock(path, lambda _: None)
        except LockedError:
            return None

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        taken = [lock for lock in pool.map(lambda _: take(), range(6)) if lock]
    assert len(taken) == 1
    taken[0].release()


@pytest.mark.slow
def test_appends_of_many_processes_are_all_kept(folder):
    def append(number: int) -> None:
        objects.append(f"{folder}/rows", f"{number}\n".encode())

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(12)))
    rows = objects.read_bytes(f"{folder}/rows").split()
    assert sorted(map(int, rows)) == list(range(12))


@pytest.mark.slow
def test_a_refresh_survives_answers_that_fail(path, emulator, fast):
    lock = BucketLock(path, print)
    emulator.faults.failing, emulator.faults.only = 2, "run.lock"
    while emulator.faults.failing:
        lock.check()
    lock.check()
    lock.release()
