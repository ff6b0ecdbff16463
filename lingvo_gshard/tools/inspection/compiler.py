"""gshard-inspect --compiler: the options that steps are compiled with, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

from lingvo_gshard.core import names
from lingvo_gshard.runtime import CompileOptions, compile_options, devices_for, platform_of
from lingvo_gshard.tools.console import Console
from lingvo_gshard.tools.flags.definitions import Flags, refuse
from lingvo_gshard.tools.flags.options import option_flags
from lingvo_gshard.tools.inspection.inspection import HERE
from lingvo_gshard.wings.compiler_options.table import OPTIONS, CompilerOption
from lingvo_gshard.wings.planning.machines.chips import CHIPS, PLATFORMS


@dataclasses.dataclass(frozen=True)
class ShownOption:
    """An option of a compiler, as --compiler shows it.

    Attributes:
      value: the value that steps are compiled with; None if they are compiled without it.
      reason: what it does; empty for an option of the user's own.
      source: where it is documented or used; empty for an option of the user's own.
    """

    name: str
    value: str | None
    reason: str = ""
    source: str = ""


# --compiler and the flag of the options that it shows.
FLAGS: Flags = dict(
    compiler=f"Chip, one of {', '.join(CHIPS)}, or {HERE} for this machine: lists the options "
    "of its compiler that steps are compiled with, with reasons.",
    **option_flags(CompileOptions(), notes={"compile_options": "With --compiler."}),
)


def check_flags(values: flags.FlagValues) -> None:
    """Raises UserError if the chip is unknown, or options are given without --compiler."""
    known = (*CHIPS, HERE)
    if values.compiler is None:
        refuse(values, ("compile_options",), "applies to --compiler, which is not given")
    else:
        names.check(values.compiler, known, f"--compiler={values.compiler} is unknown")


def list_options(values: flags.FlagValues, console: Console) -> dict[str, Any]:
    """Prints the options of the chip's compiler; returns the record for JSON."""
    if values.compiler == HERE:
        device = devices_for(None)[0]
        platform, kind = platform_of(device), device.device_kind
    else:
        chip = CHIPS[values.compiler]
        platform = PLATFORMS[chip.kind]
        kind = next(iter(chip.device_kinds), chip.name)
    chosen = compile_options.chosen(platform, kind, values.compile_options)
    shown = shown_options(platform, chosen)
    console.say(f"\ncompiler options of steps on {platform}, {kind}:")
    for row in shown:
        console.say(f"  {row.name}={'(off)' if row.value is None else row.value}")
        console.say(f"    {row.reason or 'given by --compile_options'}")
        if row.source:
            console.say(f"    {row.source}")
    if not shown:
        console.say("  none")
    options = [dataclasses.asdict(row) for row in shown]
    return {"platform": platform, "device_kind": kind, "options": options}


def shown_options(platform: str, chosen: dict[str, str]) -> list[ShownOption]:
    """Returns all options of a platform's compiler that are known or chosen."""
    known: dict[str, CompilerOption] = {
        each.name: each for each in OPTIONS if each.platform == platform
    }
    rows = [
        ShownOption(name, chosen.get(name), each.reason, each.source)
        for name, each in known.items()
    ]
    return rows + [ShownOption(n, value) for n, value in chosen.items() if n not in known]
