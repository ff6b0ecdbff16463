"""Checks what the agents of a job on Ray tell each other, without Ray."""

from lingvo_gshard.wings.agents.ray_meeting import Messages
from lingvo_gshard.wings.agents.records import Beat, Record
from lingvo_gshard.wings.agents.sightings import Sightings


def beat(host: str, life: str = "1", **given) -> Beat:
    return Beat(host, life, 1, "10.0.0.1", 7000, **given)


def test_the_first_of_two_records_of_a_number_holds():
    messages = Messages()
    assert messages.newest() is None
    first, second = Record(1, mesh="data=2"), Record(1, mesh="data=1")
    assert messages.agree(first) == first == messages.agree(second)
    assert messages.newest() == first and messages.newest(known=1) is None
    # An actor that Ray started again knows none of what was told before.
    assert Messages().newest(known=0, told=1) is None


def test_the_signs_of_a_place_are_forgotten_when_its_actor_is_gone():
    messages = Messages()
    for host in ("10.0.0.1-1", "10.0.0.2-11", "10.0.0.3-0"):
        assert messages.write_beat(beat(host)) is False
    messages.forget(1)
    assert messages.hosts() == ["10.0.0.2-11", "10.0.0.3-0"]
    assert messages.beat("10.0.0.1-1") is None
    assert messages.beats(["10.0.0.1-1", "10.0.0.3-0"]) == {"10.0.0.3-0": beat("10.0.0.3-0")}
    messages.remove_beat("10.0.0.3-0")
    assert messages.hosts() == ["10.0.0.2-11"]
    messages.stop()
    assert messages.write_beat(beat("10.0.0.2-11")) is True


class Meeting(Messages):
    tells_losses = True


def test_a_host_whose_sign_is_gone_is_lost_at_once():
    meeting = Meeting()
    sightings = Sightings(meeting, "own", 20.0, lambda: 0.0)
    sightings.wrote(1)
    meeting.write_beat(beat("10.0.0.1-1", heard={"own": 1}))
    sightings.look("10.0.0.1-1")
    assert sightings.lives("10.0.0.1-1")
    meeting.forget(1)
    assert sightings.look("10.0.0.1-1") is None
    assert sightings.is_lost("10.0.0.1-1")
    # A meeting in files may show a sign late.
    meeting.tells_losses = False
    meeting.write_beat(beat("10.0.0.1-1", heard={"own": 1}))
    sightings.look("10.0.0.1-1")
    meeting.forget(1)
    assert sightings.look("10.0.0.1-1") is not None
    assert sightings.lives("10.0.0.1-1")
