# tests: wings/agents/meeting.py, wings/agents/records.py, wings/agents/sightings.py
"""Fuzzes the meeting place of agents: files of any name, kind and content, and old signs.

Whoever writes them can write to the directory and does not know the secret. Agents neither believe
them, nor wait for them, nor end with a traceback.
"""

import contextlib
import os
import pathlib
import random
import shutil
import signal
import socket
import threading
import time

import pytest

from lingvo_gshard.wings.agents.meeting import Meeting, is_host_name
from lingvo_gshard.wings.agents.records import Beat, Member, Record
from lingvo_gshard.wings.agents.sightings import Sightings
from tests.agents import test_agents
from tests.agents.stand_in import number_after
from tests.agents.test_agents import PATIENCE, Job, children, end, is_running

FEW, MANY = 300, 20_000
NESTED = b"[" * 100_000
NAMES = (
    *("x.json", "zzz.json", "aaa.json", "a.json", ".json", "..json", "\u00b2.json", "\u0663.json"),
    *("2.json", "02.json", "-1.json", "1e3.json", "99999.json", "9" * 18 + ".json"),
    *("9" * 200 + ".json", "x" * 250, "1", "1.json.new", "x\n.json", "\x1b[31m.json", " .json"),
)
ODD = (b"", b"\n", b"\n\n\n", b"null", NESTED, b"\xff" * 1000, b"{}", b"\0" * 10_000, b'"\\ud800"')
SECONDS = 2.0


def name(draw: random.Random) -> str:
    if draw.random() < 0.2:
        return os.fsdecode(bytes(draw.choice(range(1, 256)) for _ in range(8)).replace(b"/", b"."))
    return draw.choice(NAMES)


