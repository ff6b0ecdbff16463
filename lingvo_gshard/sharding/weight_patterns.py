"""Patterns that choose weights by their paths.

A pattern is the path of a layer or a weight, such as `encoder.layers[1].feed_forward`. "*" matches
any text and "?" any character. A pattern also matches everything below the path, as in
`sharding.overrides`. A weight of repeated layers also has the paths it would have without the
repetition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lingvo_gshard.core import NestedMap, UserError, VariableSpec, explained, names
from lingvo_gshard.sharding.partitioning import matches_path


def layer_of(path: str) -> str:
    """Returns the layer that the weight or moment of a path belongs to.

    It is the path up to the first index. Without an index, it is the path without its last name.
    """
    path = path.partition("/")[0]
    first, bracket, _ = path.partition("]")
    return first + bracket if bracket else path.rpartition(".")[0] or path


def matches(pattern: str, spec: VariableSpec) -> bool:
    """Returns whether a pattern matches a weight.

    Raises:
      UserError: the pattern matches some of the repeated layers that share the weight's array, but
        not all.
    """
    if matches_path(pattern, spec.path):
        return True
    found = [matches_path(pattern, path) for path in spec.slices]
    if any(found) and not all(found):
        path = spec.slices[found.index(False)]
        raise UserError(
            f"the pattern {pattern!r} matches some of the repeated layers of {spec.path}, but not "
            f"{path}; a pattern must match all of them or none"
        )
    return any(found)


def check(where: str, patterns: Iterable[str], specs: NestedMap) -> None:
    """Raises ValueError, naming `where`, for a pattern that is no string or matches no weight."""
    weights = specs.flatten()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UserError(f"{where}: {pattern!r}; a pattern of paths such as '*.bias' expected")
        with explained(where, ValueError):
            found = [spec for spec in weights if matches(pattern, spec)]
        if not found:
            paths = [spec.path for spec in weights]
            raise UserError(
                f"{where}: no layer or weight is named {pattern!r}. {nearest(pattern, paths)}"
            )


def nearest(pattern: str, paths: Sequence[str]) -> str:
    """Returns a sentence that suggests the path, or its end, that is nearest to a pattern."""
    name = pattern.removeprefix("task.").strip("*.")
    count = name.count(".") + 1
    ends = {".".join(path.split(".")[-count:]) for path in paths}
    suggested = names.nearest(name, {*paths, *ends} if "*" in pattern else paths)
    return suggested if suggested.startswith("Did you mean") else names.nearest(name, paths)
