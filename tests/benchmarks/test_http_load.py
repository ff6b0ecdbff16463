# tests: /benchmarks/http_load.py
"""Checks that many clients in one thread send every request once, and see what happens to it."""

import collections
import http.server
import threading

import pytest

pytest.importorskip("httptools")

from benchmarks.http_load import HttpLoad


class _Handler(http.server.BaseHTTPRequestHandler):
    """Echoes bodies; answers "refuse" with 503, and "drop" not at all."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if body == b"drop":
            self.close_connection = True
            return
        self.send_response(503 if body == b"refuse" else 200)
        self.send_header("Content-Length", str(len(body)))
        if body == b"last":
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        del format, args


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_every_request_is_sent_once_and_judged(server):
    bodies = [b"one", b"two" * 9000, b"refuse", b"drop", b"last"]
    seen = collections.Counter()
    load = HttpLoad(
        server.server_port,
        "/",
        bodies,
        lambda number, status, body, seconds: seen.update([(number, status, body, seconds > 0)]),
    )
    load.run(clients=3, requests=50)
    statuses = [200, 200, 503, 0, 200]
    answers = [b"" if status == 0 else body for status, body in zip(statuses, bodies, strict=True)]
    expected = {(n, statuses[n], answers[n], True): 10 for n in range(5)}
    assert seen == expected


def test_clients_stop_when_the_time_is_over(server):
    seen = []
    load = HttpLoad(server.server_port, "/", [b"x"], lambda *answer: seen.append(answer))
    seconds = load.run(clients=4, seconds=0.3)
    assert 0.3 <= seconds < 30
    assert len(seen) >= 4
    assert {status for _, status, _, _ in seen} == {200}