def content(draw: random.Random, messages: list[bytes]) -> bytes:
    """Returns bytes of nobody, or those of a message that was changed, or one that was not."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.choice(ODD)
    if kind == 1:
        return draw.randbytes(draw.randrange(2000))
    message = draw.choice(messages)
    place = draw.randrange(len(message))
    if kind == 2:
        return message[:place]
    if kind == 3:
        return (
            message[:place]
            + bytes([message[place] ^ (1 << draw.randrange(8))])
            + message[place + 1 :]
        )
    if kind == 4:
        return draw.choice(ODD) + b"\n" + message.rpartition(b"\n")[2]
    return message


def put(path: pathlib.Path, draw: random.Random, messages: list[bytes]) -> None:
    """Puts something in the place of what is there, if the file system can have it."""
    with contextlib.suppress(OSError, ValueError):
        remove(path)
        kind = draw.randrange(9)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.mkdir()
        elif kind == 2:
            path.symlink_to(draw.choice(["/dev/zero", "/dev/tty", "/etc/passwd", path.name, "."]))
        elif kind == 3:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        elif kind == 4:
            with path.open("wb") as file:
                file.truncate(10**11)
        else:
            path.write_bytes(content(draw, messages))


def replace(path: pathlib.Path, message: bytes) -> None:
    new = path.with_name(".stranger")
    with contextlib.suppress(OSError):
        new.write_bytes(message)
        os.replace(new, path)


def remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def signs(host: str, life: str) -> list[Beat]:
    return [Beat(host, life, count, "127.0.0.1", 1, heard={"me": count}) for count in range(1, 9)]


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("seed", range(2))
def test_what_strangers_write_is_never_believed(tmp_path, seed, cases):
    draw, said = random.Random(seed), []
    meeting = Meeting(str(tmp_path), "secret", said.append)
    sightings = Sightings(meeting, "me", 1e9)
    meeting.agree(Record(1, (Member("a", "x"),)))
    for one in signs("a", "x"):
        meeting.write_beat(one)
    hosts, rounds = tmp_path / "hosts", tmp_path / "rounds"
    messages = [(rounds / "1.json").read_bytes(), (hosts / "a.json").read_bytes()]
    assert sightings.look("a") == signs("a", "x")[-1]
    kept = {"hosts": "a.json", "rounds": "1.json"}
    for _ in range(cases):
        folder = draw.choice([hosts, rounds])
        if (chosen := name(draw)) != kept[folder.name]:
            put(folder / chosen, draw, messages)
        began = time.monotonic()
        assert [host for host in meeting.hosts() if sightings.look(host)] == ["a"]
        assert all(map(is_host_name, meeting.hosts()))
        assert meeting.newest() == Record(1, (Member("a", "x"),))
        assert time.monotonic() - began < SECONDS
    agreed = None
    while agreed is None:
        agreed = meeting.agree(Record(2))
    assert meeting.newest() == agreed and agreed.number >= 2
    assert not any("Traceback" in line for line in said)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    for process in job.started:
        process.kill()
        process.communicate()


class Stranger:
    """Writes to a meeting place until the block ends: garbage, ghosts, and old signs."""

    def __init__(self, place: pathlib.Path, seed: int, pause: float):
        self._place, self._draw, self._pause = place, random.Random(seed), pause
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> "Stranger":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _write(self) -> None:
        known: list[tuple[str, bytes]] = []
        while not self._over.wait(self._pause):
            for folder in ("hosts", "rounds"):
                for path in (self._place / folder).glob("*.json"):
                    with contextlib.suppress(OSError):
                        if path.is_file() and path.stat().st_size < 10**6 and len(known) < 5000:
                            known.append((f"{folder}/{path.name}", path.read_bytes()))
            if not known:
                continue
            folder, draw = self._draw.choice(["hosts", "rounds"]), self._draw
            chosen = name(draw)
            put(self._place / folder / chosen, draw, [message for _, message in known])
            # An old sign of a host, where a newer one is.
            target, message = draw.choice(known)
            if target.startswith("hosts/"):
                replace(self._place / target, message)


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))])
def test_a_job_takes_every_step_beside_a_stranger(job, seed):
    with Stranger(pathlib.Path(job.meeting_place), seed, pause=0.02):
        said = end(job.start_local(steps=100, faults="1:40:kill"))
    assert job.saved == [100, number_after(100)]
    assert "Traceback" not in said and "bug" not in said
    assert {(count, mesh) for _, count, mesh in job.log} == {("2", "data=2")}


def test_a_job_beside_a_stranger_saves_and_ends_when_it_is_asked_to(job):
    launcher = job.start_local(steps=10_000)
    with Stranger(pathlib.Path(job.meeting_place), 7, pause=0.02):
        job.wait_for_step(20)
        started = children(launcher.pid, "")
        launcher.send_signal(signal.SIGTERM)
        began = time.monotonic()
        said = end(launcher, code=143)
    assert time.monotonic() - began < PATIENCE / 2
    step, number = job.saved
    assert number == number_after(step) and "Traceback" not in said
    assert not any(map(is_running, started))


@pytest.mark.parametrize("host", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_an_old_sign_that_is_put_back_a_hundred_times_a_second_stops_nothing(
    job, host, monkeypatch
):
    """Signs are far apart, so that hardly any would be read otherwise."""
    slow = ("--beat_seconds=0.8", "--lost_seconds=12", "--stop_seconds=1", "--regather_seconds=1")
    monkeypatch.setattr(test_agents, "FAST", [*test_agents.FAST, *slow])
    options = (f"--snapshot_folder={job.directory}",)
    agents = [job.start_agent("a", *options, steps=700)]
    # They do not read just after a sign is written.
    time.sleep(0.4)
    agents.append(job.start_agent("b", *options, steps=700))
    job.wait_for_step(5)
    sign = pathlib.Path(job.meeting_place) / "hosts" / f"{'ab'[host]}.json"
    old, over = sign.read_bytes(), threading.Event()

    def put_back() -> None:
        while not over.wait(0.01):
            replace(sign, old)

    stranger = threading.Thread(target=put_back, daemon=True)
    stranger.start()
    try:
        said = "".join(map(end, agents))
    finally:
        over.set()
        stranger.join()
    assert job.saved == [700, number_after(700)]
    assert "Round 2" not in said and "somebody else has replaced or removed" in said
