# tests: /docs/counted/
"""Holds that the counts of docs/counted/table.md are those of the configs beside them."""

import pytest

from docs.counted import __main__ as counted

ENTRIES = {entry["name"]: entry for entry in counted.entries()}
# One of each kind of attention and experts. They take a second in all.
FEW = ("openai/gpt-oss-20b", "google-t5/t5-small", "Qwen/Qwen3-VL-2B-Instruct", "microsoft/phi-4")


def rows():
    """Returns name -> cells of the table."""
    lines = counted.TABLE.read_text(encoding="utf-8").splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return {row[0]: row for row in cells}


def check(names):
    """Checks that the table has the numbers of weights of some models."""
    found = rows()
    for name in names:
        weights = counted.weights_of(ENTRIES[name]["config"])
        assert found[name][3] == f"{weights:,}", name


def test_the_table_has_each_config_and_60_at_least_are_counted_alike():
    found = rows()
    assert list(found) == list(ENTRIES)
    assert sum(row[4] == "equal" for row in found.values()) >= 60
    check(FEW)


@pytest.mark.slow
def test_all_counts():
    check(ENTRIES)
