"""Files of strangers: pipes, sockets, devices and folders are refused at once, by name."""

import os
import socket

import pytest

from lingvo_gshard.core.files import objects, regular


def pipe(path):
    os.mkfifo(path)


def listening(path):
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def link_to_device(path):
    path.symlink_to("/dev/zero")


def link_to_pipe(path):
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (pipe, "a named pipe"),
        (listening, "a socket"),
        (link_to_device, "a device"),
        (link_to_pipe, "a named pipe"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [objects.read_bytes, objects.read_text, objects.open_to_read, regular.open_to_append],
)
def test_what_is_no_regular_file_is_refused(tmp_path, make, kind, use):
    path = tmp_path / "x.json"
    make(path)
    with pytest.raises(OSError, match=f"x.json: this is {kind}; a regular file was expected"):
        use(path)
    with pytest.raises(OSError, match=f"this is {kind}"):
        regular.require_regular_tree(tmp_path)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        use(tmp_path)


def test_a_file_that_is_too_large_to_read_whole_is_refused(tmp_path):
    path = tmp_path / "x.json"
    with open(path, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match=r"x.json: the file has 1,099,511,627,776 bytes; at most"):
        objects.read_bytes(path)


def test_regular_files_and_links_to_them_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"\xc3\xa4")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert objects.read_text(tmp_path / "b") == "ä"
    with objects.open_to_read(tmp_path / "b") as file:
        assert file.read() == b"\xc3\xa4"
    os.close(regular.open_to_append(tmp_path / "c"))
    assert regular.require_regular(tmp_path / "c") == 0
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="a is not UTF-8: byte 0"):
        objects.read_text(tmp_path / "a")


def test_what_is_opened_waits_like_other_files(tmp_path):
    descriptor = regular.open_to_append(tmp_path / "a")
    assert os.write(descriptor, b"content") == 7 and os.get_blocking(descriptor)
    os.close(descriptor)
    assert regular.read_regular(tmp_path / "a", 7) == b"content"
    with pytest.raises(OSError, match="a: the file has 7 bytes; at most 6 were expected"):
        regular.read_regular(tmp_path / "a", 6)


def test_a_missing_file_and_a_loop_of_links_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        regular.read_regular(tmp_path / "a")
    (tmp_path / "a").symlink_to(tmp_path / "a")
    with pytest.raises(OSError):
        regular.read_regular(tmp_path / "a")
