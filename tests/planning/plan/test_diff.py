"""What changed between two plans, and which files are no plans to compare."""

import copy
import json
import re

import pytest

from lingvo_gshard.planning.plan import diff
from tests.planning import example_plan


@pytest.fixture
def plan():
    return example_plan.example_plan()


@pytest.fixture
def other(plan):
    return copy.deepcopy(plan)


def by_section(changes):
    """(what, field, before, after) of every change, by section."""
    found = {}
    for change in changes:
        told = (change.what, change.field, change.before, change.after)
        found.setdefault(change.section, []).append(told)
    return found


def test_a_plan_is_no_different_from_itself(plan, other):
    assert diff.diff(plan, other) == []


def test_numbers_of_the_headline_have_a_ratio(plan, other):
    other["seconds_per_step"] *= 2
    other["fits"] = False
    other["budget"] = None
    other["flops"]["dispatch"] = 0
    changes = {change.what: change for change in diff.diff(plan, other)}
    assert changes["seconds_per_step"].ratio == 2
    assert (changes["fits"].before, changes["fits"].after, changes["fits"].ratio) == (
        True, False, None,
    )  # fmt: skip
    assert changes["flops.dispatch"].ratio == 0
    assert changes["budget.price"].after is None and changes["budget.price"].ratio is None
    assert {change.section for change in changes.values()} == {"headline"}


def test_memory_by_class(plan, other):
    other["bytes_per_device"]["moments"] += 5
    moments = plan["bytes_per_device"]["moments"]
    assert by_section(diff.diff(plan, other)) == {"memory": [("moments", "", moments, moments + 5)]}


def test_collectives_of_one_kind_and_place_are_told_together(plan, other):
    calls = [row for row in plan["collectives"] if row["kind"] == "all-gather"]
    assert len(calls) == 1
    half = calls[0] | {"count": 1}
    other["collectives"] = [row for row in other["collectives"] if row["kind"] != "all-gather"]
    other["collectives"] += [half, copy.deepcopy(half)]
    for row in (*calls, half, other["collectives"][-1]):
        row["seconds"] = row["seconds_bound"] = 0
    assert diff.diff(plan, other) == []
    other["collectives"][-1]["bytes"] += 8
    half["bytes"] -= 8
    what = "all-gather over data in no layer (other)"
    expected = (what, "calls", "2 of 4096", "1 of 4088, 1 of 4104")
    assert by_section(diff.diff(plan, other)) == {"collectives": [expected]}


def test_collectives_new_gone_and_changed(plan, other):
    first = other["collectives"][0]
    first["count"] *= 2
    gone = other["collectives"].pop()
    other["collectives"].append(gone | {"kind": "all-reduce"})
    changed = by_section(diff.diff(plan, other))["collectives"]
    names = [(what, field) for what, field, *_ in changed]
    moe = "all-to-all over data in encoder/layers/body_1/moe (forward)"
    assert names == [
        (moe, "count"), (moe, "bytes"),
        ("all-gather over data in no layer (other)", ""),
        ("all-reduce over data in no layer (other)", ""),
    ]  # fmt: skip
    assert changed[2][2:] == ("2 calls, 8192 bytes in all, int32", None)
    assert changed[3][2:] == (None, "2 calls, 8192 bytes in all, int32")


