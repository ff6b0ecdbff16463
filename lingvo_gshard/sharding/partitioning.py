"""Partitioning: what is split, and where, decided in one place."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lingvo_gshard.core.config import names
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.letters import POSITIONS, check_layout
from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split, Strategy

_OVERRIDES = "sharding.overrides"


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """A mesh, a strategy on it, and the layers in which some letters are split otherwise.

    overrides: (pattern, letters) pairs. A pattern is the path of a layer or weight, such as
        `task.encoder.layers[1].feed_forward`, with "*" for any text and "?" for any character; it
        holds for all that is below as well. Of several that match the last one has a letter.
    taken: axes that no letter of a layout may claim; see `behind`.
    """

    mesh: Mesh
    strategy: Strategy
    overrides: tuple[tuple[str, Strategy], ...] = ()
    taken: tuple[str, ...] = ()

    @classmethod
    def make(
        cls, mesh: Mesh | str, strategy: str, overrides: Mapping[str, str] | None = None
    ) -> Partitioning:
        """Returns a partitioning from text: `data=4,model=2`, `expert_tensor`, pattern -> table.

        An override's table is written as in strategies.py: `H->model`, `weights: H->none`.
        Raises ValueError, naming the flag or the pattern, for what is unknown in any of them.
        """
        mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        tables = []
        for pattern, text in (overrides or {}).items():
            where = f"{_OVERRIDES}[{pattern!r}]"
            if not isinstance(text, str) or "->" not in text:
                raise ValueError(f"{where}={text}; expected a table of letters, as in H->model")
            tables.append((pattern, strategies.get(text, mesh, where)))
        return cls(mesh, strategies.get(strategy, mesh), tuple(tables))

    @property
    def unused_axes(self) -> tuple[str, ...]:
        """Axes of more than one device over which nothing is split: those devices do the same."""
        used = self.strategy.axes.union(*(table.axes for _, table in self.overrides))
        return tuple(name for name, size in self.mesh.axes if size > 1 and name not in used)

    def split(
        self,
        layout: str,
        kind: str = "activations",
        path: str = "",
        unsplit: str = "",
        reserved: str = "",
    ) -> Split:
        """Returns each dimension's axes; the first letter to claim an axis has it, L and K last.

        kind: 'activations', 'weights' or 'moments'. path: of the layer or weight, for overrides.
        unsplit: letters that stay whole in this tensor. reserved: letters that the tensor lacks but
        tensors it is used with have; no dimension of it may take their axes.
        Raises ValueError for an unknown letter.
        """
        check_layout(layout + reserved, None)
        rules = dict(self.strategy.table(kind))
        for pattern, override in self.overrides:
            if matches_path(pattern, path):
                rules.update(override.table(kind))
        split: dict[str, tuple[str, ...]] = {}
        claimed = set(self.taken)
        for letter in sorted(layout + reserved, key=lambda letter: letter in POSITIONS):
            wanted = () if letter in unsplit else rules.get(letter, ())
            split[letter] = tuple(axis for axis in wanted if axis not in claimed)
            claimed.update(split[letter])
        return tuple(split[letter] for letter in layout)

    def behind(self, letter: str) -> Partitioning:
        """Returns the partitioning of slices of stacks along `letter`, whose axes are taken."""
        return dataclasses.replace(self, taken=self.split(letter)[0])

    def spec_split(self, spec: VariableSpec, kind: str = "weights") -> Split:
        """Returns the split of a weight or, with kind 'moments', of an optimizer moment."""
        return self.split(spec.layout, kind, spec.path, spec.unsplit)

    def parts(self, axes: Iterable[str]) -> int:
        """Returns into how many parts a dimension is cut that is split over `axes`."""
        return math.prod(self.mesh.axis_size(axis) for axis in axes)

    def storage_split(self, shape: Sequence[int], split: Split) -> Split:
        """Returns the split in which an array is kept between steps.

        jax holds arrays in equal parts only: a dimension that does not divide is kept whole, and
        split, with padding, while it is computed with.
        """
        return tuple(
            axes if size % self.parts(axes) == 0 else ()
            for size, axes in zip(shape, split, strict=True)
        )

    def spec_storage_split(self, spec: VariableSpec, kind: str = "weights") -> Split:
        """Returns the split in which a weight or an optimizer moment is kept between steps."""
        return self.storage_split(spec.shape, self.spec_split(spec, kind))

    def check_overrides(self, paths: Iterable[str]) -> None:
        """Raises ValueError naming an override that matches no path of these layers or weights."""
        paths = list(paths)
        for pattern, _ in self.overrides:
            if not any(matches_path(pattern, path) for path in paths):
                raise ValueError(
                    f"{_OVERRIDES}: no layer or weight is named {pattern!r}. "
                    f"{names.nearest(pattern.removeprefix('task.'), paths)}"
                )


def matches_path(pattern: str, path: str) -> bool:
    """Returns whether a pattern is a layer's or weight's path, or that of a layer around it.

    A path begins below the task: `encoder.layers[1]` is `task.encoder.layers[1]` among the Params.
    """
    pattern = pattern.replace("[", "[[]")
    steps = ["task", *filter(None, path.partition("/")[0].split("."))]
    around = [".".join(steps[:end]) for end in range(1, len(steps) + 1)]
    return any(
        fnmatch.fnmatchcase(name, pattern)
        or fnmatch.fnmatchcase(name.removeprefix("task."), pattern)
        for name in around
    )


_current: contextvars.ContextVar[Partitioning | None] = contextvars.ContextVar(
    "partitioning", default=None
)


def current_partitioning() -> Partitioning | None:
    """Returns the partitioning that annotations follow, or None where there is none."""
    return _current.get()


@contextlib.contextmanager
def use_partitioning(partitioning: Partitioning | None) -> Iterator[Partitioning | None]:
    """Makes annotations follow a partitioning, or none, while a function is traced."""
    token = _current.set(partitioning)
    try:
        yield partitioning
    finally:
        _current.reset(token)
