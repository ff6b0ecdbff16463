"""Tests where commands write JSON and tables."""

import dataclasses
import json
import sys

import pytest
from absl import flags

from lingvo_gshard.tools.console import output, startup


@dataclasses.dataclass
class Row:
    name: str
    seconds: float


def parse(*arguments):
    values = flags.FlagValues()
    output.define_json_flag(values)
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


def test_missing_parent_folder_is_created(tmp_path):
    path = tmp_path / "new" / "row.json"
    output.check_writable(str(path), "json")
    output.write_json(str(path), [1, 2])
    assert json.loads(path.read_text()) == [1, 2]


@pytest.mark.parametrize("check", [output.check_writable, lambda p, f: output.write_text(p, "", f)])
def test_unwritable_file_names_the_flag(check):
    with pytest.raises(ValueError, match="--html=/dev/null/x cannot be written: "):
        check("/dev/null/x", "html")
