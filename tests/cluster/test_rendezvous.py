# tests: wings/cluster/rendezvous.py, wings/cluster/envelope.py, wings/cluster/member.py
"""Checks that all processes connect, or all learn which one is missing or which option differs."""

import concurrent.futures
import socket
import threading
import time

import pytest

from lingvo_gshard.wings.cluster import rendezvous
from lingvo_gshard.wings.cluster.member import ClusterMember
from lingvo_gshard.wings.cluster.rendezvous import (
    SECRET,
    Challenge,
    Hello,
    Reply,
    bind_address,
    is_open_to_strangers,
    meet,
    read_line,
    send_line,
)


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def call_all(*cards, seconds=20.0, port=None):
    """Calls `meet` for each (num_processes, process_id, options); returns results or errors."""
    port = port or free_port()

    def call(card):
        count, index, options = card
        try:
            return meet(ClusterMember("localhost", port, count, index), options, seconds)[0]
        except ValueError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(cards)) as pool:
        return list(pool.map(call, cards))


def close(*results):
    for connections in results:
        for connection in connections.values():
            connection.close()


def test_all_processes_keep_a_connection_to_process_0():
    results = call_all(*[(3, k, {"mesh": "data=8"}) for k in range(3)])
    assert [sorted(r) for r in results] == [[1, 2], [0], [0]]
    for message, sender, receiver in (
        (Reply("to 2"), results[0][2], results[2][0]),
        (Reply("from 1"), results[1][0], results[0][1]),
    ):
        send_line(sender, message)
        assert read_line(receiver, Reply, 5.0) == message
    close(*results)


def test_the_port_is_free_while_connections_are_open():
    port = free_port()
    results = call_all((2, 0, {}), (2, 1, {}), port=port)
    socket.create_server(("", port)).close()
    close(*results)


def test_missing_processes_are_named_in_all_others():
    results = call_all((4, 0, {}), (4, 2, {}), seconds=2.0)
    for error in results:
        assert "`num_processes=4` processes were expected at `coordinator=localhost:" in str(error)
        assert "within 2 s none came with `process_id` 1, 3" in str(error)


def test_missing_coordinator_is_reported():
    started = time.monotonic()
    (error,) = call_all((2, 1, {}), seconds=1.0)
    assert "`coordinator=localhost:" in str(error)
    assert "could not be reached within 1 s (Connection refused)" in str(error)
    assert time.monotonic() - started < 20


def test_unknown_host_is_reported():
    with pytest.raises(ValueError, match="`coordinator=no-such-host.invalid:1234` could not be"):
        meet(ClusterMember("no-such-host.invalid", 1234, 2, 1), {}, 0.5)


def test_occupied_port_is_reported():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"process 0 cannot open port {port} here"):
            meet(ClusterMember("localhost", port, 2, 0), {}, 5.0)


def test_duplicate_process_id_is_reported():
    results = call_all((3, 0, {}), (3, 1, {}), (3, 1, {}))
    assert [str(r) for r in results] == ["two processes were started with `process_id=1`"] * 3


def test_mismatched_process_count_is_reported():
    results = call_all((2, 0, {}), (3, 1, {}))
    words = "process 1 has `num_processes=3`, but process 0 has `num_processes=2`"
    assert [str(r) for r in results] == [words] * 2


def test_mismatched_options_are_reported():
    results = call_all((2, 0, {"mesh": "data=8"}), (2, 1, {"mesh": "data=4"}))
    words = "process 1 has `mesh=data=4`, but process 0 has `mesh=data=8`"
    assert [str(r) for r in results] == [words] * 2


def test_long_options_are_not_printed():
    results = call_all((2, 0, {"Params": "x" * 10**6}), (2, 1, {"Params": "y" * 10**6}))
    assert [str(r) for r in results] == ["process 1 has other Params than process 0"] * 2


def test_unknown_clients_are_ignored():
    """Other clients connect before and between the processes."""
    port, stop = free_port(), threading.Event()

    def disturb():
        while not stop.is_set():
            try:
                with socket.create_connection(("localhost", port), timeout=1) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            except OSError:
                time.sleep(0.01)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        results = call_all(*[(3, k, {}) for k in range(3)], port=port)
    finally:
        stop.set()
        disturber.join()
    assert [sorted(r) for r in results] == [[1, 2], [0], [0]]
    close(*results)


