"""Compares installed versions with those that are required, and with those that were tested."""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.version import Version

import lingvo_gshard
from lingvo_gshard.tools.console import libraries
from lingvo_gshard.tools.diagnosis.check import Check, State

_PYTHON = (3, 11)
_FILE = "constraints.txt"
_ROOT = pathlib.Path(lingvo_gshard.__file__).parent.parent
# A clone has the file at its root, and an installed package where setup.py puts it.
_PLACES = (_ROOT, pathlib.Path(sysconfig.get_path("data")) / "share" / "lingvo_gshard")


def check_versions() -> Iterator[Check]:
    """Yields the checks of Python and of the required packages."""
    running = platform.python_version()
    state = State.OK if sys.version_info[:2] == _PYTHON else State.WARNING
    wanted = ".".join(map(str, _PYTHON))
    advice = "" if state == State.OK else f"everything was tested with Python {wanted}"
    yield Check("Python", state, running, advice)
    tested, as_tested = tested_versions(), 0
    for name, requirement in libraries.requirements().items():
        check = _check_package(name, Requirement(requirement), tested)
        if check.state == State.OK:
            as_tested += 1
        else:
            yield check
    yield Check("packages", State.OK, f"{as_tested} required packages have the tested versions")


def tested_versions() -> Mapping[str, str]:
    """Returns the version of each package that was tested; empty if the file is missing."""
    file = next((place / _FILE for place in _PLACES if (place / _FILE).exists()), None)
    if file is None:
        return {}
    pins = re.findall(r"^([\w.-]+)==(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {libraries.normal_name(name): version for name, version in pins}


def _check_package(name: str, requirement: Requirement, tested: Mapping[str, str]) -> Check:
    version = tested.get(name)
    install = f"pip install '{name}=={version}'" if version else f"pip install '{requirement}'"
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, State.FAILURE, "not installed", install)
    if not requirement.specifier.contains(installed, prereleases=True):
        found = f"{installed}; {requirement.specifier} is required"
        return Check(name, State.FAILURE, found, install)
    if version and Version(installed) != Version(version):
        return Check(name, State.WARNING, f"{installed}; {version} was tested", install)
    return Check(name, State.OK, installed)
