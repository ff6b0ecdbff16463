# tests: wings/planning/loads/file.py, wings/planning/plan/plan.py
"""Checks that plans are read back unchanged and that errors name the file and the field."""

import json
import re

import pytest

from lingvo_gshard.wings.planning.plan.plan import load
from tests.planning import example_plan


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.json"


@pytest.mark.parametrize("record", [example_plan.example_plan(), example_plan.too_large()])
def test_plan_round_trips_through_a_file(record, path):
    plan = example_plan.as_plan(record)
    path.write_text(plan.to_json(), encoding="utf-8")
    assert json.loads(path.read_text()) == record
    assert load(path) == plan


def test_a_plan_of_an_earlier_version_hides_nothing_and_knows_no_lines(path):
    record = example_plan.example_plan()
    plan = example_plan.as_plan(record)
    for row in record["collectives"]:
        del row["hidden_seconds"], row["line"]
    del record["flops"]["optimizer"]
    path.write_text(json.dumps(record), encoding="utf-8")
    assert load(path) == plan


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "not JSON"),
        (b"", "not JSON (Input data was truncated)"),
        (b'{\n"format": 2,\n', "not JSON"),
        (b"[]", "not a plan: Expected `object`, got `array`"),
        (b'{"name": "x"}', "not a plan: Object missing required field `format`"),
        (b'{"format": 9}', "plan format 9, but this version reads format 2. Plan again"),
        (b'{"format": 2}', "not a plan: Object missing required field `name`"),
        (b'{"format": 2, "name": 5}', "not a plan: Expected `str`, got `int` - at `$.name`"),
    ],
)
def test_file_without_a_plan_is_rejected_by_name(path, text, reason):
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {reason}")):
        load(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mfu": float("nan")}, "not JSON"),
        ({"budget": {"price": 1.0}}, "Object missing required field `tokens` - at `$.budget`"),
        ({"layers": [1]}, "Expected `object`, got `int` - at `$.layers[0]`"),
        ({"devices": True}, "Expected `int`, got `bool` - at `$.devices`"),
        ({"bytes_per_device": {"peak": 1}}, "missing required field `weights` - at"),
        ({"later": 1}, "Object contains unknown field `later`"),
    ],
)
def test_wrong_field_is_named(path, change, reason):
    path.write_text(json.dumps(example_plan.example_plan() | change), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: not ")
