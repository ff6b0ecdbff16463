"""The key of a compilation: a hash of all that the compiled program depends on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import msgspec

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.planning.compiling.tpu_process import EFFORT
from lingvo_gshard.planning.machines import compilers, libtpu
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.training.records.launch import installed_versions

# To be raised when the content of the cache's files changes its meaning.
_FORMAT = 1
_PACKAGES = ("jax", "jaxlib")


def key_of(
    program: Program,
    topology: Topology,
    generates_code: bool,
    options: Mapping[str, str] | None = None,
) -> str:
    """Returns the key of a compilation, 64 hexadecimal digits.

    Args:
      program: what is compiled.
      topology: what it is compiled for. Its name stands for its shape and its chips.
      generates_code: whether code is generated in any case.
      options: options of the compiler besides those of the topology.
    """
    packages = (*_PACKAGES, *filter(None, [compilers.PACKAGES.get(topology.compiler)]))
    content = msgspec.json.encode(
        {
            "format": _FORMAT,
            "program": program.digest,
            "topology": topology.name,
            "compiler": topology.compiler,
            "options": {**topology.compiler_options, **(options or {})},
            "versions": installed_versions(packages),
            "flags": [os.environ.get(name, "") for name in ("XLA_FLAGS", libtpu.OPTIONS)],
            "effort": [getattr(jax.config, name) for name in EFFORT],
            "usable_bytes": topology.chip.usable_bytes,
            "generates_code": generates_code,
        },
        order="deterministic",
    )
    return hashlib.sha256(content).hexdigest()
