# tests: wings/serving/connection.py, wings/serving/server.py, wings/serving/border.py
"""Tests what connections may do: sizes, deadlines, numbers, and clients that leave."""

import contextlib
import http.client
import re
import resource
import socket
import time

import pytest

from lingvo_gshard.wings.serving import server as server_lib
from lingvo_gshard.wings.serving.connection import ConnectionLimits
from lingvo_gshard.wings.serving.limits import Limits
from lingvo_gshard.wings.serving.service import Service
from tests.serving.open_server import answer, open_server

pytestmark = pytest.mark.xdist_group("serving")

SHORT = ConnectionLimits(head_seconds=0.3, idle_seconds=0.3, send_seconds=0.3)
POST = b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def service(translating):
    return Service(translating, Limits(timeout=600.0), token="secret")


def metric(service, name):
    found = re.search(rf"^{re.escape(name)} (.*)$", service.metrics.text()[0].decode(), re.M)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    "sent, status, said",
    [
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 2**20, 431, "more than 65,536 bytes"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 2**15, 431, "more than 65,536 bytes"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 2**17 + b"\r\n\r\n", 431, "headers"),
        (b"GET /" + b"x" * 2**20, 414, "the URL has more than 65,536 bytes"),
        (b"GET /" + b"x" * 2**17 + b" HTTP/1.1\r\n\r\n", 414, "the URL"),
        (b"\x16\x03\x01 this is TLS\r\n\r\n", 400, "not a valid HTTP request"),
    ],
    ids=["endless header", "endless headers", "a header", "endless URL", "a URL", "no HTTP"],
)
def test_large_heads_are_refused_before_the_token_is_checked(service, sent, status, said):
    with open_server(service) as server:
        with server.connect(sent) as opened:
            found, body = answer(opened)
        assert found == status and said in body["error"]["message"]
        assert metric(service, f'gshard_refused_total{{status="{status}"}}') == 1
        assert server.get()[0] == 200


def test_heads_below_the_limit_are_read(service):
    with open_server(service) as server:
        assert server.get(**{"X": "x" * 60_000})[0] == 200
        assert server.get("/" + "x" * 60_000)[0] == 404


def test_memory_of_an_endless_header_is_bounded(service):
    """The parser keeps a header that is not complete, and copies it for each piece."""
    with open_server(service) as server, server.connect(POST + b"X: ") as opened:
        with contextlib.suppress(OSError):
            for _ in range(2**8):
                opened.sendall(b"x" * 2**16)
            assert opened.recv(12) == b"HTTP/1.1 431"
        for connection in server.server.server_state.connections:
            assert connection._fed_bytes < 2**17


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /healthz HT", POST + b"X: y\r\n"])
def test_heads_that_never_end_are_given_up(service, sent):
    with open_server(service, limits=SHORT) as server, server.connect(sent) as opened:
        status, _ = answer(opened)
        assert status == (408 if len(sent) > 2 else None)


