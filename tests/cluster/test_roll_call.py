# tests: wings/cluster/peer_monitor.py
"""Tests which process a roll call calls stuck."""

from lingvo_gshard.wings.cluster import peer_monitor
from lingvo_gshard.wings.cluster.peer_monitor import Hang, RollCall, StacksWanted
from lingvo_gshard.wings.services.hang_watch import Snapshot


class EndedError(Exception):
    """Stands for the end of all processes."""


def snapshot(process, place=(7, 2), doing="waits for the devices to end step 6", is_busy=False):
    return Snapshot(process, place, doing, f"file.py:{process} (f)", f"stack {process}", is_busy)


def ends(snapshots, directory, count=None):
    """Returns what the roll call of processes with these snapshots ends with; None if nothing."""
    count = count or len(snapshots)

    def send(process, message):
        assert process is None and isinstance(message, StacksWanted)
        for one in snapshots[1:]:
            call.on_message(one)

    def end_all(process, reason):
        raise EndedError(process, reason)

    call = RollCall(0, count, send, end_all, lambda: directory)
    call.answer_with(lambda: snapshots[0])
    try:
        call.report_hang("no step has ended for 9 s")
    except EndedError as ended:
        return ended.args
    return None


def test_the_process_that_is_furthest_behind_is_stuck(tmp_path):
    late = snapshot(2, (6, 3), "records step 5")
    process, reason = ends([snapshot(0), snapshot(1), late], tmp_path)
    path = tmp_path / "hang-6.txt"
    assert (process, reason) == (
        2,
        "is stuck: it records step 5, at file.py:2 (f); no step has ended for 9 s; "
        f"{path} has the stacks of all threads",
    )
    text = path.read_text()
    assert text.startswith("no step has ended for 9 s\n")
    assert [f"stack {k}" in text for k in range(3)] == [True] * 3


def test_processes_at_one_place_wait_for_a_device(tmp_path):
    process, reason = ends([snapshot(0), snapshot(1)], tmp_path)
    assert process == 0
    assert reason.startswith(
        "is stuck like all others: it waits for the devices to end step 6, at file.py:0 (f): a "
        "device or a collective does not end; no step"
    )


def test_a_process_that_does_not_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_monitor, "_ANSWER_SECONDS", 0.1)
    process, reason = ends([snapshot(0), snapshot(1)], tmp_path, count=3)
    assert process == 2
    assert reason.startswith("does not answer: it is stopped, or a library blocks its interpreter;")


def test_a_busy_process_is_waited_for(tmp_path):
    assert ends([snapshot(0), snapshot(1, (7, 1), "compiles", is_busy=True)], tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_one_process_alone_is_stuck_without_others(tmp_path):
    process, reason = ends([snapshot(0)], None)
    assert (process, reason.partition(";")[0]) == (
        0,
        "is stuck: it waits for the devices to end step 6, at file.py:0 (f)",
    )


def test_other_processes_ask_process_0_and_answer_it(monkeypatch):
    monkeypatch.setattr(peer_monitor, "_ANSWER_SECONDS", 0.05)
    sent, ended = [], []
    call = RollCall(
        1, 2, lambda *sending: sent.append(sending), lambda *end: ended.append(end), str
    )
    call.answer_with(lambda: snapshot(1))
    call.on_message(StacksWanted())
    assert sent == [(0, snapshot(1))]
    call.report_hang("no step")
    assert sent[1:] == [(0, Hang("no step"))]
    assert ended == [(0, "does not answer; no step")]
