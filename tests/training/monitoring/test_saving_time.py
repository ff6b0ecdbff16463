"""Checks what is said about the time of saves."""

from lingvo_gshard.training.run.monitoring.saving_time import SavingTime


def test_the_time_of_saves_is_a_share_of_the_whole():
    now = 0.0
    saving = SavingTime(lambda: now)
    assert saving.words() == []
    for kind, seconds in (("checkpoints", 4.0), ("snapshots", 1.0), ("snapshots", 2.0)):
        with saving.measured(kind):
            now += seconds
        now += 31.0
    assert saving.words() == [
        "Saving kept the steps waiting for 7.0% of the time: 1 checkpoints of 4 s, 4 s at most; "
        "2 snapshots of 1.5 s, 2 s at most"
    ]


def test_a_save_that_failed_is_not_counted():
    saving = SavingTime()
    try:
        with saving.measured("checkpoints"):
            raise OSError
    except OSError:
        pass
    assert saving.words() == []
