# tests: wings/agents/meeting.py, wings/object_stores/buckets.py
"""Checks that agents meet in a bucket, by conditional writes alone."""

import threading

import pytest

from lingvo_gshard.core.files import objects
from lingvo_gshard.wings.agents.meeting import Meeting, create, shared_secret
from lingvo_gshard.wings.agents.records import Beat, Member, Record
from lingvo_gshard.wings.cluster.rendezvous import SECRET
from tests.agents.stand_in import number_after
from tests.agents.test_agents import STEPS, Job, end


def test_of_many_records_with_one_number_all_see_the_same(folder):
    """Eight agents write the record of one number at once."""
    meeting = Meeting(folder, "secret", print)
    start, agreed = threading.Barrier(8), []

    def write(index: int) -> None:
        start.wait()
        agreed.append(meeting.agree(Record(1, (Member(f"host{index}", "x"),))))

    threads = [threading.Thread(target=write, args=[index]) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(agreed) == 8 and len({record.members for record in agreed}) == 1
    assert meeting.newest() == agreed[0]


def test_signs_secrets_and_records_are_those_of_a_directory(folder, monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    secret = shared_secret(folder)
    assert len(secret) == 32 and shared_secret(folder) == secret
    said = []
    meeting = Meeting(folder, secret, said.append)
    assert meeting.newest() is None and meeting.hosts() == []
    beat = Beat("a", "x", 1, "127.0.0.1", 1234)
    meeting.write_beat(beat)
    assert meeting.beat("a") == beat and meeting.hosts() == ["a"]
    meeting.remove_beat("a")
    assert meeting.hosts() == [] and meeting.beat("a") is None
    assert create(f"{folder}/one", b"first") and not create(f"{folder}/one", b"second")
    assert objects.read_bytes(f"{folder}/one") == b"first"
    objects.write_bytes(f"{folder}/rounds/8.json", b"{}\nabc\n")
    assert meeting.newest() is None and len(said) == 1


@pytest.mark.slow
def test_a_job_survives_its_workers_when_agents_meet_in_a_bucket(folder, tmp_path):
    job = Job(tmp_path)
    job.meeting_place = f"{folder}/agents"
    said = end(job.start_local(faults="1:17:kill"))
    assert job.saved == [STEPS, number_after(STEPS)]
    assert "Round 2 after local-1 was killed by SIGKILL (after step 16)" in said
    assert "1.json" in objects.names(f"{folder}/agents/rounds")
