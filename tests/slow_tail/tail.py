"""The tests that are slow by measurement: those of tail.txt have the mark `slow`.

    python -m pytest -n 1 --dist loadgroup -p tests.slow_tail.tail tests/runtime
    python -m tests.slow_tail.tail

The plugin appends the seconds of processor time that each test takes, with those of processes that
it has started, to seconds.jsonl. The command then writes tail.txt anew: the tests that took
more than `MOST_SECONDS`, but the fastest of each file and those of the whole tree. Tests that were
not measured stay in it.
"""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import resource
from collections.abc import Iterator, Mapping

import pytest

FILE = pathlib.Path(__file__).with_name("tail.txt")
SECONDS = pathlib.Path("seconds.jsonl")
# Processor time of a test that `make test` runs.
MOST_SECONDS = 1.5
# Tests of the whole tree: a change of any file may break them.
_OF_THE_TREE = "tests/test_"


@functools.cache
def listed() -> frozenset[str]:
    """Returns the names of the tests that are slow by measurement."""
    return frozenset(FILE.read_text(encoding="utf-8").splitlines())


def mark(item: pytest.Item) -> None:
    """Gives a test that is listed the mark `slow`."""
    if item.nodeid in listed():
        item.add_marker(pytest.mark.slow)


def chosen(seconds: Mapping[str, float]) -> list[str]:
    """Returns the names of the tests that are to be slow, in order.

    Args:
      seconds: name of each test that was measured -> its seconds.
    """
    by_file: dict[str, list[str]] = collections.defaultdict(list)
    for name in seconds:
        by_file[name.partition("::")[0]].append(name)
    kept = {min(names, key=lambda name: (seconds[name], name)) for names in by_file.values()}
    return sorted(
        name
        for name in seconds
        if seconds[name] > MOST_SECONDS and name not in kept and not name.startswith(_OF_THE_TREE)
    )


def _spent() -> float:
    """Returns the processor time of this process, and of those that it has started and awaited."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Appends the processor time of a test to the file."""
    before = _spent()
    result = yield
    is_grouped = hasattr(item.config, "workerinput")  # xdist appends @ and the group.
    row = [item.nodeid.rpartition("@")[0] if is_grouped else item.nodeid, _spent() - before]
    with SECONDS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return result


def main() -> None:
    """Writes the list."""
    lines = SECONDS.read_text(encoding="utf-8").splitlines()
    seconds = dict(json.loads(line) for line in lines)
    names = {*chosen(seconds), *(listed() - seconds.keys())}
    FILE.write_text("".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")


if __name__ == "__main__":
    main()
