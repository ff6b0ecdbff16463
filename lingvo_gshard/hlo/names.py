"""What an op_name tells: the layer an operation was written in, and in which phase of the step.

TensorFlow's names are name scopes, one within the other, and the operation's own last. Gradients
stand in `gradient_tape/` or, in loops, in `gradients/`, also those of what is computed a second
time, which stands in `rematerialized/`; the optimizer's in `optimizer/`. Loops and calls put scopes
of their own before the layer's, or between.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Set

from lingvo_gshard.core.layer import RECOMPUTED
from lingvo_gshard.layers.moe.exchange import COMBINE_SCOPE, DISPATCH_SCOPE
from lingvo_gshard.training.optim.optimizer import SCOPE as OPTIMIZER

# Name scopes, within that of a layer, of the matrix products that only move tokens.
DISPATCH_SCOPES = (DISPATCH_SCOPE, COMBINE_SCOPE)

_WRAPPERS = re.compile(r"^(?:jit\([^)]*\)/)+(?:call_exported[^/]*/)?")
_MERGED = re.compile(r"((?:.*/)?)\(([^()]*)\)?")
_GRADIENT = re.compile(r"gradient_tape|gradients(_\d+)?|.*_grad")
# Scopes that loops, branches and calls add to names.
_ADDED = re.compile(
    r"gradient_tape|gradients(_\d+)?|while(_\d+)?|while_grad|cond(_\d+)?|body|then|else|_\d+|"
    r"call\.\d+|branch_executed|(Stateful)?PartitionedCall(_\d+)?|scan(_\d+)?|"
    rf"{RECOMPUTED}(_\d+)?|{OPTIMIZER}"
)
_UPKEEP = re.compile(r"args\[\d+\]|TensorList\w+|accumulator|AddN(_\d+)?|(zeros|ones)_like(_\d+)?")
# A function of TensorFlow that names its operations `einsum_1/Einsum`, and gradients of operations.
_NUMBERED = re.compile(r"(.+?)(_\d+)?")


def operation_name(text: str) -> str:
    """Returns an op_name without what jax puts before it; of names put together, the first."""
    return merged_names(text)[0]


@functools.lru_cache(maxsize=2**16)
def merged_names(text: str) -> list[str]:
    """Returns the names that XLA put together, as `a/(b:c)` or `a;b`, without what jax adds."""
    name = _WRAPPERS.sub("", text).split(";", 1)[0]
    merged = _MERGED.fullmatch(name)
    if merged:
        return [merged[1] + part for part in merged[2].split(":")]
    return ["" if name.startswith(("jit(", "call_exported")) else name]


def says_nothing(name: str) -> bool:
    """Whether a name is only of arguments, or of what loops do to keep and fetch values."""
    segments = [s for s in name.split("/") if s and not _ADDED.fullmatch(s)]
    return all(_UPKEEP.fullmatch(segment) for segment in segments)


@functools.lru_cache(maxsize=2**16)
def split_operation_name(name: str, layer_scopes: Set[str] | None = None) -> tuple[str, str]:
    """Returns a name's layer and its phase, one of operations.PHASES.

    name: as `operation_name` returns it. layer_scopes: the scopes of all layers, a frozenset; the
    layer is the longest of them in the name, "" where there is none. Without them it is what is
    left when scopes of loops and calls and the operation itself are taken away.
    """
    segments = [segment for segment in name.split("/") if segment]
    if layer_scopes is None:
        layer = "/".join(_without_operation([s for s in segments if not _ADDED.fullmatch(s)]))
    else:
        layer = _longest(segments, layer_scopes)
    return layer, _phase(segments, layer)


def is_dispatch(name: str) -> bool:
    """Whether an operation's name lies in a scope of dispatch or combine."""
    segments = (_NUMBERED.fullmatch(segment)[1] for segment in name.split("/")[:-1] if segment)
    return any(segment in DISPATCH_SCOPES for segment in segments)


def _longest(segments: list[str], layer_scopes: Set[str]) -> str:
    """The longest run of scopes that is a layer's."""
    for length in range(len(segments), 0, -1):
        for start in range(len(segments) - length + 1):
            scope = "/".join(segments[start : start + length])
            if scope in layer_scopes:
                return scope
    return ""


def _without_operation(segments: list[str]) -> list[str]:
    """Without the operation's own name, and that of the function or gradient that holds it."""
    if not segments:
        return segments
    holder = _NUMBERED.fullmatch(segments[-2])[1] if len(segments) > 1 else ""
    own = _NUMBERED.fullmatch(segments[-1])[1]
    is_held = holder.endswith("_grad") or (holder and holder.lower() == own.lower())
    return segments[: -2 if is_held else -1]


def _phase(segments: list[str], layer: str) -> str:
    if OPTIMIZER in segments[:1]:
        return OPTIMIZER
    if any(_GRADIENT.fullmatch(segment) for segment in segments):
        return "backward"
    if any(_NUMBERED.fullmatch(segment)[1] == RECOMPUTED for segment in segments):
        return RECOMPUTED
    return "forward" if layer else "other"
