"""Groups of weights: those that a hyperparameter of the optimizer means, by patterns of paths.

A pattern is the path of a layer or weight, such as `encoder.layers[1].feed_forward`, with "*" for
any text and "?" for any character; it holds for all that is below, as in `sharding.overrides`. The
weights of a loop over layers go by the paths that they would have without the loop as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from lingvo_gshard.core import letters
from lingvo_gshard.core.config import names
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.partitioning import matches_path


def is_vector(spec: VariableSpec) -> bool:
    """Whether a weight is a scalar or a vector, such as a bias or a norm's scale, or a stack."""
    return len(spec.layout.lstrip(letters.WEIGHT_BATCH)) < 2


def matches(pattern: str, spec: VariableSpec) -> bool:
    """Returns whether a pattern means this weight.

    Raises ValueError if it means some layers of a loop and not others: those are one weight.
    """
    if matches_path(pattern, spec.path):
        return True
    found = [matches_path(pattern, path) for path in spec.slices]
    if any(found) and not all(found):
        path = spec.slices[found.index(False)]
        raise ValueError(
            f"the pattern {pattern!r} means only some of the layers that are one loop, "
            f"{spec.path}; {path} would have to be another weight"
        )
    return any(found)


def check(where: str, patterns: Iterable[str], specs: NestedMap) -> None:
    """Raises ValueError, naming `where`, for a pattern that is no string or means no weight."""
    weights = specs.flatten()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"{where}: {pattern!r}; a pattern of paths expected, as in '*.bias'")
        try:
            found = [spec for spec in weights if matches(pattern, spec)]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not found:
            paths = [spec.path for spec in weights]
            raise ValueError(
                f"{where}: no layer or weight is named {pattern!r}. "
                f"{names.nearest(pattern.removeprefix('task.'), paths)}"
            )
