# tests: wings/agents/meeting.py, wings/agents/border.py, wings/agents/records.py
# tests: wings/agents/sightings.py
"""Checks that agents agree through a directory, and believe no stranger."""

import os
import pathlib
import socket
import stat
import threading
import time

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import atomic
from lingvo_gshard.wings.agents.meeting import Meeting, create, shared_secret
from lingvo_gshard.wings.agents.records import Beat, Member, Record
from lingvo_gshard.wings.agents.sightings import Sightings
from lingvo_gshard.wings.cluster.rendezvous import SECRET


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def meeting(tmp_path, said) -> Meeting:
    return Meeting(str(tmp_path), "secret", said.append)


def beat(host="a", count=1, life="x", **given) -> Beat:
    return Beat(host, life, count, "127.0.0.1", 1234, **given)


def test_of_many_records_with_one_number_all_see_the_same(meeting):
    """Sixteen agents write the record of one number at once."""
    start, agreed = threading.Barrier(16), []

    def write(index: int) -> None:
        start.wait()
        agreed.append(meeting.agree(Record(1, (Member(f"host{index}", "x"),))))

    threads = [threading.Thread(target=write, args=[index]) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({record.members for record in agreed}) == 1
    assert meeting.newest() == agreed[0]


def test_the_newest_record_has_the_highest_number(meeting):
    for number in (9, 10, 11):
        meeting.agree(Record(number))
    assert meeting.newest().number == 11


def test_signs_are_read_as_written_until_they_are_removed(meeting):
    assert meeting.beat("a") is None and meeting.hosts() == []
    meeting.write_beat(beat(count=3))
    assert meeting.beat("a") == beat(count=3) and meeting.hosts() == ["a"]
    meeting.remove_beat("a")
    assert meeting.hosts() == []


def test_messages_of_strangers_are_said_once_and_disturb_nothing(meeting, tmp_path, said):
    Meeting(str(tmp_path), "another", print).agree(Record(7, code=0))
    for content in (b"", b"\xff" * 100, b'{"number": 8}\nabc\n', b"\n" * 3):
        (tmp_path / "rounds" / "8.json").write_bytes(content)
        (tmp_path / "hosts" / "b.json").write_bytes(content)
        assert meeting.newest() is None and meeting.beat("b") is None
    assert meeting.agree(Record(1)) == Record(1) == meeting.newest()
    assert len(said) == len(set(said)) == 3


def test_a_secret_is_made_once_and_only_its_owner_reads_it(tmp_path, monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    place = str(tmp_path / "agents")
    first = shared_secret(place)
    assert len(first) == 32 and shared_secret(place) == first
    assert stat.S_IMODE(os.stat(f"{place}/secret").st_mode) == 0o600


def test_a_secret_of_the_environment_is_another_one_in_each_place(monkeypatch):
    """A record of one job, such as its end, is no record of another."""
    monkeypatch.setenv(SECRET, "given")
    assert len({"given", shared_secret("/a"), shared_secret("/b")}) == 3
    assert shared_secret("/a") == shared_secret("/a")


@pytest.mark.parametrize("kind", ["pipe", "folder", "long", "empty", "not text", "link"])
def test_a_secret_that_is_none_is_an_error(tmp_path, monkeypatch, kind):
    monkeypatch.delenv(SECRET, raising=False)
    path = tmp_path / "secret"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes({"long": b"a" * 10_000, "empty": b"\n", "not text": b"\xff"}[kind])
    with pytest.raises(UserError, match=f"`meeting_place={tmp_path}`: {path} cannot be used"):
        shared_secret(str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the owner of a file needs root")
def test_a_secret_of_another_user_is_an_error(tmp_path, monkeypatch):
    """Who can write there first would know it."""
    monkeypatch.delenv(SECRET, raising=False)
    (tmp_path / "secret").write_text("known to a stranger")
    os.chown(tmp_path / "secret", 12345, 12345)
    with pytest.raises(UserError, match="another user has made it"):
        shared_secret(str(tmp_path))


def test_a_place_that_is_none_is_an_error(tmp_path):
    (tmp_path / "rounds").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/rounds cannot be used"):
        Meeting(str(tmp_path), "secret", print)


def test_create_never_replaces(tmp_path):
    path = str(tmp_path / "file")
    assert create(path, b"first") and not create(path, b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_messages_count_under_their_own_names_only(meeting, tmp_path, said):
    """Who can write there has no secret, but copies of what others have signed."""
    meeting.write_beat(beat("host-0"))
    meeting.agree(Record(1))
    hosts, rounds = tmp_path / "hosts", tmp_path / "rounds"
    for copy in (hosts / "zzz.json", rounds / "2.json"):
        copy.write_bytes((hosts / "host-0.json").read_bytes())
    for copy in (hosts / "1.json", rounds / "3.json", rounds / "01.json", rounds / "\u00b2.json"):
        copy.write_bytes((rounds / "1.json").read_bytes())
    assert meeting.beat("zzz") is None and meeting.beat("1") is None
    assert meeting.newest() == Record(1) and meeting.beat("host-0") == beat("host-0")
    assert len(said) == 4


def test_numbers_that_strangers_have_taken_are_passed_over(meeting, tmp_path):
    meeting.agree(Record(1))
    for number in range(2, 300):
        (tmp_path / "rounds" / f"{number}.json").write_bytes(b"taken")
    # A call finds some of them at most.
    found = [meeting.agree(Record(2, reason="next")) for _ in range(4)]
    assert found == [None, None, Record(300, reason="next"), Record(300, reason="next")]
    assert Meeting(str(tmp_path), "secret", print).newest() == Record(300, reason="next")


def test_files_that_are_none_are_ignored(meeting, tmp_path, said):
    def spoil(path: pathlib.Path) -> None:
        os.mkfifo(f"{path}-pipe.json")
        pathlib.Path(f"{path}-folder.json").mkdir()
        pathlib.Path(f"{path}-zero.json").symlink_to("/dev/zero")
        pathlib.Path(f"{path}-loop.json").symlink_to(f"{path}-loop.json")
        with open(f"{path}-long.json", "wb") as file:
            file.truncate(10**12)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{path}-socket.json")
        pathlib.Path(f"{path}\n\x1b[2J.json").touch()
        pathlib.Path(os.fsdecode(os.fsencode(path) + b"\xff.json")).touch()

    spoil(tmp_path / "hosts" / "x")
    for number, kind in enumerate((os.mkfifo, os.mkdir), 5):
        kind(tmp_path / "rounds" / f"{number}.json")
    began = time.monotonic()
    hosts = meeting.hosts()
    assert hosts == [f"x-{one}" for one in ("folder", "long", "loop", "pipe", "socket", "zero")]
    assert list(map(meeting.beat, hosts)) == [None] * 6 and meeting.newest() is None
    assert meeting.agree(Record(5)) == Record(7)
    assert time.monotonic() - began < 5 and len(said) == 8
    assert all(line.isprintable() and "bug" not in line for line in said)


def test_a_sign_is_written_where_a_stranger_has_put_something(meeting, tmp_path):
    path, victim = tmp_path / "hosts" / "a.json", tmp_path / "victim"
    victim.write_text("kept")
    for spoil in (os.mkfifo, os.mkdir, lambda one: os.symlink(victim, one)):
        spoil(path)
        meeting.write_beat(beat())
        assert meeting.beat("a") == beat()
        path.unlink()
    assert victim.read_text() == "kept"


def test_an_error_that_nobody_thought_of_is_told_and_passed_over(meeting, monkeypatch, said):
    meeting.agree(Record(1))

    def fail(*_):
        raise RuntimeError("of a library")

    monkeypatch.setattr(atomic, "decode", fail)
    for _ in range(10):
        assert meeting.newest() is None
    assert len(said) == 2 and all("RuntimeError: of a library" in line for line in said)
    assert said[1].endswith("(10 times so far)")


class Clock:
    """A clock and a meeting with two agents' signs."""

    def __init__(self, meeting: Meeting):
        self.now, self.meeting, self.count = 0.0, meeting, 0
        self.sightings = Sightings(meeting, "me", 20.0, lambda: self.now)

    def step(self, seconds: float = 1.0) -> None:
        """Lets time pass, and this agent give a sign."""
        self.now += seconds
        self.count += 1
        self.sightings.wrote(self.count)

    def state(self, host: str = "a") -> str:
        if self.sightings.is_lost(host):
            return "lost"
        return "lives" if self.sightings.lives(host) else "may live"


@pytest.fixture
def clock(meeting) -> Clock:
    return Clock(meeting)


def test_a_host_lives_while_its_signs_tell_of_new_signs_of_this_one(clock, meeting):
    assert clock.state() == "lost" and clock.sightings.look("a") is None
    clock.step()
    meeting.write_beat(beat(count=1))
    clock.sightings.look("a")
    # It may be an old file, or a host that has not yet read a sign of this one.
    assert clock.state() == "may live"
    clock.step()
    meeting.write_beat(beat(count=2, heard={"me": 1}))
    clock.sightings.look("a")
    assert clock.state() == "lives" and clock.sightings.heard() == {"x": 2}
    for _ in range(20):
        clock.step()
        clock.sightings.look("a")
    assert clock.state() == "lives"
    clock.step()
    clock.sightings.look("a")
    assert clock.state() == "lost"
    # It had been cut off.
    meeting.write_beat(beat(count=3, heard={"me": 20}))
    clock.sightings.look("a")
    assert clock.state() == "lives"


def test_old_signs_prove_nothing_however_often_they_change(clock, meeting):
    """A stranger has all signs that a host gave before, and puts them back one after another."""
    old = [beat(count=count, heard={"another": count}) for count in range(1, 100)]
    for one in old:
        clock.step()
        meeting.write_beat(one)
        clock.sightings.look("a")
        assert not clock.sightings.lives("a")
    assert clock.state() == "lost"


def test_an_old_sign_does_not_replace_a_newer_one(clock, meeting):
    old = beat(count=1, life="earlier", is_leaving=True, heard={"me": 1})
    for count in range(1, 30):
        clock.step()
        meeting.write_beat(beat(count=count, heard={"me": count}))
        clock.sightings.look("a")
        for one in (old, beat(count=count - 1, heard={"me": count - 1})):
            meeting.write_beat(one)
            assert clock.sightings.look("a") == beat(count=count, heard={"me": count})
    assert clock.state() == "lives"
    clock.now += 21
    clock.sightings.look("a")
    assert clock.state() != "lives"


def test_an_agent_that_starts_again_is_known_by_what_it_has_heard(clock, meeting):
    clock.step()
    meeting.write_beat(beat(count=50, heard={"me": 1}))
    clock.sightings.look("a")
    clock.step()
    meeting.write_beat(beat(life="next", count=1))
    assert clock.sightings.look("a").life == "x"
    meeting.write_beat(beat(life="next", count=2, heard={"me": 2}))
    assert clock.sightings.look("a").life == "next"
    meeting.write_beat(beat(count=51, heard={"me": 1}))
    assert clock.sightings.look("a").life == "next"


def test_the_agent_of_the_newest_record_is_believed_if_no_other_one_lives(clock, meeting):
    """An agent copies parts of a host which does not read its signs."""
    meeting.write_beat(beat(life="earlier"))
    assert clock.sightings.look("a", is_glance=True).life == "earlier"
    meeting.write_beat(beat(life="next"))
    assert clock.sightings.look("a", is_glance=True).life == "earlier"
    assert clock.sightings.look("a", "next", is_glance=True).life == "next"
    meeting.write_beat(beat(life="earlier", count=7))
    assert clock.sightings.look("a", "next", is_glance=True).life == "next"


def test_a_host_that_is_looked_at_again_has_time_to_prove_that_it_lives(clock, meeting):
    clock.step()
    meeting.write_beat(beat())
    clock.sightings.look("a")
    for count in range(2, 40):
        clock.step()
        meeting.write_beat(beat(count=count))
        clock.sightings.look("a", is_glance=True)
    assert clock.state() == "lost"
    clock.sightings.look("a")
    assert clock.state() == "may live"
    for count in range(40, 62):
        clock.step()
        meeting.write_beat(beat(count=count))
        clock.sightings.look("a")
    assert clock.state() == "lost"
