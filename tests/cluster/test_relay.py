"""Checks that strangers neither reach jax's service nor disturb those that may."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from lingvo_gshard.wings.cluster.member import ClusterMember
from lingvo_gshard.wings.cluster.relay import Relay
from lingvo_gshard.wings.cluster.rendezvous import SECRET
from tests.cluster.test_cluster import assert_good, assert_saved, finish, free_port, start

# Speaks jax's protocol as process 1, as soon as it is connected.
_STRANGER = """
import sys
from jax._src.lib import _jax
input()
client = _jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=4)
try:
    client.connect()
except Exception as error:
    print("refused", flush=True)
"""


@pytest.mark.parametrize(
    "given", [{SECRET: "secret"}, pytest.param({}, marks=pytest.mark.slow, id="no secret")]
)
def test_a_stranger_who_speaks_as_process_1_ends_nothing(tmp_path, given):
    """jax's service takes it for process 1 that has started again, and ends both processes."""
    steps, port = 120, free_port()
    both = {"coordinator": f"localhost:{port}", "num_processes": 2, **given}
    # The stranger has imported jax before the processes train, and says nothing until then.
    stranger = subprocess.Popen(
        [sys.executable, "-c", _STRANGER, f"localhost:{port}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    started = [start(tmp_path, steps, devices=1, process_id=k, **both) for k in range(2)]
    try:
        assert any(line.startswith("step 1 ") for line in started[0].stdout)
        said, _ = stranger.communicate("now\n", timeout=60)
        assert "refused" in said or stranger.returncode != 0
        assert all(process.poll() in (None, 0) for process in started)
    finally:
        ended = finish(*started)
    assert_good(*ended)
    assert_saved(tmp_path, steps)


@pytest.fixture
def relays():
    """Makes the relays of two processes, and a service that returns what it gets."""
    made = []

    def make(index: int, port: int, token: str = "token") -> Relay:
        made.append(Relay(ClusterMember("127.0.0.1", port, 2, index), token))
        return made[-1]

    yield make
    for one in made:
        one.close()


def connect(relay: Relay) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(relay.address.removeprefix("unix:"))
    return connection


def serve(relay: Relay) -> None:
    """Returns bytes to whoever sends them, in place of jax's service."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(relay.address.removeprefix("unix:"))
    listener.listen()

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while block := connection.recv(2**16):
                connection.sendall(block)

    def accept() -> None:
        while True:
            threading.Thread(target=echo, args=[listener.accept()[0]], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def received(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size and (block := connection.recv(2**16)):
        content += block
    return content


def test_bytes_are_carried_both_ways_while_strangers_fill_the_port(relays):
    port = free_port()
    serve(relays(0, port))
    # More than may wait for an answer at once: silent ones, and some that talk at length.
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    for stranger in strangers[::3]:
        with contextlib.suppress(OSError):
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" * 5000 + b"\n")
    content = os.urandom(3_000_000)
    relay = relays(1, port)
    deadline = time.monotonic() + 30
    found = b""
    while found != content:
        # jax tries again, too.
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError), connect(relay) as connection:
            threading.Thread(target=connection.sendall, args=[content], daemon=True).start()
            found = received(connection, len(content))
    for stranger in strangers:
        stranger.close()


def test_who_does_not_know_the_token_is_not_let_in(relays):
    port = free_port()
    serve(relays(0, port))
    with connect(relays(1, port, "another")) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"hello")
        assert received(connection, 5) == b""


def test_a_port_that_is_taken_is_named(relays):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"process 0 cannot open port {port} here"):
            relays(0, port)


def test_the_folder_of_a_killed_process_goes(tmp_path):
    text = f"""
from lingvo_gshard.wings.cluster.member import ClusterMember
from lingvo_gshard.wings.cluster.relay import Relay
relay = Relay(ClusterMember("127.0.0.1", {free_port()}, 2, 0), "token")
print(relay.address, flush=True)
import time; time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    folder = os.path.dirname(process.stdout.readline().strip().removeprefix("unix:"))
    assert os.stat(folder).st_mode & 0o077 == 0
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while os.path.exists(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)
