"""A man in the middle: carries the bytes of a connection to another port, and may change them."""

import contextlib
import socket
import threading
from collections.abc import Callable

# Takes a block and the number of its first byte, and returns what is sent in its place.
Change = Callable[[bytes, int], bytes]


class Between:
    """Listens at a port, and carries all connections to another one.

    Attributes:
      port: where it listens.
    """

    def __init__(self, address: str, port: int, change: Change, bind: str = "127.0.0.1"):
        self._to, self._change = (address, port), change
        self._listener = socket.create_server((bind, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._to)
                for one, other, change in (
                    (client, server, lambda block, _: block),
                    (server, client, self._change),
                ):
                    arguments = [one, other, change]
                    threading.Thread(target=_carry, args=arguments, daemon=True).start()


def _carry(one: socket.socket, other: socket.socket, change: Change) -> None:
    place = 0
    with contextlib.suppress(OSError):
        while block := one.recv(2**16):
            other.sendall(change(block, place))
            place += len(block)
    for connection in (one, other):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
