# tests: wings/agents/keeper.py, wings/agents/border.py, wings/services/snapshot_parts.py
"""Checks that parts of snapshots go from host to host, and to no stranger."""

import os
import socket
import threading
import time
import types

import pytest

from lingvo_gshard.wings.agents import keeper
from lingvo_gshard.wings.agents.keeper import Keeper, Preparation
from lingvo_gshard.wings.services.snapshot_parts import Part
from tests.agents.between import Between

PART = Part(1, 1, 10, 2, 0)
_HERE = "127.0.0.1"


@pytest.fixture
def keepers(tmp_path):
    """Makes keepers of hosts by name; a secret other than the job's may be given."""
    made, said = [], []

    def make(host: str, secret: str = "secret") -> Keeper:
        made.append(Keeper(str(tmp_path / host), _HERE, secret, said.append))
        return made[-1]

    make.said = said
    yield make
    for one in made:
        one.close()


def write(keeper: Keeper, part: Part, content: bytes) -> None:
    (keeper.folder / part.name).write_bytes(content)


def wait_for(is_so) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_part_is_fetched_byte_for_byte(keepers):
    content = os.urandom(5_000_001)
    a, b = keepers("a"), keepers("b")
    write(a, PART, content)
    path = b.fetch(PART, _HERE, a.port)
    assert path is not None and path.read_bytes() == content
    assert b.parts() == (PART,) and os.listdir(b.folder) == [PART.name]


def test_a_partners_newest_part_replaces_older_copies(keepers):
    a, b = keepers("a"), keepers("b")
    own = PART.of(1)
    write(b, own, b"own")
    for serial in range(1, 5):
        part = Part(1, serial, 10 * serial, 2, 0)
        write(a, part, b"%d" % serial)
        if serial > 2:
            (a.folder / Part(1, serial - 2, 10 * (serial - 2), 2, 0).name).unlink()
        wait_for(lambda part=part: b.replicate(a.parts(), _HERE, a.port) or part in b.parts())
    b.replicate(a.parts(), _HERE, a.port)
    assert [part.serial for part in b.parts() if part.index == 0] == [3, 4]
    assert own in b.parts()


def test_who_does_not_know_the_secret_gets_nothing_and_gives_nothing(keepers):
    a, stranger = keepers("a"), keepers("stranger", "another")
    write(a, PART, b"content")
    assert stranger.fetch(PART, _HERE, a.port) is None
    write(stranger, PART.of(1), b"content")
    assert a.fetch(PART.of(1), _HERE, stranger.port) is None
    assert a.parts() == (PART,)
    assert any("a stranger asked" in text for text in keepers.said)


def test_garbage_disturbs_nothing(keepers):
    a, b = keepers("a"), keepers("b")
    write(a, PART, b"content")
    for content in (b"", b"\xff" * 1000, b"GET / HTTP/1.0\r\n\r\n", b'{"name": 3}\n'):
        with socket.create_connection((_HERE, a.port)) as connection:
            connection.sendall(content)
    assert b.fetch(PART, _HERE, a.port) is not None


def test_proofs_of_any_letters_are_refused(keepers):
    a = keepers("a")
    wrong = '{"name": "a", "nonce": "b", "size": 1, "proof": "\u00e9"}\n'.encode()
    with socket.create_connection((_HERE, a.port)) as connection:
        connection.sendall(wrong)
        wait_for(lambda: any("a stranger asked" in text for text in keepers.said))
    with socket.create_server((_HERE, 0)) as stranger:

        def answer():
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(b'{"nonce": "c"}\n' + wrong)
                connection.recv(4096)

        threading.Thread(target=answer, daemon=True).start()
        assert a.fetch(PART, _HERE, stranger.getsockname()[1]) is None


