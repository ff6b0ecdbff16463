"""Decides which arguments of a program are weights, which optimizer state, and which inputs.

A jax program does not state the classes of its arguments. The arguments' names usually show them,
as Flax, Optax, Keras and Equinox name arguments. A user's patterns override this.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning import memory
from lingvo_gshard.runtime.program.array import Array

# Parts of names, between dots and brackets. The first of them in a name decides.
_NAMES = {
    memory.WEIGHTS: frozenset(
        "params weights theta model batch_stats trainable_variables non_trainable_variables".split()
    ),
    memory.MOMENTS: frozenset(
        "opt_state opt_states optimizer optimizer_state optimizer_variables moments averages "
        "mu nu m v momentum velocity ema".split()
    ),
}
# The number of arguments that a message names.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class MemoryPatterns:
    """Regular expressions that are searched in the paths of arguments.

    Attributes:
      weights: matches weights; None recognizes weights by their usual names.
      moments: matches optimizer state; None recognizes optimizer state by its usual names. An
        argument that both patterns match is optimizer state.

    Raises:
      UserError: a pattern is no regular expression; names --weights or --moments.
    """

    weights: str | None = None
    moments: str | None = None

    def __post_init__(self):
        for flag in ("weights", "moments"):
            pattern = getattr(self, flag)
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise UserError(
                    f"`{flag}={pattern}` is no regular expression: {error}; expected such as "
                    f"'{flag}.*'"
                ) from None


@dataclasses.dataclass(frozen=True)
class MemoryClasses:
    """The memory class of each argument, and how the classes were found.

    Attributes:
      classes: memory.WEIGHTS, MOMENTS or INPUTS of each argument.
      note: a sentence for the plan that says how.
    """

    classes: tuple[str, ...]
    note: str


def memory_classes(
    inputs: Sequence[Array], donated: Sequence[int], patterns: MemoryPatterns
) -> MemoryClasses:
    """Returns the memory class of each argument.

    Without any weight by name, the donated arguments of one dimension or more are the weights: a
    training step returns its state in the memory of the old one.

    Raises:
      UserError: a pattern matches no argument; names it and the first arguments.
    """
    for flag in ("weights", "moments"):
        pattern = getattr(patterns, flag)
        if pattern and not any(re.search(pattern, array.path) for array in inputs):
            shown = ", ".join(array.path for array in inputs[:_SHOWN])
            more = f" and {len(inputs) - _SHOWN} more" if len(inputs) > _SHOWN else ""
            raise UserError(f"`{flag}={pattern}` matches none of its arguments: {shown}{more}")
    classes = [_class_of(array.path, patterns) for array in inputs]
    ways = [
        f"by `{flag}={pattern}`" if pattern else "by name"
        for flag, pattern in (("weights", patterns.weights), ("moments", patterns.moments))
    ]
    if patterns.weights is None and memory.WEIGHTS not in classes:
        for index in donated:
            if inputs[index].shape and classes[index] == memory.INPUTS:
                classes[index] = memory.WEIGHTS
                ways[0] = "because their memory is donated"
    counts = [classes.count(kind) for kind in (memory.WEIGHTS, memory.MOMENTS, memory.INPUTS)]
    note = (
        f"arguments: {counts[0]} of weights ({ways[0]}), {counts[1]} of moments ({ways[1]}), "
        f"{counts[2]} of inputs; "
        "`weights` and `moments` say it by patterns of their names"
    )
    return MemoryClasses(tuple(classes), note)


def layer_of(path: str) -> str:
    """Returns the layer that a weight's or a moment's path names, such as `block_0/dense`.

    These are the parts of the path after those that name the kind of state.
    """
    parts = _parts(path)
    names = frozenset().union(*_NAMES.values())
    start = next((at + 1 for at, part in enumerate(parts) if part.lower() in names), 0)
    if start and _kind_of_part(parts[start - 1]) == memory.MOMENTS:
        # Optax nests its state: `opt_state[0].mu`.
        nested = [at for at, part in enumerate(parts) if part.lower() in names and at < start + 2]
        start = nested[-1] + 1
    return "/".join(parts[start:-1])


def _class_of(path: str, patterns: MemoryPatterns) -> str:
    for kind, pattern in ((memory.MOMENTS, patterns.moments), (memory.WEIGHTS, patterns.weights)):
        if pattern and re.search(pattern, path):
            return kind
    kinds = filter(None, map(_kind_of_part, _parts(path)))
    kind = next(kinds, memory.INPUTS)
    is_decided = patterns.weights if kind == memory.WEIGHTS else patterns.moments
    return memory.INPUTS if is_decided else kind


def _kind_of_part(part: str) -> str:
    return next((kind for kind, names in _NAMES.items() if part.lower() in names), "")


def _parts(path: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]/]+", path) if part]
