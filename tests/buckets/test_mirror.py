"""Tests that files which are appended to locally are in the bucket soon, and before a push ends."""

import os
import pathlib

import pytest

from lingvo_gshard.core.files import mirror as mirror_lib
from lingvo_gshard.core.files import objects
from lingvo_gshard.core.files.mirror import Mirror

pytestmark = pytest.mark.slow


def open_mirror(folder: str) -> Mirror:
    mirror = Mirror(folder, lambda name: name == "checkpoints")
    mirror.pull()
    return mirror


def test_files_go_up_and_come_back(folder):
    mirror = open_mirror(folder)
    (mirror.folder / "rows.jsonl").write_text("1\n")
    (mirror.folder / "d").mkdir()
    (mirror.folder / "d" / "e").write_text("2")
    for unfinished in ("rows.jsonl.new", ".partial-1", ".shared-1"):
        (mirror.folder / unfinished).write_text("")
    mirror.push()
    assert list(objects.find(folder)) == ["d/e", "rows.jsonl"]
    objects.write_bytes(f"{folder}/checkpoints/5/x", b"")
    again = open_mirror(folder)
    assert list(objects.find(again.folder)) == ["d/e", "rows.jsonl"]
    with open(again.folder / "rows.jsonl", "a") as file:
        file.write("3\n")
    again.push()
    assert objects.read_bytes(f"{folder}/rows.jsonl") == b"1\n3\n"
    mirror.pull()
    assert (mirror.folder / "rows.jsonl").read_text() == "1\n3\n"
    (again.folder / "d" / "e").unlink()
    again.push()
    assert list(objects.find(folder)) == ["checkpoints/5/x", "rows.jsonl"]


def test_only_what_changed_is_copied(folder, emulator):
    mirror = open_mirror(folder)
    for name in "abc":
        (mirror.folder / name).write_text(name)
    mirror.push()
    (mirror.folder / "b").write_text("more")
    emulator.faults.requests.clear()
    mirror.push()
    uploads = [line for line in emulator.faults.requests if line.startswith(("POST", "PUT"))]
    assert len(uploads) == 1


def test_changes_are_copied_by_themselves(folder, monkeypatch):
    monkeypatch.setattr(mirror_lib, "_PERIOD_SECONDS", 0.1)
    mirror = open_mirror(folder)
    mirror.start(print)
    (mirror.folder / "a").write_text("1")
    while not objects.exists(f"{folder}/a"):
        pass
    (mirror.folder / "a").write_text("12")
    mirror.stop(print)
    assert objects.read_bytes(f"{folder}/a") == b"12"


@pytest.fixture
def cut_off(folder, emulator, monkeypatch):
    """Gives a mirror whose bucket is gone, and what it said of that."""
    monkeypatch.setattr(mirror_lib, "_PERIOD_SECONDS", 0.1)
    said: list[str] = []
    mirror = open_mirror(folder)
    mirror.start(said.append)
    emulator.faults.is_gone = True
    (mirror.folder / "a").write_text("1")
    while not said:
        pass
    return mirror, said


def test_a_bucket_that_is_gone_is_told_once_and_nothing_is_lost(cut_off):
    mirror, said = cut_off
    assert "there is no bucket" in said[0] and f"wait in {mirror.folder}" in said[0]
    mirror.stop(said.append)
    assert len(said) == 2
    kept = pathlib.Path(said[1].rpartition(" is in ")[2])
    assert (kept / "a").read_text() == "1"
    os.unlink(kept / "a")
    kept.rmdir()


def test_it_goes_on_when_the_bucket_is_back(cut_off, folder, emulator):
    mirror, said = cut_off
    emulator.faults.clear()
    mirror.stop(said.append)
    assert len(said) == 1 and objects.read_bytes(f"{folder}/a") == b"1"
