"""Layouts of a Keras model's variables: by a LayoutMap of axes, or by a table of letters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from lingvo_gshard.core import UserError, explained, letters, names
from lingvo_gshard.core.lazy import keras
from lingvo_gshard.sharding import Mesh, Partitioning, Split

# The layout of a variable: letters such as "MH", or for each dimension an axis, axes or None.
Layout: TypeAlias = "str | Sequence[str | Sequence[str] | None]"
# A `keras.distribution.LayoutMap`, or a table from patterns of paths to layouts.
LayoutTable: TypeAlias = "Mapping[str, Layout] | Any"

WEIGHTS, MOMENTS = "weights", "moments"
# Local letters, for weights without a layout under strategies that split any dimension.
_ANY_LETTERS = "abcdefgh"


def mesh_of(mesh: Mesh | str | Any | None, layout: LayoutTable | None) -> Mesh:
    """Returns the mesh of a text, a `keras.distribution.DeviceMesh` or a LayoutMap."""
    given = mesh if mesh is not None else getattr(layout, "device_mesh", None)
    if given is None:
        raise UserError("`mesh` is missing, such as mesh='data=4,model=2'")
    if isinstance(given, str):
        return Mesh.parse(given)
    if isinstance(given, Mesh):
        return given
    return Mesh(tuple(zip(given.axis_names, map(int, given.shape), strict=True)))


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The splits of the variables and batches of a model.

    Attributes:
      partitioning: the mesh, and the strategy that letters follow.
      table: pattern of a variable's path -> its layout.
      own: path of a variable -> the letters that its layer declares.
      batch_axes: the axes that split the first dimension of batches.
    """

    partitioning: Partitioning
    table: Mapping[str, Layout]
    own: Mapping[str, str]
    batch_axes: tuple[str, ...]

    @classmethod
    def make(
        cls,
        mesh: Mesh | str | Any | None,
        layout: LayoutTable | None,
        strategy: str | None,
        batch_axes: Sequence[str] | str | None,
        own: Mapping[str, str],
    ) -> Layouts:
        """Returns the layouts that options of `fit` describe. Raises UserError for a wrong one."""
        found = mesh_of(mesh, layout)
        partitioning = Partitioning.make(found, strategy or "replicated")
        if batch_axes is None:
            batch_axes = partitioning.split("B")[0] if strategy else found.names[:1]
        axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
        found.parts(axes)
        table = {} if layout is None else {key: _as_layout(layout[key]) for key in layout}
        return cls(partitioning, table, own, axes)

    def of_variable(self, path: str, shape: Sequence[int], kind: str = WEIGHTS) -> Split:
        """Returns the mesh axes that split each dimension of a variable in storage.

        `path` is the `Variable.path` of a weight, `kind` "weights" or "moments" of its optimizer.
        Raises UserError if several patterns match it, or the layout does not fit the shape.
        """
        layout = self._layout_of(path)
        if layout is None:
            return self._by_strategy(shape, kind)
        if len(layout) != len(shape):
            raise UserError(
                f"`layout`: {layout!r} has {len(layout)} dimensions, but {path} has the shape "
                f"{list(shape)}"
            )
        if isinstance(layout, str):
            with explained(f"`layout`: {path}", ValueError):
                letters.check_layout(layout, len(shape))
            split = self.partitioning.split(layout, kind, shape=shape)
        else:
            split = tuple(_axes(entry) for entry in layout)
        # Names an axis that the mesh does not have.
        self.partitioning.parts(axis for axes in split for axis in axes)
        return self.partitioning.storage_split(shape, split)

    def of_batch(self, shape: Sequence[int]) -> Split:
        """Returns the split of an array of a batch: its rows over the axes of batches."""
        split = (self.batch_axes, *((),) * (len(shape) - 1)) if shape else ()
        return self.partitioning.storage_split(shape, split)

    def check_used(self, paths: Sequence[str]) -> None:
        """Raises UserError if a pattern of the table matches none of the paths."""
        for pattern in self.table:
            if not any(_matches(pattern, path) for path in paths):
                raise UserError(
                    f"`layout`: no variable is named {pattern!r}. {names.nearest(pattern, paths)} "
                    "A pattern is a regular expression of the whole path"
                )

    def unused_axes(self, splits: Sequence[Split]) -> list[str]:
        """Returns the axes of several devices that split neither batches nor any of `splits`."""
        used = {axis for split in splits for axes in split for axis in axes} | set(self.batch_axes)
        return [name for name, size in self.partitioning.mesh.axes if size > 1 and name not in used]

    def _layout_of(self, path: str) -> Layout | None:
        matching = [pattern for pattern in self.table if _matches(pattern, path)]
        if path in matching:
            matching = [path]
        if len(matching) > 1:
            raise UserError(f"`layout`: {path} matches several patterns: {', '.join(matching)}")
        return self.table[matching[0]] if matching else self.own.get(path)

    def _by_strategy(self, shape: Sequence[int], kind: str) -> Split:
        """Returns the split of a variable without a layout: whole, unless the strategy is FSDP."""
        if not 0 < len(shape) <= len(_ANY_LETTERS):
            return ((),) * len(shape)
        split = self.partitioning.split(_ANY_LETTERS[: len(shape)], kind, shape=shape)
        return self.partitioning.storage_split(shape, split)


def check_keras() -> None:
    """Raises UserError unless Keras runs on TensorFlow."""
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise UserError(
            f"Keras runs on {backend}; start Python with KERAS_BACKEND=tensorflow in the "
            "environment, or train with Keras's own distribution API"
        )


def _as_layout(value: Any) -> Layout:
    """Returns a layout, also of a `keras.distribution.TensorLayout`."""
    return value if isinstance(value, str) else tuple(getattr(value, "axes", value))


def _axes(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _matches(pattern: str, path: str) -> bool:
    with explained(f"`layout`: {pattern!r} is no regular expression", re.error):
        return pattern == path or re.fullmatch(pattern, path) is not None
