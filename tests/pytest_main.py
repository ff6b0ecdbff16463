"""Runs pytest on the files named by its arguments: the main program of each bazel test."""

import os
import pathlib
import sys

import pytest


def main() -> int:
    """Returns pytest's exit code, or 0 if all tests of the files are deselected."""
    arguments = ["-p", "no:cacheprovider", "-c", "pyproject.toml", *sys.argv[1:]]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        arguments.append(f"--junitxml={report}")
    if folder := os.environ.get("TEST_TMPDIR"):
        arguments.append(f"--basetemp={pathlib.Path(folder) / 'pytest'}")
    code = pytest.main(arguments)
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    sys.exit(main())
