# tests: /tests/mutations/__main__.py
"""Tests the script that breaks lines of the heart."""

import pathlib
import random
import subprocess

import pytest

from tests.belonging import ROOT
from tests.mutations import __main__ as mutations

SOURCE = '''"""Größe * of a file."""

def both(a, b):
    return zip("é" * a, b, strict=True) if a + 1 < b and not b else False
'''


def test_one_part_of_one_line_is_changed():
    found = [mutation.text for mutation in mutations.mutations_of("file.py", SOURCE)]
    line = SOURCE.splitlines()[3]
    changes = [("* a", "+ a"), ("a + 1", "a - 1"), (" < ", " <= "), (" and ", " or ")]
    changed = [line.replace(old, new, 1) for old, new in changes]
    changed.append(line.replace("else False", "else True"))
    assert sorted(found) == sorted(SOURCE.replace(line, each) for each in changed)


def test_mutations_are_of_different_files_and_can_be_read():
    chosen = mutations.choose(20, random.Random(0))
    assert len({mutation.path for mutation in chosen}) == 20
    for mutation in chosen:
        compile(mutation.text, mutation.path, "exec")
        assert mutation.text != (ROOT / mutation.path).read_text("utf-8")
    again = mutations.choose(20, random.Random(0))
    assert [m.text for m in again] == [m.text for m in chosen]


@pytest.mark.slow
def test_a_mutation_is_noticed_where_a_test_reads_the_line(tmp_path: pathlib.Path):
    copy = tmp_path / "copy"
    subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
    path = "lingvo_gshard/core/nested_map.py"
    source = (copy / path).read_text("utf-8")
    all_of_file = list(mutations.mutations_of(path, source))
    mutation = next(each for each in all_of_file if "len(leaves) == count" in each.what)
    assert mutations.is_noticed(mutation, copy)
    assert (copy / path).read_text("utf-8") == source
