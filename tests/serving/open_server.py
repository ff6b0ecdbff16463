"""Runs the web server on a thread of this process, for tests of what happens to connections."""

import contextlib
import json
import socket
import threading
import time

from lingvo_gshard.wings.serving.server import Server, ServerOptions, bind


class OpenServer:
    """A server on a free port of this machine.

    Attributes:
      port: its port.
      said: lines that it said.
      server: the server.
      failures: what it raised at its end.
    """

    def __init__(self, service, options):
        bound = bind("127.0.0.1", 0)
        self.port, self.said = bound.getsockname()[1], []
        self.server = Server(service, options, self.said.append)
        self.failures = []
        self._thread = threading.Thread(target=self._run, args=(bound,))
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def _run(self, bound):
        try:
            self.server.run(sockets=[bound])
        except BaseException as error:
            self.failures.append(error)

    def stop(self):
        self.server.should_exit = True
        self._thread.join()

    def connect(self, data=b"", timeout=30.0):
        """Returns a new connection on which data was sent."""
        opened = socket.create_connection(("127.0.0.1", self.port), timeout)
        opened.sendall(data)
        return opened

    def get(self, path="/healthz", **headers):
        """Returns the status and the JSON value that a path has."""
        lines = {"Host": "localhost", "Connection": "close", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        with self.connect(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode()) as opened:
            return answer(opened)


def answer(opened):
    """Returns the status and the JSON value of an answer, read until the server ends it."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := opened.recv(65536):
            received += part
    if not received:
        return None, None
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else None


@contextlib.contextmanager
def open_server(service, **options):
    """Serves inside the context."""
    opened = OpenServer(service, ServerOptions(**options))
    try:
        yield opened
    finally:
        opened.stop()
        assert not opened.failures