def test_foreign_server_at_the_address_is_reported():
    with socket.create_server(("", 0)) as other:

        def answer():
            try:
                while True:
                    connection, _ = other.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()
            except OSError:
                return

        threading.Thread(target=answer, daemon=True).start()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match="another program answers there"):
            meet(ClusterMember("localhost", port, 2, 1), {}, 1.0)
        other.shutdown(socket.SHUT_RDWR)


def say_hello(port, process, proof=None):
    """Says hello to process 0 as soon as it listens, with a given proof; returns its reply."""
    connection = None
    while connection is None:
        try:
            connection = socket.create_connection(("localhost", port), timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.05)
    with connection:
        challenge = read_line(connection, Challenge, 5.0)
        hello = Hello(process, {"num_processes": "2"}, "nonce")
        hello.proof = proof or rendezvous._proof_of_hello(challenge, hello)
        send_line(connection, hello)
        return read_line(connection, Reply, 10.0)


@pytest.mark.parametrize("process", [7, -7, 0])
def test_process_out_of_range_is_named(process):
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(call_all, (2, 0, {}), port=port)
        reply = say_hello(port, process)
        (error,) = first.result()
    assert f"`process_id={process}`" in reply.error and str(error) == reply.error


def test_silent_connections_delay_nobody():
    """Process 0 waits for each of them at once, not for one after the other."""
    port, silent = free_port(), []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        first = pool.submit(call_all, (2, 0, {}), port=port)
        while len(silent) < 32:
            try:
                silent.append(socket.create_connection(("localhost", port), timeout=5))
            except ConnectionRefusedError:
                time.sleep(0.05)
        results = [*call_all((2, 1, {}), port=port), *first.result()]
    assert [sorted(result) for result in results] == [[0], [1]]
    assert time.monotonic() - started < 2 * rendezvous._HELLO_SECONDS
    for connection in silent:
        connection.close()
    close(*results)


def test_a_process_without_the_secret_is_refused_and_ends_nobody(monkeypatch):
    port = free_port()
    monkeypatch.setenv(SECRET, "ours")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(call_all, (2, 0, {}), port=port)
        replies = [say_hello(port, 7, proof) for proof in ("0" * 64, "\u00fcnsigned")]
        results = [*call_all((2, 1, {}), port=port), *first.result()]
    assert all(f"process 0 has another {SECRET}" in reply.error for reply in replies)
    assert [sorted(result) for result in results] == [[0], [1]]
    close(*results)


def test_process_0_without_the_secret_is_not_believed(monkeypatch):
    """Whoever answers at the coordinator's address must know the secret, too."""
    monkeypatch.setenv(SECRET, "ours")
    with socket.create_server(("localhost", 0)) as false:
        port = false.getsockname()[1]

        def answer():
            while True:
                try:
                    connection, _ = false.accept()
                except OSError:
                    return
                with connection:
                    send_line(connection, Challenge(rendezvous._PROTOCOL, "nonce"))
                    read_line(connection, Hello, 5.0)
                    send_line(connection, Reply(None, "forged"))

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ValueError, match="another program answers there"):
            meet(ClusterMember("localhost", port, 2, 1), {}, 1.0)
        false.shutdown(socket.SHUT_RDWR)


def test_process_0_listens_at_the_coordinators_address_alone():
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call_all, (2, 0, {}), port=port)
        elsewhere = socket.create_server(("127.0.0.2", port))
        results = [*call_all((2, 1, {}), port=port), *waiting.result()]
        elsewhere.close()
    close(*results)


def test_bind_addresses(monkeypatch):
    assert bind_address(ClusterMember("127.0.0.1", 1, 2, 0)) == "127.0.0.1"
    assert bind_address(ClusterMember("localhost", 1, 2, 0)) in ("127.0.0.1", "::1")
    assert bind_address(ClusterMember("10.9.8.7", 1, 2, 0, bind_address="0.0.0.0")) == "0.0.0.0"
    # A machine's own name that /etc/hosts gives a loopback address, as Debian does.
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert bind_address(ClusterMember("own-name", 1, 2, 0)) in ("::", "0.0.0.0")


def test_strangers_are_kept_out_by_loopback_or_a_secret(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    assert is_open_to_strangers(ClusterMember("10.9.8.7", 1, 2, 0))
    assert not is_open_to_strangers(ClusterMember("127.0.0.1", 1, 2, 0))
    monkeypatch.setenv(SECRET, "ours")
    assert not is_open_to_strangers(ClusterMember("10.9.8.7", 1, 2, 0))
