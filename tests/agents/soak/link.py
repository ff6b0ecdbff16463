"""A network link that delays, loses and changes frames, for kernels without netem.

    python -m tests.agents.soak.link ONE OTHER --delay=0.2 --loss=0.01 --seed=0

Makes two TAP devices, and carries each frame from one to the other, late or not at all, until the
process ends. The devices go with the process. Prints a line when both are there.

With --changed_port, it is a man in the middle: it changes a byte of each long frame that comes from
this port, and the checksum of TCP.
"""

import argparse
import collections
import fcntl
import math
import os
import random
import select
import socket
import struct
import time

# Linux, linux/if_tun.h.
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LONGEST = 65_536
_ETHERNET = 14
# Bytes of a frame that has more to say than a handshake.
_MUCH = 400
# A full queue loses frames, as one of a switch does.
_MOST = 10_000


def open_tap(name: str) -> int:
    """Makes a TAP device and returns its file descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def changed(frame: bytes, port: int) -> bytes:
    """Returns a frame with one changed byte if it has much to say and comes from a port of TCP."""
    ip = frame[_ETHERNET:]
    if frame[12:14] != b"\x08\x00" or ip[9] != socket.IPPROTO_TCP:
        return frame
    header, total = (ip[0] & 15) * 4, int.from_bytes(ip[2:4], "big")
    tcp = bytearray(ip[header:total])
    begin = (tcp[12] >> 4) * 4
    if int.from_bytes(tcp[:2], "big") != port or len(tcp) - begin < _MUCH:
        return frame
    tcp[(begin + len(tcp)) // 2] ^= 1
    tcp[16:18] = bytes(2)
    pseudo = ip[12:20] + bytes([0, socket.IPPROTO_TCP]) + len(tcp).to_bytes(2, "big")
    tcp[16:18] = checksum(pseudo + tcp).to_bytes(2, "big")
    return frame[:_ETHERNET] + ip[:header] + bytes(tcp)


def checksum(content: bytes) -> int:
    """Returns the checksum of the internet protocols (RFC 1071)."""
    content += bytes(len(content) % 2)
    total = sum(struct.unpack(f">{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def carry(
    taps: tuple[int, int], delay: float, loss: float, draw: random.Random, changed_port: int = 0
) -> None:
    """Carries frames between two devices until one of them is gone.

    Args:
      taps: file descriptors of the devices.
      delay: seconds that each frame is late, in each direction.
      loss: probability that a frame is lost.
      draw: decides which.
      changed_port: a port whose frames are changed; 0 for none.
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
            if changed_port:
                frame = changed(frame, changed_port)
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
    parser.add_argument("--changed_port", type=int, default=0)
    options = parser.parse_args()
    taps = open_tap(options.one), open_tap(options.other)
    print("ready", flush=True)
    draw = random.Random(options.seed)
    carry(taps, options.delay, options.loss, draw, options.changed_port)


if __name__ == "__main__":
    main()
