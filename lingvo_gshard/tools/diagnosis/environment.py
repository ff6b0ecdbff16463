"""Says which settings of the environment matter."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import pathlib
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping

import msgspec
from packaging.requirements import Requirement
from packaging.version import Version

from lingvo_gshard.core import objects
from lingvo_gshard.tools.console import libraries
from lingvo_gshard.wings.services.run_records import PREFIXES


class State(enum.StrEnum):
    """The results that a check can have.

    Attributes:
      OK: nothing needs to be done.
      WARNING: training works, but may be slow, or differ from what was tested.
      FAILURE: training does not work, or computes wrong results.
      SKIPPED: this machine lacks what the check needs.
    """

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


# First words of units of rates -> what one of them counts in a second.
_UNITS = {"TFLOP/s": 1e12, "GiB/s": 2**30}


@dataclasses.dataclass(frozen=True)
class Timing:
    """A measured time, and the time that plans assume for this machine.

    Attributes:
      planned: the planned time; None if nothing is known of the chip.
      amount: FLOPs, or bytes that a device sends or reads; 0 if the time itself is shown.
      unit: the unit of the rate that is shown, such as "GiB/s sent"; "" if the time is.
      point: the measurement as a file of wings/planning/machines takes it; "" if none does.
    """

    seconds: float
    planned: float | None = None
    amount: float = 0.0
    unit: str = ""
    point: str = ""

    def shown(self, seconds: float | None) -> str:
        """Returns a time as text, or the rate that it means; "" for None."""
        if not seconds:
            return ""
        if not self.unit:
            return f"{seconds * 1e3:,.3g} ms"
        return f"{self.amount / seconds / _UNITS[self.unit.split()[0]]:,.3g} {self.unit}"


@dataclasses.dataclass(frozen=True)
class Check:
    """A finding on one thing, and what to do; no advice if nothing needs to be done."""

    name: str
    state: State
    found: str
    advice: str = ""
    timing: Timing | None = None


# The oldest and the newest Python that everything is tested with.
_OLDEST, _NEWEST = (3, 11), (3, 13)
_FILE = "constraints.txt"
_ROOT = pathlib.Path(__file__).parents[3]
# A clone has the file at its root, and an installed package where setup.py puts it.
_PLACES = (_ROOT, pathlib.Path(sysconfig.get_path("data")) / "share" / "lingvo_gshard")


def check_versions() -> Iterator[Check]:
    """Yields the checks of Python and of the required packages."""
    running = platform.python_version()
    is_tested = _OLDEST <= sys.version_info[:2] <= _NEWEST
    state = State.OK if is_tested else State.WARNING
    tried = " to ".join(".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
    advice = "" if is_tested else f"everything was tested with Python {tried}"
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


class _Settings(msgspec.Struct, frozen=True):
    """Settings of the environment, by name, with what they do.

    Attributes:
      breaking: they stop training.
      changing: they change results or speed.
      harmless: they do what their users want.
      flags: options in XLA_FLAGS that need a warning.
    """

    breaking: dict[str, str]
    changing: dict[str, str]
    harmless: dict[str, str]
    flags: dict[str, str]


_OFF = ("", "0", "false", "off", "no")
_SETTINGS = objects.table_beside(__file__, "environment.json", _Settings)


def check_environment(environment: Mapping[str, str]) -> Iterator[Check]:
    """Yields a check of each setting that jax, XLA, TensorFlow or their drivers read."""
    harmful = _SETTINGS.breaking | _SETTINGS.changing
    known = harmful | _SETTINGS.harmless
    names = sorted(n for n in environment if n in known or n.startswith(PREFIXES))
    for name in names:
        found = f"{name}={environment[name]}"
        if name == "XLA_FLAGS":
            yield from _check_flags(environment[name])
        elif name in harmful and environment[name].lower() not in _OFF:
            state = State.FAILURE if name in _SETTINGS.breaking else State.WARNING
            advice = f"{harmful[name]}; unset {name} unless you mean it"
            yield Check("environment", state, found, advice)
        else:
            effect = _SETTINGS.harmless.get(name, "its effect on training is not known here")
            yield Check("environment", State.OK, f"{found}: {effect}")
    if not names:
        yield Check("environment", State.OK, "no setting of jax, XLA, TensorFlow or libtpu")


def _check_flags(flags: str) -> Iterator[Check]:
    for flag in flags.split():
        name = re.sub(r"^--(no)?|=.*$", "", flag)
        found = f"XLA_FLAGS has {flag}"
        if name in _SETTINGS.flags:
            yield Check("environment", State.WARNING, found, _SETTINGS.flags[name])
        else:
            yield Check("environment", State.OK, f"{found}, which XLA's compiler reads")
