"""Flags that are paths of hyperparameters: --input.batch_rows=8 for --gin_param."""

from __future__ import annotations

import re
from collections.abc import Sequence

from absl import flags

from lingvo_gshard.core import names, registry

_PATH = re.compile(r"--?(\w+(?:\.\w+)+)")
# Its hyperparameters explain a flag if no experiment is named.
_USUAL = "translation.quickstart"


def as_settings(argv: Sequence[str]) -> list[str]:
    """Returns arguments with a --gin_param for each flag that has dots.

    A value that is no gin value is a text: --step.precision=bfloat16 needs no quotes.
    """
    result = []
    waiting = list(argv)
    while waiting:
        argument = waiting.pop(0)
        flag, equals, value = argument.partition("=")
        path = _PATH.fullmatch(flag)
        if path and not equals and waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
        result.append(f"--gin_param={_statement(path[1], value)}" if path else argument)
    return result


def _statement(path: str, value: str) -> str:
    # Commands without such flags do not wait for gin.
    from lingvo_gshard.wings.gin import reader

    value = value.title() if value in ("true", "false") else value
    return f"{path} = {value if reader.is_value(value) else repr(value)}"


def hint(name: str, values: flags.FlagValues) -> str:
    """Returns a sentence with the paths that an unknown flag may mean; "" if there are none."""
    if "gin_param" not in values or "experiment" not in values:
        return ""
    from lingvo_gshard.wings.gin.binding import paths_ending

    found = paths_ending(registry.get(values["experiment"].value or _USUAL), name)
    settings = [f"--{path}" for path in found if path != name]
    return f". {names.any_of(settings)}" if settings else ""
