"""Finds the layer and the phase of an operation in its op_name.

Names of jax programs are first translated.

TensorFlow names an operation by its nested name scopes, followed by its own name. The scope tells
the phase: `gradient_tape/`, or `gradients/` in loops, for the backward pass, `rematerialized/` for
recomputed operations, and `optimizer/`. Gradients of recomputed operations have both scopes and
belong to the backward pass. Loops and calls add scopes before and within the scopes of the layer.

jax names an operation by its name scopes. A transformation wraps the scopes that it applies to:
`jit(step)/transpose(jvp(model))/layer_0/dense/dot_general` is in the backward pass of
`model/layer_0/dense`. `jax.checkpoint` adds `checkpoint`, and `rematted_computation` around what it
recomputes: https://docs.jax.dev/en/latest/gradient-checkpointing.html. A transformation within
another repeats the scopes around it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Set

from lingvo_gshard.core import COMBINE_SCOPE, DISPATCH_SCOPE, OPTIMIZER_SCOPE, RECOMPUTED_SCOPE

_BACKWARD = "gradient_tape"
_WRAPPED = re.compile(r"([a-z_]+)\((.*)\)")
# Scopes of transformations and calls, which belong to no layer.
_JAX_ADDED = re.compile(
    r"checkpoint|remat2?|closed_call|core_call|pjit|shard_map|xla_call|branch_\d+_fun|"
    r"custom_(jvp|vjp)_call(_jaxpr)?"
)
_RECOMPUTED = "rematted_computation"
# An argument's name, such as `params['w']`. The compiler gives this name to copies of the argument.
_ARGUMENT = re.compile(r"\w+\S*\[\S*\]\S*")
_SIGNS = re.compile(rf"[a-z]\(|(?:^|/)(?:checkpoint|closed_call|{_RECOMPUTED})/")


def to_tensorflow(name: str) -> str:
    """Returns a jax name as TensorFlow would spell it; other names as they are.

    `name` lacks the scopes of the outermost `jit`. The result has the scopes of the layer and the
    operation's own name, such as `model/dense/dot_general`, after `gradient_tape/` in the backward
    pass and `rematerialized/` for what is recomputed.
    """
    if _ARGUMENT.fullmatch(name):
        return ""
    if not _SIGNS.search(name):
        return name
    scopes, phase = [], ""
    for segment in _segments(name):
        wrappers, scope = _unwrapped(segment)
        if "jvp" in wrappers or "transpose" in wrappers:
            scopes = []
        if "transpose" in wrappers:
            phase = _BACKWARD
        if scope == _RECOMPUTED:
            phase = RECOMPUTED_SCOPE
        elif "jit" not in wrappers and scope and not _JAX_ADDED.fullmatch(scope):
            scopes += scope.split("/")
    return "/".join([phase, *scopes] if phase else scopes)


def _segments(name: str) -> list[str]:
    """Splits a name at the slashes that are in no parentheses."""
    found, depth, start = [], 0, 0
    for at, character in enumerate(name):
        depth += (character == "(") - (character == ")")
        if character == "/" and depth <= 0:
            found.append(name[start:at])
            start = at + 1
    return [*found, name[start:]]


def _unwrapped(segment: str) -> tuple[set[str], str]:
    """Returns the transformations around a scope, and the scope."""
    wrappers = set()
    while match := _WRAPPED.fullmatch(segment):
        wrappers.add(match[1])
        segment = match[2]
    return wrappers, segment


# Names of matrix products end in one of these.
PRODUCT_NAMES = ("/Einsum", "/MatMul", "/dot_general")
# Name scopes within a layer whose matrix products only move tokens.
DISPATCH_SCOPES = (DISPATCH_SCOPE, COMBINE_SCOPE)

_WRAPPERS = re.compile(r"^(?:(?:jit\([^)]*\)|call_exported[^/]*)/)+")
_MERGED = re.compile(r"((?:.*?/)?)\((.*?)\)?")
_GRADIENT = re.compile(r"gradient_tape|gradients(_\d+)?|.*_grad")
# Scopes that belong to no layer, but to phases, loops, branches and calls.
_ADDED = re.compile(
    r"gradient_tape|gradients(_\d+)?|while(_\d+)?|while_grad|cond(_\d+)?|body|then|else|_\d+|"
    r"call\.\d+|branch_executed|(Stateful)?PartitionedCall(_\d+)?|scan(_\d+)?|"
    rf"{RECOMPUTED_SCOPE}(_\d+)?|{OPTIMIZER_SCOPE}"
)
# Operations that pass arguments, and that loops add to store and fetch values.
_UPKEEP = re.compile(r"args\[\d+\]|TensorList\w+|accumulator|AddN(_\d+)?|(zeros|ones)_like(_\d+)?")
# A name that TensorFlow may have made unique with a number, such as `einsum_1`.
_NUMBERED = re.compile(r"(.+?)(_\d+)?")


def without_wrappers(op_name: str) -> str:
    """Returns an op_name without the scopes that jax puts before it."""
    return _WRAPPERS.sub("", op_name)


def operation_name(op_name: str) -> str:
    """Returns an op_name without jax's scopes. If XLA merged several names, it is the first.

    An operation that XLA merged with its recomputation is not recomputed.
    """
    names = merged_names(op_name)
    original = names[0].removeprefix(f"{RECOMPUTED_SCOPE}/")
    return original if original in names else names[0]


@functools.lru_cache(maxsize=2**16)
def merged_names(op_name: str) -> list[str]:
    """Returns the names that XLA merged, as in `a/(b:c)`, without jax's scopes.

    Of names merged as `a;b` it returns the first alone.
    """
    name = without_wrappers(op_name).split(";", 1)[0]
    merged = _MERGED.fullmatch(name)
    if merged:
        return [to_tensorflow(merged[1] + part) for part in merged[2].split(":")]
    is_call = re.fullmatch(r"jit\([^)]*\)|call_exported[^/]*", name)
    return ["" if is_call else to_tensorflow(name)]


def is_uninformative(name: str) -> bool:
    """Returns whether a name only tells that an operation passes arguments or loop values."""
    segments = [s for s in name.split("/") if s and not _ADDED.fullmatch(s)]
    return all(_UPKEEP.fullmatch(segment) for segment in segments)


@functools.lru_cache(maxsize=2**16)
def layer_and_phase(name: str, layer_scopes: Set[str] | None = None) -> tuple[str, str]:
    """Returns an operation's layer and its phase, one of operations.PHASES.

    Args:
      name: the operation's name, as `operation_name` returns it.
      layer_scopes: a frozenset of the name scopes of all layers. The layer is the longest of these
        scopes in the name, or "". By default it is the name without the operation itself and
        without the scopes of phases, loops and calls.
    """
    segments = [segment for segment in name.split("/") if segment]
    if layer_scopes is None:
        layer = "/".join(_without_operation([s for s in segments if not _ADDED.fullmatch(s)]))
    else:
        layer = _longest(segments, layer_scopes)
    return layer, _phase(segments, layer)


def is_dispatch(name: str) -> bool:
    """Returns whether an operation is in a name scope of dispatch or combine."""
    segments = (_without_number(segment) for segment in name.split("/")[:-1] if segment)
    return any(segment in DISPATCH_SCOPES for segment in segments)


def _without_number(segment: str) -> str:
    numbered = _NUMBERED.fullmatch(segment)
    return numbered[1] if numbered else segment


def _longest(segments: list[str], layer_scopes: Set[str]) -> str:
    """The longest sequence of name scopes that is a layer's; "" if there is none."""
    for length in range(len(segments), 0, -1):
        for start in range(len(segments) - length + 1):
            scope = "/".join(segments[start : start + length])
            if scope in layer_scopes:
                return scope
    return ""


