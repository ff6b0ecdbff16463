"""Names the arguments and results of a jax program as dotted paths, such as `state.params.w`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lingvo_gshard.core.lazy import ir, jax, jax_export

_NAMED = re.compile(r'loc\("(.+?)"(?:\(.*\))?\)')
_KEY = re.compile(r"\[\\?['\"](.*?)\\?['\"]\]")


def argument_paths(
    exported: jax_export.Exported, kept: Sequence[int], locations: Sequence[ir.Location]
) -> list[str]:
    """Returns the paths of the arguments that a program kept.

    jax names an argument by the function's parameter, as the location of the module's argument. If
    locations were stripped, the paths are those in the tree of arguments.

    Args:
      exported: the program.
      kept: indices among all arguments of those that the program uses.
      locations: the location of each of these arguments in the module.
    """
    named = [_NAMED.fullmatch(str(location)) for location in locations]
    if all(named):
        return [_dotted(match[1]) for match in named if match]
    return [_paths_in_tree(exported)[index] for index in kept]


def result_path(info: str, index: int) -> str:
    """Returns the path of a result; `info` is jax's name for it, or empty."""
    return _dotted(info) if info else f"result[{index}]"


def _paths_in_tree(exported: jax_export.Exported) -> list[str]:
    leaves = range(exported.in_tree.num_leaves)
    tree = jax.tree_util.tree_unflatten(exported.in_tree, leaves)
    paths = []
    for (kind, *path), _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = jax.tree_util.keystr(path)
        paths.append(_dotted(f"arguments{keys}" if kind.idx == 0 else keys))
    return paths


def _dotted(name: str) -> str:
    return _KEY.sub(r".\1", name).lstrip(".")
