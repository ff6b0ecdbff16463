"""Translates the names that jax gives operations into TensorFlow's, which the readers of HLO know.

jax names an operation by its name scopes, in which transformations wrap the scopes they apply to:
`jit(step)/transpose(jvp(model))/layer_0/dense/dot_general` is in the backward pass of
`model/layer_0/dense`. `jax.checkpoint` adds `checkpoint`, and `rematted_computation` around what it
recomputes: https://docs.jax.dev/en/latest/gradient-checkpointing.html. A transformation within
another repeats the scopes around it.
"""

from __future__ import annotations

import re

from lingvo_gshard.core.layer import RECOMPUTED

_BACKWARD = "gradient_tape"
_WRAPPED = re.compile(r"([a-z_]+)\((.*)\)")
# Scopes of transformations and calls, which belong to no layer.
_ADDED = re.compile(
    r"checkpoint|remat2?|closed_call|core_call|pjit|shard_map|xla_call|branch_\d+_fun|"
    r"custom_(jvp|vjp)_call(_jaxpr)?"
)
_RECOMPUTED = "rematted_computation"
# An argument's name, such as `params['w']`, with which the compiler names a copy of it.
_ARGUMENT = re.compile(r"\w+\S*\[\S*\]\S*")
_SIGNS = re.compile(rf"[a-z]\(|(?:^|/)(?:checkpoint|closed_call|{_RECOMPUTED})/")


def to_tensorflow(name: str) -> str:
    """Returns a jax name as TensorFlow would spell it; other names as they are.

    Args:
      name: the operation's name without the scopes of the outermost `jit`.

    Returns:
      The scopes of the layer and the operation's own name, such as `model/dense/dot_general`, after
      `gradient_tape/` in the backward pass and `rematerialized/` for what is recomputed.
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
            phase = RECOMPUTED
        elif "jit" not in wrappers and scope and not _ADDED.fullmatch(scope):
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
