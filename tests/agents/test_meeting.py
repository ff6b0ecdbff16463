"""Checks that agents agree through a directory, and believe no stranger."""

import os
import stat
import threading

import pytest

from lingvo_gshard.agents.meeting import Meeting, create, shared_secret
from lingvo_gshard.agents.records import Beat, Member, Record
from lingvo_gshard.agents.sightings import Sightings
from lingvo_gshard.runtime.cluster.rendezvous import SECRET


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
    monkeypatch.setenv(SECRET, "given")
    assert shared_secret(place) == "given"


def test_create_never_replaces(tmp_path):
    path = str(tmp_path / "file")
    assert create(path, b"first") and not create(path, b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_host_lives_while_its_sign_changes(meeting):
    now = 0.0
    sightings = Sightings(meeting, 20.0, lambda: now)
    assert sightings.is_lost("a")
    meeting.write_beat(beat(count=1))
    sightings.look("a")
    # It may be an old file, or a host that is just about to write the next sign.
    assert not sightings.is_lost("a") and not sightings.lives("a")
    now = 10.0
    meeting.write_beat(beat(count=2))
    sightings.look("a")
    assert sightings.lives("a")
    now = 29.0
    sightings.look("a")
    assert sightings.lives("a")
    now = 31.0
    sightings.look("a")
    assert sightings.is_lost("a") and not sightings.lives("a")
    sightings.forgive(5.0)
    assert sightings.lives("a")
