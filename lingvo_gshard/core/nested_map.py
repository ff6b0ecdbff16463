"""NestedMap: a dictionary with attribute access, for trees of weights, moments and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lingvo_gshard.core.config import names


class NestedMap(dict):
    """A dict with attribute access whose values are leaves, NestedMaps, or lists of these.

    tf.nest treats it as a dict, so that `tf.nest.map_structure` and tf.function accept it. Leaves
    are visited in the order of sorted keys, as in tf.nest.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"No key {name!r}. {names.nearest(name, self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"No key {name!r}. {names.nearest(name, self)}") from None

    def flatten_items(self) -> list[tuple[str, Any]]:
        """Returns (dotted path, leaf) pairs in the order of sorted keys."""
        return list(_walk(self, ""))

    def flatten(self) -> list[Any]:
        """Returns the leaves in the order of `flatten_items`."""
        return [leaf for _, leaf in _walk(self, "")]

    def pack(self, leaves: Iterable[Any]) -> NestedMap:
        """Returns a map of this structure with other leaves, in the order of `flatten`.

        Raises:
          ValueError: The number of leaves differs.
        """
        leaves = list(leaves)
        count = len(self.flatten())
        if len(leaves) != count:
            raise ValueError(f"pack: {len(leaves)} leaves given for a structure of {count}")
        return _rebuild(self, iter(leaves))

    def transform(self, function: Callable[[Any], Any]) -> NestedMap:
        """Returns a map of this structure with `function` applied to every leaf."""
        return self.pack(function(leaf) for leaf in self.flatten())

    def transform_with_path(self, function: Callable[[str, Any], Any]) -> NestedMap:
        """Returns a map of this structure with `function(path, leaf)` for every leaf."""
        return self.pack(function(path, leaf) for path, leaf in self.flatten_items())


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key in sorted(node):
            yield from _walk(node[key], f"{path}.{key}" if path else key)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _walk(value, f"{path}[{index}]")
    else:
        yield path, node


def _rebuild(node: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(node, dict):
        built = NestedMap({key: _rebuild(node[key], leaves) for key in sorted(node)})
        return NestedMap({key: built[key] for key in node})
    if isinstance(node, (list, tuple)):
        return type(node)([_rebuild(value, leaves) for value in node])
    return next(leaves)