def test_line_breaks_between_requests_do_not_keep_a_connection(service):
    with open_server(service, limits=SHORT) as server:
        with server.connect(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") as opened:
            assert opened.recv(65536).startswith(b"HTTP/1.1 200")
            with pytest.raises(OSError):
                for _ in range(100):
                    time.sleep(0.05)
                    opened.sendall(b"\r\n")


def test_an_idle_connection_is_closed_and_a_busy_one_is_used_again(service):
    with open_server(service, limits=SHORT) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        for _ in range(3):
            client.request("GET", "/healthz")
            assert client.getresponse().read()
        assert client.sock.recv(1) == b""
        client.close()


def test_a_body_that_does_not_come_is_408(translating):
    service = Service(translating, Limits(timeout=0.3))
    with open_server(service) as server:
        with server.connect(POST + b"Content-Length: 100\r\n\r\n{") as opened:
            status, body = answer(opened)
        assert status == 408 and "the body took longer than 0.3 s" in body["error"]["message"]


def test_a_body_that_nobody_reads_does_not_hold_the_connection(service):
    """The token is missing, which is answered before the body comes."""
    with open_server(service) as server:
        with server.connect(POST + b"Content-Length: 1000000000\r\n\r\n") as opened:
            assert opened.recv(65536).startswith(b"HTTP/1.1 401")
            with pytest.raises(OSError):
                for _ in range(200):
                    opened.sendall(b"x" * 1000)
                    time.sleep(0.05)


def test_a_client_that_leaves_during_its_upload_is_no_error_of_ours(translating, caplog):
    service = Service(translating)
    with open_server(service) as server:
        for _ in range(5):
            server.connect(POST + b"Content-Length: 100\r\n\r\n{").close()
        while metric(service, 'gshard_clients_gone_total{path="/v1/translate"}') < 5:
            time.sleep(0.01)
        assert server.get()[0] == 200
        left = server.connect(POST + b"Content-Length: 100\r\n\r\n{")
        while metric(service, "gshard_requests_under_way") < 1:
            time.sleep(0.01)
    # The server has stopped, and does not wait for what never comes.
    status, body = answer(left)
    assert status == 503 and body["error"]["code"] == "stopped"
    assert server.server.cut_off == 0
    assert "gshard_errors_total{" not in service.metrics.text()[0].decode()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_refused_client_does_not_disturb_the_end(service):
    """It may still send when the server stops, and has got its answer."""
    with open_server(service) as server:
        opened = server.connect(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 2**18)
        assert opened.recv(12) == b"HTTP/1.1 431"
    assert server.server.server_state.connections == set()
    assert not server.failures
    opened.close()


def test_half_open_connections_give_way_to_others(service):
    with open_server(service, most_connections=8) as server:
        held = [server.connect(POST) for _ in range(30)]
        held += [
            server.connect(POST + b"Authorization: Bearer secret\r\nContent-Length: 9\r\n\r\n")
            for _ in range(30)
        ]
        for _ in range(20):
            assert server.get()[0] == 200
        assert "all 8 connections are taken; slow ones are closed" in " ".join(server.said)
        assert len(server.said) <= 2
        for one in held:
            one.close()


def test_without_descriptors_the_server_waits_and_goes_on(service, monkeypatch):
    """Accepting fails as if another part of the process had taken all descriptors."""
    with open_server(service) as server:
        fails = [True]

        class Listening:
            def __init__(self, real):
                self.real, self.asked = real, 0

            def __getattr__(self, name):
                return getattr(self.real, name)

            def accept(self):
                self.asked += 1
                if fails[0]:
                    raise OSError(24, "Too many open files")
                return self.real.accept()

        (found,) = server.server._acceptors
        monkeypatch.setattr(server_lib, "_RETRY_SECONDS", 0.2)
        listening = found._socket = Listening(found._socket)
        opened = server.connect(b"GET /healthz HTTP/1.0\r\nHost: a\r\n\r\n")
        time.sleep(1.0)
        # A loop that tries without waiting asks thousands of times.
        assert 2 <= listening.asked <= 8
        assert server.said == [
            "Warning: no connection can be accepted: Too many open files. Raise the limit with "
            "ulimit -n"
        ]
        fails[0] = False
        assert answer(opened)[0] == 200


def test_descriptors_are_kept_in_reserve(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    used = 1000 - server_lib.most_connections() - 32
    assert 3 <= used < 500
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 5000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert server_lib.most_connections() > 4000 and raised == [(5000, 5000)]


def test_a_client_that_does_not_read_its_answer_is_given_up(service):
    with open_server(service, limits=SHORT) as server:
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.connect(("127.0.0.1", server.port))
        # Answers that together are larger than all buffers; the server stops reading at once.
        request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        opened.settimeout(0.2)
        with pytest.raises(OSError):
            for _ in range(10_000):
                # More than the buffers of any kernel hold.
                opened.sendall(request * 100)
        while server.server.server_state.connections:
            time.sleep(0.01)
        opened.close()


def test_a_long_pipeline_is_cut(service, translating):
    with open_server(Service(translating)) as server:
        first = POST + b"Content-Length: 10\r\n\r\n"
        more = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
        with server.connect(first + b"{}        " + more) as opened:
            received = b""
            try:
                while part := opened.recv(65536):
                    received += part
            except ConnectionResetError:
                pass
        assert received.count(b"HTTP/1.1 200") < 100


def test_requests_in_a_short_pipeline_are_answered_in_order(service):
    with open_server(service) as server:
        sent = b"".join(
            b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (path, end)
            for path, end in (
                (b"/healthz", b""),
                (b"/v1/models", b""),
                (b"/nothing", b"Connection: close\r\n"),
            )
        )
        with server.connect(sent) as opened:
            received = b""
            while part := opened.recv(65536):
                received += part
        assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"401", b"404"]
