"""A network link that delays and loses frames, for kernels without netem.

    python -m tests.agents.soak.link ONE OTHER --delay=0.2 --loss=0.01 --seed=0

Makes two TAP devices, and carries each frame from one to the other, late or not at all, until the
process ends. The devices go with the process. Prints a line when both are there.
"""

import argparse
import collections
import fcntl
import math
import os
import random
import select
import struct
import time

# Linux, linux/if_tun.h.
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LONGEST = 65_536
# A full queue loses frames, as one of a switch does.
_MOST = 10_000


def open_tap(name: str) -> int:
    """Makes a TAP device and returns its file descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def carry(taps: tuple[int, int], delay: float, loss: float, draw: random.Random) -> None:
    """Carries frames between two devices until one of them is gone.

    Args:
      taps: file descriptors of the devices.
      delay: seconds that each frame is late, in each direction.
      loss: probability that a frame is lost.
      draw: decides which.
    """
    other = {taps[0]: taps[1], taps[1]: taps[0]}
    # All frames are equally late, so that the first in is the first out.
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    # select.select would fail for descriptors above 1,023.
    ready = select.poll()
    for tap in taps:
        ready.register(tap, select.POLLIN)
    while True:
        seconds = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for tap, _ in ready.poll(None if seconds is None else math.ceil(seconds * 1000)):
            frame = os.read(tap, _LONGEST)
            if not frame:
                return
            if draw.random() >= loss and len(waiting) < _MOST:
                waiting.append((time.monotonic() + delay, other[tap], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, tap, frame = waiting.popleft()
            try:
                os.write(tap, frame)
            except OSError:
                # The device is down, or its queue is full.
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("one")
    parser.add_argument("other")
    parser.add_argument("--delay", type=float, required=True)
    parser.add_argument("--loss", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    taps = open_tap(options.one), open_tap(options.other)
    print("ready", flush=True)
    carry(taps, options.delay, options.loss, random.Random(options.seed))


if __name__ == "__main__":
    main()
