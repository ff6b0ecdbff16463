"""Compiles a program, and reads what XLA's sharding propagation has decided on the way."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Sequence

from lingvo_gshard import hlo
from lingvo_gshard.core.lazy import jax
from lingvo_gshard.runtime.program.compilation_cache import without_cache
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program

# XLA's names of the passes that choose shardings, for GSPMD and for Shardy.
_PASSES = ("sharding-propagation", "shardy-xla")


def compile_with_shardings(
    program: Program, devices: Sequence[jax.Device]
) -> tuple[Executable, hlo.Module | None]:
    """Compiles a program for as many devices as its mesh has.

    Returns:
      The executable, and the program before it was partitioned: its shapes are those of whole
      tensors, and its instructions have the shardings that annotations and XLA have chosen. None
      if nothing is partitioned, or if the compiler does not write what it decides.
    """
    # A cached program is not compiled, so nothing would be written.
    with tempfile.TemporaryDirectory() as directory, without_cache():
        options = {
            "xla_dump_to": directory,
            "xla_dump_hlo_as_proto": True,
            "xla_dump_hlo_pass_re": "|".join(_PASSES),
        }
        executable = Executable(program, devices, options)
        found = [
            path for name in _PASSES for path in pathlib.Path(directory).glob(f"*.after_{name}*.pb")
        ]
        content = max(found).read_bytes() if found else None
    if content is None:
        return executable, None
    return executable, hlo.Module.from_hlo(content)