def _without_operation(segments: list[str]) -> list[str]:
    """Drops the operation's own name, and the scope of the function or gradient that holds it."""
    if not segments:
        return segments
    holder = _without_number(segments[-2]) if len(segments) > 1 else ""
    own = _without_number(segments[-1])
    is_held = holder.endswith("_grad") or (holder and holder.lower() == own.lower())
    return segments[: -2 if is_held else -1]


def _phase(segments: list[str], layer: str) -> str:
    if OPTIMIZER_SCOPE in segments[:1]:
        return OPTIMIZER_SCOPE
    if any(_GRADIENT.fullmatch(segment) for segment in segments):
        return "backward"
    if any(_without_number(segment) == RECOMPUTED_SCOPE for segment in segments):
        return RECOMPUTED_SCOPE
    return "forward" if layer else "other"


# Every line that `full_replications` reads contains this text.
WARNING_TEXT = "Involuntary full rematerialization"
_WARNING = re.compile(
    rf"{WARNING_TEXT}.*?from sharding (?P<before>.*?) to (?P<after>.*?) "
    r"efficiently for HLO operation (?P<instruction>.*)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class FullReplication:
    """A tensor that XLA replicates in full, because it knows no cheaper way to reshard it.

    XLA calls this involuntary full rematerialization, although it recomputes nothing.

    Attributes:
      operation: TensorFlow's name of the operation, with the layer's name scopes; for an
        instruction that the partitioner inserted, its own name and its shape.
      before: the tensor's sharding, as XLA writes it.
      after: the sharding that the next operation needs.
    """

    operation: str
    before: str
    after: str

    def __str__(self) -> str:
        return (
            f"{self.operation} is replicated in full on every device to reshard it from "
            f"{self.before} to {self.after}"
        )


def full_replications(compiler_output: str) -> list[FullReplication]:
    """Returns the tensors that the compiler's output warns about, each once."""
    found = (
        FullReplication(_operation(match["instruction"]), match["before"], match["after"])
        for match in _WARNING.finditer(compiler_output)
    )
    return list(dict.fromkeys(found))


def _operation(instruction: str) -> str:
    op_name = _OP_NAME.search(instruction)
    operation = without_wrappers(op_name[1]) if op_name else ""
    if operation:
        return operation
    name, _, rest = instruction.partition(" = ")
    return f"{name} {rest.partition('{')[0]}".strip()
