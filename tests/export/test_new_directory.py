"""Tests that an export's directory is complete or not there at all."""

import os
import pathlib

import pytest

from lingvo_gshard.wings.export.new_directory import file_sizes, new_directory


def write(directory: pathlib.Path) -> None:
    (directory / "below").mkdir()
    (directory / "below" / "file").write_bytes(b"abc")


def test_directory_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "new"
    with new_directory(target) as directory:
        write(directory)
        assert not target.exists() and directory.parent == tmp_path
    assert os.listdir(tmp_path) == ["new"]
    assert file_sizes(target) == {"below/file": 3}
    plain = tmp_path / "plain"
    plain.mkdir()
    assert target.stat().st_mode == plain.stat().st_mode


def test_the_directory_of_versions_is_made_with_the_first(tmp_path):
    """As TensorFlow Serving has it. A missing parent of another name is a typing error."""
    for version in ("served/1", "served/2"):
        with new_directory(tmp_path / version) as directory:
            write(directory)
    assert sorted(os.listdir(tmp_path / "served")) == ["1", "2"] and len(os.listdir(tmp_path)) == 1
    with pytest.raises(ValueError, match="there is no directory .*/mdoels; create it first"):
        with new_directory(tmp_path / "mdoels" / "new"):
            raise AssertionError("the context was entered")
    assert os.listdir(tmp_path) == ["served"]


@pytest.mark.parametrize("is_link", [False, True])
def test_empty_directory_is_filled(is_link, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with new_directory(tmp_path / ("link" if is_link else "empty")) as directory:
        write(directory)
    assert file_sizes(tmp_path / "empty") == {"below/file": 3}
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(28, "No space left on device"), ValueError, "`output=.*/new` cannot be.* no spac"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
    ],
)
def test_nothing_is_left_of_a_failure(error, raised, message, tmp_path):
    with pytest.raises(raised, match=message), new_directory(tmp_path / "new") as directory:
        write(directory)
        raise error
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_noticed_before(tmp_path):
    with pytest.raises(ValueError, match="no space left: .* MB needed"):
        with new_directory(tmp_path / "new", needed=2**62):
            raise AssertionError("the context was entered")
    assert os.listdir(tmp_path) == []


def test_nobody_is_overwritten(tmp_path):
    target = tmp_path / "new"
    with pytest.raises(ValueError, match="created by someone else in the meantime"):
        with new_directory(target) as directory:
            write(directory)
            target.mkdir()
            (target / "other").touch()
    assert os.listdir(tmp_path) == ["new"] and os.listdir(target) == ["other"]
