"""Fingerprints: what a compiled program depends on besides the model."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys
from collections.abc import Iterable

import msgspec

import lingvo_gshard

_PACKAGE = pathlib.Path(lingvo_gshard.__file__).parent
_CPU_INFO = pathlib.Path("/proc/cpuinfo")
# Lines of /proc/cpuinfo that say which instructions a compiler may use.
_CPU_LINES = ("model name", "flags", "Features", "CPU part")


def fingerprint(facts: object) -> str:
    """Returns a hash of facts: values that JSON has."""
    encoded = msgspec.json.encode(facts, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:32]


def environment(devices: Iterable[str]) -> dict[str, object]:
    """Returns what compiled programs depend on: the machine, libraries, this package's code.

    Args:
      devices: the kind of each device.
    """
    return {
        "cpu": _cpu(),
        "devices": list(devices),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "python": sys.version_info[:2],
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "code": code_stamp([_PACKAGE]),
    }


def code_stamp(roots: Iterable[pathlib.Path]) -> str:
    """Returns a hash of the name, size and time of every Python file in directories or files."""
    stamp = hashlib.sha256()
    for root in sorted(roots):
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            found = path.stat()
            stamp.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    return stamp.hexdigest()


@functools.cache
def _cpu() -> str:
    """Returns the processor's model and features, one line each."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return "\n".join([platform.machine(), *(x for x in lines if x.startswith(_CPU_LINES))])
