"""Checks which differences between two plans are listed."""

import copy
import re

import msgspec
import pytest

from lingvo_gshard.wings.planning.loads.file import Loads
from lingvo_gshard.wings.planning.loads.rating import rate
from lingvo_gshard.wings.planning.plan import diff
from tests.planning import example_plan
from tests.planning.loads import example_loads
from tests.planning.loads.example_loads import choose, layer_of, record_of


@pytest.fixture
def plan():
    return example_plan.example_plan()


@pytest.fixture
def other(plan):
    return copy.deepcopy(plan)


def changes_between(before, after, **options):
    """Returns the changes from one plan to another, both given as JSON."""
    return diff.diff(example_plan.as_plan(before), example_plan.as_plan(after), **options)


def by_section(changes):
    """(what, field, before, after) of every change, by section."""
    found = {}
    for change in changes:
        told = (change.what, change.field, change.before, change.after)
        found.setdefault(change.section, []).append(told)
    return found


def test_plan_does_not_differ_from_itself(plan, other):
    assert changes_between(plan, other) == []


def test_headline_changes_have_ratios(plan, other):
    other["seconds_per_step"] *= 2
    other["fits"] = False
    other["budget"] = None
    other["flops"]["dispatch"] = 0
    changes = {change.what: change for change in changes_between(plan, other)}
    assert changes["seconds_per_step"].ratio == 2
    assert (changes["fits"].before, changes["fits"].after, changes["fits"].ratio) == (
        True, False, None,
    )  # fmt: skip
    assert changes["flops.dispatch"].ratio == 0
    assert changes["budget.price"].after is None and changes["budget.price"].ratio is None
    assert {change.section for change in changes.values()} == {"headline"}


def test_memory_is_listed_by_class(plan, other):
    other["bytes_per_device"]["moments"] += 5
    moments = plan["bytes_per_device"]["moments"]
    assert by_section(changes_between(plan, other)) == {
        "memory": [("moments", "", moments, moments + 5)]
    }


def test_collectives_of_one_kind_and_layer_are_merged(plan, other):
    calls = [row for row in plan["collectives"] if row["kind"] == "all-gather"]
    assert len(calls) == 1
    half = calls[0] | {"count": 1}
    other["collectives"] = [row for row in other["collectives"] if row["kind"] != "all-gather"]
    other["collectives"] += [half, copy.deepcopy(half)]
    for row in (*calls, half, other["collectives"][-1]):
        row["seconds"] = row["seconds_bound"] = 0
    assert changes_between(plan, other) == []
    other["collectives"][-1]["bytes"] += 8
    half["bytes"] -= 8
    what = "all-gather over data in no layer (other)"
    expected = (what, "calls", "2 of 4096", "1 of 4088, 1 of 4104")
    assert by_section(changes_between(plan, other)) == {"collectives": [expected]}


def test_new_removed_and_changed_collectives(plan, other):
    first = other["collectives"][0]
    first["count"] *= 2
    gone = other["collectives"].pop()
    other["collectives"].append(gone | {"kind": "all-reduce"})
    changed = by_section(changes_between(plan, other))["collectives"]
    names = [(what, field) for what, field, *_ in changed]
    moe = "all-to-all over data in encoder/layers/body_1/moe (forward)"
    assert names == [
        (moe, "count"), (moe, "bytes"),
        ("all-gather over data in no layer (other)", ""),
        ("all-reduce over data in no layer (other)", ""),
    ]  # fmt: skip
    assert changed[2][2:] == ("2 calls, 8,192 bytes in total, int32", None)
    assert changed[3][2:] == (None, "2 calls, 8,192 bytes in total, int32")


