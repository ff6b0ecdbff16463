"""Tests that one run at a time holds a lock, and that a lock of an ended process is taken over."""

import contextlib
import os
import pathlib
import threading
import time

import msgspec
import pytest

from lingvo_gshard.training.run.logdir import LockedError
from lingvo_gshard.wings.services import run_lock
from lingvo_gshard.wings.services.run_lock import LostLockError, RunLock, this_process


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.lock"


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.4)
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 0.02)


@contextlib.contextmanager
def locked(path, said=None):
    lock = RunLock(path, (said if said is not None else []).append)
    try:
        yield lock
    finally:
        lock.release()


def leave(path, **fields):
    """Leaves the lock of another process and returns its content."""
    content = msgspec.json.encode(msgspec.structs.replace(this_process(), **fields))
    path.write_bytes(content)
    return content


def ended_process(wait=True):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    if wait:
        os.waitpid(pid, 0)
    return pid


def start_of(pid):
    """Returns when a process started, in ticks, as `ps` would read it."""
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])


def test_second_lock_is_refused_with_host_pid_and_start(path):
    with locked(path):
        holder = this_process()
        words = f"in use by process {os.getpid()} on {holder.host}, since {holder.started[:10]}"
        with pytest.raises(LockedError, match=words):
            RunLock(path, print)
    assert not path.exists()
    with locked(path):
        pass


def test_lock_of_a_living_process_is_refused(path):
    content = leave(path, pid=os.getppid(), ticks=start_of(os.getppid()))
    with pytest.raises(LockedError, match=f"process {os.getppid()} "):
        RunLock(path, print)
    assert path.read_bytes() == content


@pytest.mark.parametrize("how", ["ended", "zombie", "number used again"])
def test_lock_of_an_ended_process_is_taken_over_at_once(path, how):
    pid = os.getppid() if how == "number used again" else ended_process(wait=how == "ended")
    leave(path, pid=pid, ticks=12345)
    said = []
    with locked(path, said) as lock:
        lock.check()
        assert msgspec.json.decode(path.read_bytes())["pid"] == os.getpid()
    if how == "zombie":
        os.waitpid(pid, 0)
    assert len(said) == 1 and f"of process {pid} on " in said[0] and "taken over" in said[0]
    assert not os.listdir(path.parent)


@pytest.mark.parametrize(
    "elsewhere", [{"host": "other", "namespace": "x"}, {"namespace": ""}, None]
)
def test_lock_of_a_process_elsewhere_is_taken_over_if_it_is_not_refreshed(path, fast, elsewhere):
    if elsewhere is None:
        path.write_bytes(b"")
    else:
        leave(path, **elsewhere)
    said, begin = [], time.monotonic()
    with locked(path, said):
        assert time.monotonic() - begin > 0.3
    assert "waiting at most" in said[0] and "taken over" in said[1] and len(said) == 2
    old = time.time() - 1
    leave(path, host="other", namespace="x")
    os.utime(path, (old, old))
    with locked(path, said := []):
        assert len(said) == 1 and "on other, since" in said[0]


def test_lock_of_a_process_elsewhere_is_refused_once_it_is_refreshed(path, fast):
    content = leave(path, host="other", namespace="x")
    timer = threading.Timer(0.1, os.utime, [path])
    timer.start()
    with pytest.raises(LockedError, match="in use by process .* on other, since"):
        RunLock(path, lambda _: None)
    assert path.read_bytes() == content


def test_one_of_many_takes_over(path):
    for attempt in range(8):
        leave(path, pid=ended_process(), token=str(attempt))
        if attempt % 2:  # A process was killed while it took over.
            leave(path.with_name("run.lock.takeover"), pid=ended_process())
        start, locks, refused = threading.Barrier(8), [], []

        def take(start=start, locks=locks, refused=refused):
            start.wait()
            try:
                locks.append(RunLock(path, lambda _: None))
            except LockedError as error:
                refused.append(error)

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(locks) == 1 and len(refused) == 7
        locks[0].check()
        locks[0].release()
        assert not os.listdir(path.parent)


def test_holder_refreshes_and_notices_that_the_lock_was_taken_over(path, monkeypatch):
    monkeypatch.setattr(run_lock, "REFRESH_SECONDS", 0.01)
    with locked(path) as lock:
        os.utime(path, (0, 0))
        wait_until(lambda: time.time() - path.stat().st_mtime < 60)
        path.unlink()
        # The holder creates the file before it writes it.
        wait_until(lambda: path.exists() and path.stat().st_size > 0)
        lock.check()
        content = leave(path, host="other", namespace="x")
        wait_until(lambda: lock._is_lost)
        with pytest.raises(LostLockError, match="taken over by process .* on other"):
            lock.check()
    assert path.read_bytes() == content


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("host", ["another machine", None])
def test_agents_have_agreed_that_an_earlier_round_is_over(path, monkeypatch, host):
    """Neither a lost host nor a process that still runs here is waited for."""
    monkeypatch.setenv(run_lock.JOB, "job")
    monkeypatch.setenv(run_lock.ROUND, "3")
    other = {"namespace": host} if host else {}
    leave(path, round=2, **other)
    with locked(path):
        pass
    leave(path, round=3)
    with pytest.raises(LockedError), locked(path):
        pass
    leave(path, round=2, job="another job")
    with pytest.raises(LockedError), locked(path):
        pass


def test_a_lock_that_is_no_file_is_an_error_and_not_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(OSError, match="a named pipe"), locked(path):
        pass
