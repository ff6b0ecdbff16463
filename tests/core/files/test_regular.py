"""Checks that only regular files are opened, and none is waited for."""

import os
import socket

import pytest

from lingvo_gshard.core.files.regular import NotRegularError, open_descriptor, read_regular


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def bind(path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "a named pipe"),
        (os.mkdir, "a directory"),
        (bind, "a socket"),
        (lambda path: os.symlink("/dev/zero", path), "a device"),
    ],
)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND])
def test_other_kinds_are_named_at_once(path, make, words, flags):
    make(path)
    with pytest.raises(NotRegularError) as caught:
        open_descriptor(path, flags)
    assert caught.value.filename == str(path)
    assert caught.value.strerror == f"it is {words}, and a regular file is expected"


def test_regular_files_are_read_and_written_also_through_links(path, tmp_path):
    descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    assert os.write(descriptor, b"content") == 7 and os.get_blocking(descriptor)
    os.close(descriptor)
    (tmp_path / "link").symlink_to(path)
    assert read_regular(tmp_path / "link", 7) == b"content"


def test_a_long_file_is_refused(path):
    with open(path, "wb") as file:
        file.truncate(10**12)
    with pytest.raises(OSError, match="longer than 1,000 bytes"):
        read_regular(path, 1000)


def test_a_missing_file_and_a_loop_are_errors(path):
    with pytest.raises(FileNotFoundError):
        read_regular(path, 1)
    path.symlink_to(path)
    with pytest.raises(OSError):
        read_regular(path, 1)
