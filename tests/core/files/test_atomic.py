"""Tests write_atomically: a failure leaves no partial file."""

import os

import pytest

from lingvo_gshard.core.files import atomic


def test_writes_and_replaces_a_file(tmp_path):
    path = str(tmp_path / "b.bin")
    atomic.write_atomically(path, b"one")
    atomic.write_atomically(path, b"two")
    with open(path, "rb") as file:
        assert file.read() == b"two"
    assert os.listdir(tmp_path) == ["b.bin"]
    assert os.stat(path).st_mode & 0o777 == 0o644


def test_a_failure_preserves_the_old_file(tmp_path, monkeypatch):
    path = str(tmp_path / "b.bin")
    atomic.write_atomically(path, b"one")

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        atomic.write_atomically(path, b"two")
    with open(path, "rb") as file:
        assert file.read() == b"one"
    assert os.listdir(tmp_path) == ["b.bin"]
