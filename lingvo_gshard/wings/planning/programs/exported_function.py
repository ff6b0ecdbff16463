"""Exports jax functions of users, and says in a sentence what to change where jax refuses one."""

from __future__ import annotations

import collections
import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core import UserError, jax, objects
from lingvo_gshard.core.lazy import jax_export

# Exported functions are compiled by this version of jax, so that any custom call may be in them.
_ALL_CALLS = "ALL"
_ADVICE = objects.table_beside(__file__, "advice.toml", dict[str, str])
_WIDE = ("float64", "int64", "uint64")
# Of the call of the function itself, not of a call in it.
_WRONG_CALL = re.compile("positional argument|keyword argument|takes no arguments")
_FAILS = "the function fails while jax traces it"
_MOST_CHARACTERS = 300


def export(function: Callable[..., Any], specs: Any, platform: str) -> jax_export.Exported:
    """Returns a jax function, exported for a platform.

    Args:
      specs: nested structures of jax.ShapeDtypeStruct, one for each argument.
      platform: "tpu", "cuda" or "cpu".

    Raises:
      UserError: jax cannot trace or lower the function; says where, and what to change.
    """
    check_specs(function, specs)
    checks = [jax_export.DisabledSafetyCheck.custom_call(_ALL_CALLS)]
    try:
        jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
        exporting = jax_export.export(jitted, platforms=[platform], disabled_checks=checks)
        return exporting(*specs)
    except Exception as error:  # Code of users raises whatever it likes.
        raise UserError(f"{name_of(function)} cannot be planned: {_in_words(error)}") from error


def name_of(function: Any) -> str:
    """Returns the name of a function, or of its class if it has none."""
    return getattr(function, "__name__", type(function).__name__)


def check_specs(function: Any, specs: Any) -> None:
    """Raises UserError if the arguments of a function are no sequence."""
    if not isinstance(specs, Sequence) or isinstance(specs, str):
        raise UserError(
            f"{name_of(function)}: `specs` is a {type(specs).__name__}; expected a tuple or a list "
            "with one entry for each argument, such as (state, batch)"
        )


def narrowing_notes(specs: Sequence[Any], exported: jax_export.Exported) -> list[str]:
    """Returns a note on arguments of 64 bits that jax reads as 32 bits."""
    given = [getattr(leaf, "dtype", None) for leaf in jax.tree_util.tree_leaves(specs)]
    wide = collections.Counter(
        str(dtype)
        for dtype, aval in zip(given, exported.in_avals, strict=False)
        if str(dtype) in _WIDE and str(dtype) != str(aval.dtype)
    )
    return [
        f"arguments: {count} of {dtype} count as 32 bits, as jax computes unless jax_enable_x64 is "
        "set"
        for dtype, count in wide.items()
    ]


def _in_words(error: Exception) -> str:
    """Returns what to change, where, and what jax says."""
    found = f"{type(error).__name__}: {error}"
    line = _line(error)
    if _WRONG_CALL.search(found):
        advice = _FAILS if line else "`specs` must have one entry for each argument"
    else:
        advice = next((words for sign, words in _ADVICE.items() if re.search(sign, found)), _FAILS)
    reason = " ".join(found.split("\n\n")[0].split()).partition(" See https://")[0]
    if len(reason) > _MOST_CHARACTERS:
        reason = f"{reason[:_MOST_CHARACTERS]}..."
    return f"{advice}{f', at {line}' if line else ''} ({reason})"


def _line(error: Exception) -> str:
    """Returns the innermost line of code that is the user's; "" if there is none."""
    ours = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (jax, os)) + (
        os.path.abspath(__file__),
    )
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours) and "site-packages" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
