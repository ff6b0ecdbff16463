"""Options of pytest that select the tests of some files, and a share of the slow ones."""

from __future__ import annotations

import math
import pathlib
import time
import zlib

import pytest

from tests.belonging import ROOT, Belonging, changed_since

_NO_TIME = "the minutes of --slow-minutes are over"


def add_options(parser: pytest.Parser) -> None:
    """Adds the options of this module."""
    group = parser.getgroup("selection")
    group.addoption(
        "--belongs-to",
        metavar="FILES",
        help="runs the tests of files and folders; spaces are between them",
    )
    group.addoption(
        "--changed-since",
        metavar="REVISION",
        help="runs the tests of files that differ from a revision of git, or that are new",
    )
    group.addoption(
        "--slow-share",
        metavar="K/N",
        help="also runs each slow test whose name has the checksum K modulo N",
    )
    group.addoption(
        "--slow-minutes",
        metavar="MINUTES",
        type=float,
        help="skips the slow tests of the share that have not begun after these minutes",
    )


def register(config: pytest.Config) -> None:
    """Registers the selections that the options ask for.

    Raises:
      pytest.UsageError: an option has a wrong value, or no test belongs to the files.
    """
    files, revision = config.getoption("belongs_to"), config.getoption("changed_since")
    if files is not None or revision is not None:
        config.pluginmanager.register(_Files(_files(config, files or "", revision)))
    if share := config.getoption("slow_share"):
        config.pluginmanager.register(
            _SlowShare(*read_share(share), config.getoption("slow_minutes"))
        )
        if config.option.markexpr == "not slow":
            config.option.markexpr = ""


def _files(config: pytest.Config, files: str, revision: str | None) -> list[str]:
    paths = []
    for given in files.split():
        path = pathlib.Path(config.invocation_params.dir, given).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            raise pytest.UsageError(f"--belongs-to: {given} is no file or folder of the repository")
        paths.append(path.relative_to(ROOT).as_posix())
    if revision is None:
        return paths
    try:
        return [*paths, *changed_since(revision)]
    except ValueError as error:
        raise pytest.UsageError(f"--changed-since={revision}: {error}") from None


class _Files:
    """Collects only the test files that belong to some files."""

    def __init__(self, paths: list[str]):
        self._found = Belonging().tests_of(paths)
        self._tests = {ROOT / test for tests in self._found.values() for test in tests}

    def pytest_report_header(self) -> list[str]:
        without = [path for path, tests in self._found.items() if not tests]
        lines = [f"{len(self._tests)} test files belong to {len(self._found)} files"]
        return lines + ([f"no tests belong to {', '.join(without)}"] if without else [])

    def pytest_ignore_collect(self, collection_path: pathlib.Path) -> bool | None:
        is_left_out = collection_path.is_file() and collection_path not in self._tests
        return True if is_left_out else None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Files may have no tests, or slow ones alone.
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK


class _SlowShare:
    """Runs a share of the slow tests, and names those that fail.

    Slow tests are drawn by checksums of their names, so that N runs with K from 0 to N - 1 run each
    of them once.
    """

    def __init__(self, index: int, count: int, minutes: float | None):
        self._index, self._count, self._minutes = index, count, minutes
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._failed: list[str] = []
        self._left = 0

    def pytest_report_header(self) -> str:
        return f"slow tests: share {self._index} of {self._count}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        others = [item for item in items if not self._has(item)]
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if self._has(item)]

    def _has(self, item: pytest.Item) -> bool:
        return not item.get_closest_marker("slow") or is_in_share(
            item.nodeid, self._index, self._count
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._end and item.get_closest_marker("slow"):
            pytest.skip(_NO_TIME)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and "slow" in report.keywords:
            self._failed.append(report.nodeid)
        self._left += report.skipped and _NO_TIME in str(report.longrepr)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.write_line(
                f"{self._left} slow tests had not begun after {self._minutes:g} minutes"
            )
        if self._failed:
            terminalreporter.section(f"slow tests of share {self._index} of {self._count} failed")
            terminalreporter.write_line("\n".join(self._failed))


def read_share(text: str) -> tuple[int, int]:
    """Returns K and N of a share "K/N".

    Raises:
      pytest.UsageError: the text is no share.
    """
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and int(index) < int(count):
        return int(index), int(count)
    raise pytest.UsageError(f"--slow-share={text}: expected K/N with 0 <= K < N, such as 3/200")


def is_in_share(name: str, index: int, count: int) -> bool:
    """Returns whether a slow test of a name is in share `index` of `count`."""
    return zlib.crc32(name.encode()) % count == index
