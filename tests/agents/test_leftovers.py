"""Checks which folders of snapshots an agent removes, and which it only names."""

import os
import pathlib
import subprocess
import sys

import pytest

from lingvo_gshard.wings.agents import leftovers

_HOUR = 3600.0


@pytest.fixture
def own(tmp_path) -> pathlib.Path:
    """Makes the folder of an agent of job aa on host n1."""
    return make(tmp_path, "aa", "n1")


def make(parent: pathlib.Path, job: str, host: str, hours: float = 0.0) -> pathlib.Path:
    """Makes a folder with 2^20 bytes, whose newest file is some hours old."""
    folder = pathlib.Path(leftovers.folder_of(str(parent), job, host))
    folder.mkdir()
    (folder / "1-1-10-2-0.part").write_bytes(bytes(2**20))
    for path in (folder / "1-1-10-2-0.part", folder):
        at = path.stat().st_mtime - hours * _HOUR
        os.utime(path, (at, at))
    return folder


def test_folders_of_an_earlier_job_in_the_same_place_are_removed(own):
    other = make(own.parent, "aa", "n-2")
    (line,) = leftovers.tidy(own, is_new=True)
    assert not other.exists() and own.exists()
    assert str(other) in line and "it is removed" in line


def test_folders_of_the_job_that_goes_on_are_kept_for_their_agents(own):
    other = make(own.parent, "aa", "n2")
    assert leftovers.tidy(own, is_new=False) == [] and other.exists()


def test_a_folder_of_another_job_is_named_with_the_command_that_removes_it(own):
    other = make(own.parent, "bb", "n1")
    (line,) = leftovers.tidy(own, is_new=True)
    assert line.endswith(f"rm -r {other}") and "0.00 GiB" in line and other.exists()


@pytest.mark.parametrize("job", ["aa", "bb"])
def test_a_folder_that_nobody_has_used_for_an_hour_is_removed(own, job):
    other = make(own.parent, job, "n2", hours=1.1)
    (line,) = leftovers.tidy(own, is_new=False)
    assert not other.exists() and "it is removed" in line


def test_the_folder_of_an_agent_that_lives_is_left_alone_until_it_is_killed(own):
    other = make(own.parent, "bb", "n1", hours=2)
    text = f"""
import pathlib, time
from lingvo_gshard.wings.agents import leftovers
lock = leftovers.hold(pathlib.Path({str(other)!r}))
print("held", flush=True)
time.sleep(1000)
"""
    agent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    try:
        assert agent.stdout.readline()
        assert leftovers.tidy(own, is_new=True) == [] and other.exists()
        with pytest.raises(BlockingIOError):
            leftovers.hold(other)
    finally:
        agent.kill()
        agent.communicate()
    assert len(leftovers.tidy(own, is_new=True)) == 1 and not other.exists()


def test_links_are_not_followed(own, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "work").touch()
    pathlib.Path(leftovers.folder_of(str(tmp_path), "bb", "n1")).symlink_to(elsewhere)
    assert leftovers.tidy(own, is_new=True) == [] and (elsewhere / "work").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the owner of a file needs root")
def test_a_folder_of_another_user_is_neither_used_nor_removed(own):
    other = make(own.parent, "bb", "n1", hours=2)
    os.chown(other, 12345, 12345)
    assert leftovers.tidy(own, is_new=True) == [] and other.exists()
    with pytest.raises(PermissionError):
        leftovers.hold(other)
