# tests: wings/object_stores/synced_folder.py, wings/object_stores/scratch.py
"""Tests that files which are appended to locally are in the bucket soon, and before a push ends."""

import os
import pathlib

import pytest

from lingvo_gshard.core.files import objects
from lingvo_gshard.wings.object_stores import synced_folder
from lingvo_gshard.wings.object_stores.synced_folder import SyncedFolder


def open_folder(folder: str) -> SyncedFolder:
    synced = SyncedFolder(folder, lambda name: name == "checkpoints")
    synced.pull()
    return synced


def test_files_go_up_and_come_back(folder):
    synced = open_folder(folder)
    (synced.folder / "rows.jsonl").write_text("1\n")
    (synced.folder / "d").mkdir()
    (synced.folder / "d" / "e").write_text("2")
    for unfinished in ("rows.jsonl.new", ".partial-1", ".shared-1"):
        (synced.folder / unfinished).write_text("")
    synced.push()
    assert list(objects.find(folder)) == ["d/e", "rows.jsonl"]
    objects.write_bytes(f"{folder}/checkpoints/5/x", b"")
    again = open_folder(folder)
    assert list(objects.find(again.folder)) == ["d/e", "rows.jsonl"]
    with open(again.folder / "rows.jsonl", "a") as file:
        file.write("3\n")
    again.push()
    assert objects.read_bytes(f"{folder}/rows.jsonl") == b"1\n3\n"
    synced.pull()
    assert (synced.folder / "rows.jsonl").read_text() == "1\n3\n"
    (again.folder / "d" / "e").unlink()
    again.push()
    assert list(objects.find(folder)) == ["checkpoints/5/x", "rows.jsonl"]


@pytest.mark.slow
def test_only_what_changed_is_copied(folder, emulator):
    synced = open_folder(folder)
    for name in "abc":
        (synced.folder / name).write_text(name)
    synced.push()
    (synced.folder / "b").write_text("more")
    emulator.faults.requests.clear()
    synced.push()
    uploads = [line for line in emulator.faults.requests if line.startswith(("POST", "PUT"))]
    assert len(uploads) == 1


@pytest.mark.slow
def test_changes_are_copied_by_themselves(folder, monkeypatch):
    monkeypatch.setattr(synced_folder, "_PERIOD_SECONDS", 0.1)
    synced = open_folder(folder)
    synced.start(print)
    (synced.folder / "a").write_text("1")
    while not objects.exists(f"{folder}/a"):
        pass
    (synced.folder / "a").write_text("12")
    synced.stop(print)
    assert objects.read_bytes(f"{folder}/a") == b"12"


@pytest.fixture
def cut_off(folder, emulator, monkeypatch):
    """Gives a synced folder whose bucket is gone, and what it said of that."""
    monkeypatch.setattr(synced_folder, "_PERIOD_SECONDS", 0.1)
    said: list[str] = []
    synced = open_folder(folder)
    synced.start(said.append)
    emulator.faults.is_gone = True
    (synced.folder / "a").write_text("1")
    while not said:
        pass
    return synced, said


@pytest.mark.slow
def test_a_bucket_that_is_gone_is_told_once_and_nothing_is_lost(cut_off):
    synced, said = cut_off
    assert "there is no bucket" in said[0] and f"wait in {synced.folder}" in said[0]
    synced.stop(said.append)
    assert len(said) == 2
    kept = pathlib.Path(said[1].rpartition(" is in ")[2])
    assert (kept / "a").read_text() == "1"
    os.unlink(kept / "a")
    kept.rmdir()


@pytest.mark.slow
def test_it_goes_on_when_the_bucket_is_back(cut_off, folder, emulator):
    synced, said = cut_off
    emulator.faults.clear()
    synced.stop(said.append)
    assert len(said) == 1 and objects.read_bytes(f"{folder}/a") == b"1"