def test_new_removed_and_resharded_tensors(plan, other):
    table = other["tensors"][0]
    table["split"], table["bytes_per_device"] = "V->data", table["bytes"] // 512
    last = other["tensors"].pop()
    other["tensors"].append(last | {"path": "new"})
    changes = by_section(changes_between(plan, other))["tensors"]
    name, size = "encoder.embedding.table (weights)", table["bytes"]
    assert changes == [
        (name, "split", "", "V->data"),
        (name, "bytes_per_device", size, size // 512),
        (f"{last['path']} (moments)", "", "float32[3,512,1024] E->data", None),
        ("new (moments)", "", None, "float32[3,512,1024] E->data"),
    ]


def test_layer_changes_below_one_percent_are_only_counted(plan, other):
    for row in other["layers"][1:4]:
        row["seconds"] *= 1.005
    other["layers"][4]["seconds"] *= 1.02
    small, large = ([row["seconds"] for row in p["layers"][1:4]] for p in (plan, other))
    assert by_section(changes_between(plan, other)) == {
        "layers": [
            ("encoder/layers/body_1/moe (forward)", "seconds")
            + tuple(p["layers"][4]["seconds"] for p in (plan, other)),
            ("3 more, each by at most 1%", "seconds", sum(small), sum(large)),
        ]
    }


def test_layers_with_the_same_name_are_paired_in_order(plan, other):
    for each in (plan, other):
        each["layers"].append(copy.deepcopy(each["layers"][0]))
    other["layers"][-1]["times"] = 7
    what = "encoder/embedding (forward) (#2 of this name)"
    assert by_section(changes_between(plan, other)) == {"layers": [(what, "times", 1, 7)]}


def test_different_execution_order_is_a_change(plan, other):
    other["layers"].reverse()
    (change,) = changes_between(plan, other)
    assert change.what == "order of execution, first changed at 1"
    ends = [f"{row['layer'] or 'no layer'} ({row['phase']})" for row in plan["layers"]]
    assert (change.before, change.after) == (ends[0], ends[-1])


def test_temporaries_are_matched_without_compiler_suffixes(plan, other):
    other["largest_temporaries"][0]["name"] = "fusion.7"
    assert changes_between(plan, other) == []
    other["largest_temporaries"][0]["shape"] = [2048, 64_000]
    whats = [change.what for change in changes_between(plan, other)]
    shapes = ("float32[2048,32000]", "float32[2048,64000]")
    assert whats == [f"{shape} in decoder/softmax" for shape in shapes]


def test_changed_suggestions_notes_and_settings(plan, other):
    other["remedies"] = [{"change": "--x", "fits": True, "peak": 1, "seconds_per_step": 2.0}]
    other["notes"] = ["new"]
    other["mesh"] = "data=64,model=8"
    other["versions"]["numpy"] = "3"
    assert by_section(changes_between(plan, other)) == {
        "setting": [("mesh", "", "data=512", "data=64,model=8")],
        "remedies": [("--x", "", None, "fits")],
        "versions": [("numpy", "", None, "3")],
        "notes": [(plan["notes"][0], "", plan["notes"][0], None), ("new", "", None, "new")],
    }


@pytest.mark.parametrize("package", ["jax", "libtpu", "lingvo_gshard"])
def test_plans_of_other_versions_are_rejected(plan, other, package):
    old = plan["versions"][package]
    other["versions"][package] = "9.9"
    reason = f"A.json and B.json were made by different versions: {package} {old} and 9.9. "
    with pytest.raises(ValueError, match=re.escape(reason) + ".*plan again"):
        changes_between(plan, other, names=("A.json", "B.json"))
    changes = changes_between(plan, other, allow_other_versions=True)
    assert by_section(changes) == {"versions": [(package, "", old, "9.9")]}


def test_numbers_of_loads_are_compared():
    layer = layer_of()

    def under(seed):
        records = [record_of(choose(seed), 50, 6)]
        whole = example_loads.plan()
        found = rate(whole, [layer], Loads("load.json", {layer.path: records}))
        return msgspec.structs.replace(whole, loads=found)

    assert diff.diff(under(1), under(1)) == []
    dropped = {c.what: (c.before, c.after) for c in diff.diff(under(1), under(2))}[
        "loads.dropped_share"
    ]
    assert dropped == tuple(under(seed).loads.dropped_share.mean for seed in (1, 2))