def test_tensors_split_otherwise_new_and_gone(plan, other):
    table = other["tensors"][0]
    table["split"], table["bytes_per_device"] = "V->data", table["bytes"] // 512
    last = other["tensors"].pop()
    other["tensors"].append(last | {"path": "new"})
    changes = by_section(diff.diff(plan, other))["tensors"]
    name, size = "encoder.embedding.table (weights)", table["bytes"]
    assert changes == [
        (name, "split", "whole", "V->data"),
        (name, "bytes_per_device", size, size // 512),
        (f"{last['path']} (moments)", "", "float32[3,512,1024] E->data", None),
        ("new (moments)", "", None, "float32[3,512,1024] E->data"),
    ]


def test_layers_are_told_from_one_per_cent_on_and_the_rest_is_counted(plan, other):
    for row in other["layers"][1:4]:
        row["seconds"] *= 1.005
    other["layers"][4]["seconds"] *= 1.02
    small, large = ([row["seconds"] for row in p["layers"][1:4]] for p in (plan, other))
    assert by_section(diff.diff(plan, other)) == {
        "layers": [
            ("encoder/layers/body_1/moe (forward)", "seconds")
            + tuple(p["layers"][4]["seconds"] for p in (plan, other)),
            ("3 more, each by at most 1%", "seconds", sum(small), sum(large)),
        ]
    }


def test_layers_of_one_name_are_paired_in_order(plan, other):
    for each in (plan, other):
        each["layers"].append(copy.deepcopy(each["layers"][0]))
    other["layers"][-1]["times"] = 7
    what = "encoder/embedding (forward), the 2. of that name"
    assert by_section(diff.diff(plan, other)) == {"layers": [(what, "times", 1, 7)]}


def test_another_order_of_execution_is_a_change(plan, other):
    other["layers"].reverse()
    assert [change.what for change in diff.diff(plan, other)] == ["order of execution"]


def test_temporaries_are_not_told_apart_by_the_compilers_numbers(plan, other):
    other["largest_temporaries"][0]["name"] = "fusion.7"
    assert diff.diff(plan, other) == []
    other["largest_temporaries"][0]["shape"] = [2048, 64_000]
    whats = [change.what for change in diff.diff(plan, other)]
    shapes = ("float32[2048,32000]", "float32[2048,64000]")
    assert whats == [f"{shape} in decoder/softmax" for shape in shapes]


def test_remedies_notes_settings_and_fields_of_later_days(plan, other):
    other["remedies"] = [{"change": "--x", "fits": True, "peak": 1, "seconds_per_step": 2.0}]
    other["notes"] = ["new"]
    other["mesh"] = "data=64,model=8"
    other["versions"]["numpy"] = "3"
    other["later"] = 1
    assert by_section(diff.diff(plan, other)) == {
        "setting": [("mesh", "", "data=512", "data=64,model=8")],
        "remedies": [("--x", "", None, "fits")],
        "versions": [("numpy", "", None, "3")],
        "notes": [(plan["notes"][0], "", plan["notes"][0], None), ("new", "", None, "new")],
        "other": [("later", "", None, 1)],
    }


@pytest.mark.parametrize("package", ["jax", "libtpu", "lingvo_gshard"])
def test_plans_of_other_versions_are_refused(plan, other, package):
    old = plan["versions"][package]
    other["versions"][package] = "9.9"
    reason = f"A.json and B.json were made by other versions: {package} {old} and 9.9. "
    with pytest.raises(ValueError, match=re.escape(reason) + ".*plan again"):
        diff.diff(plan, other, names=("A.json", "B.json"))
    changes = diff.diff(plan, other, allow_other_versions=True)
    assert by_section(changes) == {"versions": [(package, "", old, "9.9")]}


def test_a_file_is_read_back_as_it_was_written(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan), encoding="utf-8")
    assert diff.load(path) == plan


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"", ":1: no plan: not JSON"),
        (b'{\n"format": 1,\n', ":3: no plan: not JSON"),
        (b"[]", "expected an object with a field 'format'"),
        (b'{"name": "x"}', "expected an object with a field 'format'"),
        (b'{"format": 2}', "format 2, and this version reads format 1: plan again"),
        (b'{"format": 1}', "field 'name' is missing"),
        (b'{"format": 1, "name": 5}', "'name' is 5; expected text"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_name(tmp_path, text, reason):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + re.escape(reason)):
        diff.load(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mfu": float("nan")}, "mfu is nan, which is no finite number"),
        ({"budget": {"price": float("inf")}}, "budget.price is inf"),
        ({"layers": [1]}, "layers[0] is no object"),
        ({"devices": True}, "'devices' is True; expected a whole number"),
        ({"bytes_per_device": {"peak": 1}}, "'bytes_per_device' has no number 'weights'"),
    ],
)
def test_a_plan_with_something_amiss_is_refused(plan, tmp_path, change, reason):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan | change), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"{path}: no plan: {reason}")):
        diff.load(path)
    with pytest.raises(ValueError, match=f"B.json: no plan: {re.escape(reason)}"):
        diff.diff(plan, plan | change, names=("A.json", "B.json"))
