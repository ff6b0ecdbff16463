"""Tests where commands write JSON and tables."""

import dataclasses
import json
import os
import stat
import sys

import pytest
from absl import flags

from lingvo_gshard.api.closed_output import discard
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.flags.definitions import make_flags


@dataclasses.dataclass
class Row:
    name: str
    seconds: float


def parse(*arguments):
    values = make_flags(json=output.json_flag())
    startup.parse_flags(values, ["gshard-test", *arguments], "About.")
    return values


def test_json_without_a_value_means_standard_output(capsys):
    output.write_json(parse("--json").json, {"rows": [Row("ä", 0.5), Row("b", float("nan"))]})
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows == [{"name": "ä", "seconds": 0.5}, {"name": "b", "seconds": None}]


def test_without_the_flag_nothing_is_written(capsys):
    output.write_json(parse().json, {})
    assert capsys.readouterr().out == ""


def test_tables_move_to_standard_error_if_json_takes_standard_output():
    assert output.make_console("-").file is sys.stderr
    assert output.make_console("plan.json", None).file is sys.stdout


def check(**paths):
    values = flags.FlagValues()
    for name, path in paths.items():
        flags.DEFINE_string(name, path and str(path), "A file.", flag_values=values)
    values(["gshard-test"])
    output.check_writable(values, *paths)


def test_missing_directory_is_named_and_not_created(tmp_path):
    path = tmp_path / "new" / "row.json"
    message = f"--program={path} cannot be written: there is no directory {path.parent}; create it"
    with pytest.raises(ValueError, match=message):
        check(json=tmp_path / "row.json", program=path)
    with pytest.raises(ValueError, match="--json=.*cannot be written: No such file or directory"):
        output.write_json(str(path), {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "it is a directory; a file was expected"),
        ("file/row.json", "file is no directory"),
        ("locked/row.json", "permission denied|read-only"),
    ],
)
def test_unwritable_file_names_the_flag(tmp_path, monkeypatch, path, problem):
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir(0o500)
    if os.geteuid() == 0 and "locked" in path:  # To root, a directory without w is writable.
        path, problem = "/proc/row.json", "no such file or directory|permission denied"
    with pytest.raises(
        ValueError, match=f"--html={tmp_path / path} cannot be written: .*{problem}"
    ):
        check(json="-", html=tmp_path / path)


def test_two_flags_may_not_share_a_file(tmp_path):
    with pytest.raises(ValueError, match="--json=- and --html=-: standard output takes one"):
        check(json="-", html="-")
    with pytest.raises(ValueError, match="--json=.*row and --html=.*row: the file takes one of"):
        check(json=tmp_path / "row", html=f"{tmp_path}/./row")


def test_check_leaves_nothing_behind_and_changes_nothing(tmp_path):
    (tmp_path / "old.json").write_text("old")
    check(json=tmp_path / "old.json", html=tmp_path / "page.html", output=None)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_device_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output.write_json(str(pipe), {"rows": 1})
    assert json.loads(os.read(reader, 100)) == {"rows": 1}
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "row.json")
    output.write_json(str(tmp_path / "link"), [1])
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "row.json").read_text()) == [1]


def test_a_reader_that_went_away_is_left_to_the_caller(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError), os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        try:
            output.make_console().print("a table")
        finally:
            discard(stream)