@pytest.fixture
def between():
    made = []

    def make(keeper: Keeper, change) -> int:
        made.append(Between(_HERE, keeper.port, change))
        return made[-1].port

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("place", [0, 2_500_000, 4_999_900])
def test_a_part_that_was_changed_on_its_way_is_no_part(keepers, between, place):
    a, b = keepers("a"), keepers("b")
    write(a, PART, bytes(5_000_000))

    # The part comes after two lines of JSON.
    def change(block: bytes, begin: int) -> bytes:
        at = place + 150 - begin
        if not 0 <= at < len(block):
            return block
        return block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :]

    assert b.fetch(PART, _HERE, between(a, change)) is None
    assert os.listdir(b.folder) == [] and "differs from the part" in keepers.said[-1]
    assert b.fetch(PART, _HERE, between(a, lambda block, _: block)) is not None


def test_a_part_cannot_be_passed_off_as_another_one(keepers, between):
    """Its signature is that of the text that was sent with the request."""
    a, b = keepers("a"), keepers("b")
    write(a, PART, b"old")
    recorded = []
    assert b.fetch(PART, _HERE, between(a, lambda x, _: recorded.append(x) or x)) is not None
    (b.folder / PART.name).unlink()
    write(a, PART, b"new")
    old = b"".join(recorded)

    def replay(block: bytes, begin: int) -> bytes:
        return old if begin == 0 else b""

    assert b.fetch(PART, _HERE, between(a, replay)) is None and b.parts() == ()


def test_a_partner_that_sends_a_few_bytes_a_second_ends_the_copy(keepers, between, monkeypatch):
    monkeypatch.setattr(keeper, "_SECONDS", 2.0)
    a, b = keepers("a"), keepers("b")
    write(a, PART, bytes(1_000_000))
    handshake = 300

    def drip(block: bytes, begin: int) -> bytes:
        if begin < handshake:
            return block[:handshake]
        time.sleep(0.1)
        return block[:1]

    began = time.monotonic()
    assert b.fetch(PART, _HERE, between(a, drip)) is None
    assert time.monotonic() - began < 8 and os.listdir(b.folder) == []


@pytest.mark.parametrize("name", ["private", "../a/private", "1-1-10-2-0.part/../private"])
def test_no_other_file_can_be_asked_for(keepers, name):
    a, b = keepers("a"), keepers("b")
    (a.folder / "private").write_text("private")
    asked = types.SimpleNamespace(name=name)
    b._path = lambda part: b.folder / "copy"
    assert b.fetch(asked, _HERE, a.port) is None and not (b.folder / "copy").exists()


def test_a_host_that_is_gone_is_passed_over(keepers):
    a, b = keepers("a"), keepers("b")
    with socket.create_server((_HERE, 0)) as gone:
        nobody = gone.getsockname()[1]
    write(a, PART, b"content")
    ended = []
    holders = {PART: [(_HERE, nobody), (_HERE, a.port)]}
    preparation = Preparation(b, holders, lambda: ended.append(1))
    wait_for(lambda: preparation.is_over)
    assert [path.read_bytes() for path in preparation.paths] == [b"content"] and ended
    preparation.give_back()
    assert b.parts() == (PART,)
    nothing = Preparation(b, {}, lambda: None)
    assert nothing.is_over and nothing.paths == []


def test_all_parts_are_fetched_or_none_and_those_of_others_are_given_back(keepers):
    a, b = keepers("a"), keepers("b")
    parts = Part(1, 1, 10, 3, 0).all
    for part in parts[:2]:
        write(a, part, part.name.encode())
    write(b, parts[1], b"own")
    for expected in (0, 3):
        holders = {part: [(_HERE, a.port)] for part in parts}
        preparation = Preparation(b, holders, lambda: None)
        wait_for(lambda one=preparation: one.is_over)
        assert len(preparation.paths) == expected
        preparation.give_back()
        assert b.parts() == (parts[1],)
        # Another host has copied the missing part.
        write(a, parts[2], b"last")


def test_parts_of_earlier_rounds_go_when_two_newer_snapshots_are_there(keepers):
    a = keepers("a")
    old = [Part(1, 7, 70, 4, index) for index in (2, 3)]
    new = [Part(2, serial, 70 + 10 * serial, 3, 1) for serial in (1, 2)]
    for part in (*old, new[0]):
        write(a, part, b"content")
    a.drop_before(2, 1)
    assert set(a.parts()) == {*old, new[0]}
    write(a, new[1], b"content")
    a.drop_before(2, 1)
    assert list(a.parts()) == new
