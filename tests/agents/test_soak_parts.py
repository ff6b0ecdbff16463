# tests: /tests/agents/soak/
"""Checks the parts of the soak: its network link, its clock, and how it counts what was lost."""

import json
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.agents.soak import hosts
from tests.agents.soak.link import carry, changed, checksum
from tests.agents.soak.steps import Steps
from tests.agents.soak.trainings import is_equal

_CLOCKS = """
import json, sys, threading, time
began, wall = time.monotonic(), time.time()
sys.stdin.readline()
jump = time.time() - wall - (time.monotonic() - began)
began = time.monotonic()
threading.Event().wait(0.05)
time.sleep(0.05)
print(json.dumps([wall, jump, time.monotonic() - began]))
"""


def sent_through_link(count: int, delay: float, loss: float) -> list[tuple[float, int]]:
    """Sends numbers through a link. Returns how late each came that did."""
    (one, near), (other, far) = (
        socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)
    )
    taps = near.fileno(), far.fileno()
    link = threading.Thread(target=carry, args=[taps, delay, loss, random.Random(1)])
    link.start()
    sent, came = {}, []
    other.settimeout(delay + 1.0)

    def send() -> None:
        for number in range(count):
            sent[number] = time.monotonic()
            one.send(b"%d" % number)

    # Beside the reading below, since the sockets hold only some hundred frames.
    sender = threading.Thread(target=send)
    sender.start()
    while len(came) < count:
        try:
            number = int(other.recv(100))
        except TimeoutError:
            break
        came.append((time.monotonic() - sent[number], number))
    sender.join()
    one.close()
    link.join()
    for end in (near, other, far):
        end.close()
    return came


def test_a_link_carries_frames_of_a_process_with_many_open_files():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(min(limit - 200, 1100))]
    try:
        assert len(sent_through_link(5, delay=0.0, loss=0.0)) == 5
    finally:
        for file in files:
            os.close(file)


def test_a_link_delays_all_frames_and_keeps_their_order():
    came = sent_through_link(50, delay=0.2, loss=0.0)
    assert [number for _, number in came] == list(range(50))
    assert min(late for late, _ in came) >= 0.2


def test_a_link_loses_the_share_of_frames_that_it_shall():
    came = sent_through_link(500, delay=0.0, loss=0.2)
    # Five standard deviations around 400.
    assert abs(len(came) - 400) < 45


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_clock_goes_wrong_while_a_process_runs_and_its_waits_stay_right(tmp_path):
    library, clock = hosts.built_clock(tmp_path), tmp_path / "clock"
    clock.write_bytes((-7200).to_bytes(8, sys.byteorder, signed=True))
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _CLOCKS],
        env={**os.environ, "LD_PRELOAD": str(library), "GSHARD_CLOCK": str(clock)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    time.sleep(0.5)
    with clock.open("r+b") as file:
        file.write((3600).to_bytes(8, sys.byteorder, signed=True))
    said, _ = process.communicate(b"\n", timeout=60)
    wall, jump, waited = json.loads(said)
    assert abs(wall + 7200 - time.time()) < 60
    assert abs(jump - 10_800) < 1
    assert 0.1 <= waited < 30


def test_what_a_fault_costs_follows_from_the_steps():
    # Four steps a second until step 40; then 13 s of silence, and the job goes on from step 36.
    before = [(0.25 * step, step) for step in range(1, 41)]
    after = [(23.0 + 0.25 * (step - 36), step) for step in range(36, 81)]
    steps = Steps(before + after)
    assert steps.usual_seconds == 0.25
    lost = steps.lost(9.0, 30.0)
    assert lost.steps == (5,)
    assert lost.idle_seconds == pytest.approx(13.0 - 0.25)
    assert lost.seconds == pytest.approx(12.75 + 5 * 0.25)
    assert steps.lost(0.0, 9.0).steps == () and steps.lost(0.0, 9.0).seconds == 0.0
    assert steps.kept(0.0, 100.0) == 79


def test_a_man_in_the_middle_changes_one_byte_and_nobody_notices():
    """The frame is built by hand. A right checksum makes the sum of all words 0."""
    content = b"x" * 1001
    header = bytes([0x45, 0, *(20 + 20 + len(content)).to_bytes(2, "big"), *bytes(5), 6, 0, 0])
    addresses = bytes([10, 0, 0, 1, 10, 0, 0, 2])
    tcp = (7000).to_bytes(2, "big") + bytes(10) + bytes([0x50]) + bytes(7) + content
    frame = bytes(12) + b"\x08\x00" + header + addresses + tcp
    found = changed(frame, 7000)
    assert changed(frame, 7001) == frame and len(found) == len(frame)
    differing = [k for k in range(54, len(frame)) if found[k] != frame[k]]
    assert len(differing) == 1
    pseudo = addresses + bytes([0, 6]) + len(tcp).to_bytes(2, "big")
    assert checksum(pseudo + found[34:]) == 0


def test_states_differ_by_a_bit_a_dtype_or_a_path():
    state = {"theta.w": np.array([1, 0], np.float32)}
    assert is_equal(state, {"theta.w": np.array([1, 0], np.float32)})
    for other in (
        {"theta.w": np.array([1, -0.0], np.float32)},
        {"theta.w": np.array([1, 0], np.float64)},
        {"theta.v": np.array([1, 0], np.float32)},
        {**state, "theta.v": np.array([1, 0], np.float32)},
    ):
        assert not is_equal(state, other) and not is_equal(other, state)
